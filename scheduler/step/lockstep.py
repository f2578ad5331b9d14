"""What all ranks must know of each other to take the same step, one step ahead (D6 of the design).

Every rank posts a small fixed header before it runs a step and reads everybody's after it, so that no rank waits
for one inside a step. From equal headers all ranks derive the same decision; that they speak of the same step,
epoch and placement is checked each time, because a mismatch would mix up answers silently.

The decision includes how tokens travel. When no rank has a prompt to run, all know a step ahead how many tokens any
of them can have, and dispatch in low-latency mode for that many; a step with prompts is in normal mode. Idea: the
`auto` of SGLang's `--deepep-mode`, there decided by each rank's forward mode."""

from collections.abc import Sequence
from enum import Enum
from typing import NamedTuple, Protocol

from dispatch.errors import DispatchError
from dispatch.mode import SMALLEST_CAPACITY, fitting_capacity
from scheduler.policy.config import DispatchMode
from scheduler.step.prefill_pace import agree_on_prefill


class LockStepError(RuntimeError):
    """Ranks disagree on where they are; the service must end rather than answer wrongly."""


class HeaderExchange(Protocol):
    """An all-gather of small integer rows, split in two; see `dispatch.wires.mailbox`."""

    def post(self, values: Sequence[int]) -> None:
        """Send this rank's row without waiting."""

    def collect(self, timeout_s: float) -> list[list[int]]:
        """Return every rank's row of the same round."""

    def interrupt(self, error: DispatchError) -> None:
        """End a wait with an error; from any thread."""

    def close(self) -> None:
        """Release what it holds; may be called twice."""


class Header(NamedTuple):
    """What a rank says before a step about the one after it."""

    step: int
    epoch: int
    placement_version: int
    has_work: int  # 1: something waits or runs here
    is_stopping: int  # 1: asked to end
    has_prefill: int  # 1: part of a prompt waits to run
    num_decodes: int  # tokens of running requests, drafts included, at most
    ready_version: (
        int  # of a placement whose experts are here and verified; the one that serves if there is no other
    )
    num_prefill: int  # tokens of prompts that wait to run, at most a step's
    ordered_epoch: int  # the newest that the front has ordered; the one that serves if there is no other
    prefill_budget: int = 0  # tokens of prompts that it could take on beside decodes; 0: any number
    draft_depth: int = 0  # drafts that it would make behind the step
    num_context: int = 0  # tokens of the sequences that run


class Decision(Enum):
    """What all ranks do next."""

    RUN = "run"
    SLEEP = "sleep"  # nobody has anything
    REGROUP = "regroup"  # all have the order to meet in another epoch
    STOP = "stop"


class Agreement(NamedTuple):
    """What all ranks derive from one round of headers."""

    decision: Decision
    agreed_tokens: int = (
        0  # no rank may run more in this step, which is dispatched in low-latency mode; 0: no limit
    )
    switch_to: int | None = None  # the placement that serves from this step on; None: it stays
    has_prefill: bool = False  # some rank announced parts of prompts
    prefill_budget: int | None = None  # no rank takes on more tokens of prompts; None: no limit
    draft_depth: int = 0  # drafts that all make behind the step, each as many as the one that makes the most
    others_prefill: int = 0  # the most tokens of prompts that another rank announced
    wait_cause: str = (
        "other"  # what this rank waits for before its experts get rows, if it waits; one of WAIT_CAUSES
    )


def decide(headers: Sequence[Header]) -> Decision:
    """Derive the common decision.

    Raises:
        LockStepError: headers of different steps, epochs or placements.
    """
    places = {(header.step, header.epoch, header.placement_version) for header in headers}
    if len(places) != 1:
        raise LockStepError(
            f"ranks are at different (step, epoch, placement version): "
            f"{[tuple(header[:3]) for header in headers]}; this is a bug, and the service ends"
        )
    if any(header.is_stopping for header in headers):
        return Decision.STOP
    ordered = {header.ordered_epoch for header in headers}
    if len(ordered) == 1 and ordered != {headers[0].epoch}:
        return Decision.REGROUP
    return Decision.RUN if any(header.has_work for header in headers) else Decision.SLEEP


def agree_on_switch(headers: Sequence[Header]) -> int | None:
    """Derive the placement that all ranks switch to now: the one that all are ready for. None: it stays."""
    ready = {header.ready_version for header in headers}
    version = headers[0].ready_version
    return version if len(ready) == 1 and version != headers[0].placement_version else None


def agree_on_tokens(headers: Sequence[Header], mode: DispatchMode, max_num_batched_tokens: int) -> int:
    """Derive the common limit on the step's tokens; 0 for a step in normal mode.

    Args:
        headers: of all ranks.
        mode: of the service.
        max_num_batched_tokens: what a step may have at all, per rank.
    """
    if mode is DispatchMode.LOW_LATENCY:
        return fitting_capacity(max_num_batched_tokens)
    if mode is DispatchMode.NORMAL or any(header.has_prefill for header in headers):
        return 0
    return fitting_capacity(max(header.num_decodes for header in headers))


def announced_prefill(header: Header, prefill_budget: int | None) -> int:
    """Tokens of prompts that a rank announced for the step, as far as the budget lets them in."""
    return header.num_prefill if prefill_budget is None else min(header.num_prefill, prefill_budget)


def cause_of_waiting(own: Header, headers: Sequence[Header], prefill_budget: int | None) -> str:
    """Say what another rank has more of in the step than this one: what costs most, if it has.

    Args:
        prefill_budget: as agreed on; what waits beyond it costs nothing in this step.
    """

    most_prefill = max(announced_prefill(header, prefill_budget) for header in headers)
    if most_prefill > announced_prefill(own, prefill_budget):
        return "prefill"
    if max(header.num_decodes for header in headers) > own.num_decodes:
        return "decodes"
    return "contexts" if max(header.num_context for header in headers) > own.num_context else "other"


def describe_modes(mode: DispatchMode, max_decode_tokens: int, max_num_batched_tokens: int) -> str:
    """Say in one sentence which steps are dispatched how."""
    if mode is DispatchMode.NORMAL:
        return "every step is dispatched in normal mode"
    if mode is DispatchMode.LOW_LATENCY:
        capacity = fitting_capacity(max_num_batched_tokens)
        return f"every step is dispatched in low-latency mode, with room for {capacity} tokens per rank"
    return (
        f"decode-only steps are dispatched in low-latency mode, with room for {SMALLEST_CAPACITY} to "
        f"{fitting_capacity(max_decode_tokens)} tokens per rank, steps with prompts in normal mode"
    )


class LockStep:
    """One rank's part in the exchange."""

    def __init__(
        self,
        mailbox: HeaderExchange,
        *,
        epoch: int,
        timeout_s: float,
        mode: DispatchMode = DispatchMode.AUTO,
        max_num_batched_tokens: int = 0,
        placement_version: int = 0,
        step: int = 0,
    ) -> None:
        """`timeout_s` bounds how long another rank's header may take; all but it are equal on all ranks.

        `step` is the first one's number: numbers go on from epoch to epoch, so that none comes twice.
        """
        self._mailbox, self.epoch, self._timeout_s = mailbox, epoch, timeout_s
        self._mode, self._max_num_batched_tokens = mode, max_num_batched_tokens
        self.placement_version, self.step = placement_version, step
        self._own: Header | None = None  # as it was posted last

    def post(
        self,
        *,
        has_work: bool,
        is_stopping: bool,
        has_prefill: bool,
        num_decodes: int,
        ready_version: int | None = None,
        num_prefill: int = 0,
        ordered_epoch: int | None = None,
        prefill_budget: int = 0,
        draft_depth: int = 0,
        num_context: int = 0,
    ) -> None:
        """Say what this rank will have to do in the next step, which placement it could switch to, and which epoch
        it was ordered to, if another one."""
        flags = int(has_work), int(is_stopping), int(has_prefill)
        ready = self.placement_version if ready_version is None else ready_version
        ordered = self.epoch if ordered_epoch is None else ordered_epoch
        place = self.step, self.epoch, self.placement_version
        self._own = Header(
            *place, *flags, num_decodes, ready, num_prefill, ordered, prefill_budget, draft_depth, num_context
        )
        self._mailbox.post(self._own)

    def agree(self) -> Agreement:
        """Read everybody's header of this step and move to the next; collective."""
        rows = self._mailbox.collect(self._timeout_s)
        self.step += 1
        headers = [Header(*row[: len(Header._fields)]) for row in rows]
        decision, switch_to = decide(headers), agree_on_switch(headers)
        if decision is Decision.REGROUP:
            switch_to = None  # the order says what serves next
        if switch_to is not None:
            self.placement_version = switch_to
        tokens = agree_on_tokens(headers, self._mode, self._max_num_batched_tokens)
        has_prefill = any(header.has_prefill for header in headers)
        budget = agree_on_prefill(
            [header.prefill_budget for header in headers],
            has_decodes=any(header.num_decodes for header in headers),
        )
        depth = max(header.draft_depth for header in headers)
        assert self._own is not None, "a rank reads headers behind its own"
        others = [announced_prefill(header, budget) for header in headers]
        others.remove(announced_prefill(self._own, budget))
        cause = cause_of_waiting(self._own, headers, budget)
        return Agreement(
            decision, tokens, switch_to, has_prefill, budget, depth, max(others, default=0), cause
        )

    def interrupt(self, error: DispatchError) -> None:
        """Wait no longer for headers, now or next; from any thread."""
        self._mailbox.interrupt(error)

    def close(self) -> None:
        """Let ranks that wait for this one's header know that none will come. May be called twice."""
        self._mailbox.close()


class Doorbell(Protocol):
    """Wakes all ranks of a job."""

    def ring(self, step: int) -> None:
        """Wake everybody who sleeps before `step`; any thread."""

    def wait(self, step: int) -> None:
        """Sleep until somebody rings for `step`."""
