"""Grouped GEMM over experts on GPUs: rows sorted by slot, each times its slot's weight, with the gate in registers.

A program finds its tiles from the offsets on the device, so a CUDA graph can replay the launch. There are as many
programs as expected tiles; if rows are uneven, each takes several in turn. Products are added over the inner
dimension in one fixed order. A row's bits depend on the tile's shape (`tiles`), which is chosen by the expected
rows at a step's capacity, never by contents. On Hopper, plain weights with many rows have a second kernel, with the same bits
(`flow_kernel`).
Quantised weights stay quantised in memory (`moe.gpu.weights.formats`). Rows are never quantised, which would change answers.
A table holds the place of a slot's weight in memory, so one written number puts a moved expert into service.

Bounds. Decode: bytes of the weights that any row chose, read once. Prefill: 2 * P * N * K operations; tiles of
rows in groups share a tile of columns while it is in the L2 cache.

Legend: T rows, P pairs (rows sorted by slot), N out features, K in features, S slots, W weights in memory (at least S).
"""

import functools

import torch
import triton
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from moe.gpu.products.flow_kernel import flow_rows
from moe.gpu.products.grouped_kernel import GATES, grouped_rows
from moe.gpu.products.tiles import (
    DESCRIBED_BYTES,
    MOST_PROGRAMS,
    MOST_REGISTERS,
    FlowTile,
    GroupedTile,
    tile_of_launch,
    why_no_flow,
)
from moe.gpu.weights.formats import PLAIN, PlacedWeights, codes_per_word

ROW_TYPES = (torch.bfloat16, torch.float16, torch.float32)


def grouped_linear(
    x_TK: Tensor,
    weights: PlacedWeights,
    slot_offsets: Tensor,
    places_S: Tensor,
    *,
    num_pairs: int,
    expected_pairs: int | None = None,
    rows_P: Tensor | None = None,
    gate: str = "none",
    biases_WN: Tensor | None = None,
    tile: GroupedTile | FlowTile | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """Multiply each row with its slot's weight.

    Args:
        x_TK: [T, K] contiguous; bfloat16, float16 or float32.
        weights: Contiguous; plain ones of x's type. With a gate they have 2 * N rows instead of N, the gate's first.
        slot_offsets: int64 [S + 1]; the pairs of slot s are [slot_offsets[s], slot_offsets[s + 1]).
        places_S: int32 [S], the index of each slot's weight among the W.
        num_pairs: Most pairs P.
        expected_pairs: Number of pairs with even loads, which determines tile and grid. None means num_pairs.
        rows_P: int64 [P], the row of each pair. None: pair p is row p.
        gate: Name in GATES.
        biases_WN: [W, N], or [W, 2 * N] with a gate.
        tile: None: `tile_of_launch`, by expected pairs, S and the device.
        out: [num_pairs, N] contiguous to write into. None: a new tensor of x's type. Rows without a pair are not
            written.

    Raises:
        ValueError: The kernel does not support a type or shape.
    """
    S, height, K, form = places_S.numel(), weights.codes.shape[1], x_TK.shape[1], weights.format
    N = height // 2 if GATES[gate] else height
    _check(x_TK, weights)
    if out is None:
        out = x_TK.new_empty(num_pairs, N)
    expected = num_pairs if expected_pairs is None else min(expected_pairs, num_pairs)
    tile = tile or tile_of_launch(expected, S, weights, has_gate=GATES[gate] > 0)
    programs = _num_programs(tile, min(S, expected), expected, N, x_TK.device)
    if isinstance(tile, FlowTile):
        _launch_flow(
            x_TK, rows_P, weights, biases_WN, places_S, slot_offsets, out, tile=tile, gate=gate, programs=programs
        )  # fmt: skip
        return out
    codes, scales = weights.codes, weights.scales
    word = codes_per_word(form, K)
    codes, scales = kernel_views(codes, scales, form.kind, form.scale, word)
    grouped_rows[(programs,)](
        x_TK, rows_P, codes, scales, weights.row_scales, weights.zeros, biases_WN, places_S, slot_offsets, out,
        S=S, S_PAD=triton.next_power_of_2(S), N=N, K=K, ROWS=tile.rows, COLUMNS=tile.columns, INNER=tile.inner,
        GROUP=tile.group, GATE=GATES[gate], KIND=form.kind, SCALE=form.scale, BLOCK=form.block, SCALE_ROWS=form.rows,
        WORD=word, num_warps=tile.warps, num_stages=tile.stages,
        maxnreg=tile.registers if tile.registers < MOST_REGISTERS else None,
    )  # fmt: skip
    return out


def _launch_flow(
    x_TK: Tensor,
    rows_P: Tensor | None,
    weights: PlacedWeights,
    biases_WN: Tensor | None,
    places_S: Tensor,
    slot_offsets: Tensor,
    out: Tensor,
    *,
    tile: FlowTile,
    gate: str,
    programs: int,
) -> None:
    """Launch the kernel for many rows. Rows without a map are read by a descriptor if their address allows it.

    Raises:
        ValueError: The kernel does not support the weights.
    """
    if problem := why_no_flow(weights):
        raise ValueError(f"the weights {problem}; {tile} does not support them")
    S, (W, height, K), sides = places_S.numel(), weights.codes.shape, 2 if GATES[gate] else 1
    N = height // sides
    w_tiles = TensorDescriptor(
        weights.codes, [W * sides, N, K], [N * K, K, 1], [sides, tile.columns, tile.inner]
    )
    x_tiles = None
    if rows_P is None and len(x_TK) and x_TK.data_ptr() % DESCRIBED_BYTES == 0:
        x_tiles = TensorDescriptor(x_TK, [len(x_TK), K], [K, 1], [tile.rows, tile.inner])
    flow_rows[(programs,)](
        None if x_tiles else x_TK, x_tiles, rows_P, w_tiles, weights.row_scales, biases_WN, places_S, slot_offsets, out, S=S,
        S_PAD=triton.next_power_of_2(S), N=N, K=K, ROWS=tile.rows, COLUMNS=tile.columns, INNER=tile.inner,
        GROUP=tile.group, GATE=GATES[gate], num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip


def _num_programs(
    tile: GroupedTile | FlowTile, slots: int, expected: int, N: int, device: torch.device
) -> int:
    """Return the number of programs: one per expected tile, or fewer if the tile limits them."""
    num_tiles = max(1, slots + expected // tile.rows)  # at most one partial tile per slot
    programs: int = num_tiles * triton.cdiv(N, tile.columns)
    if tile.programs >= MOST_PROGRAMS:
        return programs
    return min(programs, tile.programs * _multiprocessors(device))


@functools.cache
def _multiprocessors(device: torch.device) -> int:
    """Return a GPU's multiprocessors; 1 in the interpreter."""
    if device.type != "cuda":
        return 1
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


def kernel_views(
    codes: Tensor, scales: Tensor | None, kind: str, scale: str, word: int
) -> tuple[Tensor, Tensor | None]:
    """Return codes and scales in types that all GPUs have, for kernels that use `moe.gpu.weights.formats.load_tile`.

    Args:
        kind: Kind of the codes, as in `DeviceFormat`.
        scale: Kind of the scales.
        word: Codes that are decoded at once; see `codes_per_word`.
    """
    if word > 1:
        codes = codes.view(torch.int32)
    elif kind == "e4m3":
        codes = codes.view(torch.uint8)
    if scales is not None and scale == "e4m3":
        scales = scales.view(torch.uint8)
    return codes, scales


def _check(x_TK: Tensor, weights: PlacedWeights) -> None:
    if x_TK.dtype not in ROW_TYPES:
        raise ValueError(f"x_TK is {x_TK.dtype}; the kernel supports bfloat16, float16 and float32")
    if weights.format == PLAIN and weights.codes.dtype != x_TK.dtype:
        raise ValueError(f"weights are {weights.codes.dtype}; plain ones must be {x_TK.dtype}, like the rows")
    if weights.in_dim != x_TK.shape[1]:
        raise ValueError(f"x_TK has {x_TK.shape[1]} columns; the weights need {weights.in_dim}")
    weights.check()
