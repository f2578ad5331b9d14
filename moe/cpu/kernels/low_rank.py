"""Kernels for LoRA adapters: `y += scale * (x @ A) @ B` for each row, with its own adapter's A and B of float32 or bfloat16.

Every sum has a fixed order, first over inputs, then over ranks, so a row's bits depend on the row and its adapter alone. Rows
without an adapter are not touched. Rows with the same adapter share the reads of its factors as far as they are in one tile.

Idea: Punica's SGMV (arXiv 2310.18547), which groups rows by adapter. A CPU's step has few rows for each adapter, so reading the
factors takes most of the time: those that come next are prefetched.

Legend: T rows, K input features, N output features, R rank (W: rounded up to vectors), P pairs (row, choice), G groups of pairs.
"""

from collections.abc import Callable
from itertools import chain
from typing import Any, NamedTuple

import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.core import cgutils
from numba.extending import intrinsic
from torch import Tensor

from attention.cpu.adapted_latents import ENTRY_WORDS
from attention.cpu.tiles import (
    AHEAD_BYTES,
    F32,
    F32V,
    I16,
    I32,
    I64,
    LANES,
    MOST_ROWS,
    ROWS,
    TILES_VERSION,
    address_of,
    constant,
    load,
    load_weights,
    prefetch,
    silu_times,
    splat,
    store,
    vector_call,
)
from dispatch.compiled.native import floats, words
from dispatch.compiled.team import Kernel, Team, program_of, run
from moe.lora.tables import FactorTable

_ENTRY_BYTES = 8 * ENTRY_WORDS
_PRODUCTS_PER_NS = 4  # approximate rate of one thread
_SCALE_AT = 24  # in an entry
_PANEL_BYTES = _VECTOR_BYTES = LANES * 4
_LINE_BYTES = 64
_CHAINS = 4  # sums of `_shrinker`, so that an addition need not wait for the one before
# Rows with the same factors that are computed together: with _CHAINS sums each, four fit 32 registers.
_ROWS = 4 if MOST_ROWS > ROWS else 1
_TILES = 16  # of a kernel with at least as many rows; a tile costs about 0.2 us
_MOST_IN_TILE = 32  # rows; finding those with the same adapter takes the square of it


def _scalar(builder: ir.IRBuilder, address: ir.Value, index: ir.Value) -> ir.Value:
    """Emit the load of a float32 of an array."""
    offset = builder.mul(index, ir.Constant(I64, 4))
    return builder.load(builder.inttoptr(builder.add(address, offset), F32.as_pointer()), align=4)


def _add_to(builder: ir.IRBuilder, total: ir.Value, factor: ir.Value, vector: ir.Value) -> None:
    """Emit `total += factor * vector`, rounded once."""
    builder.store(vector_call(builder, "fma", splat(builder, factor), vector, builder.load(total)), total)


def _for_each_type(builder: ir.IRBuilder, is_bf16: ir.Value, emit: Callable[[bool], None]) -> None:
    """Emit code for factors of float32 and of bfloat16. `is_bf16` chooses when it runs."""
    with builder.if_else(is_bf16) as (of_bf16, of_f32):
        with of_bf16:
            emit(True)
        with of_f32:
            emit(False)


def _addresses(builder: ir.IRBuilder, array: ir.Value, rows: int) -> list[ir.Value]:
    """Emit the loads of the addresses in an array of int64."""
    pointer = builder.inttoptr(array, I64.as_pointer())
    return [builder.load(builder.gep(pointer, [ir.Constant(I64, row)])) for row in range(rows)]


def _shrinker(rows: int) -> Any:
    """Return an intrinsic that computes 16 ranks of `x @ A` for rows with the same A: a sum for each of k = 0, 1, 2, 3 modulo 4, which
    are added in pairs.

    Its arguments:
        xs: Address of the addresses of [K] float32 rows. k: K.
        a: Address of A's column of the first rank. a_stride: Bytes between two rows of A.
        lows: Address of the 16 results of the first row. low_stride: Bytes to those of the next one.
        following: Address of what is read next. One line is prefetched for each k, `following_stride` bytes apart.
    """

    @intrinsic
    def shrink(
        _typing: Any, xs: Any, k: Any, a: Any, a_stride: Any, lows: Any, low_stride: Any, following: Any,
        following_stride: Any, is_bf16: Any,
    ) -> Any:  # fmt: skip
        def codegen(context: Any, builder: ir.IRBuilder, _signature: Any, args: list[ir.Value]) -> Any:
            xs, k, a, a_stride, lows, low_stride, following, following_stride, is_bf16 = args
            inputs = _addresses(builder, xs, rows)
            sums = [[cgutils.alloca_once(builder, F32V) for _ in range(_CHAINS)] for _ in range(rows)]
            whole = builder.and_(k, ir.Constant(I64, -_CHAINS))
            zero, step = ir.Constant(I64, 0), ir.Constant(I64, _CHAINS)

            def emit(bf16: bool) -> None:
                def add(index: ir.Value, number: int) -> None:
                    at = builder.add(a, builder.mul(index, a_stride))
                    prefetch(builder, builder.add(at, ir.Constant(I64, AHEAD_BYTES)))
                    prefetch(builder, builder.add(following, builder.mul(index, following_stride)))
                    weights = load_weights(builder, at, bf16)
                    for x, chains in zip(inputs, sums, strict=True):
                        _add_to(builder, chains[number], _scalar(builder, x, index), weights)

                for total in (each for chains in sums for each in chains):
                    builder.store(constant(0.0), total)
                with cgutils.for_range_slice(builder, zero, whole, step, I64) as (index, _):
                    for number in range(_CHAINS):
                        add(builder.add(index, ir.Constant(I64, number)), number)
                with cgutils.for_range(builder, k, start=whole) as loop:
                    add(loop.index, 0)
                for row, chains in enumerate(sums):
                    first, second, third, fourth = (builder.load(total) for total in chains)
                    total = builder.fadd(builder.fadd(first, second), builder.fadd(third, fourth))
                    store(builder, total, builder.add(lows, builder.mul(low_stride, ir.Constant(I64, row))))

            _for_each_type(builder, is_bf16, emit)
            return context.get_dummy_value()

        return types.void(*[types.int64] * 8, types.boolean), codegen

    return shrink


def _expander(vectors: int, rows: int) -> Any:
    """Return an intrinsic that adds `low @ B` to 16 outputs per vector of rows with the same B, in the order of the ranks.

    Its arguments:
        lows: Address of the float32 values of the first row's ranks. low_stride: Bytes to those of the next row. rank: Their number.
        b: Address of B's first column of these outputs. b_stride: Bytes between two rows of B.
        ys: Address of the addresses of [N] float32 rows. offset: Bytes to the first of these outputs.
        following: Address of what is read next. Two lines are prefetched for each rank.
    """

    @intrinsic
    def expand(
        _typing: Any, lows: Any, low_stride: Any, rank: Any, b: Any, b_stride: Any, ys: Any, offset: Any,
        following: Any, is_bf16: Any,
    ) -> Any:  # fmt: skip
        def codegen(context: Any, builder: ir.IRBuilder, _signature: Any, args: list[ir.Value]) -> Any:
            lows, low_stride, rank, b, b_stride, ys, offset, following, is_bf16 = args
            outputs = [
                [
                    builder.add(y, builder.add(offset, ir.Constant(I64, vector * _VECTOR_BYTES)))
                    for vector in range(vectors)
                ]
                for y in _addresses(builder, ys, rows)
            ]
            low_of = [
                builder.add(lows, builder.mul(low_stride, ir.Constant(I64, row))) for row in range(rows)
            ]
            sums = [[cgutils.alloca_once(builder, F32V) for _ in range(vectors)] for _ in range(rows)]

            def emit(bf16: bool) -> None:
                vector_bytes = LANES * (2 if bf16 else 4)
                for output, total in zip(chain(*outputs), chain(*sums), strict=True):
                    builder.store(load(builder, output), total)
                with cgutils.for_range(builder, rank) as loop:
                    begin = builder.add(b, builder.mul(loop.index, b_stride))
                    ahead = builder.add(following, builder.mul(loop.index, ir.Constant(I64, 2 * _LINE_BYTES)))
                    for line in range(2):
                        prefetch(builder, builder.add(ahead, ir.Constant(I64, line * _LINE_BYTES)))
                    factors = [_scalar(builder, low, loop.index) for low in low_of]
                    for vector in range(vectors):
                        at = builder.add(begin, ir.Constant(I64, vector * vector_bytes))
                        weights = load_weights(builder, at, bf16)
                        for factor, of_row in zip(factors, sums, strict=True):
                            _add_to(builder, of_row[vector], factor, weights)
                for output, total in zip(chain(*outputs), chain(*sums), strict=True):
                    store(builder, builder.load(total), output)

            _for_each_type(builder, is_bf16, emit)
            return context.get_dummy_value()

        return types.void(*[types.int64] * 8, types.boolean), codegen

    return expand


_shrink_one, _shrink_rows = _shrinker(1), _shrinker(_ROWS)
_expand_one_64, _expand_rows_64, _expand_one_16 = _expander(4, 1), _expander(4, _ROWS), _expander(1, 1)


@intrinsic
def _value(_typing: Any, address: Any, is_bf16: Any) -> Any:
    """Load the float32 or bfloat16 at an address."""

    def codegen(_context: Any, builder: ir.IRBuilder, _signature: Any, args: list[ir.Value]) -> Any:
        address, is_bf16 = args
        found = cgutils.alloca_once(builder, F32)

        def emit(bf16: bool) -> None:
            if bf16:
                half = builder.load(builder.inttoptr(address, I16.as_pointer()), align=2)
                wide = builder.shl(builder.zext(half, I32), ir.Constant(I32, 16))
                builder.store(builder.bitcast(wide, F32), found)
            else:
                builder.store(builder.load(builder.inttoptr(address, F32.as_pointer()), align=4), found)

        _for_each_type(builder, is_bf16, emit)
        return builder.load(found)

    return types.float32(types.int64, types.boolean), codegen


@njit(nogil=True)
def _add_low_rank(xs, num, k, entry, ys, n, following):  # type: ignore[no-untyped-def]
    """Add the product of one adapter to `num` rows, at most _ROWS.

    Args:
        xs, ys: int64 [_ROWS], the addresses of the rows' inputs and outputs; after the last row, its addresses again.
        entry: Address of the table's entry.
        following: Address of what is read next, or 0.
    """
    about = words(entry, ENTRY_WORDS)
    a, b, rank, is_bf16 = about[0], about[1], about[2], about[3] >> 32 != 0
    if rank == 0:
        return
    if following == 0:
        following = a
    scale = floats(entry + _SCALE_AT, 1)[0]
    size = 2 if is_bf16 else 4
    width = (rank + LANES - 1) // LANES * LANES
    low = np.empty(_ROWS * width, np.float32)
    low_at, stride = address_of(low), width * 4
    inputs, outputs = address_of(xs), address_of(ys)
    for first in range(0, width, LANES):
        at, to, ahead = a + first * size, low_at + first * 4, (rank * n * size + k - 1) // k
        if num == 1:
            _shrink_one(inputs, k, at, width * size, to, stride, b, ahead, is_bf16)
        else:
            _shrink_rows(inputs, k, at, width * size, to, stride, b, ahead, is_bf16)
    for each in range(width if num == 1 else _ROWS * width):
        low[each] *= scale
    column = 0
    while column + 4 * LANES <= n:
        at = b + column * size
        if num == 1:
            _expand_one_64(low_at, stride, rank, at, n * size, outputs, column * 4, following, is_bf16)
        else:
            _expand_rows_64(low_at, stride, rank, at, n * size, outputs, column * 4, following, is_bf16)
        following += rank * 2 * _LINE_BYTES
        column += 4 * LANES
    while column + LANES <= n:
        at = b + column * size
        for row in range(num):
            low_row, output = low_at + row * stride, outputs + row * 8
            _expand_one_16(low_row, stride, rank, at, n * size, output, column * 4, following, is_bf16)
        column += LANES
    if column < n:
        for row in range(num):
            rest = floats(ys[row], n)
            for each in range(rank):
                for at in range(column, n):
                    rest[at] += low[row * width + each] * _value(b + (each * n + at) * size, is_bf16)


@njit(nogil=True)
def _rows_of_tile(rows):  # type: ignore[no-untyped-def]
    return min(max(1, rows // _TILES), _MOST_IN_TILE)


def _adapt(tile, x, x_stride, k, adapters_at, table, out, out_stride, n, rows_at):  # type: ignore[no-untyped-def]
    """Add every row's low-rank product. Rows of a tile with the same adapter are computed together.

    Args:
        x: Address of [T, K] float32. x_stride: Bytes between two rows.
        adapters_at: Address of [T] int64, the place of each row's adapter, or -1.
        table: Address of the entries of all places.
        out: Address of [T, N] float32. out_stride: Bytes between two rows.
        rows_at: Address of T, read when the program runs.
    """
    rows = words(rows_at, 1)[0]
    most = _rows_of_tile(rows)
    if tile < 0:
        return (rows + most - 1) // most
    adapters = words(adapters_at, rows)
    first, end = tile * most, min(rows, (tile + 1) * most)
    xs, ys = np.empty(_ROWS, np.int64), np.empty(_ROWS, np.int64)
    for row in range(first, end):
        place = adapters[row]
        if place < 0:
            continue
        before = 0  # rows of the tile before this one with the same adapter
        for other in range(first, row):
            before += adapters[other] == place
        if before % _ROWS != 0:
            continue  # computed with an earlier one
        num, following = 0, 0
        for other in range(row, end):
            if adapters[other] == place and num < _ROWS:
                xs[num], ys[num] = x + other * x_stride, out + other * out_stride
                num += 1
            elif adapters[other] >= 0 and following == 0:
                following = words(table + adapters[other] * _ENTRY_BYTES, 1)[0]
        xs[num:], ys[num:] = xs[num - 1], ys[num - 1]
        _add_low_rank(xs, num, k, table + place * _ENTRY_BYTES, ys, n, following)
    return 0


@njit(nogil=True)
def _group_of(pair, offsets, group):  # type: ignore[no-untyped-def]
    """Return the group of a pair, which is not before `group`."""
    low, high = group, len(offsets) - 1  # offsets[low] <= pair < offsets[high]
    while high - low > 1:
        middle = (low + high) // 2
        if offsets[middle] <= pair:
            low = middle
        else:
            high = middle
    return low


@njit(nogil=True)
def _entry_of(group, num_slots, copies):  # type: ignore[no-untyped-def]
    """Return the bytes from the table's begin to the entry of a group with an adapter."""
    return ((group % copies - 1) * num_slots + group // copies) * _ENTRY_BYTES


def _adapt_pairs(  # type: ignore[no-untyped-def]
    tile, x, x_stride, row_of, k, offsets_at, num_slots, copies, count_at, table, out, out_stride, n,
):  # fmt: skip
    """Add the low-rank products of experts to pairs that are sorted by group. Pairs of a group in a tile are computed together.

    Args:
        x: Address of float32 rows of K. row_of: Address of every pair's row, or 0 if pairs have their own rows.
        offsets_at: Address of [G + 1] int64; pairs [offsets[g], offsets[g + 1]) belong to group g = slot * copies + copy. Copy 0 is of
            rows without an adapter, copy c of the adapter at place c - 1: entry (c - 1) * S + slot of the table.
        num_slots: S. copies: G / S.
        count_at: Address of the number of pairs, or of 0 if none has an adapter.
        out: Address of [P, N] float32, at pair 0.
    """
    pairs = words(count_at, 1)[0]
    most = _rows_of_tile(pairs)
    if tile < 0:
        return (pairs + most - 1) // most
    offsets = words(offsets_at, num_slots * copies + 1)
    pair, end = tile * most, min(pairs, (tile + 1) * most)
    group = _group_of(pair, offsets, 0)
    xs, ys = np.empty(_ROWS, np.int64), np.empty(_ROWS, np.int64)
    while pair < end:
        has_adapter, last = group % copies > 0, min(end, offsets[group + 1])
        if has_adapter:
            last = min(last, pair + _ROWS)
        following, following_group = 0, group
        if last < end:
            following_group = _group_of(last, offsets, group)
            if following_group % copies > 0:
                following = words(table + _entry_of(following_group, num_slots, copies), 1)[0]
        if has_adapter:
            for each in range(_ROWS):
                at = min(pair + each, last - 1)
                row = at
                if row_of != 0:
                    row = words(row_of, at + 1)[at]
                xs[each], ys[each] = x + row * x_stride, out + at * out_stride
            entry = table + _entry_of(group, num_slots, copies)
            _add_low_rank(xs, last - pair, k, entry, ys, n, following)
        pair, group = last, following_group
    return 0


def _split(tile, offsets_at, num_slots, copies, all_at, fused_at, plain_at):  # type: ignore[no-untyped-def]
    """Write offsets by slot from those by group.

    Args:
        all_at: Address of [S + 1] int64, of all pairs.
        fused_at, plain_at: Addresses of the same. If no pair has an adapter the first is as `all`, otherwise the second; the other has
            no pairs. So the gate is part of the product, or comes after the adapters' products.
    """
    if tile < 0:
        return 1
    offsets = words(offsets_at, num_slots * copies + 1)
    every, fused, plain = (
        words(all_at, num_slots + 1),
        words(fused_at, num_slots + 1),
        words(plain_at, num_slots + 1),
    )
    adapted = 0
    for slot in range(num_slots):
        adapted += offsets[(slot + 1) * copies] - offsets[slot * copies + 1]
    for slot in range(num_slots + 1):
        every[slot] = offsets[slot * copies]
        fused[slot] = 0 if adapted > 0 else offsets[slot * copies]
        plain[slot] = offsets[slot * copies] if adapted > 0 else 0
    return 0


def _silu_rows(tile, x, x_stride, panels, offsets_at, num_groups, out, out_stride):  # type: ignore[no-untyped-def]
    """Compute silu(gate) * up of rows [gate | up], as `products.GROUPED` does for rows without adapters.

    Args:
        x: Address of [P, 2 * panels * 16] float32.
        offsets_at: Address of [G + 1] int64; rows [offsets[0], offsets[G]) are computed.
        out: Address of [P, panels * 16] float32.
    """
    offsets = words(offsets_at, num_groups + 1)
    first, rows = offsets[0], offsets[num_groups] - offsets[0]
    most = _rows_of_tile(rows)
    if tile < 0:
        return (rows + most - 1) // most
    for row in range(first + tile * most, first + min(rows, (tile + 1) * most)):
        gate, to = x + row * x_stride, out + row * out_stride
        for panel in range(panels):
            at = panel * _PANEL_BYTES
            silu_times(gate + at, gate + (panels + panel) * _PANEL_BYTES, to + at)
    return 0


ADAPT, ADAPT_PAIRS = Kernel(_adapt, TILES_VERSION), Kernel(_adapt_pairs, TILES_VERSION)
SILU_ROWS, SPLIT = Kernel(_silu_rows, TILES_VERSION), Kernel(_split, TILES_VERSION)


def adapt_row(
    x: int, x_stride: int, k: int, adapters: int, table: FactorTable, out: int, out_stride: int, n: int, rows_at: int
) -> list[int]:  # fmt: skip
    """Return a program row for `_adapt`. Fields are addresses, sizes, and strides in bytes."""
    return ADAPT.row(x, x_stride, k, adapters, table.address, out, out_stride, n, rows_at)


class Groups(NamedTuple):
    """Pairs sorted by group, see `_adapt_pairs`. Fields are addresses, except for the sizes."""

    offsets: int
    num_slots: int
    copies: int
    num_pairs: int


def adapt_pairs_row(
    x: int, x_stride: int, row_of: int, k: int, groups: Groups, table: FactorTable, out: int, out_stride: int, n: int
) -> list[int]:  # fmt: skip
    """Return a program row for `_adapt_pairs`."""
    return ADAPT_PAIRS.row(x, x_stride, row_of, k, *groups, table.address, out, out_stride, n)


def adapt(
    x_TK: Tensor, adapter_T: Tensor, table: FactorTable, out_TN: Tensor, team: Team | None
) -> None:  # fmt: skip
    """Add every row's low-rank product to `out`, in place.

    Args:
        x_TK: [T, K] float32; rows may be strided, columns may not.
        adapter_T: int64 [T or more], contiguous; the place of each row's adapter, or -1.
        out_TN: [T or more, N] float32; rows may be strided, columns may not.
    """
    (rows, k), n = x_TK.shape, out_TN.shape[1]
    assert x_TK.stride(1) == 1 and out_TN.stride(1) == 1 and len(adapter_T) >= rows
    count = np.array((rows,))
    row = adapt_row(
        x_TK.data_ptr(), x_TK.stride(0) * 4, k, adapter_T.data_ptr(), table, out_TN.data_ptr(), out_TN.stride(0) * 4, n,
        count.ctypes.data,
    )  # fmt: skip
    most_rank = int(table.words[:, 2].max(initial=0))
    run(program_of([row]), team, rows * most_rank * (k + n) // _PRODUCTS_PER_NS)
