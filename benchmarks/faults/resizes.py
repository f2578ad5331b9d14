"""Resizes of a service under load: cycles of growing and shrinking, and engines that are killed in every phase of them.

A cycle changes the number of ranks from N to N + 2, N + 1 and N. In every second cycle an engine is killed during each resize,
in another phase each time. If the resize fails for that reason, it is repeated when all ranks serve again.
"""

import asyncio
import functools
import statistics
import time
from collections import Counter, defaultdict
from collections.abc import Iterator
from typing import Any

from benchmarks.faults.campaign import RECOVERY_TIMEOUT_S, Campaign, Fault
from benchmarks.faults.outcomes import spread
from benchmarks.serving.service import BenchServiceError

MOST_RESIZE_PAUSE_S = 1.0  # of a stream during a resize, beyond its usual longest gap
RATE_S = 3.0  # of a measurement of tokens/s without a resize
_PHASES = ("preparing", "committing", "completed", "failed")  # in this order
_POLL_S = 0.005
_TOKENS = "vllm:generation_tokens_total"


async def begin_resize(campaign: Campaign, num_ranks: int) -> None:
    """Begin to change the number of ranks, once the service accepts that: all ranks must serve."""
    body = {"new_data_parallel_size": num_ranks, "wait": False}
    deadline_s = time.perf_counter() + RECOVERY_TIMEOUT_S
    while "operation_id" not in (answer := await campaign.state("POST", "/scale_elastic_ep", body)):
        if time.perf_counter() > deadline_s:
            raise BenchServiceError(f"the service does not change to {num_ranks} ranks: {answer}")
        await asyncio.sleep(_POLL_S)
    campaign.begin_fault()


async def wait_for_resize(campaign: Campaign, phase: str = "completed") -> dict[str, Any]:
    """Wait until the newest resize has reached a phase, or has failed. Return its state."""
    phases = _PHASES[_PHASES.index(phase) :]
    deadline_s = time.perf_counter() + RECOVERY_TIMEOUT_S
    while (state := await campaign.state("GET", "/is_scaling_elastic_ep"))["phase"] not in phases:
        if time.perf_counter() > deadline_s:
            raise BenchServiceError(f"a resize did not end within {RECOVERY_TIMEOUT_S:g} s: {state}")
        await asyncio.sleep(_POLL_S)
    campaign.num_ranks = state["effective_data_parallel_size"]
    return state


async def scale(campaign: Campaign, num_ranks: int) -> None:
    """Change the number of ranks, and repeat that if it fails."""
    deadline_s = time.perf_counter() + RECOVERY_TIMEOUT_S
    state: dict[str, Any] = {}
    while campaign.num_ranks != num_ranks:
        if time.perf_counter() > deadline_s:
            raise BenchServiceError(f"the service did not change to {num_ranks} ranks: {state}")
        await begin_resize(campaign, num_ranks)
        state = await wait_for_resize(campaign)


class ResizeCycles:
    """The resizes of one campaign, and their figures."""

    def __init__(self) -> None:
        self._took_s: dict[str, list[float]] = defaultdict(list)  # by sizes, of resizes without a kill
        self._rates: dict[str, list[float]] = defaultdict(list)  # tokens/s, by sizes and by number of ranks
        self._kills: dict[str, Counter[str]] = defaultdict(Counter)  # ends of resizes, by phase at the kill
        self._failed: list[str] = []  # without a kill

    def plan(self, num_ranks: int, num_cycles: int) -> Iterator[tuple[str, Fault]]:
        """Yield the resizes of some cycles, with the names of their kinds."""
        sizes = (num_ranks, num_ranks + 2, num_ranks + 1, num_ranks)
        for cycle in range(num_cycles):
            for at, size in enumerate(sizes[1:]):
                name = f"{sizes[at]} -> {size} ranks"
                if cycle % 2 == 0:
                    yield name, functools.partial(self._resize, name=name, num_ranks=size)
                else:
                    phase = _PHASES[(cycle // 2 + at) % 3]
                    kill = functools.partial(
                        self._kill_while_resizing, name=name, num_ranks=size, phase=phase
                    )
                    yield f"{name}, kill when {phase}", kill

    async def _resize(self, campaign: Campaign, *, name: str, num_ranks: int) -> int:
        begun_s, tokens = time.perf_counter(), await campaign.figure(_TOKENS)
        await asyncio.sleep(RATE_S)
        self._rates[f"{campaign.num_ranks} ranks"].append(await _rate(campaign, tokens, begun_s))
        begun_s, tokens = time.perf_counter(), await campaign.figure(_TOKENS)
        await begin_resize(campaign, num_ranks)
        state = await wait_for_resize(campaign)
        if state["phase"] != "completed":
            self._failed.append(f"{name}: {state['error']}")
            await scale(campaign, num_ranks)
        self._took_s[name].append(state["seconds"])
        self._rates[name].append(await _rate(campaign, tokens, begun_s))
        return 0

    async def _kill_while_resizing(self, campaign: Campaign, *, name: str, num_ranks: int, phase: str) -> int:
        await begin_resize(campaign, num_ranks)
        if phase == "preparing":
            await asyncio.sleep(campaign.drawn.uniform(0.0, statistics.median(self._took_s[name] or [1.0])))
        reached = (await wait_for_resize(campaign, phase))["phase"]
        campaign.kill_any()
        state = await wait_for_resize(campaign)
        self._kills[reached][state["phase"]] += 1
        await scale(campaign, num_ranks)
        # A rank that had not yet become a member, or had left, does not count as lost.
        return 0

    def figures(self, num_refused: int) -> dict[str, Any]:
        """Return the figures of all resizes.

        Args:
            num_refused: Requests that got status 503. No resize is a reason for one.
        """
        return {
            "resize_s": {name: spread(times_s) for name, times_s in self._took_s.items()},
            "tokens_per_s": {name: spread(rates) for name, rates in sorted(self._rates.items())},
            "kills": {phase: dict(ends) for phase, ends in self._kills.items()},
            "failed_resizes": self._failed,
            "refused_while_resizing": num_refused,
        }


async def _rate(campaign: Campaign, tokens: float, begun_s: float) -> float:
    """Return the tokens per second since a moment, from the counter at that moment."""
    return (await campaign.figure(_TOKENS) - tokens) / (time.perf_counter() - begun_s)
