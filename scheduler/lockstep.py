"""What all ranks must know of each other to take the same step, one step ahead (D6 of the design).

Every rank posts a small fixed header before it runs a step and reads everybody's after it, so that no rank waits
for one inside a step. From equal headers all ranks derive the same decision; that they speak of the same step,
epoch and placement is checked each time, because a mismatch would mix up answers silently.
"""

from collections.abc import Sequence
from enum import Enum
from typing import NamedTuple, Protocol


class LockStepError(RuntimeError):
    """Ranks disagree on where they are; the service must end rather than answer wrongly."""


class Mailbox(Protocol):
    """An all-gather of small integer rows, split in two; see `dispatch.mailbox`."""

    def post(self, values: Sequence[int]) -> None:
        """Send this rank's row without waiting."""

    def collect(self, timeout_s: float) -> list[list[int]]:
        """Return every rank's row of the same round."""


class Header(NamedTuple):
    """What a rank says before a step about the one after it."""

    step: int
    epoch: int
    placement_version: int
    has_work: int  # 1: something waits or runs here
    is_stopping: int  # 1: asked to end


class Decision(Enum):
    """What all ranks do next."""

    RUN = "run"
    SLEEP = "sleep"  # nobody has anything
    STOP = "stop"


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
    return Decision.RUN if any(header.has_work for header in headers) else Decision.SLEEP


class LockStep:
    """One rank's part in the exchange."""

    def __init__(self, mailbox: Mailbox, *, epoch: int, timeout_s: float) -> None:
        """`timeout_s` bounds how long another rank's header may take."""
        self._mailbox, self._epoch, self._timeout_s = mailbox, epoch, timeout_s
        self.step = 0

    def post(self, *, has_work: bool, is_stopping: bool) -> None:
        """Say what this rank will have to do in the next step."""
        self._mailbox.post(Header(self.step, self._epoch, 0, int(has_work), int(is_stopping)))

    def agree(self) -> Decision:
        """Read everybody's header of this step and move to the next; collective."""
        rows = self._mailbox.collect(self._timeout_s)
        self.step += 1
        return decide([Header(*row[: len(Header._fields)]) for row in rows])
