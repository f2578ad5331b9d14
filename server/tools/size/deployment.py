"""Deployments of a model on a device: the estimate for a number of ranks or replicas, and the fewest ranks for a target.

Each is judged by the memory that a start would count (`fit`), by the roofline's step and by a steady load (`estimate`).
Replicas with tensor parallelism, which WideEP does not support, are judged by the same roofline.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

from kvcache.paged_cache import BLOCK_TOKENS
from scheduler.policy.state_tables import STATES_OF_ONE
from server.options.pools import Role
from server.options.table import Options
from server.serve.preflight.device import DEFAULT_LIMITS
from server.tools.size.costs.device_table import Device
from server.tools.size.costs.estimate import (
    Estimate,
    PromptCost,
    Workload,
    balancedness,
    estimate,
    estimate_decodes,
    estimate_prompts,
    prompt_cost,
)
from server.tools.size.costs.fit import (
    RankMemory,
    SizeError,
    TierSize,
    engine_of,
    rank_memory,
    replica_tokens,
    tier_sizes,
)
from server.tools.size.costs.read_model import ReadModel
from server.tools.size.costs.roofline import Roofline
from server.tools.size.flags import SizeOptions

_MOST_RANKS = 512


@dataclass(frozen=True, kw_only=True)
class Deployment:
    """One number of ranks, and the prediction for it."""

    num_ranks: int
    options: Options
    memory: RankMemory
    work: Workload
    balance: float
    expected: Estimate
    busy: float | None = None  # share of the time in which a prefill pool runs prompts; None for other pools

    def misses(self, asked: SizeOptions) -> str | None:
        """Return the missed target. Returns None if all targets are met."""
        if asked.tpot_s is not None and self.expected.tpot_s > asked.tpot_s:
            return "time per token"
        if asked.ttft_s is not None and self.expected.ttft_s > asked.ttft_s:
            return "time to the first token"
        if (asked.tpot_s or asked.ttft_s) and self.expected.waiting_users:
            return "room for all users"
        return None


class Replicas(NamedTuple):
    """Copies of the model, each split over several devices by tensor parallelism."""

    ways: int
    copies: int
    expected: Estimate  # of one copy, per device

    def to_json(self) -> dict[str, Any]:
        """Return the fields as JSON values."""
        return {**self._asdict(), "expected": self.expected.to_json()}


class Sized(NamedTuple):
    """The whole result."""

    model: ReadModel
    device: Device
    chosen: Deployment
    least: Deployment | None  # the fewest ranks that meet the targets, if there are any
    replicas: tuple[Replicas, ...]
    role: Role = Role.BOTH

    @property
    def num_nodes(self) -> int:
        """Return the number of nodes, with the device's usual number of ranks on each."""
        return math.ceil(self.chosen.num_ranks / self.device.node_ranks)

    @property
    def tiers(self) -> tuple[TierSize, ...]:
        """Return the tiers of a node."""
        return tier_sizes(self.chosen.options, self.chosen.memory.token_bytes)

    @property
    def output_per_node(self) -> float:
        """Return the output tokens per second and node."""
        return self.chosen.expected.output_per_rank * self.chosen.num_ranks / self.num_nodes

    def to_json(self) -> dict[str, Any]:
        """Return the result as JSON values."""
        chosen = self.chosen
        costs = self.model.costs
        return {
            "model": {
                "name": self.model.name,
                "type": costs.name,
                "weights": costs.total_weights,
                "active_weights": costs.active_weights,
                "experts": costs.num_experts,
                "top_k": costs.top_k,
                "stored_as": costs.expert_kind,
                "from_files": self.model.has_files,
                "max_model_len": self.model.longest,
            },
            "device": {
                "name": self.device.name,
                "memory_bytes": self.device.memory_bytes,
                "memory_bytes_per_s": self.device.memory_bytes_per_s,
                "rates": dict(self.device.rates),
                "source": self.device.source,
            },
            "role": self.role.value,
            "ranks": chosen.num_ranks,
            "nodes": self.num_nodes,
            "memory_per_rank": chosen.memory.to_json(),
            "tiers_per_node": [each.to_json() for each in self.tiers],
            "workload": chosen.work._asdict(),
            "balancedness": chosen.balance,
            "expected": chosen.expected.to_json(),
            "output_per_node": self.output_per_node,
            "ranks_for_target": None if self.least is None else self.least.num_ranks,
            "replicas": [each.to_json() for each in self.replicas],
        }


class Fitted(NamedTuple):
    """A number of ranks with these options, on which the model fits."""

    num_ranks: int
    options: Options  # with all limits
    memory: RankMemory
    room: int  # requests of the given length that a rank runs at once
    balance: float
    times: Roofline

    @property
    def max_batched_tokens(self) -> int:
        """The largest number of tokens in a rank's step."""
        assert self.options.engine.max_num_batched_tokens, "limits are filled in"
        return self.options.engine.max_num_batched_tokens


class Sizing:
    """Estimates numbers of ranks of one model on one device."""

    def __init__(self, model: ReadModel, device: Device, options: Options, asked: SizeOptions) -> None:
        """Check the lengths of requests.

        Raises:
            SizeError: Requests are longer than a sequence may be.
        """
        self._model, self._device, self._options, self._asked = model, device, options, asked
        self._engine = engine_of(device, options)
        self._balances: dict[tuple[int, int, bool], float] = {}
        if asked.input_tokens + asked.output_tokens > model.longest:
            raise SizeError(
                f"--input {asked.input_tokens} and --output {asked.output_tokens} are {asked.input_tokens + asked.output_tokens} "
                f"tokens; a sequence may have at most {model.longest} (--max-model-len, or the model's own length)"
            )

    def deployment(self, num_ranks: int) -> Deployment:
        """Estimate a number of ranks, with the best step size if --max-num-batched-tokens is not given.

        Raises:
            SizeError: The model does not fit, or nodes would have different numbers of ranks.
        """
        return self._best(self._with_all_step_sizes(num_ranks))

    def _best(self, tried: list[Deployment]) -> Deployment:
        kept = [each for each in tried if each.misses(self._asked) is None]
        return max(kept or tried, key=lambda each: each.expected.output_per_rank)

    def _with_all_step_sizes(self, num_ranks: int) -> list[Deployment]:
        num_nodes = math.ceil(num_ranks / self._device.node_ranks)
        if num_ranks % num_nodes:
            fewer, more = num_nodes * (num_ranks // num_nodes), num_nodes * math.ceil(num_ranks / num_nodes)
            raise SizeError(
                f"{num_ranks} ranks cannot be divided equally between {num_nodes} nodes of {self._device.node_ranks}; give {fewer} "
                f"or {more}"
            )
        return [self._judged(num_ranks, options) for options in self._step_sizes(num_ranks)]

    def _judged(self, num_ranks: int, options: Options) -> Deployment:
        found = self._fitted(num_ranks, options)
        users = found.room * num_ranks if self._asked.users is None else self._asked.users
        work = self._work(users)
        expected = estimate(
            found.times, work, num_ranks=num_ranks, balance=found.balance, max_running=found.room,
            max_batched_tokens=found.max_batched_tokens,
        )  # fmt: skip
        return self._deployed(found, work, expected)

    def _fitted(self, num_ranks: int, options: Options) -> Fitted:
        memory = rank_memory(self._model, self._device, options, num_ranks)
        return Fitted(
            num_ranks,
            options,
            memory,
            self._room(memory, options),
            self._balance(num_ranks, memory.slots_per_rank, is_planned=options.enable_eplb),
            Roofline(
                self._model.costs,
                self._share_of(num_ranks),
                self._engine,
                slots_per_rank=memory.slots_per_rank,
            ),
        )

    def _work(self, users: int) -> Workload:
        return Workload(users, self._asked.input_tokens, self._asked.output_tokens)

    def _deployed(
        self, found: Fitted, work: Workload, expected: Estimate, busy: float | None = None
    ) -> Deployment:
        return Deployment(
            num_ranks=found.num_ranks,
            options=found.options,
            memory=found.memory,
            work=work,
            balance=found.balance,
            expected=expected,
            busy=busy,
        )

    def fitted(self, num_ranks: int) -> Fitted:
        """Return what fits on a number of ranks, with steps of the default size if no size is given.

        Raises:
            SizeError: As for `deployment`.
        """
        return self._fitted(num_ranks, next(self._step_sizes(num_ranks)))

    def decodes(self, found: Fitted, users: int) -> Deployment:
        """Estimate a decode pool with this number of users that receive tokens."""
        work = self._work(users)
        expected = estimate_decodes(
            found.times, work, num_ranks=found.num_ranks, balance=found.balance, max_running=found.room
        )
        return self._deployed(found, work, expected)

    def prompt_cost(self, found: Fitted) -> PromptCost:
        """Return the cost of prompts on a prefill pool."""
        return prompt_cost(
            found.times, self._work(1), num_ranks=found.num_ranks, balance=found.balance,
            max_batched_tokens=found.max_batched_tokens,
        )  # fmt: skip

    def prompts(self, found: Fitted, cost: PromptCost, prompts_per_s: float) -> Deployment:
        """Estimate a prefill pool. `cost` is that of `prompt_cost`."""
        expected = estimate_prompts(cost, self._work(1), prompts_per_s, num_ranks=found.num_ranks)
        users = math.ceil(prompts_per_s * expected.ttft_s)
        return self._deployed(found, self._work(users), expected, prompts_per_s / cost.most_per_s)

    def _balance(self, num_ranks: int, slots_per_rank: int, *, is_planned: bool) -> float:
        key = (num_ranks, slots_per_rank, is_planned)
        if key not in self._balances:
            self._balances[key] = balancedness(
                self._model.costs.num_experts, num_ranks, slots_per_rank, is_planned=is_planned
            )
        return self._balances[key]

    def _share_of(self, num_ranks: int) -> Device:
        return self._device.shared_by(min(num_ranks, self._device.node_ranks))

    def smallest(self) -> Deployment:
        """Return the estimate for the fewest ranks that the model fits on."""
        problems: list[SizeError] = []

        def fitting(num_ranks: int) -> Deployment | None:
            try:
                return self.deployment(num_ranks)
            except SizeError as error:
                problems.append(error)
                return None

        found = self._fewest(fitting)
        if found is None:
            raise SizeError(
                f"the model does not fit, even on {_MOST_RANKS} ranks of {self._device.name}: {problems[-1]}"
            )
        return found

    def least(self) -> Deployment:
        """Return the estimate for the fewest ranks that meet the targets.

        Raises:
            SizeError: No number of ranks does; the message names the longest part of a step.
        """
        tried: list[Deployment] = []

        def keeping(num_ranks: int) -> Deployment | None:
            try:
                judged = self._with_all_step_sizes(num_ranks)
            except SizeError:
                return None
            tried.extend(judged)
            best = self._best(judged)
            return best if best.misses(self._asked) is None else None

        found = self._fewest(keeping)
        if found is None:
            if not tried:
                self.smallest()  # raises with the reason why nothing fits
            raise SizeError(self._why_not(tried))
        return found

    def _fewest(self, judge: Callable[[int], Deployment | None]) -> Deployment | None:
        """Return the fewest ranks that pass: try powers of two and 1.5 times them, then the numbers before the first success.

        Above one node, only whole nodes are tried. Numbers below a failing one are assumed to fail too.
        """
        node, before = self._device.node_ranks, 0
        for num_ranks in self._coarse_candidates():
            found = judge(num_ranks)
            if found is not None:
                between = (
                    range(before + 1, num_ranks)
                    if num_ranks <= node
                    else range(before + node, num_ranks, node)
                )
                return next(filter(None, map(judge, between)), found)
            before = num_ranks
        return None

    def replicas(self, chosen: Deployment) -> Iterator[Replicas]:
        """Yield estimates for copies of the model on the same devices, for each even split by tensor parallelism that fits."""
        num_ranks, costs = chosen.num_ranks, self._model.costs
        for ways in range(1, num_ranks + 1):
            if num_ranks % ways or self._model.heads % ways:
                continue
            room = self._replica_room(ways, chosen)
            if room < 1:
                continue
            copies = num_ranks // ways
            work = chosen.work._replace(users=math.ceil(chosen.work.users / copies))
            times = Roofline(
                costs.cut(ways), self._share_of(num_ranks), self._engine, slots_per_rank=costs.num_experts,
                reducing=ways,
            )  # fmt: skip
            sizes = [each.engine.max_num_batched_tokens or 1 for each in self._step_sizes(num_ranks)]
            tried = [
                estimate(times, work, num_ranks=1, balance=1.0, max_running=room, max_batched_tokens=size)
                for size in sizes
            ]
            best = max(tried, key=lambda each: each.output_per_rank)
            each = best._replace(
                output_per_rank=best.output_per_rank / ways, input_per_rank=best.input_per_rank / ways
            )
            yield Replicas(ways, copies, each)

    def _replica_room(self, ways: int, chosen: Deployment) -> int:
        local_ranks = min(chosen.num_ranks, self._device.node_ranks)
        tokens = replica_tokens(self._model, self._device, chosen.options, ways, local_ranks=local_ranks)
        assert chosen.options.engine.max_num_seqs, "limits are filled in"
        return min(tokens // chosen.work.context_tokens, chosen.options.engine.max_num_seqs * ways)

    def _coarse_candidates(self) -> Iterator[int]:
        """Yield powers of two in a node, then numbers of nodes: 1, 2, 3, 4, 6, 8, 12, 16 and so on."""
        node = self._device.node_ranks
        yield from (2**power for power in range(node.bit_length()) if 2**power < node)
        for power in range((_MOST_RANKS // node).bit_length()):
            yield node << power
            if power and 3 * node << (power - 1) <= _MOST_RANKS:
                yield 3 * node << (power - 1)

    def _step_sizes(self, num_ranks: int) -> Iterator[Options]:
        """Fill in limits: room for at least all users, and steps of the default size and smaller, or the given limits."""
        options = self._options
        engine = options.engine
        seqs, batched = DEFAULT_LIMITS[options.device]
        if self._asked.users is not None:
            seqs = max(seqs, math.ceil(self._asked.users / num_ranks))
        seqs = engine.max_num_seqs or min(seqs, engine.max_num_batched_tokens or batched)
        largest = engine.max_num_batched_tokens or max(batched, seqs)
        sizes = [largest]
        while engine.max_num_batched_tokens is None and sizes[-1] // 2 >= 2 * seqs:
            sizes.append(sizes[-1] // 2)
        for size in sizes:
            yield options.with_engine(max_num_seqs=seqs, max_num_batched_tokens=size)

    def _room(self, memory: RankMemory, options: Options) -> int:
        """Return the number of requests of the given length that a rank runs at once."""
        assert options.engine.max_num_seqs, "limits are filled in"
        blocks = (
            memory.kv_tokens
            // BLOCK_TOKENS
            // math.ceil((self._asked.input_tokens + self._asked.output_tokens) / BLOCK_TOKENS)
        )
        room = min(options.engine.max_num_seqs, blocks)
        return min(room, memory.num_states // STATES_OF_ONE) if memory.num_states else room

    def _why_not(self, tried: list[Deployment]) -> str:
        """Return the reason why the targets cannot be met."""
        asked = self._asked
        if asked.tpot_s is not None:
            best = min(tried, key=lambda each: each.expected.tpot_s)
            if best.expected.tpot_s > asked.tpot_s:
                return self._too_slow("time per token", asked.tpot_s, best.expected.tpot_s, best)
        if asked.ttft_s is not None:
            best = min(tried, key=lambda each: each.expected.ttft_s)
            if best.expected.ttft_s > asked.ttft_s:
                return self._too_slow("time to the first token", asked.ttft_s, best.expected.ttft_s, best)
        most = max(tried, key=lambda each: each.expected.running_per_rank * each.num_ranks)
        return (
            f"no number of ranks up to {_MOST_RANKS} on {self._device.name} meets all targets at once for {most.work.users} "
            f"users; {most.num_ranks} ranks have room for {most.expected.running_per_rank * most.num_ranks}"
        )

    def _too_slow(self, what: str, target_s: float, best_s: float, best: Deployment) -> str:
        step = best.expected.step
        parts = {
            "attention and the rank's own weights": step.attention_s,
            "experts": step.experts_s,
            "dispatch between ranks": step.dispatch_s,
            "the output projection and the host": step.other_s,
        }
        longest = max(parts, key=lambda part: parts[part])
        return (
            f"no number of ranks up to {_MOST_RANKS} on {self._device.name} reaches a {what} of {1000 * target_s:g} ms; the best "
            f"is {1000 * best_s:.1f} ms on {best.num_ranks} (longest part: {longest}, {1000 * parts[longest]:.1f} of a step's "
            f"{1000 * step.total_s:.1f} ms)"
        )
