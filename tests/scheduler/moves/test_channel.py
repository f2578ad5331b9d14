"""The pace of moves: limited bytes and work per step while steps run, unlimited between them."""

import threading

from expert_placement.moves import BUSY_PART
from scheduler.moves.channel import LEAST_BUSY_S, PIECE_BYTES, Pace
from tests.support.clock import Clock


def begin(pace: Pace, num_bytes: int) -> threading.Event:
    done = threading.Event()

    def take() -> None:
        pace.take(num_bytes)
        done.set()

    threading.Thread(target=take, daemon=True).start()
    return done


def test_a_step_lets_its_bytes_go_and_no_more() -> None:
    pace = Pace(100)
    pace.step()
    pace.take(60)
    second = begin(pace, 60)
    assert not second.wait(0.05)
    pace.step()
    assert second.wait(5)
    third = begin(pace, 60)
    assert not third.wait(0.05), "the unused budget of the first step must be lost"
    pace.rest()
    assert third.wait(5)


def test_nothing_waits_while_no_step_runs() -> None:
    pace = Pace(10)
    for _ in range(50):
        pace.take(10)


def test_work_beyond_a_steps_part_is_made_up_for_by_steps_without_any() -> None:
    clock, worked, step_s = Clock(), Clock(), 0.02
    pace = Pace(1 << 30, clock=clock, work_clock=worked)
    pace.step()
    pace.take(0)
    worked.now_s += 2.5 * BUSY_PART * step_s  # such as hashing a piece and trying out an expert
    waiting = begin(pace, 0)
    for _ in range(2):
        clock.now_s += step_s
        pace.step()
        assert not waiting.wait(0.05)
    clock.now_s += step_s
    pace.step()
    assert waiting.wait(5)


def test_even_the_shortest_step_lets_some_work_be_done() -> None:
    worked = Clock()
    pace = Pace(1 << 30, clock=Clock(), work_clock=worked)
    pace.step()
    pace.take(0)
    worked.now_s += LEAST_BUSY_S
    pace.step()
    assert begin(pace, 0).wait(5)


def test_work_while_nothing_runs_is_owed_to_no_step() -> None:
    worked = Clock()
    pace = Pace(1 << 30, clock=Clock(), work_clock=worked)
    pace.take(0)
    worked.now_s += 10.0
    pace.take(0)
    pace.step()
    assert begin(pace, 0).wait(5)
    worked.now_s += 10.0
    waiting = begin(pace, 0)
    assert not waiting.wait(0.05)
    pace.rest()
    assert waiting.wait(5)


def test_bytes_go_in_pieces_that_no_step_feels() -> None:
    assert Pace(1 << 30).piece_bytes == PIECE_BYTES
    assert Pace(5000).piece_bytes == 5000
