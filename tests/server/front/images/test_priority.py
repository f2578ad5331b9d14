"""The encoder's thread has the policy SCHED_IDLE, and a niceness while all processors are busy. Real threads, a simulated load."""

import os
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from server.front.images.priority import NICENESS, PoliteWorker, ProcessorTimes, processor_times


def priority_of(_order: None) -> tuple[int, int, int]:
    """Return the policy, niceness and number of torch's threads of the calling thread."""
    return os.sched_getscheduler(0), os.getpriority(os.PRIO_PROCESS, 0), torch.get_num_threads()


@pytest.fixture
def thread() -> Iterator[ThreadPoolExecutor]:
    """A thread that a worker may lower the priority of: only privileged ones can raise it again."""
    with ThreadPoolExecutor(1) as threads:
        yield threads


class Load:
    """Times of processors of which a number is spare."""

    def __init__(self) -> None:
        self.spare = 0.0
        self._now = ProcessorTimes(10.0, 5.0)

    def read(self) -> ProcessorTimes:
        self._now = ProcessorTimes(self._now.clock_s + 2.0, self._now.spare_s + 2.0 * self.spare)
        return self._now


def test_an_image_waits_for_idle_processors_unless_all_are_busy(thread: ThreadPoolExecutor) -> None:
    def run() -> list[tuple[int, int, int]]:
        load, found = Load(), []
        worker = PoliteWorker(1, load.read)
        for load.spare in (0.0, 1.5, 0.1, 0.3):
            worker.observe()
            found.append(worker.run(priority_of, None))
        return found

    niceness = os.getpriority(os.PRIO_PROCESS, 0)
    busy, idle = ((policy, min(niceness + NICENESS, 19), 1) for policy in (os.SCHED_OTHER, os.SCHED_IDLE))
    assert thread.submit(run).result() == [busy, idle, busy, idle]


def test_an_error_reaches_the_caller(thread: ThreadPoolExecutor) -> None:
    def fail(order: str) -> None:
        raise ValueError(order)

    with pytest.raises(ValueError, match="this image"):
        thread.submit(lambda: PoliteWorker(1).run(fail, "this image")).result()


def test_spare_time_grows_by_at_most_the_clock_of_all_processors() -> None:
    before = processor_times()
    pause = threading.Event()
    pause.wait(0.2)
    after = processor_times()
    passed_s = after.clock_s - before.clock_s
    # The kernel may correct the time of waiting for disks downwards.
    assert -0.1 <= after.spare_s - before.spare_s <= passed_s * len(os.sched_getaffinity(0)) + 0.1
