"""Computes what structures allow beside the step loop, and bounds how long a step waits for that.

A mask usually takes a fraction of a millisecond. A strange grammar can make it take tens of them, for each of a request's choices, and a
step is shared by all requests of all ranks. So threads compute a request's next mask from when a step is planned, while the
model runs; llguidance releases the interpreter's lock. All masks of a step together are waited for WAIT_S. A request whose mask
is not ready by then sits out: the scheduler parks it, and it goes on when its mask is there. What was quick before is computed first.

A request also has a budget of processor time. It grows with the request's tokens, and what exceeds it ends with an error.
Rejected: a limit by the clock, which would end requests of a machine that is busy; a process per request (a mask costs less than a message).
"""

import contextlib
import itertools
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from queue import PriorityQueue
from typing import NamedTuple

import numpy as np

WAIT_S = 0.02  # of one step, for all its masks
NUM_THREADS = 2
MASK_BUDGET_S, MASK_BUDGET_PER_TOKEN_S = 0.2, 0.001  # of processor time, of one request
STACK_BYTES = (
    64 << 20
)  # llguidance recurses along a chain of references; pages that nobody touches cost nothing


class Mask(NamedTuple):
    """What may come next, or why that is not known."""

    bits: np.ndarray | None  # a bit per token, the lowest first; None: see `failure`
    failure: str = ""
    cpu_s: float = 0.0


class _Job(NamedTuple):
    quickness_s: float  # what the mask before took: the smallest first
    number: int  # then in order
    compute: Callable[[], Mask] | None  # None ends a thread
    result: "Future[Mask]"


class MaskThreads:
    """The threads, and how long the present step may still wait. `start` may be called from any thread, the rest by the step loop."""

    def __init__(self, *, wait_s: float = WAIT_S, num_threads: int = NUM_THREADS) -> None:
        self._wait_s = self._left_s = wait_s
        self._jobs: PriorityQueue[_Job] = PriorityQueue()
        self._numbers = itertools.count()
        self._num_threads, self._threads = num_threads, list[threading.Thread]()
        self._lock = threading.Lock()

    def start(self, compute: Callable[[], Mask], last_s: float) -> "Future[Mask]":
        """Compute a mask beside the caller.

        Args:
            last_s: how long the request's mask before took.
        """
        result: Future[Mask] = Future()
        with self._lock:
            if not self._threads:
                self._threads = _threads_with_stack(self._run, self._num_threads)
        self._jobs.put(_Job(last_s, next(self._numbers), compute, result))
        return result

    def begin_step(self) -> None:
        """Give the coming step its time to wait."""
        self._left_s = self._wait_s

    def wait(self, mask: "Future[Mask]") -> bool:
        """Wait for a mask, as long as the step may; returns whether it is there."""
        begun_s = time.monotonic()
        with contextlib.suppress(TimeoutError):
            mask.exception(max(self._left_s, 0.0))
        self._left_s -= time.monotonic() - begun_s
        return mask.done()

    def close(self) -> None:
        """End the threads once they have computed what they are at."""
        with self._lock:
            for _ in self._threads:
                self._jobs.put(_Job(-1.0, next(self._numbers), None, Future()))
            self._threads = []

    def _run(self) -> None:
        while (job := self._jobs.get()).compute is not None:
            try:
                job.result.set_result(job.compute())
            except Exception as error:  # noqa: BLE001 - the request ends with it, the thread goes on
                job.result.set_result(Mask(None, f"its mask cannot be computed: {error!r}"))


def _threads_with_stack(run: Callable[[], None], count: int) -> list[threading.Thread]:
    """Start threads; the size of stacks is a setting of the process, for threads that start from then on."""
    before = threading.stack_size(STACK_BYTES)
    try:
        threads = [threading.Thread(target=run, name=f"masks-{at}", daemon=True) for at in range(count)]
        for thread in threads:
            thread.start()
    finally:
        threading.stack_size(before)
    return threads
