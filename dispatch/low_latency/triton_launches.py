"""Launches the Triton kernels that move rows and answers, for calls of any shape. What the kernels do is in
`triton_kernels` and `triton_answers`; when they run, in `triton_exchange`.

Legend as in `triton_kernels`.
"""

import torch
import triton
from torch import Tensor

from dispatch import fp8
from dispatch.low_latency import triton_answers as answers
from dispatch.low_latency import triton_kernels as kernels
from dispatch.low_latency.ring import DispatchSlot
from dispatch.low_latency.shape import LowLatencyShape
from dispatch.low_latency.symmetric import CombineContents, DispatchContents, SymmetricLayout, SymmetricMemory

_TILE_GROUPS = 8  # blocks of 128 channels that a program handles at once: 1,024 elements
_WARPS = 8
_ENTRY_TILE = 32  # tokens whose choices a program looks at at once
_STORED = {torch.bfloat16: torch.int16, torch.float16: torch.float16, torch.float32: torch.float32}
DTYPES = tuple(_STORED)  # and how kernels see each


class TritonSlot(DispatchSlot):
    """And what brings the answers home.

    Attributes:
        place_LN: int32, source * M + token of each row. choice_LN: int32, which of its token's choices it is for.
    """

    def __init__(self, shape: LowLatencyShape, device: torch.device) -> None:
        super().__init__(shape, device)
        self.place_LN = torch.zeros_like(self.source_token_LN)
        self.choice_LN = torch.zeros_like(self.source_token_LN)


class Launches:
    """Over one memory. Nothing here waits.

    Args:
        mask, arrived: int32 [R], and calls: int64 [1], see `triton_flags`.
        lanes: programs per expert that copy rows.
    """

    def __init__(
        self,
        memory: SymmetricMemory,
        layout: SymmetricLayout,
        *,
        mask: Tensor,
        arrived: Tensor,
        calls: Tensor,
        lanes: int,
    ) -> None:
        self._memory, self._lanes = memory, lanes
        self._half_bytes, self._at = layout.half_bytes, layout.contents_at
        self._mask, self._arrived, self._calls = mask, arrived, calls

    def send_rows(self, slot: TritonSlot, x_TH: Tensor, topk_TK: Tensor, *, round_scale: bool) -> None:
        """Write this rank's rows to its peers."""
        shape, contents = slot.shape, DispatchContents(shape=slot.shape)
        at = self._at
        kernels.send_rows[(shape.max_tokens,)](
            x_TH.view(_STORED[shape.dtype]), topk_TK, slot.sent_TK, self._memory.peers, self._mask, self._calls,
            x_TH.shape[0], self._memory.rank, self._half_bytes, at, at + contents.rows_at, at + contents.staging_at,
            R=shape.world_size, L=shape.experts_per_rank, M=shape.max_tokens, K=shape.choices, K_PAD=_k_pad(shape),
            H=shape.hidden, ROW_BYTES=contents.row_bytes, SCALES_AT=shape.scales_at, GROUPS=_groups(shape),
            IS_FP8=shape.is_fp8, ROUND_SCALE=round_scale, IS_BFLOAT16=shape.dtype == torch.bfloat16,
            **self._memory.reach, num_warps=_WARPS, enable_fp_fusion=False,
        )  # fmt: skip

    def deliver_rows(self, slot: TritonSlot, stats_L: Tensor | None) -> None:
        """Write what has arrived to the slot."""
        shape, contents = slot.shape, DispatchContents(shape=slot.shape)
        base, half = self._memory.base + self._at, (self._calls, self._half_bytes)
        kernels.place_rows[(shape.experts_per_rank,)](
            base, self._arrived, *half, slot.count_L, slot.layout_range_LR, slot.source_token_LN, slot.place_LN,
            slot.choice_LN, stats_L, R=shape.world_size, L=shape.experts_per_rank, M=shape.max_tokens,
            K=shape.choices, K_PAD=_k_pad(shape), TILE=min(_ENTRY_TILE, triton.next_power_of_2(shape.max_tokens)),
            HAS_STATS=stats_L is not None,
        )  # fmt: skip
        scales = slot.scales
        if scales is not None:
            scales = scales.transpose(1, 2).view(torch.uint8 if shape.is_ue8m0 else torch.int32)
        kernels.deliver_rows[(shape.experts_per_rank, self._lanes)](
            base + contents.rows_at, slot.count_L, slot.place_LN, *half,
            slot.x_LNH.view(torch.uint8 if shape.is_fp8 else _STORED[shape.dtype]), scales,
            N=shape.rows_per_expert, H=shape.hidden, ROW_BYTES=contents.row_bytes, SCALES_AT=shape.scales_at,
            SCALES=shape.num_scales, SCALES_PAD=triton.next_power_of_2(4 * fp8.num_words(shape.hidden)),
            TILE=_tile(shape), IS_FP8=shape.is_fp8, IS_UE8M0=shape.is_ue8m0, num_warps=_WARPS,
        )  # fmt: skip

    def send_answers(self, slot: TritonSlot, y_LNH: Tensor) -> None:
        """Write this rank's answers to its peers."""
        shape, contents = slot.shape, CombineContents(shape=slot.shape, dtype=y_LNH.dtype)
        answers.send_answers[(shape.experts_per_rank, self._lanes)](
            y_LNH.view(_STORED[y_LNH.dtype]), slot.count_L, slot.place_LN, slot.choice_LN, self._memory.peers,
            self._mask, self._calls, self._memory.rank, self._half_bytes, self._at, self._at + contents.staging_at,
            M=shape.max_tokens, N=shape.rows_per_expert, K=shape.choices, H=shape.hidden, ANSWER_BYTES=contents.answer_bytes,
            TILE=_tile(shape), **self._memory.reach, num_warps=_WARPS,
        )  # fmt: skip

    def sum_answers(self, slot: TritonSlot, topk_TK: Tensor, weights_TK: Tensor, out_TH: Tensor) -> None:
        """Write the sums of what has arrived to out_TH."""
        shape, T = slot.shape, out_TH.shape[0]
        if T == 0:
            return
        answers.sum_answers[(T, triton.cdiv(shape.hidden, _tile(shape)))](
            self._memory.base + self._at, self._arrived, self._calls, self._half_bytes, topk_TK, slot.sent_TK, weights_TK,
            out_TH.view(_STORED[out_TH.dtype]), R=shape.world_size, L=shape.experts_per_rank, K=shape.choices,
            K_PAD=_k_pad(shape), H=shape.hidden,
            ANSWER_BYTES=CombineContents(shape=shape, dtype=out_TH.dtype).answer_bytes, TILE=_tile(shape),
            IS_BFLOAT16=out_TH.dtype == torch.bfloat16, num_warps=_WARPS, enable_fp_fusion=False,
        )  # fmt: skip


def _k_pad(shape: LowLatencyShape) -> int:
    return int(triton.next_power_of_2(shape.choices))


def _groups(shape: LowLatencyShape) -> int:
    return min(_TILE_GROUPS, int(triton.next_power_of_2(fp8.num_blocks(shape.hidden))))


def _tile(shape: LowLatencyShape) -> int:
    return _groups(shape) * fp8.BLOCK
