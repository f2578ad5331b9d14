"""Steps of a rank that serves alone on a GPU: each is launched while the one before runs.

The device finds its next step in the queue whenever one ends, and never waits for the host's plans, commits and hand-outs.
Per step: wait for the time to plan, plan, launch the model behind the running step, read that step's tokens, commit them,
launch the sampling. A sequence that ended meanwhile (a stop token, an abort) has one row too many in the launched step: its
blocks stay held until that step is committed, and its token is dropped.

A step that `Underway.may_run_on` excludes is committed before the next one is planned, as without overlap. Idea: the
overlapped loops of SGLang and mini-sglang, and vLLM's asynchronous scheduling.
"""

from collections.abc import Callable
from typing import NamedTuple

from scheduler.policy.batch import StepBatch
from scheduler.policy.request import RequestOutput
from scheduler.sampling.sampler import Sampled
from scheduler.step.lockstep import Agreement
from scheduler.step.plan_time import PlanTime
from scheduler.step.runner import Runner, Underway

# Commits a step: its batch, samples, seconds and agreement. Returns its outputs.
Commit = Callable[[StepBatch, Sampled, float, Agreement], list[RequestOutput]]


class _Running(NamedTuple):
    """A launched step that is not committed yet."""

    underway: Underway
    agreement: Agreement


class OverlappedSteps:
    """The running step, and the one that is launched behind it. For the thread that runs steps."""

    def __init__(self, runner: Runner, commit: Commit, plan_time: PlanTime | None = None) -> None:
        """`plan_time`: delays plans. None plans as soon as the running step begins."""
        self._runner, self._commit, self.plan_time = runner, commit, plan_time
        self._running: _Running | None = None

    @property
    def is_running(self) -> bool:
        """Whether a step runs that is not committed."""
        return self._running is not None

    @property
    def may_overlap(self) -> bool:
        """Whether this rank serves alone. Steps of several ranks read from the device while they run."""
        return self._runner.dispatcher.world_size == 1

    def begin_plan(self) -> None:
        """Wait until it is time to plan the step behind the running one."""
        if self.plan_time is None:
            return
        if self._running is not None:
            self.plan_time.wait()
        self.plan_time.begin_plan()

    def run(self, batch: StepBatch, agreement: Agreement) -> list[RequestOutput]:
        """Launch a step, and commit the one before. Returns the outputs of all committed steps."""
        before = None if self._running is None else self._running.underway
        underway = self._runner.launch(
            batch,
            agreement.agreed_tokens,
            has_prefill=agreement.has_prefill,
            wait_cause=agreement.wait_cause,
            before=before,
        )
        if self.plan_time is not None:
            self.plan_time.end_launch(
                num_decodes=batch.num_decode_tokens, num_prefill=batch.num_prefill_tokens
            )
        outputs = self.finish()
        self._runner.sample(underway)  # now all earlier tokens are known
        self._running = _Running(underway, agreement)
        return outputs if underway.may_run_on else outputs + self.finish()

    def finish(self) -> list[RequestOutput]:
        """Wait for the running step, if there is one, and commit it. Returns its outputs."""
        if self._running is None:
            return []
        (underway, agreement), self._running = self._running, None
        batch, sampled = underway.batch, self._runner.read(underway)
        if self.plan_time is not None:
            self.plan_time.end_step(
                underway.seconds, num_decodes=batch.num_decode_tokens, num_prefill=batch.num_prefill_tokens
            )
        return self._commit(batch, sampled, underway.seconds, agreement)
