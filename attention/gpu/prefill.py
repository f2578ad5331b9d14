# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator"
"""Chunked prefill over a paged prefix on GPUs: each row attends to the cached tokens of its own sequence up to itself.

A program has a tile of query tokens of one sequence, for one KV head, and walks the context in tiles from the first visible
token, in one fixed order. A row's bits do not depend on the chunk it arrived in, because invisible tiles have weight zero
and every tile begins at a multiple of its size. With long chunks it is bound by operations, 4 * H * D per pair of tokens.
Every tile of rows reads its context again, mostly from the L2 cache.

Ideas: FlashAttention (Dao et al., 2022), GQA packing as in `decode`.

Legend: T rows of the batch, H query heads, G KV heads, D key dim, V value dim, N blocks, B tokens of a block, X tiles.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from attention.gpu.limits import LARGEST_DIM, WIDE_DIM, check_heads, check_layout, check_tile
from attention.gpu.pages import LOG2_E, bound, capped, first_seen, rows_of, weigh
from attention.gpu.tiles import device_names, shape_key, tile_of


class PrefillTile(NamedTuple):
    """Size of a program's work, except for its rows. It determines the order in which numbers are added."""

    tokens: int = 64  # tokens of the context per product
    warps: int = 8
    stages: int = 3


@triton.jit
def attend_tile(
    query, keys, values, tiles, query_start, context, table, sinks, out, query_stride, out_stride, table_stride, scale,
    GROUP: tl.constexpr, ROWS: tl.constexpr, KV_HEADS: tl.constexpr, D: tl.constexpr, D_PAD: tl.constexpr,
    V: tl.constexpr, V_PAD: tl.constexpr, BLOCK: tl.constexpr, TILE: tl.constexpr, WINDOW: tl.constexpr,
    CHUNK: tl.constexpr, SOFT_CAP: tl.constexpr, HAS_SINKS: tl.constexpr,
):  # fmt: skip
    """Run as program (tile, KV head). `tiles` int64 [tiles, 3]: sequence, first query token within its rows, query tokens."""
    tile, kv_head = tl.program_id(0), tl.program_id(1)
    sequence = tl.load(tiles + tile * 3)
    first, count = tl.load(tiles + tile * 3 + 1).to(tl.int32), tl.load(tiles + tile * 3 + 2).to(tl.int32)
    row_begin, row_end = tl.load(query_start + sequence), tl.load(query_start + sequence + 1)
    cached = (tl.load(context + sequence) - (row_end - row_begin)).to(tl.int32)
    stop = cached + first + count
    row, dim, value_dim = tl.arange(0, ROWS), tl.arange(0, D_PAD), tl.arange(0, V_PAD)
    is_row = row < count * GROUP
    position = cached + first + row // GROUP
    head = kv_head * GROUP + row % GROUP
    token_row = row_begin + first + row // GROUP
    q = tl.load(
        query + token_row[:, None] * query_stride + head[:, None] * D + dim[None, :],
        mask=is_row[:, None] & (dim[None, :] < D), other=0.0,
    )  # fmt: skip
    top, total = tl.full([ROWS], float("-inf"), tl.float32), tl.zeros([ROWS], tl.float32)
    if HAS_SINKS:
        top = tl.load(sinks + head, mask=is_row, other=0.0).to(tl.float32) * LOG2_E
        total += 1.0
    sum_RV = tl.zeros([ROWS, V_PAD], tl.float32)
    own_table = table + sequence * table_stride
    begin = first_seen(cached + first, WINDOW, CHUNK) // TILE * TILE
    for step in range(bound(tl.cdiv(stop - begin, TILE))):
        at = begin + step * TILE
        token = at + tl.arange(0, TILE)
        is_cached = token < stop
        is_seen = token[None, :] <= position[:, None]
        if WINDOW > 0 or CHUNK > 0:
            is_seen &= token[None, :] >= first_seen(position, WINDOW, CHUNK)[:, None]
        place = rows_of(own_table, at, stop, kv_head, KV_HEADS, BLOCK, TILE)
        key_DC = tl.load(
            keys + place[None, :] * D + dim[:, None], mask=is_cached[None, :] & (dim[:, None] < D), other=0.0
        )
        scores = capped(tl.dot(q, key_DC, input_precision="ieee") * scale, SOFT_CAP) * LOG2_E
        weights, top, total, shrink = weigh(scores, is_seen, top, total)
        value_CV = tl.load(
            values + place[:, None] * V + value_dim[None, :],
            mask=is_cached[:, None] & (value_dim[None, :] < V), other=0.0,
        )  # fmt: skip
        added = tl.dot(weights.to(value_CV.dtype), value_CV, input_precision="ieee")
        sum_RV = sum_RV * shrink[:, None] + added
    result = sum_RV / tl.where(total > 0, total, 1.0)[:, None]
    tl.store(
        out + token_row[:, None] * out_stride + head[:, None] * V + value_dim[None, :],
        result.to(out.dtype.element_ty), mask=is_row[:, None] & (value_dim[None, :] < V),
    )  # fmt: skip


def prefill_tile(
    dtype: torch.dtype, key_dim: int, value_dim: int, group: int, device: torch.device
) -> PrefillTile:
    """Return the tile for heads of this shape on a device."""
    fallback = PrefillTile()
    if max(key_dim, value_dim) > 128 or dtype.itemsize > 2:
        fallback = PrefillTile(tokens=32)
    if max(key_dim, value_dim) > WIDE_DIM:  # twice the memory again, which leaves room for two stages
        fallback = (
            PrefillTile(stages=2, tokens=32) if dtype.itemsize <= 2 else PrefillTile(stages=1, tokens=16)
        )
    shape = shape_key(dtype, D=key_dim, V=value_dim, GROUP=group)
    return tile_of("paged_prefill", shape, fallback, device_names(device))


def tile_rows(key_dim: int, value_dim: int) -> int:
    """Return the number of rows of a program: query tokens times the heads that share a KV head."""
    widest = max(key_dim, value_dim)
    return 128 if widest <= 128 else 64 if widest <= WIDE_DIM else 32


def tile_tokens(heads: int, kv_heads: int, key_dim: int = LARGEST_DIM, value_dim: int = LARGEST_DIM) -> int:
    """Return the largest number of query tokens in a tile, for `Step.tiles`. The default dims are safe for all heads."""
    return max(1, tile_rows(key_dim, value_dim) // (heads // kv_heads))


def paged_prefill(
    query_THD: Tensor,
    keys_NGBD: Tensor,
    values_NGBV: Tensor,
    tiles_X3: Tensor,
    query_start_S: Tensor,
    context_S: Tensor,
    block_table_SM: Tensor,
    *,
    scale: float,
    window: int = 0,
    chunk: int = 0,
    soft_cap: float = 0.0,
    sinks_H: Tensor | None = None,
    out: Tensor | None = None,
    tile: PrefillTile | None = None,
) -> Tensor:
    """Attend every row to the cached tokens of its own sequence up to itself.

    Args:
        query_THD: [T, H, D], heads contiguous.
        keys_NGBD, values_NGBV: Pages of the same type, contiguous. They already hold the rows' own tokens.
        tiles_X3: int64 [X, 3] from `Step.tiles(tile_tokens(...))`. A tile of 0 tokens does nothing.
        query_start_S: int64 [S + 1], first row of each sequence and the end. context_S: int64 [S], tokens after this step.
        block_table_SM, scale, window, chunk, soft_cap, sinks_H: As in `decode.paged_decode`.
        out: [T, H, V] to write into, heads contiguous; by default a new tensor of zeros.
        tile: Tile to use; by default from the table.

    Returns:
        `out`; rows that no tile covers are not changed.

    Raises:
        ValueError: The kernel does not support the heads, type or layout.
    """
    T, H, D = query_THD.shape
    _, G, block, V = values_NGBV.shape
    check_heads(H, G, D, V, query_THD.dtype)
    check_layout(query_THD, keys_NGBD, values_NGBV)
    group = H // G
    tile = tile or prefill_tile(query_THD.dtype, D, V, group, query_THD.device)
    check_tile(tile.tokens, block)
    if out is None:
        out = query_THD.new_zeros(T, H, V)
    attend_tile[(tiles_X3.shape[0], G)](
        query_THD, keys_NGBD, values_NGBV, tiles_X3, query_start_S, context_S, block_table_SM, sinks_H, out,
        query_THD.stride(0), out.stride(0), block_table_SM.stride(0), scale, GROUP=group,
        ROWS=max(tile_rows(D, V), triton.next_power_of_2(group)), KV_HEADS=G, D=D, D_PAD=triton.next_power_of_2(D), V=V,
        V_PAD=triton.next_power_of_2(V), BLOCK=block, TILE=tile.tokens, WINDOW=window, CHUNK=chunk, SOFT_CAP=soft_cap,
        HAS_SINKS=sinks_H is not None, num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip
    return out
