"""Pools with roles: prompts arrive at the prefill pools as fast as answers end on the decode pools.

A decode pool holds the KV cache of all answers that are generated, and its steps contain no prompts. A prefill pool holds the
requests with prompts that run or wait there. In the long run both have the same rate of requests. That rate grows with the
number of answers that are generated at once, until one of three limits is reached: all users have a place, the decode pools have
no room, or the prefill pools have no time. A hand-over is counted as immediate, and the prompt tokens that it computes again
(less than a block) are not counted.

The idea of sizing both sides by goodput is DistServe's (arXiv 2401.09670). Rejected: a queue of hand-overs, which
`wideep simulate` has.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

from server.options.pools import Pool, Role
from server.tools.size.costs.estimate import PromptCost
from server.tools.size.deployment import Deployment, Fitted, Sizing

MOST_BUSY = 0.95  # share of the time in which prefill pools run prompts; with more, the queue has no bound


class FittedPools(NamedTuple):
    """The pools of one role, and what fits on each of them."""

    sizings: Mapping[Pool, Sizing]
    fitted: Mapping[Pool, Fitted]

    @classmethod
    def of(cls, sizings: Mapping[Pool, Sizing]) -> "FittedPools":
        """Find what fits on each pool.

        Raises:
            SizeError: The model does not fit on a pool.
        """
        return cls(sizings, {pool: sizing.fitted(pool.num_ranks) for pool, sizing in sizings.items()})

    @property
    def num_ranks(self) -> int:
        """Return the number of ranks of all pools."""
        return sum(pool.num_ranks for pool in self.sizings)


def sides_of(pools: Sequence[Pool]) -> tuple[list[Pool], list[Pool], list[Pool]]:
    """Return the pools that run prompts for others, those that decode for others, and those that do both for themselves.

    If no pool has one of the two roles, those of role both have it.
    """
    both, prefill, decode = (
        [pool for pool in pools if pool.role is role] for role in (Role.BOTH, Role.PREFILL, Role.DECODE)
    )
    if not prefill and not decode:
        return [], [], both
    if prefill and decode:
        return prefill, decode, both
    return prefill or both, decode or both, []


def size_sides(prefill: FittedPools, decode: FittedPools, users: int | None) -> dict[Pool, Deployment]:
    """Return the estimate for each pool of the two sides.

    Args:
        users: Number of concurrent requests. None means as many as fit.
    """
    costs = {pool: each.prompt_cost(prefill.fitted[pool]) for pool, each in prefill.sizings.items()}
    most_per_s = MOST_BUSY * sum(cost.most_per_s for cost in costs.values())
    most = sum(found.room * pool.num_ranks for pool, found in decode.fitted.items())
    fewest, num_decoding = 1, most if users is None else min(most, users)
    while fewest < num_decoding:
        middle = (fewest + num_decoding + 1) // 2
        rate = _rate(_decodes(decode, middle))
        num_held = middle + rate * _first_s(prefill, costs, rate)
        if rate <= most_per_s and (users is None or num_held <= users):
            fewest = middle
        else:
            num_decoding = middle - 1
    decodes = _decodes(decode, fewest)
    rate = min(_rate(decodes), most_per_s)
    prompts = _prompts(prefill, costs, rate)
    if users is None:
        return prompts | decodes
    num_others = users - fewest
    if fewest < most:
        return _with_queue(prompts, rate, num_others) | decodes
    waiting = max(0, num_others - math.floor(rate * _first_s(prefill, costs, rate)))
    return prompts | _with_waiting(decodes, waiting)


def _decodes(decode: FittedPools, num_users: int) -> dict[Pool, Deployment]:
    num_ranks = decode.num_ranks
    return {
        pool: sizing.decodes(decode.fitted[pool], max(1, round(num_users * pool.num_ranks / num_ranks)))
        for pool, sizing in decode.sizings.items()
    }


def _rate(decodes: Mapping[Pool, Deployment]) -> float:
    """Return the number of answers per second."""
    return sum(
        each.expected.output_per_rank * each.num_ranks / each.work.output_tokens for each in decodes.values()
    )


def _prompts(prefill: FittedPools, costs: Mapping[Pool, PromptCost], rate: float) -> dict[Pool, Deployment]:
    """Let all prefill pools be equally busy."""
    most_per_s = sum(cost.most_per_s for cost in costs.values())
    return {
        pool: sizing.prompts(prefill.fitted[pool], costs[pool], rate * costs[pool].most_per_s / most_per_s)
        for pool, sizing in prefill.sizings.items()
    }


def _first_s(prefill: FittedPools, costs: Mapping[Pool, PromptCost], rate: float) -> float:
    """Return the mean time to the first token."""
    prompts = _prompts(prefill, costs, rate).values()
    return sum(each.expected.ttft_s * each.num_ranks for each in prompts) / prefill.num_ranks


def _with_queue(prompts: Mapping[Pool, Deployment], rate: float, num_requests: int) -> dict[Pool, Deployment]:
    """Let prefill pools hold this number of requests, which wait for their turn. The wait follows from Little's law. A pool with a
    queue that never ends is always busy."""
    num_ranks = sum(pool.num_ranks for pool in prompts)
    found = {}
    for pool, each in prompts.items():
        ttft_s = max(each.expected.ttft_s, num_requests / rate)
        busy = 1.0 if ttft_s > 2 * each.expected.ttft_s else each.busy
        running = max(each.expected.running_per_rank, math.ceil(num_requests / num_ranks))
        expected = each.expected._replace(ttft_s=ttft_s, running_per_rank=running)
        found[pool] = replace(each, expected=expected, busy=busy)
    return found


def _with_waiting(decodes: Mapping[Pool, Deployment], num_users: int) -> dict[Pool, Deployment]:
    """Let users wait for room on the decode pools."""
    num_ranks = sum(pool.num_ranks for pool in decodes)
    return {
        pool: replace(
            each,
            expected=each.expected._replace(waiting_users=math.ceil(num_users * pool.num_ranks / num_ranks)),
        )
        for pool, each in decodes.items()
    }
