"""Make a load: clients that ask one request after the other, or requests that come at times of their own.

A closed loop (so many clients) finds what a service can do; an open loop (a rate, or a trace's times) what its users see, because
a slow service does not slow the arrivals down. Arrivals at a rate are a Poisson process. An open loop sends late only
where the machine is too busy to send, and says by how much. Neither loop knows HTTP.
"""

import asyncio
import random
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Iterator
from typing import Any, TypeVar

from server.batches.bulk_client import for_each

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
    """Work on jobs, `concurrency` at once; none is begun after `duration_s`, and those that were begun are ended."""
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
    """Begin each job at its time, whatever became of the others, and wait for all.

    Args:
        work: is told when it was due, by the clock.
        jobs: with their times after the begin, in order.
    """
    begun_s = clock()
    async with asyncio.TaskGroup() as group:
        for due_s, job in jobs:
            if (wait_s := begun_s + due_s - clock()) > 0:
                await sleep(wait_s)
            group.create_task(work(job, begun_s + due_s))


def poisson_times(rate: float, seed: int) -> Iterator[float]:
    """Yield arrival times of `rate` requests per second, without end."""
    draw, at_s = random.Random(seed), 0.0
    while True:
        at_s += draw.expovariate(rate)
        yield at_s
