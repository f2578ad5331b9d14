"""The seam under `LowLatencyFace`: what moves rows and answers, by compiled CPU passes or by Triton kernels.

A call is posted (its messages leave) and finished (its results are written), at once or, for a receive hook, later.
One call travels at a time; posting the next finishes the one before into that one's own results, which every rank does
in the same order, so nobody waits for a message that is not on its way.
"""

from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor

from dispatch.errors import DispatchError
from dispatch.low_latency.ring import DispatchSlot
from dispatch.low_latency.shape import LowLatencyShape


class Posted:
    """A call whose messages are on their way.

    Calling it waits for the peers' and writes the results; again is harmless. What goes wrong while another call
    finishes this one is raised here, when its owner asks.
    """

    def __init__(self, finish: Callable[[], None]) -> None:
        self._finish: Callable[[], None] | None = finish
        self._error: DispatchError | None = None

    def settle(self) -> None:
        """Finish, and keep the error."""
        finish, self._finish = self._finish, None
        if finish is None:
            return
        try:
            finish()
        except DispatchError as error:
            self._error = error

    def __call__(self) -> None:
        """Finish, and raise what went wrong."""
        self.settle()
        if self._error is not None:
            raise self._error


class OneTravels:
    """One call travels at a time: what both kinds of exchange do about it."""

    _travelling: Posted | None = None

    def settle(self) -> None:
        """See `LowLatencyExchange`."""
        if self._travelling is not None:
            self._travelling.settle()
            self._travelling = None

    def _travel(self, finish: Callable[[], None]) -> Posted:
        """Return a call whose messages have left, and which `finish` ends."""
        self._travelling = Posted(finish)
        return self._travelling


class LowLatencyExchange(Protocol):
    """One rank's end. Posting, finishing, refusing and the barrier are collective, in the same order on all ranks;
    arguments are checked by the caller.

    Attributes:
        rank, world_size: within the group.
        device: where tokens and results lie.
        dtypes: floating types that it can move; None for all.
    """

    rank: int
    world_size: int
    device: torch.device
    dtypes: tuple[torch.dtype, ...] | None

    def settle(self) -> None:
        """Finish the call that travels, if one does: for whoever uses the wire otherwise. Collective."""
        ...

    def refuse(self, text: str) -> None:
        """Stand in for one call whose arguments are bad. Collective; the caller raises."""
        ...

    def slot_of(self, source_token_LN: Tensor) -> DispatchSlot | None:
        """Return the dispatch that handed this out. Local."""
        ...

    def find_bad_choice(self, topk_TK: Tensor, num_experts: int) -> int:
        """Return the flat index of the first choice outside [-1, num_experts), or -1. Local.

        -1 also where looking would wait for a device: such a choice is then no choice.
        """
        ...

    def find_other_choice(self, topk_TK: Tensor, slot: DispatchSlot) -> int:
        """Likewise for the first choice that is neither -1 nor what `slot` dispatched."""
        ...

    def post_dispatch(
        self,
        shape: LowLatencyShape,
        x_TH: Tensor,
        topk_TK: Tensor,
        *,
        round_scale: bool,
        may_wait: bool,
        stats_L: Tensor | None = None,
        waited_R: Tensor | None = None,
    ) -> tuple[DispatchSlot, Posted]:
        """Send this rank's rows.

        Args:
            x_TH: [T <= M, H] of the shape's dtype, contiguous.
            topk_TK: int64 [T, K] in [-1, R*L), contiguous.
            round_scale: see `fp8`.
            may_wait: the result is asked for later: what x_TH holds by then does not matter.
            stats_L: int32, to add the received counts to.
            waited_R: int64, to add the nanoseconds to that were waited.

        Returns:
            Where the results will be, and what writes them.
        """
        ...

    def post_combine(
        self,
        slot: DispatchSlot,
        y_LNH: Tensor,
        topk_TK: Tensor,
        weights_TK: Tensor,
        *,
        may_wait: bool,
        out_TH: Tensor | None = None,
        waited_R: Tensor | None = None,
    ) -> tuple[Tensor, Posted]:
        """Send this rank's answers.

        Args:
            slot: of the dispatch that is answered.
            y_LNH: floating [L, N, H], contiguous; rows beyond the counts are not read.
            topk_TK: int64 [T, K], what was dispatched, or -1 to leave an answer out; contiguous.
            weights_TK: float32 [T, K], contiguous.
            may_wait: as in `post_dispatch`, for y_LNH.
            out_TH: [T, H] in the dtype of y_LNH, contiguous.

        Returns:
            Where the sums will be, and what writes them.
        """
        ...

    def barrier(self) -> None:
        """Meet every rank that is not masked; where lost ranks are masked, mask those that do not come."""
        ...

    def set_mask(self, rank: int, is_masked: bool) -> None:
        """Do without a rank, or with it again. Local, but for settling."""
        ...

    def write_mask(self, status_R: Tensor) -> None:
        """Write 1 for every masked rank to int32 [R], 0 for others. Local."""
        ...

    def close(self) -> None:
        """Release what it has opened itself. Local; may be called twice."""
        ...
