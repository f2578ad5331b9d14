"""A whole service in simulated time: the real router, lock-step and schedulers, with computed step times.

The loop is the engine's (`scheduler.engine`), for all ranks at once: agree, take in arrivals, plan, announce the next step,
run, commit. `StepTimes` determines the duration of a step. A request that arrives during a step is routed by the front's
state at that time, and runs in the next step at the earliest. So does a request that moves. Moves of running requests are
only looked for while requests wait at some rank and at some rank none does; the front looks always.

The cost depends on events, not on steps times ranks: ranks that only decode coast (see `rank`), and all headers of a step
are merged into one with the same decision (any of the flags, the most decodes, the least budget). `is_stepwise` skips
nothing: the slow oracle of the tests. Not simulated: tokenizing, HTTP, faults, drafts, stop tokens.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from dispatch.errors import DispatchError
from scheduler.policy.config import DispatchMode
from scheduler.policy.request import FinishReason, RankStats, Request, RequestOutput, SamplingParams
from scheduler.step.lockstep import Agreement, Decision, LockStep
from server.front.loads import EXPECTED_OUTPUT_TOKENS, MoveCause
from server.front.moves import MOVE_EVERY_S
from server.front.router import Router
from server.tools.simulate.coming_step import Announcements, Coasting
from server.tools.simulate.experts import ExpertBalance
from server.tools.simulate.figures import RequestOutcome, SimulationFigures
from server.tools.simulate.rank import RankLimits, SimulatedRank, answer_token, prompt_tokens, request_id_of
from server.tools.size.costs.step_times import StepTimes
from server.tools.traces import PREFIX_TOKENS, TracedRequest

LOOK_STEPS = 256  # between samples of the ranks' cache usage


class SimulationError(ValueError):
    """The simulation is not possible; the message has the reason and the remedy."""


class PreemptedError(RuntimeError):
    """A request was preempted while ranks do not remember prefixes; in a service it would find its computed prefix."""


@dataclass(slots=True)
class _Open:
    """A request without an outcome yet."""

    request: Request  # with the tokens that it got at earlier ranks
    num_moves: int = 0
    is_begun: bool = False  # by its present rank
    num_tokens: int = 0
    first_s: float = 0.0
    last_s: float = 0.0
    num_cached_tokens: int = 0


@dataclass(slots=True)
class _MergedHeaders:
    """A header exchange of one rank that represents all ranks."""

    rows: list[list[int]] = field(default_factory=list)

    def post(self, values: Sequence[int]) -> None:
        self.rows.append(list(values))

    def collect(self, timeout_s: float) -> list[list[int]]:
        return [self.rows.pop(0)]

    def interrupt(self, error: DispatchError) -> None:
        """Do nothing: the exchange never waits."""

    def close(self) -> None:
        """Do nothing: the exchange holds no resources."""


class SimulatedService:
    """Ranks, the front's router, and a clock."""

    def __init__(
        self,
        num_ranks: int,
        limits: RankLimits,
        routing: Router,
        times: StepTimes,
        experts: ExpertBalance,
        *,
        is_stepwise: bool = False,
        has_shared_prefixes: bool = True,
        ended: Callable[[float], None] | None = None,
    ) -> None:
        """Create an idle service.

        Args:
            has_shared_prefixes: Whether requests may share prefixes. If not, ranks need not remember prefixes, which takes
                most of the memory and half of the time. If a request is then preempted, `run` raises.
            ended: Called with the simulated time at every end of a request.

        Raises:
            SchedulerLimitsError: A rank's limits contradict each other.
        """
        self._forgets = limits.enable_prefix_caching and not has_shared_prefixes
        if self._forgets:
            limits = limits._replace(enable_prefix_caching=False)
        self._ranks = [SimulatedRank(limits) for _ in range(num_ranks)]
        self._ended = ended
        self._limits, self._routing, self._times, self._experts = limits, routing, times, experts
        self._is_stepwise = is_stepwise
        self._lockstep = LockStep(
            _MergedHeaders(),
            epoch=0,
            timeout_s=1.0,
            mode=DispatchMode.AUTO,
            max_num_batched_tokens=limits.max_num_batched_tokens,
        )
        self.figures = SimulationFigures(num_ranks)
        self.now_s = 0.0
        self._step = 0  # the running or last step
        self._open: dict[str, _Open] = {}
        self._dense: dict[int, int] = {}  # hash ids of a trace -> dense numbers
        self._num_routed = 0
        self._inbox: dict[int, list[Request]] = {}
        self._awake: set[int] = set()  # ranks that plan their next step
        for number in range(num_ranks):
            routing.note_size(number, seats=limits.max_num_seqs, block_tokens=limits.block_tokens)
        self._coasting = Coasting(num_ranks)
        self._announced = Announcements(self._ranks, is_paced=limits.is_paced)
        self._is_prompt_announced = False
        self._has_work = False
        self._settled: set[int] = set()  # ranks with a possibly outdated announcement
        self._is_crowded = np.zeros(num_ranks, dtype=bool)  # the rank has waiting requests
        self._looked_s = 0.0  # time of the last search for moves

    def run(self, trace: Iterator[TracedRequest]) -> SimulationFigures:
        """Serve a trace to its last request and return the figures.

        Raises:
            PreemptedError: A request was preempted, and prefixes that a service would remember are not remembered.
        """
        coming = _Arrivals(trace)
        while coming.next_s < np.inf or self._open:
            agreement = self._agree()
            if agreement.decision is Decision.SLEEP:
                self._wake(coming)
                agreement = self._agree()
            self._run_step(agreement, coming)
        self._check_preemptions()
        self.figures.end(self.now_s, [rank.scheduler.stats for rank in self._ranks])
        return self.figures

    @property
    def num_held_blocks(self) -> int:
        """Return the number of blocks that requests hold on all ranks."""
        return sum(rank.pool.num_blocks - rank.pool.num_free for rank in self._ranks)

    def _check_preemptions(self) -> None:
        if self._forgets and any(rank.scheduler.stats.num_preemptions for rank in self._ranks):
            raise PreemptedError(f"a request was preempted within {self.now_s:g} s")

    def _run_step(self, agreement: Agreement, coming: "_Arrivals") -> None:
        self._take_inbox()
        self._step += 1
        awake, rows = sorted(self._awake), self._coasting.rows
        for number in awake:
            rows[:, number] = self._ranks[number].plan(agreement, self.now_s, is_stepwise=self._is_stepwise)
        self._announced.learn()
        self._announce(awake)
        begun_s = self.now_s
        prefill, decode = int(rows[0].sum()), int(rows[1].sum())
        balancedness = self._experts.balancedness(begun_s, prefill + decode)
        cost = self._times.step(rows.T, balancedness)
        self._route(coming, begun_s + cost.total_s)
        self.now_s = begun_s + cost.total_s
        self.figures.note_step(rows, cost, balancedness, self._times)
        self._experts.note_step(prefill, decode, cost, balancedness, self.now_s)
        self._announced.keep(cost.total_s, rows, has_prefill=agreement.has_prefill)
        self._commit(awake, begun_s)

    # Announcements of ranks

    def _wake(self, coming: "_Arrivals") -> None:
        """Let all ranks announce their next step again, after an arrival."""
        if not self._inbox:
            self.now_s = max(self.now_s, coming.next_s)
            self._route(coming, self.now_s)
        self._announced.learn()
        self._announce([])
        self._has_work = self._is_prompt_announced = True

    def _agree(self) -> Agreement:
        """Exchange headers: a single one that merges those of all ranks."""
        budget = self._announced.least_budget() if self._awake or self._inbox else 0
        decodes = int(self._announced.decodes.max())
        self._lockstep.post(
            has_work=self._has_work,
            is_stopping=False,
            has_prefill=self._is_prompt_announced,
            num_decodes=decodes,
            prefill_budget=budget,
        )
        return self._lockstep.agree()

    def _announce(self, awake: list[int]) -> None:
        """Record the ranks' announcements of the coming step, after this one is planned."""
        has_prefill = self._announced.announce(self._settled.union(awake))
        self._settled.clear()
        self._is_prompt_announced = has_prefill or self._coasting.frees(self._step)
        self._has_work = bool(awake) or bool(self._coasting.decodes.any())

    # Requests

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
            self._submit(entry, self._routing.pick(prompt_ids, untold=self._coasting.untold))

    def _submit(self, entry: _Open, rank: int) -> None:
        """Give a request to a rank. Its answer's length is unknown, so it is charged like one without max_tokens."""
        request = entry.request
        self._routing.admit(
            request.request_id,
            rank,
            [*request.prompt_ids, *request.replayed_ids] if request.replayed_ids else request.prompt_ids,
            self._limits.max_model_len,
            num_moves=entry.num_moves,
            is_resumed=bool(request.replayed_ids),
        )
        entry.is_begun = False
        self._inbox.setdefault(rank, []).append(request)

    def _move(self) -> None:
        """Move requests to ranks with room, as the front does: by the ranks' reports after a step, at intervals."""
        is_due = self.now_s - self._looked_s >= MOVE_EVERY_S
        if not is_due or not self._is_crowded.any() or self._is_crowded.all():
            return
        self._looked_s = self.now_s
        for number, rank in enumerate(self._ranks):
            self._catch_up(number)
            stats = rank.scheduler.stats._asdict()
            self._routing.note_stats(RankStats(rank=number, step=self._step, num_step_tokens=0, **stats))
        waiting = self._routing.plan_moves(self._prompt_of)
        running = self._routing.plan_relief(self._prompt_of)
        for cause, moves in ((MoveCause.QUEUE, waiting), (MoveCause.MEMORY, running)):
            for request_id, number in moves.items():
                self._withdraw(self._open[request_id], number, cause)
        for number in {*waiting.values(), *running.values()}:
            self._settle(number)

    def _prompt_of(self, request_id: str) -> Sequence[int]:
        return self._open[request_id].request.prompt_ids

    def _withdraw(self, entry: _Open, number: int, cause: MoveCause) -> None:
        """Submit a request to another rank, unless it has begun and may only move while it waits."""
        request = entry.request
        request_id = request.request_id
        if not self._takes_back(request, number, even_if_begun=cause is MoveCause.MEMORY):
            self._routing.begin(request_id)
            return
        entry.num_moves += 1
        self.figures.num_request_moves[cause] += 1
        released = self._routing.take_back(request_id, request.prompt_ids)
        entry.request = replace(request, replayed_ids=(answer_token(request_id),) * entry.num_tokens)
        target = released.target
        self._submit(entry, self._routing.pick(request.prompt_ids) if target is None else target)

    def _takes_back(self, request: Request, number: int, *, even_if_begun: bool) -> bool:
        """Take a request back from its rank. Returns False if the rank has begun it and may keep it."""
        if request in self._inbox.get(number, ()):
            self._inbox[number].remove(request)
            return True
        scheduler = self._ranks[number].scheduler
        output = scheduler.withdraw(request.request_id, even_if_begun=even_if_begun)
        return output is not None and output.is_returned

    def _take_inbox(self) -> None:
        for number, requests in self._inbox.items():
            rank = self._ranks[number]
            self._catch_up(number)
            for request in requests:
                rank.scheduler.add(request)
            for output in rank.scheduler.expire(self.now_s):  # requests that cannot be served
                self._take(output)
            self._settle(number)
        self._inbox.clear()

    def _commit(self, awake: list[int], begun_s: float) -> None:
        """Record the results of the step."""
        num_taken = int(self._coasting.decodes.sum())
        for number in awake:
            rank = self._ranks[number]
            num_taken += len(rank.taken)
            for sequence in rank.taken:
                self._told(sequence.request.request_id, 1)
            for output in rank.commit(self._step):
                self._take(output)
        self.figures.note_gaps(self.now_s - begun_s, num_taken)
        for number in self._coasting.end_step(self._step):
            self._catch_up(number)
            self._settle(number)
        for number in awake:
            self._settle(number)
        self._move()
        if self._step % LOOK_STEPS == 0:
            for number in range(len(self._ranks)):
                self._catch_up(number)
            self._check_preemptions()
            self.figures.note_cache([rank.kv_usage for rank in self._ranks])

    def _take(self, output: RequestOutput) -> None:
        """Record an output of a step that the rank planned."""
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
            entry.last_s = self.now_s
            entry.num_tokens += num_tokens
            self._routing.progress(output.request_id, num_tokens)
        if output.finish_reason is not None:
            self._end(output)

    def _end(self, output: RequestOutput) -> None:
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

    # Coasting

    def _settle(self, number: int) -> None:
        """Determine whether an up-to-date rank coasts, plans its next step, or is idle."""
        scheduler = self._ranks[number].scheduler
        num_steps = 0 if self._is_stepwise else scheduler.num_plain_steps
        self._settled.add(number)
        self._is_crowded[number] = bool(scheduler.stats.num_waiting)
        self._awake.discard(number)
        self._coasting.stop(number)
        if num_steps:
            self._coast(number, num_steps)
        elif scheduler.has_work:
            self._awake.add(number)

    def _coast(self, number: int, num_steps: int) -> None:
        rank = self._ranks[number]
        ids = [sequence.request.request_id for sequence in rank.scheduler.running]
        entries = [self._open[request_id] for request_id in ids]
        # The router was charged again after a move.
        replayed = [len(entry.request.replayed_ids) for entry in entries]
        left = [
            EXPECTED_OUTPUT_TOKENS - entry.num_tokens + count
            for entry, count in zip(entries, replayed, strict=True)
        ]
        charged = [count for count in left if count > 0]
        frees = rank.scheduler.stats.num_waiting and num_steps == rank.scheduler.num_steps_to_end
        self._coasting.begin(
            number,
            rank.coasting_rows(),
            charged=len(charged),
            until=self._step + min([num_steps, *charged]),
            freed=self._step + num_steps if frees else None,
        )

    def _catch_up(self, number: int) -> None:
        """Advance a coasting rank to the last step."""
        ended = self._ranks[number].catch_up(self._step, self._told)
        self._coasting.untold[number] = 0
        for output in ended:
            self._end(output)

    def _told(self, request_id: str, num_tokens: int) -> None:
        """Record tokens of a request that produced no output, up to now."""
        entry = self._open[request_id]
        entry.num_tokens += num_tokens
        entry.last_s = self.now_s
        self._routing.progress(request_id, num_tokens)


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
