# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator"
"""Linear layers on GPUs in which a row has the same bits among any number of rows (--batch-invariant).

cuBLAS chooses another kernel, and another order of additions, for another number of rows. Here every output is one chain of
additions over the inputs, 16 at a time, in their order, with every tile. The tensor cores of an architecture add the
products of 16 inputs in one way in all their instructions, so tiles may differ with the number of rows and the shape. On
an H200 all tiles below gave the same bits.

Bounds. Few rows: the bytes of the weight, read once. A GPU needs a program on each multiprocessor for that, so tiles have few
columns if a layer has few. Many rows: 2 * T * N * K operations.

Legend: T rows, N out features, K in features.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from attention.gpu.pages import bound
from attention.gpu.tiles import device_names, shape_key, tile_of


class LinearTile(NamedTuple):
    """Shape of a program's work. No field determines a row's bits, except for rows of 4 bytes."""

    rows: int
    columns: int
    inner: int
    warps: int
    stages: int
    group: int = 8  # tiles of rows that share a tile of columns


class LinearRange(NamedTuple):
    """Tiles for launches of up to a number of rows, those with most columns first."""

    kernel: str  # name in the table
    most: float
    tiles: tuple[LinearTile, ...]


LEAST_PROGRAMS = 90  # fewer do not read a weight at a GPU's full speed
RANGES = (
    LinearRange(
        "linear_16", 16,
        (LinearTile(16, 64, 128, 4, 4), LinearTile(16, 32, 128, 4, 5), LinearTile(16, 16, 256, 4, 4)),
    ),
    LinearRange(
        "linear_32", 32,
        (LinearTile(32, 64, 128, 4, 4), LinearTile(32, 32, 128, 4, 5), LinearTile(32, 16, 256, 4, 4)),
    ),
    LinearRange("linear_64", 64, (LinearTile(64, 64, 64, 4, 5), LinearTile(64, 32, 128, 4, 4))),
    LinearRange("linear_128", 128, (LinearTile(128, 64, 64, 4, 4),)),
    LinearRange("linear_many", float("inf"), (LinearTile(128, 128, 64, 8, 4),)),
)  # fmt: skip
TILES = tuple(tile for each in RANGES for tile in each.tiles)
# Architectures with one order of additions in instructions for 16, 32 and 64 columns.
_ONE_ORDER = ("sm_80", "sm_86", "sm_89", "sm_90")
# Rows of 4 bytes are multiplied without tensor cores, in an order that the tile determines.
WIDE_TILE = LinearTile(16, 64, 32, 4, 2)


@triton.jit(do_not_specialize=["T"])
def linear_rows(
    x, weight, bias, out, T, N, K,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, INNER: tl.constexpr, GROUP: tl.constexpr, IS_EVEN: tl.constexpr,
):  # fmt: skip
    """Run as program (tile of rows and columns). IS_EVEN: K is a multiple of INNER.

    The weight is the left factor, as in `grouped_kernel`, so the number of rows can be small.
    """
    at = tl.program_id(0)
    row_tiles, column_tiles = tl.cdiv(T, ROWS), tl.cdiv(N, COLUMNS)
    first, inside = at // (GROUP * column_tiles) * GROUP, at % (GROUP * column_tiles)
    size = tl.minimum(row_tiles - first, GROUP)
    row = (first + inside % size) * ROWS + tl.arange(0, ROWS)
    column = inside // size * COLUMNS + tl.arange(0, COLUMNS)
    is_row, is_column, inner = row < T, column < N, tl.arange(0, INNER)
    own_x = x + row.to(tl.int64)[None, :] * K + inner[:, None]
    own_weight = weight + column.to(tl.int64)[:, None] * K + inner[None, :]
    total = tl.zeros([COLUMNS, ROWS], tl.float32)
    for begin in range(0, bound(K), INNER):
        is_x, is_weight = is_row[None, :], is_column[:, None]
        if not IS_EVEN:
            is_x, is_weight = is_x & (inner < K - begin)[:, None], is_weight & (inner < K - begin)[None, :]
        weight_NK = tl.load(own_weight, mask=is_weight, other=0.0)
        x_KT = tl.load(own_x, mask=is_x, other=0.0)
        total = tl.dot(weight_NK, x_KT, total, input_precision="ieee")
        own_weight += INNER
        own_x += INNER
    if bias is not None:
        total += tl.load(bias + column, mask=is_column, other=0.0).to(tl.float32)[:, None]
    place = out + row.to(tl.int64)[None, :] * N + column[:, None]
    tl.store(place, total.to(out.dtype.element_ty), mask=is_row[None, :] & is_column[:, None])


def linear_tile(rows: int, weight_NK: Tensor) -> LinearTile:
    """Return the tile for a number of rows and a weight: the table's for its device, or the fallback."""
    if weight_NK.element_size() > 2:
        return WIDE_TILE
    (N, K), names = weight_NK.shape, device_names(weight_NK.device)
    chosen = next(each for each in RANGES if rows <= each.most)
    tiles = chosen.tiles if not names or names[-1] in _ONE_ORDER else chosen.tiles[:1]
    fallback = next((tile for tile in tiles if triton.cdiv(N, tile.columns) >= LEAST_PROGRAMS), tiles[-1])
    return tile_of(chosen.kernel, shape_key(weight_NK.dtype, N=N, K=K), fallback, names)


def multiply_rows_alike(
    x_TK: Tensor,
    weight_NK: Tensor,
    bias_N: Tensor | None = None,
    *,
    dtype: torch.dtype | None = None,
    tile: LinearTile | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """Return x @ weight.T + bias, [T, N]. A row's bits do not depend on the other rows.

    Args:
        x_TK: Contiguous. weight_NK: contiguous, of the same type.
        dtype: Type of the result; by default x's. Sums are in float32.
        tile: Tile to use; by default by the number of rows.
        out: [T, N] contiguous to write into; by default a new tensor.

    Raises:
        ValueError: Types or layouts differ from these.
    """
    (T, K), (N, width) = x_TK.shape, weight_NK.shape
    if x_TK.dtype != weight_NK.dtype or width != K:
        raise ValueError(
            f"rows are {x_TK.dtype} with {K} values, and the weight {weight_NK.dtype} with {width}; both must be the same"
        )
    if not (x_TK.is_contiguous() and weight_NK.is_contiguous()):
        raise ValueError("rows and weight must be contiguous")
    if out is None:
        out = x_TK.new_empty(T, N, dtype=dtype)
    if T == 0:
        return out
    tile = tile or linear_tile(T, weight_NK)
    programs = triton.cdiv(T, tile.rows) * triton.cdiv(N, tile.columns)
    linear_rows[(programs,)](
        x_TK, weight_NK, bias_N, out, T, N, K, ROWS=tile.rows, COLUMNS=tile.columns, INNER=tile.inner, GROUP=tile.group,
        IS_EVEN=K % tile.inner == 0, num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip
    return out
