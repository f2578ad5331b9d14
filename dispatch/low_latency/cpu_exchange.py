"""Low-latency dispatch and combine over a `Wire`: pack, send, and only when asked receive.

After the first call of a shape nothing is allocated and Python looks at no tensor's contents. Every message has a size
that both sides know beforehand with `fixed_bytes`; without it only what is filled travels, which CPU wires find out
without a round trip more.

Rejected: a message per (token, expert) as DeepEP sends; a token goes to a rank once, as in normal mode.

Legend: T tokens of this rank, K choices, H hidden, L experts per rank, N rows of an expert.
"""

import time
from functools import partial

import torch
from torch import Tensor

from dispatch import layout
from dispatch.buffers import GrowingBuffer
from dispatch.errors import RanksDisagree
from dispatch.low_latency import cpu_answers, cpu_fp8
from dispatch.low_latency import cpu_kernels as kernels
from dispatch.low_latency.exchange import OneTravels, Posted
from dispatch.low_latency.ring import DispatchSlot, Results
from dispatch.low_latency.shape import HEADER_BYTES, LowLatencyShape
from dispatch.native import compile_all
from dispatch.wires.wire import RankTable, Wire

_QUANTISE = {torch.bfloat16: cpu_fp8.quantise_bfloat16, torch.float32: cpu_fp8.quantise_float32}
_SUMS = {torch.bfloat16: cpu_answers.sum_bfloat16, torch.float32: cpu_answers.sum_float32}


class CpuSlot(DispatchSlot):
    """And what brings the answers home.

    Attributes:
        answer_TK: int32, which of its rank's answers each choice gets.
        expected, owed: answers that come from and go to each rank.
    """

    def __init__(self, shape: LowLatencyShape, device: torch.device) -> None:
        super().__init__(shape, device)
        self.answer_TK = torch.zeros(shape.max_tokens, shape.choices, dtype=torch.int32)
        self.expected, self.owed = RankTable(shape.world_size), RankTable(shape.world_size)


class CpuExchange(OneTravels):
    """See `LowLatencyExchange`.

    Args:
        wire: not owned. Opened with `mask_lost`, it masks ranks that are lost.
        fixed_bytes: send messages of their largest size, whatever is in them.
    """

    dtypes: tuple[torch.dtype, ...] | None = None

    def __init__(self, wire: Wire, *, fixed_bytes: bool = False) -> None:
        self.wire, self.device = wire, wire.device
        self.rank, self.world_size = wire.rank, wire.world_size
        self._fixed_bytes = fixed_bytes
        R = wire.world_size
        self._place = (R, wire.rank)
        self._send_bytes, self._recv_bytes = RankTable(R), RankTable(R)
        self._row_counts, self._pack_cursors = RankTable(R), RankTable(2 * R)
        self._mask = wire.mask.address
        self._send_at, self._recv_at = wire.send_addresses.address, wire.recv_addresses.address
        self._results = Results(CpuSlot, self.device)
        self._rows, self._own_answers = GrowingBuffer(torch.uint8), GrowingBuffer(torch.uint8)
        self._entries, self._scratch = GrowingBuffer(torch.int32), GrowingBuffer(torch.uint8)
        self._cursors, self._bases = GrowingBuffer(torch.int64), GrowingBuffer(torch.int64)
        compile_all(*kernels.KERNELS, *cpu_answers.KERNELS, *cpu_fp8.KERNELS)

    def refuse(self, text: str) -> None:
        """See `LowLatencyExchange`."""
        self.settle()
        self.wire.refuse(text)

    def slot_of(self, source_token_LN: Tensor) -> CpuSlot | None:
        """See `LowLatencyExchange`."""
        return self._results.slot_of(source_token_LN)

    def find_bad_choice(self, topk_TK: Tensor, num_experts: int) -> int:
        """See `LowLatencyExchange`."""
        T, K = topk_TK.shape
        return int(kernels.find_bad_expert(topk_TK.data_ptr(), T, K, num_experts))

    def find_other_choice(self, topk_TK: Tensor, slot: DispatchSlot) -> int:
        """See `LowLatencyExchange`."""
        T, K = topk_TK.shape
        return int(cpu_answers.find_other_choice(topk_TK.data_ptr(), slot.sent_TK.data_ptr(), T, K))

    def set_mask(self, rank: int, is_masked: bool) -> None:
        """See `LowLatencyExchange`."""
        self.settle()
        self.wire.mask.values[rank] = int(is_masked)

    def write_mask(self, status_R: Tensor) -> None:
        """See `LowLatencyExchange`."""
        status_R.copy_(torch.from_numpy(self.wire.mask.values))

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
    ) -> tuple[CpuSlot, Posted]:
        """See `LowLatencyExchange`."""
        self.settle()
        slot = self._results.next_slot(shape)
        (R, rank), T, K, L = self._place, x_TH.shape[0], shape.choices, shape.experts_per_rank
        slot.num_tokens = T
        counts, topk = self._row_counts.address, topk_TK.data_ptr()
        kernels.plan(
            topk, T, K, L, R, counts, slot.expected.address, self._cursors.reserve(L * R),
            slot.sent_TK.data_ptr(), slot.answer_TK.data_ptr(),
        )  # fmt: skip
        rows = self._travelling_rows(shape, x_TH, round_scale, may_wait)
        if self._fixed_bytes:
            self._fill_sizes(self._send_bytes, shape.dispatch_bytes)
        else:
            kernels.size_rows(counts, shape.row_bytes, K, R, rank, self._mask, self._send_bytes.address)
        self.wire.open_windows(self._send_bytes)
        kernels.pack(
            rows, shape.row_bytes, topk, T, K, L, R, rank, shape.max_tokens, self._mask, counts,
            self._pack_cursors.address, self._send_at, self._entries.reserve(shape.max_tokens * (1 + K)),
        )  # fmt: skip
        if self._fixed_bytes:
            self._fill_sizes(self._recv_bytes, shape.dispatch_bytes)
        self.wire.begin_exchange(self._send_bytes, self._recv_bytes if self._fixed_bytes else None)
        return slot, self._travel(partial(self._receive_rows, slot, rows, stats_L, waited_R))

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
        """See `LowLatencyExchange`."""
        assert isinstance(slot, CpuSlot), "slots come from this exchange"
        self.settle()
        shape, (R, rank) = slot.shape, self._place
        row_bytes = shape.hidden * y_LNH.element_size()
        cpu_answers.size_answers(
            slot.owed.address, slot.expected.address, row_bytes, R, rank, self._mask,
            self._send_bytes.address, self._recv_bytes.address,
        )  # fmt: skip
        if self._fixed_bytes:
            for sizes in (self._send_bytes, self._recv_bytes):
                self._fill_sizes(sizes, HEADER_BYTES + shape.answers_per_rank * row_bytes)
        self.wire.open_windows(self._send_bytes)
        own = self._own_answers.reserve(shape.answers_per_rank * row_bytes) if may_wait else 0
        cpu_answers.pack_answers(
            y_LNH.data_ptr(), row_bytes, shape.experts_per_rank, R, rank, shape.max_tokens, self._mask,
            slot.layout_range_LR.data_ptr(), self._send_at, own,
            self._bases.reserve(shape.experts_per_rank),
        )  # fmt: skip
        self.wire.begin_exchange(self._send_bytes, self._recv_bytes)
        if out_TH is None:
            out_TH = self._results.next_output(shape, y_LNH.dtype, topk_TK.shape[0])
        return out_TH, self._travel(partial(self._sum_answers, slot, topk_TK, weights_TK, out_TH, waited_R))

    def barrier(self) -> None:
        """See `LowLatencyExchange`."""
        self.settle()
        self._fill_sizes(self._send_bytes, HEADER_BYTES)
        self.wire.open_windows(self._send_bytes)
        self._fill_sizes(self._recv_bytes, HEADER_BYTES)
        self.wire.exchange(self._send_bytes, self._recv_bytes)

    def close(self) -> None:
        """See `LowLatencyExchange`. The wire stays its owner's."""

    def _travelling_rows(
        self, shape: LowLatencyShape, x_TH: Tensor, round_scale: bool, may_wait: bool
    ) -> int:
        """Return the address of this rank's rows as they travel: the caller's own where that will do."""
        if not shape.is_fp8 and not may_wait:
            return x_TH.data_ptr()
        T, rows = x_TH.shape[0], self._rows.reserve(shape.max_tokens * shape.row_bytes)
        quantise = _QUANTISE.get(shape.dtype)
        if shape.is_fp8 and quantise is None:
            quantise, x_TH = cpu_fp8.quantise_float32, x_TH.float()  # allocates: no kernel reads this dtype
        if shape.is_fp8:
            assert quantise is not None
            quantise(
                x_TH.data_ptr(), T, shape.hidden, rows, shape.row_bytes, shape.scales_at, int(round_scale),
                self._scratch.reserve(max(cpu_fp8.SCRATCH_BYTES, 8 * shape.hidden)),
            )  # fmt: skip
        else:
            self._rows.view(T * shape.row_bytes).copy_(x_TH.view(torch.uint8).view(-1))
        return rows

    def _fill_sizes(self, sizes: RankTable, num_bytes: int) -> None:
        sizes.values[:] = num_bytes
        sizes.values[self.wire.mask.values != 0] = 0
        sizes.values[self.wire.rank] = 0

    def _finish(self, row_bytes: int, K: int, L: int, M: int, doing: str, waited_R: Tensor | None) -> None:
        """Wait for the peers' messages and see that they are of this call."""
        begin = time.perf_counter_ns()
        self.wire.finish_exchange()
        R, rank = self._place
        if waited_R is not None:
            kernels.add_wait(waited_R.data_ptr(), R, rank, self._mask, time.perf_counter_ns() - begin)
        kind = kernels.DISPATCH if M else kernels.COMBINE
        stranger = kernels.find_stranger(row_bytes, K, L, R, rank, M, self._recv_at, kind)
        if stranger >= 0:
            raise RanksDisagree(
                f"rank {stranger} made another call than rank {rank}'s low-latency {doing} with rows of {row_bytes} "
                f"bytes, K={K}, {L} experts per rank, at most {M} tokens"
            )

    def _receive_rows(
        self, slot: CpuSlot, rows: int, stats_L: Tensor | None, waited_R: Tensor | None
    ) -> None:
        shape, (R, rank) = slot.shape, self._place
        K, L, M = shape.choices, shape.experts_per_rank, shape.max_tokens
        self._finish(shape.row_bytes, K, L, M, "dispatch", waited_R)
        entries, cursors = self._entries.address, self._cursors.address
        kernels.order_rows(
            K, L, R, rank, self._recv_at, entries, self._row_counts.address, cursors, slot.count_L.data_ptr(),
            slot.layout_range_LR.data_ptr(), slot.owed.address, 0 if stats_L is None else stats_L.data_ptr(),
        )  # fmt: skip
        kernels.deliver(
            rows, shape.row_bytes, shape.value_bytes, K, L, R, rank, M, self._recv_at, entries,
            self._row_counts.address, cursors, slot.x_LNH.data_ptr(), slot.source_token_LN.data_ptr(),
            shape.scales_at, shape.num_scales, int(shape.is_ue8m0), 0 if slot.scales is None else slot.scales.data_ptr(),
        )  # fmt: skip

    def _sum_answers(
        self, slot: CpuSlot, topk_TK: Tensor, weights_TK: Tensor, out_TH: Tensor, waited_R: Tensor | None
    ) -> None:
        shape, (R, rank) = slot.shape, self._place
        self._finish(shape.hidden * out_TH.element_size(), 0, 0, 0, "combine", waited_R)
        T, K, L, H = topk_TK.shape[0], shape.choices, shape.experts_per_rank, shape.hidden
        topk, answers, bases = topk_TK.data_ptr(), slot.answer_TK.data_ptr(), self._bases.address
        if out_TH.dtype in _SUMS:
            _SUMS[out_TH.dtype](
                topk, answers, weights_TK.data_ptr(), T, K, H, L, R, rank, bases, self._recv_at,
                self._scratch.reserve(max(cpu_fp8.SCRATCH_BYTES, 8 * H)), out_TH.data_ptr(),
            )  # fmt: skip
            return
        row_bytes = H * out_TH.element_size()  # types without a compiled sum: allocates
        gathered, positions = torch.empty(T * K, H, dtype=out_TH.dtype), torch.empty(T, K, dtype=torch.int64)
        cpu_answers.gather_answers(
            topk, answers, T, K, row_bytes, L, R, rank, bases, self._recv_at, positions.data_ptr(),
            gathered.data_ptr(),
        )  # fmt: skip
        out_TH.copy_(layout.sum_answers(gathered, positions, weights_TK, out_TH.dtype))
