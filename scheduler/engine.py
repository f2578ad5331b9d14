"""A rank's engine: the step loop that all ranks walk together.

Requests arrive from other threads into an inbox; the loop alone touches scheduler and model. A step is: agree on
what all ranks do, take what arrived, plan, post the header of the next step, run, commit, hand out. An idle rank
runs the step too, on padded rows, because the others' tokens need its experts; when nobody has anything all sleep.
A step for which ranks agreed on a largest number of tokens keeps to it: what arrived since takes the room left over.

Where a rank is lost, steps break off. The loop lets go of the epoch, which wakes ranks that still wait for this one,
and follows the front's next order (`epochs`). The step that broke off was planned and not committed, and has written
nothing that running it again does not overwrite: it is the first one of the next epoch. The order to let somebody join
takes effect at a step that all agree on, as a placement does.
"""

import threading
import time
from collections import deque
from collections.abc import Callable
from typing import NamedTuple

from dispatch.dispatched import TokenDispatcher
from dispatch.errors import PeerLost
from scheduler.drafts.drafter import Drafter
from scheduler.epochs.follower import PEER_IS_GONE, EpochFollower
from scheduler.epochs.heartbeat import Heart, Heartbeat
from scheduler.epochs.orders import OnFault, OnRegrouped, Order
from scheduler.moves.relocation import Relocation
from scheduler.policy.batch import StepBatch
from scheduler.policy.request import (
    FinishReason,
    ForgetPrefixes,
    RankStats,
    Request,
    RequestOutput,
    Withdraw,
)
from scheduler.policy.scheduler import Scheduler
from scheduler.step.lockstep import Agreement, Decision, Doorbell, LockStep
from scheduler.step.prefill_pace import PrefillPace
from scheduler.step.runner import Runner
from scheduler.structure.compiler import StructureCompiler, Structured

OnStep = Callable[[list[RequestOutput], RankStats], None]
# To serve, ended before it was served, an id to abort, to give back, or a wish that concerns those behind it.
Arrival = Request | Structured | RequestOutput | str | Withdraw | ForgetPrefixes


class _Planned(NamedTuple):
    """A step until it is committed."""

    batch: StepBatch
    outputs: list[RequestOutput]  # of what arrived and what ended before it


class _Serving(NamedTuple):
    """An epoch that serves: what its step loop may be waiting in."""

    dispatcher: TokenDispatcher
    lockstep: LockStep
    members: tuple[int, ...]

    def leave_out(self, order: Order) -> None:
        """End what is waited for here if the order is a newer one and leaves out a member."""
        given_up = sorted(set(self.members) - set(order.members))
        if given_up and order.epoch > self.lockstep.epoch:
            error = PeerLost(self.members.index(given_up[0]), "the front has given it up")
            self.dispatcher.interrupt(error)
            self.lockstep.interrupt(error)


class Engine:
    """One rank. `submit`, `abort`, `regroup` and `stop` may be called from any thread; `run` blocks its own."""

    def __init__(
        self,
        rank: int,
        scheduler: Scheduler,
        runner: Runner,
        lockstep: LockStep | None,
        doorbell: Doorbell,
        relocation: Relocation,
        structures: StructureCompiler,
        heart: Heart,
        epochs: EpochFollower | None = None,
        *,
        prefill_pace: PrefillPace | None = None,
        drafter: Drafter | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Compose; nothing runs before `run`.

        Args:
            lockstep: of the epoch that this rank begins in; None: it is to be ordered to one.
            epochs: follows orders; None: none come, and a lost rank is an error.
            prefill_pace: how many tokens of prompts a step may take on beside decodes; None: any number.
            drafter: the scheduler's, which is told what steps cost.
        """
        assert lockstep or epochs, "an engine without an epoch needs a way into one"
        self._epochs, self._heart = epochs, heart
        self._prefill_pace = prefill_pace or PrefillPace(None, is_limited=False)
        self._drafter = drafter
        self._planned: _Planned | None = None
        self._serving: _Serving | None = None
        self._relocation = relocation
        relocation.on_news = self._wake
        self._rank, self._scheduler, self._runner = rank, scheduler, runner
        self._lockstep, self._doorbell, self._clock = lockstep, doorbell, clock
        self._lock = threading.Lock()
        self._structures = structures
        self._inbox: deque[Arrival] = deque()  # in order of arrival
        self._sleeping_step: int | None = None
        self._told_epoch = 0  # the newest order that the others know of
        self._is_stopping = False

    @property
    def step(self) -> int:
        """Number of the lock-step, equal on all ranks; 0 before the first epoch."""
        return 0 if self._lockstep is None else self._lockstep.step

    def submit(self, request: Request) -> None:
        """Queue a request; its outputs come through `run`'s callback."""
        if request.params.structure is None:
            self._deliver(request)
        else:
            self._structures.submit(request, self._deliver)

    def abort(self, request_id: str) -> None:
        """End a request. Unknown and ended ones are ignored: their end has been told already."""
        if self._structures.forget(request_id):
            self._deliver(
                RequestOutput(request_id=request_id, token_ids=[], finish_reason=FinishReason.ABORT)
            )
        else:
            self._deliver(request_id)

    def withdraw(self, request_id: str) -> None:
        """Give a request back if it has not begun; an output says whether. Unknown and ended ones are ignored."""
        if self._structures.forget(request_id):
            self._deliver(RequestOutput(request_id=request_id, token_ids=[], is_returned=True))
        else:
            self._deliver(Withdraw(request_id))

    def forget_prefixes(self) -> None:
        """Let requests that are submitted from now on find nothing in the prefix cache."""
        self._deliver(ForgetPrefixes())

    def regroup(self, order: Order) -> None:
        """Let this rank meet others, or the same, in a new epoch, as soon as it can; the newest order wins.

        Where the order leaves out a rank of the epoch that serves, that one is not waited for any longer.
        """
        assert self._epochs is not None, "assembled to serve one epoch only"
        if not self._epochs.orders.give(order):
            return
        # The step loop looks at the newest order once it serves: whichever of the two comes second sees the other.
        if self._serving is not None:
            self._serving.leave_out(order)
        self._wake()

    def tell_membership(
        self,
        on_fault: OnFault,
        on_regrouped: OnRegrouped,
        on_heartbeat: Callable[[Heartbeat], None] | None = None,
    ) -> None:
        """Name who is told, by the thread of `run`, that steps broke off here, and that they go on in an epoch.

        Faults of epochs for which there is a newer order already are not told.

        Args:
            on_heartbeat: told where the rank is, by a thread of its own, while `run` walks; must not block.
        """
        assert self._epochs is not None, "assembled to serve one epoch only"
        self._epochs.on_fault, self._epochs.on_regrouped = on_fault, on_regrouped
        if on_heartbeat is not None:
            self._heart.on_heartbeat = on_heartbeat

    def stop(self) -> None:
        """End all ranks' loops at the same step; this one's at once while it is between epochs."""
        self._is_stopping = True
        if self._epochs is not None:
            self._epochs.orders.stop()
        self._deliver(None)

    def close(self) -> None:
        """Let go of all other ranks, of groups and of threads, after `run`. May be called twice."""
        self._structures.close()
        if self._epochs is not None:
            self._epochs.close()

    def _wake(self) -> None:
        """Take a step's turn if all sleep: there is something to tell the other ranks."""
        self._deliver(None)

    def _deliver(self, item: Arrival | None) -> None:
        with self._lock:
            if item is not None:
                self._inbox.append(item)
            if self._sleeping_step is not None:
                self._doorbell.ring(self._sleeping_step)

    def run(self, on_step: OnStep, on_sleep: Callable[[], None] = lambda: None) -> None:
        """Walk steps until some rank stops, from epoch to epoch; collective.

        Args:
            on_step: called after every step with what it yielded, and before every sleep; must not block.
            on_sleep: called before every sleep as well, of all ranks at the same step.

        Raises:
            LockStepError, dispatch errors: another rank is out of step, or lost and no order followed.
        """
        self._heart.start()
        try:
            while self._lockstep is not None or self._regroup():
                assert self._lockstep is not None, "a rank that regrouped has one"
                if self._serve(self._lockstep, on_step, on_sleep) is Decision.STOP:
                    return
        finally:
            self._relocation.pace.rest()  # a move does not wait for steps that will not come
            self._heart.stop()

    def _serve(self, lockstep: LockStep, on_step: OnStep, on_sleep: Callable[[], None]) -> Decision:
        """Walk steps until all stop or the epoch ends; says which."""
        reason = ""
        self._heart.progress.begin_epoch(lockstep.epoch, lambda: self._runner.dispatcher.exchanges)
        if self._epochs is not None:
            self._serving = _Serving(self._runner.dispatcher, lockstep, self._epochs.members)
            if (newest := self._epochs.orders.newest) is not None:
                self._serving.leave_out(newest)
        try:
            decision = self._walk(lockstep, on_step, on_sleep)
        except PEER_IS_GONE as error:
            if self._epochs is None:
                raise
            reason, decision = f"{type(error).__name__}: {error}", Decision.REGROUP
        if decision is Decision.REGROUP:
            # Behind the handler: an error's traceback holds what it came from, and groups must end now.
            assert self._epochs is not None, "without orders no rank announces one"
            self._lockstep = self._serving = None
            self._heart.progress.end_epoch()
            self._epochs.end(lockstep, reason)
        return decision

    def _regroup(self) -> bool:
        """Follow the next order; False: all stop before one came."""
        assert self._epochs is not None, "an engine that has no epoch has a way into one"
        self._lockstep = self._epochs.follow()
        return self._lockstep is not None

    def _walk(self, lockstep: LockStep, on_step: OnStep, on_sleep: Callable[[], None]) -> Decision:
        self._post(lockstep)
        progress = self._heart.progress
        while True:
            progress.begin_exchange()
            agreement = lockstep.agree()
            progress.end_exchange(lockstep.step)
            decision, switch_to = agreement.decision, agreement.switch_to
            if switch_to is not None:
                self._relocation.switch(switch_to, lockstep.step)
            if decision in (Decision.STOP, Decision.REGROUP):
                return decision
            if decision is Decision.SLEEP:
                on_step([], self._stats(0))
                on_sleep()
                self._relocation.pace.rest()
                self._runner.rest()
                progress.is_idle = True
                self._sleep(lockstep)
                self._post(lockstep)
                continue
            self._step(lockstep, agreement, on_step)

    def _step(self, lockstep: LockStep, agreement: Agreement, on_step: OnStep) -> None:
        self._relocation.pace.step()
        self._structures.masks.begin_step()
        self._planned = batch, outputs = self._planned or self._plan(agreement)
        self._post_next(lockstep)
        begun_s = time.perf_counter()
        sampled = self._runner.run(
            batch,
            agreement.agreed_tokens,
            has_prefill=agreement.has_prefill,
            wait_cause=agreement.wait_cause,
        )
        self._note_step(batch, time.perf_counter() - begun_s, agreement)
        self._planned = None
        outputs += self._scheduler.commit(batch, *sampled)
        outputs += batch.begun
        on_step(outputs, self._stats(batch.num_tokens))
        if self._runner.makes_drafts:
            self._make_drafts(batch, agreement)

    def _make_drafts(self, batch: StepBatch, agreement: Agreement) -> None:
        begun_s = time.perf_counter()
        self._runner.make_drafts(
            batch, agreement.draft_depth, agreement.agreed_tokens, wait_cause=agreement.wait_cause
        )
        if self._drafter is not None and not agreement.has_prefill:
            passes = max(agreement.draft_depth, 1)
            self._drafter.costs.note_passes(passes, time.perf_counter() - begun_s)

    def _note_step(self, batch: StepBatch, seconds: float, agreement: Agreement) -> None:
        """Learn what steps cost; nothing where others' prompts took the time."""
        num_prefill = batch.num_prefill_tokens
        num_decodes = batch.num_tokens - num_prefill
        if num_prefill or not agreement.has_prefill:
            self._prefill_pace.note(
                seconds,
                num_decodes=num_decodes,
                num_prefill=num_prefill,
                is_behind=num_prefill < agreement.others_prefill,
            )
        if self._drafter is not None and num_decodes and not agreement.has_prefill:
            self._drafter.costs.note(num_decodes, seconds)

    def _plan(self, agreement: Agreement) -> _Planned:
        outputs = self._take_inbox()
        now_s = self._clock()
        outputs += self._scheduler.expire(now_s)
        batch = self._scheduler.schedule(
            prefill_budget=agreement.prefill_budget, most_tokens=agreement.agreed_tokens or None, now_s=now_s
        )
        return _Planned(batch, outputs)

    def _post(self, lockstep: LockStep) -> None:
        """Say what the coming step will hold: the one that broke off in the epoch before, if there is one."""
        if self._planned is None:
            self._post_next(lockstep)
            return
        _, num_tokens, num_prefill = self._planned.batch
        self._tell(
            lockstep, has_work=True, has_prefill=num_prefill > 0,
            num_decodes=num_tokens - num_prefill, num_prefill=num_prefill,
        )  # fmt: skip

    def _post_next(self, lockstep: LockStep) -> None:
        """Say what the step after those planned so far will hold."""
        coming, has_arrivals = self._scheduler.next_step, bool(self._inbox)
        self._tell(
            lockstep,
            has_work=self._scheduler.has_work or has_arrivals,
            has_prefill=coming.has_prefill or has_arrivals,
            num_decodes=coming.num_decodes,
            num_prefill=coming.num_prefill,
        )

    def _tell(
        self, lockstep: LockStep, *, has_work: bool, has_prefill: bool, num_decodes: int, num_prefill: int
    ) -> None:
        self._told_epoch = self._ordered_epoch(lockstep)
        lockstep.post(
            has_work=has_work,
            is_stopping=self._is_stopping,
            has_prefill=has_prefill,
            num_decodes=num_decodes,
            ready_version=self._relocation.version_to_post(),
            num_prefill=num_prefill,
            ordered_epoch=self._told_epoch,
            prefill_budget=self._prefill_pace.budget(num_decodes, self._scheduler.num_open),
            draft_depth=self._draft_depth(),
            num_context=self._scheduler.num_context,
        )

    def _draft_depth(self) -> int:
        if self._drafter is None or not self._runner.makes_drafts:
            return 0
        return self._drafter.num_drafts if self._inbox else self._scheduler.draft_depth

    def _ordered_epoch(self, lockstep: LockStep) -> int:
        return lockstep.epoch if self._epochs is None else self._epochs.orders.newest_epoch(lockstep.epoch)

    def _sleep(self, lockstep: LockStep) -> None:
        with self._lock:
            self._sleeping_step = lockstep.step
            has_order = self._ordered_epoch(lockstep) != self._told_epoch
            if self._inbox or self._is_stopping or has_order or self._relocation.has_news:
                self._doorbell.ring(lockstep.step)
        self._doorbell.wait(lockstep.step)
        with self._lock:
            self._sleeping_step = None

    def _take_inbox(self) -> list[RequestOutput]:
        outputs = []
        while self._inbox:
            item = self._inbox.popleft()
            if isinstance(item, Request):
                self._scheduler.add(item)
            elif isinstance(item, Structured):
                self._scheduler.add(item.request, item.matcher)
            elif isinstance(item, RequestOutput):
                outputs.append(item)
            elif isinstance(item, ForgetPrefixes):
                self._scheduler.forget_prefixes()
            elif (output := self._answer(item)) is not None:
                outputs.append(output)
        return outputs

    def _answer(self, item: str | Withdraw) -> RequestOutput | None:
        if isinstance(item, Withdraw):
            return self._scheduler.withdraw(item.request_id)
        return self._scheduler.abort(item)

    def _stats(self, num_step_tokens: int) -> RankStats:
        stats, drafter = self._scheduler.stats._asdict(), self._drafter
        if drafter is not None:
            stats["drafts"] = drafter.counts
        return RankStats(rank=self._rank, step=self.step, num_step_tokens=num_step_tokens, **stats)
