"""A rank's engine: the step loop that all ranks walk together.

Requests arrive from other threads into an inbox; the loop alone touches scheduler and model. A step is: agree on
what all ranks do, take what arrived, plan, post the header of the next step, run, commit, hand out. An idle rank
runs the step too, on padded rows, because the others' tokens need its experts; when nobody has anything all sleep.
A step for which ranks agreed on a largest number of tokens keeps to it: what arrived since takes the room left over.
"""

import threading
import time
from collections import deque
from collections.abc import Callable

from scheduler.doorbell import Doorbell
from scheduler.lockstep import Agreement, Decision, LockStep
from scheduler.policy import Scheduler
from scheduler.relocation import Relocation
from scheduler.request import FinishReason, RankStats, Request, RequestOutput
from scheduler.runner import Runner
from scheduler.structure_compiling import StructureCompiler, Structured

OnStep = Callable[[list[RequestOutput], RankStats], None]
Arrival = (
    Request | Structured | RequestOutput | str
)  # to serve, ended before it was served, or an id to abort


class Engine:
    """One rank. `submit`, `abort` and `stop` may be called from any thread; `run` blocks its own."""

    def __init__(
        self,
        rank: int,
        scheduler: Scheduler,
        runner: Runner,
        lockstep: LockStep,
        doorbell: Doorbell,
        relocation: Relocation,
        structures: StructureCompiler,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Compose; nothing runs before `run`."""
        self._relocation = relocation
        relocation.on_news = self._wake
        self._rank, self._scheduler, self._runner = rank, scheduler, runner
        self._lockstep, self._doorbell, self._clock = lockstep, doorbell, clock
        self._lock = threading.Lock()
        self._structures = structures
        self._inbox: deque[Arrival] = deque()  # in order of arrival
        self._sleeping_step: int | None = None
        self._is_stopping = False

    @property
    def step(self) -> int:
        """Number of the lock-step, equal on all ranks."""
        return self._lockstep.step

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

    def stop(self) -> None:
        """End all ranks' loops at the same step."""
        self._is_stopping = True
        self._deliver(None)

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
        """Walk steps until some rank stops; collective.

        Args:
            on_step: called after every step with what it yielded, and before every sleep; must not block.
            on_sleep: called before every sleep as well, of all ranks at the same step.

        Raises:
            LockStepError, dispatch errors: another rank is lost or out of step.
        """
        try:
            self._walk(on_step, on_sleep)
        finally:
            self._relocation.pace.rest()  # a move does not wait for steps that will not come

    def _walk(self, on_step: OnStep, on_sleep: Callable[[], None]) -> None:
        self._post()
        while True:
            agreement = self._lockstep.agree()
            decision, switch_to = agreement.decision, agreement.switch_to
            if switch_to is not None:
                self._relocation.switch(switch_to, self._lockstep.step)
            if decision is Decision.STOP:
                return
            if decision is Decision.SLEEP:
                on_step([], self._stats(0))
                on_sleep()
                self._relocation.pace.rest()
                self._sleep()
                self._post()
                continue
            self._step(agreement, on_step)

    def _step(self, agreement: Agreement, on_step: OnStep) -> None:
        self._relocation.pace.step()
        outputs = self._take_inbox()
        now_s = self._clock()
        outputs += self._scheduler.expire(now_s)
        agreed_tokens, num_decodes = agreement.agreed_tokens, self._scheduler.next_step.num_decodes
        room = max(0, agreed_tokens - num_decodes) if agreed_tokens else None
        batch = self._scheduler.schedule(prefill_budget=room, now_s=now_s)
        self._post()
        sampled = self._runner.run(
            batch, agreed_tokens, has_prefill=agreement.has_prefill, in_halves=agreement.in_halves
        )
        outputs += self._scheduler.commit(batch, *sampled)
        on_step(outputs, self._stats(batch.num_tokens))

    def _post(self) -> None:
        coming, has_arrivals = self._scheduler.next_step, bool(self._inbox)
        self._lockstep.post(
            has_work=self._scheduler.has_work or has_arrivals,
            is_stopping=self._is_stopping,
            has_prefill=coming.has_prefill or has_arrivals,
            num_decodes=coming.num_decodes,
            ready_version=self._relocation.version_to_post(),
            num_prefill=coming.num_prefill,
        )

    def _sleep(self) -> None:
        with self._lock:
            self._sleeping_step = self._lockstep.step
            if self._inbox or self._is_stopping or self._relocation.has_news:
                self._doorbell.ring(self._lockstep.step)
        self._doorbell.wait(self._lockstep.step)
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
            elif (ended := self._scheduler.abort(item)) is not None:
                outputs.append(ended)
        return outputs

    def _stats(self, num_step_tokens: int) -> RankStats:
        stats = self._scheduler.stats
        return RankStats(
            rank=self._rank, step=self._lockstep.step, num_step_tokens=num_step_tokens, **stats._asdict()
        )
