"""Who serves together: orders of the front, as ranks follow them. Knows no torch and no wire format.

A rank's number is its for ever; its place in an epoch is its index among that epoch's members. Process groups,
dispatchers and placements have places. The front alone decides who the members are (D8 of the design), so ranks need
no consensus: they follow the newest order that they have, and one that cannot be followed is told and outlived."""

import re
import threading
from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

from expert_placement.placement import Placement
from scheduler.step.lockstep import LockStepError

_PLACE = re.compile(r"\brank (\d+)\b")


class MembershipError(LockStepError):
    """No order came, so that this rank serves with nobody."""


class OvertakenError(Exception):
    """A newer order came, or the end, while this one was followed."""


class CannotHoldError(Exception):
    """This rank cannot take over what an order gives it; only another order helps."""


class Order(NamedTuple):
    """The epoch so far is over: meet these members in that one, with this placement."""

    epoch: int
    members: tuple[int, ...]  # ranks, ascending
    placement: Placement  # over their places


class IsOver(Protocol):
    """Says whether there is no use any more in following an order."""

    def __call__(self, wait_s: float = 0.0) -> bool:
        """Wait so long for it to be over."""
        ...


class OnFault(Protocol):
    """Told that a rank's steps in an epoch broke off, or that it could not follow the order of that epoch."""

    def __call__(self, epoch: int, reason: str, *, is_final: bool = False) -> None:
        """Must not block. `is_final`: only an order of another kind helps."""


OnRegrouped = Callable[[int], None]  # told the epoch in which this rank serves from now on; must not block


class Orders:
    """The newest order that came: given from any thread, followed by the step loop's."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._newest: Order | None = None
        self._is_stopped = False

    def give(self, order: Order) -> bool:
        """Take an order if it is newer than all before; returns whether it is."""
        with self._changed:
            if order.epoch <= self.newest_epoch(-1):
                return False
            self._newest = order
            self._changed.notify_all()
            return True

    @property
    def newest(self) -> Order | None:
        """The newest order; None: none came."""
        return self._newest

    def stop(self) -> None:
        """Let nobody wait for orders any more."""
        with self._changed:
            self._is_stopped = True
            self._changed.notify_all()

    def newest_epoch(self, epoch: int) -> int:
        """The newest epoch that was ordered; `epoch` itself if none after it was."""
        newest = self._newest
        return epoch if newest is None else max(epoch, newest.epoch)

    def is_over(self, epoch: int, wait_s: float = 0.0) -> bool:
        """Whether there is no use any more in what an epoch's order asks, now or within so many seconds."""
        with self._changed:
            return self._changed.wait_for(lambda: self._is_past(epoch), wait_s)

    def _is_past(self, epoch: int) -> bool:
        return self._is_stopped or self.newest_epoch(epoch) > epoch

    def wait(self, epoch: int, timeout_s: float) -> Order | None:
        """Wait for an order newer than `epoch`; None: there will be none, as all stop.

        Raises:
            MembershipError: none came in time.
        """
        with self._changed:
            came = self._changed.wait_for(lambda: self._is_past(epoch), timeout_s)
            if not came:
                raise MembershipError(
                    f"epoch {epoch} ended and the front has ordered no other within {timeout_s:g} s"
                )
            return None if self._is_stopped else self._newest


def by_rank(text: str, members: Sequence[int]) -> str:
    """Name ranks in what was said of places, as groups and dispatchers do, whose ranks are places in their epoch."""

    def name(match: re.Match[str]) -> str:
        place = int(match[1])
        return f"rank {members[place]}" if place < len(members) else match[0]

    return _PLACE.sub(name, text)
