"""What stands where a dispatcher will be while a rank is built that meets the others later. It moves nothing."""

from typing import NoReturn

from torch import Tensor

from dispatch.dispatched import Dispatched, Exchanges, Waits
from dispatch.errors import DispatchError
from dispatch.mode import NORMAL, Mode


class UnconnectedDispatcher:
    """See `TokenDispatcher`: of so many ranks, none of which can be reached."""

    name, reason, row_format = "nothing", "this rank is to meet the others later", "not at all"
    is_replayable = False
    waits, exchanges = Waits(0, 0), Exchanges(0, 0)

    def __init__(self, world_size: int) -> None:
        self.world_size = world_size

    def sent_to_ranks(self) -> tuple[list[int], list[int]]:
        """See `TokenDispatcher`."""
        return [0] * self.world_size, [0] * self.world_size

    def dispatch(self, x_TH: Tensor, slots_TK: Tensor, mode: Mode = NORMAL) -> Dispatched:
        """Refuse."""
        self._refuse()

    def combine(
        self, y_PH: Tensor, weights_TK: Tensor, dispatched: Dispatched, *, out: Tensor | None = None
    ) -> Tensor:
        """Refuse."""
        self._refuse()

    def check(self) -> None:
        """See `TokenDispatcher`. Nothing went wrong."""

    def interrupt(self, error: DispatchError) -> None:
        """See `TokenDispatcher`. Nobody is waited for."""

    def close(self) -> None:
        """See `TokenDispatcher`. Nobody waits."""

    def _refuse(self) -> NoReturn:
        raise DispatchError("this rank has not met the others yet")
