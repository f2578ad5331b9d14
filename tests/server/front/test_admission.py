"""Limits on open requests, and when a refused request should be retried."""

from typing import Any

import pytest

from server.front.admission import MOST_S, WINDOW_S, Admission
from server.front.errors import ApiError


def check(
    admission: Admission,
    num_more: int = 1,
    *,
    num_open: int,
    num_own: int | None = None,
    num_keys: int = 1,
    num_waiting: int = 0,
    now_s: float = 0.0,
) -> None:
    own = num_open if num_own is None else num_own
    admission.check(
        num_more, num_open=num_open, num_own=own, num_keys=num_keys, num_waiting=num_waiting, now_s=now_s
    )


def refusal_of(admission: Admission, num_more: int = 1, **how: Any) -> ApiError:
    with pytest.raises(ApiError) as caught:
        check(admission, num_more, **how)
    return caught.value


def test_a_key_with_less_than_its_part_is_taken_when_another_one_has_filled_the_places() -> None:
    admission = Admission(6)
    check(admission, num_open=6, num_own=0, num_keys=2)
    check(admission, num_open=8, num_own=2, num_keys=2)
    assert refusal_of(admission, num_open=9, num_own=3, num_keys=2).status == 429
    assert refusal_of(admission, num_open=9, num_own=6, num_keys=2).status == 429, "the flooding key's own"
    check(admission, num_open=9, num_own=1, num_keys=3)


def test_as_many_as_are_allowed_are_taken_and_one_more_is_told_to_come_back() -> None:
    admission = Admission(3)
    for num_open in range(3):
        check(admission, num_open=num_open)
    refused = refusal_of(admission, num_open=3)
    assert refused.status == 429 and "3 (--max-num-queued-reqs)" in refused.message
    check(admission, num_open=2)
    assert refusal_of(admission, 2, num_open=2).status == 429, "every choice takes a place"
    assert admission.num_refused == 3


def test_a_request_that_would_be_refused_every_time_is_not_told_to_come_back() -> None:
    refused = refusal_of(Admission(3), 4, num_open=0)
    assert refused.status == 400 and "Retry-After" not in refused.headers
    admission = Admission(3)
    refusal_of(admission, 4, num_open=0)
    assert admission.num_refused == 0, "it was invalid, not refused for lack of places"


def test_keys_that_come_one_after_the_other_fill_twice_the_places_at_most() -> None:
    admission, num_open = Admission(12), 0
    for key in range(10):
        own = 0
        while own < 12:
            try:
                check(admission, num_open=num_open, num_own=own, num_keys=key + 1)
            except ApiError:
                break
            own, num_open = own + 1, num_open + 1
    assert num_open == 24


def test_behind_a_quiet_time_the_pace_is_that_of_those_that_began() -> None:
    admission = Admission(1)
    for number in range(32):
        admission.note_begun(100 + number / 32)
    refused = refusal_of(admission, num_open=64, num_waiting=32, now_s=101.0)
    assert refused.headers["Retry-After"] == "1"


def test_the_time_to_come_back_follows_the_measured_pace() -> None:
    admission = Admission(1)
    for number in range(60):  # two a second
        admission.note_begun(number / 2)
    refused = refusal_of(admission, num_open=1, num_waiting=13, now_s=WINDOW_S - 0.5)
    assert refused.headers["Retry-After"] == "7"
    assert refusal_of(admission, num_open=1, num_waiting=0, now_s=29.5).headers["Retry-After"] == "1"
    assert refusal_of(admission, num_open=1, num_waiting=9999, now_s=29.5).headers["Retry-After"] == str(
        MOST_S
    )


def test_where_nothing_begins_any_more_it_is_a_whole_window() -> None:
    admission = Admission(1)
    admission.note_begun(0.0)
    refused = refusal_of(admission, num_open=1, num_waiting=1, now_s=WINDOW_S)
    assert refused.headers["Retry-After"] == "30"


def test_without_a_bound_everything_is_taken() -> None:
    check(Admission(None), 1000, num_open=10**6)
