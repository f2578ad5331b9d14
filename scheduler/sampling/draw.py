"""Choosing tokens on the CPU: greedy, or drawn by temperature, min-p, top-k and top-p, in multi-threaded kernels.

A row's weights are exp((logit - top) / temperature) and overwrite its logits. Rows without filters are drawn by walking
the sums of chunks. With filters, only tokens that may be in the nucleus are examined; the lanes' largest weights locate
them. They are put into bins by the leading bits of their weights. Whole bins are added up, and only two bins are
sorted: the one in which the nucleus ends and the one with the drawn token. A token depends on its own row only.

The random number of a position is the first of a counter-based generator keyed by (seed, position) (Philox: Salmon et
al., 2011, with numpy's way of counting), so that a replay draws the same tokens.

Legend: D drawn rows, V vocabulary.
"""

import math
from collections.abc import Sequence as Rows
from typing import Any

import numpy as np
from llvmlite import ir
from numba import carray, njit, types
from numba.extending import intrinsic

from attention.cpu.tiles import LANES, TILES_VERSION, constant, emit_exp, load, splat, store, vector_call
from dispatch.compiled.native import compiled, floats, pointer, words
from dispatch.compiled.team import Kernel, Team, program_of, run
from scheduler.policy.request import SamplingParams

# Below, logits over temperature leave float32's range; draws are greedy long before.
LEAST_TEMPERATURE = 1e-5
NOTHING = -1  # result if no logit is finite or one is NaN
CHUNK = 256  # weights per stored sum
_SORTED = 192  # up to this many are sorted without bins
_BIN_SHIFT = 20  # of a weight's bits: bins are 12 % wide
_NUM_BINS = (0x3F800000 >> _BIN_SHIFT) + 1  # weights are at most 1
_MARGIN = 1.001  # for sums in float32
_NS_PER_WEIGHT = 0.6
_NS_PER_LOGIT = 0.15
_ASKED, _REALS = 5, 3  # words and numbers per row


@intrinsic
def _raise_to(_typing: Any, highest: Any, x: Any) -> Any:
    """`highest = max(highest, x)` on 16 lanes; takes two addresses. NaN is kept."""

    def codegen(context: Any, builder: ir.IRBuilder, _signature: Any, args: list[ir.Value]) -> Any:
        highest, x = load(builder, args[0]), load(builder, args[1])
        larger = vector_call(builder, "maxnum", highest, x)
        is_broken = builder.fcmp_unordered("uno", highest, x)
        store(builder, builder.select(is_broken, constant(float("nan")), larger), args[0])
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), codegen


@intrinsic
def _weigh(_typing: Any, x: Any, top: Any, inverse: Any, sums: Any, highest: Any) -> Any:
    """`x = exp((x - top) * inverse)` on 16 lanes; adds it to `sums` and raises `highest` to it."""

    def codegen(context: Any, builder: ir.IRBuilder, _signature: Any, args: list[ir.Value]) -> Any:
        x, top, inverse, sums, highest = args
        above = builder.fsub(load(builder, x), splat(builder, top))
        weight = emit_exp(builder, builder.fmul(above, splat(builder, inverse)))
        store(builder, weight, x)
        store(builder, builder.fadd(load(builder, sums), weight), sums)
        store(builder, vector_call(builder, "maxnum", load(builder, highest), weight), highest)
        return context.get_dummy_value()

    return types.void(types.int64, types.float32, types.float32, types.int64, types.int64), codegen


@intrinsic
def _bits(_typing: Any, value: Any) -> Any:
    """Return a float32's bits as an integer. For positive values, both have the same order."""

    def codegen(_context: Any, builder: ir.IRBuilder, _signature: Any, args: list[ir.Value]) -> Any:
        return builder.zext(builder.bitcast(args[0], ir.IntType(32)), ir.IntType(64))

    return types.int64(types.float32), codegen


@intrinsic
def _float(_typing: Any, bits: Any) -> Any:
    """Return the float32 with these bits."""

    def codegen(_context: Any, builder: ir.IRBuilder, _signature: Any, args: list[ir.Value]) -> Any:
        return builder.bitcast(builder.trunc(args[0], ir.IntType(32)), ir.FloatType())

    return types.float32(types.int64), codegen


_M0, _M1 = np.uint64(0xD2E7470EE14C6C93), np.uint64(0xCA5A826395121157)
_W0, _W1 = np.uint64(0x9E3779B97F4A7C15), np.uint64(0xBB67AE8584CAA73B)
_LOWER, _HALF, _ELEVEN = np.uint64(0xFFFFFFFF), np.uint64(32), np.uint64(11)


@njit(nogil=True, inline="always")
def _upper_product(a, b):  # type: ignore[no-untyped-def]
    # The upper 64 bits of a 64 by 64 bit product.
    a_low, a_high, b_low, b_high = a & _LOWER, a >> _HALF, b & _LOWER, b >> _HALF
    low, middle, other = a_low * b_low, a_high * b_low, a_low * b_high
    carry = ((low >> _HALF) + (middle & _LOWER) + (other & _LOWER)) >> _HALF
    return a_high * b_high + (middle >> _HALF) + (other >> _HALF) + carry


@njit(nogil=True, inline="always")
def _uniform(seed, position):  # type: ignore[no-untyped-def]
    # numpy.random.Generator(Philox(key=seed, counter=position)).random(), which increments the counter first.
    one, zero = np.uint64(1), np.uint64(0)
    c0, c1, c2, c3 = np.uint64(position) + one, zero, zero, zero
    k0, k1 = np.uint64(seed), zero
    for _ in range(10):
        high0, low0 = _upper_product(_M0, c0), _M0 * c0
        high1, low1 = _upper_product(_M1, c2), _M1 * c2
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, low1, high0 ^ c3 ^ k1, low0
        k0, k1 = k0 + _W0, k1 + _W1
    return (c0 >> _ELEVEN) * (1.0 / 9007199254740992.0)


@compiled
def _uniform_at(seed: int, position: int) -> float:
    return _uniform(seed, position)  # type: ignore[no-any-return]


def uniform_at(seed: int, position: int) -> float:
    """Return the random number of a position, in [0, 1).

    Args:
        seed: 64 bits.
    """
    return _uniform_at(seed - (1 << 64) if seed >= 1 << 63 else seed, position)


@njit(nogil=True, inline="always")
def _find_top(row, V, lanes):  # type: ignore[no-untyped-def]
    # Returns NaN if a logit is NaN.
    lanes[:] = np.float32(-np.inf)
    at, step = lanes.ctypes.data, LANES * 4
    whole = V // (4 * LANES) * (4 * LANES)
    for first in range(0, whole, 4 * LANES):
        x = row.ctypes.data + first * 4
        for part in range(4):
            _raise_to(at + part * step, x + part * step)
    top = np.float32(-np.inf)
    for index in range(whole, V):
        lanes[0] = row[index] if math.isnan(row[index]) else max(lanes[0], row[index])
    for lane in range(4 * LANES):
        if math.isnan(lanes[lane]):
            return lanes[lane]
        top = max(top, lanes[lane])
    return top


@njit(nogil=True, inline="always")
def _weigh_all(row, V, top, inverse, sums, highest):  # type: ignore[no-untyped-def]
    # Replaces logits by weights. Stores the sum of each chunk and the largest weight of each lane.
    lanes, tail = np.empty(LANES, np.float32), np.empty(LANES, np.float32)
    total = 0.0
    for chunk in range(sums.shape[0]):
        lanes[:] = np.float32(0.0)
        highest[chunk, :] = np.float32(0.0)
        largest = highest.ctypes.data + chunk * LANES * 4
        for first in range(chunk * CHUNK, min((chunk + 1) * CHUNK, V), LANES):
            if first + LANES <= V:
                _weigh(row.ctypes.data + first * 4, top, inverse, lanes.ctypes.data, largest)
                continue
            tail[:] = np.float32(-np.inf)
            for index in range(first, V):
                tail[index - first] = row[index]
            _weigh(tail.ctypes.data, top, inverse, lanes.ctypes.data, largest)
            for index in range(first, V):
                row[index] = tail[index - first]
        sums[chunk] = 0.0
        for lane in range(LANES):
            sums[chunk] += lanes[lane]
        total += sums[chunk]
    return total


@njit(nogil=True, inline="always")
def _walk(row, V, sums, wanted):  # type: ignore[no-untyped-def]
    # Returns the token at which the running sum of weights passes `wanted`.
    chunk, before = 0, 0.0
    while chunk < sums.shape[0] - 1 and before + sums[chunk] <= wanted:
        before += sums[chunk]
        chunk += 1
    last = -1
    for index in range(chunk * CHUNK, min((chunk + 1) * CHUNK, V)):
        if row[index] > 0.0:
            last = index
            before += row[index]
            if before > wanted:
                return index
    while last < 0 or row[last] <= 0.0:  # rounding must not go past the last token with a weight
        last = chunk * CHUNK - 1 if last < 0 else last - 1
    return last


@njit(nogil=True, inline="always")
def _bin_of(weight):  # type: ignore[no-untyped-def]
    return _bits(weight) >> _BIN_SHIFT


@njit(nogil=True, inline="always")
def _kth_largest_at_least(highest, top_k, counts):  # type: ignore[no-untyped-def]
    # Returns a weight that at least top_k tokens reach: top_k lanes do, and each lane has its own tokens.
    counts[:] = 0
    for chunk in range(highest.shape[0]):
        for lane in range(LANES):
            counts[_bin_of(highest[chunk, lane])] += 1
    seen, bin_ = 0, _NUM_BINS
    while bin_ > 0 and seen < top_k:
        bin_ -= 1
        seen += counts[bin_]
    return _float(bin_ << _BIN_SHIFT) if seen >= top_k else np.float32(0.0)


@njit(nogil=True, fastmath={"reassoc", "contract", "nsz"})
def _masses_above(row, V, t0, t1, t2, t3):  # type: ignore[no-untyped-def]
    # The order of addition is free: these sums only say where to search.
    m0, m1, m2, m3 = np.float32(0.0), np.float32(0.0), np.float32(0.0), np.float32(0.0)
    zero = np.float32(0.0)
    for index in range(V):
        weight = row[index]
        m0 += weight if weight >= t0 else zero
        m1 += weight if weight >= t1 else zero
        m2 += weight if weight >= t2 else zero
        m3 += weight if weight >= t3 else zero
    return m0, m1, m2, m3


@njit(nogil=True, inline="always")
def _nucleus_at_least(row, V, least, enough):  # type: ignore[no-untyped-def]
    # Returns a weight, at least `least`, that the whole nucleus reaches. Two rounds try four cuts below the largest.
    low, high = least, np.float32(1.0)
    for _ in range(2):
        ratio = np.float32((high / low) ** 0.2)
        t0 = low * ratio
        t1, t2 = t0 * ratio, t0 * ratio * ratio
        t3 = t2 * ratio
        m0, m1, m2, m3 = _masses_above(row, V, t0, t1, t2, t3)
        if m3 >= enough:
            low = t3
        elif m2 >= enough:
            low, high = t2, t3
        elif m1 >= enough:
            low, high = t1, t2
        elif m0 >= enough:
            low, high = t0, t1
        else:
            high = t0
    return low


@njit(nogil=True, inline="always")
def _gather(row, V, highest, least, keys):  # type: ignore[no-untyped-def]
    # Collects the keys of tokens with a weight of `least` or more. Sorted down, they give weights, then lower ids first.
    count = lanes = 0
    for chunk in range(highest.shape[0]):
        for lane in range(LANES):
            lanes += 1 if highest[chunk, lane] >= least else 0
    if 4 * lanes > highest.size:  # most tokens qualify: loop without a branch per token
        smallest = max(least, np.float32(1e-45))
        for index in range(V):
            keys[count] = _bits(row[index]) << 31 | (0x7FFFFFFF - index)
            count += 1 if row[index] >= smallest else 0
        return count
    for chunk in range(highest.shape[0]):
        for lane in range(LANES):
            if highest[chunk, lane] >= least and highest[chunk, lane] > 0.0:
                for index in range(chunk * CHUNK + lane, min((chunk + 1) * CHUNK, V), LANES):
                    if row[index] >= least and row[index] > 0.0:
                        keys[count] = _bits(row[index]) << 31 | (0x7FFFFFFF - index)
                        count += 1
    return count


@njit(nogil=True, inline="always")
def _weight_of(key):  # type: ignore[no-untyped-def]
    return _float(key >> 31)


@njit(nogil=True, inline="always")
def _token_of(key):  # type: ignore[no-untyped-def]
    return 0x7FFFFFFF - (key & 0x7FFFFFFF)


@njit(nogil=True)
def _sort_down(keys):  # type: ignore[no-untyped-def]
    keys.sort()
    for index in range(keys.shape[0] // 2):
        other = keys.shape[0] - 1 - index
        keys[index], keys[other] = keys[other], keys[index]


@njit(nogil=True)
def _draw_sorted(keys, count, top_k, top_p, uniform):  # type: ignore[no-untyped-def]
    # For few tokens: sorts all of them.
    found = keys[:count]
    _sort_down(found)
    count = min(count, top_k) if top_k > 0 else count
    mass = 0.0
    for index in range(count):
        mass += _weight_of(found[index])
    kept, size = 0.0, 0
    while size < count and (size == 0 or kept < top_p * mass):  # the token that crosses top_p stays
        kept += _weight_of(found[size])
        size += 1
    return _walk_sorted(found, 0, size, uniform * kept)


@njit(nogil=True)
def _walk_sorted(keys, begin, end, wanted):  # type: ignore[no-untyped-def]
    # Returns the token at which the running sum passes `wanted`.
    running = 0.0
    for index in range(begin, end):
        running += _weight_of(keys[index])
        if running > wanted:
            return _token_of(keys[index])
    return _token_of(keys[end - 1])


@njit(nogil=True)
def _members(keys, count, bin_):  # type: ignore[no-untyped-def]
    # Returns a bin's keys, sorted down.
    inside = np.empty(count, np.int64)
    size = 0
    for index in range(count):
        if keys[index] >> (31 + _BIN_SHIFT) == bin_:
            inside[size] = keys[index]
            size += 1
    _sort_down(inside[:size])
    return inside[:size]


@njit(nogil=True)
def _draw_binned(keys, count, top_k, top_p, mass, uniform, counts, masses):  # type: ignore[no-untyped-def]
    # For many tokens: bins determine first what is left out. `mass` is unused if top_k leaves tokens out.
    counts[:] = 0
    masses[:] = 0.0
    for index in range(count):
        bin_ = keys[index] >> (31 + _BIN_SHIFT)
        counts[bin_] += 1
        masses[bin_] += _weight_of(keys[index])
    last, left = -1, 0  # the bin in which top_k ends, and how many of its tokens stay
    if 0 < top_k < count:
        mass, left, last = 0.0, top_k, _NUM_BINS - 1
        while counts[last] < left:
            left -= counts[last]
            mass += masses[last]
            last -= 1
        of_last = _members(keys, count, last)
        for index in range(left):
            mass += _weight_of(of_last[index])
    enough, kept, end = top_p * mass, 0.0, _NUM_BINS - 1
    while end > 0 and (counts[end] == 0 or (end != last and kept + masses[end] < enough)):
        kept += masses[end]
        end -= 1
    before = kept  # mass of the bins above the one in which the nucleus ends
    inside = _members(keys, count, end)
    most = left if end == last else inside.shape[0]
    size = 0
    while size < most and (kept < enough or kept == 0.0):
        kept += _weight_of(inside[size])
        size += 1
    wanted = uniform * kept
    if wanted >= before:
        return _walk_sorted(inside, 0, size, wanted - before)
    bin_, running = _NUM_BINS - 1, 0.0
    while running + masses[bin_] <= wanted:
        running += masses[bin_]
        bin_ -= 1
    drawn = _members(keys, count, bin_)
    return _walk_sorted(drawn, 0, drawn.shape[0], wanted - running)


def _draw(tile, count, V, asked_at, reals, drawn_at):  # type: ignore[no-untyped-def]
    if tile < 0:
        return count
    asked, drawn = words(asked_at + tile * _ASKED * 8, _ASKED), words(drawn_at + tile * 8, 1)
    real = carray(pointer(reals + tile * _REALS * 8), (_REALS,), types.float64)
    row, top_k = floats(asked[0], V), asked[1]
    inverse, top_p, min_p = np.float32(real[0]), real[1], np.float32(real[2])
    drawn[0] = NOTHING
    top = _find_top(row, V, np.empty(4 * LANES, np.float32))
    if math.isinf(top) or math.isnan(top):
        return 0
    chunks = (V + CHUNK - 1) // CHUNK
    sums, highest = np.empty(chunks, np.float64), np.empty((chunks, LANES), np.float32)
    total = _weigh_all(row, V, top, inverse, sums, highest)
    uniform = _uniform(asked[2], asked[3])
    if top_k <= 0 and top_p >= 1.0 and min_p <= 0.0:
        drawn[0] = _walk(row, V, sums, uniform * total)
        return 0
    counts, masses, least = np.empty(_NUM_BINS, np.int64), np.empty(_NUM_BINS, np.float64), min_p
    if top_k > 0:
        least = max(least, _kth_largest_at_least(highest, top_k, counts))
    elif min_p <= 0.0:  # all lighter tokens together weigh less than 1 - top_p
        least = max(least, np.float32((1.0 - top_p) * total / V))
        if least > 0.0:
            least = _nucleus_at_least(row, V, least, np.float32(top_p * total * _MARGIN))
    keys = np.empty(V + 1, np.int64)
    count = _gather(row, V, highest, least, keys)
    if top_k > 0 or min_p > 0.0:
        total = 0.0
        for index in range(count):
            total += _weight_of(keys[index])
    if count > _SORTED:
        drawn[0] = _draw_binned(keys, count, top_k, top_p, total, uniform, counts, masses)
    elif top_k > 0 or min_p > 0.0:
        drawn[0] = _draw_sorted(keys, count, top_k, top_p, uniform)
    else:
        drawn[0] = _draw_binned(keys, count, 0, top_p, total, uniform, counts, masses)
    return 0


_SCANNED = 4096  # tokens per block of an arg-max


def _arg_max(tile, count, V, rows, found_at):  # type: ignore[no-untyped-def]
    # Finds the first of the largest logits, or the first NaN, as numpy does.
    if tile < 0:
        return count
    row_at, found = words(rows + tile * 8, 1)[0], words(found_at + tile * 8, 1)
    best, first, lanes = np.float32(-np.inf), 0, np.empty(4 * LANES, np.float32)
    for begin in range(0, V, _SCANNED):
        size = min(_SCANNED, V - begin)
        top = _find_top(floats(row_at + begin * 4, size), size, lanes)
        if math.isnan(top) or top > best:
            best, first = top, begin
            if math.isnan(top):
                break
    row = floats(row_at, V)
    while first < V - 1 and not (row[first] == best or (math.isnan(row[first]) and math.isnan(best))):
        first += 1
    found[0] = first
    return 0


DRAW, ARG_MAX = Kernel(_draw, TILES_VERSION), Kernel(_arg_max, TILES_VERSION)
KERNELS: tuple[Kernel[...], ...] = (DRAW, ARG_MAX)


def likeliest_tokens(logits_RV: Rows[np.ndarray], team: Team | None = None) -> list[int]:
    """Return the first of the largest logits of each row, or the first NaN.

    Args:
        logits_RV: R rows of V float32, each contiguous.
        team: Threads to use. None uses the caller's.
    """
    count, V = len(logits_RV), logits_RV[0].size
    rows, found = np.array([row.ctypes.data for row in logits_RV]), np.empty(count, np.int64)
    row = ARG_MAX.row(count, V, rows.ctypes.data, found.ctypes.data)
    run(program_of([row]), team, int(count * V * _NS_PER_LOGIT))
    tokens: list[int] = found.tolist()
    return tokens


def draw_tokens(
    logits_DV: Rows[np.ndarray], params: Rows[SamplingParams], positions: Rows[int], team: Team | None = None
) -> list[int]:
    """Draw a token per row. Overwrites the rows with weights.

    Args:
        logits_DV: D rows of V float32, each contiguous; changed in place.
        params: D sets of parameters with temperatures above 0.
        positions: D positions of the tokens among their requests' generated tokens.
        team: Threads to use. None uses the caller's.

    Returns:
        D tokens. NOTHING for rows in which no logit is finite or one is NaN.
    """
    count, V = len(logits_DV), logits_DV[0].size
    asked = np.array(
        [
            (
                row.ctypes.data,
                each.top_k,
                each.seed - (1 << 64) if each.seed >= 1 << 63 else each.seed,
                position,
                0,
            )
            for row, each, position in zip(logits_DV, params, positions, strict=True)
        ],
        dtype=np.int64,
    )
    reals = np.array(
        [(1.0 / max(each.temperature, LEAST_TEMPERATURE), each.top_p, each.min_p) for each in params]
    )
    drawn = np.empty(count, np.int64)
    row = DRAW.row(count, V, asked.ctypes.data, reals.ctypes.data, drawn.ctypes.data)
    run(program_of([row]), team, int(count * V * _NS_PER_WEIGHT))
    tokens: list[int] = drawn.tolist()
    return tokens
