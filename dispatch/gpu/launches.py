"""Launches the Triton kernels that move rows and answers, for calls of any shape. What the kernels do is in
`kernels` and `answers`; when they run, in `exchange`.

Legend as in `kernels`.
"""

from typing import NamedTuple

import torch
import triton
from torch import Tensor

from dispatch import fp8
from dispatch.gpu import answers, kernels
from dispatch.gpu.calls import TritonCalls
from dispatch.gpu.memory import STORED, as_stored
from dispatch.gpu.symmetric import CombineContents, DispatchContents
from dispatch.low_latency.ring import DispatchSlot
from dispatch.low_latency.shape import LowLatencyShape

_TILE_GROUPS = 8  # blocks of 128 channels that a program handles at once: 1,024 elements
WARPS = 8
_ENTRY_TILE = 32  # tokens whose choices a program looks at at once


class Tables(NamedTuple):
    """What kernels note of a dispatch, to place its rows and to bring the answers home."""

    sent_TK: Tensor  # int64 [M, K]: the choices of this rank's tokens
    count_L: Tensor  # int32: rows of each expert
    layout_range_LR: Tensor  # int64: (begin << 32) | count
    source_token_LN: Tensor  # int32
    place_LN: Tensor  # int32: source * M + token of each row
    choice_LN: Tensor  # int32: which of its token's choices it is for


class TritonSlot(DispatchSlot):
    """And what brings the answers home."""

    def __init__(self, shape: LowLatencyShape, device: torch.device) -> None:
        super().__init__(shape, device)
        own = (torch.zeros_like(self.source_token_LN), torch.zeros_like(self.source_token_LN))
        self.tables = Tables(self.sent_TK, self.count_L, self.layout_range_LR, self.source_token_LN, *own)


class Launches:
    """Over one rank's end. Nothing here waits.

    Args:
        calls: whose memory is written to.
        lanes: programs per expert that copy rows.
    """

    def __init__(self, calls: TritonCalls, *, lanes: int) -> None:
        self._calls, self._lanes = calls, lanes

    @property
    def contents(self) -> int:
        """Address of a call's contents in this rank's memory, in the first half."""
        return self._calls.memory.base + self._calls.layout.contents_at

    @property
    def half(self) -> tuple[Tensor, int]:
        """From which kernels learn the half of a call: its number, and the bytes of a half."""
        return self._calls.calls, self._calls.layout.half_bytes

    def send_rows(
        self, shape: LowLatencyShape, tables: Tables, x_TH: Tensor, topk_TK: Tensor, *, round_scale: bool
    ) -> None:
        """Write this rank's rows to its peers."""
        contents, calls = DispatchContents(shape=shape), self._calls
        at, half_bytes = calls.layout.contents_at, calls.layout.half_bytes
        kernels.send_rows[(shape.max_tokens,)](
            as_stored(x_TH), topk_TK, tables.sent_TK, calls.memory.peers, calls.mask, calls.calls, x_TH.shape[0],
            calls.rank, half_bytes, at, at + contents.rows_at, at + contents.staging_at,
            R=shape.world_size, L=shape.experts_per_rank, M=shape.max_tokens, K=shape.choices, K_PAD=padded_choices(shape),
            H=shape.hidden, ROW_BYTES=contents.row_bytes, SCALES_AT=shape.scales_at, GROUPS=groups_of(shape),
            IS_FP8=shape.is_fp8, ROUND_SCALE=round_scale, IS_BFLOAT16=shape.dtype == torch.bfloat16,
            **calls.memory.reach, num_warps=WARPS, enable_fp_fusion=False,
        )  # fmt: skip

    def place_rows(self, shape: LowLatencyShape, tables: Tables, stats_L: Tensor | None) -> None:
        """Order what has arrived."""
        kernels.place_rows[(shape.experts_per_rank,)](
            self.contents, self._calls.arrived, *self.half, *tables[1:], stats_L, R=shape.world_size,
            L=shape.experts_per_rank, M=shape.max_tokens, K=shape.choices, K_PAD=padded_choices(shape),
            TILE=min(_ENTRY_TILE, triton.next_power_of_2(shape.max_tokens)), HAS_STATS=stats_L is not None,
        )  # fmt: skip

    def deliver_rows(self, slot: TritonSlot, stats_L: Tensor | None) -> None:
        """Write what has arrived to the slot."""
        shape, tables, contents = slot.shape, slot.tables, DispatchContents(shape=slot.shape)
        self.place_rows(shape, tables, stats_L)
        scales = slot.scales
        if scales is not None:
            scales = scales.transpose(1, 2).view(torch.uint8 if shape.is_ue8m0 else torch.int32)
        kernels.deliver_rows[(shape.experts_per_rank, self._lanes)](
            self.contents + contents.rows_at, tables.count_L, tables.place_LN, *self.half,
            slot.x_LNH.view(torch.uint8 if shape.is_fp8 else STORED[shape.dtype]), scales,
            N=shape.rows_per_expert, H=shape.hidden, ROW_BYTES=contents.row_bytes, SCALES_AT=shape.scales_at,
            SCALES=shape.num_scales, SCALES_PAD=triton.next_power_of_2(4 * fp8.num_words(shape.hidden)),
            TILE=tile_of(shape), IS_FP8=shape.is_fp8, IS_UE8M0=shape.is_ue8m0, num_warps=WARPS,
        )  # fmt: skip

    def send_answers(
        self, shape: LowLatencyShape, tables: Tables, y: Tensor, starts_L: Tensor | None = None
    ) -> None:
        """Write this rank's answers to its peers.

        Args:
            y: [L, N, H], or with `starts_L` [P, H], in which each expert's answers begin there.
        """
        calls, at = self._calls, self._calls.layout.contents_at
        contents = CombineContents(shape=shape, dtype=y.dtype)
        answers.send_answers[(shape.experts_per_rank, self._lanes)](
            as_stored(y), starts_L, tables.count_L, tables.place_LN, tables.choice_LN, calls.memory.peers, calls.mask,
            calls.calls, calls.rank, calls.layout.half_bytes, at, at + contents.staging_at, M=shape.max_tokens,
            N=shape.rows_per_expert, K=shape.choices, H=shape.hidden, ANSWER_BYTES=contents.answer_bytes,
            TILE=tile_of(shape), IS_PACKED=starts_L is not None, **calls.memory.reach, num_warps=WARPS,
        )  # fmt: skip

    def sum_answers(
        self, shape: LowLatencyShape, tables: Tables, topk_TK: Tensor, weights_TK: Tensor, out_TH: Tensor
    ) -> None:
        """Write the sums of what has arrived to out_TH."""
        T = out_TH.shape[0]
        if T == 0:
            return
        answers.sum_answers[(T, triton.cdiv(shape.hidden, tile_of(shape)))](
            self.contents, self._calls.arrived, *self.half, topk_TK, tables.sent_TK, weights_TK, as_stored(out_TH),
            R=shape.world_size, L=shape.experts_per_rank, K=shape.choices, K_PAD=padded_choices(shape), H=shape.hidden,
            ANSWER_BYTES=CombineContents(shape=shape, dtype=out_TH.dtype).answer_bytes, TILE=tile_of(shape),
            IS_BFLOAT16=out_TH.dtype == torch.bfloat16, num_warps=WARPS, enable_fp_fusion=False,
        )  # fmt: skip


def tile_of(shape: LowLatencyShape) -> int:
    """Return the channels that a program handles at once."""
    return groups_of(shape) * fp8.BLOCK


def padded_choices(shape: LowLatencyShape) -> int:
    """Return a power of two that K fits in."""
    return int(triton.next_power_of_2(shape.choices))


def groups_of(shape: LowLatencyShape) -> int:
    """Return the blocks of 128 channels that a program handles at once."""
    return min(_TILE_GROUPS, int(triton.next_power_of_2(fp8.num_blocks(shape.hidden))))
