# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator"
"""Weights, and their order as integers, for the kernels that sample.

A weight is exp((logit - top) / temperature), with the operations of the CPU (`attention.cpu.tiles.emit_exp`), so that it has
the same bits. Its unit is the weight in whole 2^-40, for exact sums. A key has the order (weight, lower id first): the
weight's bits above those of `2^-40`, then the id from the largest down. Keys are distinct, so no order has ties.
"""

import triton
import triton.language as tl

from attention.cpu.tiles import EXP_LOWEST, EXP_TERMS, LN2_HIGH, LN2_LOW, LOG2E

ID_BITS = tl.constexpr(20)
KEY_BITS = tl.constexpr(50)
MOST_IDS = 1 << 19  # vocabularies must be smaller, so that sums do not overflow
_LARGEST_ID = tl.constexpr((1 << 20) - 1)
_LEAST_BITS = tl.constexpr((127 - 40) << 23)  # of 2^-40: lighter tokens are never drawn
_UNITS = tl.constexpr(2.0**40)
_LOWEST, _LOG2E = tl.constexpr(EXP_LOWEST), tl.constexpr(LOG2E)
_HIGH, _LOW = tl.constexpr(-LN2_HIGH), tl.constexpr(-LN2_LOW)
_T0, _T1, _T2, _T3, _T4, _T5 = (tl.constexpr(term) for term in EXP_TERMS)


@triton.jit
def weigh(x, top, inverse):
    """Return the weights of logits. `top` must be finite and the largest one."""
    above = (x - top) * inverse
    clamped = tl.maximum(above, _LOWEST)
    n = tl.floor(tl.fma(clamped, _LOG2E, 0.5))
    r = tl.fma(n, _LOW, tl.fma(n, _HIGH, clamped))
    series = tl.fma(tl.fma(r, _T0, _T1), r, _T2)
    series = tl.fma(tl.fma(tl.fma(series, r, _T3), r, _T4), r, _T5)
    series = tl.fma(series, r * r, r + 1.0)
    power = (series.to(tl.int32, bitcast=True) + (n.to(tl.int32) << 23)).to(tl.float32, bitcast=True)
    return tl.where(above < _LOWEST, 0.0, power)


@triton.jit
def units(weight):
    """Return weights in whole 2^-40."""
    return (weight * _UNITS).to(tl.int64)


@triton.jit
def keys_of(weight, token):
    """Return the keys of tokens; negative ones for tokens that are never drawn."""
    order = weight.to(tl.int32, bitcast=True) - _LEAST_BITS
    return (order.to(tl.int64) << ID_BITS) | (token ^ _LARGEST_ID).to(tl.int64)


@triton.jit
def token_of(key):
    """Return the token of a key."""
    return (key & _LARGEST_ID) ^ _LARGEST_ID


@triton.jit
def units_of(key):
    """Return the units of keys; 0 for negative keys."""
    bits = (key >> ID_BITS).to(tl.int32) + _LEAST_BITS
    return tl.where(key < 0, 0, units(bits.to(tl.float32, bitcast=True)))


@triton.jit
def cut_at(key, value, target):
    """Return the largest key at which the sum of values, from the largest key down, reaches `target`, or 0.

    Searches bit by bit, which needs no sort: 50 sums of a tile.
    """
    found = tl.zeros([], tl.int64)
    bit = tl.full([], 1, tl.int64) << (KEY_BITS - 1)
    for _ in range(KEY_BITS):
        total = tl.sum(tl.where(key >= (found | bit), value, 0), axis=0)
        found = tl.where(total >= target, found | bit, found)
        bit = bit >> 1
    return found


@triton.jit
def enough_of(top_p, mass):
    """Return the least number of units that top-p keeps, at least 1."""
    enough = tl.ceil(top_p * mass.to(tl.float64)).to(tl.int64)
    return tl.maximum(tl.minimum(enough, mass), 1)


@triton.jit
def drawn_at(uniform, mass):
    """Return the number of units at which the drawn token is reached."""
    return tl.minimum((uniform * mass.to(tl.float64)).to(tl.int64), mass - 1) + 1
