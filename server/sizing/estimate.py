"""What users see: time per token, time to the first one, tokens per second, under a load that goes on.

In the long run every running request takes one row of each step, and prompts come as fast as answers end, so that an
average step has prompts' tokens in the ratio of input to output. Ranks walk in step, so that all of them have such steps.
How even experts are is had from the placement planner that serves, on loads as uneven as published ones.
"""

import math
from typing import Any, NamedTuple

import numpy as np

from expert_placement.nodes import Cluster, Rules
from expert_placement.placement import imbalance, linear_placement
from expert_placement.plan import plan
from server.sizing.step_times import RankRows, StepCost, StepTimes

# Of experts' loads, log-normal: at EP32 with 8 experts a rank the fullest then has 2.6 times the mean, as TensorRT-LLM's
# blog 4 measured for DeepSeek-R1 ((max - mean) / mean = 1.564), before it balanced.
LOAD_SPREAD = 1.15
# What is left of evenness in the window after the one that was planned for: the same blog, 0.109 to 0.115 above the mean.
KEPT_BALANCE = 0.9
_LAYERS, _PLANNED_LAYERS, _SEED = 16, 4, 0  # drawn to find how even a placement is; planning takes its time


class Workload(NamedTuple):
    """What users ask for."""

    users: int  # whose requests run or wait at any time
    input_tokens: int
    output_tokens: int

    @property
    def context_tokens(self) -> int:
        """Of one request at its end."""
        return self.input_tokens + self.output_tokens


class Estimate(NamedTuple):
    """What a service is foretold to do."""

    running_per_rank: int  # requests whose answers come, at once
    waiting_users: int  # of all, for want of room
    prefill_per_step: float  # tokens of prompts in an average step of a rank
    step: StepCost  # the average one
    tpot_s: float
    ttft_s: float
    output_per_rank: float  # tokens per second
    input_per_rank: float

    def to_json(self) -> dict[str, Any]:
        """Return JSON values."""
        step = {name: value for name, value in self.step._asdict().items() if name != "waiting_s"}
        return {**self._asdict(), "step": step}


def balancedness(num_experts: int, num_ranks: int, slots_per_rank: int, *, is_planned: bool) -> float:
    """Mean over max of the ranks' expert rows, on average over layers.

    Args:
        is_planned: the placement follows the load; else experts are in order.
    """
    if num_ranks == 1:
        return 1.0
    generator = np.random.default_rng(_SEED)
    load = generator.lognormal(
        sigma=LOAD_SPREAD, size=(_PLANNED_LAYERS if is_planned else _LAYERS, num_experts)
    )
    if not is_planned:
        return float(1 / np.mean(imbalance(linear_placement(_LAYERS, num_experts, num_ranks), load)))
    rules = Rules(cluster=Cluster(num_ranks=num_ranks, num_nodes=1))
    placement = plan(load, slots_per_rank, rules).placement
    return float(KEPT_BALANCE / np.mean(imbalance(placement, load)))


def estimate(
    times: StepTimes,
    work: Workload,
    *,
    num_ranks: int,
    balance: float,
    max_running: int,
    max_batched_tokens: int,
) -> Estimate:
    """Foretell.

    Args:
        times: of the deployment's steps.
        balance: see `balancedness`.
        max_running: requests that a rank has room for at once.
        max_batched_tokens: of a rank's step.
    """
    running = max(1, min(math.ceil(work.users / num_ranks), max_running))
    waiting = max(0, work.users - running * num_ranks)
    busy_ranks = min(num_ranks, work.users)
    # So many decode that prompts, in proportion, fit into a step beside them.
    per_decode = work.input_tokens / work.output_tokens
    decodes = min(float(running), max_batched_tokens / (1 + per_decode))
    prefill = decodes * per_decode
    chunk = min(work.input_tokens, max(16, max_batched_tokens - int(decodes)))
    steps = _Steps(times, work, decodes, busy_ranks, num_ranks, balance)
    # Prompts come in chunks, on some ranks now and then, and the others wait: steps without any, and with.
    chunks = busy_ranks * prefill / chunk
    any_share = -math.expm1(-chunks)
    mixed = steps.with_chunks(min(busy_ranks, max(1, round(chunks / max(any_share, 1e-9)))), chunk)
    step = _blend(steps.with_chunks(0, 0), mixed, any_share)
    prompt_s = math.ceil(work.input_tokens / chunk) * mixed.total_s
    if decodes < running:  # prompts fill the steps: all who do not decode wait (Little's law)
        ttft_s = max(prompt_s, work.output_tokens * step.total_s * (running / decodes - 1))
    else:
        busy = prefill / max(1.0, max_batched_tokens - decodes)  # of the room for prompts
        # A queue with one server and equal jobs (Pollaczek and Khinchine).
        ttft_s = prompt_s * (1 + busy / (2 * max(1 - busy, 0.02)))
    ttft_s += step.total_s / 2
    share = busy_ranks / num_ranks
    return Estimate(
        running_per_rank=running,
        waiting_users=waiting,
        prefill_per_step=prefill,
        step=step,
        tpot_s=step.total_s,
        ttft_s=ttft_s,
        output_per_rank=share * decodes / step.total_s,
        input_per_rank=share * prefill / step.total_s,
    )


class _Steps:
    """Steps of ranks that decode alike, of which some run a chunk of a prompt beside."""

    def __init__(
        self,
        times: StepTimes,
        work: Workload,
        decodes: float,
        busy_ranks: int,
        num_ranks: int,
        balance: float,
    ) -> None:
        self._times, self._balance = times, balance
        self._num_ranks, self._busy_ranks = num_ranks, busy_ranks
        self._decodes = max(1, round(decodes))
        self._context = round(self._decodes * (work.input_tokens + work.output_tokens / 2))
        self._prompt = work.input_tokens

    def with_chunks(self, num_ranks: int, chunk: int) -> StepCost:
        """What one costs in which so many ranks have a chunk."""
        of_prompts = chunk * self._prompt // 2
        alone = RankRows(0, self._decodes, self._context, 0)
        mixed = RankRows(chunk, self._decodes, self._context + of_prompts, of_prompts)
        idle = [RankRows(0, 0, 0, 0)] * (self._num_ranks - self._busy_ranks)
        busy = [mixed] * num_ranks + [alone] * (self._busy_ranks - num_ranks)
        return self._times.step(busy + idle, self._balance)


def _blend(first: StepCost, second: StepCost, share: float) -> StepCost:
    """The average of two kinds of steps, of which the second's share is given."""

    def mean(one: float, other: float) -> float:
        return (1 - share) * one + share * other

    return StepCost(
        total_s=mean(first.total_s, second.total_s),
        attention_s=mean(first.attention_s, second.attention_s),
        experts_s=mean(first.experts_s, second.experts_s),
        dispatch_s=mean(first.dispatch_s, second.dispatch_s),
        other_s=mean(first.other_s, second.other_s),
        waiting_s=tuple(mean(*both) for both in zip(first.waiting_s, second.waiting_s, strict=True)),
    )
