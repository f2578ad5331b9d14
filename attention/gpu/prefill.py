# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator"
"""Chunked prefill over a paged prefix on GPUs: rows of many sequences, each seeing its own cached tokens up to itself.

A program has a tile of query tokens of one sequence, for one KV head, and walks the context in tiles from the first
visible token, in one fixed order: a row's bits do not depend on the chunk that it came in, because a tile that a row may
not see weighs nothing and every tile begins at a multiple of its size.

Ideas: FlashAttention (Dao et al., 2022), GQA packing as in `decode`.

Legend: T rows of the batch, H query heads, G KV heads, D key dim, V value dim, N blocks, B tokens of a block.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from attention.gpu.pages import LOG2_E, capped, rows_of, weigh

_TILE_ROWS = 64  # query tokens times the heads that share a KV head
_TILE_TOKENS = 64


@triton.jit
def attend_tile(
    query, keys, values, tiles, query_start, context, table, sinks, out, query_stride, table_stride, scale,
    GROUP: tl.constexpr, ROWS: tl.constexpr, KV_HEADS: tl.constexpr, D: tl.constexpr, D_PAD: tl.constexpr,
    V: tl.constexpr, V_PAD: tl.constexpr, BLOCK: tl.constexpr, TILE: tl.constexpr, WINDOW: tl.constexpr,
    SOFT_CAP: tl.constexpr, HAS_SINKS: tl.constexpr,
):  # fmt: skip
    """Program (tile, KV head). `tiles` int64 [tiles, 3]: sequence, first query token within its rows, query tokens."""
    tile, kv_head = tl.program_id(0), tl.program_id(1)
    sequence = tl.load(tiles + tile * 3)
    first, count = tl.load(tiles + tile * 3 + 1).to(tl.int32), tl.load(tiles + tile * 3 + 2).to(tl.int32)
    row_begin, row_end = tl.load(query_start + sequence), tl.load(query_start + sequence + 1)
    cached = (tl.load(context + sequence) - (row_end - row_begin)).to(tl.int32)
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
    begin = tl.maximum(cached + first - WINDOW + 1, 0) // TILE * TILE if WINDOW > 0 else 0
    while begin < cached + first + count:
        token = begin + tl.arange(0, TILE)
        is_cached = token < cached + first + count
        is_seen = token[None, :] <= position[:, None]
        if WINDOW > 0:
            is_seen &= token[None, :] > position[:, None] - WINDOW
        place = rows_of(own_table, token, is_cached, kv_head, KV_HEADS, BLOCK)
        key_DC = tl.load(
            keys + place[None, :] * D + dim[:, None], mask=is_cached[None, :] & (dim[:, None] < D), other=0.0
        )
        scores = capped(tl.dot(q, key_DC, input_precision="ieee") * scale, SOFT_CAP) * LOG2_E
        weights, top, total, shrink = weigh(scores, is_seen, top, total)
        value_CV = tl.load(
            values + place[:, None] * V + value_dim[None, :],
            mask=is_cached[:, None] & (value_dim[None, :] < V), other=0.0,
        )  # fmt: skip
        part = tl.dot(weights.to(value_CV.dtype), value_CV, input_precision="ieee")
        sum_RV = sum_RV * shrink[:, None] + part
        begin += TILE
    result = sum_RV / tl.where(total > 0, total, 1.0)[:, None]
    tl.store(
        out + (token_row[:, None] * (KV_HEADS * GROUP) + head[:, None]) * V + value_dim[None, :],
        result.to(out.dtype.element_ty), mask=is_row[:, None] & (value_dim[None, :] < V),
    )  # fmt: skip


def tile_tokens(heads: int, kv_heads: int) -> int:
    """Return how many query tokens a tile may have, for `Step.tiles`."""
    return max(1, _TILE_ROWS // (heads // kv_heads))


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
    soft_cap: float = 0.0,
    sinks_H: Tensor | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """Attend every row to its own sequence's cached tokens up to itself.

    Args:
        query_THD: [T, H, D], heads contiguous.
        keys_NGBD, values_NGBV: pages of the same type, contiguous; they already hold the rows' own tokens.
        tiles_X3: int64 [X, 3] as `Step.tiles(tile_tokens(H, G))` gives them.
        query_start_S: int64 [S + 1], rows of sequence s are [s], [s + 1]. context_S: int64 [S], tokens after this step.
        block_table_SM, scale, window, soft_cap, sinks_H: as `decode.paged_decode`.
        out: [T, H, V] contiguous to write into; None: a new one of zeros.

    Returns:
        `out`; rows that no tile covers are left as they are.
    """
    T, H, D = query_THD.shape
    _, G, block, V = values_NGBV.shape
    if out is None:
        out = torch.zeros(T, H, V, dtype=query_THD.dtype, device=query_THD.device)
    group = H // G
    attend_tile[(tiles_X3.shape[0], G)](
        query_THD, keys_NGBD, values_NGBV, tiles_X3, query_start_S, context_S, block_table_SM, sinks_H, out,
        query_THD.stride(0), block_table_SM.stride(0), scale, GROUP=group,
        ROWS=max(_TILE_ROWS, triton.next_power_of_2(group)), KV_HEADS=G, D=D, D_PAD=triton.next_power_of_2(D), V=V,
        V_PAD=triton.next_power_of_2(V), BLOCK=block, TILE=_TILE_TOKENS, WINDOW=window, SOFT_CAP=soft_cap,
        HAS_SINKS=sinks_H is not None, num_warps=8, num_stages=2,
    )  # fmt: skip
    return out
