"""One pool of a simulated service: its ranks in lock-step, and which of them plan, coast or sleep.

The loop is the engine's (`scheduler.engine`), for all ranks at once: agree, take in arrivals, plan, announce the next step,
run, commit. `StepTimes` determines the duration of a step. A request that arrives during a step runs in the next one at the
earliest.

The cost depends on events, not on steps times ranks: ranks that only decode coast (see `rank`), and all headers of a step
are merged into one with the same decision (any of the flags, the most decodes, the least budget). `is_stepwise` skips
nothing: the slow oracle of the tests.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from dispatch.errors import DispatchError
from scheduler.policy.config import DispatchMode
from scheduler.policy.request import Request, RequestOutput
from scheduler.step.lockstep import Agreement, Decision, LockStep
from server.tools.simulate.coming_step import Announcements, Coasting
from server.tools.simulate.experts import ExpertBalance
from server.tools.simulate.figures import SimulationFigures
from server.tools.simulate.rank import RankLimits, SimulatedRank
from server.tools.size.costs.step_times import StepTimes

NEVER_S = np.inf  # the end of no step
LEAST_STEP_S = 1e-4  # of ranks that only wait for blocks


class PoolRequests(Protocol):
    """What a pool reports about its requests, and needs to know of them."""

    def told(self, request_id: str, num_tokens: int, at_s: float) -> None:
        """Record tokens of a request that produced no output, the last of them at a time."""

    def take(self, output: RequestOutput) -> None:
        """Record an output of a step that a rank planned."""

    def end(self, output: RequestOutput) -> None:
        """Record the end of a request. Its tokens are recorded already."""

    def num_expected(self, request_id: str) -> int:
        """Return how many more tokens the router expects from a request; 0 or less for none."""


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


class SimulatedPool:
    """Ranks that share steps. Its caller moves the time."""

    def __init__(
        self,
        num_ranks: int,
        limits: RankLimits,
        times: StepTimes,
        experts: ExpertBalance,
        requests: PoolRequests,
        figures: SimulationFigures,
        *,
        is_stepwise: bool = False,
    ) -> None:
        """Create an idle pool.

        Raises:
            SchedulerLimitsError: A rank's limits contradict each other.
        """
        self.ranks = [SimulatedRank(limits) for _ in range(num_ranks)]
        self.inbox: dict[int, list[Request]] = {}  # by rank of the pool
        self.end_s = NEVER_S  # of the running step
        self.num_steps = 0  # done
        self._done_s = 0.0  # end of the last one
        self.is_crowded = np.zeros(num_ranks, dtype=bool)  # the rank has waiting requests
        self._times, self._experts, self._requests, self._figures = times, experts, requests, figures
        self._is_stepwise = is_stepwise
        self._lockstep = LockStep(
            _MergedHeaders(),
            epoch=0,
            timeout_s=1.0,
            mode=DispatchMode.AUTO,
            max_num_batched_tokens=limits.max_num_batched_tokens,
        )
        self._begun_s = 0.0  # of the running step
        self._awake: set[int] = set()  # ranks that plan their next step
        self._planned: list[int] = []  # ranks that planned the running step
        self._coasting = Coasting(num_ranks)
        self._announced = Announcements(self.ranks, is_paced=limits.is_paced)
        self._is_prompt_announced = False
        self._has_work = False
        self._settled: set[int] = set()  # ranks with a possibly outdated announcement

    @property
    def untold(self) -> np.ndarray:
        """Tokens of coasting ranks that the router does not know yet: [ranks]."""
        return self._coasting.untold

    @property
    def is_asleep(self) -> bool:
        """Whether no step runs."""
        return self.end_s == NEVER_S

    def begin(self, now_s: float) -> None:
        """Begin the next step, or fall asleep without work. Nothing runs."""
        agreement = self._agree()
        if agreement.decision is not Decision.SLEEP:
            self._begin(agreement, now_s)
        elif self.inbox:
            self.wake(now_s)
        else:
            self.end_s = NEVER_S

    def wake(self, now_s: float) -> None:
        """Let all ranks announce their next step again, after an arrival, and begin it. Nothing runs."""
        self._announced.learn()
        self._announce([])
        self._has_work = self._is_prompt_announced = True
        self._begin(self._agree(), now_s)

    def _begin(self, agreement: Agreement, now_s: float) -> None:
        self._take_inbox(now_s)
        self._planned, rows = sorted(self._awake), self._coasting.rows
        for number in self._planned:
            rows[:, number] = self.ranks[number].plan(agreement, now_s, is_stepwise=self._is_stepwise)
        self._announced.learn()
        self._announce(self._planned)
        prefill, decode = int(rows[0].sum()), int(rows[1].sum())
        balancedness = self._experts.balancedness(now_s, prefill + decode)
        cost = self._times.step(rows.T, balancedness)
        seconds = cost.total_s if prefill + decode else max(cost.total_s, LEAST_STEP_S)
        self._begun_s, self.end_s = now_s, now_s + seconds
        self._figures.note_step(rows, cost, balancedness, self._times)
        self._experts.note_step(prefill, decode, cost, balancedness, self.end_s)
        self._announced.keep(cost.total_s, rows, has_prefill=agreement.has_prefill)

    def _agree(self) -> Agreement:
        """Exchange headers: a single one that merges those of all ranks."""
        budget = self._announced.least_budget() if self._awake or self.inbox else 0
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
        self._is_prompt_announced = has_prefill or self._coasting.frees(self.num_steps + 1)
        self._has_work = bool(awake) or bool(self._coasting.decodes.any())

    def _take_inbox(self, now_s: float) -> None:
        inbox, self.inbox = self.inbox, {}
        for number, requests in inbox.items():
            rank = self.ranks[number]
            self.catch_up(number)
            for request in requests:
                rank.scheduler.add(request)
            for output in rank.scheduler.expire(now_s):  # requests that cannot be served
                self._requests.take(output)
            self.settle(number)

    def commit(self) -> None:
        """Record the results of the running step, which ends now."""
        self.num_steps, self._done_s = self.num_steps + 1, self.end_s
        num_taken = int(self._coasting.decodes.sum())
        for number in self._planned:
            rank = self.ranks[number]
            num_taken += len(rank.taken)
            for sequence in rank.taken:
                self._requests.told(sequence.request.request_id, 1, self._done_s)
            for output in rank.commit(self.num_steps):
                self._requests.take(output)
        self._figures.note_gaps(self.end_s - self._begun_s, num_taken)
        for number in self._coasting.end_step(self.num_steps):
            self.catch_up(number)
            self.settle(number)
        for number in self._planned:
            self.settle(number)
        self._planned = []

    def settle(self, number: int) -> None:
        """Determine whether an up-to-date rank coasts, plans its next step, or is idle. No step runs."""
        scheduler = self.ranks[number].scheduler
        num_steps = 0 if self._is_stepwise else scheduler.num_plain_steps
        self._settled.add(number)
        self.is_crowded[number] = bool(scheduler.stats.num_waiting)
        self._awake.discard(number)
        self._coasting.stop(number)
        if num_steps:
            self._coast(number, num_steps)
        elif scheduler.has_work:
            self._awake.add(number)

    def _coast(self, number: int, num_steps: int) -> None:
        rank = self.ranks[number]
        left = [self._requests.num_expected(each.request.request_id) for each in rank.scheduler.running]
        charged = [count for count in left if count > 0]
        frees = rank.scheduler.stats.num_waiting and num_steps == rank.scheduler.num_steps_to_end
        self._coasting.begin(
            number,
            rank.coasting_rows(),
            charged=len(charged),
            until=self.num_steps + min([num_steps, *charged]),
            freed=self.num_steps + num_steps if frees else None,
        )

    def catch_up(self, number: int) -> None:
        """Advance a coasting rank to the last step that is done."""

        def told(request_id: str, num_tokens: int) -> None:
            self._requests.told(request_id, num_tokens, self._done_s)

        ended = self.ranks[number].catch_up(self.num_steps, told)
        self._coasting.untold[number] = 0
        for output in ended:
            self._requests.end(output)
