"""Lock-step: what ranks exchange, one step ahead, so that all take the same step.

Every rank posts a small fixed header before it runs a step and reads all headers after it, so that no rank waits for a
header inside a step. All ranks derive the same decision from the same headers. Each time they check that the headers
agree on step, epoch and placement, because a mismatch would silently mix up answers.

The decision includes the dispatch mode. If no rank has a prompt to run, all know a step ahead how many tokens each can
have, and they dispatch in low-latency mode for that many. A step with prompts uses normal mode. Idea: the `auto` of
SGLang's `--deepep-mode`, which there depends on each rank's forward mode."""

from collections.abc import Sequence
from enum import Enum, IntFlag
from typing import NamedTuple, Protocol

from dispatch.errors import DispatchError
from dispatch.mode import SMALLEST_CAPACITY, fitting_capacity
from scheduler.policy.config import DispatchMode
from scheduler.step.prefill_pace import agree_on_prefill


class LockStepError(RuntimeError):
    """Ranks disagree on step, epoch or placement. The service must end rather than answer wrongly."""


class HeaderExchange(Protocol):
    """A split all-gather of small integer rows; see `dispatch.wires.mailbox`."""

    def post(self, values: Sequence[int]) -> None:
        """Send this rank's row without waiting."""

    def collect(self, timeout_s: float) -> list[list[int]]:
        """Return every rank's row of the same round."""

    def interrupt(self, error: DispatchError) -> None:
        """End a wait with an error. Any thread may call this."""

    def close(self) -> None:
        """Release resources. May be called twice."""


class StepFlag(IntFlag):
    """What holds for a rank in the step. One word of its header, because the headers' line is full."""

    WORK = 1  # a request waits or runs here
    STOPPING = 2  # this rank is to stop
    PREFILL = 4  # part of a prompt waits to run
    RELEASING = 8  # at the beginning of the step, it releases running requests for other ranks


class Header(NamedTuple):
    """What a rank posts before a step about the step after it."""

    step: int
    epoch: int
    placement_version: int
    flags: int  # of `StepFlag`
    num_decodes: int  # most tokens of running requests, drafts included
    # The placement with experts that are all here and verified. The serving one if there is no other.
    ready_version: int
    num_prefill: int  # prompt tokens that wait to run, at most a step's capacity
    ordered_epoch: int  # the newest epoch that the front ordered; the serving one if there is no other
    prefill_budget: int = 0  # prompt tokens that it could run in addition to decodes; 0: no limit
    draft_depth: int = 0  # drafts that it would make after the step
    num_context: int = 0  # tokens of the running sequences
    memory_number: int = 0  # the newest memory order that it could follow
    weights: int = 0  # versions of the weights, in one word for the same reason: see `versions_word`


_VERSION_BITS = 31  # two versions and a flag are 63 bits, which keeps the word positive
_MOST_VERSION = (1 << _VERSION_BITS) - 1


class WeightVersions(NamedTuple):
    """Versions of the weights in a header."""

    serving: int
    ready: int  # the rank could switch to it; otherwise the serving one
    is_prepared: bool  # open requests of the rank have their prefixes of the ready version


def versions_word(serving: int, ready: int, *, is_prepared: bool = True) -> int:
    """Return a header's word for `WeightVersions`."""
    assert 0 <= serving <= _MOST_VERSION, f"version {serving} of the weights does not fit into a header"
    assert 0 <= ready <= _MOST_VERSION, f"version {ready} of the weights does not fit into a header"
    return (serving << _VERSION_BITS | ready) << 1 | is_prepared


def versions_of(word: int) -> WeightVersions:
    """Return what `versions_word` was given."""
    return WeightVersions(word >> _VERSION_BITS + 1, word >> 1 & _MOST_VERSION, bool(word & 1))


class Decision(Enum):
    """The next action of all ranks."""

    RUN = "run"
    SLEEP = "sleep"  # no rank has work
    REGROUP = "regroup"  # all ranks have the order to meet in another epoch
    STOP = "stop"


class Agreement(NamedTuple):
    """What all ranks derive from one round of headers."""

    decision: Decision
    # Most tokens of any rank in this step, which is dispatched in low-latency mode. 0: no limit.
    agreed_tokens: int = 0
    switch_to: int | None = None  # the placement that serves from this step on; None keeps the present one
    has_prefill: bool = False  # some rank announced prompt tokens
    prefill_budget: int | None = None  # most prompt tokens that a rank may run; None sets no limit
    draft_depth: int = 0  # drafts that all ranks make after the step: the maximum over ranks
    others_prefill: int = 0  # most prompt tokens that another rank announced
    # If this rank waits before its experts get rows, the cause; one of WAIT_CAUSES.
    wait_cause: str = "other"
    memory_number: int | None = None  # the memory order that all ranks could follow, if none has work
    weights_number: int | None = None  # the weights that serve from this step on; None keeps the present ones
    # The version of the weights for which all ranks prepare their open requests in this step. None: they do not.
    prepares: int | None = None
    is_releasing: bool = False  # some rank now releases running requests, which others may expect


def decide(headers: Sequence[Header]) -> Decision:
    """Derive the common decision.

    Raises:
        LockStepError: The headers are of different steps, epochs or placements.
    """
    places = {(header.step, header.epoch, header.placement_version) for header in headers}
    if len(places) != 1:
        raise LockStepError(
            f"ranks are at different (step, epoch, placement version): "
            f"{[tuple(header[:3]) for header in headers]}; this is a bug, and the service ends"
        )
    if is_any(StepFlag.STOPPING, headers):
        return Decision.STOP
    ordered = {header.ordered_epoch for header in headers}
    if len(ordered) == 1 and ordered != {headers[0].epoch}:
        return Decision.REGROUP
    return Decision.RUN if is_any(StepFlag.WORK, headers) else Decision.SLEEP


def is_any(flag: StepFlag, headers: Sequence[Header]) -> bool:
    """Whether a flag holds for some rank."""
    word = flag.value  # of an int, because the operators of flags are slow
    return any(header.flags & word for header in headers)


def agree_on_switch(headers: Sequence[Header]) -> int | None:
    """Return the placement that all ranks switch to now: the one for which all are ready. None if it does not change."""
    ready = {header.ready_version for header in headers}
    version = headers[0].ready_version
    return version if len(ready) == 1 and version != headers[0].placement_version else None


def agree_on_memory(headers: Sequence[Header], decision: Decision) -> int | None:
    """Return the memory order that all ranks follow now. None unless all could and none has work."""
    numbers = {header.memory_number for header in headers}
    return headers[0].memory_number if decision is Decision.SLEEP and len(numbers) == 1 else None


class WeightsStep(NamedTuple):
    """What all ranks do with another version of the weights in a step."""

    switch_to: int | None = None  # it serves from this step on
    prepares: int | None = None  # each rank prepares its open requests for it


def agree_on_weights(headers: Sequence[Header], decision: Decision) -> WeightsStep:
    """Derive what all ranks do with the version that all of them could switch to.

    If no rank has work, they switch, because no request is open.

    Raises:
        LockStepError: Ranks serve different weights.
    """
    versions = [versions_of(header.weights) for header in headers]
    serving, ready = {each.serving for each in versions}, {each.ready for each in versions}
    if len(serving) != 1:
        raise LockStepError(
            f"ranks serve versions {sorted(serving)} of the weights; this is a bug, and the service ends"
        )
    is_over = decision in (Decision.STOP, Decision.REGROUP)  # an order determines the next version
    if is_over or len(ready) != 1 or ready == serving:
        return WeightsStep()
    number = ready.pop()
    if decision is Decision.RUN and not all(each.is_prepared for each in versions):
        return WeightsStep(prepares=number)
    return WeightsStep(switch_to=number)


def agree_on_tokens(
    headers: Sequence[Header], mode: DispatchMode, max_num_batched_tokens: int, prompt_capacity: int = 0
) -> int:
    """Return the common limit on the step's tokens, or 0 for a step in normal mode.

    Args:
        headers: Headers of all ranks.
        mode: Dispatch mode of the service.
        max_num_batched_tokens: Most tokens of any step, per rank.
        prompt_capacity: Most tokens of a rank in a low-latency step with prompts; 0: these steps are normal. Requests that
            arrive before the step only fill the room that is left.
    """
    if mode is DispatchMode.LOW_LATENCY:
        return fitting_capacity(max_num_batched_tokens)
    if mode is DispatchMode.NORMAL:
        return 0
    if is_any(StepFlag.PREFILL, headers):
        most = max(header.num_decodes + header.num_prefill for header in headers)
        return prompt_capacity if most <= prompt_capacity else 0
    return fitting_capacity(max(header.num_decodes for header in headers))


def announced_prefill(header: Header, prefill_budget: int | None) -> int:
    """Return the prompt tokens that a rank announced for the step, limited by the budget."""
    return header.num_prefill if prefill_budget is None else min(header.num_prefill, prefill_budget)


def cause_of_waiting(own: Header, headers: Sequence[Header], prefill_budget: int | None) -> str:
    """Return the most expensive kind of work of which another rank has more in the step than this one.

    Args:
        prefill_budget: The agreed budget. Tokens beyond it cost nothing in this step.
    """

    most_prefill = max(announced_prefill(header, prefill_budget) for header in headers)
    if most_prefill > announced_prefill(own, prefill_budget):
        return "prefill"
    if max(header.num_decodes for header in headers) > own.num_decodes:
        return "decodes"
    return "contexts" if max(header.num_context for header in headers) > own.num_context else "other"


def describe_modes(
    mode: DispatchMode, max_decode_tokens: int, max_num_batched_tokens: int, prompt_capacity: int = 0
) -> str:
    """Describe in one sentence which steps use which dispatch mode."""
    if mode is DispatchMode.NORMAL:
        return "every step is dispatched in normal mode"
    if mode is DispatchMode.LOW_LATENCY:
        capacity = fitting_capacity(max_num_batched_tokens)
        return f"every step is dispatched in low-latency mode, with room for {capacity} tokens per rank"
    prompts = (
        f"those of up to {prompt_capacity} tokens too, larger ones"
        if prompt_capacity
        else "steps with prompts"
    )
    return (
        f"decode-only steps are dispatched in low-latency mode, with room for {SMALLEST_CAPACITY} to "
        f"{fitting_capacity(max_decode_tokens)} tokens per rank, {prompts} in normal mode"
    )


class LockStep:
    """One rank's part in the exchange of headers."""

    def __init__(
        self,
        mailbox: HeaderExchange,
        *,
        epoch: int,
        timeout_s: float,
        mode: DispatchMode = DispatchMode.AUTO,
        max_num_batched_tokens: int = 0,
        prompt_capacity: int = 0,
        placement_version: int = 0,
        step: int = 0,
    ) -> None:
        """`timeout_s` bounds the wait for another rank's header. All other arguments are equal on all ranks.

        `step`: number of the first step. Numbers continue from epoch to epoch, so that each occurs once.
        """
        self._mailbox, self.epoch, self._timeout_s = mailbox, epoch, timeout_s
        self._mode, self._max_num_batched_tokens = mode, max_num_batched_tokens
        self._prompt_capacity = prompt_capacity
        self.placement_version, self.step = placement_version, step
        self._own: Header | None = None  # as last posted

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
        memory_number: int = 0,
        weights: int = 0,
        is_releasing: bool = False,
    ) -> None:
        """Post this rank's work of the next step, the placement to which it could switch, the newest epoch to which it was
        ordered, the newest memory order that it could follow, the weights that it serves and could switch to (`versions_word`),
        and whether it releases running requests at its beginning."""
        flags = has_work * StepFlag.WORK | is_stopping * StepFlag.STOPPING | has_prefill * StepFlag.PREFILL
        flags |= is_releasing * StepFlag.RELEASING
        ready = self.placement_version if ready_version is None else ready_version
        ordered = self.epoch if ordered_epoch is None else ordered_epoch
        place = self.step, self.epoch, self.placement_version
        self._own = Header(
            *place, flags, num_decodes, ready, num_prefill, ordered, prefill_budget, draft_depth, num_context,
            memory_number, weights,
        )  # fmt: skip
        self._mailbox.post(self._own)

    def agree(self) -> Agreement:
        """Read all headers of this step and advance to the next one. Collective."""
        rows = self._mailbox.collect(self._timeout_s)
        self.step += 1
        headers = [Header(*row[: len(Header._fields)]) for row in rows]
        decision, switch_to = decide(headers), agree_on_switch(headers)
        if decision is Decision.REGROUP:
            switch_to = None  # the order determines the next placement
        if switch_to is not None:
            self.placement_version = switch_to
        tokens = agree_on_tokens(headers, self._mode, self._max_num_batched_tokens, self._prompt_capacity)
        has_prefill = is_any(StepFlag.PREFILL, headers)
        budget = agree_on_prefill(
            [header.prefill_budget for header in headers],
            has_decodes=any(header.num_decodes for header in headers),
        )
        weights = agree_on_weights(headers, decision)
        if weights.switch_to is not None:
            # No request decodes in this step: all start again from their prompts, which no header has announced.
            tokens = tokens if self._mode is DispatchMode.LOW_LATENCY else 0
            has_prefill, budget = True, None
        depth = max(header.draft_depth for header in headers)
        assert self._own is not None, "a rank posts its header before it reads the others'"
        others = [announced_prefill(header, budget) for header in headers]
        others.remove(announced_prefill(self._own, budget))
        cause = cause_of_waiting(self._own, headers, budget)
        return Agreement(
            decision, tokens, switch_to, has_prefill, budget, depth, max(others, default=0), cause,
            agree_on_memory(headers, decision), *weights, is_any(StepFlag.RELEASING, headers),
        )  # fmt: skip

    def interrupt(self, error: DispatchError) -> None:
        """End present and future waits for headers with an error. Any thread may call this."""
        self._mailbox.interrupt(error)

    def close(self) -> None:
        """Wake ranks that wait for this rank's header: none will come. May be called twice."""
        self._mailbox.close()


class Doorbell(Protocol):
    """Wakes all ranks of a job."""

    def ring(self, step: int) -> None:
        """Wake all ranks that sleep before `step`. Any thread may call this."""

    def wait(self, step: int) -> None:
        """Sleep until a rank rings for `step`."""
