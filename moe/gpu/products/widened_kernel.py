# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator"
"""Kernels that decode weights into memory, and put rows in the same order of inputs if it differs; see `widened`.

Legend: N out features (columns), K in features, R rows.
"""

import triton
import triton.language as tl

from moe.gpu.weights.formats_kernel import (
    blocks_per_line,
    in_order_of_words,
    lifted_sum,
    load_scales,
    load_tile,
    scale_lifts,
)


@triton.jit
def widen_tiles(
    codes, scales, zeros, places, offsets, out, HEIGHT: tl.constexpr, K: tl.constexpr, COLUMNS: tl.constexpr,
    INNER: tl.constexpr, KIND: tl.constexpr, SCALE: tl.constexpr, BLOCK: tl.constexpr, SCALE_ROWS: tl.constexpr,
    WORD: tl.constexpr,
):  # fmt: skip
    """Run as program (tile of columns and inputs, slot). Slots without rows stay as they are."""
    K_TILES: tl.constexpr = (K + INNER - 1) // INNER
    slot = tl.program_id(1)
    if tl.load(offsets + slot) < tl.load(offsets + slot + 1):
        begin = tl.program_id(0) % K_TILES * INNER
        column = tl.program_id(0) // K_TILES * COLUMNS + tl.arange(0, COLUMNS)
        _widen_tile(
            codes, scales, zeros, tl.load(places + slot).to(tl.int64), out + slot.to(tl.int64) * (HEIGHT * K), column,
            begin, HEIGHT, K, INNER, KIND, SCALE, BLOCK, SCALE_ROWS, WORD,
        )  # fmt: skip


@triton.jit
def _widen_tile(
    codes, scales, zeros, place, out, column, begin, HEIGHT: tl.constexpr, K: tl.constexpr, INNER: tl.constexpr,
    KIND: tl.constexpr, SCALE: tl.constexpr, BLOCK: tl.constexpr, SCALE_ROWS: tl.constexpr, WORD: tl.constexpr,
):  # fmt: skip
    """Store [columns, INNER] of a place's weight as the grouped product multiplies it: decoded and scaled."""
    DTYPE: tl.constexpr = out.dtype.element_ty
    BLOCKS: tl.constexpr = blocks_per_line(K, BLOCK)
    LIFTS: tl.constexpr = scale_lifts(KIND, SCALE, BLOCK, INNER, K, WORD, DTYPE)
    codes += place * (
        HEIGHT * (K // WORD if WORD > 1 else (K // 2 if (KIND == "e2m1" or KIND == "int4") else K))
    )
    scales += place * ((HEIGHT + SCALE_ROWS - 1) // SCALE_ROWS * BLOCKS)
    if zeros is not None:
        zeros += place * (HEIGHT * BLOCKS)
    stored = load_scales(scales, column, begin, HEIGHT, K, INNER, BLOCK, SCALE_ROWS, LIFTS, SCALE, DTYPE)
    value_NK = load_tile(
        codes, stored, zeros, column, begin, HEIGHT, K, INNER, KIND, SCALE, BLOCK, WORD, DTYPE
    )
    value_NK = lifted_sum(value_NK, KIND, SCALE, BLOCK, INNER, K, WORD, DTYPE)  # a power of two: exact
    inner = begin + tl.arange(0, INNER)
    is_in = (column < HEIGHT)[:, None] & (inner < K)[None, :]
    tl.store(out + column[:, None] * K + inner[None, :], value_NK, mask=is_in)


@triton.jit(do_not_specialize=["num_rows"])
def order_rows(
    x, offsets, out, num_rows, S: tl.constexpr, K: tl.constexpr, ROWS: tl.constexpr, INNER: tl.constexpr,
    WORD: tl.constexpr,
):  # fmt: skip
    """Run as program (tile of rows and inputs). Rows after the last pair are left out, if `offsets` [S + 1] is given."""
    K_TILES: tl.constexpr = (K + INNER - 1) // INNER
    if offsets is not None:
        num_rows = tl.load(offsets + S)
    row = (tl.program_id(0) // K_TILES).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    inner = tl.program_id(0) % K_TILES * INNER + tl.arange(0, INNER)
    at = row[None, :] * K + inner[:, None]
    is_in = (row < num_rows)[None, :] & (inner < K)[:, None]
    x_KR = tl.load(x + at, mask=is_in, other=0.0)
    tl.store(out + at, in_order_of_words(x_KR, INNER, ROWS, WORD), mask=is_in)
