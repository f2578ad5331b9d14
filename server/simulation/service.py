"""A whole service in simulated time: router, lock-step and schedulers are the real ones, only the step's time is computed.

The loop is the engine's (`scheduler.engine`), for all ranks at once: agree, take in what arrived, plan, say what comes next,
run, commit. What a step takes is `StepTimes`' business; a request that arrives while a step runs is routed by what the
front knows at that moment and runs in the next one, at the soonest. So does one that waited at a rank and is moved.

Cost grows with events, not with steps times ranks: ranks that only decode coast (see `rank`), and all headers of a step
are merged into one with the same decision (any of the flags, the most decodes, the least budget). With `is_stepwise`
nothing is skipped: the slow oracle of the tests. What it leaves out: tokenizing, HTTP, faults, drafts, stop tokens.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from dispatch.errors import DispatchError
from scheduler.policy.config import DispatchMode
from scheduler.policy.request import FinishReason, RankStats, Request, RequestOutput, SamplingParams
from scheduler.step.lockstep import Agreement, Decision, LockStep
from server.front.requests import MOVE_EVERY_S
from server.front.router import EXPECTED_OUTPUT_TOKENS, Router
from server.simulation.experts import ExpertBalance
from server.simulation.figures import Outcome, SimulationFigures
from server.simulation.rank import (
    NEVER,
    NO_ROWS,
    RankLimits,
    Rows,
    SimulatedRank,
    answer_token,
    prompt_tokens,
    request_id_of,
)
from server.sizing.step_times import StepTimes
from server.traces import PREFIX_TOKENS, TracedRequest

LOOK_STEPS = 256  # between looks at how full the ranks' caches are


class SimulationError(ValueError):
    """A simulation that cannot be run; the message says why and what to do."""


class PreemptedError(RuntimeError):
    """A request was preempted where no rank remembers prefixes: in a service it would find what it has computed."""


@dataclass(slots=True)
class _Open:
    """A request that has no outcome yet."""

    request: Request
    num_moves: int = 0
    num_tokens: int = 0
    first_s: float = 0.0
    last_s: float = 0.0
    num_cached_tokens: int = 0


@dataclass(slots=True)
class _MergedHeaders:
    """A header exchange of one rank that speaks for all."""

    rows: list[list[int]] = field(default_factory=list)

    def post(self, values: Sequence[int]) -> None:
        """See `HeaderExchange`."""
        self.rows.append(list(values))

    def collect(self, timeout_s: float) -> list[list[int]]:
        """See `HeaderExchange`."""
        return [self.rows.pop(0)]

    def interrupt(self, error: DispatchError) -> None:
        """Nobody waits."""

    def close(self) -> None:
        """Nothing is held."""


class _Announced(NamedTuple):
    """What ranks said of the coming step before the one that runs: of all of them, [ranks] int64."""

    decodes: np.ndarray
    open: np.ndarray  # sequences that would run if all who wait had begun


class SimulatedService:
    """Ranks, a front's router, and a clock."""

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
        """Set up an idle service.

        Args:
            has_shared_prefixes: whether a request may begin as another does. Where none does, ranks need not remember
                prefixes, which takes most of the memory and half of the time, unless one is preempted: then `run` raises.
            ended: told the simulated time at every end of a request.

        Raises:
            SchedulerLimitsError: a rank's limits contradict each other.
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
        self._step = 0  # the one that runs, or ran last
        self._open: dict[str, _Open] = {}
        self._dense: dict[int, int] = {}  # a trace's hash ids, numbered
        self._num_routed = 0
        self._inbox: dict[int, list[Request]] = {}
        self._awake: set[int] = set()  # ranks that plan their next step
        for number in range(num_ranks):
            routing.note_size(number, seats=limits.max_num_seqs, block_tokens=limits.block_tokens)
        zeros = np.zeros(num_ranks, dtype=np.int64)
        self._until = np.full(num_ranks, NEVER, dtype=np.int64)  # the last plain step
        self._rows = np.zeros(
            (len(Rows._fields), num_ranks), dtype=np.int64
        )  # of the next step, or the one that runs
        self._coasting_decodes = zeros.copy()  # rows of ranks that coast
        self._charged = zeros.copy()  # of those, rows that the router still expects tokens of
        self._untold = zeros.copy()  # tokens that the router has not been told of
        self._announced = _Announced(zeros.copy(), zeros.copy())
        self._budgets = zeros.copy()  # of prefill, valid where not stale
        self._is_stale = np.ones(num_ranks, dtype=bool)
        self._is_prompt_announced = False
        self._has_work = False
        self._freed: dict[
            int, int
        ] = {}  # ranks that coast while requests wait there, and the step in which one ends
        self._settled: set[int] = set()  # ranks of which more or less may run than they announced
        self._is_crowded = np.zeros(num_ranks, dtype=bool)  # requests wait there
        self._looked_s = 0.0  # when moves were last looked for
        self._unnoted: tuple[float, np.ndarray, np.ndarray, bool] | None = None

    def run(self, trace: Iterator[TracedRequest]) -> SimulationFigures:
        """Serve a trace to its last request and return what was seen.

        Raises:
            PreemptedError: a request was preempted, and prefixes are not remembered that a service would remember.
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
        """Blocks that requests hold, of all ranks."""
        return sum(rank.pool.num_blocks - rank.pool.num_free for rank in self._ranks)

    def _check_preemptions(self) -> None:
        if self._forgets and any(rank.scheduler.stats.num_preemptions for rank in self._ranks):
            raise PreemptedError(f"a request was preempted within {self.now_s:g} s")

    def _run_step(self, agreement: Agreement, coming: "_Arrivals") -> None:
        self._take_inbox()
        self._step += 1
        awake = sorted(self._awake)
        for number in awake:
            planned = self._ranks[number].plan(agreement, self.now_s, is_stepwise=self._is_stepwise)
            self._rows[:, number] = planned
        self._note_pace()
        self._announce(awake)
        begun_s = self.now_s
        prefill, decode = int(self._rows[0].sum()), int(self._rows[1].sum())
        balancedness = self._experts.balancedness(begun_s, prefill + decode)
        cost = self._times.step(self._rows.T, balancedness)
        self._route(coming, begun_s + cost.total_s)
        self.now_s = begun_s + cost.total_s
        self.figures.note_step(self._rows, cost, balancedness, self._times)
        self._experts.note_step(prefill, decode, cost, balancedness, self.now_s)
        self._unnoted = (cost.total_s, self._rows[1].copy(), self._rows[0].copy(), agreement.has_prefill)
        self._commit(awake, begun_s)

    # What ranks say

    def _wake(self, coming: "_Arrivals") -> None:
        """Let all ranks say again what comes, now that something has arrived."""
        if not self._inbox:
            self.now_s = max(self.now_s, coming.next_s)
            self._route(coming, self.now_s)
        self._note_pace()
        self._announce([])
        self._has_work = self._is_prompt_announced = True

    def _agree(self) -> Agreement:
        """Exchange headers: one that says what all of them together do."""
        budget = self._least_budget() if self._awake or self._inbox else 0
        decodes = int(self._announced.decodes.max())
        self._lockstep.post(
            has_work=self._has_work,
            is_stopping=False,
            has_prefill=self._is_prompt_announced,
            num_decodes=decodes,
            prefill_budget=budget,
        )
        return self._lockstep.agree()

    def _least_budget(self) -> int:
        """The least that a rank could take on, by what it announced; 0: no rank knows of a limit."""
        if not self._limits.is_paced:
            return 0
        decodes, num_open = self._announced
        for number in np.flatnonzero(self._is_stale).tolist():
            pace = self._ranks[number].pace
            self._budgets[number] = pace.budget(int(decodes[number]), int(num_open[number]))
        self._is_stale[:] = False
        known = self._budgets[self._budgets > 0]
        return int(known.min()) if known.size else 0

    def _announce(self, awake: list[int]) -> None:
        """Note what ranks say of the coming step now that this one is planned."""
        decodes, num_open = self._announced
        has_prefill = self._step in self._freed.values()
        for number in self._settled.union(awake):
            scheduler = self._ranks[number].scheduler
            coming = scheduler.next_step
            has_prefill = has_prefill or coming.has_prefill
            said = coming.num_decodes, scheduler.num_open
            if said != (decodes[number], num_open[number]):
                decodes[number], num_open[number] = said
                self._is_stale[number] = True
        self._settled.clear()
        self._is_prompt_announced = has_prefill
        self._has_work = bool(awake) or bool(self._coasting_decodes.any())

    def _note_pace(self) -> None:
        """Let ranks learn from the step before: behind what they said before it, ahead of what they say now."""
        if self._unnoted is None:
            return
        seconds, decodes, prefill, has_prefill = self._unnoted
        self._unnoted = None
        if not self._limits.is_paced:
            return
        learns = prefill > 0 if has_prefill else (prefill > 0) | (decodes > 0)
        most_prefill = prefill.max()
        for number in np.flatnonzero(learns).tolist():
            pace = self._ranks[number].pace
            pace.note(
                seconds,
                num_decodes=int(decodes[number]),
                num_prefill=int(prefill[number]),
                is_behind=bool(prefill[number] < most_prefill),
            )
        self._is_stale |= learns

    # Requests

    def _route(self, coming: "_Arrivals", until_s: float) -> None:
        """Give ranks what arrives up to a time, by what the front knows now."""
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
            self._submit(entry, self._routing.pick(prompt_ids, untold=self._untold))

    def _submit(self, entry: _Open, rank: int) -> None:
        """Give a request to a rank. How long its answer will be is not known: it is charged as one without max_tokens."""
        request = entry.request
        self._routing.admit(
            request.request_id,
            rank,
            request.prompt_ids,
            self._limits.max_model_len,
            num_moves=entry.num_moves,
        )
        self._inbox.setdefault(rank, []).append(request)

    def _move(self) -> None:
        """Move requests that wait to ranks with room, as the front does: by what ranks say behind a step, and not too often."""
        is_due = self.now_s - self._looked_s >= MOVE_EVERY_S
        if not is_due or not self._is_crowded.any() or self._is_crowded.all():
            return
        self._looked_s = self.now_s
        for number, rank in enumerate(self._ranks):
            self._catch_up(number)
            stats = rank.scheduler.stats._asdict()
            self._routing.note_stats(RankStats(rank=number, step=self._step, num_step_tokens=0, **stats))
        moves = self._routing.plan_moves(lambda request_id: self._open[request_id].request.prompt_ids)
        for request_id, number in moves.items():
            entry = self._open[request_id]
            if not self._takes_back(entry.request, number):
                self._routing.begin(request_id)
                continue
            entry.num_moves += 1
            self.figures.num_request_moves += 1
            prompt_ids = entry.request.prompt_ids
            target = self._routing.take_back(request_id, prompt_ids)
            self._submit(entry, self._routing.pick(prompt_ids) if target is None else target)
        for number in set(moves.values()):
            self._settle(number)

    def _takes_back(self, request: Request, number: int) -> bool:
        """Take a request back from a rank that has not begun with it; says whether."""
        if request in self._inbox.get(number, ()):
            self._inbox[number].remove(request)
            return True
        output = self._ranks[number].scheduler.withdraw(request.request_id)
        return output is not None and output.is_returned

    def _take_inbox(self) -> None:
        for number, requests in self._inbox.items():
            rank = self._ranks[number]
            self._catch_up(number)
            for request in requests:
                rank.scheduler.add(request)
            for output in rank.scheduler.expire(self.now_s):  # those that cannot be served
                self._take(output)
            self._settle(number)
        self._inbox.clear()

    def _commit(self, awake: list[int], begun_s: float) -> None:
        """Take what the step yielded; `_rows` becomes the next one's."""
        num_taken = int(self._coasting_decodes.sum())
        for number in awake:
            rank = self._ranks[number]
            num_taken += len(rank.taken)
            for sequence in rank.taken:
                self._told(sequence.request.request_id, 1)
            for output in rank.commit(self._step):
                self._take(output)
        self.figures.note_gaps(self.now_s - begun_s, num_taken)
        self._untold += self._charged
        self._rows[2] += self._coasting_decodes
        for number in np.flatnonzero(self._until == self._step).tolist():
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
        """Take what a rank yielded in a step that it planned."""
        entry = self._open[output.request_id]
        num_tokens = len(output.token_ids)
        if not entry.num_tokens:
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
            Outcome(
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
        """Find out whether a rank that is up to date coasts, plans its next step, or has nothing to do."""
        scheduler = self._ranks[number].scheduler
        num_steps = 0 if self._is_stepwise else scheduler.num_plain_steps
        self._settled.add(number)
        self._is_crowded[number] = bool(scheduler.stats.num_waiting)
        self._freed.pop(number, None)
        self._awake.discard(number)
        self._charged[number] = self._coasting_decodes[number] = 0
        self._until[number] = NEVER
        self._rows[:, number] = NO_ROWS
        if num_steps:
            self._coast(number, num_steps)
        elif scheduler.has_work:
            self._awake.add(number)

    def _coast(self, number: int, num_steps: int) -> None:
        rank = self._ranks[number]
        ids = [sequence.request.request_id for sequence in rank.scheduler.running]
        left = [EXPECTED_OUTPUT_TOKENS - self._open[request_id].num_tokens for request_id in ids]
        charged = [count for count in left if count > 0]
        rows = rank.coasting_rows()
        self._rows[:, number] = rows
        self._coasting_decodes[number] = rows.decode
        self._charged[number] = len(charged)
        self._until[number] = self._step + min([num_steps, *charged])
        if rank.scheduler.stats.num_waiting and num_steps == rank.scheduler.num_steps_to_end:
            self._freed[number] = self._step + num_steps

    def _catch_up(self, number: int) -> None:
        """Bring a rank that coasts up to date with the last step."""
        ended = self._ranks[number].catch_up(self._step, self._told)
        self._untold[number] = 0
        for output in ended:
            self._end(output)

    def _told(self, request_id: str, num_tokens: int) -> None:
        """Take that a request got so many tokens up to now, of which no output tells."""
        entry = self._open[request_id]
        entry.num_tokens += num_tokens
        entry.last_s = self.now_s
        self._routing.progress(request_id, num_tokens)


class _Arrivals:
    """A trace, of which the next request's time is known."""

    def __init__(self, trace: Iterator[TracedRequest]) -> None:
        self._trace = trace
        self._next = next(trace, None)

    @property
    def next_s(self) -> float:
        """When the next one arrives; infinite where there is none."""
        return np.inf if self._next is None else self._next.arrival_s

    def take(self) -> TracedRequest:
        """Take the next one; there must be one."""
        assert self._next is not None, "there is nothing to take"
        taken, self._next = self._next, next(self._trace, None)
        return taken
