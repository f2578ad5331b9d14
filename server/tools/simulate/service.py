"""A whole service in simulated time: the real router, lock-step and schedulers, with computed step times.

The service moves the time from event to event: an arrival, or the end of a pool's step (`pool`). A request is routed by the
front's state when it arrives, and runs in its rank's next step at the earliest. So does a request that moves. Moves of running
requests are only looked for while requests wait at some rank and at some rank none does; the front looks always.

With roles, a prefill rank hands a request over with its first token, through simulated host memory (`host_tier`). Not
simulated: tokenizing, HTTP, faults, drafts, stop tokens.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from scheduler.policy.request import FinishReason, RankStats, Request, RequestOutput, SamplingParams
from scheduler.policy.scheduler import SchedulerStats
from server.front.routing.loads import EXPECTED_OUTPUT_TOKENS, MoveCause
from server.front.routing.moves import MOVE_EVERY_S
from server.front.routing.router import Assignment, Router
from server.options.pools import Pool, have_roles
from server.tools.simulate.experts import ExpertBalance
from server.tools.simulate.figures import RequestOutcome, SimulationFigures
from server.tools.simulate.flags import TRANSFER_TOKENS_PER_S
from server.tools.simulate.host_tier import HostMemory, HostTier
from server.tools.simulate.pool import SimulatedPool
from server.tools.simulate.rank import RankLimits, SimulatedRank, answer_token, prompt_tokens, request_id_of
from server.tools.size.costs.step_times import StepTimes
from server.tools.traces import PREFIX_TOKENS, TracedRequest

LOOK_STEPS = 256  # between samples of the ranks' cache usage
_HOST_SHARE = 4  # the host's memory holds this many times the blocks of all ranks


class SimulationError(ValueError):
    """The simulation is not possible; the message has the reason and the remedy."""


class PreemptedError(RuntimeError):
    """A request was preempted while ranks do not remember prefixes; in a service it would find its computed prefix."""


class PoolSetup(NamedTuple):
    """A pool to simulate."""

    pool: Pool
    limits: RankLimits
    times: StepTimes
    experts: ExpertBalance


@dataclass(slots=True)
class _Open:
    """A request without an outcome yet."""

    request: Request  # with the tokens that it got at earlier ranks
    rank: int = 0
    num_moves: int = 0
    is_begun: bool = False  # by its present rank
    is_handed_over: bool = False  # and has no token of its present rank
    num_tokens: int = 0
    first_s: float = 0.0
    last_s: float = 0.0
    num_cached_tokens: int = 0


class SimulatedService:
    """Pools, the front's router, and a clock."""

    def __init__(
        self,
        setups: Sequence[PoolSetup],
        routing: Router,
        *,
        is_stepwise: bool = False,
        has_shared_prefixes: bool = True,
        transfer_tokens_per_s: float = TRANSFER_TOKENS_PER_S,
        ended: Callable[[float], None] | None = None,
    ) -> None:
        """Create an idle service.

        Args:
            has_shared_prefixes: Whether requests may share prefixes. If not, ranks need not remember prefixes, which takes
                most of the memory and half of the time. If a request is then preempted, `run` raises. Pools with roles
                remember them always: requests are handed over through them.
            transfer_tokens_per_s: Speed of hand-overs.
            ended: Called with the simulated time at every end of a request.

        Raises:
            SchedulerLimitsError: A rank's limits contradict each other.
        """
        pools = [setup.pool for setup in setups]
        self._has_roles = have_roles(pools)
        is_caching = any(setup.limits.enable_prefix_caching for setup in setups)
        self._forgets = is_caching and not has_shared_prefixes and not self._has_roles
        self.figures = SimulationFigures(pools[-1].ranks.stop)
        self._pools: list[SimulatedPool] = []
        for _, limits, times, experts in setups:
            if self._forgets:
                limits = limits._replace(enable_prefix_caching=False)
            pool = SimulatedPool(
                len(pools[len(self._pools)].ranks),
                limits,
                times,
                experts,
                self,
                self.figures,
                is_stepwise=is_stepwise,
            )
            self._pools.append(pool)
        self._places = [(pool, number) for pool in self._pools for number in range(len(pool.ranks))]
        self._ended = ended
        self._max_model_len = max(setup.limits.max_model_len for setup in setups)
        self._routing = routing
        self.now_s = 0.0
        self._num_steps = 0  # of all pools
        self._open: dict[str, _Open] = {}
        self._dense: dict[int, int] = {}  # hash ids of a trace -> dense numbers
        self._num_routed = 0
        self._withdrawn: list[tuple[str, int, MoveCause]] = []  # of requests at pools during their steps
        self._looked_s = 0.0  # time of the last search for moves
        self._introduce(setups, transfer_tokens_per_s)

    def _introduce(self, setups: Sequence[PoolSetup], transfer_tokens_per_s: float) -> None:
        """Tell the router the ranks' sizes and roles, and connect the ranks to host memory."""
        num_blocks = sum(limits.num_blocks * pool.num_ranks for pool, limits, _, _ in setups)
        memory = HostMemory(_HOST_SHARE * num_blocks)
        for pool, limits, _, _ in setups:
            for rank in pool.ranks:
                self._routing.note_size(
                    rank,
                    seats=limits.max_num_seqs,
                    block_tokens=limits.block_tokens,
                    step_tokens=limits.max_num_batched_tokens,
                )
                self._routing.set_role(rank, pool.role)
                if self._has_roles:
                    block_s = limits.block_tokens / transfer_tokens_per_s
                    self._rank(rank).scheduler.use_tiers(HostTier(memory, lambda: self.now_s, block_s))

    def _rank(self, rank: int) -> SimulatedRank:
        pool, number = self._places[rank]
        return pool.ranks[number]

    def run(self, trace: Iterator[TracedRequest]) -> SimulationFigures:
        """Serve a trace to its last request and return the figures.

        Raises:
            PreemptedError: A request was preempted, and prefixes that a service would remember are not remembered.
        """
        coming = _Arrivals(trace)
        while coming.next_s < np.inf or self._open:
            pool = min(self._pools, key=lambda each: each.end_s)
            if coming.next_s <= pool.end_s:
                self.now_s = max(self.now_s, coming.next_s)
                self._route(coming, self.now_s)
            else:
                self.now_s = pool.end_s
                self._commit(pool)
                if coming.next_s < np.inf or self._open:
                    pool.begin(self.now_s)
            for each in self._pools:
                if each.is_asleep and each.inbox:
                    each.wake(self.now_s)
        self._check_preemptions()
        self.figures.end(self.now_s, self._all_stats())
        return self.figures

    @property
    def num_held_blocks(self) -> int:
        """Return the number of blocks that requests hold on all ranks."""
        for pool, number in self._places:
            pool.ranks[number].scheduler.collect(self.now_s)
        return sum(
            pool.ranks[number].pool.num_blocks - pool.ranks[number].pool.num_free
            for pool, number in self._places
        )

    def _all_stats(self) -> list[SchedulerStats]:
        return [pool.ranks[number].scheduler.stats for pool, number in self._places]

    def _check_preemptions(self) -> None:
        if self._forgets and any(stats.num_preemptions for stats in self._all_stats()):
            raise PreemptedError(f"a request was preempted within {self.now_s:g} s")

    def _route(self, coming: "_Arrivals", until_s: float) -> None:
        """Route the requests that arrive up to a time, by the front's current state."""
        while coming.next_s <= until_s:
            traced = coming.take()
            number, self._num_routed = self._num_routed, self._num_routed + 1
            hash_ids = tuple(self._dense.setdefault(each, len(self._dense)) for each in traced.hash_ids)
            prompt_ids = prompt_tokens(number, traced.input_tokens, hash_ids, PREFIX_TOKENS)
            request = Request(
                request_id=request_id_of(number),
                prompt_ids=prompt_ids,
                params=SamplingParams(max_tokens=traced.output_tokens),
                arrival_s=traced.arrival_s,
            )
            self._open[request.request_id] = entry = _Open(request)
            self._submit(entry, self._assign(prompt_ids))

    def _assign(self, token_ids: Sequence[int], rank: int | None = None) -> Assignment:
        untold = np.concatenate([pool.untold for pool in self._pools])
        return self._routing.assign(token_ids, untold=untold, rank=rank)

    def _submit(self, entry: _Open, places: Assignment) -> None:
        """Give a request to a rank. Its answer's length is unknown, so it is charged like one without max_tokens."""
        entry.request = request = replace(entry.request, hands_over=places.next_rank is not None)
        self._routing.admit(
            request.request_id,
            places.rank,
            [*request.prompt_ids, *request.replayed_ids] if request.replayed_ids else request.prompt_ids,
            self._max_model_len,
            num_moves=entry.num_moves,
            is_resumed=bool(request.replayed_ids),
            next_rank=places.next_rank,
        )
        entry.rank, entry.is_begun = places.rank, False
        pool, number = self._places[places.rank]
        pool.inbox.setdefault(number, []).append(request)

    # Moves

    def _move(self, pool: SimulatedPool) -> None:
        """Move requests to ranks with room, as the front does: by the ranks' reports after a step, at intervals."""
        if self.now_s - self._looked_s >= MOVE_EVERY_S and self._may_move():
            self._looked_s = self.now_s
            for rank, (each, number) in enumerate(self._places):
                each.catch_up(number)
                stats = each.ranks[number].scheduler.stats._asdict()
                self._routing.note_stats(
                    RankStats(rank=rank, step=self._num_steps, num_step_tokens=0, **stats)
                )
            plans = [
                (MoveCause.HAND_OVER, self._routing.plan_hand_overs()),
                (MoveCause.QUEUE, self._routing.plan_moves(self._prompt_of)),
                (MoveCause.MEMORY, self._routing.plan_relief(self._prompt_of)),
            ]
            self._withdrawn += [
                (request_id, rank, cause) for cause, moves in plans for request_id, rank in moves.items()
            ]
        if self._withdrawn:
            self._withdraw_from(pool)

    def _may_move(self) -> bool:
        is_crowded = np.concatenate([pool.is_crowded for pool in self._pools])
        return self._has_roles or bool(is_crowded.any() and not is_crowded.all())

    def _prompt_of(self, request_id: str) -> Sequence[int]:
        return self._open[request_id].request.prompt_ids

    def _withdraw_from(self, pool: SimulatedPool) -> None:
        """Take the chosen requests of a pool after its step. Those of other pools follow after theirs."""
        here = [each for each in self._withdrawn if self._places[each[1]][0] is pool]
        self._withdrawn = [each for each in self._withdrawn if each not in here]
        for request_id, rank, cause in here:
            entry = self._open.get(request_id)
            if entry is not None and entry.rank == rank:
                self._withdraw(entry, rank, cause)
        for rank in {rank for _, rank, _ in here}:
            pool.settle(self._places[rank][1])

    def _withdraw(self, entry: _Open, rank: int, cause: MoveCause) -> None:
        """Submit a request to another rank, unless it has begun and may only move while it waits."""
        request = entry.request
        request_id = request.request_id
        if not self._takes_back(request, rank, even_if_begun=cause is not MoveCause.QUEUE):
            self._routing.begin(request_id)
            return
        entry.num_moves += cause is not MoveCause.HAND_OVER
        self.figures.num_request_moves[cause] += 1
        released = self._routing.take_back(request_id, request.prompt_ids)
        self._resume(entry, released.target)

    def _resume(self, entry: _Open, target: int | None, *, num_saved_tokens: int = 0) -> None:
        """Submit a request with its tokens again."""
        request = entry.request
        replayed_ids = (answer_token(request.request_id),) * entry.num_tokens
        entry.request = replace(request, replayed_ids=replayed_ids, num_awaited_tokens=num_saved_tokens)
        if target is not None and replayed_ids:
            self._submit(entry, Assignment(target))
        else:
            self._submit(entry, self._assign([*request.prompt_ids, *replayed_ids], target))

    def _takes_back(self, request: Request, rank: int, *, even_if_begun: bool) -> bool:
        """Take a request back from its rank. Returns False if the rank has begun it and may keep it."""
        pool, number = self._places[rank]
        if request in pool.inbox.get(number, ()):
            pool.inbox[number].remove(request)
            return True
        scheduler = pool.ranks[number].scheduler
        output = scheduler.withdraw(request.request_id, even_if_begun=even_if_begun)
        return output is not None and output.is_returned

    # Results

    def _commit(self, pool: SimulatedPool) -> None:
        """Record the results of a pool's step."""
        self._num_steps += 1
        pool.commit()
        self._move(pool)
        if self._num_steps % LOOK_STEPS == 0:
            for each, number in self._places:
                each.catch_up(number)
            self._check_preemptions()
            self.figures.note_cache([each.ranks[number].kv_usage for each, number in self._places])

    def take(self, output: RequestOutput) -> None:
        """Record an output of a step that a rank planned."""
        entry = self._open[output.request_id]
        num_tokens = len(output.token_ids)
        if not entry.is_begun:
            entry.is_begun = True
            self._routing.begin(output.request_id)
        if num_tokens:
            assert output.token_ids[-1] == answer_token(output.request_id), "requests get their own tokens"
            if entry.num_tokens:
                self.figures.note_gaps(self.now_s - entry.last_s, num_tokens)
            else:
                entry.first_s, entry.num_cached_tokens = self.now_s, output.num_cached_tokens
            if entry.is_handed_over:
                entry.is_handed_over = False
                num_computed = len(entry.request.prompt_ids) - output.num_cached_tokens
                self.figures.note_hand_over(self.now_s - entry.last_s, num_computed)
            entry.last_s = self.now_s
            entry.num_tokens += num_tokens
            self._routing.progress(output.request_id, num_tokens)
        if output.is_returned:
            self._hand_over(entry, output)
        elif output.finish_reason is not None:
            self.end(output)

    def _hand_over(self, entry: _Open, output: RequestOutput) -> None:
        """Submit a request to the rank that continues it, or to its present one if no other rank has room."""
        _, target = self._routing.take_back(output.request_id, entry.request.prompt_ids, is_handed_over=True)
        if target != entry.rank:
            self.figures.num_request_moves[MoveCause.HAND_OVER] += 1
            entry.is_handed_over = True
        self._resume(entry, target, num_saved_tokens=output.num_saved_tokens)

    def end(self, output: RequestOutput) -> None:
        """Record the end of a request. Its tokens are recorded already."""
        entry = self._open.pop(output.request_id)
        self._routing.retire(output.request_id)
        self.figures.note_end(
            RequestOutcome(
                arrival_s=entry.request.arrival_s,
                first_s=entry.first_s,
                last_s=entry.last_s,
                num_prompt_tokens=len(entry.request.prompt_ids),
                num_cached_tokens=entry.num_cached_tokens,
                num_tokens=entry.num_tokens,
                is_served=output.finish_reason is not FinishReason.ERROR,
            )
        )
        if self._ended is not None:
            self._ended(self.now_s)

    def told(self, request_id: str, num_tokens: int, at_s: float) -> None:
        """Record tokens of a request that produced no output, the last of them at a time."""
        entry = self._open[request_id]
        entry.num_tokens += num_tokens
        entry.last_s = at_s
        self._routing.progress(request_id, num_tokens)

    def num_expected(self, request_id: str) -> int:
        """Return how many more tokens the router expects from a request; 0 or less for none."""
        entry = self._open[request_id]
        # The router was charged again after a move.
        return EXPECTED_OUTPUT_TOKENS - entry.num_tokens + len(entry.request.replayed_ids)


class _Arrivals:
    """A trace with a known time of the next request."""

    def __init__(self, trace: Iterator[TracedRequest]) -> None:
        self._trace = trace
        self._next = next(trace, None)

    @property
    def next_s(self) -> float:
        """Return the time of the next request, or infinity at the end."""
        return np.inf if self._next is None else self._next.arrival_s

    def take(self) -> TracedRequest:
        """Return the next request and remove it; there must be one."""
        assert self._next is not None, "the trace has ended"
        taken, self._next = self._next, next(self._trace, None)
        return taken
