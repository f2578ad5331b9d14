# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator"
"""What a row's logits weigh, and how much of the weight lies above a level: the arithmetic of sampling on GPUs.

A weight is exp((logit - top) / temperature), between 0 and 1, in float32. Sums are of whole units of 2^-40 in int64, so
they are exact and do not depend on their order: however a row is cut in parts, the same token comes out. What is lighter
than a unit is never drawn (in 150,000 of them it is at most one draw of 7 million).
Ordered by falling weight, equal ones by id, what min-p, top-k and top-p leave are beginnings of one list, so a mass says
all about each; nothing is sorted. A place in the list is found by bisecting the bits of weights, which order as they do.

Legend: V vocabulary, S parts of a row, L levels.
"""

import triton
import triton.language as tl

LEVELS = 8  # weights from which candidates may be gathered: 2^-1, 2^-3 to 2^-13, and 0
_UNITS, _LAST_LEVEL = tl.constexpr(2.0**40), tl.constexpr(LEVELS - 1)
_LEVELS = tl.constexpr(LEVELS)
_ABOVE_ONE = tl.constexpr(0x3F800001)  # the bits behind those of 1.0


@triton.jit
def weight_bits(logits, at, size, top, inverse):
    """Return the weights of some logits as bits; -1 past the end."""
    x = tl.load(logits + at, mask=at < size, other=0.0)
    weight = tl.where(x > float("-inf"), tl.exp((x - top) * inverse), 0.0)
    return tl.where(at < size, weight.to(tl.int32, bitcast=True), -1)


@triton.jit
def units_of(bits):
    """Return weights in units; what is past the end has none."""
    weight = tl.where(bits < 0, 0, bits).to(tl.float32, bitcast=True)
    return (weight * _UNITS).to(tl.int64)


@triton.jit
def level_bits(level):
    """Return the bits of the weight that a level begins at."""
    return tl.where(level == _LAST_LEVEL, 0, (126 - 2 * level) << 23)


@triton.jit
def portion(share, mass):
    """Return the least mass that is not less than a share (float64) of one."""
    exact = share * mass.to(tl.float64)
    whole = exact.to(tl.int64)
    return whole + (whole.to(tl.float64) < exact).to(tl.int64)


@triton.jit
def pick_level(counts, masses, row, least_bits, top_k, top_p, S: tl.constexpr, S_PAD: tl.constexpr):
    """Return the highest level above which everything lies that may be drawn, and how many tokens that are."""
    at, level = tl.arange(0, S_PAD), tl.arange(0, _LEVELS)
    place = (row * S + at[:, None]) * _LEVELS + level[None, :]
    count_L = tl.sum(tl.load(counts + place, mask=at[:, None] < S, other=0), axis=0)
    mass_L = tl.sum(tl.load(masses + place, mask=at[:, None] < S, other=0), axis=0)
    total = tl.sum(tl.where(level == _LAST_LEVEL, mass_L, 0), axis=0)
    holds_all = level == _LAST_LEVEL
    if top_k > 0:
        holds_all = holds_all | (count_L >= top_k)
    elif least_bits > 0:
        holds_all = holds_all | (level_bits(level) <= least_bits)
    else:
        holds_all = holds_all | (mass_L >= portion(top_p, total))
    picked = tl.min(tl.where(holds_all, level, _LAST_LEVEL), axis=0)
    return picked, tl.sum(tl.where(level == picked, count_L, 0), axis=0), total


@triton.jit
def mass_from(logits, size, top, inverse, bits, BLOCK: tl.constexpr):
    """Return the mass and the number of tokens that weigh at least what `bits` say."""
    mass_B, count_B = tl.zeros([BLOCK], tl.int64), tl.zeros([BLOCK], tl.int32)
    begin = size * 0
    while begin < size:
        own = weight_bits(logits, begin + tl.arange(0, BLOCK), size, top, inverse)
        mass_B += tl.where(own >= bits, units_of(own), 0)
        count_B += (own >= bits).to(tl.int32)
        begin += BLOCK
    return tl.sum(mass_B, axis=0), tl.sum(count_B, axis=0)


@triton.jit
def find_weight(logits, size, top, inverse, goal, BY_COUNT: tl.constexpr, BLOCK: tl.constexpr):
    """Find the weight at which a mass (or number) of `goal`, at least 1, is reached from the heaviest on.

    Returns its bits, and the mass and the number of tokens heavier than it.
    """
    low, high = size * 0, size * 0 + _ABOVE_ONE
    above, num_above = goal.to(tl.int64) * 0, size * 0
    while high - low > 1:
        middle = (low + high) // 2
        mass, count = mass_from(logits, size, top, inverse, middle, BLOCK)
        reached = (count if BY_COUNT else mass) >= goal
        low, high = tl.where(reached, middle, low), tl.where(reached, high, middle)
        above, num_above = tl.where(reached, above, mass), tl.where(reached, num_above, count)
    return low, above, num_above


@triton.jit
def find_equal(logits, size, top, inverse, bits, number, BLOCK: tl.constexpr):
    """Return the place of the token that `number` others of the same weight are before."""
    begin, found = size * 0, size * 0
    seen = number * 0
    while begin < size:
        at = begin + tl.arange(0, BLOCK)
        is_equal = (weight_bits(logits, at, size, top, inverse) == bits).to(tl.int64)
        order = seen + tl.cumsum(is_equal, axis=0) - 1
        found = tl.maximum(found, tl.max(tl.where((is_equal > 0) & (order == number), at, 0), axis=0))
        seen += tl.sum(is_equal, axis=0)
        begin += BLOCK
    return found


@triton.jit
def draw_filtered(logits, size, top, inverse, total, least_bits, top_k, top_p, uniform, BLOCK: tl.constexpr):
    """Draw among what min-p, top-k and top-p leave; returns a place in `logits`, which hold all of that.

    Args:
        total: the mass of the whole row, which `logits` may be a part of.
        least_bits: of the least weight that min-p lets pass; 0: any. top_k: 0: any. top_p: 1 and more: any.
    """
    mass = total
    if top_k > 0:
        bits, above, num_above = find_weight(logits, size, top, inverse, top_k, True, BLOCK)
        mass = above + (top_k - num_above).to(tl.int64) * units_of(bits)
    if least_bits > 0:
        passing, _ = mass_from(logits, size, top, inverse, least_bits, BLOCK)
        mass = tl.minimum(mass, passing)
    if top_p < 1.0:
        goal = tl.maximum(portion(top_p, mass), 1)
        bits, above, _ = find_weight(logits, size, top, inverse, goal, False, BLOCK)
        unit = units_of(bits)
        mass = above + (goal - above + unit - 1) // unit * unit
    wanted = wanted_mass(uniform, mass)
    bits, above, _ = find_weight(logits, size, top, inverse, wanted + 1, False, BLOCK)
    return find_equal(logits, size, top, inverse, bits, (wanted - above) // units_of(bits), BLOCK)


@triton.jit
def wanted_mass(uniform, mass):
    """Return the mass that lies before the drawn token's last unit, of `mass`, for a number in [0, 1)."""
    wanted = (uniform * mass.to(tl.float64)).to(tl.int64)
    return tl.minimum(wanted, mass - 1)
