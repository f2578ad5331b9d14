"""The pace of moves: bytes per step while steps run, no limit while none does."""

import threading

from scheduler.peer_channel import Pace


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
    assert not third.wait(0.05), "what the first step left over is lost"
    pace.rest()
    assert third.wait(5)


def test_nothing_waits_while_no_step_runs() -> None:
    pace = Pace(10)
    for _ in range(50):
        pace.take(10)
