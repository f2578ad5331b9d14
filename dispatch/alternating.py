"""Two dispatchers in the place of one, for a step whose halves take turns: while one's rows travel the other computes.

A call belongs to the half whose turn it is. When its rows are on their way the turn is handed over; it comes back when
the other half has sent its own, or has ended. Each half has windows and buffers of its own, because both may have rows on
their way. A step in one piece goes through the first.

Knows no threads: whoever makes the turns says whose it is and hands it over.
"""

from typing import Protocol

from torch import Tensor

from dispatch.dispatched import Dispatched, TokenDispatcher, Waits
from dispatch.meanwhile import Meanwhile, nothing
from dispatch.mode import NORMAL, Mode


class Turn(Protocol):
    """Whose turn it is."""

    @property
    def current(self) -> int:
        """0 or 1; 0 for a step in one piece."""
        ...

    def hand_over(self) -> None:
        """Let the other half run until it hands over; returns at once where there is none."""
        ...


class AlternatingDispatcher:
    """See `TokenDispatcher`. `close` closes both.

    Args:
        first, second: of the same ranks, with wires of their own; all that can be seen is equal. Taken over.
        turn: of the halves.
    """

    is_replayable = False

    def __init__(self, first: TokenDispatcher, second: TokenDispatcher, turn: Turn) -> None:
        assert first.world_size == second.world_size, "both are of the same ranks"
        self._both, self._turn = (first, second), turn
        self.world_size, self.name, self.reason = first.world_size, first.name, first.reason
        self.row_format = first.row_format

    @property
    def waits(self) -> Waits:
        """See `TokenDispatcher`."""
        return Waits(*(sum(parts) for parts in zip(*(each.waits for each in self._both), strict=True)))

    def sent_to_ranks(self) -> tuple[list[int], list[int]]:
        """See `TokenDispatcher`."""
        dispatched, combined = zip(*(each.sent_to_ranks() for each in self._both), strict=True)
        return _added(*dispatched), _added(*combined)

    def dispatch(
        self, x_TH: Tensor, slots_TK: Tensor, mode: Mode = NORMAL, *, meanwhile: Meanwhile = nothing
    ) -> Dispatched:
        """See `Dispatcher`. The other half runs after `meanwhile`."""
        return self._own.dispatch(x_TH, slots_TK, mode, meanwhile=self._then_hand_over(meanwhile))

    def combine(
        self,
        y_PH: Tensor,
        weights_TK: Tensor,
        dispatched: Dispatched,
        *,
        out: Tensor | None = None,
        meanwhile: Meanwhile = nothing,
    ) -> Tensor:
        """See `Dispatcher`. The other half runs after `meanwhile`."""
        beside = self._then_hand_over(meanwhile)
        return self._own.combine(y_PH, weights_TK, dispatched, out=out, meanwhile=beside)

    def check(self) -> None:
        """See `TokenDispatcher`."""
        for each in self._both:
            each.check()

    def close(self) -> None:
        """See `TokenDispatcher`."""
        for each in self._both:
            each.close()

    @property
    def _own(self) -> TokenDispatcher:
        return self._both[self._turn.current]

    def _then_hand_over(self, meanwhile: Meanwhile) -> Meanwhile:
        def work_and_hand_over() -> None:
            meanwhile()
            self._turn.hand_over()

        return work_and_hand_over


def _added(first: list[int], second: list[int]) -> list[int]:
    return [one + other for one, other in zip(first, second, strict=True)]
