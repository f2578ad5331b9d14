"""Kernels for experts that are all on this rank: sort chosen ids into pairs by slot, and sum the experts' outputs.

They do what `dispatch` does between ranks, with the same order and arithmetic: a token's outputs are multiplied and added
in the order of its choices (see `dispatch.cpu_kernels.answers`), so a row's bits do not depend on the number of ranks.

Legend: T rows, K choices, P = T x K pairs, S slots, G groups of pairs, E experts, D hidden dim.
"""

import math

import numpy as np
from numba import njit

from attention.cpu.tiles import TILES_VERSION
from dispatch.compiled.native import floats, now_ns, words
from dispatch.compiled.team import Kernel

_TILE_VALUES = 1 << 14


@njit(nogil=True)
def _copy_of(adapters_at, row):  # type: ignore[no-untyped-def]
    # Of a slot's groups, the one of the row's adapter.
    if adapters_at == 0:
        return 0
    return words(adapters_at, row + 1)[row] + 1


def _sort_pairs(  # type: ignore[no-untyped-def]
    tile, ids_at, choices, slots_at, num_experts, num_slots, offsets_at, row_of_at, pair_of_at, facts, table,
    adapters_at, num_groups,
):  # fmt: skip
    """Sort the pairs by group, then token, then choice, and count them.

    Args:
        ids_at: Address of [T, K] int64. choices: K. slots_at: Address of [E] int64, every expert's slot.
        offsets_at: Address of [G + 1] int64, written: the pairs of group g are [offsets[g], offsets[g + 1]).
        row_of_at, pair_of_at: Addresses of [P] int64, written: each sorted pair's row, and each choice's sorted pair.
        facts: Address of T, padded T and the number of decodes (the first rows); read when the program runs.
        table: Address of [2, E + 1] int64, see `moe.load_counts`; 0 disables counting.
        adapters_at: Address of [T] int64, the place of each row's adapter, or -1. 0: no row has one.
        num_groups: G; see `moe.cpu.experts.PackedExpertLayer.num_groups`.
    """
    if tile < 0:
        return 1
    rows, num_decodes = words(facts, 3)[0], words(facts, 3)[2]
    pairs = rows * choices
    ids, slot_of, offsets = (
        words(ids_at, pairs),
        words(slots_at, num_experts),
        words(offsets_at, num_groups + 1),
    )
    row_of, pair_of = words(row_of_at, pairs), words(pair_of_at, pairs)
    copies = num_groups // num_slots
    offsets[:] = 0
    for pair in range(pairs):
        offsets[slot_of[ids[pair]] * copies + _copy_of(adapters_at, pair // choices) + 1] += 1
    for slot in range(num_groups):
        offsets[slot + 1] += offsets[slot]
    place = offsets[:num_groups].copy()
    for pair in range(pairs):
        slot = slot_of[ids[pair]] * copies + _copy_of(adapters_at, pair // choices)
        row_of[place[slot]] = pair // choices
        pair_of[pair] = place[slot]
        place[slot] += 1
    if table != 0:
        counts = words(table, 2 * (num_experts + 1))
        for pair in range(pairs):
            phase = num_experts + 1 if pair < num_decodes * choices else 0
            counts[phase + ids[pair]] += 1
            counts[phase + num_experts] += 1
    return 0


def _add(  # type: ignore[no-untyped-def]
    tile, answers, pair_of, weights, choices, shared, residual, out, dim, facts,
):  # fmt: skip
    rows, padded = words(facts, 2)[0], words(facts, 2)[1]
    at_once = max(1, _TILE_VALUES // (dim * (choices + 1)))
    if tile < 0:
        return (padded + at_once - 1) // at_once
    made = np.empty(dim, np.float32)
    for row in range(tile * at_once, min((tile + 1) * at_once, padded)):
        total = floats(out + row * dim * 4, dim)
        if row >= rows:
            total[:] = np.float32(0.0)
            continue
        if choices == 0:
            made[:] = floats(answers + row * dim * 4, dim)
        else:
            made[:] = np.float32(0.0)
            for choice in range(row * choices, (row + 1) * choices):
                answer = floats(answers + words(pair_of, (row + 1) * choices)[choice] * dim * 4, dim)
                weight = floats(weights, (row + 1) * choices)[choice]
                for index in range(dim):
                    made[index] += weight * answer[index]
        if shared != 0:
            more = floats(shared + row * dim * 4, dim)
            for index in range(dim):
                made[index] += more[index]
        before = floats(residual + row * dim * 4, dim)
        for index in range(dim):
            total[index] = before[index] + made[index]
    return 0


def _clock(tile, total_ns, sign, scratch):  # type: ignore[no-untyped-def]
    """Add the time, times `sign`, to a word. Two such rows measure what runs between them.

    Args:
        total_ns: Address of an int64. scratch: Address of two.
    """
    if tile < 0:
        return 1
    words(total_ns, 1)[0] += sign * now_ns(scratch)
    return 0


def _share(tile, x, dim, shares, stride, facts):  # type: ignore[no-untyped-def]
    """Compute `x *= sigmoid(share)`, for each row of [T, D] float32.

    Args:
        x: Address. dim: D.
        shares: Address of each row's float32 value. stride: Bytes between two values.
        facts: See `SORT_PAIRS`.
    """
    rows = words(facts, 1)[0]
    at_once = max(1, _TILE_VALUES // dim)
    if tile < 0:
        return (rows + at_once - 1) // at_once
    for row in range(tile * at_once, min((tile + 1) * at_once, rows)):
        values, one = floats(x + row * dim * 4, dim), np.float32(1.0)
        share = one / (one + np.float32(math.exp(-floats(shares + row * stride, 1)[0])))
        for index in range(dim):
            values[index] *= share
    return 0


SORT_PAIRS, ADD = Kernel(_sort_pairs, TILES_VERSION), Kernel(_add, TILES_VERSION)
CLOCK, SHARE = Kernel(_clock, TILES_VERSION), Kernel(_share, TILES_VERSION)
ANSWERS, OUT = ADD.place("answers"), ADD.place("out")


def add_row(
    answers: int, residual: int, dim: int, facts: int, *, out: int = 0, shared: int = 0, choices: int = 0,
    pair_of: int = 0, weights: int = 0,
) -> list[int]:  # fmt: skip
    """Return a program row for `out = residual + (answers + shared)`; padding rows become zero.

    Args:
        answers: Address of [T, D] float32. With `choices`, of [P, D]: a token's rows are summed with its `weights`.
        residual, out, shared: Addresses of [T, D] float32; `shared` may be 0.
        dim: D. facts: See `SORT_PAIRS`.
        choices: K; 0 if answers are sums already. pair_of, weights: Addresses of [T, K], int64 and float32.
    """
    return ADD.row(answers, pair_of, weights, choices, shared, residual, out, dim, facts)
