"""From one epoch to the next: a rank that stands alone waits for the front's order and follows it, until one holds.

What can go wrong on the way is told and outlived: a member that dies meanwhile, or does not come, is a fault like any
other, and so is an order that this rank has no memory for, which only another order helps. A newer order overtakes
the one that is followed. Only where no order comes at all, or an error is a bug, the engine ends.
"""

from functools import partial

from dispatch.errors import DispatchTimeout, PeerLost, WireUnavailable
from scheduler.epochs.membership import (
    ORDER_TIMEOUT_S,
    CannotHoldError,
    OnFault,
    OnRegrouped,
    Order,
    Orders,
    OvertakenError,
)
from scheduler.epochs.regrouping import Regrouping
from scheduler.step.lockstep import LockStep

PEER_IS_GONE = (
    PeerLost,
    DispatchTimeout,
)  # other errors between ranks are bugs, and another epoch would have them too


class Epochs:
    """One rank's way through epochs. `orders` takes them from any thread; the rest is the step loop's."""

    def __init__(self, regrouping: Regrouping, *, timeout_s: float = ORDER_TIMEOUT_S) -> None:
        """`timeout_s` bounds how long an order may take."""
        self.orders = Orders()
        self.on_fault: OnFault = _say_nothing
        self.on_regrouped: OnRegrouped = _note_nothing
        self._regrouping, self._timeout_s = regrouping, timeout_s
        self._epoch, self._step = (
            -1,
            0,
        )  # the last epoch that ended here or could not be followed; its last step

    def end(self, lockstep: LockStep, reason: str) -> None:
        """Let go of an epoch, and say why unless all ranks know that it is over.

        Args:
            reason: why its steps broke off; "" where they did not.
        """
        self._epoch, self._step = lockstep.epoch, lockstep.step
        self._regrouping.part()
        self._tell(reason)

    def follow(self) -> LockStep | None:
        """Follow orders until this rank serves in an epoch; None: all stop.

        Raises:
            MembershipError: no order came in time.
        """
        while (order := self.orders.wait(self._epoch, self._timeout_s)) is not None:
            self._epoch = order.epoch
            lockstep = self._try(order)
            if lockstep is not None:
                self.on_regrouped(order.epoch)
                return lockstep
        return None

    def close(self) -> None:
        """Let go of the epoch that serves, if one does, and of what lasts longer. May be called twice."""
        self._regrouping.close()

    def _try(self, order: Order) -> LockStep | None:
        reason, is_final = "", False
        try:
            return self._regrouping.follow(order, self._step, partial(self.orders.is_over, order.epoch))
        except OvertakenError:
            pass
        except CannotHoldError as error:
            reason, is_final = str(error), True
        except (*PEER_IS_GONE, WireUnavailable) as error:
            reason = f"{type(error).__name__}: {error}"
        self._regrouping.part()
        self._tell(reason, is_final=is_final)
        return None

    def _tell(self, reason: str, *, is_final: bool = False) -> None:
        if reason and not self.orders.is_over(self._epoch):
            self.on_fault(self._epoch, reason, is_final=is_final)


def _say_nothing(epoch: int, reason: str, *, is_final: bool = False) -> None:
    """Stand for who is told of faults."""


def _note_nothing(epoch: int) -> None:
    """Stand for who is told of epochs."""
