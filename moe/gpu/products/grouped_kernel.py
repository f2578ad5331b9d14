# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator"
"""The grouped product as a Triton kernel, launched and documented by `grouped`.

A weight's tile is the left factor and the transposed rows are the right one. So weights fill the 64 rows (M) of Hopper's
wgmma even in a decode step, the number of rows can be small, and a quantised weight enters the product from registers.

Legend: P pairs (rows sorted by slot), N out features, K in features, S slots, L lines of a weight.
"""

import triton
import triton.language as tl

from moe.gpu.weights.formats_kernel import (
    blocks_per_line,
    in_order_of_words,
    lifted_sum,
    load_scales,
    load_tile,
    read_scales,
    scale_lifts,
)

# Functions of the two halves of an expert's first product, in registers. All gates but GELU's exact form are
# `up * gate * sigmoid(f(gate))`.
GATES = {"none": 0, "silu": 1, "swiglu_oai": 2, "gelu": 3, "gelu_tanh": 4}
_OAI_LIMIT, _OAI_ALPHA = tl.constexpr(7.0), tl.constexpr(1.702)  # gpt-oss
_TANH_OUTER, _TANH_INNER = tl.constexpr(1.5957691216057308), tl.constexpr(0.044715)  # 2 * sqrt(2 / pi)
_SQRT_HALF = tl.constexpr(0.7071067811865476)


@triton.jit
def gated(gate, up, GATE: tl.constexpr):
    """Apply a gate of `GATES` to float32 tiles."""
    if GATE == 2:
        gate = tl.minimum(gate, _OAI_LIMIT)
        up = tl.minimum(tl.maximum(up, -_OAI_LIMIT), _OAI_LIMIT)
        return (up + 1) * gate / (1 + tl.exp(-_OAI_ALPHA * gate))
    elif GATE == 3:
        return up * gate * 0.5 * (1 + tl.erf(gate * _SQRT_HALF))
    elif GATE == 4:
        return up * gate / (1 + tl.exp(-_TANH_OUTER * (gate + _TANH_INNER * gate * gate * gate)))
    else:
        return up * gate / (1 + tl.exp(-gate))


@triton.jit
def end_tiles(offsets, S: tl.constexpr, S_PAD: tl.constexpr, ROWS: tl.constexpr):
    """Return the number of row tiles up to the end of each slot."""
    slot = tl.arange(0, S_PAD)
    begin = tl.load(offsets + slot, mask=slot < S, other=0)
    end = tl.load(offsets + slot + 1, mask=slot < S, other=0)
    return tl.cumsum(((end - begin + ROWS - 1) // ROWS).to(tl.int32), axis=0)


@triton.jit
def find_rows(offsets, end_tile, tile, S: tl.constexpr, S_PAD: tl.constexpr, ROWS: tl.constexpr):
    """Return the slot of a tile, its first row and the end of the slot's rows."""
    slot = tl.arange(0, S_PAD)
    is_before = (end_tile <= tile) & (slot < S)
    # One reduction finds the slot and the tiles before it: the largest end belongs to the last slot before.
    last = tl.max(tl.where(is_before, end_tile * (2 * S_PAD) + slot + 1, 0), axis=0)
    found, tiles_before = last % (2 * S_PAD), last // (2 * S_PAD)
    first = tl.load(offsets + found) + (tile - tiles_before) * ROWS
    return found, first, tl.load(offsets + found + 1)


@triton.jit
def find_tile(program, num_tiles, COLUMN_TILES: tl.constexpr, GROUP: tl.constexpr):
    """Return the tile of rows and of columns: GROUP tiles of rows share each tile of columns while it is in L2."""
    first = program // (GROUP * COLUMN_TILES) * GROUP
    inside = program % (GROUP * COLUMN_TILES)
    size = tl.minimum(num_tiles - first, GROUP)
    return first + inside % size, inside // size


@triton.jit
def _multiplied(
    total, x_KR, codes, scales, stored, zeros, line, begin, HEIGHT: tl.constexpr, K: tl.constexpr, INNER: tl.constexpr,
    KIND: tl.constexpr, SCALE: tl.constexpr, BLOCK: tl.constexpr, SCALE_ROWS: tl.constexpr, WORD: tl.constexpr,
):  # fmt: skip
    """Add the product of one tile of a weight with the rows, [lines, rows]. Return it with the next tile's scales.

    Scales for whole tiles are read one tile ahead, so that no product waits for them. Copies fetch those within a tile.
    """
    IS_WITHIN: tl.constexpr = KIND != "plain" and BLOCK < INNER and BLOCK < K
    LIFTS: tl.constexpr = scale_lifts(KIND, SCALE, BLOCK, INNER, K, WORD, x_KR.dtype)
    used = stored
    if IS_WITHIN:
        used = load_scales(scales, line, begin, HEIGHT, K, INNER, BLOCK, SCALE_ROWS, LIFTS, SCALE, x_KR.dtype)
    elif KIND != "plain" and BLOCK < K:
        stored = load_scales(
            scales, line, begin + INNER, HEIGHT, K, INNER, BLOCK, SCALE_ROWS, LIFTS, SCALE, x_KR.dtype
        )
    w_LK = load_tile(codes, used, zeros, line, begin, HEIGHT, K, INNER, KIND, SCALE, BLOCK, WORD, x_KR.dtype)
    if KIND != "plain" and BLOCK < K and BLOCK >= INNER:
        part = tl.dot(w_LK, x_KR, input_precision="ieee")
        return total + part * read_scales(used, SCALE)[:, None], stored
    else:
        return tl.dot(w_LK, x_KR, total, input_precision="ieee"), stored


@triton.jit
def _finished(
    total, stored, row_scales, biases, line, HEIGHT: tl.constexpr, K: tl.constexpr, KIND: tl.constexpr,
    SCALE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Multiply sums with scales that hold for a whole row of the weight, and add biases."""
    if KIND != "plain" and BLOCK >= K:
        total *= read_scales(stored, SCALE)[:, None]
    if row_scales is not None:
        total *= tl.load(row_scales + line, mask=line < HEIGHT, other=0.0)[:, None]
    if biases is not None:
        total += tl.load(biases + line, mask=line < HEIGHT, other=0.0).to(tl.float32)[:, None]
    return total


@triton.jit
def grouped_rows(
    x, rows, codes, scales, row_scales, zeros, biases, places, offsets, out,
    S: tl.constexpr, S_PAD: tl.constexpr, N: tl.constexpr, K: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    INNER: tl.constexpr, GROUP: tl.constexpr, GATE: tl.constexpr, KIND: tl.constexpr, SCALE: tl.constexpr,
    BLOCK: tl.constexpr, SCALE_ROWS: tl.constexpr, WORD: tl.constexpr,
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
            x, rows, codes, scales, row_scales, zeros, biases, places, out, slot, first, end, column_tile, N, K, ROWS,
            COLUMNS, INNER, GATE, KIND, SCALE, BLOCK, SCALE_ROWS, WORD,
        )  # fmt: skip
        at += tl.num_programs(0)


@triton.jit
def _multiply_tile(
    x, rows, codes, scales, row_scales, zeros, biases, places, out, slot, first, end, column_tile,
    N: tl.constexpr, K: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, INNER: tl.constexpr,
    GATE: tl.constexpr, KIND: tl.constexpr, SCALE: tl.constexpr, BLOCK: tl.constexpr, SCALE_ROWS: tl.constexpr,
    WORD: tl.constexpr,
):  # fmt: skip
    """Multiply the rows from `first` to `end` with a tile of their slot's weight."""
    HEIGHT: tl.constexpr = 2 * N if GATE > 0 else N
    pair = first + tl.arange(0, ROWS)
    column = column_tile * COLUMNS + tl.arange(0, COLUMNS)
    is_pair = pair < end
    source = tl.load(rows + pair, mask=is_pair, other=0) if rows is not None else pair
    place = tl.load(places + slot).to(tl.int64)
    codes += place * (
        HEIGHT * (K // WORD if WORD > 1 else (K // 2 if (KIND == "e2m1" or KIND == "int4") else K))
    )
    if KIND != "plain":
        BLOCKS: tl.constexpr = blocks_per_line(K, BLOCK)
        scales += place * ((HEIGHT + SCALE_ROWS - 1) // SCALE_ROWS * BLOCKS)
        if zeros is not None:
            zeros += place * (HEIGHT * BLOCKS)
    if row_scales is not None:
        row_scales += place * HEIGHT
    if biases is not None:
        biases += place * HEIGHT
    x_rows = x + source * K
    DTYPE: tl.constexpr = x.dtype.element_ty
    # One tile has the lines of the gate's columns, then those of up's, if their sums need no second set of registers.
    IS_JOINT: tl.constexpr = GATE > 0 and WORD == 8 and BLOCK < INNER and BLOCK < K
    IS_SPLIT: tl.constexpr = GATE > 0 and not IS_JOINT
    line = column
    if IS_JOINT:
        number = tl.arange(0, 2 * COLUMNS)
        line = column_tile * COLUMNS + number % COLUMNS
        line = tl.where(line < N, line + number // COLUMNS * N, HEIGHT)
    line_up = column + N
    total, total_up = tl.zeros([line.shape[0], ROWS], tl.float32), tl.zeros([COLUMNS, ROWS], tl.float32)
    stored, stored_up = 0, 0
    if KIND != "plain" and (BLOCK >= INNER or BLOCK >= K):
        stored = load_scales(scales, line, 0, HEIGHT, K, INNER, BLOCK, SCALE_ROWS, False, SCALE, DTYPE)
        if IS_SPLIT:
            stored_up = load_scales(
                scales, line_up, 0, HEIGHT, K, INNER, BLOCK, SCALE_ROWS, False, SCALE, DTYPE
            )
    for begin in range(0, K, INNER):
        inner = begin + tl.arange(0, INNER)
        is_read = is_pair[None, :]
        if K % INNER != 0:
            is_read = is_read & (inner[:, None] < K)
        x_KR = tl.load(x_rows[None, :] + inner[:, None], mask=is_read, other=0.0)
        if WORD == 4:
            x_KR = in_order_of_words(x_KR, INNER, ROWS, WORD)
        total, stored = _multiplied(
            total, x_KR, codes, scales, stored, zeros, line, begin, HEIGHT, K, INNER, KIND, SCALE, BLOCK, SCALE_ROWS, WORD
        )  # fmt: skip
        if IS_SPLIT:
            total_up, stored_up = _multiplied(
                total_up, x_KR, codes, scales, stored_up, zeros, line_up, begin, HEIGHT, K, INNER, KIND, SCALE, BLOCK,
                SCALE_ROWS, WORD,
            )  # fmt: skip
    total = lifted_sum(total, KIND, SCALE, BLOCK, INNER, K, WORD, DTYPE)
    total = _finished(total, stored, row_scales, biases, line, HEIGHT, K, KIND, SCALE, BLOCK)
    if IS_SPLIT:
        total_up = lifted_sum(total_up, KIND, SCALE, BLOCK, INNER, K, WORD, DTYPE)
        total_up = _finished(total_up, stored_up, row_scales, biases, line_up, HEIGHT, K, KIND, SCALE, BLOCK)
        total = gated(total, total_up, GATE)
    elif IS_JOINT:
        gate, up = tl.split(tl.permute(tl.reshape(total, [2, COLUMNS, ROWS]), [1, 2, 0]))
        total = gated(gate, up, GATE)
    tl.store(
        out + pair[None, :] * N + column[:, None], total.to(out.dtype.element_ty),
        mask=is_pair[None, :] & (column < N)[:, None],
    )  # fmt: skip
