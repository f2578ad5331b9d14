"""Generate a load: clients that send one request after another, or requests at given times.

A closed loop (a number of clients) measures the capacity of a service; an open loop (a rate, or a trace's times) measures
what its users see, because a slow service does not slow arrivals down. Arrivals at a rate are a Poisson process. An open
loop sends a request late only if the machine is too busy, and reports the delay. Neither loop depends on HTTP.
"""

import asyncio
import random
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Iterator
from typing import Any, TypeVar

from server.api.openai.batches.bulk_client import for_each

Job = TypeVar("Job")
Clock = Callable[[], float]


async def closed_loop(
    work: Callable[[Job], Awaitable[None]],
    jobs: Iterable[Job],
    *,
    concurrency: int,
    duration_s: float | None = None,
    clock: Clock = time.perf_counter,
) -> None:
    """Process jobs, `concurrency` at once. No job starts after `duration_s`; started jobs are finished."""
    begun_s = clock()

    def in_time() -> Iterator[Job]:
        for job in jobs:
            if duration_s is not None and clock() - begun_s >= duration_s:
                return
            yield job

    await for_each(in_time(), work, concurrency=concurrency)


async def open_loop(
    work: Callable[[Job, float], Coroutine[Any, Any, None]],
    jobs: Iterable[tuple[float, Job]],
    *,
    clock: Clock = time.perf_counter,
    sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
) -> None:
    """Start each job at its time, regardless of the others, and wait for all.

    Args:
        work: Function of a job and its scheduled time on the clock.
        jobs: Pairs of a time after the start, in seconds, and a job, in the order of the times.
    """
    begun_s = clock()
    async with asyncio.TaskGroup() as group:
        for due_s, job in jobs:
            if (wait_s := begun_s + due_s - clock()) > 0:
                await sleep(wait_s)
            group.create_task(work(job, begun_s + due_s))


def poisson_times(rate: float, seed: int) -> Iterator[float]:
    """Yield arrival times in seconds without end, `rate` per second."""
    draw, at_s = random.Random(seed), 0.0
    while True:
        at_s += draw.expovariate(rate)
        yield at_s
