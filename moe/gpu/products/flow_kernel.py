# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator"
"""The grouped product of plain weights and many rows on Hopper, as a Triton kernel; launched by `grouped`.

It gives the bits of `grouped_kernel`, and differs in three ways:

- The copy engine (TMA) loads weights, and rows that need no map, by descriptors: no thread computes their addresses.
- Rows are the left factor. The gate's and up's columns form one right factor of 256 columns, so that a warp group takes the
  widest instruction, which reads least shared memory per product.
- The loops over tiles and over inputs become one (`flatten`). So the first copies of a program's next tile run while it
  finishes the one before.

Ideas: Triton's persistent matrix product with descriptors, CUTLASS' persistent grouped GEMM. Rejected: an earlier copy of
mapped rows in order, which costs three to eight times what it saves.

Legend: P pairs (rows sorted by slot), N out features, K in features, S slots, W weights in memory.
"""

import triton
import triton.language as tl

from attention.gpu.pages import bound
from moe.gpu.products.grouped_kernel import end_tiles, find_rows, find_tile, gated


@triton.jit
def _load_rows(x, x_tiles, source, is_pair, first, begin, K: tl.constexpr, INNER: tl.constexpr):
    """Load [rows, INNER] by a descriptor, or from the rows of `source`."""
    if x_tiles is not None:
        return x_tiles.load([first, begin])
    else:
        inner = begin + tl.arange(0, INNER)
        is_read = is_pair[:, None]
        if K % INNER != 0:
            is_read = is_read & (inner < K)[None, :]
        # The rows' addresses are computed here, where the compiler knows that K is a multiple of 16 bytes.
        return tl.load(x + (source * K)[:, None] + inner[None, :], mask=is_read, other=0.0)


@triton.jit
def _finished(total, row_scales, biases, column, N: tl.constexpr):
    """Multiply sums with the scales of the weight's rows, and add biases."""
    if row_scales is not None:
        total *= tl.load(row_scales + column, mask=column < N, other=0.0)[None, :]
    if biases is not None:
        total += tl.load(biases + column, mask=column < N, other=0.0).to(tl.float32)[None, :]
    return total


@triton.jit
def _store(out, value, pair, end, column, N: tl.constexpr):
    is_out = (pair < end)[:, None] & (column < N)[None, :]
    tl.store(out + pair[:, None] * N + column[None, :], value.to(out.dtype.element_ty), mask=is_out)


@triton.jit
def flow_rows(
    x, x_tiles, rows, w_tiles, row_scales, biases, places, offsets, out,
    S: tl.constexpr, S_PAD: tl.constexpr, N: tl.constexpr, K: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    INNER: tl.constexpr, GROUP: tl.constexpr, GATE: tl.constexpr,
):  # fmt: skip
    """Program (tiles of rows and columns, in turn).

    Args:
        x_tiles: Descriptor of the rows, in blocks of [ROWS, INNER]. Without it, `x` points to
            the rows, and `rows` may map them.
        w_tiles: Descriptor of [W * SIDES, N, K], in blocks of [SIDES, COLUMNS, INNER]. SIDES is 2 with a gate (the gate's
            weight, then up's), otherwise 1.
    """
    SIDES: tl.constexpr = 2 if GATE > 0 else 1
    HALF: tl.constexpr = COLUMNS if GATE > 0 else COLUMNS // 2
    HEIGHT: tl.constexpr = N * SIDES
    COLUMN_TILES: tl.constexpr = (N + COLUMNS - 1) // COLUMNS
    end_tile = end_tiles(offsets, S, S_PAD, ROWS)
    num_tiles = tl.max(end_tile, axis=0)
    stop = num_tiles * COLUMN_TILES
    for at in tl.range(bound(tl.program_id(0)), bound(stop), bound(tl.num_programs(0)), flatten=True):
        tile, column_tile = find_tile(at, num_tiles, COLUMN_TILES, GROUP)
        slot, first, end = find_rows(offsets, end_tile, tile, S, S_PAD, ROWS)
        pair = first + tl.arange(0, ROWS)
        is_pair = pair < end
        source = tl.load(rows + pair, mask=is_pair, other=0) if rows is not None else pair
        place = tl.load(places + slot)
        total = tl.zeros([ROWS, SIDES * COLUMNS], tl.float32)
        for begin in range(0, K, INNER):
            x_RK = _load_rows(x, x_tiles, source, is_pair, first.to(tl.int32), begin, K, INNER)
            w_NK = tl.reshape(
                w_tiles.load([place * SIDES, column_tile * COLUMNS, begin]), [SIDES * COLUMNS, INNER]
            )
            total = tl.dot(x_RK, w_NK.T, total, input_precision="ieee")
        left, right = tl.split(tl.permute(tl.reshape(total, [ROWS, 2, HALF]), [0, 2, 1]))
        column = column_tile * COLUMNS + tl.arange(0, HALF)
        line = place.to(tl.int64) * (N * SIDES)
        scale = row_scales + line if row_scales is not None else None
        bias = biases + line if biases is not None else None
        if GATE > 0:
            left = _finished(left, scale, bias, column, N)
            right = _finished(right, scale, bias, column + N, HEIGHT)
            _store(out, gated(left, right, GATE), pair, end, column, N)
        else:
            _store(out, _finished(left, scale, bias, column, N), pair, end, column, N)
            _store(out, _finished(right, scale, bias, column + HALF, N), pair, end, column + HALF, N)
