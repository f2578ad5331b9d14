"""A rank's engine: the step loop that all ranks run in lock-step.

Other threads put requests into an inbox; only the loop touches scheduler and model. Each step: agree with all ranks
what to do, take the inbox, plan, post the header of the next step, run, commit, deliver outputs. An idle rank runs the
step too, on padded rows, because other ranks' tokens need its experts. If no rank has work, all sleep, and may release memory
first (`step.memory_switch`). If ranks agreed on a largest number of tokens for a step, the step keeps to it: later arrivals only
fill the room that is left.

On GPUs a step is launched while the one before runs (`step.overlap`). A rank that serves alone is not bound by what was
agreed before a request arrived.

If a rank is lost, the step breaks off, and so does one that was launched behind it. The loop closes the epoch, which wakes
the ranks that still wait for this one, and follows the front's next order (`epochs`). The interrupted steps were planned
and not committed. Running them again overwrites everything they wrote, so they become the first steps of the next epoch.
An order that lets a rank join takes effect at a step that all ranks agree on, as a new placement does.
"""

import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import NamedTuple

from dispatch.dispatched import TokenDispatcher
from dispatch.errors import DispatchTimeout, PeerLost
from kvcache.images import ImageRowsError
from kvcache.tiers.tiers import Tiers
from scheduler.drafts.drafter import Drafter
from scheduler.epochs.follower import PEER_IS_GONE, EpochFollower
from scheduler.epochs.heartbeat import Heart, Heartbeat
from scheduler.epochs.orders import OnFault, OnRegrouped, Order
from scheduler.moves.adapters import AdapterLoads
from scheduler.moves.relocation import Relocation
from scheduler.policy.batch import StepBatch
from scheduler.policy.request import (
    Expected,
    FinishReason,
    ForgetPrefixes,
    RankStats,
    Request,
    RequestOutput,
    Withdraw,
)
from scheduler.policy.scheduler import Scheduler
from scheduler.sampling.sampler import Sampled
from scheduler.step.lockstep import Agreement, Decision, Doorbell, LockStep, versions_word
from scheduler.step.memory_switch import MemorySwitch
from scheduler.step.overlap import OverlappedSteps
from scheduler.step.plan_time import PlanTime
from scheduler.step.prefill_pace import PrefillPace
from scheduler.step.runner import Runner
from scheduler.structure.compiler import StructureCompiler, Structured
from scheduler.weights.preparation import Preparation
from scheduler.weights.updates import RankWeights
from scheduler.weights.versions import WeightVersion

OnStep = Callable[[list[RequestOutput], RankStats], None]
# A request to serve, one that ended before it was served, an id to abort, a withdrawal, a request to expect, or an order to drop
# prefixes.
Arrival = Request | Structured | RequestOutput | str | Withdraw | Expected | ForgetPrefixes


class _Serving(NamedTuple):
    """The serving epoch, and the objects in which its step loop may wait."""

    dispatcher: TokenDispatcher
    lockstep: LockStep
    members: tuple[int, ...]

    def leave_out(self, order: Order) -> None:
        """Interrupt the waits of this epoch if a newer order drops one of its members, or if one has left the epoch."""
        if order.epoch <= self.lockstep.epoch:
            return
        given_up = set(self.members) - {*order.members, *order.leaving}
        stopped = set(self.members) & {*order.stopped}
        if given_up or stopped:
            reason = "the front has dropped it" if given_up else "its steps broke off"
            error = PeerLost(self.members.index(min(given_up or stopped)), reason)
            self.dispatcher.interrupt(error)
            self.lockstep.interrupt(error)


class Engine:
    """One rank. Any thread may call `submit`, `abort`, `regroup` and `stop`; `run` blocks its thread."""

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
        memory: MemorySwitch,
        prefill_pace: PrefillPace | None = None,
        drafter: Drafter | None = None,
        overlaps: bool = False,
        plan_time: PlanTime | None = None,
        tiers: Tiers | None = None,
        weights: RankWeights | None = None,
        preparation: Preparation | None = None,
        adapters: AdapterLoads | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Connect the parts. Nothing runs before `run`.

        Args:
            lockstep: Lock-step of this rank's first epoch. None if the rank waits for an order to join one.
            memory: Which parts of the rank's memory are there.
            epochs: Follows orders. With None there are no orders, and a lost rank is an error.
            prefill_pace: Limits the prompt tokens in a step that also decodes. None sets no limit.
            drafter: The scheduler's drafter; learns the duration of steps.
            overlaps: Whether to launch a step before the one before it ends, in epochs in which `OverlappedSteps` can.
                Not with a drafter, which needs the newest token.
            plan_time: Delays the plans of overlapped steps. None plans at once.
            tiers: The scheduler's tiers; closed with the engine.
            weights: Replaces the model's weights while it serves. With None they stay.
            preparation: Prepares open requests for new weights. With None their prefixes are computed after the switch. It is
                there on all ranks or on none.
            adapters: Loads of adapters. None if the model takes none.
        """
        assert not (overlaps and drafter), (
            "drafts follow the newest token, which overlapped steps do not know"
        )
        assert lockstep or epochs, "an engine without an epoch must follow orders"
        self._epochs, self._heart = epochs, heart
        self._prefill_pace = prefill_pace or PrefillPace(None, is_limited=False)
        self._drafter = drafter
        self._planned: deque[StepBatch] = deque()  # and not committed, oldest first
        self._outputs: list[RequestOutput] = []  # not delivered yet
        self._overlapped = OverlappedSteps(runner, self._commit, plan_time) if overlaps else None
        self._serving: _Serving | None = None
        self._relocation = relocation
        relocation.on_news = self._wake
        self.memory = memory
        memory.on_news = self._wake
        self.weights = weights or RankWeights()
        self.weights.on_news, self.weights.on_installed = self._wake, self._begin_weights
        self._preparation = preparation
        self.adapters = adapters
        if adapters is not None:
            adapters.on_news = self._wake
        self.forgotten = 0  # generation of the newest order to forget prefixes
        self._tiers = tiers
        if tiers is not None:
            tiers.on_idle = self._wake
        self._rank, self._scheduler, self._runner = rank, scheduler, runner
        self._lockstep, self._doorbell, self._clock = lockstep, doorbell, clock
        self._lock = threading.Lock()
        self._structures = structures
        self._inbox: deque[Arrival] = deque()  # in order of arrival
        # Of running requests, by id. They are released at the beginning of the next step, when the other ranks know about it.
        self._leaving: dict[str, Withdraw] = {}
        self._has_news = threading.Event()  # since the loop last looked into the inbox and at the tiers
        self._sleeping_step: int | None = None
        self._told_epoch = 0  # the newest order that the other ranks know
        self._is_stopping = False

    @property
    def step(self) -> int:
        """Number of the current lock-step, equal on all ranks. 0 before the first epoch."""
        return 0 if self._lockstep is None else self._lockstep.step

    def submit(self, request: Request) -> None:
        """Queue a request. Its outputs are passed to `run`'s callback."""
        if request.images:
            try:
                request = self._runner.with_rows(request)
            except ImageRowsError as error:
                failed = FinishReason.ERROR
                self._deliver(
                    RequestOutput(
                        request_id=request.request_id, token_ids=[], finish_reason=failed, error=str(error)
                    )
                )
                return
        if request.params.structure is None:
            self._deliver(request)
        else:
            self._structures.submit(request, self._deliver)

    def abort(self, request_id: str) -> None:
        """End a request. Unknown and ended requests are ignored: their end was already delivered."""
        if self._structures.forget(request_id):
            self._deliver(
                RequestOutput(request_id=request_id, token_ids=[], finish_reason=FinishReason.ABORT)
            )
        else:
            self._deliver(request_id)

    def withdraw(self, withdrawal: Withdraw) -> None:
        """Release a request if it has not begun, or in any case; an output reports the result.

        Unknown and ended requests are ignored.
        """
        request_id = withdrawal.request_id
        if self._structures.forget(request_id):
            self._deliver(RequestOutput(request_id=request_id, token_ids=[], is_returned=True))
        else:
            self._deliver(withdrawal)

    def expect(self, expected: Expected) -> None:
        """Load the blocks of a request while another rank of this host computes them, or give them back."""
        self._deliver(expected)

    def forget_prefixes(self, generation: int) -> None:
        """Hide the present prefix cache from requests that are submitted from now on. An order that comes again has no effect.

        `generation`: see `ForgetPrefixes`.
        """
        if generation > self.forgotten:
            self.forgotten = generation
            self._deliver(ForgetPrefixes(generation))

    @property
    def kv_generation(self) -> int:
        """The generation of the records in the tiers, 0 without tiers."""
        return 0 if self._tiers is None else self._tiers.generation

    def regroup(self, order: Order) -> None:
        """Move this rank into a new epoch, with the same or other ranks, as soon as possible. The newest order wins.

        If a member of the serving epoch is dropped or has stopped, this rank does not wait for it.
        """
        assert self._epochs is not None, "assembled to serve one epoch only"
        if not self._epochs.orders.give(order):
            return
        # The step loop checks the newest order once it serves, so whichever of the two runs second sees the other.
        if self._serving is not None:
            self._serving.leave_out(order)
        self._wake()

    def tell_membership(
        self,
        on_fault: OnFault,
        on_regrouped: OnRegrouped,
        on_heartbeat: Callable[[Heartbeat], None] | None = None,
    ) -> None:
        """Set the callbacks for faults and for new epochs. The thread that runs `run` calls them.

        Faults of an epoch for which a newer order exists are not reported.

        Args:
            on_heartbeat: Receives the rank's progress while `run` runs, on a separate thread. Must not block.
        """
        assert self._epochs is not None, "assembled to serve one epoch only"
        self._epochs.on_fault, self._epochs.on_regrouped = on_fault, on_regrouped
        if on_heartbeat is not None:
            self._heart.on_heartbeat = on_heartbeat

    def stop(self) -> None:
        """End the loops of all ranks at the same step. Between epochs, this rank's loop ends at once."""
        self._is_stopping = True
        if self._epochs is not None:
            self._epochs.orders.stop()
        self._deliver(None)

    def close(self) -> None:
        """Release the other ranks, groups and threads, after `run`. May be called twice."""
        self._structures.close()
        if self.adapters is not None:
            self.adapters.close()
        if self._tiers is not None:
            self._tiers.close()
        self.memory.end_epoch()
        self.weights.close()
        if self._epochs is not None:
            self._epochs.close()

    def _wake(self) -> None:
        """Wake all ranks if they sleep: this rank has something to post."""
        self._deliver(None)

    def _deliver(self, item: Arrival | None) -> None:
        with self._lock:
            if item is not None:
                self._inbox.append(item)
            self._has_news.set()
            if self._sleeping_step is not None:
                self._doorbell.ring(self._sleeping_step)

    def run(self, on_step: OnStep, on_sleep: Callable[[], None] = lambda: None) -> None:
        """Run steps, from epoch to epoch, until some rank stops. Collective.

        Args:
            on_step: Called after every step with its outputs, and before every sleep. Must not block.
            on_sleep: Also called before every sleep; all ranks call it at the same step.

        Raises:
            LockStepError, dispatch errors: Another rank is out of step, or is lost and no order followed.
        """
        self._heart.start()
        try:
            while self._lockstep is not None or self._regroup():
                assert self._lockstep is not None, "a rank that regrouped has one"
                if self._serve(self._lockstep, on_step, on_sleep) is Decision.STOP:
                    return
        finally:
            self._relocation.pace.rest()  # no more steps will come, so a move must not wait for them
            self._heart.stop()

    def _serve(self, lockstep: LockStep, on_step: OnStep, on_sleep: Callable[[], None]) -> Decision:
        """Run steps until all ranks stop or the epoch ends. Return which of the two happened."""
        reason = ""
        self._heart.progress.begin_epoch(lockstep.epoch, lambda: self._runner.dispatcher.exchanges)
        self.memory.begin_epoch()
        self._take_adapters()
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
            self._abandon(error)
        self._drain(on_step)
        if decision is Decision.REGROUP:
            self._end_preparation()
            # Outside the handler: an error's traceback keeps groups alive, and they must end now.
            assert self._epochs is not None, "without orders no rank announces one"
            self._lockstep = self._serving = None
            self._heart.progress.end_epoch()
            self.memory.end_epoch()
            self._epochs.end(lockstep, reason)
        return decision

    def _regroup(self) -> bool:
        """Follow the next order. Returns False if all ranks stop before one arrives."""
        assert self._epochs is not None, "an engine without an epoch follows orders"
        self._lockstep = self._epochs.follow()
        return self._lockstep is not None

    def _walk(self, lockstep: LockStep, on_step: OnStep, on_sleep: Callable[[], None]) -> Decision:
        self._post_next(lockstep, 0)
        progress = self._heart.progress
        while True:
            progress.begin_exchange()
            agreement = lockstep.agree()
            progress.end_exchange(lockstep.step)
            decision, switch_to = agreement.decision, agreement.switch_to
            if agreement.prepares is None:
                self._end_preparation()
            if switch_to is not None or decision is not Decision.RUN or agreement.weights_number is not None:
                self._drain(on_step)
            if agreement.weights_number is not None:
                self.weights.switch(agreement.weights_number, lockstep.step)
            if switch_to is not None:
                self._relocation.switch(switch_to, lockstep.step)
                self.memory.note_moved()
            if decision in (Decision.STOP, Decision.REGROUP):
                return decision
            if decision is Decision.SLEEP:
                self._scheduler.collect(self._clock())
                if self.memory.has_order:  # it would wait for what is kept for expected requests
                    self._scheduler.expect_none()
                on_step([], self._stats(0))
                on_sleep()
                self._relocation.pace.rest()
                self._runner.rest()
                progress.is_idle = True
                if agreement.memory_number is not None:
                    self.memory.switch(agreement.memory_number)
                self._sleep(lockstep)
                self._post_next(lockstep, 0)
                continue
            if agreement.prepares is not None and self._preparation is not None:
                self._preparation.step(self.weights.posted)
            self._step(lockstep, agreement, on_step)

    def _step(self, lockstep: LockStep, agreement: Agreement, on_step: OnStep) -> None:
        self._relocation.pace.step()
        if self._overlapped is not None and self._overlapped.may_overlap:
            self._step_overlapped(self._overlapped, lockstep, agreement, on_step)
            return
        self._release(on_step)
        self._receive_moved(on_step, is_releasing=agreement.is_releasing)
        self._structures.masks.begin_step()
        batch = self._step_at(0, agreement)
        self._hand_back(on_step)
        self._post_next(lockstep, 1)
        if self._tiers is not None:
            self._tiers.save_early(self._scheduler.coming_blocks(batch))
        begun_s = time.perf_counter()
        sampled = self._runner.run(
            batch,
            agreement.agreed_tokens,
            has_prefill=agreement.has_prefill,
            wait_cause=agreement.wait_cause,
        )
        seconds = time.perf_counter() - begun_s
        # A commit takes the blocks of sequences that end; the draft layers still write their rows.
        tables = [item.sequence.block_ids for item in batch.items]
        with self._saving_later():
            self._commit(batch, sampled, seconds, agreement)
            self._hand_out(on_step, batch.num_tokens)
            if self._runner.makes_drafts:
                self._make_drafts(batch, tables, agreement)

    def _release(self, on_step: OnStep) -> None:
        """Release the running requests that leave for other ranks. Those know about it since they agreed on this step."""
        if self._planned or not self._leaving:  # a step that broke off still holds them
            return
        leaving, self._leaving = self._leaving, {}
        self._outputs += filter(None, map(self._withdraw, leaving.values()))
        self._hand_back(on_step)

    def _receive_moved(self, on_step: OnStep, *, is_releasing: bool) -> None:
        """Wait a moment for requests that other ranks are releasing for this one, so that the step can continue them."""
        if self._tiers is None:
            return
        begun_s: float | None = None
        while not self._planned:
            self._has_news.clear()
            self._take_news()
            now_s = self._clock()
            begun_s = now_s if begun_s is None else begun_s
            wait_s = self._scheduler.receive_moved(now_s, begun_s, is_releasing=is_releasing)
            if not wait_s:
                return
            self._hand_back(on_step)
            self._has_news.wait(wait_s)

    def _saving_later(self) -> AbstractContextManager[None]:
        """Save the step's blocks only when the layers that draft have also written them."""
        is_needed = self._tiers is not None and self._runner.makes_drafts
        return self._tiers.saving_later() if self._tiers is not None and is_needed else nullcontext()

    def _step_overlapped(
        self, steps: OverlappedSteps, lockstep: LockStep, agreement: Agreement, on_step: OnStep
    ) -> None:
        """Plan a step and launch it behind the running one, which is committed meanwhile."""
        steps.begin_plan()
        self._structures.masks.begin_step()
        if steps.is_alone:
            agreement = agreement._replace(agreed_tokens=0)
        place = int(steps.is_running)
        batch = self._step_at(place, agreement)
        self._hand_back(on_step)
        self._post_next(lockstep, place + 1)
        if not steps.is_alone:
            steps.run(batch, agreement)
        # No other rank needs this one's experts. But requests that wait for their masks are not polled without a pause.
        elif batch.items or (self._scheduler.has_work and not steps.is_running):
            steps.run(batch, agreement._replace(has_prefill=batch.num_prefill_tokens > 0))
        else:
            self._planned.pop()
            steps.finish()
        self._hand_out(on_step, batch.num_tokens)

    def _drain(self, on_step: OnStep) -> None:
        """Commit the running step, if there is one, and deliver all outputs."""
        if self._overlapped is not None:
            self._overlapped.finish()
        if self._outputs:
            self._hand_out(on_step, 0)

    def _abandon(self, error: PeerLost | DispatchTimeout) -> None:
        """End launched steps that wait for a lost rank. They run again in the next epoch."""
        if self._overlapped is not None:
            self._runner.dispatcher.interrupt(error)
            self._overlapped.abandon()

    def _hand_out(self, on_step: OnStep, num_step_tokens: int) -> None:
        outputs, self._outputs = self._outputs, []
        on_step(outputs, self._stats(num_step_tokens))

    def _hand_back(self, on_step: OnStep) -> None:
        """Deliver released requests before the step, so that their next rank can begin them a step earlier.

        The last step's outputs are delivered already. The statistics are the last step's, because this one's come after it.
        """
        if any(output.is_returned for output in self._outputs):
            outputs, self._outputs = self._outputs, []
            on_step(outputs, replace(self._stats(0), step=self.step - 1))

    def _step_at(self, place: int, agreement: Agreement) -> StepBatch:
        """Return one of the steps that are not committed: an earlier epoch's, or a new one."""
        if len(self._planned) == place:
            self._planned.append(self._plan(agreement))
        return self._planned[place]

    def _commit(self, batch: StepBatch, sampled: Sampled, seconds: float, agreement: Agreement) -> None:
        oldest = self._planned.popleft()
        assert oldest is batch, "steps are committed in the order planned"
        self._note_step(batch, seconds, agreement)
        self._outputs += self._scheduler.commit(batch, *sampled) + batch.begun

    def _make_drafts(self, batch: StepBatch, tables: list[list[int]], agreement: Agreement) -> None:
        begun_s = time.perf_counter()
        self._runner.make_drafts(
            batch, tables, agreement.draft_depth, agreement.agreed_tokens, wait_cause=agreement.wait_cause
        )
        if self._drafter is not None and not agreement.has_prefill:
            passes = max(agreement.draft_depth, 1)
            self._drafter.costs.note_passes(passes, time.perf_counter() - begun_s)

    def _note_step(self, batch: StepBatch, seconds: float, agreement: Agreement) -> None:
        """Learn the duration of steps. Steps that other ranks' prompts lengthened are ignored."""
        num_prefill = batch.num_prefill_tokens
        num_decodes = batch.num_tokens - num_prefill
        if num_prefill or not agreement.has_prefill:
            self._prefill_pace.note(
                seconds,
                num_decodes=num_decodes,
                num_prefill=num_prefill,
                is_behind=num_prefill < agreement.others_prefill,
            )
            if self._tiers is not None:
                self._tiers.prompt_token_s = self._prefill_pace.token_s
        if self._drafter is not None and num_decodes and not agreement.has_prefill:
            self._drafter.costs.note(num_decodes, seconds)

    def _take_adapters(self) -> None:
        """Put adapters that were read at their places. While no step runs."""
        if self.adapters is not None and self.adapters.has_news:
            planned = {item.sequence.request.adapter_place for batch in self._planned for item in batch.items}
            self.adapters.take(lambda place: place in planned or self._scheduler.uses_adapter(place))

    def _plan(self, agreement: Agreement) -> StepBatch:
        self._take_news()
        now_s = self._clock()
        self._outputs += self._scheduler.expire(now_s)
        batch = self._scheduler.schedule(
            prefill_budget=agreement.prefill_budget, most_tokens=agreement.agreed_tokens or None, now_s=now_s
        )
        assert not batch.items or self.memory.is_whole, (
            "a request runs on a rank that has released its memory"
        )
        return batch

    def _post_next(self, lockstep: LockStep, place: int) -> None:
        """Post what one of the steps that are not committed will hold: the one that broke off in the last epoch, or a new one."""
        if place < len(self._planned):
            _, num_tokens, num_prefill = self._planned[place]
            self._tell(
                lockstep, has_work=True, has_prefill=num_prefill > 0,
                num_decodes=num_tokens - num_prefill, num_prefill=num_prefill, is_releasing=False,
            )  # fmt: skip
            return
        coming, has_arrivals = self._scheduler.next_step, bool(self._inbox) or self._has_adapters
        self._tell(
            lockstep,
            has_work=self._scheduler.has_work or has_arrivals,
            has_prefill=coming.has_prefill or has_arrivals,
            num_decodes=coming.num_decodes,
            num_prefill=coming.num_prefill,
            is_releasing=bool(self._leaving),
        )

    def _tell(
        self,
        lockstep: LockStep,
        *,
        has_work: bool,
        has_prefill: bool,
        num_decodes: int,
        num_prefill: int,
        is_releasing: bool,
    ) -> None:
        self._told_epoch = self._ordered_epoch(lockstep)
        serving, ready = self.weights.serving.number, self.weights.number_to_post()
        is_prepared = ready == serving or self._preparation is None or self._preparation.is_complete
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
            memory_number=self.memory.number_to_post(is_idle=self._is_idle),
            weights=versions_word(serving, ready, is_prepared=is_prepared),
            is_releasing=is_releasing,
        )

    @property
    def _has_adapters(self) -> bool:
        return self.adapters is not None and self.adapters.has_news

    def _draft_depth(self) -> int:
        if self._drafter is None or not self._runner.makes_drafts:
            return 0
        return self._drafter.num_drafts if self._inbox else self._scheduler.draft_depth

    def _ordered_epoch(self, lockstep: LockStep) -> int:
        return lockstep.epoch if self._epochs is None else self._epochs.orders.newest_epoch(lockstep.epoch)

    @property
    def _is_idle(self) -> bool:
        """Whether nothing here reads or writes blocks or experts, until a request or a move of experts comes."""
        return not (self._inbox or self._scheduler.holds_blocks or self._relocation.is_moving)

    def _sleep(self, lockstep: LockStep) -> None:
        with self._lock:
            self._sleeping_step = lockstep.step
            has_order = self._ordered_epoch(lockstep) != self._told_epoch
            has_jobs = self._tiers is not None and self._tiers.has_finished
            has_moved = self._relocation.has_news or self.memory.has_news(is_idle=self._is_idle)
            has_moved = has_moved or self.weights.has_news
            if self._inbox or self._is_stopping or has_order or has_jobs or has_moved or self._has_adapters:
                self._doorbell.ring(lockstep.step)
        self._doorbell.wait(lockstep.step)
        with self._lock:
            self._sleeping_step = None

    def _begin_weights(self, version: WeightVersion) -> None:
        """Let all requests start again with new weights. Steps that an earlier epoch interrupted do not run again."""
        self._end_preparation()
        self._planned.clear()
        self._scheduler.use_weights(version.digest, version.number)

    def _end_preparation(self) -> None:
        if self._preparation is not None:
            self._preparation.end()

    def _take_news(self) -> None:
        """Take what other threads gave the loop since the last call."""
        self._take_adapters()
        self._outputs += self._take_inbox()

    def _take_inbox(self) -> list[RequestOutput]:
        outputs = []
        while self._inbox:
            item = self._inbox.popleft()
            if isinstance(item, Request):
                self._scheduler.add(item)
            elif isinstance(item, Structured):
                self._scheduler.add(item.request, item.matcher)
            elif isinstance(item, RequestOutput):
                self._scheduler.expect_no_more(item.request_id)  # the scheduler never gets it
                outputs.append(item)
            elif isinstance(item, ForgetPrefixes):
                self._scheduler.forget_prefixes(item.generation)
            elif isinstance(item, Expected):
                in_step = item.in_step and self._agrees_on_moves
                self._scheduler.expect(item._replace(in_step=in_step), self._clock())
            elif (output := self._answer(item)) is not None:
                outputs.append(output)
        return outputs

    def _answer(self, item: str | Withdraw) -> RequestOutput | None:
        if not isinstance(item, Withdraw):
            self._leaving.pop(item, None)
            return self._scheduler.abort(item)
        if item.in_step and self._agrees_on_moves and self._scheduler.is_running(item.request_id):
            self._leaving[item.request_id] = item
            return None
        return self._withdraw(item)

    @property
    def _agrees_on_moves(self) -> bool:
        """Whether running requests move in steps that all ranks know. Without tiers, no rank waits for them."""
        return self._tiers is not None and self._overlapped is None

    def _withdraw(self, item: Withdraw) -> RequestOutput | None:
        return self._scheduler.withdraw(item.request_id, even_if_begun=item.even_if_begun)

    def _stats(self, num_step_tokens: int) -> RankStats:
        stats, drafter = self._scheduler.stats._asdict(), self._drafter
        if drafter is not None:
            stats["drafts"] = drafter.counts
        return RankStats(rank=self._rank, step=self.step, num_step_tokens=num_step_tokens, **stats)
