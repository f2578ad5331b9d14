"""Steps on GPUs: each is launched while the one before runs.

The device finds its next step in the queue whenever one ends, and never waits for the host's plans, commits and hand-outs.
Per step: wait for the time to plan, plan, launch the model behind the running step, read that step's tokens, commit them,
launch the sampling. A sequence that ended meanwhile (a stop token, an abort) has one row too many in the launched step: its
blocks stay held until that step is committed, and its token is dropped.

Several ranks agree on a step while the one before it runs: their headers travel between the hosts. A rank without work
launches padded rows ahead like any other. A launch that waits for the device (normal mode) comes after the running step was
read. So does a launch behind a step that `Underway.may_run_on` excludes. That concerns one rank only: every rank launches the
same steps in the same order, and none waits for another's reads.

If a rank is lost, both steps break off. Neither was committed, so both run again, in their order. Idea: the overlapped loops
of SGLang and mini-sglang, and vLLM's asynchronous scheduling.
"""

from collections.abc import Callable
from typing import NamedTuple

from scheduler.policy.batch import StepBatch
from scheduler.sampling.sampler import Sampled
from scheduler.step.lockstep import Agreement
from scheduler.step.plan_time import PlanTime
from scheduler.step.runner import Runner, Underway

# Commits a step: its batch, samples, seconds and agreement.
Commit = Callable[[StepBatch, Sampled, float, Agreement], None]


class _Running(NamedTuple):
    """A launched step that is not committed yet."""

    underway: Underway
    agreement: Agreement

    @property
    def num_decodes(self) -> int:
        """The number of decodes that determines the step's time: the agreed one, or the rank's own if it serves alone."""
        return self.agreement.agreed_tokens or self.underway.batch.num_decode_tokens


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
    def is_alone(self) -> bool:
        """Whether this rank serves alone."""
        return self._runner.dispatcher.world_size == 1

    @property
    def may_overlap(self) -> bool:
        """Whether steps of this epoch may overlap: the host does not wait while decodes are launched."""
        return self.is_alone or self._runner.dispatcher.is_replayable

    def begin_plan(self) -> None:
        """Wait until it is time to plan the step behind the running one."""
        if self.plan_time is None:
            return
        if self._running is not None:
            self.plan_time.wait()
        self.plan_time.begin_plan()

    def run(self, batch: StepBatch, agreement: Agreement) -> None:
        """Launch a step, and commit the one before."""
        launch_waits = not (self.is_alone or agreement.agreed_tokens)
        if launch_waits:
            self.finish()
        underway = self._runner.launch(
            batch,
            agreement.agreed_tokens,
            has_prefill=agreement.has_prefill,
            wait_cause=agreement.wait_cause,
            before=None if self._running is None else self._running.underway,
        )
        launched = _Running(underway, agreement)
        if self.plan_time is not None:
            self.plan_time.end_launch(num_decodes=launched.num_decodes, has_prefill=agreement.has_prefill)
        self.finish()
        self._runner.sample(underway)  # now all earlier tokens are known
        self._running = launched
        is_poll = self.is_alone and not batch.items  # of requests that wait for their masks
        if is_poll or not underway.may_run_on:
            self.finish()

    def finish(self) -> None:
        """Wait for the running step, if there is one, and commit it."""
        if self._running is None:
            return
        running, self._running = self._running, None
        underway, agreement = running
        sampled = self._runner.read(underway)
        if self.plan_time is not None:
            self.plan_time.end_step(
                underway.seconds, num_decodes=running.num_decodes, has_prefill=agreement.has_prefill
            )
        self._commit(underway.batch, sampled, underway.seconds, agreement)

    def abandon(self) -> None:
        """Forget the launched steps once the device has ended them. They were not committed, so they may run again."""
        self._running = None
        self._runner.settle()
