"""Products of a step on a CPU, as kernels for a team of threads: linear layers, and experts by slot.

A product's bits depend on the row alone. The tiles ensure this for any batch and any split of the columns among threads.
Kernels only have addresses and sizes (`dispatch.compiled.team`). `moe.cpu.weights.packed_weight` calls `linear` for
`torch.nn.functional.linear`; `moe.cpu.weights.slots` and `moe.cpu.experts` call the rest for experts modules.

Legend: T tokens (rows), K input features, N output features, P pairs (row, expert choice), S slots, I intermediate dim.
"""

import numpy as np
from numba import njit
from torch import Tensor

from attention.cpu.integer_tiles import BLOCK, QUANTISED_BLOCK_BYTES, quantise_block
from attention.cpu.panel_pairs import times_two_panels
from attention.cpu.tiles import LANES, TILES_VERSION, address_of, silu_times, times_panel
from dispatch.compiled.native import copy, floats, words
from dispatch.compiled.team import Kernel, Team, program_of, run
from moe.cpu.kernels.panels import Format

TILE_NS = 10_000  # target time on one thread: long compared to taking a tile, short compared to a step
ROW_BLOCK = 96  # rows per tile: with K = 1024 they are 384 KiB of activations, which stay in L2
BYTES_PER_NS, PRODUCTS_PER_NS = 8, 35  # approximate rates of reading and multiplying on one thread
_PANEL_BYTES = LANES * 4  # of 16 columns of one row in `out`


@njit(nogil=True, inline="always")
def panels_per_tile(rows, k, panel_bytes):  # type: ignore[no-untyped-def]
    """Return the number of panels per tile."""
    ns = max(panel_bytes // BYTES_PER_NS, rows * k * LANES // PRODUCTS_PER_NS) + 1
    return max(2, TILE_NS // ns)  # at least two, which are multiplied together


@njit(nogil=True, inline="always")
def _times_panels(  # type: ignore[no-untyped-def]
    times, times_two, x, x_stride, codes, panel_bytes, scales, scale_bytes, k, block, out, out_stride, rows, first, last
):  # fmt: skip
    # Multiply rows with panels [first, last) of one weight.
    panel = first
    while panel < last:
        to, weights = out + panel * _PANEL_BYTES, codes + panel * panel_bytes
        if times_two != 0 and panel + 1 < last:
            here = scales + panel * scale_bytes
            times_two_panels(
                times_two, x, x_stride, weights, weights + panel_bytes, here, here + scale_bytes, k, block, to,
                to + _PANEL_BYTES, out_stride, rows,
            )  # fmt: skip
            panel += 2
        else:
            times_panel(
                times, x, x_stride, weights, scales + panel * scale_bytes, k, block, to, out_stride, rows
            )
            panel += 1


def _linear(  # type: ignore[no-untyped-def]
    tile, x, x_stride, codes, scales, panel_bytes, scale_bytes, k, block, panels, times, out, out_stride, rows_at,
    bias, times_two,
):  # fmt: skip
    rows = words(rows_at, 1)[0]
    at_once = panels_per_tile(min(rows, ROW_BLOCK), k, panel_bytes)
    groups = (panels + at_once - 1) // at_once
    if tile < 0:
        return (rows + ROW_BLOCK - 1) // ROW_BLOCK * groups
    first_row = tile // groups * ROW_BLOCK
    count = min(ROW_BLOCK, rows - first_row)
    first = tile % groups * at_once
    last, to = min(first + at_once, panels), out + first_row * out_stride
    _times_panels(
        times, times_two, x + first_row * x_stride, x_stride, codes, panel_bytes, scales, scale_bytes, k, block, to,
        out_stride, count, first, last,
    )  # fmt: skip
    if bias != 0:
        added = floats(bias, last * LANES)
        for row in range(count):
            values = floats(to + row * out_stride, last * LANES)
            for column in range(first * LANES, last * LANES):
                values[column] += added[column]
    return 0


def _grouped(  # type: ignore[no-untyped-def]
    tile, x, x_stride, panel_bytes, scale_bytes, k, block, panels, times, codes_at, scales_at, offsets_at,
    num_slots, out, out_stride, is_gated, times_two,
):  # fmt: skip
    code_address, scale_address, offsets = (
        words(codes_at, num_slots),
        words(scales_at, num_slots),
        words(offsets_at, num_slots + 1),
    )
    made = panels // 2 if is_gated != 0 else panels
    # A tile is a part of one slot's panels. Find the slot and the part.
    slot, tiles, at_once = 0, 0, 1
    while slot < num_slots:
        rows = offsets[slot + 1] - offsets[slot]
        if rows > 0:
            at_once = panels_per_tile(rows, k, panel_bytes)
            here = (made + at_once - 1) // at_once
            if 0 <= tile < tiles + here:
                break
            tiles += here
        slot += 1
    if tile < 0:
        return tiles
    codes, scales = code_address[slot], scale_address[slot] if scale_bytes != 0 else 0
    begin, end = offsets[slot], offsets[slot + 1]
    first = (tile - tiles) * at_once
    last = min(first + at_once, made)
    both = np.empty((2 * ROW_BLOCK if is_gated != 0 else 0, LANES), np.float32)
    for row in range(begin, end, ROW_BLOCK):
        count, rows_at = min(ROW_BLOCK, end - row), x + row * x_stride
        if is_gated == 0:
            _times_panels(
                times, times_two, rows_at, x_stride, codes, panel_bytes, scales, scale_bytes, k, block,
                out + row * out_stride, out_stride, count, first, last,
            )  # fmt: skip
            continue
        for panel in range(first, last):
            to, weights = out + row * out_stride + panel * _PANEL_BYTES, codes + panel * panel_bytes
            gate, up = address_of(both), address_of(both) + ROW_BLOCK * _PANEL_BYTES
            other = panel + made
            if times_two != 0:
                times_two_panels(
                    times_two, rows_at, x_stride, weights, codes + other * panel_bytes, scales + panel * scale_bytes,
                    scales + other * scale_bytes, k, block, gate, up, _PANEL_BYTES, count,
                )  # fmt: skip
            else:
                times_panel(
                    times,
                    rows_at,
                    x_stride,
                    weights,
                    scales + panel * scale_bytes,
                    k,
                    block,
                    gate,
                    _PANEL_BYTES,
                    count,
                )
                times_panel(
                    times, rows_at, x_stride, codes + other * panel_bytes, scales + other * scale_bytes, k, block, up,
                    _PANEL_BYTES, count,
                )  # fmt: skip
            for index in range(count):
                silu_times(gate + index * _PANEL_BYTES, up + index * _PANEL_BYTES, to + index * out_stride)
    return 0


_GATHERED_BYTES = 1 << 16  # per tile of GATHER


def _gather(tile, x, row_bytes, sources, count_at, out):  # type: ignore[no-untyped-def]
    """Compute `out[p] = x[sources[p]]` for rows of `row_bytes`. Their number is read at `count_at` when the program runs."""
    count = words(count_at, 1)[0]
    source = words(sources, count)
    at_once = max(1, _GATHERED_BYTES // row_bytes)
    if tile < 0:
        return (count + at_once - 1) // at_once
    for row in range(tile * at_once, min((tile + 1) * at_once, count)):
        copy(out + row * row_bytes, x + source[row] * row_bytes, row_bytes)
    return 0


_QUANTISED_BLOCKS = 256  # per tile of QUANTISE


def _quantise(tile, x, x_stride, k, out, rows_at):  # type: ignore[no-untyped-def]
    """Quantise activations for weights that take integers.

    Args:
        x: Address of [T, K] float32. x_stride: Bytes between two rows.
        k: K, a multiple of 32.
        out: Address of T rows of `Format.row_bytes`; see `attention.cpu.integer_tiles`.
        rows_at: Address of T, read when the program runs.
    """
    rows, blocks = words(rows_at, 1)[0], k // BLOCK
    at_once = max(1, _QUANTISED_BLOCKS // blocks)
    if tile < 0:
        return (rows + at_once - 1) // at_once
    for row in range(tile * at_once, min((tile + 1) * at_once, rows)):
        for block in range(blocks):
            quantise_block(
                x + row * x_stride + block * BLOCK * 4, out + (row * blocks + block) * QUANTISED_BLOCK_BYTES
            )
    return 0


LINEAR, GROUPED = Kernel(_linear, TILES_VERSION), Kernel(_grouped, TILES_VERSION)
GATHER, QUANTISE = Kernel(_gather, TILES_VERSION), Kernel(_quantise, TILES_VERSION)


def linear_row(
    x: int, x_stride: int, codes: int, scales: int, kind: Format, out: int, out_stride: int, rows_at: int, bias: int = 0
) -> list[int]:  # fmt: skip
    """Return a program row for `out = x @ weight.T + bias`.

    Args:
        x: Address of [T, K], rows in the form that `kind` takes. x_stride: Bytes between two rows.
        codes, scales: Addresses of a weight's panels and scales.
        kind: Format of the weight.
        out: Address of [T, panels * 16] float32. out_stride: Bytes between two rows.
        rows_at: Address of T, read when the program runs.
        bias: Address of [panels * 16] float32, or 0.
    """
    return LINEAR.row(
        x, x_stride, codes, scales, kind.panel_bytes, kind.scale_bytes, kind.k, kind.block, kind.panels,
        kind.times_panel, out, out_stride, rows_at, bias, kind.times_two,
    )  # fmt: skip


def grouped_row(
    x: int, kind: Format, code_address_S: int, scale_address_S: int, offsets: int, num_slots: int, out: int,
    *, is_gated: bool = False,
) -> list[int]:  # fmt: skip
    """Return a program row that multiplies every slot's weight with its own rows.

    Args:
        x: Address of [P, K], rows sorted by slot, in the form that `kind` takes.
        kind: Format of all slots' weights.
        code_address_S, scale_address_S: Addresses of [S] int64 arrays of addresses, of each slot's panels and scales.
        offsets: Address of [S + 1] int64; rows [offsets[s], offsets[s + 1]) belong to slot s.
        out: Address of [P, panels * 16] float32, or of [P, panels * 8] if `is_gated`.
        is_gated: The first half of the columns is a gate for the second half: silu(gate) * up.
    """
    columns = kind.panels * LANES // (2 if is_gated else 1)
    return GROUPED.row(
        x, kind.row_bytes, kind.panel_bytes, kind.scale_bytes, kind.k, kind.block, kind.panels, kind.times_panel,
        code_address_S, scale_address_S, offsets, num_slots, out, columns * 4, int(is_gated), kind.times_two,
    )  # fmt: skip


def product_ns(rows: int, kind: Format, groups: int = 1) -> int:
    """Estimate the time of one thread for rows that go to at most `groups` weights of a kind."""
    touched = kind.panels * kind.panel_bytes * min(rows, groups)
    return max(touched // BYTES_PER_NS, rows * kind.panels * LANES * kind.k // PRODUCTS_PER_NS)


def linear(
    x_TK: Tensor, codes: Tensor, scales: Tensor | None, kind: Format, out_TN: Tensor, team: Team | None
) -> None:
    """Write `x @ weight.T` into `out`.

    Args:
        x_TK: [T, K] float32; rows may be strided, columns may not.
        codes, scales, kind: A weight, see `panels`.
        out_TN: [T, panels * 16] float32 contiguous, T or more rows.
        team: Threads to use; None for the calling thread.
    """
    rows = np.array((x_TK.shape[0],))
    assert x_TK.shape[1] == kind.k and x_TK.stride(1) == 1 and out_TN.stride(0) == kind.panels * LANES
    x, x_stride, before = x_TK.data_ptr(), x_TK.stride(0) * 4, []
    if kind.takes_integers:
        quantised = np.empty((x_TK.shape[0], kind.row_bytes), np.uint8)
        before = [QUANTISE.row(x, x_stride, kind.k, quantised.ctypes.data, rows.ctypes.data)]
        x, x_stride = quantised.ctypes.data, kind.row_bytes
    row = linear_row(
        x, x_stride, codes.data_ptr(), 0 if scales is None else scales.data_ptr(), kind, out_TN.data_ptr(),
        kind.panels * _PANEL_BYTES, rows.ctypes.data,
    )  # fmt: skip
    run(program_of([*before, row]), team, product_ns(x_TK.shape[0], kind))
