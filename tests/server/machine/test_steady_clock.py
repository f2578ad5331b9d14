"""The clock for expiry: jumps of the calendar do not move it."""

import pytest

from server.machine.steady_clock import GRACE_S, SteadyClock, taken_over

DAY_S = 86_400.0


def test_a_calendar_that_jumps_moves_it_by_nothing() -> None:
    calendar_s, passed_s = 1000.0, 50.0
    clock = SteadyClock(lambda: calendar_s, lambda: passed_s)
    assert clock() == 1000.0
    calendar_s += 30 * DAY_S
    assert clock() == 1000.0
    passed_s += 5.0
    calendar_s = 0.0
    assert clock() == 1005.0


def test_without_jumps_it_is_the_calendar() -> None:
    assert SteadyClock()() == pytest.approx(SteadyClock()(), abs=5.0)


@pytest.mark.parametrize(
    ("expires_at", "expected"),
    [
        (100 * DAY_S + 7200, 100 * DAY_S + 7200),  # unchanged
        (70 * DAY_S, 100 * DAY_S + GRACE_S),  # seems long over
        (500 * DAY_S, 130 * DAY_S),  # seems to come from the future
    ],
)
def test_what_is_taken_over_expires_neither_at_once_nor_never(expires_at: float, expected: float) -> None:
    assert taken_over(expires_at, now_s=100 * DAY_S, lifetime_s=30 * DAY_S) == expected
