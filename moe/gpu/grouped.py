"""Grouped GEMM over experts on GPUs: rows sorted by slot, each times its slot's weight, the gate applied in registers.

A program finds its tiles from the offsets on the device, so that a CUDA graph can replay the launch: there are as many
programs as tiles are expected, and where rows are uneven each takes several in turn. Products are added over the inner
dimension in one fixed order; a row's bits depend on the tile's shape (`moe.gpu.tiles`), which is chosen by the rows that
are expected at a step's capacity, never by contents.
Quantised weights stay so in memory (`moe.gpu.formats`); rows are never quantised, which would change answers.
Where a slot's weight is in memory says a table, so an expert that has moved is switched to by writing one number.

What bounds it. Decode: the bytes of the weights that any row chose, read once. Prefill: 2 * P * N * K operations; tiles of
rows in groups share a tile of columns while the L2 cache holds it.

Legend: P pairs (rows sorted by slot), N out features, K in features, S slots, W weights in memory (at least S).
"""

import torch
import triton
from torch import Tensor

from moe.gpu.formats import FP8, MICRO_BLOCK, MXFP4, PLAIN, SCALE_BLOCK, format_of
from moe.gpu.grouped_kernel import GATES, grouped_rows
from moe.gpu.tiles import GroupedTile, tile_of_launch

ROW_TYPES = (torch.bfloat16, torch.float16, torch.float32)


def grouped_linear(
    x_TK: Tensor,
    weights_WNK: Tensor,
    slot_offsets: Tensor,
    places_S: Tensor,
    *,
    num_pairs: int,
    expected_pairs: int | None = None,
    rows_P: Tensor | None = None,
    gate: str = "none",
    scales_WBB: Tensor | None = None,
    biases_WN: Tensor | None = None,
    tile: GroupedTile | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """Multiply each row with its slot's weight.

    Args:
        x_TK: [T, K] contiguous; bfloat16, float16 or float32.
        weights_WNK: [W, N, K] contiguous, of x's type or float8_e4m3fn, or MXFP4 as uint8 [W, N, K / 2]; with a gate
            2 * N in place of N, the gate's rows first.
        slot_offsets: int64 [S + 1]; pairs of slot s are [s] to [s + 1].
        places_S: int32 [S], which of the W weights is the slot's.
        num_pairs: room for pairs: P at most.
        expected_pairs: that there are where loads are even, which tile and grid follow; None: as many as there is room for.
        rows_P: int64 [P], the row of each pair; None: pair p is row p.
        gate: a name in GATES.
        scales_WBB: float32 [W, blocks of N (or 2 * N), blocks of K] for FP8; uint8 [W, N, K / 32] for MXFP4.
        biases_WN: [W, N], or [W, 2 * N] with a gate.
        tile: None: `tile_of_launch`, by expected pairs, S and the device.
        out: [num_pairs, N] contiguous to write into; None: a new one, of x's type. Rows without a pair are left as
            they are.

    Raises:
        ValueError: a type or shape that the kernel does not take.
    """
    S, height, K, form = places_S.numel(), weights_WNK.shape[1], x_TK.shape[1], format_of(weights_WNK)
    N = height // 2 if GATES[gate] else height
    _check_weights(x_TK, weights_WNK, scales_WBB, N, gate, form)
    if out is None:
        out = x_TK.new_empty(num_pairs, N)
    expected = num_pairs if expected_pairs is None else min(expected_pairs, num_pairs)
    tile = tile or tile_of_launch(expected, S, weights_WNK)
    num_tiles = min(S, expected) + expected // tile.rows  # at most one tile of each slot is not full
    grouped_rows[(max(num_tiles, 1) * triton.cdiv(N, tile.columns),)](
        x_TK, rows_P, weights_WNK, scales_WBB, biases_WN, places_S, slot_offsets, out, S=S,
        S_PAD=triton.next_power_of_2(S), N=N, K=K, ROWS=tile.rows, COLUMNS=tile.columns, INNER=tile.inner,
        GROUP=tile.group, GATE=GATES[gate], FORMAT=form,
        HAS_ROWS=rows_P is not None, HAS_BIAS=biases_WN is not None, num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip
    return out


def _check_weights(
    x_TK: Tensor, weights: Tensor, scales: Tensor | None, N: int, gate: str, form: int
) -> None:
    K = x_TK.shape[1]
    if x_TK.dtype not in ROW_TYPES:
        raise ValueError(f"x_TK is {x_TK.dtype}; the kernel takes bfloat16, float16 and float32")
    if form == PLAIN and weights.dtype != x_TK.dtype:
        raise ValueError(
            f"weights_WNK are {weights.dtype}; with {x_TK.dtype} rows they are that, float8_e4m3fn or uint8 (MXFP4)"
        )
    taken = weights.shape[2] * (2 if form == MXFP4 else 1)
    if taken != K:
        raise ValueError(f"x_TK has {K} columns; the weights take {taken}")
    if (scales is not None) != (form != PLAIN):
        raise ValueError("scales_WBB come with float8_e4m3fn and MXFP4 weights, and only with them")
    if form == MXFP4 and K % MICRO_BLOCK:
        raise ValueError(f"x_TK has {K} columns; MXFP4 weights take a multiple of {MICRO_BLOCK}")
    if form == FP8 and gate != "none" and N % SCALE_BLOCK:
        raise ValueError(
            f"N is {N}; gated FP8 weights need a multiple of {SCALE_BLOCK}, as scales are shared otherwise"
        )
