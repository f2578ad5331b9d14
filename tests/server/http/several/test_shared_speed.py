"""The speed of all fronts in the figures of the leading one."""

import errno
from pathlib import Path

import pytest

from server.front.several.seat import Seat
from server.http.observability.series import EVERY_S
from server.http.observability.throughput import Throughput
from server.http.several import shared_speed
from server.http.several.shared_speed import SharedSpeed
from tests.server.front.several.test_board import boards
from tests.support.clock import Clock


def test_the_leading_front_shows_the_requests_of_all_as_if_they_were_its_own(tmp_path: Path) -> None:
    """The oracle is one front with all requests."""
    clock = Clock()
    figures = [Throughput(clock=clock, calendar=clock) for _ in range(3)]
    leading, other, alone = figures
    shared = [
        SharedSpeed(each, Seat(board.number, 2, tmp_path, tmp_path, board, 0, 0))
        for each, board in zip(figures, boards(tmp_path), strict=False)
    ]
    for period in range(4):
        for front, gap_s in ((leading, 0.1), (other, 0.4)):
            for throughput in (front, alone):
                throughput.note_first_token(gap_s, num_prompt_tokens=7)
                throughput.note_tokens(5, {gap_s: 5})
                throughput.note_end(3 * gap_s)
                throughput.note_status(429 if period else 500)
        clock.now_s += EVERY_S
        for throughput in figures:
            throughput.tick(logs=False)
        if period != 1:  # the two do not count at the same time
            shared[1].exchange()
        shared[0].exchange()
    shared[1].exchange()
    shared[0].exchange()
    ours, expected = leading.speed(), alone.speed()
    assert ours == expected
    assert (
        leading.to_json()["http_errors"] == alone.to_json()["http_errors"] == {"4xx": 0, "429": 6, "5xx": 2}
    )


def test_a_full_disk_only_leaves_out_periods(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(_path: Path, _text: str) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    clock = Clock()
    leading, other = (Throughput(clock=clock, calendar=clock) for _ in range(2))
    taking, giving = (
        SharedSpeed(each, Seat(board.number, 2, tmp_path, tmp_path, board, 0, 0))
        for each, board in zip((leading, other), boards(tmp_path), strict=True)
    )
    for is_full in (True, False):
        with monkeypatch.context() as patch:
            if is_full:
                patch.setattr(shared_speed, "replace_text", fail)
            other.note_tokens(3, {})
            clock.now_s += EVERY_S
            other.tick(logs=False)
            giving.exchange()
            taking.exchange()
        assert leading._now.output_tokens == (0 if is_full else 6)


def test_a_replacement_starts_to_count_from_its_first_period(tmp_path: Path) -> None:
    clock = Clock()
    leading, other = (Throughput(clock=clock, calendar=clock) for _ in range(2))
    first, second = boards(tmp_path)
    taking = SharedSpeed(leading, Seat(0, 2, tmp_path, tmp_path, first, 0, 0))

    def work(giving: SharedSpeed, throughput: Throughput, num_tokens: int) -> None:
        throughput.note_tokens(num_tokens, {})
        clock.now_s += EVERY_S
        throughput.tick(logs=False)
        giving.exchange()

    giving = SharedSpeed(other, Seat(1, 2, tmp_path, tmp_path, second, 0, 0))
    for _ in range(3):
        work(giving, other, 1)
        taking.exchange()
    second.begin()
    second._own[0] = 1  # another process
    fresh = Throughput(clock=clock, calendar=clock)
    work(SharedSpeed(fresh, Seat(1, 2, tmp_path, tmp_path, second, 0, 0)), fresh, 10)
    taking.exchange()
    taking.exchange()
    assert leading._now.output_tokens == 13
