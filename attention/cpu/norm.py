"""RMSNorm on CPU, for whole rows and for attention heads (Zhang and Sennrich, 2019).

A row's sum of squares is 16 chains over every 16th value, folded as a fixed tree, so its bits depend on the row alone.

Legend: T rows, D dims.
"""

import math

import numpy as np
import torch
from numba import njit
from torch import Tensor

from attention.cpu.tiles import LANES, TILES_VERSION
from dispatch.compiled.native import bits_of, float_of, floats, words
from dispatch.compiled.team import Kernel, program_of, run_alone

_TILE_VALUES = 1 << 14


@njit(nogil=True, inline="always")
def norm_row(x, weight, eps, dim, out, lanes):  # type: ignore[no-untyped-def]
    """Compute `out = weight * (x / sqrt(mean(x * x) + eps))` on views of `dim` float32; `lanes` has 16. `out` may be `x`."""
    lanes[:] = np.float32(0.0)
    whole = dim // LANES * LANES
    for first in range(0, whole, LANES):
        for lane in range(LANES):
            value = x[first + lane]
            lanes[lane] += value * value
    for index in range(whole, dim):
        lanes[index - whole] += x[index] * x[index]
    width = LANES // 2
    while width > 0:
        for lane in range(width):
            lanes[lane] += lanes[lane + width]
        width //= 2
    scale = np.float32(1.0) / np.float32(math.sqrt(lanes[0] / np.float32(dim) + eps))
    for index in range(dim):
        out[index] = weight[index] * (x[index] * scale)


def _norm(  # type: ignore[no-untyped-def]
    tile, x, added, sums, out, weight, eps_bits, dim, rows_at, stride, out_stride,
):  # fmt: skip
    eps, rows = float_of(eps_bits), words(rows_at, 1)[0]
    at_once = max(1, _TILE_VALUES // dim)
    if tile < 0:
        return (rows + at_once - 1) // at_once
    lanes, factors = np.empty(LANES, np.float32), floats(weight, dim)
    for row in range(tile * at_once, min((tile + 1) * at_once, rows)):
        values = floats(x + row * stride, dim)
        if added != 0:
            more, both = floats(added + row * dim * 4, dim), floats(sums + row * dim * 4, dim)
            for index in range(dim):
                both[index] = values[index] + more[index]
            values = both
        norm_row(values, factors, eps, dim, floats(out + row * out_stride, dim), lanes)
    return 0


NORM = Kernel(_norm, TILES_VERSION)
NORMED = NORM.place("x")


def norm_rows(
    x: int,
    weight: int,
    eps: float,
    dim: int,
    out: int,
    rows_at: int,
    *,
    added: int = 0,
    sums: int = 0,
    stride: int = 0,
    out_stride: int = 0,
) -> list[int]:
    """Return one row of a program: `out = norm(x)`; or `sums = x + added` and `out = norm(sums)`.

    Args:
        x, out, added, sums: Addresses of [T, D] float32; `added` is 0 to add nothing. weight: address of [D] float32.
        dim: D. rows_at: address of T, read when the program runs.
        stride, out_stride: Bytes from one row of `x` or `out` to the next; 0 if the rows are contiguous.
    """
    strides = stride or 4 * dim, out_stride or 4 * dim
    return NORM.row(x, added, sums, out, weight, bits_of(eps), dim, rows_at, *strides)


def rms_norm(x_TD: Tensor, weight_D: Tensor, eps: float) -> Tensor:
    """Return the normed rows [T, D]; all float32, contiguous."""
    out, rows = torch.empty_like(x_TD), np.array([len(x_TD)])
    row = norm_rows(
        x_TD.data_ptr(), weight_D.data_ptr(), eps, x_TD.shape[1], out.data_ptr(), rows.ctypes.data
    )
    run_alone(program_of([row]))
    return out
