"""One rank's dispatch on a device: pairs are sorted and answers summed where they lie, and the host looks at nothing.

After the first call of a size nothing is allocated but what `combine` returns without `out=`, so that a CUDA graph can
replay a step. The price is that nobody looks at slots: one out of range is no choice, not an error.
Rows stay where they are: x_NH is x (rounded in new memory if rows travel in FP8), also where some tokens have no choice (the CPU's `Dispatcher` leaves these out).
Pairs have the same order as there, so a pair's row and its answer are the same.

Legend: T tokens, K choices, H hidden, P pairs, S slots.
"""

import torch
from torch import Tensor

from dispatch import fp8
from dispatch.arguments import combine_problem, dispatch_problem, dtype_problem
from dispatch.dispatched import Dispatched, Handle, Waits
from dispatch.gpu.combine import combine_pairs
from dispatch.gpu.memory import STORED
from dispatch.gpu.permute import PairOrders
from dispatch.meanwhile import Meanwhile, nothing
from dispatch.mode import NORMAL, Mode
from dispatch.row_formats import describe_rows


class LocalDispatcher:
    """See `TokenDispatcher`.

    Args:
        device: of all tensors.
        slots: S.
        rows: how rows would travel, a name of `row_formats`: in FP8 this rank's are rounded likewise, so that answers
            do not depend on the number of ranks.
    """

    world_size = 1
    name = "local"
    reason = "there is one rank"
    waits = Waits(0, 0)
    is_replayable = True

    def __init__(self, *, device: torch.device, slots: int, rows: str = "auto") -> None:
        self.device = device
        self.row_format, self._is_fp8 = describe_rows(rows), rows == "fp8"
        self._orders = PairOrders(slots, device)
        self._call = 0

    def sent_to_ranks(self) -> tuple[list[int], list[int]]:
        """See `TokenDispatcher`."""
        return [0], [0]

    def dispatch(
        self, x_TH: Tensor, slots_TK: Tensor, mode: Mode = NORMAL, *, meanwhile: Meanwhile = nothing
    ) -> Dispatched:
        """Sort the pairs. See `Dispatcher`, and the module for what differs.

        Returns:
            x itself, and row_P [T*K], of which what is behind `slot_offsets[S]` is 0 and no pair.

        Raises:
            ValueError: a bad argument.
        """
        problem = dispatch_problem(x_TH, slots_TK, mode, self.device) or dtype_problem("x_TH", x_TH, STORED)
        if problem:
            raise ValueError(problem)
        self._call += 1
        (T, H), K = x_TH.shape, slots_TK.shape[1]
        self._order = self._orders.order(slots_TK.contiguous())
        handle = Handle(self._call, T, K, H, x_TH.dtype, T * K)
        if self._is_fp8:
            x_TH = fp8.dequantise_fp8(*fp8.quantise_fp8(x_TH), x_TH.dtype)
        meanwhile()
        return Dispatched(x_TH.contiguous(), self._order.row_P, self._order.slot_offsets, handle)

    def combine(
        self,
        y_PH: Tensor,
        weights_TK: Tensor,
        dispatched: Dispatched,
        *,
        out: Tensor | None = None,
        meanwhile: Meanwhile = nothing,
    ) -> Tensor:
        """Sum the answers. See `Dispatcher`; y_PH is [T*K, H], and what is behind the last pair is not read."""
        handle = dispatched.handle
        problem = combine_problem(
            y_PH, weights_TK, out, pairs_shape=(handle.num_pairs, handle.hidden),
            tokens_shape=(handle.num_tokens, handle.num_choices), dtype=handle.dtype, device=self.device,
        )  # fmt: skip
        if handle.call != self._call:
            problem = "dispatched is not of the last dispatch; its buffers are overwritten"
        if problem:
            raise ValueError(problem)
        if out is None:
            out = y_PH.new_empty(handle.num_tokens, handle.hidden)
        meanwhile()
        pairs_TK = self._order.pair_of_choice_TK
        return combine_pairs(y_PH.contiguous(), pairs_TK, weights_TK.float().contiguous(), out)

    def check(self) -> None:
        """See `TokenDispatcher`. Nothing can go wrong."""

    def close(self) -> None:
        """See `TokenDispatcher`. There is nothing to close."""
