"""Kernels for the parts of a gated delta net around its recurrence: order of values, rates, norm and gates of the output.

Source: Gated Delta Networks (Yang et al., 2024), as in Qwen3-Next and Qwen3.5 of `transformers`.

Legend: T rows, H value heads, V value dim.
"""

import math

import numpy as np
from numba import njit

from attention.cpu.norm import norm_row
from attention.cpu.tiles import LANES, TILES_VERSION
from dispatch.compiled.native import copy, float_of, floats, words
from dispatch.compiled.team import Kernel

_ROWS = 4  # rows of a tile


@njit(nogil=True, inline="always")
def _sigmoid(value):  # type: ignore[no-untyped-def]
    return np.float32(1.0) / (np.float32(1.0) + np.float32(math.exp(-value)))


def _order(tile, x, x_stride, out, out_stride, parts, num_parts, rows_at):  # type: ignore[no-untyped-def]
    """Copy parts of each of T rows to other positions.

    Args:
        x, out: Addresses of rows of float32. x_stride, out_stride: bytes from one row to the next.
        parts: Address of [num_parts, 3] int64: first value of a part, its length, and its destination.
        rows_at: Address of T, read when the program runs.
    """
    rows = words(rows_at, 1)[0]
    if tile < 0:
        return (rows + _ROWS - 1) // _ROWS
    for row in range(tile * _ROWS, min((tile + 1) * _ROWS, rows)):
        for index in range(num_parts):
            part = words(parts + index * 24, 3)
            copy(out + row * out_stride + part[2] * 4, x + row * x_stride + part[0] * 4, part[1] * 4)
    return 0


def _rates(  # type: ignore[no-untyped-def]
    tile, fade, fade_stride, follow, follow_stride, heads, fade_places, follow_places, factors_at, biases_at,
    decays_at, rates_at, rows_at,
):  # fmt: skip
    """Compute `decay = factor * softplus(fade + bias)` and `rate = sigmoid(follow)`, per head.

    Args:
        fade, follow: Addresses of rows of float32, `fade_stride` and `follow_stride` bytes from one to the next.
        fade_places, follow_places: Addresses of [H] int64: positions of the heads' values in those rows.
        factors_at, biases_at: Addresses of [H] float32. decays_at, rates_at: addresses of [T, H] float32.
    """
    fade_at, follow_at, factors, biases = (
        words(fade_places, heads),
        words(follow_places, heads),
        floats(factors_at, heads),
        floats(biases_at, heads),
    )
    rows = words(rows_at, 1)[0]
    if tile < 0:
        return (rows + _ROWS - 1) // _ROWS
    for row in range(tile * _ROWS, min((tile + 1) * _ROWS, rows)):
        decays, rates = floats(decays_at + row * heads * 4, heads), floats(rates_at + row * heads * 4, heads)
        for head in range(heads):
            value = floats(fade + row * fade_stride + fade_at[head] * 4, 1)[0] + biases[head]
            if value <= np.float32(20.0):
                value = np.float32(math.log1p(math.exp(value)))
            decays[head] = factors[head] * value
            rates[head] = _sigmoid(floats(follow + row * follow_stride + follow_at[head] * 4, 1)[0])
    return 0


def _norm_gated(  # type: ignore[no-untyped-def]
    tile, x, gate, gate_stride, weight, eps_bits, heads, dim, out, rows_at,
):  # fmt: skip
    """Compute `out = norm(x) * silu(gate)`, head by head.

    Args:
        x, out: Addresses of [T, H, V] float32. gate: address of rows [H * V], `gate_stride` bytes from one to the next.
        weight: Address of [V] float32. heads: H. dim: V.
    """
    eps, rows = float_of(eps_bits), words(rows_at, 1)[0]
    if tile < 0:
        return (rows + _ROWS - 1) // _ROWS
    lanes, factors = np.empty(LANES, np.float32), floats(weight, dim)
    for row in range(tile * _ROWS, min((tile + 1) * _ROWS, rows)):
        for head in range(heads):
            place = (row * heads + head) * dim * 4
            to = floats(out + place, dim)
            norm_row(floats(x + place, dim), factors, eps, dim, to, lanes)
            gates = floats(gate + row * gate_stride + head * dim * 4, dim)
            for index in range(dim):
                to[index] *= gates[index] * _sigmoid(gates[index])
    return 0


def _gate(tile, x, gate, gate_stride, head_stride, heads, dim, rows_at):  # type: ignore[no-untyped-def]
    """Multiply the output of attention by sigmoid(gate), in place.

    Args:
        x: Address of [T, H, V] float32. gate: address of rows, `gate_stride` bytes from one to the next and `head_stride`
            from one head's gates to the next.
        heads: H. dim: V.
    """
    rows = words(rows_at, 1)[0]
    if tile < 0:
        return (rows + _ROWS - 1) // _ROWS
    for row in range(tile * _ROWS, min((tile + 1) * _ROWS, rows)):
        for head in range(heads):
            values = floats(x + (row * heads + head) * dim * 4, dim)
            gates = floats(gate + row * gate_stride + head * head_stride, dim)
            for index in range(dim):
                values[index] *= _sigmoid(gates[index])
    return 0


ORDER, RATES = Kernel(_order, TILES_VERSION), Kernel(_rates, TILES_VERSION)
NORM_GATED, GATE = Kernel(_norm_gated, TILES_VERSION), Kernel(_gate, TILES_VERSION)
