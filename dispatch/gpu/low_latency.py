"""Low-latency mode between device tensors: for steps of decodes only, of which a CUDA graph may be made.

Legend: T tokens, K choices, H hidden, R ranks, S slots per rank.
"""

from torch import Tensor

from dispatch.gpu.packed import Packed
from dispatch.gpu.packed_exchange import PackedExchange
from dispatch.low_latency.shape import LowLatencyShape
from dispatch.meanwhile import Meanwhile, nothing


class LowLatencyWay:
    """See `Way`.

    Args:
        exchange: taken over; `close` closes it.
        slots_per_rank: S.
        is_fp8: whether rows travel in FP8.
    """

    is_replayable = True

    def __init__(self, exchange: PackedExchange, *, slots_per_rank: int, is_fp8: bool) -> None:
        self._exchange, self._slots_per_rank, self._is_fp8 = exchange, slots_per_rank, is_fp8

    @property
    def waited_ns(self) -> tuple[int, int]:
        """See `Way`. The longest that any one rank was waited for, which is at most what all took together."""
        return int(self._exchange.dispatch_ns.max()), int(self._exchange.combine_ns.max())

    @property
    def sent_bytes(self) -> tuple[list[int], list[int]]:
        """See `Way`."""
        return self._exchange.sent_bytes.tolist(), self._exchange.answer_bytes.tolist()

    def dispatch(
        self, x_TH: Tensor, slots_TK: Tensor, capacity: int, meanwhile: Meanwhile = nothing
    ) -> Packed:
        """See `Way`."""
        shape = LowLatencyShape(
            world_size=self._exchange.world_size,
            experts_per_rank=self._slots_per_rank,
            max_tokens=capacity,
            hidden=x_TH.shape[1],
            choices=slots_TK.shape[1],
            dtype=x_TH.dtype,
            is_fp8=self._is_fp8,
        )
        self._slot = self._exchange.dispatch(shape, x_TH, slots_TK, meanwhile)
        return Packed(self._slot.x_NH, self._slot.row_P, self._slot.slot_offsets, self._slot.num_pairs)

    def combine(
        self, y_PH: Tensor, weights_TK: Tensor, out_TH: Tensor, meanwhile: Meanwhile = nothing
    ) -> None:
        """See `Way`."""
        self._exchange.combine(self._slot, y_PH, weights_TK, out_TH, meanwhile)

    def refuse(self, problem: str) -> None:
        """See `Way`."""
        self._exchange.refuse(problem)

    def check(self) -> None:
        """See `Way`."""
        self._exchange.check("step")

    def close(self) -> None:
        """See `Way`."""
        self._exchange.close()
