# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator"
"""Triton kernels of products in FP8: quantise rows, and multiply quantised rows with FP8 weights on the FP8 units.

A step multiplies 128 inputs: the tensor cores sum them, and the sum enters a float32 total, times the scales of the rows
and of the weights. Tensor cores add FP8 products with few bits, so no longer sum stays in them (DeepSeek-V3's report,
section 3.3.2; DeepGEMM does the same). All tiles take the same steps. A row is quantised as by DeepSeek-V3's `act_quant`: its
scale is the largest magnitude over 448, and its codes are its values over the scale. Both divisions are rounded correctly, as
on a CPU; a factor instead of a division moves some values to the next code.

A tile of a weight is the left factor, which fills the 64 rows of Hopper's wgmma even with few rows. `fp8_flow_kernel`
multiplies many rows.

With a gate, a program multiplies the gate's and up's features of the same columns and quantises its output, so that the second
product reads FP8.

Legend: T rows, P pairs (rows sorted by slot), N out features, K in features, S slots, B groups of K.
"""

import triton
import triton.language as tl

from moe.gpu.products.grouped_kernel import end_tiles, find_rows, find_tile, gated

STEP_INPUTS = 128  # inputs of a step; of a row's group, too
_LARGEST = tl.constexpr(448.0)  # of e4m3
_LEAST = tl.constexpr(2.0**-100)  # least magnitude that counts, so that a group of zeros has a scale
_SUBNORMAL, _TO_SUBNORMAL = tl.constexpr(2.0**-6), tl.constexpr(1.5 * 2.0**14)


@triton.jit
def to_e4m3(value):
    """Round float32 within +-448 to nearest even. Rounded before the cast, because the interpreter's cast truncates."""
    bits = value.to(tl.int32, bitcast=True)
    normal = ((bits + 0x7FFFF + ((bits >> 20) & 1)) & -0x100000).to(tl.float32, bitcast=True)
    small = (value + _TO_SUBNORMAL) - _TO_SUBNORMAL  # adding leaves multiples of 2^-9
    return tl.where(tl.abs(value) < _SUBNORMAL, small, normal).to(tl.float8e4nv)


@triton.jit
def scale_of(largest):
    """Return the scale of groups with these largest magnitudes."""
    return tl.math.div_rn(tl.maximum(largest, _LEAST), _LARGEST)


@triton.jit(do_not_specialize=["groups"])
def quantise_groups(x, codes, scales, groups, K: tl.constexpr, STEP: tl.constexpr, GROUPS: tl.constexpr):
    """Program (groups of STEP inputs, of any rows). Scales are [T, B]; a row's last group may be short."""
    PER_ROW: tl.constexpr = (K + STEP - 1) // STEP
    group = tl.program_id(0).to(tl.int64) * GROUPS + tl.arange(0, GROUPS)
    dim = group[:, None] % PER_ROW * STEP + tl.arange(0, STEP)[None, :]
    at = group[:, None] // PER_ROW * K + dim
    is_in = (group < groups)[:, None] & (dim < K)
    value = tl.load(x + at, mask=is_in, other=0.0).to(tl.float32)
    scale = scale_of(tl.max(tl.abs(value), axis=1))
    tl.store(codes + at, to_e4m3(tl.math.div_rn(value, scale[:, None])), mask=is_in)
    tl.store(scales + group, scale, mask=group < groups)


@triton.jit
def quantise_whole_rows(x, codes, scales, K: tl.constexpr, K_PAD: tl.constexpr):
    """Program (row). Scales are [T, 1]."""
    row, dim = tl.program_id(0).to(tl.int64), tl.arange(0, K_PAD)
    value = tl.load(x + row * K + dim, mask=dim < K, other=0.0).to(tl.float32)
    scale = scale_of(tl.max(tl.abs(value), axis=0))
    tl.store(codes + row * K + dim, to_e4m3(tl.math.div_rn(value, scale)), mask=dim < K)
    tl.store(scales + row, scale)


@triton.jit
def _multiplied(
    total, x_KR, x_scale, codes, scales, column, begin, HEIGHT: tl.constexpr, K: tl.constexpr, STEP: tl.constexpr,
    BLOCK: tl.constexpr, SCALE_ROWS: tl.constexpr, IS_WHOLE: tl.constexpr, IS_SHARED: tl.constexpr,
):  # fmt: skip
    """Add the product of a step, [columns, rows]."""
    inner = begin + tl.arange(0, STEP)
    at = codes + column[:, None] * K + inner[None, :]
    if IS_WHOLE and K % STEP == 0:
        w_NK = tl.load(at)
    else:
        w_NK = tl.load(at, mask=(column < HEIGHT)[:, None] & (inner < K)[None, :], other=0.0)
    BLOCKS: tl.constexpr = (K + BLOCK - 1) // BLOCK
    if BLOCK < K:
        if IS_SHARED:  # one scale for the whole tile
            at_scale = scales + tl.min(column, axis=0) // SCALE_ROWS * BLOCKS + begin // BLOCK
            factor = (x_scale * tl.load(at_scale))[None, :]
        else:
            each = tl.load(
                scales + column // SCALE_ROWS * BLOCKS + begin // BLOCK, mask=column < HEIGHT, other=0.0
            )
            factor = x_scale[None, :] * each.to(tl.float32)[:, None]
    part = tl.dot(w_NK, x_KR)
    return total + part * factor if BLOCK < K else total + part


@triton.jit
def _finished(
    total, x_scale, scales, biases, column, HEIGHT: tl.constexpr, K: tl.constexpr, BLOCK: tl.constexpr,
    SCALE_ROWS: tl.constexpr,
):  # fmt: skip
    """Multiply sums with scales of whole rows, and add biases."""
    if BLOCK >= K:
        each = tl.load(scales + column // SCALE_ROWS, mask=column < HEIGHT, other=0.0).to(tl.float32)
        total *= x_scale[None, :] * each[:, None]
    if biases is not None:
        total += tl.load(biases + column, mask=column < HEIGHT, other=0.0).to(tl.float32)[:, None]
    return total


@triton.jit
def _store(
    value, out, out_scales, pair, is_pair, column, N: tl.constexpr, STEP: tl.constexpr, IS_WHOLE: tl.constexpr
):
    """Write [columns, rows]; in FP8 if there are scales, for a tile of one group."""
    is_out = is_pair[None, :] if IS_WHOLE else (column < N)[:, None] & is_pair[None, :]
    if out_scales is not None:
        GROUPS: tl.constexpr = (N + STEP - 1) // STEP
        scale = scale_of(tl.max(tl.where(is_out, tl.abs(value), 0.0), axis=0))
        tl.store(out_scales + pair * GROUPS + tl.min(column, axis=0) // STEP, scale, mask=is_pair)
        value = to_e4m3(tl.math.div_rn(value, scale[None, :]))
    tl.store(out + column[:, None] + pair[None, :] * N, value.to(out.dtype.element_ty), mask=is_out)


@triton.jit
def grouped_fp8_rows(
    x, x_scales, rows, codes, scales, biases, places, offsets, out, out_scales,
    S: tl.constexpr, S_PAD: tl.constexpr, N: tl.constexpr, K: tl.constexpr, STEP: tl.constexpr, ROWS: tl.constexpr,
    COLUMNS: tl.constexpr, GROUP: tl.constexpr, GATE: tl.constexpr, BLOCK: tl.constexpr, SCALE_ROWS: tl.constexpr,
):  # fmt: skip
    """Program (tiles of rows and columns, in turn). With a gate, weights have 2 * N rows: N of the gate, then N of up."""
    COLUMN_TILES: tl.constexpr = (N + COLUMNS - 1) // COLUMNS
    end_tile = end_tiles(offsets, S, S_PAD, ROWS)
    num_tiles = tl.max(end_tile, axis=0)
    at = tl.program_id(0)
    while at < num_tiles * COLUMN_TILES:
        tile, column_tile = find_tile(at, num_tiles, COLUMN_TILES, GROUP)
        slot, first, end = find_rows(offsets, end_tile, tile, S, S_PAD, ROWS)
        _multiply_tile(
            x, x_scales, rows, codes, scales, biases, tl.load(places + slot).to(tl.int64), out, out_scales, first, end,
            column_tile * COLUMNS, N, K, STEP, ROWS, COLUMNS, GATE, BLOCK, SCALE_ROWS,
        )  # fmt: skip
        at += tl.num_programs(0)


@triton.jit
def _multiply_tile(
    x, x_scales, rows, codes, scales, biases, place, out, out_scales, first, end, left,
    N: tl.constexpr, K: tl.constexpr, STEP: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, GATE: tl.constexpr,
    BLOCK: tl.constexpr, SCALE_ROWS: tl.constexpr,
):  # fmt: skip
    """Multiply the rows from `first` to `end` with a tile of their slot's weight."""
    HEIGHT: tl.constexpr = 2 * N if GATE > 0 else N
    BLOCKS: tl.constexpr = (K + BLOCK - 1) // BLOCK
    # Whether all columns exist, and whether no tile crosses a block and so has one scale.
    IS_WHOLE: tl.constexpr = N % COLUMNS == 0
    IS_SHARED: tl.constexpr = SCALE_ROWS % COLUMNS == 0 and (GATE == 0 or N % COLUMNS == 0)
    # Rows past the end repeat the last one, so that no load of a step needs a mask; they are not written.
    row = tl.minimum(first + tl.arange(0, ROWS), end - 1)
    column = left + tl.arange(0, COLUMNS)
    source = tl.load(rows + row) if rows is not None else row
    codes += place * (HEIGHT * K)
    scales += place * ((HEIGHT + SCALE_ROWS - 1) // SCALE_ROWS * BLOCKS)
    if biases is not None:
        biases += place * HEIGHT
    total, total_up = tl.zeros([COLUMNS, ROWS], tl.float32), tl.zeros([COLUMNS, ROWS], tl.float32)
    GROUPS: tl.constexpr = 1 if BLOCK >= K else (K + STEP - 1) // STEP
    x_scales += source.to(tl.int32) * GROUPS
    x_scale = tl.load(x_scales)
    for begin in range(0, K, STEP):
        inner = begin + tl.arange(0, STEP)
        at = x + (source[:, None] * K + inner[None, :])
        x_RK = tl.load(at) if K % STEP == 0 else tl.load(at, mask=(inner < K)[None, :], other=0.0)
        if BLOCK < K:
            x_scale = tl.load(x_scales + begin // STEP)
        total = _multiplied(
            total, x_RK.T, x_scale, codes, scales, column, begin, HEIGHT, K, STEP, BLOCK, SCALE_ROWS, IS_WHOLE, IS_SHARED
        )  # fmt: skip
        if GATE > 0:
            total_up = _multiplied(
                total_up, x_RK.T, x_scale, codes, scales, column + N, begin, HEIGHT, K, STEP, BLOCK, SCALE_ROWS,
                IS_WHOLE, IS_SHARED,
            )  # fmt: skip
    total = _finished(total, x_scale, scales, biases, column, HEIGHT, K, BLOCK, SCALE_ROWS)
    if GATE > 0:
        total_up = _finished(total_up, x_scale, scales, biases, column + N, HEIGHT, K, BLOCK, SCALE_ROWS)
        total = gated(total, total_up, GATE)
    pair = first + tl.arange(0, ROWS)
    _store(total, out, out_scales, pair, pair < end, column, N, STEP, IS_WHOLE)
