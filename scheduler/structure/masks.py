"""Computes the masks of structures in threads, and bounds how long a step waits for them.

A mask usually takes a fraction of a millisecond, but a strange grammar can make it take tens of them for each choice of
a request, and all requests of all ranks share a step. So threads compute a request's next mask from the planning of a
step on, while the model runs; llguidance releases the interpreter's lock. A step waits at most WAIT_S for all its masks
together. A request without its mask by then sits out: the scheduler parks it until the mask is ready. Requests with
quick earlier masks come first.

A request also has a budget of processor time that grows with its tokens. Exceeding it ends the request with an error.
Rejected: a wall-clock limit, which would end requests on a busy machine; a process per request, because a mask costs
less than a message."""

import contextlib
import itertools
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from queue import PriorityQueue
from typing import NamedTuple

import numpy as np

WAIT_S = 0.02  # most that a step waits for all its masks
NUM_THREADS = 2
MASK_BUDGET_S, MASK_BUDGET_PER_TOKEN_S = 0.2, 0.001  # processor time of one request
# llguidance recurses along a chain of references; untouched pages use no memory.
STACK_BYTES = 64 << 20


class Mask(NamedTuple):
    """The allowed next tokens, or why they are unknown."""

    bits: np.ndarray | None  # a bit per token, lowest first; None if there is a `failure`
    failure: str = ""
    cpu_s: float = 0.0


class _Job(NamedTuple):
    quickness_s: float  # duration of the request's last mask; smallest first
    number: int  # then by order of arrival
    compute: Callable[[], Mask] | None  # None ends a thread
    result: "Future[Mask]"


class MaskThreads:
    """Mask threads, and the present step's remaining wait. Any thread may call `start`; the rest is for the step loop."""

    def __init__(self, *, wait_s: float = WAIT_S, num_threads: int = NUM_THREADS) -> None:
        self._wait_s = self._left_s = wait_s
        self._jobs: PriorityQueue[_Job] = PriorityQueue()
        self._numbers = itertools.count()
        self._num_threads, self._threads = num_threads, list[threading.Thread]()
        self._lock = threading.Lock()

    def start(self, compute: Callable[[], Mask], last_s: float) -> "Future[Mask]":
        """Compute a mask in a thread.

        Args:
            last_s: Duration of the request's last mask.
        """
        result: Future[Mask] = Future()
        with self._lock:
            if not self._threads:
                self._threads = _threads_with_stack(self._run, self._num_threads)
        self._jobs.put(_Job(last_s, next(self._numbers), compute, result))
        return result

    def begin_step(self) -> None:
        """Reset the time that the coming step may wait."""
        self._left_s = self._wait_s

    def wait(self, mask: "Future[Mask]") -> bool:
        """Wait for a mask for as long as the step may. Returns whether it is ready."""
        begun_s = time.monotonic()
        with contextlib.suppress(TimeoutError):
            mask.exception(max(self._left_s, 0.0))
        self._left_s -= time.monotonic() - begun_s
        return mask.done()

    def close(self) -> None:
        """End the threads after their present masks."""
        with self._lock:
            for _ in self._threads:
                self._jobs.put(_Job(-1.0, next(self._numbers), None, Future()))
            self._threads = []

    def _run(self) -> None:
        while (job := self._jobs.get()).compute is not None:
            try:
                job.result.set_result(job.compute())
            except Exception as error:  # noqa: BLE001 - the request ends with it; the thread continues
                job.result.set_result(Mask(None, f"its mask cannot be computed: {error!r}"))


def _threads_with_stack(run: Callable[[], None], count: int) -> list[threading.Thread]:
    """Start threads. The stack size is a setting of the process that applies to threads started after it is set."""
    before = threading.stack_size(STACK_BYTES)
    try:
        threads = [threading.Thread(target=run, name=f"masks-{at}", daemon=True) for at in range(count)]
        for thread in threads:
            thread.start()
    finally:
        threading.stack_size(before)
    return threads
