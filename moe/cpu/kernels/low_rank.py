"""Kernels for LoRA adapters: `y += scale * (x @ A) @ B` for each row, with its own adapter's A and B of float32 or bfloat16.

Every sum has a fixed order, first over inputs, then over ranks, so a row's bits depend on the row and its adapter alone. Rows
without an adapter are not touched. A tile is one row; a program row without such rows has no tiles.

Idea: Punica's SGMV (arXiv 2310.18547), which groups rows by adapter; here rows read their factors from the cache one by one, because
a CPU's step has few rows for each adapter.

Legend: T rows, K input features, N output features, R rank (W: rounded up to vectors), P pairs (row, choice), G groups of pairs.
"""

from collections.abc import Callable
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
_CHAINS = 4  # sums of `_shrink`, so that an addition need not wait for the one before


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


@intrinsic
def _shrink(
    _typing: Any, x: Any, k: Any, a: Any, a_stride: Any, low: Any, following: Any, is_bf16: Any
) -> Any:
    """Compute 16 ranks of `x @ A`: a sum for each of k = 0, 1, 2, 3 modulo 4, which are added in pairs.

    Args:
        x: Address of [K] float32. k: K.
        a: Address of A's column of the first rank. a_stride: Bytes between two rows of A.
        low: Address of the 16 results.
        following: Address of what is read next, at least as long as A if possible. It is prefetched.
    """

    def codegen(context: Any, builder: ir.IRBuilder, _signature: Any, args: list[ir.Value]) -> Any:
        x, k, a, a_stride, low, following, is_bf16 = args
        sums = [cgutils.alloca_once(builder, F32V) for _ in range(_CHAINS)]
        whole = builder.and_(k, ir.Constant(I64, -_CHAINS))
        chains = [ir.Constant(I64, chain) for chain in range(_CHAINS)]

        def emit(bf16: bool) -> None:
            def add(index: ir.Value, total: ir.Value) -> None:
                offset = builder.mul(index, a_stride)
                at = builder.add(a, offset)
                prefetch(builder, builder.add(at, ir.Constant(I64, AHEAD_BYTES)))
                prefetch(builder, builder.add(following, offset))
                row = load_weights(builder, at, bf16)
                _add_to(builder, total, _scalar(builder, x, index), row)

            for total in sums:
                builder.store(constant(0.0), total)
            with cgutils.for_range_slice(builder, chains[0], whole, ir.Constant(I64, _CHAINS), I64) as (
                index,
                _,
            ):
                for chain, total in zip(chains, sums, strict=True):
                    add(builder.add(index, chain), total)
            with cgutils.for_range(builder, k, start=whole) as loop:
                add(loop.index, sums[0])
            zero, one, two, three = (builder.load(total) for total in sums)
            store(builder, builder.fadd(builder.fadd(zero, one), builder.fadd(two, three)), low)

        _for_each_type(builder, is_bf16, emit)
        return context.get_dummy_value()

    return types.void(*[types.int64] * 6, types.boolean), codegen


def _expander(vectors: int) -> Any:
    """Return an intrinsic that adds `low @ B` to 16 outputs per vector, in the order of the ranks.

    Its arguments: the address of float32 values of the ranks, their number, the address of B's first column of these outputs, the bytes
    between two rows of B, the address of the outputs, whether B is bfloat16.
    """

    @intrinsic
    def expand(_typing: Any, low: Any, rank: Any, b: Any, b_stride: Any, y: Any, is_bf16: Any) -> Any:
        def codegen(context: Any, builder: ir.IRBuilder, _signature: Any, args: list[ir.Value]) -> Any:
            low, rank, b, b_stride, y, is_bf16 = args
            outputs = [builder.add(y, ir.Constant(I64, vector * _VECTOR_BYTES)) for vector in range(vectors)]
            sums = [cgutils.alloca_once(builder, F32V) for _ in outputs]

            def emit(bf16: bool) -> None:
                vector_bytes = LANES * (2 if bf16 else 4)
                for output, total in zip(outputs, sums, strict=True):
                    builder.store(load(builder, output), total)
                with cgutils.for_range(builder, rank) as loop:
                    row = builder.add(b, builder.mul(loop.index, b_stride))
                    factor = _scalar(builder, low, loop.index)
                    for vector, total in enumerate(sums):
                        at = builder.add(row, ir.Constant(I64, vector * vector_bytes))
                        _add_to(builder, total, factor, load_weights(builder, at, bf16))
                for output, total in zip(outputs, sums, strict=True):
                    store(builder, builder.load(total), output)

            _for_each_type(builder, is_bf16, emit)
            return context.get_dummy_value()

        return types.void(*[types.int64] * 5, types.boolean), codegen

    return expand


_expand_64, _expand_16 = _expander(4), _expander(1)


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
def _add_low_rank(x, k, entry, y, n):  # type: ignore[no-untyped-def]
    about = words(entry, ENTRY_WORDS)
    a, b, rank, is_bf16 = about[0], about[1], about[2], about[3] >> 32 != 0
    if rank == 0:
        return
    scale = floats(entry + _SCALE_AT, 1)[0]
    size = 2 if is_bf16 else 4
    width = (rank + LANES - 1) // LANES * LANES
    low = np.empty(width, np.float32)
    low_at = address_of(low)
    for first in range(0, width, LANES):
        _shrink(x, k, a + first * size, width * size, low_at + first * 4, b, is_bf16)
    for each in range(rank):
        low[each] *= scale
    column = 0
    while column + 4 * LANES <= n:
        _expand_64(low_at, rank, b + column * size, n * size, y + column * 4, is_bf16)
        column += 4 * LANES
    while column + LANES <= n:
        _expand_16(low_at, rank, b + column * size, n * size, y + column * 4, is_bf16)
        column += LANES
    if column < n:
        rest = floats(y, n)
        for each in range(rank):
            for at in range(column, n):
                rest[at] += low[each] * _value(b + (each * n + at) * size, is_bf16)


def _adapt(tile, x, x_stride, k, adapters_at, table, out, out_stride, n, rows_at):  # type: ignore[no-untyped-def]
    """Add every row's low-rank product.

    Args:
        x: Address of [T, K] float32. x_stride: Bytes between two rows.
        adapters_at: Address of [T] int64, the place of each row's adapter, or -1.
        table: Address of the entries of all places.
        out: Address of [T, N] float32. out_stride: Bytes between two rows.
        rows_at: Address of T, read when the program runs.
    """
    rows = words(rows_at, 1)[0]
    if tile < 0:
        return rows
    place = words(adapters_at, rows)[tile]
    if place >= 0:
        _add_low_rank(x + tile * x_stride, k, table + place * _ENTRY_BYTES, out + tile * out_stride, n)
    return 0


def _adapt_pairs(  # type: ignore[no-untyped-def]
    tile, x, x_stride, row_of, k, offsets_at, num_slots, copies, count_at, table, out, out_stride, n,
):  # fmt: skip
    """Add the low-rank products of experts to pairs that are sorted by group.

    Args:
        x: Address of float32 rows of K. row_of: Address of every pair's row, or 0 if pairs have their own rows.
        offsets_at: Address of [G + 1] int64; pairs [offsets[g], offsets[g + 1]) belong to group g = slot * copies + copy. Copy 0 is of
            rows without an adapter, copy c of the adapter at place c - 1: entry (c - 1) * S + slot of the table.
        num_slots: S. copies: G / S.
        count_at: Address of the number of pairs, or of 0 if none has an adapter.
        out: Address of [P, N] float32, at pair 0.
    """
    num_groups = num_slots * copies
    offsets = words(offsets_at, num_groups + 1)
    if tile < 0:
        return words(count_at, 1)[0]
    pair = tile
    low, high = 0, num_groups  # offsets[low] <= pair < offsets[high]
    while high - low > 1:
        middle = (low + high) // 2
        if offsets[middle] <= pair:
            low = middle
        else:
            high = middle
    slot, copy = low // copies, low % copies
    if copy == 0:
        return 0
    row = pair
    if row_of != 0:
        row = words(row_of, pair + 1)[pair]
    _add_low_rank(
        x + row * x_stride,
        k,
        table + ((copy - 1) * num_slots + slot) * _ENTRY_BYTES,
        out + pair * out_stride,
        n,
    )
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
    if tile < 0:
        return offsets[num_groups] - offsets[0]
    row = offsets[0] + tile
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
