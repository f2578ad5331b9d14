# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator"
"""Paged decode attention on GPUs: one query token per sequence, its context cut into splits that run side by side.

A split has a fixed number of tokens and splits are merged in order, so a row's bits depend on its own context only,
whatever else is in the batch and however many programs the GPU runs (I2). Grids depend on capacities, never on
contents: a CUDA graph can replay the launches, and programs behind a sequence's end return at once.
Rejected: splits by what fills the GPU (FlashDecoding), whose sums depend on the batch.

Ideas: FlashDecoding (Dao et al., 2023), the query heads of a KV head as rows of one product (GQA packing).

Legend: S sequences, H query heads, G KV heads, D key dim, V value dim, N blocks, B tokens of a block, C splits.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from attention.gpu.pages import LOG2_E, capped, rows_of, weigh

SPLIT_TOKENS = 512
_TILE_TOKENS = 32
_LEAST_ROWS = 16  # of a product on tensor cores


@triton.jit
def attend_split(
    query, keys, values, context, table, sums, tops, totals, query_stride, table_stride, scale,
    GROUP: tl.constexpr, ROWS: tl.constexpr, KV_HEADS: tl.constexpr, D: tl.constexpr, D_PAD: tl.constexpr,
    V: tl.constexpr, V_PAD: tl.constexpr, BLOCK: tl.constexpr, TILE: tl.constexpr, SPLIT: tl.constexpr,
    WINDOW: tl.constexpr, SOFT_CAP: tl.constexpr,
):  # fmt: skip
    """Program (sequence, KV head, split): the split's unnormalised sums [GROUP, V], maxima (base 2) and weights' sums."""
    sequence, kv_head, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    end = tl.load(context + sequence).to(tl.int32)
    first = tl.maximum(end - WINDOW, 0) if WINDOW > 0 else 0
    begin, stop = split * SPLIT, tl.minimum(split * SPLIT + SPLIT, end)
    if stop <= tl.maximum(begin, first):
        return
    head, dim, value_dim = tl.arange(0, ROWS), tl.arange(0, D_PAD), tl.arange(0, V_PAD)
    heads = kv_head * GROUP + head
    q = tl.load(
        query + sequence * query_stride + heads[:, None] * D + dim[None, :],
        mask=(head[:, None] < GROUP) & (dim[None, :] < D), other=0.0,
    )  # fmt: skip
    top, total = tl.full([ROWS], float("-inf"), tl.float32), tl.zeros([ROWS], tl.float32)
    sum_RV = tl.zeros([ROWS, V_PAD], tl.float32)
    own_table = table + sequence.to(tl.int64) * table_stride
    for offset in range(0, SPLIT, TILE):  # all of them, so that loads are pipelined; masked ones read nothing
        token = begin + offset + tl.arange(0, TILE)
        is_seen = (token < stop) & (token >= first)
        row = rows_of(own_table, token, is_seen, kv_head, KV_HEADS, BLOCK)
        key_DC = tl.load(
            keys + row[None, :] * D + dim[:, None], mask=is_seen[None, :] & (dim[:, None] < D), other=0.0
        )
        scores = capped(tl.dot(q, key_DC, input_precision="ieee") * scale, SOFT_CAP) * LOG2_E
        weights, top, total, shrink = weigh(scores, is_seen[None, :], top, total)
        value_CV = tl.load(
            values + row[:, None] * V + value_dim[None, :],
            mask=is_seen[:, None] & (value_dim[None, :] < V), other=0.0,
        )  # fmt: skip
        sum_RV = sum_RV * shrink[:, None] + tl.dot(
            weights.to(value_CV.dtype), value_CV, input_precision="ieee"
        )
    at = (sequence * (KV_HEADS * GROUP) + heads).to(tl.int64) * tl.num_programs(2) + split
    tl.store(tops + at, top, mask=head < GROUP)
    tl.store(totals + at, total, mask=head < GROUP)
    tl.store(
        sums + at[:, None] * V + value_dim[None, :],
        sum_RV,
        mask=(head[:, None] < GROUP) & (value_dim[None, :] < V),
    )


@triton.jit
def merge_splits(
    sums, tops, totals, context, sinks, out, num_splits,
    V: tl.constexpr, V_PAD: tl.constexpr, SPLIT: tl.constexpr, WINDOW: tl.constexpr, HAS_SINKS: tl.constexpr,
):  # fmt: skip
    """Program (sequence, head): add the splits in order, the sink first, and divide; a padded row becomes zero."""
    sequence, head = tl.program_id(0), tl.program_id(1)
    heads, dim = tl.num_programs(1), tl.arange(0, V_PAD)
    end = tl.load(context + sequence).to(tl.int32)
    split = (tl.maximum(end - WINDOW, 0) if WINDOW > 0 else 0) // SPLIT
    top, total = tl.full([], float("-inf"), tl.float32), tl.zeros([], tl.float32)
    if HAS_SINKS:
        top, total = tl.load(sinks + head).to(tl.float32) * LOG2_E, total + 1.0
    sum_V = tl.zeros([V_PAD], tl.float32)
    at = (sequence * heads + head).to(tl.int64) * num_splits
    while split * SPLIT < end:
        part_top = tl.load(tops + at + split)
        new_top = tl.maximum(top, part_top)
        shrink, part = tl.exp2(top - new_top), tl.exp2(part_top - new_top)
        total = total * shrink + tl.load(totals + at + split) * part
        part_V = tl.load(sums + (at + split) * V + dim, mask=dim < V, other=0.0)
        sum_V = sum_V * shrink + part_V * part
        top = new_top
        split += 1
    result = sum_V / tl.where(total > 0, total, 1.0)
    place = out + (sequence * heads + head).to(tl.int64) * V + dim
    tl.store(place, result.to(out.dtype.element_ty), mask=dim < V)


class DecodeScratch:
    """Where splits leave their parts. One serves all layers of a model; it is never read across launches."""

    def __init__(
        self, *, max_sequences: int, heads: int, value_dim: int, max_tokens: int, device: torch.device
    ) -> None:
        """Allocate for contexts of up to `max_tokens`."""
        self.num_splits = -(-max_tokens // SPLIT_TOKENS)
        parts = (max_sequences, heads, self.num_splits)
        self.sums = torch.empty(*parts, value_dim, dtype=torch.float32, device=device)
        self.tops = torch.empty(parts, dtype=torch.float32, device=device)
        self.totals = torch.empty_like(self.tops)


def paged_decode(
    query_SHD: Tensor,
    keys_NGBD: Tensor,
    values_NGBV: Tensor,
    context_S: Tensor,
    block_table_SM: Tensor,
    scratch: DecodeScratch,
    *,
    scale: float,
    window: int = 0,
    soft_cap: float = 0.0,
    sinks_H: Tensor | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """Attend each sequence's one query token to its cached tokens, itself included.

    Args:
        query_SHD: [S, H, D], heads contiguous; bfloat16, float16 or float32.
        keys_NGBD, values_NGBV: pages of the same type, contiguous; they already hold the step's own tokens.
        context_S: int64 [S], tokens of each sequence, itself included; 0 for a padded row.
        block_table_SM: int64 [S, M], rows contiguous.
        scratch: for at least these sequences, heads, values and contexts.
        scale: factor on the scores. window: tokens a row sees, itself included; 0 is all.
        soft_cap: see `pages.capped`; 0 is off. sinks_H: [H] logits that carry no value (gpt-oss).
        out: [S, H, V] contiguous to write into; None: a new one.

    Returns:
        `out`; zeros for padded rows.
    """
    S, H, D = query_SHD.shape
    _, G, block, V = values_NGBV.shape
    if out is None:
        out = torch.empty(S, H, V, dtype=query_SHD.dtype, device=query_SHD.device)
    group = H // G
    attend_split[(S, G, scratch.num_splits)](
        query_SHD, keys_NGBD, values_NGBV, context_S, block_table_SM, scratch.sums, scratch.tops, scratch.totals,
        query_SHD.stride(0), block_table_SM.stride(0), scale, GROUP=group,
        ROWS=max(_LEAST_ROWS, triton.next_power_of_2(group)), KV_HEADS=G, D=D, D_PAD=triton.next_power_of_2(D), V=V,
        V_PAD=triton.next_power_of_2(V), BLOCK=block, TILE=_TILE_TOKENS, SPLIT=SPLIT_TOKENS, WINDOW=window,
        SOFT_CAP=soft_cap, num_warps=4, num_stages=3,
    )  # fmt: skip
    merge_splits[(S, H)](
        scratch.sums, scratch.tops, scratch.totals, context_S, sinks_H, out, scratch.num_splits, V=V,
        V_PAD=triton.next_power_of_2(V), SPLIT=SPLIT_TOKENS, WINDOW=window, HAS_SINKS=sinks_H is not None, num_warps=4,
    )  # fmt: skip
    return out
