"""Kernels for LoRA adapters: `y += x @ A @ B` for each row, with its own adapter's A and B.

Every sum has a fixed order, first over inputs, then over ranks, so a row's bits depend on the row and its adapter alone. Rows
without an adapter are not touched. A tile is one row; a program row without such rows has no tiles.

Idea: Punica's SGMV (arXiv 2310.18547), which groups rows by adapter; here rows read their factors from the cache one by one, because
a CPU's step has few rows for each adapter.

Legend: T rows, K input features, N output features, R rank (W: rounded up to vectors), P pairs (row, choice), G groups of pairs.
"""

from typing import NamedTuple

import numpy as np
from numba import njit
from torch import Tensor

from attention.cpu.tiles import LANES, TILES_VERSION, silu_times
from dispatch.compiled.native import floats, words
from dispatch.compiled.team import Kernel, Team, program_of, run
from moe.lora.tables import ENTRY_WORDS, FactorTable

_ENTRY_BYTES = 8 * ENTRY_WORDS
_PRODUCTS_PER_NS = 4  # approximate rate of one thread
_PANEL_BYTES = LANES * 4


@njit(nogil=True)
def _add_product(x, k, matrix, made):  # type: ignore[no-untyped-def]
    # made += x[:k] @ matrix, which has a row of len(made) values for each of x.
    width = len(made)
    index = 0
    while index + 4 <= k:
        one, two, three, four = x[index], x[index + 1], x[index + 2], x[index + 3]
        at = index * width
        for column in range(width):
            made[column] += (one * matrix[at + column] + two * matrix[at + width + column]) + (
                three * matrix[at + 2 * width + column] + four * matrix[at + 3 * width + column]
            )
        index += 4
    while index < k:
        one, at = x[index], index * width
        for column in range(width):
            made[column] += one * matrix[at + column]
        index += 1


@njit(nogil=True)
def _add_low_rank(x, k, entry, y, n):  # type: ignore[no-untyped-def]
    about = words(entry, 3)
    rank = about[2]
    if rank == 0:
        return
    width = (rank + LANES - 1) // LANES * LANES
    low = np.zeros(width, np.float32)
    _add_product(floats(x, k), k, floats(about[0], k * width), low)
    _add_product(low, rank, floats(about[1], rank * n), floats(y, n))


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
