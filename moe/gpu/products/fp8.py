"""Products in FP8 on GPUs: rows are quantised and multiplied with FP8 weights on the FP8 units.

The checkpoint's configuration decides which rows are quantised.
Rows become e4m3 with a float32 scale per row and 128 inputs (DeepSeek-V3's blocks), or per row (scales of channels and
tensors). A scale is the largest magnitude over 448. Answers differ from those of rows that are not quantised, such as on a
CPU. A row is quantised by itself, so its result does not depend on the batch.

`multiply_rows` chooses between this product and `widened`. Which weights take quantised rows is part of their format
(`DeviceFormat.fp8_rows`), decided once while they are loaded.

Ideas: DeepGEMM (scales applied per 128 inputs outside the tensor cores), DeepSeek-V3's report. Rejected: one kernel for all
formats. FP8 sums need their own steps, and the kernel for other formats decodes in registers.

Legend: T rows, P pairs (rows sorted by slot), N out features, K in features, S slots, W weights in memory, B groups of K.
"""

import functools
from collections.abc import Mapping
from typing import NamedTuple

import torch
import triton
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from attention.gpu.tiles import device_names, tile_of
from moe.gpu.products.fp8_flow_kernel import flow_fp8_rows
from moe.gpu.products.fp8_kernel import STEP_INPUTS, grouped_fp8_rows, quantise_groups, quantise_whole_rows
from moe.gpu.products.grouped_kernel import GATES
from moe.gpu.products.tiles import GroupedTile, shape_of
from moe.gpu.products.widened import Workspace, multiply_unquantised
from moe.gpu.weights.formats import PlacedWeights

LEAST_FP8_CAPABILITY = (8, 9)
_GROUPS = 32  # per program of `quantise_groups`
_DESCRIBED_BYTES = 16  # rows of a tensor with a descriptor begin at multiples
_LANES = 32  # of a warp; a list of fewer slots takes more registers


class QuantisedRows(NamedTuple):
    """Quantised rows."""

    codes: Tensor  # [T, K] float8_e4m3fn
    scales: Tensor  # [T, B] or [T, 1] float32
    dtype: torch.dtype  # of the rows before, and of products


class Fp8Tile(NamedTuple):
    """Shape of a program's work. All tiles, of both kinds, add over the inputs in the same order and steps."""

    rows: int
    columns: int  # with a gate, of the gate and of up; 128 if the output is quantised, as large as its groups
    group: int  # tiles of rows that share a tile of columns
    warps: int
    stages: int


class Fp8FlowTile(NamedTuple):
    """Shape of a program's work in `fp8_flow_kernel`."""

    rows: int
    columns: int  # of one product; 128 if the output is quantised
    halves: int  # products with the same rows per step; 2 with a gate
    group: int
    warps: int
    stages: int
    programs: int = 1  # per multiprocessor; each takes several tiles in turn
    loops: int = 2  # 1: over tiles and inputs together, which takes more registers


AnyTile = Fp8Tile | Fp8FlowTile
Tiles = Mapping[int, AnyTile]

# Rows per slot from which another tile may be used.
LEVELS = (0, 32, 96)
# By the kind of product, for at least this many rows per slot; the first is also for batch invariance.
_GATED: Tiles = {
    0: Fp8Tile(16, 128, 1, 4, 3),
    32: Fp8FlowTile(64, 128, 2, 8, 8, 4, loops=1),
    96: Fp8FlowTile(128, 128, 2, 8, 8, 4, loops=1),
}
_PLAIN: Tiles = {
    0: Fp8Tile(16, 64, 1, 4, 5),
    32: Fp8FlowTile(64, 128, 1, 8, 4, 4, programs=2),
    96: Fp8FlowTile(128, 128, 2, 8, 8, 4),
}
# For other GPUs than Hopper, and for weights that the kernel for many rows does not support.
_SMALL_GATED: Tiles = {0: Fp8Tile(16, 128, 1, 4, 2), 32: Fp8Tile(32, 128, 8, 8, 2)}
_SMALL_PLAIN: Tiles = {0: Fp8Tile(16, 64, 1, 4, 4), 32: Fp8Tile(64, 64, 8, 8, 3)}


def why_no_fp8(device: torch.device) -> str | None:
    """Return why a device has no products in FP8, or None if it has."""
    if device.type != "cuda" or torch.cuda.get_device_capability(device) >= LEAST_FP8_CAPABILITY:
        return None  # the interpreter has them
    seen, needed = (
        ".".join(map(str, pair)) for pair in (torch.cuda.get_device_capability(device), LEAST_FP8_CAPABILITY)
    )
    return f"compute capability {needed}, and this GPU has {seen}"


def quantise_rows(x_TK: Tensor, weights: PlacedWeights) -> QuantisedRows:
    """Quantise rows for weights that take quantised ones; local.

    Args:
        x_TK: [T, K] contiguous; bfloat16, float16 or float32.
    """
    T, K = x_TK.shape
    codes = torch.empty_like(x_TK, dtype=torch.float8_e4m3fn)
    if weights.format.block >= K:
        scales = torch.empty(T, 1, dtype=torch.float32, device=x_TK.device)
        padded = triton.next_power_of_2(K)
        if T:
            quantise_whole_rows[(T,)](
                x_TK, codes, scales, K=K, K_PAD=padded, num_warps=min(16, max(1, padded // 1024))
            )
        return QuantisedRows(codes, scales, x_TK.dtype)
    scales = torch.empty(T, triton.cdiv(K, STEP_INPUTS), dtype=torch.float32, device=x_TK.device)
    if T:
        programs = triton.cdiv(scales.numel(), _GROUPS)
        quantise_groups[(programs,)](
            x_TK, codes, scales, scales.numel(), K=K, STEP=STEP_INPUTS, GROUPS=_GROUPS, num_warps=4
        )  # fmt: skip
    return QuantisedRows(codes, scales, x_TK.dtype)


def multiply_rows(
    x: Tensor | QuantisedRows,
    weights: PlacedWeights,
    slot_offsets: Tensor,
    places_S: Tensor,
    *,
    num_pairs: int,
    expected_pairs: int | None = None,
    rows_P: Tensor | None = None,
    gate: str = "none",
    biases_WN: Tensor | None = None,
    tile: GroupedTile | None = None,
    feeds: PlacedWeights | None = None,
    workspace: Workspace | None = None,
) -> Tensor | QuantisedRows:
    """Multiply each row with its slot's weight, in FP8 if the weights take quantised rows. See `grouped.grouped_linear`.

    Args:
        x: Rows [T, K], quantised or not. Quantised ones are results for `feeds` = weights.
        tile: Tile for rows that are not quantised. With any, quantised rows use their own tile for all numbers of rows.
        feeds: Weights of the next product, which has no other input. The result is quantised if they take such rows and
            a gate was applied.
        workspace: Memory to decode weights once for many rows. None: they are decoded inside the product.

    Raises:
        ValueError: The kernel does not support a type or shape.
    """
    if not weights.format.fp8_rows:
        assert isinstance(x, Tensor), "quantised rows for weights that do not take them"
        return multiply_unquantised(
            x, weights, slot_offsets, places_S, num_pairs=num_pairs, expected_pairs=expected_pairs, rows_P=rows_P,
            gate=gate, biases_WN=biases_WN, tile=tile, workspace=workspace,
        )  # fmt: skip
    rows = quantise_rows(x, weights) if isinstance(x, Tensor) else x
    N = weights.codes.shape[1] // (1 if gate == "none" else 2)
    quantises_out = feeds is not None and takes_groups(feeds) and gate != "none"
    out = torch.empty(num_pairs, N, dtype=rows.dtype, device=rows.codes.device)
    out_scales = None
    if quantises_out:
        out = torch.empty_like(out, dtype=torch.float8_e4m3fn)
        out_scales = torch.empty(
            num_pairs, triton.cdiv(N, STEP_INPUTS), dtype=torch.float32, device=out.device
        )
    expected = num_pairs if expected_pairs is None else min(expected_pairs, num_pairs)
    chosen = choose_tile(0 if tile is not None else expected // max(places_S.numel(), 1), weights, gate)
    launch(
        rows, weights, slot_offsets, places_S, out, out_scales, tile=chosen, expected=expected, rows_P=rows_P, gate=gate,
        biases_WN=biases_WN,
    )  # fmt: skip
    return out if out_scales is None else QuantisedRows(out, out_scales, rows.dtype)


def takes_groups(weights: PlacedWeights) -> bool:
    """Return whether weights take rows with scales for groups of 128 inputs."""
    return weights.format.fp8_rows and weights.format.block < weights.in_dim


def launch(
    rows: QuantisedRows,
    weights: PlacedWeights,
    slot_offsets: Tensor,
    places_S: Tensor,
    out: Tensor,
    out_scales: Tensor | None,
    *,
    tile: AnyTile,
    expected: int,
    rows_P: Tensor | None = None,
    gate: str = "none",
    biases_WN: Tensor | None = None,
) -> None:
    """Launch a kernel. Writes into `out`, and into `out_scales` if it is quantised.

    Raises:
        ValueError: Rows, weights and tile do not fit each other.
    """
    S, height, K, form = places_S.numel(), weights.codes.shape[1], weights.in_dim, weights.format
    N = height // 2 if GATES[gate] else height
    _check(rows, weights, tile, is_gated=gate != "none", quantises_out=out_scales is not None)
    num_tiles = max(1, min(S, expected) + expected // tile.rows)  # at most one partial tile per slot
    sizes = {
        "S": S, "S_PAD": triton.next_power_of_2(S), "N": N, "K": K, "STEP": STEP_INPUTS, "ROWS": tile.rows,
        "COLUMNS": tile.columns, "GROUP": tile.group, "GATE": GATES[gate], "num_warps": tile.warps, "num_stages": tile.stages,
    }  # fmt: skip
    if isinstance(tile, Fp8Tile):
        grouped_fp8_rows[(num_tiles * triton.cdiv(N, tile.columns),)](
            rows.codes, rows.scales, rows_P, weights.codes, weights.scales, biases_WN, places_S, slot_offsets, out,
            out_scales, BLOCK=form.block, SCALE_ROWS=form.rows, **sizes,
        )  # fmt: skip
        return
    width = tile.columns if GATES[gate] else tile.columns * tile.halves
    programs = min(num_tiles * triton.cdiv(N, width), tile.programs * _multiprocessors(out.device))
    flat_codes = weights.codes.view(-1, K)
    w_tiles = TensorDescriptor(flat_codes, list(flat_codes.shape), [K, 1], [tile.columns, STEP_INPUTS])
    x, x_tiles = rows.codes, None
    if rows_P is None and len(x) and x.data_ptr() % _DESCRIBED_BYTES == 0:
        x_tiles = TensorDescriptor(x, list(x.shape), [K, 1], [tile.rows, STEP_INPUTS])
    sizes["S_PAD"] = max(_LANES, sizes["S_PAD"])
    flow_fp8_rows[(programs,)](
        None if x_tiles else x, x_tiles, rows.scales, rows_P, w_tiles, weights.scales, biases_WN, places_S,
        slot_offsets, out, out_scales, HALVES=tile.halves, IN_BLOCKS=form.block < K, FLAT=tile.loops == 1, **sizes,
    )  # fmt: skip


def choose_tile(rows_per_slot: int, weights: PlacedWeights, gate: str = "none") -> AnyTile:
    """Return the tile of a launch: the table's for this device, shape and number of rows, or the fallback."""
    device, is_gated = weights.codes.device, gate != "none"
    if _has_flow(device) and why_no_flow(weights, is_gated=is_gated) is None:
        tiles = _GATED if is_gated else _PLAIN
    else:
        tiles = _SMALL_GATED if is_gated else _SMALL_PLAIN
    least = max(rows for rows in tiles if rows <= rows_per_slot)
    return tile_of(f"fp8_{least}", shape_of(weights), tiles[least], device_names(device))


@functools.cache
def _has_flow(device: torch.device) -> bool:
    """Return whether a device has the kernel for many rows. It needs the shared memory and registers of Hopper."""
    return device.type != "cuda" or torch.cuda.get_device_capability(device)[0] == 9


@functools.cache
def _multiprocessors(device: torch.device) -> int:
    """Return a GPU's multiprocessors; 1 in the interpreter."""
    if device.type != "cuda":
        return 1
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


def why_no_flow(weights: PlacedWeights, *, is_gated: bool) -> str | None:
    """Return why the kernel for many rows does not support weights, to follow "the weights". None if it does."""
    codes, form, K = weights.codes, weights.format, weights.in_dim
    N = codes.shape[1] // (2 if is_gated else 1)
    if K % _DESCRIBED_BYTES or codes.data_ptr() % _DESCRIBED_BYTES:
        return f"have {K} inputs, which do not begin at multiples of {_DESCRIBED_BYTES} bytes"
    has_blocks = form.block < K
    if form.rows != (STEP_INPUTS if has_blocks else 1) or (has_blocks and is_gated and N % STEP_INPUTS):
        return (
            f"have {N} outputs with a scale for {form.rows} and {form.block} inputs; the kernel needs whole blocks of "
            f"{STEP_INPUTS}, or a scale for each output and all inputs"
        )
    return None


def _check(
    rows: QuantisedRows, weights: PlacedWeights, tile: AnyTile, *, is_gated: bool, quantises_out: bool
) -> None:
    K, block = weights.in_dim, weights.format.block
    weights.check()
    if (
        weights.format.kind != "e4m3"
        or weights.format.scale != "float"
        or not (block == STEP_INPUTS or block >= K)
    ):
        raise ValueError(
            f"{weights.format.kind} weights with {weights.format.scale} scales for {block} inputs; FP8 products need e4m3 "
            f"with floating-point scales for {STEP_INPUTS} inputs or a whole row"
        )
    wanted = (len(rows.codes), 1 if block >= K else triton.cdiv(K, STEP_INPUTS))
    if rows.codes.shape[1] != K or tuple(rows.scales.shape) != wanted:
        raise ValueError(
            f"rows are {list(rows.codes.shape)} with scales {list(rows.scales.shape)}; the weights need {K} columns and "
            f"scales {list(wanted)}"
        )
    if tile.columns != STEP_INPUTS and quantises_out:
        raise ValueError(f"a tile has {tile.columns} columns; a quantised output needs {STEP_INPUTS}")
    if isinstance(tile, Fp8Tile):
        return
    if tile.halves != 2 and is_gated:
        raise ValueError(f"a tile has {tile.halves} halves; with a gate it needs 2")
    if problem := why_no_flow(weights, is_gated=is_gated):
        raise ValueError(f"the weights {problem}")
