"""Latency and throughput under a steady load: time per token, time to the first token, tokens per second.

In the long run every running request takes one row of each step, and prompts arrive as fast as answers end, so an average
step has prompt tokens in the ratio of input to output. Ranks run in lock-step, so all of them have such steps. The balance
of experts comes from the placement planner of the service, on loads as uneven as published ones.
"""

import math
from typing import Any, NamedTuple

import numpy as np

from expert_placement.nodes import Cluster, Rules
from expert_placement.placement import imbalance, linear_placement
from expert_placement.plan import plan
from server.tools.size.costs.step_times import RankRows, StepCost, StepTimes

# Sigma of expert loads, log-normal: at EP32 with 8 experts per rank, the fullest rank then has 2.6 times the mean, which is
# TensorRT-LLM's measurement for DeepSeek-R1 before balancing (blog 4: (max - mean) / mean = 1.564).
LOAD_SPREAD = 1.15
# The balance that is left in the window after the planned one; from the same blog, 0.109 to 0.115 above the mean.
KEPT_BALANCE = 0.9
_LAYERS, _PLANNED_LAYERS, _SEED = 16, 4, 0  # random loads for the balance; fewer if they are planned


class Workload(NamedTuple):
    """The requests of the users."""

    users: int  # users with a running or waiting request
    input_tokens: int
    output_tokens: int

    @property
    def context_tokens(self) -> int:
        """Return the length of a request at its end."""
        return self.input_tokens + self.output_tokens


class Estimate(NamedTuple):
    """The prediction for a service."""

    running_per_rank: int  # requests that generate tokens at the same time
    waiting_users: int  # on all ranks, for lack of room
    prefill_per_step: float  # prompt tokens in an average step of a rank
    step: StepCost  # the average step
    tpot_s: float
    ttft_s: float
    output_per_rank: float  # tokens per second
    input_per_rank: float

    def to_json(self) -> dict[str, Any]:
        """Return the fields as JSON values."""
        step = {name: value for name, value in self.step._asdict().items() if name != "waiting_s"}
        return {**self._asdict(), "step": step}


def balancedness(num_experts: int, num_ranks: int, slots_per_rank: int, *, is_planned: bool) -> float:
    """Return mean over max of the ranks' expert rows, averaged over layers.

    Args:
        is_planned: The placement follows the load; otherwise experts are in order.
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
    """Return the prediction.

    Args:
        times: Step times of the deployment.
        balance: Result of `balancedness`.
        max_running: Number of requests that a rank can run at once.
        max_batched_tokens: Maximum number of tokens in a step of a rank.
    """
    running = max(1, min(math.ceil(work.users / num_ranks), max_running))
    waiting = max(0, work.users - running * num_ranks)
    busy_ranks = min(num_ranks, work.users)
    # The number of decodes that leaves room in a step for a proportional number of prompt tokens.
    per_decode = work.input_tokens / work.output_tokens
    decodes = min(float(running), max_batched_tokens / (1 + per_decode))
    prefill = decodes * per_decode
    chunk = min(work.input_tokens, max(16, max_batched_tokens - int(decodes)))
    steps = _Steps(times, work, decodes, busy_ranks, num_ranks, balance)
    # Prompts arrive in chunks on some ranks at times, and the others wait: steps without and with chunks.
    chunks = busy_ranks * prefill / chunk
    any_share = -math.expm1(-chunks)
    mixed = steps.with_chunks(min(busy_ranks, max(1, round(chunks / max(any_share, 1e-9)))), chunk)
    step = _blend(steps.with_chunks(0, 0), mixed, any_share)
    prompt_s = math.ceil(work.input_tokens / chunk) * mixed.total_s
    if decodes < running:  # prompts fill the steps: requests that do not decode wait (Little's law)
        ttft_s = max(prompt_s, work.output_tokens * step.total_s * (running / decodes - 1))
    else:
        busy = prefill / max(1.0, max_batched_tokens - decodes)  # share of the room for prompts
        # A queue with one server and equal jobs (Pollaczek-Khinchine).
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


def estimate_decodes(
    times: StepTimes, work: Workload, *, num_ranks: int, balance: float, max_running: int
) -> Estimate:
    """Return the prediction for ranks that generate all tokens but the first, without prompts in their steps.

    Args:
        work: Its users are the ones that receive tokens. The other arguments are those of `estimate`.
    """
    running = max(1, min(math.ceil(work.users / num_ranks), max_running))
    busy_ranks = min(num_ranks, work.users)
    step = _Steps(times, work, running, busy_ranks, num_ranks, balance).with_chunks(0, 0)
    return Estimate(
        running_per_rank=running,
        waiting_users=max(0, work.users - running * num_ranks),
        prefill_per_step=0.0,
        step=step,
        tpot_s=step.total_s,
        ttft_s=0.0,
        output_per_rank=busy_ranks / num_ranks * running / step.total_s,
        input_per_rank=0.0,
    )


class PromptCost(NamedTuple):
    """Prompts on ranks that generate no other tokens than the first."""

    chunk: int  # prompt tokens of one request in a step
    step: StepCost  # of such a step
    num_steps: int  # for one prompt
    most_per_s: float  # prompts of all ranks, with full steps


def prompt_cost(
    times: StepTimes, work: Workload, *, num_ranks: int, balance: float, max_batched_tokens: int
) -> PromptCost:
    """Return the cost of prompts if ranks run nothing else. The arguments are those of `estimate`."""
    length = work.input_tokens

    def step_of(num_tokens: int) -> StepCost:
        attended = num_tokens * length // 2
        return times.step([RankRows(num_tokens, 0, attended, attended)] * num_ranks, balance)

    chunk, full = min(length, max_batched_tokens), step_of(max_batched_tokens)
    most_per_s = num_ranks * max_batched_tokens / length / full.total_s
    return PromptCost(chunk, step_of(chunk), math.ceil(length / chunk), most_per_s)


def estimate_prompts(cost: PromptCost, work: Workload, prompts_per_s: float, *, num_ranks: int) -> Estimate:
    """Return the prediction for ranks that run prompts only, at fewer prompts per second than `PromptCost.most_per_s`."""
    busy = prompts_per_s / cost.most_per_s
    prompt_s = cost.num_steps * cost.step.total_s
    ttft_s = prompt_s * (1 + busy / (2 * max(1 - busy, 0.02)))  # a queue, as in `estimate`
    return Estimate(
        running_per_rank=max(1, math.ceil(prompts_per_s * ttft_s / num_ranks)),
        waiting_users=0,
        prefill_per_step=float(cost.chunk),
        step=cost.step,
        tpot_s=0.0,
        ttft_s=ttft_s,
        output_per_rank=0.0,
        input_per_rank=prompts_per_s * work.input_tokens / num_ranks,
    )


class _Steps:
    """Steps in which all busy ranks have equal decodes, and some also run a chunk of a prompt."""

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
        """Return the cost of a step in which this number of ranks have a chunk."""
        of_prompts = chunk * self._prompt // 2
        alone = RankRows(0, self._decodes, self._context, 0)
        mixed = RankRows(chunk, self._decodes, self._context + of_prompts, of_prompts)
        idle = [RankRows(0, 0, 0, 0)] * (self._num_ranks - self._busy_ranks)
        busy = [mixed] * num_ranks + [alone] * (self._busy_ranks - num_ranks)
        return self._times.step(busy + idle, self._balance)


def _blend(first: StepCost, second: StepCost, share: float) -> StepCost:
    """Return the average of two kinds of steps, weighted by the share of the second."""

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
