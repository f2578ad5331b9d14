# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator"
"""The product in FP8 of many rows on Hopper, as a Triton kernel; launched by `fp8`.

It takes the steps of `fp8_kernel` in the same order, and differs in four ways:

- Rows are the left factor. A thread then holds two rows, and so two of their scales.
- The copy engine (TMA) loads weights, and rows that need no map, by descriptors: no thread computes their addresses.
- The scales of a step are read one step ahead, so that no product waits for them.
- A program takes several tiles. With `FLAT`, the loops over tiles and over inputs are one, and the first copies of the next tile
  run while a program finishes the one before.

Ideas: Triton's persistent matrix product with descriptors, DeepGEMM (two groups of warps, each with its own rows).
Rejected: `warp_specialize` of Triton 3.6, which spills with a gate and loads no mapped rows.

Legend: T rows, P pairs (rows sorted by slot), N out features, K in features, S slots, W weights in memory, B groups of K.
"""

import triton
import triton.language as tl

from attention.gpu.pages import bound
from moe.gpu.products.fp8_kernel import scale_of, to_e4m3
from moe.gpu.products.grouped_kernel import end_tiles, find_rows, find_tile, gated


@triton.jit
def _load_rows(x, x_tiles, source, first, begin, K: tl.constexpr, STEP: tl.constexpr):
    """Load [rows, STEP] by a descriptor, or from the rows of `source`."""
    if x_tiles is not None:
        return x_tiles.load([first, begin])
    else:
        inner = begin + tl.arange(0, STEP)
        # The rows' addresses are computed here, where the compiler knows that K is a multiple of 16 bytes.
        at = x + (source.to(tl.int64) * K)[:, None] + inner[None, :]
        return tl.load(at) if K % STEP == 0 else tl.load(at, mask=(inner < K)[None, :], other=0.0)


@triton.jit
def _finished(total, x_scale, scales, biases, column, HEIGHT: tl.constexpr, IN_BLOCKS: tl.constexpr):
    """Multiply sums with scales of whole rows, and add biases."""
    if not IN_BLOCKS:
        each = tl.load(scales + column, mask=column < HEIGHT, other=0.0).to(tl.float32)
        total *= x_scale[:, None] * each[None, :]
    if biases is not None:
        total += tl.load(biases + column, mask=column < HEIGHT, other=0.0).to(tl.float32)[None, :]
    return total


@triton.jit
def _store(
    value, out, out_scales, first, end, column, N: tl.constexpr, STEP: tl.constexpr, ROWS: tl.constexpr,
    IS_WHOLE: tl.constexpr,
):  # fmt: skip
    """Write [rows, columns]; in FP8 if there are scales, for a tile of one group."""
    pair = first + tl.arange(0, ROWS)
    is_out = (pair < end)[:, None]
    if not IS_WHOLE:
        is_out = is_out & (column < N)[None, :]
    if out_scales is not None:
        GROUPS: tl.constexpr = (N + STEP - 1) // STEP
        size = tl.abs(value) if IS_WHOLE else tl.where(is_out, tl.abs(value), 0.0)
        scale = scale_of(tl.max(size, axis=1))
        tl.store(out_scales + pair * GROUPS + tl.min(column, axis=0) // STEP, scale, mask=pair < end)
        value = to_e4m3(tl.math.div_rn(value, scale[:, None]))
    tl.store(
        out + pair.to(tl.int64)[:, None] * N + column[None, :], value.to(out.dtype.element_ty), mask=is_out
    )


@triton.jit
def flow_fp8_rows(
    x, x_tiles, x_scales, rows, w_tiles, scales, biases, places, offsets, out, out_scales,
    S: tl.constexpr, S_PAD: tl.constexpr, N: tl.constexpr, K: tl.constexpr, STEP: tl.constexpr, ROWS: tl.constexpr,
    COLUMNS: tl.constexpr, HALVES: tl.constexpr, GROUP: tl.constexpr, GATE: tl.constexpr, IN_BLOCKS: tl.constexpr,
    FLAT: tl.constexpr,
):  # fmt: skip
    """Program (tiles of rows and columns, in turn). With a gate, weights have 2 * N rows: N of the gate, then N of up.

    Args:
        x_tiles: Descriptor of the rows, in blocks of [ROWS, STEP]. Without it, `x` points to
            the rows, and `rows` may map them.
        w_tiles: Descriptor of all weights' rows, in blocks of [COLUMNS, STEP].
        scales: With `IN_BLOCKS` for blocks of STEP x STEP, and no tile of columns crosses a block; otherwise for rows.
    """
    WIDTH: tl.constexpr = COLUMNS if GATE > 0 else COLUMNS * HALVES
    HEIGHT: tl.constexpr = 2 * N if GATE > 0 else N
    APART: tl.constexpr = N if GATE > 0 else COLUMNS  # of the columns of the halves
    STEPS: tl.constexpr = (K + STEP - 1) // STEP
    GROUPS: tl.constexpr = STEPS if IN_BLOCKS else 1
    SCALE_ROWS: tl.constexpr = (HEIGHT + STEP - 1) // STEP if IN_BLOCKS else HEIGHT
    COLUMN_TILES: tl.constexpr = (N + WIDTH - 1) // WIDTH
    IS_WHOLE: tl.constexpr = N % WIDTH == 0  # all columns exist
    end_tile = end_tiles(offsets, S, S_PAD, ROWS)
    num_tiles = tl.max(end_tile, axis=0)
    stop = num_tiles * COLUMN_TILES
    for at in tl.range(bound(tl.program_id(0)), bound(stop), bound(tl.num_programs(0)), flatten=FLAT):
        tile, column_tile = find_tile(at, num_tiles, COLUMN_TILES, GROUP)
        slot, first, end = find_rows(offsets, end_tile, tile, S, S_PAD, ROWS)
        first, end = first.to(tl.int32), end.to(tl.int32)  # which takes fewer registers
        place, left = tl.load(places + slot), column_tile * WIDTH
        # Rows past the end repeat the last one, so that no load of a step needs a mask; they are not written.
        row = tl.minimum(first + tl.arange(0, ROWS), end - 1)
        source = tl.load(rows + row).to(tl.int32) if rows is not None else row
        w_row = place * HEIGHT + left
        x_at, weight_scales = x_scales + source * GROUPS, scales + place.to(tl.int64) * (SCALE_ROWS * GROUPS)
        w_at = weight_scales + left // STEP * GROUPS
        if IS_WHOLE and COLUMNS % STEP == 0:
            v_at = w_at + APART // STEP * GROUPS
        else:
            v_at = weight_scales + tl.minimum((left + APART) // STEP, SCALE_ROWS - 1) * GROUPS
        total, second = tl.zeros([ROWS, COLUMNS], tl.float32), tl.zeros([ROWS, COLUMNS], tl.float32)
        x_next = tl.load(x_at)
        w_next, v_next = tl.load(w_at).to(tl.float32), tl.load(v_at).to(tl.float32)
        for step in range(STEPS):
            begin = step * STEP
            x_scale, w_scale, v_scale = x_next, w_next, v_next
            if IN_BLOCKS:
                ahead = tl.minimum(step + 1, STEPS - 1)
                x_next = tl.load(x_at + ahead)
                w_next, v_next = tl.load(w_at + ahead).to(tl.float32), tl.load(v_at + ahead).to(tl.float32)
            x_RK = _load_rows(x, x_tiles, source, first, begin, K, STEP)
            part = tl.dot(x_RK, w_tiles.load([w_row, begin]).T)
            total += part * (x_scale * w_scale)[:, None] if IN_BLOCKS else part
            if HALVES == 2:
                part = tl.dot(x_RK, w_tiles.load([w_row + APART, begin]).T)
                second += part * (x_scale * v_scale)[:, None] if IN_BLOCKS else part
        column = left + tl.arange(0, COLUMNS)
        bias = biases + place.to(tl.int64) * HEIGHT if biases is not None else None
        total = _finished(total, x_next, weight_scales, bias, column, HEIGHT, IN_BLOCKS)
        if HALVES == 2:
            second = _finished(second, x_next, weight_scales, bias, column + APART, HEIGHT, IN_BLOCKS)
        if GATE > 0:
            _store(gated(total, second, GATE), out, out_scales, first, end, column, N, STEP, ROWS, IS_WHOLE)
        else:
            _store(total, out, out_scales, first, end, column, N, STEP, ROWS, IS_WHOLE)
            if HALVES == 2:
                _store(second, out, out_scales, first, end, column + COLUMNS, N, STEP, ROWS, IS_WHOLE)
