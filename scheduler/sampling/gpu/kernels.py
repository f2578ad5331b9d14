# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator"
"""Kernels that sample without sorting.

`scan_rows` reads all logits once. It finds each row's first largest logit and the largest logit of every group of adjacent
tokens. Of the groups' maxima, the k-th largest is a bound that at least k tokens reach and, as tokens above it are spread
over groups, few more do. `draw_few` collects only the tokens that reach it, from the groups that have any. So top-k needs
a single read of the logits. For rows without top-k, `weigh_rows` adds up the mass of all tokens in a second one. Rows without
filters need only that (`draw_plain`). If too many tokens reach the bound, or together lack the mass of
top-p, `draw_many` finds the tokens that end top-k and top-p, and the drawn one, digit by digit from histograms.

All sums are integers, so neither the order of atomic operations nor the number of programs changes a token.

Ideas: maxima of groups as bounds, Dr. Top-k (Gaihre et al., 2021); sampling without a sort, FlashInfer (2025), which draws again
until a token passes the filters and so depends on more random numbers.
"""

import triton
import triton.language as tl

from attention.gpu.pages import bound
from scheduler.sampling.gpu.keys import (
    KEY_BITS,
    cut_at,
    drawn_at,
    enough_of,
    keys_of,
    token_of,
    units,
    units_of,
    weigh,
)

_NAN = tl.constexpr(0x7FFFFFFF)
_LARGEST = tl.constexpr((1 << 31) - 1)
_SIGN = tl.constexpr(1 << 31)
_DIGIT_BITS, _DIGITS = tl.constexpr(10), tl.constexpr(1024)
_LEVELS = tl.constexpr(5)
_LEAST_WEIGHT = tl.constexpr(2.0**-40)
_WEIGHT_BITS, _HIGHEST_BIT = tl.constexpr(30), tl.constexpr(1 << 29)  # weights are at most 1
_SLACK = tl.constexpr(0.99)  # for sums in float32


@triton.jit
def _ordered(x):
    """Return integers in the order of logits. NaN is the largest; both zeros are equal."""
    bits = tl.where(x == 0.0, 0.0, x).to(tl.int32, bitcast=True)
    order = tl.where(bits < 0, bits ^ _LARGEST, bits)
    return tl.where(x != x, _NAN, order)


@triton.jit
def _logit_of(order):
    return tl.where(order < 0, order ^ _LARGEST, order).to(tl.float32, bitcast=True)


@triton.jit
def _is_finite(x):
    return tl.abs(x) < float("inf")


@triton.jit(do_not_specialize=["first_filtered"])
def scan_rows(
    logits, draw_of_row, maxima, best, arrived, ids, tops, stride, first_filtered, V, num_groups, LANES: tl.constexpr,
    GROUP: tl.constexpr, HAS_GROUPS: tl.constexpr,
):  # fmt: skip
    """Program (part, row). Writes the row's first largest token and its logit, and with HAS_GROUPS `maxima` [F, G].

    `best` and `arrived` [R] are 0 before and after: the last program of a row writes its result.
    """
    part, row = tl.program_id(0), tl.program_id(1)
    group = part * LANES + tl.arange(0, LANES)
    token = group[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    x = tl.load(logits + row.to(tl.int64) * stride + token, mask=token < V, other=float("-inf"))
    order = _ordered(x.to(tl.float32))
    of_group = tl.max(order, axis=1)
    if HAS_GROUPS:
        place = tl.load(draw_of_row + row) - first_filtered
        if place >= 0:
            tl.store(maxima + place.to(tl.int64) * num_groups + group, _logit_of(of_group))
    most = tl.max(of_group, axis=0)
    first = tl.min(tl.min(tl.where(order == most, token, _LARGEST), axis=1), axis=0)
    key = ((most.to(tl.int64) + _SIGN) << 31) | (first ^ _LARGEST).to(tl.int64)
    tl.atomic_max(best + row, key, sem="relaxed")  # the count, in a later operation, releases it
    if tl.atomic_add(arrived + row, 1) == tl.num_programs(0) - 1:
        key = tl.atomic_xchg(best + row, tl.zeros([], tl.int64), sem="relaxed")
        tl.atomic_xchg(arrived + row, tl.zeros([], tl.int32), sem="relaxed")
        tl.store(ids + row, (key & _LARGEST) ^ _LARGEST)
        tl.store(tops + row, _logit_of(((key >> 31) - _SIGN).to(tl.int32)))


@triton.jit
def forbid_tokens(logits, rows, words, stride, V, num_words, TILE: tl.constexpr):
    """Program (part, masked row). Sets the logits of tokens with a bit of 0 to -inf."""
    token = tl.program_id(0) * TILE + tl.arange(0, TILE)
    place = tl.program_id(1)
    word = tl.load(words + place.to(tl.int64) * num_words + token // 32, mask=token < V, other=-1)
    is_forbidden = ((word >> (token % 32)) & 1) == 0
    tl.store(logits + tl.load(rows + place) * stride + token, float("-inf"), mask=is_forbidden & (token < V))


@triton.jit(do_not_specialize=["first_filtered"])
def weigh_rows(
    logits, rows, inverses, leasts, top_ks, tops, masses, first_filtered, stride, V, num_blocks, MOST: tl.constexpr,
    LANES: tl.constexpr, BLOCKS: tl.constexpr, AT_ONCE: tl.constexpr,
):  # fmt: skip
    """Program (part, draw). Writes `masses` [D, blocks]: units of every LANES tokens that min-p keeps. Skips filtered rows
    with a top-k of at most MOST."""
    part, draw = tl.program_id(0), tl.program_id(1)
    row = tl.load(rows + draw)
    top = tl.load(tops + row)
    if ((draw < first_filtered) | (tl.load(top_ks + draw) > MOST)) & _is_finite(top):
        inverse, least = tl.load(inverses + draw), tl.load(leasts + draw)
        own, lane = logits + row * stride, tl.arange(0, LANES)
        for step in range(BLOCKS // AT_ONCE):
            block = part * BLOCKS + step * AT_ONCE + tl.arange(0, AT_ONCE)
            token = block[:, None] * LANES + lane[None, :]
            x = tl.load(own + token, mask=token < V, other=float("-inf")).to(tl.float32)
            weight = weigh(x, top, inverse)
            mass = tl.sum(units(tl.where(weight >= least, weight, 0.0)), axis=1)
            tl.store(masses + draw.to(tl.int64) * num_blocks + block, mass)


@triton.jit
def draw_plain(
    logits, rows, inverses, uniforms, tops, masses, ids, stride, V, num_blocks, LANES: tl.constexpr,
    BLOCKS_PAD: tl.constexpr,
):  # fmt: skip
    """Program (draw). For rows without filters: writes the token at which the running mass, by id, passes the draw's."""
    draw = tl.program_id(0)
    row = tl.load(rows + draw)
    top = tl.load(tops + row)
    if _is_finite(top):
        block, lane = tl.arange(0, BLOCKS_PAD), tl.arange(0, LANES)
        own = masses + draw.to(tl.int64) * num_blocks
        mass = tl.load(own + block, mask=block < num_blocks, other=0)
        target = drawn_at(tl.load(uniforms + draw), tl.sum(mass, axis=0))
        passed = tl.cumsum(mass, axis=0)
        chosen = tl.sum((passed < target).to(tl.int32), axis=0)
        before = tl.sum(tl.where(block < chosen, mass, 0), axis=0)
        token = chosen * LANES + lane
        x = tl.load(logits + row * stride + token, mask=token < V, other=float("-inf")).to(tl.float32)
        inside = before + tl.cumsum(units(weigh(x, top, tl.load(inverses + draw))), axis=0)
        tl.store(ids + row, (chosen * LANES + tl.sum((inside < target).to(tl.int32), axis=0)).to(tl.int64))


@triton.jit
def _mass_and_floor(masses, num_blocks, top_p, least, V, BLOCKS_PAD: tl.constexpr):
    """Return a row's mass, and a weight that the whole nucleus reaches: all lighter tokens weigh less than 1 - top-p."""
    block = tl.arange(0, BLOCKS_PAD)
    mass = tl.sum(tl.load(masses + block, mask=block < num_blocks, other=0), axis=0)
    share = (1.0 - top_p).to(tl.float32) * mass.to(tl.float32) * _LEAST_WEIGHT / V
    return mass, tl.maximum(least, share * _SLACK)


@triton.jit
def _reached_by(bits, wanted):
    """Return the largest weight that `wanted` of the weights reach. Returns 0 if too few are positive."""
    found, bit = tl.zeros([], tl.int32), tl.full([], _HIGHEST_BIT, tl.int32)
    for _ in range(_WEIGHT_BITS):
        count = tl.sum((bits >= (found | bit)).to(tl.int32), axis=0)
        found = tl.where(count >= wanted, found | bit, found)
        bit = bit >> 1
    return found.to(tl.float32, bitcast=True)


@triton.jit
def _list_groups(
    own, own_groups, own_list, num_groups, top, inverse, floor, V, GROUP: tl.constexpr, ROOM: tl.constexpr,
    TILE: tl.constexpr,
):  # fmt: skip
    """Write the keys of the groups' tokens that weigh `floor` or more, at most ROOM. Returns their number."""
    each, num_listed = tl.arange(0, TILE), tl.zeros([], tl.int32)
    for step in range(bound(tl.cdiv(tl.minimum(num_groups, ROOM) * GROUP, TILE))):
        number = (step * TILE + each) // GROUP
        is_in = (number < num_groups) & (number < ROOM)
        token = tl.load(own_groups + number, mask=is_in, other=0) * GROUP + each % GROUP
        is_in &= token < V
        x = tl.load(own + token, mask=is_in, other=float("-inf")).to(tl.float32)
        weight = weigh(x, top, inverse)
        is_in &= weight >= floor
        at = num_listed + tl.cumsum(is_in.to(tl.int32), axis=0) - 1
        tl.store(own_list + at, keys_of(weight, token), mask=is_in & (at < ROOM))
        num_listed += tl.sum(is_in.to(tl.int32), axis=0)
    return num_listed


@triton.jit
def _draw_from_pairs(
    own_list, num_listed, mass, top_k, top_p, uniform, MOST: tl.constexpr, FEW: tl.constexpr
):
    """Draw from a short list. Comparing all pairs gives its order. Returns -1 if the list lacks the mass of top-p."""
    entry = tl.arange(0, FEW)
    key = tl.load(own_list + entry, mask=entry < num_listed, other=-1)
    unit = units_of(key)
    is_larger = key[None, :] > key[:, None]
    rank = tl.sum(is_larger.to(tl.int32), axis=1)
    before = tl.sum(tl.where(is_larger, unit[None, :], 0), axis=1)
    if top_k <= MOST:
        unit = tl.where(rank < top_k, unit, 0)
        mass = tl.sum(unit, axis=0)
    enough = enough_of(top_p, mass)
    target = drawn_at(uniform, tl.sum(tl.where(before < enough, unit, 0), axis=0))
    is_drawn = (before < target) & (before + unit >= target)
    token = tl.sum(tl.where(is_drawn, token_of(key), 0), axis=0)
    return tl.where(tl.sum(unit, axis=0) >= enough, token, -1)


@triton.jit
def _draw_from_list(
    own_list, num_listed, mass, top_k, top_p, uniform, MOST: tl.constexpr, ROOM: tl.constexpr
):
    """Draw from a list by searches over the bits of keys. Returns -1 if it lacks the mass of top-p."""
    entry = tl.arange(0, ROOM)
    key = tl.load(own_list + entry, mask=entry < num_listed, other=-1)
    unit = units_of(key)
    if top_k <= MOST:
        cut = cut_at(key, (key >= 0).to(tl.int64), top_k)
        mass = tl.sum(tl.where(key >= cut, unit, 0), axis=0)
    enough = enough_of(top_p, mass)
    cut = cut_at(key, unit, enough)
    target = drawn_at(uniform, tl.sum(tl.where(key >= cut, unit, 0), axis=0))
    return tl.where(tl.sum(unit, axis=0) >= enough, token_of(cut_at(key, unit, target)), -1)


@triton.jit(do_not_specialize=["first_filtered"])
def draw_few(
    logits, rows, inverses, leasts, top_ks, top_ps, uniforms, tops, masses, maxima, chosen_groups, listed, is_done,
    ids, first_filtered, stride, V, num_blocks, num_groups, GROUP: tl.constexpr, GROUPS_PAD: tl.constexpr,
    BLOCKS_PAD: tl.constexpr, MOST: tl.constexpr, ROOM: tl.constexpr, FEW: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Program (filtered row). Draws from the tokens that reach a bound, if ROOM suffices for them and they hold the mass of
    top-p. Writes whether it has drawn."""
    place = tl.program_id(0)
    draw = first_filtered + place
    row = tl.load(rows + draw)
    top = tl.load(tops + row)
    done = tl.full([], 1, tl.int32)  # without finite logits the greedy token stays
    if _is_finite(top):
        inverse, top_k = tl.load(inverses + draw), tl.load(top_ks + draw)
        top_p, floor = tl.load(top_ps + draw), tl.load(leasts + draw)
        least = floor
        mass = tl.zeros([], tl.int64)
        if top_k > MOST:
            mass, floor = _mass_and_floor(
                masses + draw.to(tl.int64) * num_blocks, num_blocks, top_p, least, V, BLOCKS_PAD
            )
        group = tl.arange(0, GROUPS_PAD)
        best = tl.load(
            maxima + place.to(tl.int64) * num_groups + group, mask=group < num_groups, other=float("-inf")
        )
        bits = weigh(best, top, inverse).to(tl.int32, bitcast=True)
        wanted = tl.minimum(top_k, MOST).to(tl.int32)
        floor = tl.maximum(tl.maximum(_reached_by(bits, wanted), floor), _LEAST_WEIGHT)
        is_chosen = bits >= floor.to(tl.int32, bitcast=True)
        nth = tl.cumsum(is_chosen.to(tl.int32), axis=0) - 1
        own_groups = chosen_groups + place.to(tl.int64) * ROOM
        tl.store(own_groups + nth, group, mask=is_chosen & (nth < ROOM))
        num_chosen = tl.sum(is_chosen.to(tl.int32), axis=0)
        tl.debug_barrier()
        own_list = listed + place.to(tl.int64) * ROOM
        num_listed = _list_groups(
            logits + row * stride, own_groups, own_list, num_chosen, top, inverse, floor, V, GROUP, ROOM, TILE
        )
        tl.debug_barrier()
        has_room = (num_chosen <= ROOM) & (num_listed <= ROOM) & ((top_k <= MOST) | (top_k >= V))
        uniform = tl.load(uniforms + draw)
        if num_listed <= FEW:
            drawn = _draw_from_pairs(own_list, num_listed, mass, top_k, top_p, uniform, MOST, FEW)
        else:
            drawn = _draw_from_list(own_list, num_listed, mass, top_k, top_p, uniform, MOST, ROOM)
        done = (has_room & (drawn >= 0)).to(tl.int32)
        tl.store(ids + row, drawn, mask=done > 0)
    tl.store(is_done + place, done)


@triton.jit
def _clear(histogram):
    digit = tl.arange(0, _DIGITS)
    tl.store(histogram + digit, tl.zeros([_DIGITS], tl.int64))
    tl.store(histogram + _DIGITS + digit, tl.zeros([_DIGITS], tl.int64))


@triton.jit
def _count_digits(
    own, histogram, prefix, left, top, inverse, floor, V, TILE: tl.constexpr
):  # fmt: skip
    """Add to a histogram [2, digits], of tokens and of units, the keys with `prefix` above their last `left` bits."""
    for step in range(bound(tl.cdiv(V, TILE))):
        token = step * TILE + tl.arange(0, TILE)
        x = tl.load(own + token, mask=token < V, other=float("-inf")).to(tl.float32)
        weight = weigh(x, top, inverse)
        key = keys_of(weight, token)
        is_in = (weight >= floor) & ((key >> left) == prefix)
        digit = ((key >> (left - _DIGIT_BITS)) & (_DIGITS - 1)).to(tl.int32)
        tl.atomic_add(histogram + digit, tl.full([TILE], 1, tl.int64), mask=is_in, sem="relaxed")
        tl.atomic_add(histogram + _DIGITS + digit, units(weight), mask=is_in, sem="relaxed")


@triton.jit
def _list_keys(
    own, own_list, prefix, left, top, inverse, floor, V, ROOM: tl.constexpr, TILE: tl.constexpr
):  # fmt: skip
    """Write the keys with `prefix` above their last `left` bits, at most ROOM. Returns their number."""
    count = tl.zeros([], tl.int32)
    for step in range(bound(tl.cdiv(V, TILE))):
        token = step * TILE + tl.arange(0, TILE)
        x = tl.load(own + token, mask=token < V, other=float("-inf")).to(tl.float32)
        weight = weigh(x, top, inverse)
        key = keys_of(weight, token)
        is_in = (weight >= floor) & ((key >> left) == prefix)
        at = count + tl.cumsum(is_in.to(tl.int32), axis=0) - 1
        tl.store(own_list + at, key, mask=is_in & (at < ROOM))
        count += tl.sum(is_in.to(tl.int32), axis=0)
    return count


@triton.jit
def _narrow(own, first, by_count, target, top, inverse, floor, V, ROOM: tl.constexpr, TILE: tl.constexpr):
    """Narrow the keys around the one at which the running sum reaches `target`, until at most ROOM are left.

    Returns: the first digits of those left, the number of bits after them, and the sum and the units of all larger keys.
    """
    prefix = tl.zeros([], tl.int64)
    before, above, digits = prefix, prefix, tl.arange(0, _DIGITS)
    left, inside = tl.full([], KEY_BITS, tl.int32), tl.full([], ROOM + 1, tl.int64)
    for level in range(_LEVELS):
        if inside > ROOM:
            histogram = first + tl.where(level > 0, 2 * _DIGITS, 0)
            if level > 0:
                tl.debug_barrier()
                _clear(histogram)
                tl.debug_barrier()
                _count_digits(own, histogram, prefix, left, top, inverse, floor, V, TILE)
            tl.debug_barrier()
            count = tl.load(histogram + digits, volatile=True)
            unit = tl.load(histogram + _DIGITS + digits, volatile=True)
            value = tl.where(by_count, count, unit)
            reached = before + tl.sum(value, axis=0) - tl.cumsum(value, axis=0) + value
            digit = tl.maximum(tl.sum((reached >= target).to(tl.int32), axis=0) - 1, 0)
            before += tl.sum(tl.where(digits > digit, value, 0), axis=0)
            above += tl.sum(tl.where(digits > digit, unit, 0), axis=0)
            inside = tl.sum(tl.where(digits == digit, count, 0), axis=0)
            prefix = (prefix << _DIGIT_BITS) | digit.to(tl.int64)
            left -= _DIGIT_BITS
    return prefix, left, before, above


@triton.jit(do_not_specialize=["first_filtered"])
def draw_many(
    logits, rows, inverses, leasts, top_ks, top_ps, uniforms, tops, masses, listed, histograms, is_done, ids,
    first_filtered, stride, V, num_blocks, BLOCKS_PAD: tl.constexpr, MOST: tl.constexpr, ROOM: tl.constexpr,
    TILE: tl.constexpr,
):  # fmt: skip
    """Program (filtered row). Draws for rows that `draw_few` has left. `histograms` [F, 2, 2, digits] int64.

    Three searches among all tokens: where top-k ends, where top-p ends, and the drawn token. A search narrows the keys digit by
    digit, until those with the same first digits fit in ROOM. The first digit's histogram serves all searches.
    """
    place = tl.program_id(0)
    draw = first_filtered + place
    if tl.load(is_done + place) == 0:
        row = tl.load(rows + draw)
        top, inverse, top_k = tl.load(tops + row), tl.load(inverses + draw), tl.load(top_ks + draw)
        top_p, floor = tl.load(top_ps + draw), tl.load(leasts + draw)
        mass = tl.zeros([], tl.int64)
        has_mass = (top_k > MOST) & (top_k >= V)
        if has_mass:
            mass, floor = _mass_and_floor(
                masses + draw.to(tl.int64) * num_blocks, num_blocks, top_p, floor, V, BLOCKS_PAD
            )
        floor = tl.maximum(floor, _LEAST_WEIGHT)
        own, own_list = logits + row * stride, listed + place.to(tl.int64) * ROOM
        first = histograms + place.to(tl.int64) * 4 * _DIGITS
        entry, none = tl.arange(0, ROOM), tl.zeros([], tl.int64)
        _clear(first)
        tl.debug_barrier()
        _count_digits(own, first, none, KEY_BITS, top, inverse, floor, V, TILE)
        found = none
        for search in range(3):
            if (search > 0) | (not has_mass):
                target = tl.where(
                    search == 0,
                    top_k,
                    tl.where(search == 1, enough_of(top_p, mass), drawn_at(tl.load(uniforms + draw), mass)),
                )
                prefix, left, before, above = _narrow(
                    own, first, search == 0, target, top, inverse, floor, V, ROOM, TILE
                )
                tl.debug_barrier()
                num_listed = _list_keys(own, own_list, prefix, left, top, inverse, floor, V, ROOM, TILE)
                tl.debug_barrier()
                key = tl.load(own_list + entry, mask=entry < num_listed, other=-1, volatile=True)
                of_key = units_of(key)
                own_value = tl.where(search == 0, (key >= 0).to(tl.int64), of_key)
                found = cut_at(key, own_value, target - before)
                mass = above + tl.sum(tl.where(key >= found, of_key, 0), axis=0)
        tl.store(ids + row, token_of(found))
