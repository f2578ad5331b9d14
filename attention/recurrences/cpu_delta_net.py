"""Kernels for the parts of a gated delta net around its recurrence: order of values, rates, norm and gates of the output.

Source: Gated Delta Networks (Yang et al., 2024), as in Qwen3-Next and Qwen3.5 of `transformers`.

Legend: T rows, H value heads, V value dim.
"""

import math

import numpy as np
from numba import njit

from attention.cpu_norm import norm_row
from attention.cpu_tiles import LANES, TILES_VERSION
from dispatch.native import bits_of, copy, float_of, floats, words
from dispatch.team import WORDS, Kernel

_ROWS = 4  # rows of a tile


@njit(nogil=True, inline="always")
def _sigmoid(value):  # type: ignore[no-untyped-def]
    return np.float32(1.0) / (np.float32(1.0) + np.float32(math.exp(-value)))


def _order(at, tile):  # type: ignore[no-untyped-def]
    # Copies parts of rows to other positions.
    w = words(at, WORDS)
    x, x_stride, out, out_stride, parts, num_parts, rows = (
        w[0],
        w[1],
        w[2],
        w[3],
        w[4],
        w[5],
        words(w[6], 1)[0],
    )
    if tile < 0:
        return (rows + _ROWS - 1) // _ROWS
    for row in range(tile * _ROWS, min((tile + 1) * _ROWS, rows)):
        for index in range(num_parts):
            part = words(parts + index * 24, 3)
            copy(out + row * out_stride + part[2] * 4, x + row * x_stride + part[0] * 4, part[1] * 4)
    return 0


def _rates(at, tile):  # type: ignore[no-untyped-def]
    # Computes how fast states decay and how much each value updates them.
    w = words(at, WORDS)
    fade, fade_stride, follow, follow_stride, heads = w[0], w[1], w[2], w[3], w[4]
    fade_at, follow_at, factors, biases = (
        words(w[5], heads),
        words(w[6], heads),
        floats(w[7], heads),
        floats(w[8], heads),
    )
    rows = words(w[11], 1)[0]
    if tile < 0:
        return (rows + _ROWS - 1) // _ROWS
    for row in range(tile * _ROWS, min((tile + 1) * _ROWS, rows)):
        decays, rates = floats(w[9] + row * heads * 4, heads), floats(w[10] + row * heads * 4, heads)
        for head in range(heads):
            value = floats(fade + row * fade_stride + fade_at[head] * 4, 1)[0] + biases[head]
            if value <= np.float32(20.0):
                value = np.float32(math.log1p(math.exp(value)))
            decays[head] = factors[head] * value
            rates[head] = _sigmoid(floats(follow + row * follow_stride + follow_at[head] * 4, 1)[0])
    return 0


def _norm_gated(at, tile):  # type: ignore[no-untyped-def]
    # Norms each head, then multiplies it by silu(gate).
    w = words(at, WORDS)
    x, gate, gate_stride, weight, eps, heads, dim = w[0], w[1], w[2], w[3], float_of(w[4]), w[5], w[6]
    rows = words(w[8], 1)[0]
    if tile < 0:
        return (rows + _ROWS - 1) // _ROWS
    lanes, factors = np.empty(LANES, np.float32), floats(weight, dim)
    for row in range(tile * _ROWS, min((tile + 1) * _ROWS, rows)):
        for head in range(heads):
            place = (row * heads + head) * dim * 4
            to = floats(w[7] + place, dim)
            norm_row(floats(x + place, dim), factors, eps, dim, to, lanes)
            gates = floats(gate + row * gate_stride + head * dim * 4, dim)
            for index in range(dim):
                to[index] *= gates[index] * _sigmoid(gates[index])
    return 0


def _gate(at, tile):  # type: ignore[no-untyped-def]
    # Multiplies heads by sigmoid(gate), in place.
    w = words(at, WORDS)
    x, gate, gate_stride, head_stride, heads, dim, rows = (
        w[0],
        w[1],
        w[2],
        w[3],
        w[4],
        w[5],
        words(w[6], 1)[0],
    )
    if tile < 0:
        return (rows + _ROWS - 1) // _ROWS
    for row in range(tile * _ROWS, min((tile + 1) * _ROWS, rows)):
        for head in range(heads):
            values = floats(x + (row * heads + head) * dim * 4, dim)
            gates = floats(gate + row * gate_stride + head * head_stride, dim)
            for index in range(dim):
                values[index] *= _sigmoid(gates[index])
    return 0


ORDER, RATES, NORM_GATED, GATE = (
    Kernel(each, TILES_VERSION) for each in (_order, _rates, _norm_gated, _gate)
)


def order_row(x: int, x_stride: int, out: int, out_stride: int, parts: np.ndarray, rows_at: int) -> list[int]:
    """Return one row of a program: copy parts of each of T rows.

    Args:
        x, out: Addresses of rows of float32. x_stride, out_stride: bytes from one row to the next.
        parts: [parts, 3] int64: first value of a part, its length, and its destination. The caller keeps it alive.
        rows_at: Address of T, read when the program runs.
    """
    return ORDER.row(x, x_stride, out, out_stride, parts.ctypes.data, len(parts), rows_at)


def rates_row(
    fade: tuple[int, int], follow: tuple[int, int], places: tuple[np.ndarray, np.ndarray], factors: int, biases: int,
    decays: int, rates: int, rows_at: int,
) -> list[int]:  # fmt: skip
    """Return one row of a program: `decay = factor * softplus(fade + bias)` and `rate = sigmoid(follow)`, per head.

    Args:
        fade, follow: Address of rows of float32, and bytes from one row to the next.
        places: [H] int64 each: positions of the heads' values in those rows. The caller keeps them alive.
        factors, biases: Addresses of [H] float32. decays, rates: addresses of [T, H] float32.
    """
    return RATES.row(
        *fade, *follow, len(places[0]), places[0].ctypes.data, places[1].ctypes.data, factors, biases, decays, rates,
        rows_at,
    )  # fmt: skip


def norm_gated_row(
    x: int, gate: int, gate_stride: int, weight: int, eps: float, heads: int, dim: int, out: int, rows_at: int
) -> list[int]:
    """Return one row of a program: `out = norm(x) * silu(gate)`, head by head.

    Args:
        x, out: Addresses of [T, H, V] float32. gate: address of rows [H * V], `gate_stride` bytes from one to the next.
        weight: Address of [V] float32. heads: H. dim: V.
    """
    return NORM_GATED.row(x, gate, gate_stride, weight, bits_of(eps), heads, dim, out, rows_at)


def gate_row(
    x: int, gate: int, gate_stride: int, head_stride: int, heads: int, dim: int, rows_at: int
) -> list[int]:
    """Return one row of a program: `x *= sigmoid(gate)`, for the output of attention.

    Args:
        x: Address of [T, H, V] float32. gate: address of rows, `gate_stride` bytes from one to the next and `head_stride`
            from one head's gates to the next.
        heads: H. dim: V.
    """
    return GATE.row(x, gate, gate_stride, head_stride, heads, dim, rows_at)
