# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator"
"""Absorbed decode for multi-head latent attention on GPUs: queries are multiplied with the cached latents directly.

With the up-projections folded into the query and the output (DeepSeek-V2, 2024), all heads share one "KV head". Its key is
the whole cached row and its value is the latent part of it. Each row of the pages is read from memory once for a tile of
heads. The tiles of heads of one split run in consecutive programs, so that they find the row in the L2 cache.
Bytes: L + E per token. Operations: 2 * H * (2 L + E) per token. With 128 heads, both take equally long on an H100.
Splits and their merge are those of `splits`, which also explains when a row's bits depend on the batch.

Legend: S sequences, H query heads, L latent dim, E rotary dim, N blocks, B tokens of a block.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from attention.gpu.limits import check_latents, check_layout, check_tile
from attention.gpu.pages import LOG2_E, blocks_of, bound, rows_in, soften, widened
from attention.gpu.splits import (
    DecodeScratch,
    count_splits,
    find_split,
    launch_merge,
    padded_sequences,
    with_sink,
)
from attention.gpu.tiles import device_names, shape_key, tile_of
from kvcache.gpu.write import Scales


class LatentTile(NamedTuple):
    """Size of a program's work; see `decode.DecodeTile`."""

    tokens: int = 32  # tokens per product
    heads: int = 32  # their sums of 512 values fit registers on every GPU; the table has 64 where those fit
    warps: int = 8
    stages: int = 2
    programs: int = 1  # per multiprocessor
    turns: int = 4  # most splits that a program computes, in a large batch


@triton.jit(do_not_specialize=["num_sequences"])
def attend_latent_splits(
    query, latents, latent_scales, rope_scales, context, table, splits_before, sums, tops, totals, out, num_sequences, query_stride, table_stride, scale,
    S_PAD: tl.constexpr, H: tl.constexpr, HEADS: tl.constexpr, L: tl.constexpr, E: tl.constexpr, E_PAD: tl.constexpr,
    BLOCK: tl.constexpr, TILE: tl.constexpr, SPLIT: tl.constexpr, SPLITS: tl.constexpr, AT_ONCE: tl.constexpr,
    TURNS: tl.constexpr, MOST: tl.constexpr, FEW: tl.constexpr, FEW_FACTOR: tl.constexpr,
    IS_WHOLE: tl.constexpr, HAS_SCALES: tl.constexpr,
):  # fmt: skip
    """Take turns at (split, tile of heads), like `decode.attend_splits`."""
    HEAD_TILES: tl.constexpr = (H + HEADS - 1) // HEADS
    splits_up_to, factor = count_splits(
        context, num_sequences, splits_before, S_PAD, TILE, SPLIT, SPLITS, AT_ONCE, TURNS, MOST, FEW, FEW_FACTOR,
        IS_WHOLE, 0, 0,
    )  # fmt: skip
    num_parts = tl.max(splits_up_to, axis=0) * HEAD_TILES
    latent_dim, rope_dim = tl.arange(0, L), tl.arange(0, E_PAD)
    part = tl.program_id(0)
    while part < num_parts:
        sequence, has_parts, begin, stop, _ = find_split(
            context, part // HEAD_TILES, splits_up_to, factor, TILE, SPLIT, SPLITS, IS_WHOLE, 0, 0
        )
        head = part % HEAD_TILES * HEADS + tl.arange(0, HEADS)
        is_head = head[:, None] < H
        own = query + sequence.to(tl.int64) * query_stride + head[:, None] * (L + E)
        q_latent = tl.load(own + latent_dim[None, :], mask=is_head, other=0.0)
        q_rope = tl.load(own + L + rope_dim[None, :], mask=is_head & (rope_dim[None, :] < E), other=0.0)
        top, total = tl.full([HEADS], float("-inf"), tl.float32), tl.zeros([HEADS], tl.float32)
        sum_HL = tl.zeros([HEADS, L], tl.float32)
        own_table = table + sequence.to(tl.int64) * table_stride
        blocks = blocks_of(own_table, begin, stop, BLOCK, TILE)
        for tile in range(bound(tl.cdiv(stop - begin, TILE))):
            at = begin + tile * TILE
            is_seen = at + tl.arange(0, TILE) < stop
            row = rows_in(blocks, 0, 1, BLOCK, TILE)
            place = latents + row * (L + E)
            blocks = blocks_of(own_table, at + TILE, stop, BLOCK, TILE)
            latent_CL = tl.load(place[:, None] + latent_dim[None, :], mask=is_seen[:, None], other=0.0)
            is_rope = is_seen[None, :] & (rope_dim[:, None] < E)
            rope_EC = tl.load(place[None, :] + L + rope_dim[:, None], mask=is_rope, other=0.0)
            latent_CL = widened(latent_CL, q_latent)
            scores = tl.dot(q_latent, tl.trans(latent_CL), input_precision="ieee")
            of_rope = tl.dot(q_rope, widened(rope_EC, q_latent), input_precision="ieee")
            if HAS_SCALES:
                latent_scale = tl.load(latent_scales + row, mask=is_seen, other=0.0)
                scores *= latent_scale[None, :]
                of_rope *= tl.load(rope_scales + row, mask=is_seen, other=0.0)[None, :]
            scores += of_rope
            scores = tl.where(is_seen[None, :], scores, float("-inf"))
            weights, top, total, shrink = soften(scores, scale * LOG2_E, top, total)
            if HAS_SCALES:
                weights *= latent_scale[None, :]
            added = tl.dot(weights.to(latent_CL.dtype), latent_CL, input_precision="ieee")
            sum_HL = sum_HL * shrink[:, None] + added
        top *= scale * LOG2_E
        if has_parts:
            left = (part // HEAD_TILES * H + head).to(tl.int64)
            tl.store(tops + left, top, mask=head < H)
            tl.store(totals + left, total, mask=head < H)
            tl.store(sums + left[:, None] * L + latent_dim[None, :], sum_HL, mask=is_head)
        else:
            no_sink = tl.full([HEADS], float("-inf"), tl.float32)
            result = with_sink(sum_HL, top, total, no_sink).to(out.dtype.element_ty)
            left = (sequence * H + head).to(tl.int64)
            tl.store(out + left[:, None] * L + latent_dim[None, :], result, mask=is_head)
        part += tl.num_programs(0)


def latent_tile(dtype: torch.dtype, heads: int, latent_dim: int, device: torch.device) -> LatentTile:
    """Return the tile for latents of this shape and type of pages on a device."""
    fallback = LatentTile()
    # Few heads, for example split over ranks: more and smaller tiles. Codes are decoded in registers, which 32 heads fill.
    if heads < 64 or dtype.itemsize != 2:
        fallback = LatentTile(tokens=16, heads=16, stages=3 if dtype.itemsize == 2 else 2, programs=2)
    return tile_of("latent_decode", shape_key(dtype, H=heads, L=latent_dim), fallback, device_names(device))


def latent_decode(
    query_SHC: Tensor,
    latents_NBC: Tensor,
    context_S: Tensor,
    block_table_SM: Tensor,
    scratch: DecodeScratch,
    *,
    latent_dim: int,
    scale: float,
    scales: Scales | None = None,
    out: Tensor | None = None,
    tile: LatentTile | None = None,
) -> Tensor:
    """Attend each sequence's one query token to its cached latents, including its own.

    Args:
        query_SHC: [S, H, L + E], heads contiguous: the absorbed query, then its rotary part.
        latents_NBC: [N, B, L + E] pages of the same type, or of codes, contiguous.
        context_S, block_table_SM, scratch, scale, scales, out: As in `decode.paged_decode`, with L for V.
        latent_dim: L, a power of 2. tile: by default from the table.

    Returns:
        `out` [S, H, L], to be multiplied by the value up-projection; zeros for padded rows.

    Raises:
        ValueError: The kernel does not support the latents, type or layout, or the scratch is too small.
    """
    S, H, width = query_SHC.shape
    rope_dim = width - latent_dim
    check_latents(latent_dim, rope_dim, query_SHC.dtype)
    check_layout(query_SHC, latents_NBC, has_codes=scales is not None)
    tile = tile or latent_tile(latents_NBC.dtype, H, latent_dim, query_SHC.device)
    check_tile(tile.tokens, latents_NBC.shape[1])
    head_tiles, seats = triton.cdiv(H, tile.heads), scratch.multiprocessors * tile.programs
    cuts = scratch.cuts(tile.tokens, tile.programs, tile.turns, head_tiles)
    scratch.check(S, H, latent_dim, cuts)
    if out is None:
        out = query_SHC.new_empty(S, H, latent_dim)
    attend_latent_splits[(min(seats, head_tiles * cuts.most_parts(S)),)](
        query_SHC, latents_NBC, *(scales or (None, None)), context_S, block_table_SM, scratch.splits_before, scratch.sums,
        scratch.tops, scratch.totals, out, S, query_SHC.stride(0), block_table_SM.stride(0), scale, S_PAD=padded_sequences(S), H=H, HEADS=tile.heads,
        L=latent_dim, E=rope_dim, E_PAD=max(16, triton.next_power_of_2(rope_dim)), BLOCK=latents_NBC.shape[1],
        TILE=tile.tokens, HAS_SCALES=scales is not None, num_warps=tile.warps, num_stages=tile.stages, **cuts.constants(),
    )  # fmt: skip
    launch_merge(scratch, cuts, None, out)
    return out
