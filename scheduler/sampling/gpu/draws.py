"""Choosing a step's tokens on a GPU with the kernels of `scheduler.sampling.gpu.kernels`, all rows at once.

A step takes one to five launches for any number of rows: a scan of all rows, then the kernels that the filters of drawn rows
need. Their scratch memory is at most 90 KB per drawn row. The host reads nothing.

Legend: as `scheduler.sampling.device_sampler`.
"""

from typing import NamedTuple

import torch
import triton
from torch import Tensor

from scheduler.sampling.device_sampler import edit_logits
from scheduler.sampling.gpu.kernels import (
    draw_few,
    draw_many,
    draw_plain,
    forbid_tokens,
    scan_rows,
    weigh_rows,
)
from scheduler.sampling.gpu.keys import MOST_IDS
from scheduler.sampling.plan import SMALL_TOP_K, SamplingPlan

ROOM = 2048  # tokens that are searched at once
_FEW = 64  # tokens that are compared in pairs instead
_GROUPS = 256  # of a part of `scan_rows`; with more, fewer programs fit on a processor
_GROUP = 32  # tokens of a group; with fewer, the registers of `draw_few` spill
_LANES = 1024  # tokens of a block
_BLOCKS = 16  # of a part of `weigh_rows`
_AT_ONCE = 4
_TILE, _FEW_TILE = 4096, 2048
_HISTOGRAM = 4 * 1024  # numbers per row
_MASK_TILE = 4096
_WARPS, _FEW_WARPS, _ROW_WARPS = 8, 8, 16  # with 16, `draw_few` spills


class _Sizes(NamedTuple):
    """Sizes of scratch memory per row."""

    group: int  # tokens
    num_parts: int
    num_groups: int
    num_blocks: int

    @classmethod
    def of(cls, vocabulary: int) -> "_Sizes":
        group = _GROUP if vocabulary <= MOST_IDS // 2 else 2 * _GROUP
        num_parts = triton.cdiv(vocabulary, _GROUPS * group)
        num_blocks = triton.cdiv(vocabulary, _LANES * _BLOCKS) * _BLOCKS
        return cls(group, num_parts, num_parts * _GROUPS, num_blocks)


class KernelChoice:
    """Chooses tokens, like `scheduler.sampling.device_sampler.choose_tokens`, from logits of any float type."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._best_R = self._arrived_R = torch.empty(0, device=device)

    def __call__(self, logits_RV: Tensor, plan: SamplingPlan) -> Tensor:
        """Choose a token per row. Launches only.

        Args:
            logits_RV: Contiguous; float32 if there are edits. Rows with a mask or edits are changed in place.

        Returns:
            int64 [R].

        Raises:
            ValueError: The logits have another layout, or their vocabulary is too large.
        """
        _check(logits_RV, has_edits=plan.edited_E.numel() > 0)
        edit_logits(logits_RV, plan)
        self._forbid(logits_RV, plan)
        R, V = logits_RV.shape
        sizes = _Sizes.of(V)
        num_plain = sum(len(draw.rows) for draw in plan.draws if not draw.is_filtered)
        num_filtered = len(plan.row_D) - num_plain
        id_R = torch.empty(R, dtype=torch.int64, device=self._device)
        top_R = torch.empty(R, dtype=torch.float32, device=self._device)
        maxima_FG = torch.empty(num_filtered, sizes.num_groups, dtype=torch.float32, device=self._device)
        groups = (plan.draw_of_row_R, maxima_FG) if num_filtered else (None, None)
        self._scan(logits_RV, id_R, top_R, num_plain, *groups)
        if not plan.draws:
            return id_R
        mass_DB = torch.empty(len(plan.row_D), sizes.num_blocks, dtype=torch.int64, device=self._device)
        if num_plain or plan.has_open_rows:
            weigh_rows[(sizes.num_blocks // _BLOCKS, len(plan.row_D))](
                logits_RV, plan.row_D, plan.inverse_temperature_D, plan.least_weight_D, plan.top_k_D, top_R, mass_DB,
                num_plain, logits_RV.stride(0), V, sizes.num_blocks, MOST=SMALL_TOP_K, LANES=_LANES, BLOCKS=_BLOCKS,
                AT_ONCE=_AT_ONCE, num_warps=_WARPS, enable_fp_fusion=False,
            )  # fmt: skip
        if num_plain:
            draw_plain[(num_plain,)](
                logits_RV, plan.row_D, plan.inverse_temperature_D, plan.uniform_D, top_R, mass_DB, id_R,
                logits_RV.stride(0), V, sizes.num_blocks, LANES=_LANES,
                BLOCKS_PAD=triton.next_power_of_2(sizes.num_blocks), num_warps=_WARPS, enable_fp_fusion=False,
            )  # fmt: skip
        if num_filtered:
            self._draw_filtered(logits_RV, plan, sizes, num_plain, (top_R, mass_DB, maxima_FG, id_R))
        return id_R

    def likeliest(self, logits_RV: Tensor) -> Tensor:
        """Return the first of the largest logits of each row, or the first NaN: int64 [R]. One launch, which a graph may hold
        after a first call with as many rows.

        Raises:
            ValueError: The vocabulary is too large, or the rows are not contiguous.
        """
        _check(logits_RV, has_edits=False)
        R = len(logits_RV)
        id_R = torch.empty(R, dtype=torch.int64, device=self._device)
        self._scan(logits_RV, id_R, torch.empty(R, dtype=torch.float32, device=self._device), 0, None, None)
        return id_R

    def _scan(
        self,
        logits_RV: Tensor,
        id_R: Tensor,
        top_R: Tensor,
        num_plain: int,
        draw_of_row_R: Tensor | None,
        maxima_FG: Tensor | None,
    ) -> None:
        (R, V), sizes = logits_RV.shape, _Sizes.of(logits_RV.shape[1])
        best_R, arrived_R = self._cells(R)
        scan_rows[(sizes.num_parts, R)](
            logits_RV, draw_of_row_R, maxima_FG, best_R, arrived_R, id_R, top_R, logits_RV.stride(0), num_plain, V,
            sizes.num_groups, LANES=_GROUPS, GROUP=sizes.group, HAS_GROUPS=maxima_FG is not None, num_warps=_WARPS,
        )  # fmt: skip

    def _draw_filtered(
        self,
        logits_RV: Tensor,
        plan: SamplingPlan,
        sizes: _Sizes,
        num_plain: int,
        found: tuple[Tensor, Tensor, Tensor, Tensor],
    ) -> None:
        top_R, mass_DB, maxima_FG, id_R = found
        F, V = len(maxima_FG), logits_RV.shape[1]
        group_FC = torch.empty(F, ROOM, dtype=torch.int32, device=self._device)
        key_FC = torch.empty(F, ROOM, dtype=torch.int64, device=self._device)
        is_done_F = torch.empty(F, dtype=torch.int32, device=self._device)
        of_rows = (
            logits_RV, plan.row_D, plan.inverse_temperature_D, plan.least_weight_D, plan.top_k_D, plan.top_p_D,
            plan.uniform_D, top_R, mass_DB,
        )  # fmt: skip
        blocks_pad = triton.next_power_of_2(sizes.num_blocks)
        draw_few[(F,)](
            *of_rows, maxima_FG, group_FC, key_FC, is_done_F, id_R, num_plain, logits_RV.stride(0), V, sizes.num_blocks,
            sizes.num_groups, GROUP=sizes.group, GROUPS_PAD=triton.next_power_of_2(sizes.num_groups),
            BLOCKS_PAD=blocks_pad, MOST=SMALL_TOP_K, ROOM=ROOM, FEW=_FEW, TILE=_FEW_TILE, num_warps=_FEW_WARPS, enable_fp_fusion=False,
        )  # fmt: skip
        histogram_FH = torch.empty(F, _HISTOGRAM, dtype=torch.int64, device=self._device)
        draw_many[(F,)](
            *of_rows, key_FC, histogram_FH, is_done_F, id_R, num_plain, logits_RV.stride(0), V, sizes.num_blocks,
            BLOCKS_PAD=blocks_pad, MOST=SMALL_TOP_K, ROOM=ROOM, TILE=_TILE, num_warps=_ROW_WARPS, enable_fp_fusion=False,
        )  # fmt: skip

    def _forbid(self, logits_RV: Tensor, plan: SamplingPlan) -> None:
        """Forbid the tokens that a row's mask excludes."""
        if plan.masked_rows:
            V = logits_RV.shape[1]
            forbid_tokens[(triton.cdiv(V, _MASK_TILE), len(plan.masked_rows))](
                logits_RV, plan.masked_row_M, plan.mask_MW, logits_RV.stride(0), V, plan.mask_MW.shape[1],
                TILE=_MASK_TILE, num_warps=_WARPS,
            )  # fmt: skip

    def _cells(self, count: int) -> tuple[Tensor, Tensor]:
        """Return memory for `scan_rows`, which leaves it cleared."""
        if len(self._best_R) < count:
            self._best_R = torch.zeros(count, dtype=torch.int64, device=self._device)
            self._arrived_R = torch.zeros(count, dtype=torch.int32, device=self._device)
        return self._best_R, self._arrived_R


def _check(logits_RV: Tensor, *, has_edits: bool) -> None:
    types = (torch.float32,) if has_edits else (torch.float32, torch.bfloat16, torch.float16)
    if logits_RV.dtype not in types or not logits_RV.is_contiguous():
        wanted = " or ".join(str(each) for each in types)
        raise ValueError(
            f"logits_RV is {logits_RV.dtype} with strides {logits_RV.stride()}; it must be contiguous {wanted}"
        )
    if logits_RV.shape[1] >= MOST_IDS:
        raise ValueError(
            f"the vocabulary has {logits_RV.shape[1]} tokens; sampling on a GPU needs fewer than {MOST_IDS}"
        )
