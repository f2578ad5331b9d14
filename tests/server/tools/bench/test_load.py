"""Closed and open loops on a clock that moves only during waits."""

import asyncio
import itertools
import statistics

import pytest

from server.tools.bench.load import closed_loop, open_loop, poisson_times
from tests.support.clock import Clock


class LoopClock(Clock):
    """A clock that a loop's own sleeps move."""

    async def nap(self, seconds: float) -> None:
        """Advance the clock. Work that has begun continues first, at the old time."""
        await asyncio.sleep(0)
        self.sleep(seconds)
        await asyncio.sleep(0)


@pytest.mark.parametrize(("concurrency", "most"), [(1, 1), (3, 3), (9, 5)])
def test_clients_work_on_every_job_once_and_never_more_at_once(concurrency: int, most: int) -> None:
    running, seen, highest = 0, [], 0

    async def work(job: int) -> None:
        nonlocal running, highest
        running += 1
        highest = max(highest, running)
        seen.append(job)
        await asyncio.sleep(0)
        running -= 1

    asyncio.run(closed_loop(work, range(5), concurrency=concurrency))
    assert highest == most
    assert sorted(seen) == [0, 1, 2, 3, 4]


def test_a_failure_is_raised_as_it_is() -> None:
    async def fail(_: int) -> None:
        raise KeyError("gone")

    with pytest.raises(KeyError, match="gone"):
        asyncio.run(closed_loop(fail, [1, 2], concurrency=2))


def test_after_its_duration_a_closed_loop_begins_nothing_and_ends_what_it_began() -> None:
    clock, ended = LoopClock(), []

    async def work(job: int) -> None:
        clock.now_s += 1.0
        await asyncio.sleep(0)
        ended.append(job)

    asyncio.run(closed_loop(work, itertools.count(), concurrency=2, duration_s=3.5, clock=clock))
    assert ended == [0, 1, 2, 3]


def test_an_open_loop_begins_at_the_times_whatever_is_unanswered() -> None:
    clock, begun = LoopClock(), []
    released = asyncio.Event()

    async def work(job: str, due_s: float) -> None:
        begun.append((job, clock.now_s - 100.0, due_s - 100.0))
        if job == "c":
            released.set()
        await released.wait()  # the first two are open when the third begins

    jobs = [(0.5, "a"), (0.5, "b"), (2.25, "c")]
    asyncio.run(open_loop(work, jobs, clock=clock, sleep=clock.nap))
    assert begun == [("a", 0.5, 0.5), ("b", 0.5, 0.5), ("c", 2.25, 2.25)]


def test_what_begins_late_is_told_when_it_was_due() -> None:
    clock, late = LoopClock(), []

    async def oversleep(seconds: float) -> None:
        await clock.nap(seconds + 0.25)

    async def work(_job: str, due_s: float) -> None:
        late.append(clock.now_s - due_s)

    asyncio.run(open_loop(work, [(1.0, "a"), (1.0, "b"), (3.0, "c")], clock=clock, sleep=oversleep))
    assert late == [0.25, 0.25, 0.25]


def test_poisson_arrivals_have_their_rate_their_spread_and_their_seed() -> None:
    times = list(itertools.islice(poisson_times(4.0, seed=1), 20_000))
    gaps = [later - earlier for earlier, later in itertools.pairwise(times)]
    assert statistics.fmean(gaps) == pytest.approx(0.25, rel=0.03)
    assert statistics.stdev(gaps) == pytest.approx(0.25, rel=0.03)
    assert times[:5] == list(itertools.islice(poisson_times(4.0, seed=1), 5))
    assert times[:5] != list(itertools.islice(poisson_times(4.0, seed=2), 5))
