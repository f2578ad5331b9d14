"""DeepEP's low-latency calls on the CPU: an `Exchange` for every held result, over one wire.

After the first call of a shape nothing is allocated, and Python reads no tensor's contents. Rows are copied from the
messages directly to the experts' blocks (`cpu_kernels.deliver`), and answers are read from there. Otherwise it equals
`Dispatcher`. A message contains only the rows in use, because CPU wires transmit sizes without an extra round trip.

Rejected: a message per (token, expert), as in DeepEP. Here a token goes to a rank once, as in normal mode.

Legend: T tokens of this rank, K choices, H hidden, L experts per rank, N rows of an expert.
"""

import time
from functools import partial

import torch
from torch import Tensor

from dispatch import cpu_kernels as kernels
from dispatch.exchange import Exchange
from dispatch.low_latency.calls import (
    BlockCombine,
    BlockDispatch,
    HeldDispatch,
    LowLatencyShape,
    OneTravels,
    Posted,
    Results,
)
from dispatch.row_formats import Fp8Rows, PlainRows, scales_at
from dispatch.wires.wire import RankTable, Wire

_DISPATCH, _COMBINE = 0x4C4C44, 0x4C4C43  # call numbers; wires count calls themselves


class CpuHeld(HeldDispatch):
    """Results of a dispatch, with the state to bring the answers back.

    Attributes:
        exchange: Exchange of this result only, so that its state survives other calls.
        choices: int32, the dispatch's choices without those that the combine left out.
    """

    def __init__(self, wire: Wire, shape: LowLatencyShape, device: torch.device) -> None:
        super().__init__(shape, device)
        self.format = Fp8Rows() if shape.is_fp8 else PlainRows()
        self.exchange = Exchange(wire, slots_per_rank=shape.experts_per_rank, rows=self.format)
        like_TH = torch.empty(0, shape.hidden, dtype=shape.dtype)
        kept_bytes = shape.answers_per_rank * shape.answer_bytes
        self.exchange.make_room(like_TH, shape.choices, shape.max_tokens, kept_bytes)
        self.choices = torch.empty(2 * shape.max_tokens * shape.choices, dtype=torch.int32)


class CpuExchange(OneTravels):
    """`LowLatencyExchange` over a CPU wire.

    Args:
        wire: Not owned. If it was opened with `mask_lost`, it masks lost ranks.
    """

    dtypes: tuple[torch.dtype, ...] | None = None

    def __init__(self, wire: Wire) -> None:
        self.wire, self.device = wire, wire.device
        self.rank, self.world_size = wire.rank, wire.world_size
        self._results = Results(partial(CpuHeld, wire), self.device)

    def refuse(self, text: str) -> None:
        self.settle()
        self.wire.refuse(text)

    def held_of(self, source_token_LN: Tensor) -> CpuHeld | None:
        return self._results.held_of(source_token_LN)

    def find_bad_choice(self, topk_TK: Tensor, num_experts: int) -> int:
        return int(kernels.find_bad_slot(topk_TK.data_ptr(), topk_TK.numel(), num_experts))

    def find_other_choice(self, topk_TK: Tensor, held: HeldDispatch) -> int:
        """Also store the remaining choices in `held`, for the combine that follows."""
        assert isinstance(held, CpuHeld), "it comes from this exchange"
        self.settle()  # a combine of `held` may be in transit
        return held.exchange.choose_again(topk_TK, held.sent_TK, held.choices.data_ptr())

    def set_mask(self, rank: int, is_masked: bool) -> None:
        self.settle()
        self.wire.mask.values[rank] = int(is_masked)

    def write_mask(self, status_R: Tensor) -> None:
        status_R.copy_(torch.from_numpy(self.wire.mask.values))

    def post_dispatch(self, call: BlockDispatch) -> tuple[CpuHeld, Posted]:
        self.settle()
        held, capacity = self._results.next_held(call.shape), call.shape.max_tokens
        held.num_tokens = call.x_TH.shape[0]
        if isinstance(held.format, Fp8Rows):
            held.format.round_scale = call.round_scale
        bad = held.exchange.send_rows(
            call.x_TH, call.topk_TK, call=_DISPATCH, capacity=capacity, is_unique=True, keeps=call.may_wait
        )
        assert bad < 0, "choices were checked before"
        held.sent_TK[: held.num_tokens].copy_(call.topk_TK)
        return held, self._travel(partial(self._receive_rows, held, call.stats_L, call.waited_R))

    def post_combine(self, call: BlockCombine) -> tuple[Tensor, Posted]:
        held, out_TH = call.held, call.out_TH
        assert isinstance(held, CpuHeld), "it comes from this exchange"
        self.settle()
        held.exchange.send_answers(call.y_LNH, call=_COMBINE, keeps=call.may_wait)
        if out_TH is None:
            out_TH = self._results.next_output(held.shape, call.y_LNH.dtype, call.topk_TK.shape[0])
        return out_TH, self._travel(partial(self._sum_answers, held, call.weights_TK, out_TH, call.waited_R))

    def barrier(self) -> None:
        self.settle()
        sizes = RankTable(self.world_size)
        self.wire.open_windows(sizes)
        self.wire.exchange(sizes, sizes)

    def close(self) -> None:
        """Do nothing: the owner closes the wire."""

    def _receive_rows(self, held: CpuHeld, stats_L: Tensor | None, waited_R: Tensor | None) -> None:
        shape, begun_ns = held.shape, time.perf_counter_ns()
        value_bytes = shape.hidden if shape.is_fp8 else shape.row_bytes
        scales = 0 if held.scales is None else held.scales.data_ptr()
        held.exchange.receive_blocks(
            shape.rows_per_expert, value_bytes, held.x_LNH.data_ptr(), held.source_token_LN.data_ptr(),
            held.count_L.data_ptr(), held.layout_range_LR.data_ptr(), 0 if stats_L is None else stats_L.data_ptr(),
            scales_at(shape.hidden), shape.num_scales, int(shape.is_ue8m0), scales,
        )  # fmt: skip
        self._add_wait(waited_R, time.perf_counter_ns() - begun_ns)

    def _sum_answers(
        self, held: CpuHeld, weights_TK: Tensor, out_TH: Tensor, waited_R: Tensor | None
    ) -> None:
        begun_ns = time.perf_counter_ns()
        held.exchange.receive_answers()
        self._add_wait(waited_R, time.perf_counter_ns() - begun_ns)
        held.exchange.sum_answers(weights_TK, out_TH, held.choices.data_ptr())

    def _add_wait(self, waited_R: Tensor | None, waited_ns: int) -> None:
        """Add a time to the statistics of every peer that is not masked: the wire waits for all at once."""
        if waited_R is None:
            return
        times = waited_R.numpy()
        for peer in range(self.world_size):
            if peer != self.rank and not self.wire.mask.values[peer]:
                times[peer] += waited_ns
