"""Run the encoder's work with a scheduling policy that leaves the processors to ranks, but never starves.

Linux treats a processor that runs only threads of SCHED_IDLE as an idle one: a thread of a rank that wakes is put there and runs
at once. Next to a thread with a niceness, it often waits, and each layer of a decode wakes threads. benchmarks/images.py compares
both. But on processors that are always busy, a thread of SCHED_IDLE gets 0.3 % of one. There, the work runs with a niceness,
which gets about a tenth. A thread without privileges cannot leave SCHED_IDLE, so each policy has its own thread.

Sources: sched(7); `sched_idle_cpu` in Linux's kernel/sched/fair.c.
"""

import os
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple, TypeVar

import torch

NICENESS = 10  # other processes of this machine take ten times as much
FEW_PROCESSORS = 0.2  # that other work leaves: fewer than these are too few for SCHED_IDLE
_SAMPLE_S = 1.0
_Order = TypeVar("_Order")
_Answer = TypeVar("_Answer")


class ProcessorTimes(NamedTuple):
    """Times since the start of the machine, in seconds."""

    clock_s: float
    spare_s: float  # of all processors that this process may use: idle, or busy with work of low priority


def processor_times() -> ProcessorTimes:
    """Read /proc/stat."""
    usable = {f"cpu{number}" for number in os.sched_getaffinity(0)}
    with open("/proc/stat") as file:
        lines = [line.split() for line in file]
    # Columns: name, user, nice, system, idle, iowait.
    ticks = sum(int(line[column]) for line in lines if line[0] in usable for column in (2, 4, 5))
    return ProcessorTimes(time.monotonic(), ticks / os.sysconf("SC_CLK_TCK"))


class PoliteWorker:
    """Runs one function at a time, in a thread with the policy that fits the observed load."""

    def __init__(self, num_threads: int, read_times: Callable[[], ProcessorTimes] = processor_times) -> None:
        """Lower the priority of the calling thread and of those that it starts.

        Args:
            num_threads: Threads of torch in each thread.
            read_times: Reads the clock and the spare time of processors.
        """
        os.nice(NICENESS)
        self._read_times, self._last = read_times, read_times()
        self._spare = 0.0  # processors, between the last two observations
        self._threads = {
            policy: ThreadPoolExecutor(1, initializer=_prepare_thread, initargs=(policy, num_threads))
            for policy in (os.SCHED_IDLE, os.SCHED_OTHER)
        }

    def start(self) -> None:
        """Observe the processors every second, as long as this process runs."""
        threading.Thread(target=self._observe_forever, daemon=True).start()

    def run(self, work: Callable[[_Order], _Answer], order: _Order) -> _Answer:
        """Call a function and return its result."""
        policy = os.SCHED_OTHER if self._spare < FEW_PROCESSORS else os.SCHED_IDLE
        return self._threads[policy].submit(work, order).result()

    def observe(self) -> None:
        """Note how many processors were spare since the last observation."""
        before, self._last = self._last, self._read_times()
        passed_s = max(self._last.clock_s - before.clock_s, 1e-3)
        self._spare = (self._last.spare_s - before.spare_s) / passed_s

    def _observe_forever(self) -> None:
        while True:
            time.sleep(_SAMPLE_S)
            self.observe()


def _prepare_thread(policy: int, num_threads: int) -> None:
    os.sched_setscheduler(0, policy, os.sched_param(0))  # 0 is this thread
    torch.set_num_threads(num_threads)
