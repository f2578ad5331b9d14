"""Launches the Triton kernels: low-latency dispatch and combine through symmetric memory, for one shape.

Nothing is allocated after construction but what the caller passes, and nothing is looked at from the host, so the
launches can be captured in a CUDA graph. Posting and finishing are apart, as in `CpuExchange`; posting the next call
finishes the one before, which is what makes two phases enough.

Without `mask_lost` a peer that is late is only noted: `late_ranks` reads that, and is the only method that
synchronises with the device. There is no refusal here: the host has no part in the exchange, so that arguments that one
rank gets wrong are this rank's error alone, before it launches anything; its peers time out.

Legend as in `triton_kernels`.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
import triton
from torch import Tensor

from dispatch import fp8
from dispatch.low_latency import triton_kernels as kernels
from dispatch.low_latency.shape import LowLatencyShape
from dispatch.low_latency.symmetric import SymmetricLayout, SymmetricMemory

_TILE_GROUPS = 8  # blocks of 128 channels that a program handles at once: 1,024 elements
_WARPS = 8
_ENTRY_TILE = 32  # tokens whose choices a program looks at at once
_STORED = {torch.bfloat16: torch.int16, torch.float32: torch.float32}  # how kernels see each dtype


class Received(NamedTuple):
    """One dispatch's results; overwritten by the dispatch after the next."""

    x_LNH: Tensor
    scales: Tensor | None  # column-major
    count_L: Tensor
    source_token_LN: Tensor
    layout_range_LR: Tensor
    place_LN: Tensor  # int32, source * M + token
    choice_LN: Tensor  # int32, which of its token's choices
    sent_MK: Tensor  # int32, this rank's own choices


class TritonExchange:
    """One rank's end for one shape. Calls are collective, in the same order on all ranks.

    Args:
        memory: of `SymmetricLayout(shape=shape).total_bytes`, zeroed, not owned.
        max_polls: looks at a flag before its rank counts as late; about a microsecond each on a GPU.
        mask_lost: mask ranks that are late.
        lanes: programs per expert that copy rows.
    """

    def __init__(
        self,
        shape: LowLatencyShape,
        memory: SymmetricMemory,
        *,
        round_scale: bool = False,
        max_polls: int = 10_000_000,
        mask_lost: bool = False,
        lanes: int = 16,
    ) -> None:
        if shape.dtype not in _STORED:
            raise ValueError(f"dtype is {shape.dtype}; the kernels take {', '.join(map(str, _STORED))}")
        self.shape, self.memory = shape, memory
        self.layout = SymmetricLayout(shape=shape)
        self._round_scale, self._max_polls, self._mask_lost, self._lanes = (
            round_scale,
            max_polls,
            mask_lost,
            lanes,
        )
        device, R = memory.device, shape.world_size
        self.mask = torch.zeros(R, dtype=torch.int32, device=device)
        self.arrived, self.polls = (
            torch.zeros_like(self.mask),
            torch.zeros(R, dtype=torch.int64, device=device),
        )
        self._results = [_allocate(shape, device) for _ in range(2)]
        self._stored = _STORED[shape.dtype]
        self._number, self._num_dispatches = 0, 0
        self._travelling: Callable[[], None] | None = None

    def post_dispatch(self, x_TH: Tensor, topk_TK: Tensor, stats_L: Tensor | None = None) -> Received:
        """Send this rank's rows; `finish` receives.

        Args:
            x_TH: [T <= M, H] in the shape's dtype, contiguous.
            topk_TK: int64 [T, K] in [-1, R*L), contiguous; not checked, as that would synchronise.
            stats_L: int32, to add the received counts to.

        Raises:
            ValueError: of another dtype or shape.
        """
        self._check(x_TH, topk_TK)
        self.finish()
        self._number += 1
        number, shape, layout = self._number, self.shape, self.layout
        received = self._results[self._num_dispatches % 2]
        self._num_dispatches += 1
        kernels.send_rows[(shape.max_tokens,)](
            x_TH.view(self._stored), topk_TK, received.sent_MK, self.memory.peers, self.mask, x_TH.shape[0],
            self.memory.rank, layout.entries_at(number), layout.rows_at(number), layout.staging_at(number),
            **self._sizes(), ROW_BYTES=layout.row_bytes, SCALES_AT=shape.scales_at, GROUPS=self._groups(),
            IS_FP8=shape.is_fp8, ROUND_SCALE=self._round_scale, IS_BFLOAT16=shape.dtype == torch.bfloat16,
            HAS_REMOTE=False, num_warps=_WARPS, enable_fp_fusion=False,
        )  # fmt: skip
        self._post(number)
        self._travelling = lambda: self._receive(number, received, stats_L)
        return received

    def post_combine(
        self, received: Received, y_LNH: Tensor, topk_TK: Tensor, weights_TK: Tensor, out_TH: Tensor
    ) -> Tensor:
        """Send this rank's answers; `finish` receives and sums into out_TH [T, H], in the shape's dtype."""
        shape, layout = self.shape, self.layout
        wanted = (shape.experts_per_rank, shape.rows_per_expert, shape.hidden)
        if tuple(y_LNH.shape) != wanted or y_LNH.dtype != shape.dtype or not y_LNH.is_contiguous():
            raise ValueError(
                f"y_LNH is {y_LNH.dtype} {list(y_LNH.shape)}; it must be {shape.dtype} {list(wanted)}"
            )
        self._check(out_TH, topk_TK)
        self.finish()
        self._number += 1
        number = self._number
        kernels.send_answers[(shape.experts_per_rank, self._lanes)](
            y_LNH.view(self._stored), received.count_L, received.place_LN, received.choice_LN, self.memory.peers,
            self.mask, self.memory.rank, layout.answers_at(number), layout.staging_at(number),
            M=shape.max_tokens, N=shape.rows_per_expert, K=shape.choices, H=shape.hidden,
            ANSWER_BYTES=layout.answer_bytes, TILE=self._tile(), HAS_REMOTE=False, num_warps=_WARPS,
        )  # fmt: skip
        self._post(number)
        self._travelling = lambda: self._sum(number, received, topk_TK, weights_TK, out_TH)
        return out_TH

    def finish(self) -> None:
        """Receive what was posted last, if that has not been done."""
        travelling, self._travelling = self._travelling, None
        if travelling is not None:
            travelling()

    def late_ranks(self) -> list[int]:
        """Return the ranks whose last message did not come, masked ones too. Synchronises."""
        return [rank for rank, has_come in enumerate(self.arrived.tolist()) if not has_come]

    def _post(self, number: int) -> None:
        kernels.post_flags[(self.shape.world_size,)](
            self.memory.peers, self.mask, self.memory.rank, self.layout.flags_at(number), number, HAS_REMOTE=False,
            num_warps=1,
        )  # fmt: skip

    def _wait(self, number: int) -> None:
        kernels.wait_flags[(self.shape.world_size,)](
            self.memory.peers, self.mask, self.arrived, self.polls, self.memory.rank, self.layout.flags_at(number),
            number, self._max_polls, IS_MASKING=self._mask_lost, num_warps=1,
        )  # fmt: skip

    def _receive(self, number: int, received: Received, stats_L: Tensor | None) -> None:
        self._wait(number)
        shape, layout, base = self.shape, self.layout, self.memory.base
        sizes = self._sizes()
        kernels.place_rows[(shape.experts_per_rank,)](
            base + layout.entries_at(number), self.arrived, received.count_L, received.layout_range_LR,
            received.source_token_LN, received.place_LN, received.choice_LN, stats_L,
            R=sizes["R"], L=sizes["L"], M=sizes["M"], K=sizes["K"], K_PAD=sizes["K_PAD"],
            TILE=min(_ENTRY_TILE, triton.next_power_of_2(shape.max_tokens)), HAS_STATS=stats_L is not None,
        )  # fmt: skip
        scales = received.scales
        if scales is not None:
            scales = scales.transpose(1, 2).view(torch.uint8 if shape.is_ue8m0 else torch.int32)
        x_out = received.x_LNH.view(torch.uint8 if shape.is_fp8 else self._stored)
        kernels.deliver_rows[(shape.experts_per_rank, self._lanes)](
            base + layout.rows_at(number), received.count_L, received.place_LN, x_out, scales,
            N=shape.rows_per_expert, H=shape.hidden, ROW_BYTES=layout.row_bytes, SCALES_AT=shape.scales_at,
            SCALES=shape.num_scales, SCALES_PAD=triton.next_power_of_2(4 * fp8.num_words(shape.hidden)),
            TILE=self._tile(), IS_FP8=shape.is_fp8, IS_UE8M0=shape.is_ue8m0, num_warps=_WARPS,
        )  # fmt: skip

    def _sum(
        self, number: int, received: Received, topk_TK: Tensor, weights_TK: Tensor, out_TH: Tensor
    ) -> None:
        self._wait(number)
        shape, layout, T = self.shape, self.layout, out_TH.shape[0]
        if T == 0:
            return
        kernels.sum_answers[(T, triton.cdiv(shape.hidden, self._tile()))](
            self.memory.base + layout.answers_at(number), self.arrived, topk_TK, received.sent_MK, weights_TK,
            out_TH.view(self._stored), L=shape.experts_per_rank, K=shape.choices,
            K_PAD=triton.next_power_of_2(shape.choices), H=shape.hidden, ANSWER_BYTES=layout.answer_bytes,
            TILE=self._tile(), IS_BFLOAT16=shape.dtype == torch.bfloat16, num_warps=_WARPS, enable_fp_fusion=False,
        )  # fmt: skip

    def _sizes(self) -> dict[str, int]:
        shape = self.shape
        return {
            "R": shape.world_size,
            "L": shape.experts_per_rank,
            "M": shape.max_tokens,
            "K": shape.choices,
            "K_PAD": triton.next_power_of_2(shape.choices),
            "H": shape.hidden,
        }

    def _groups(self) -> int:
        groups: int = triton.next_power_of_2(fp8.num_blocks(self.shape.hidden))
        return min(_TILE_GROUPS, groups)

    def _tile(self) -> int:
        return self._groups() * fp8.BLOCK

    def _check(self, rows_TH: Tensor, topk_TK: Tensor) -> None:
        shape, T = self.shape, rows_TH.shape[0]
        is_right = rows_TH.dtype == shape.dtype and shape.max_tokens >= T and rows_TH.is_contiguous()
        if not is_right or rows_TH.dim() != 2 or rows_TH.shape[1] != shape.hidden:
            raise ValueError(
                f"rows are {rows_TH.dtype} {list(rows_TH.shape)}; they must be {shape.dtype} "
                f"[T <= {shape.max_tokens}, {shape.hidden}] and contiguous"
            )
        if (
            topk_TK.dtype != torch.int64
            or topk_TK.shape != torch.Size([T, shape.choices])
            or not topk_TK.is_contiguous()
        ):
            raise ValueError(
                f"topk_TK is {topk_TK.dtype} {list(topk_TK.shape)}; it must be int64 {[T, shape.choices]}, contiguous"
            )


def _allocate(shape: LowLatencyShape, device: torch.device) -> Received:
    L, N = shape.experts_per_rank, shape.rows_per_expert
    scales = None
    if shape.is_fp8:
        width = fp8.num_words(shape.hidden) if shape.is_ue8m0 else shape.num_scales
        kind = torch.int32 if shape.is_ue8m0 else torch.float32
        scales = torch.zeros(L, width, N, dtype=kind, device=device).transpose(1, 2)
    rows = torch.int32

    def table(*sizes: int, dtype: torch.dtype = rows) -> Tensor:
        return torch.zeros(*sizes, dtype=dtype, device=device)

    return Received(
        table(L, N, shape.hidden, dtype=torch.float8_e4m3fn if shape.is_fp8 else shape.dtype),
        scales,
        table(L),
        table(L, N),
        table(L, shape.world_size, dtype=torch.int64),
        table(L, N),
        table(L, N),
        table(shape.max_tokens, shape.choices),
    )
