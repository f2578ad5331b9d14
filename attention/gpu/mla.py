# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator"
"""Multi-head latent attention's decode on GPUs, absorbed: queries meet the cached latents, which are never expanded.

With the up-projections folded into the query and the output (DeepSeek-V2, 2024), all heads share one "KV head" whose key
is the whole cached row and whose value is its latent part. Each row of the pages is read once for a tile of heads.
Splits and their merge are those of `decode`, and so is what makes a row's bits its own.

Legend: S sequences, H query heads, L latent dim, E rotary dim, N blocks, B tokens of a block.
"""

import triton
import triton.language as tl
from torch import Tensor

from attention.gpu.decode import SPLIT_TOKENS, DecodeScratch, merge_splits
from attention.gpu.pages import LOG2_E, rows_of, weigh

_TILE_TOKENS = 16
_TILE_HEADS = 16


@triton.jit
def attend_latent_split(
    query, latents, context, table, sums, tops, totals, query_stride, table_stride, scale,
    H: tl.constexpr, HEADS: tl.constexpr, L: tl.constexpr, E: tl.constexpr, E_PAD: tl.constexpr,
    BLOCK: tl.constexpr, TILE: tl.constexpr, SPLIT: tl.constexpr,
):  # fmt: skip
    """Program (sequence, tile of heads, split): as `decode.attend_split`."""
    sequence, split = tl.program_id(0), tl.program_id(2)
    begin = split * SPLIT
    stop = tl.minimum(begin + SPLIT, tl.load(context + sequence).to(tl.int32))
    if stop <= begin:
        return
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    latent_dim, rope_dim = tl.arange(0, L), tl.arange(0, E_PAD)
    own = query + sequence * query_stride + head[:, None] * (L + E)
    q_latent = tl.load(own + latent_dim[None, :], mask=head[:, None] < H, other=0.0)
    q_rope = tl.load(
        own + L + rope_dim[None, :], mask=(head[:, None] < H) & (rope_dim[None, :] < E), other=0.0
    )
    top, total = tl.full([HEADS], float("-inf"), tl.float32), tl.zeros([HEADS], tl.float32)
    sum_HL = tl.zeros([HEADS, L], tl.float32)
    own_table = table + sequence.to(tl.int64) * table_stride
    for offset in range(0, SPLIT, TILE):
        token = begin + offset + tl.arange(0, TILE)
        is_seen = token < stop
        place = latents + rows_of(own_table, token, is_seen, 0, 1, BLOCK) * (L + E)
        latent_CL = tl.load(place[:, None] + latent_dim[None, :], mask=is_seen[:, None], other=0.0)
        rope_EC = tl.load(
            place[None, :] + L + rope_dim[:, None],
            mask=is_seen[None, :] & (rope_dim[:, None] < E),
            other=0.0,
        )
        scores = tl.dot(q_latent, tl.trans(latent_CL), input_precision="ieee")
        scores = (scores + tl.dot(q_rope, rope_EC, input_precision="ieee")) * (scale * LOG2_E)
        weights, top, total, shrink = weigh(scores, is_seen[None, :], top, total)
        part = tl.dot(weights.to(latent_CL.dtype), latent_CL, input_precision="ieee")
        sum_HL = sum_HL * shrink[:, None] + part
    at = (sequence * H + head).to(tl.int64) * tl.num_programs(2) + split
    tl.store(tops + at, top, mask=head < H)
    tl.store(totals + at, total, mask=head < H)
    tl.store(sums + at[:, None] * L + latent_dim[None, :], sum_HL, mask=head[:, None] < H)


def latent_decode(
    query_SHC: Tensor,
    latents_NBC: Tensor,
    context_S: Tensor,
    block_table_SM: Tensor,
    scratch: DecodeScratch,
    *,
    latent_dim: int,
    scale: float,
    out: Tensor | None = None,
) -> Tensor:
    """Attend each sequence's one query token to its cached latents, its own included.

    Args:
        query_SHC: [S, H, L + E], heads contiguous: the absorbed query, then its rotary part.
        latents_NBC: [N, B, L + E] pages of the same type, contiguous.
        context_S, block_table_SM, scratch, scale, out: as `decode.paged_decode`, V being L.
        latent_dim: L, a power of 2.

    Returns:
        `out` [S, H, L], to be multiplied by the value up-projection; zeros for padded rows.

    Raises:
        ValueError: latent_dim is no power of 2.
    """
    S, H, width = query_SHC.shape
    if latent_dim & (latent_dim - 1):
        raise ValueError(
            f"latent_dim is {latent_dim}; the kernel takes powers of 2 (512 in every known model)"
        )
    if out is None:
        out = query_SHC.new_empty(S, H, latent_dim)
    rope_dim = width - latent_dim
    attend_latent_split[(S, triton.cdiv(H, _TILE_HEADS), scratch.num_splits)](
        query_SHC, latents_NBC, context_S, block_table_SM, scratch.sums, scratch.tops, scratch.totals,
        query_SHC.stride(0), block_table_SM.stride(0), scale, H=H, HEADS=_TILE_HEADS, L=latent_dim, E=rope_dim,
        E_PAD=max(16, triton.next_power_of_2(rope_dim)), BLOCK=latents_NBC.shape[1], TILE=_TILE_TOKENS,
        SPLIT=SPLIT_TOKENS, num_warps=8, num_stages=3,
    )  # fmt: skip
    merge_splits[(S, H)](
        scratch.sums, scratch.tops, scratch.totals, context_S, None, out, scratch.num_splits, V=latent_dim,
        V_PAD=latent_dim, SPLIT=SPLIT_TOKENS, WINDOW=0, HAS_SINKS=False, num_warps=4,
    )  # fmt: skip
    return out
