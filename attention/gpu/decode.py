# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator"
"""Paged decode attention on GPUs: one query token per sequence, with its context cut into splits that run in parallel.

Bound by bytes: every key and value of the contexts is read once, 2 * G * (D + V) bytes per token in a two-byte type, plus
the parts of the splits (`splits`). The query heads that share a KV head are the rows of one product, so a tile is loaded
once for all of them. `splits` explains how contexts are split and why bits do not depend on the batch.

Ideas: FlashDecoding (Dao et al., 2023), the query heads of a KV head as rows of one product (GQA packing).

Legend: S sequences, H query heads, G KV heads, D key dim, V value dim, N blocks, B tokens of a block, M largest number of
blocks of a sequence.
"""

import math
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from attention.gpu import runs
from attention.gpu.limits import WIDE_DIM, check_heads, check_layout, check_tile
from attention.gpu.pages import LOG2_E, blocks_of, bound, capped, first_seen, rows_in, soften, widened
from attention.gpu.runs import count_units, divided, end_split, find_unit, split_end
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

__all__ = ["DecodeScratch", "DecodeTile", "attend_splits", "decode_tile", "padded_sequences", "paged_decode"]

_LOG2_E = math.log2(math.e)
LEAST_ROWS = 16  # rows of a product on tensor cores


class DecodeTile(NamedTuple):
    """Size of a program's work. All fields but `programs` determine the order in which numbers are added; `turns` and the
    number of programs do so unless bits must not depend on the batch."""

    tokens: int = 32  # tokens per product
    warps: int = 4
    stages: int = 3  # of the pipeline: two tiles are being loaded while one is computed
    programs: int = 4  # per multiprocessor
    turns: int = 2  # most splits that a program computes, in a large batch


@triton.jit(do_not_specialize=["num_sequences"])
def attend_splits(
    query, keys, values, key_scales, value_scales, context, table, sinks, splits_before, run_1, sums, tops, totals, out, num_sequences, query_stride,
    table_stride, scale, factor,
    S_PAD: tl.constexpr, GROUP: tl.constexpr, ROWS: tl.constexpr, KV_HEADS: tl.constexpr, D: tl.constexpr,
    D_PAD: tl.constexpr, V: tl.constexpr, V_PAD: tl.constexpr, BLOCK: tl.constexpr, TILE: tl.constexpr,
    SPLIT: tl.constexpr, SPLITS: tl.constexpr, AT_ONCE: tl.constexpr, TURNS: tl.constexpr,
    MOST: tl.constexpr, FEW: tl.constexpr, FEW_FACTOR: tl.constexpr, RUN: tl.constexpr, IS_WHOLE: tl.constexpr,
    WINDOW: tl.constexpr, CHUNK: tl.constexpr, SOFT_CAP: tl.constexpr, HAS_SINKS: tl.constexpr,
    HAS_SCALES: tl.constexpr,
):  # fmt: skip
    """Take turns at (split, KV head) and store unnormalised sums [GROUP, V], maxima (base 2) and sums of weights.

    If the sequence is one split, store the result instead. RUN > 0: the same with units of `runs`, splits or runs of RUN,
    and with maxima of unscaled scores. `factor` scales scores to base 2, after `scale` if they have a soft cap.
    """
    if RUN > 0:
        splits_up_to, times = count_units(
            context,
            num_sequences,
            splits_before,
            run_1,
            S_PAD,
            TILE,
            SPLIT,
            SPLITS,
            RUN,
            AT_ONCE,
            MOST,
            WINDOW,
            CHUNK,
        )
    else:
        splits_up_to, times = count_splits(
            context, num_sequences, splits_before, S_PAD, TILE, SPLIT, SPLITS, AT_ONCE, TURNS, MOST, FEW, FEW_FACTOR,
            IS_WHOLE, WINDOW, CHUNK,
        )  # fmt: skip
    num_parts = tl.max(splits_up_to, axis=0) * KV_HEADS
    head, dim, value_dim = tl.arange(0, ROWS), tl.arange(0, D_PAD), tl.arange(0, V_PAD)
    part = tl.program_id(0)
    while part < num_parts:
        kv_head = part % KV_HEADS
        if RUN > 0:
            sequence, has_parts, begin, stop, end, split, first, tiles, count = find_unit(
                context, part // KV_HEADS, splits_up_to, times, TILE, SPLIT, SPLITS, WINDOW, CHUNK
            )
        else:
            sequence, has_parts, begin, stop, end = find_split(
                context, part // KV_HEADS, splits_up_to, times, TILE, SPLIT, SPLITS, IS_WHOLE, WINDOW, CHUNK
            )
        heads = kv_head * GROUP + head
        q = tl.load(
            query + sequence.to(tl.int64) * query_stride + heads[:, None] * D + dim[None, :],
            mask=(head[:, None] < GROUP) & (dim[None, :] < D), other=0.0,
        )  # fmt: skip
        top, total = tl.full([ROWS], float("-inf"), tl.float32), tl.zeros([ROWS], tl.float32)
        sum_RV = tl.zeros([ROWS, V_PAD], tl.float32)
        whole_top, whole_total, whole_RV = top, total, sum_RV
        own_table = table + sequence.to(tl.int64) * table_stride
        blocks = blocks_of(own_table, begin, stop, BLOCK, TILE)
        for tile in range(bound(tl.cdiv(stop - begin, TILE))):
            at = begin + tile * TILE
            token = at + tl.arange(0, TILE)
            is_seen = token < stop
            if WINDOW > 0 or CHUNK > 0:
                is_seen &= token >= first_seen(end - 1, WINDOW, CHUNK)
            row = rows_in(blocks, kv_head, KV_HEADS, BLOCK, TILE)
            blocks = blocks_of(own_table, at + TILE, stop, BLOCK, TILE)
            key_DC = tl.load(
                keys + row[None, :] * D + dim[:, None], mask=is_seen[None, :] & (dim[:, None] < D), other=0.0
            )
            scores = tl.dot(q, widened(key_DC, q), input_precision="ieee")
            if HAS_SCALES:
                scores *= tl.load(key_scales + row, mask=is_seen, other=0.0)[None, :]
            if SOFT_CAP > 0:
                scores = capped(scores * scale, SOFT_CAP)
            scores = tl.where(is_seen[None, :], scores, float("-inf"))
            weights, top, total, shrink = soften(scores, factor, top, total)
            value_CV = tl.load(
                values + row[:, None] * V + value_dim[None, :],
                mask=is_seen[:, None] & (value_dim[None, :] < V), other=0.0,
            )  # fmt: skip
            if HAS_SCALES:
                weights *= tl.load(value_scales + row, mask=is_seen, other=0.0)[None, :]
            added = tl.dot(weights.to(q.dtype), widened(value_CV, q), input_precision="ieee")
            sum_RV = sum_RV * shrink[:, None] + added
            if RUN > 0:
                is_end = at + TILE == split_end(split, first, tiles, count, TILE)
                split += is_end.to(tl.int32)
                whole_top, whole_total, whole_RV, top, total, sum_RV = end_split(
                    is_end, whole_top, whole_total, whole_RV, top, total, sum_RV, factor
                )
        if RUN > 0:
            top, total, sum_RV = whole_top, whole_total, whole_RV
        else:
            top *= factor
        is_out = (head[:, None] < GROUP) & (value_dim[None, :] < V)
        if has_parts:
            left = (part // KV_HEADS * (KV_HEADS * GROUP) + heads).to(tl.int64)
            tl.store(tops + left, top, mask=head < GROUP)
            tl.store(totals + left, total, mask=head < GROUP)
            tl.store(sums + left[:, None] * V + value_dim[None, :], sum_RV, mask=is_out)
        else:
            sink = tl.full([ROWS], float("-inf"), tl.float32)
            if HAS_SINKS:
                sink = tl.load(sinks + heads, mask=head < GROUP, other=0.0).to(tl.float32) * LOG2_E
            if RUN > 0:
                result = divided(top, total, sum_RV, sink, factor).to(out.dtype.element_ty)
            else:
                result = with_sink(sum_RV, top, total, sink).to(out.dtype.element_ty)
            own = (sequence * (KV_HEADS * GROUP) + heads).to(tl.int64)
            tl.store(out + own[:, None] * V + value_dim[None, :], result, mask=is_out)
        part += tl.num_programs(0)


def decode_tile(
    dtype: torch.dtype, key_dim: int, value_dim: int, group: int, device: torch.device
) -> DecodeTile:
    """Return the tile for heads of this shape on a device."""
    fallback = DecodeTile()
    if max(key_dim, value_dim) > 128 or dtype.itemsize > 2:  # twice the registers and shared memory
        fallback = DecodeTile(programs=2)
    if max(key_dim, value_dim) > WIDE_DIM:
        fallback = DecodeTile(tokens=16, warps=8, programs=2)
    shape = shape_key(dtype, D=key_dim, V=value_dim, GROUP=group)
    return tile_of("paged_decode", shape, fallback, device_names(device))


def paged_decode(
    query_SHD: Tensor,
    keys_NGBD: Tensor,
    values_NGBV: Tensor,
    context_S: Tensor,
    block_table_SM: Tensor,
    scratch: DecodeScratch,
    *,
    scale: float,
    scales: Scales | None = None,
    window: int = 0,
    chunk: int = 0,
    soft_cap: float = 0.0,
    sinks_H: Tensor | None = None,
    out: Tensor | None = None,
    tile: DecodeTile | None = None,
) -> Tensor:
    """Attend each sequence's one query token to its cached tokens, including itself.

    Args:
        query_SHD: [S, H, D], heads contiguous; bfloat16, float16 or float32.
        keys_NGBD, values_NGBV: Pages of the same type, or of codes, contiguous. They already hold the step's own tokens.
        context_S: int64 [S], tokens of each sequence, including the query token; 0 for a padded row.
        block_table_SM: int64 [S, M], rows contiguous.
        scratch: Scratch memory for at least these sequences, heads and values.
        scale: Factor on the scores, above 0. scales: those of pages of codes (`kvcache.gpu.write`). window: number of tokens that a row sees, including itself; 0 for all.
        chunk: Size of the chunks, counted from the first token. Rows see only their own chunk; 0 for no chunks. Excludes a window.
        soft_cap: Bound on the scores (see `pages.capped`); 0 for none. sinks_H: [H] logits that carry no value (gpt-oss).
        out: [S, H, V] contiguous to write into; by default a new tensor.
        tile: Tile to use; by default from the table.

    Returns:
        `out`; zeros for padded rows.

    Raises:
        ValueError: The kernel does not support the heads, type or layout, or the scratch is too small.
    """
    S, H, D = query_SHD.shape
    _, G, block, V = values_NGBV.shape
    check_heads(H, G, D, V, query_SHD.dtype)
    check_layout(query_SHD, keys_NGBD, values_NGBV, has_codes=scales is not None)
    tile = tile or decode_tile(query_SHD.dtype, D, V, H // G, query_SHD.device)
    check_tile(tile.tokens, block)
    programs = min(tile.programs, runs.MOST_PROGRAMS) if scratch.run else tile.programs
    seats = scratch.multiprocessors * programs
    cuts = scratch.cuts(tile.tokens, programs, tile.turns, G, window, chunk, has_runs=True)
    scratch.check(S, H, V, cuts)
    factor = (1.0 if soft_cap > 0 else scale) * _LOG2_E
    if out is None:
        out = query_SHD.new_empty(S, H, V)
    attend_splits[(min(seats, G * cuts.most_parts(S)),)](
        query_SHD, keys_NGBD, values_NGBV, *(scales or (None, None)), context_S, block_table_SM, sinks_H, scratch.splits_before, scratch.run_1,
        scratch.sums, scratch.tops, scratch.totals, out, S, query_SHD.stride(0), block_table_SM.stride(0), scale, factor,
        S_PAD=padded_sequences(S), GROUP=H // G, RUN=cuts.run, ROWS=max(LEAST_ROWS, triton.next_power_of_2(H // G)), KV_HEADS=G, D=D, D_PAD=triton.next_power_of_2(D), V=V,
        V_PAD=triton.next_power_of_2(V), BLOCK=block, TILE=tile.tokens, WINDOW=window, CHUNK=chunk, SOFT_CAP=soft_cap,
        HAS_SINKS=sinks_H is not None, HAS_SCALES=scales is not None, num_warps=tile.warps, num_stages=tile.stages, **cuts.constants(),
    )  # fmt: skip
    if cuts.run:
        runs.launch_merge(scratch, cuts, sinks_H, out, factor)
    else:
        launch_merge(scratch, cuts, sinks_H, out)
    return out
