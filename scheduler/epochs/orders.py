"""Membership orders of the front, as ranks follow them. Does not use torch or a wire format.

A rank's number is permanent; its place in an epoch is its index among the epoch's members. Process groups, dispatchers
and placements use places. The front alone decides the members, so ranks need no consensus: they
follow their newest order. If it cannot be followed, they report that and wait for the next."""

import re
import threading
from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

from expert_placement.placement import Placement
from scheduler.step.lockstep import LockStepError

_PLACE = re.compile(r"\brank (\d+)\b")


class MembershipError(LockStepError):
    """No order came, so this rank cannot serve with any other."""


class OvertakenError(Exception):
    """A newer order or the end came while this order was followed."""


class CannotHoldError(Exception):
    """This rank cannot take over the experts of an order. Only a different order helps."""


class Order(NamedTuple):
    """The present epoch is over: meet these members in this epoch, with this placement."""

    epoch: int
    members: tuple[int, ...]  # ranks, ascending
    placement: Placement  # over the members' places
    weights: int = 0  # number of the version of the base weights that all members serve
    num_ranks: int = 0  # of the pool from this epoch on, present or not; 0: as before
    # Living ranks that are no members. They get the order too, so that all ranks of the last epoch part at one step.
    leaving: tuple[int, ...] = ()
    # Members with failed steps in the last epoch. The others need not wait for them, but may not have noticed.
    stopped: tuple[int, ...] = ()


class IsOver(Protocol):
    """Whether an order is obsolete."""

    def __call__(self, wait_s: float = 0.0) -> bool:
        """Wait up to `wait_s` seconds for it to be obsolete."""


class OnFault(Protocol):
    """Called when a rank's steps in an epoch broke off, or when it could not follow the order of that epoch."""

    def __call__(self, epoch: int, reason: str, *, is_final: bool = False) -> None:
        """Must not block. `is_final`: only a different order helps."""


OnRegrouped = Callable[[int], None]  # called with the epoch in which this rank now serves; must not block


class Orders:
    """The newest order. Any thread may give orders; the step loop's thread follows them."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._newest: Order | None = None
        self._is_stopped = False

    def give(self, order: Order) -> bool:
        """Accept an order if it is newer than all before. Returns whether it is."""
        with self._changed:
            if order.epoch <= self.newest_epoch(-1):
                return False
            self._newest = order
            self._changed.notify_all()
            return True

    @property
    def newest(self) -> Order | None:
        """The newest order, or None if none came yet."""
        return self._newest

    def stop(self) -> None:
        """End all present and future waits for orders."""
        with self._changed:
            self._is_stopped = True
            self._changed.notify_all()

    def newest_epoch(self, epoch: int) -> int:
        """Return the newest ordered epoch, or `epoch` if none after it was ordered."""
        newest = self._newest
        return epoch if newest is None else max(epoch, newest.epoch)

    def is_over(self, epoch: int, wait_s: float = 0.0) -> bool:
        """Whether an epoch's order is obsolete, now or within `wait_s` seconds."""
        with self._changed:
            return self._changed.wait_for(lambda: self._is_past(epoch), wait_s)

    def _is_past(self, epoch: int) -> bool:
        return self._is_stopped or self.newest_epoch(epoch) > epoch

    def wait(self, epoch: int, timeout_s: float | None) -> Order | None:
        """Wait for an order newer than `epoch`. Returns None if all ranks stop.

        Args:
            timeout_s: Time limit; None: no limit.

        Raises:
            MembershipError: No order came in time.
        """
        with self._changed:
            came = self._changed.wait_for(lambda: self._is_past(epoch), timeout_s)
            if not came:
                raise MembershipError(
                    f"epoch {epoch} ended and the front ordered no other within {timeout_s:g} s"
                )
            return None if self._is_stopped else self._newest


def by_rank(text: str, members: Sequence[int]) -> str:
    """Replace places by ranks in an error text. Groups and dispatchers name ranks by their places in an epoch."""

    def name(match: re.Match[str]) -> str:
        place = int(match[1])
        return f"rank {members[place]}" if place < len(members) else match[0]

    return _PLACE.sub(name, text)
