"""Kernels for experts that are all on this rank: sort chosen ids into pairs by slot, and sum the experts' outputs.

They do what `dispatch` does between ranks, with the same order and arithmetic: a token's outputs are multiplied and added
in the order of its choices (see `dispatch.cpu_kernels.answers`), so a row's bits do not depend on the number of ranks.

Legend: T rows, K choices, P = T x K pairs, S slots, E experts, D hidden dim.
"""

import math

import numpy as np

from attention.cpu_tiles import TILES_VERSION
from dispatch.native import floats, now_ns, words
from dispatch.team import WORDS, Kernel

_TILE_VALUES = 1 << 14


def _sort_pairs(at, tile):  # type: ignore[no-untyped-def]
    if tile < 0:
        return 1
    w = words(at, WORDS)
    choices, num_experts, num_slots, table = w[1], w[3], w[4], w[9]
    rows, num_decodes = words(w[8], 3)[0], words(w[8], 3)[2]
    pairs = rows * choices
    ids, slot_of, offsets = words(w[0], pairs), words(w[2], num_experts), words(w[5], num_slots + 1)
    row_of, pair_of = words(w[6], pairs), words(w[7], pairs)
    offsets[:] = 0
    for pair in range(pairs):
        offsets[slot_of[ids[pair]] + 1] += 1
    for slot in range(num_slots):
        offsets[slot + 1] += offsets[slot]
    place = offsets[:num_slots].copy()
    for pair in range(pairs):
        slot = slot_of[ids[pair]]
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


def _add(at, tile):  # type: ignore[no-untyped-def]
    w = words(at, WORDS)
    answers, pair_of, weights, choices, shared = w[0], w[1], w[2], w[3], w[4]
    residual, out, dim, rows, padded = w[5], w[6], w[7], words(w[8], 2)[0], words(w[8], 2)[1]
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


def _clock(at, tile):  # type: ignore[no-untyped-def]
    if tile < 0:
        return 1
    w = words(at, WORDS)
    words(w[0], 1)[0] += w[1] * now_ns(w[2])
    return 0


def _share(at, tile):  # type: ignore[no-untyped-def]
    w = words(at, WORDS)
    x, dim, shares, stride, rows = w[0], w[1], w[2], w[3], words(w[4], 1)[0]
    at_once = max(1, _TILE_VALUES // dim)
    if tile < 0:
        return (rows + at_once - 1) // at_once
    for row in range(tile * at_once, min((tile + 1) * at_once, rows)):
        values, one = floats(x + row * dim * 4, dim), np.float32(1.0)
        share = one / (one + np.float32(math.exp(-floats(shares + row * stride, 1)[0])))
        for index in range(dim):
            values[index] *= share
    return 0


SORT_PAIRS, ADD, CLOCK, SHARE = (Kernel(each, TILES_VERSION) for each in (_sort_pairs, _add, _clock, _share))


def sort_row(
    ids: int, choices: int, slot_of: int, num_experts: int, num_slots: int, offsets: int, row_of: int, pair_of: int,
    facts: int, table: int,
) -> list[int]:  # fmt: skip
    """Return a program row that sorts the pairs by slot, then token, then choice, and counts them.

    Args:
        ids: Address of [T, K] int64. choices: K. slot_of: Address of [E] int64, every expert's slot.
        offsets: Address of [S + 1] int64, written: the pairs of slot s are [offsets[s], offsets[s + 1]).
        row_of, pair_of: Addresses of [P] int64, written: each sorted pair's row, and each choice's sorted pair.
        facts: Address of T, padded T and the number of decodes (the first rows); read when the program runs.
        table: Address of [2, E + 1] int64, see `moe.load_counts`; 0 disables counting.
    """
    return SORT_PAIRS.row(
        ids, choices, slot_of, num_experts, num_slots, offsets, row_of, pair_of, facts, table
    )


def add_row(
    answers: int, residual: int, dim: int, facts: int, *, out: int = 0, shared: int = 0, choices: int = 0,
    pair_of: int = 0, weights: int = 0,
) -> list[int]:  # fmt: skip
    """Return a program row for `out = residual + (answers + shared)`; padding rows become zero.

    Args:
        answers: Address of [T, D] float32. With `choices`, of [P, D]: a token's rows are summed with its `weights`.
        residual, out, shared: Addresses of [T, D] float32; `shared` may be 0.
        dim: D. facts: See `sort_row`.
        choices: K; 0 if answers are sums already. pair_of, weights: Addresses of [T, K], int64 and float32.
    """
    return ADD.row(answers, pair_of, weights, choices, shared, residual, out, dim, facts)


ANSWERS, OUT = 1, 7  # indexes of words in `add_row`'s row; word 0 is the kernel's address


def clock_row(total_ns: int, sign: int, scratch: int) -> list[int]:
    """Return a program row that adds the time, times `sign`, to a word. Two such rows measure what runs between them.

    Args:
        total_ns: Address of an int64. scratch: Address of two.
    """
    return CLOCK.row(total_ns, sign, scratch)


def share_row(x: int, dim: int, shares: int, stride: int, facts: int) -> list[int]:
    """Return a program row for `x *= sigmoid(share)`, for each row of [T, D] float32.

    Args:
        x: Address. dim: D.
        shares: Address of each row's float32 value. stride: Bytes between two values.
        facts: See `sort_row`.
    """
    return SHARE.row(x, dim, shares, stride, facts)
