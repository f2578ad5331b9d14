"""Paged attention on CPU: flash-style, one fixed order of blocks, any number of query rows.

A task is one KV head of up to `TILE_ROWS` query rows of one sequence (query tokens times the heads that share
the KV head). It walks the sequence's blocks from the first visible to the last, keeps a running maximum and sum
(online softmax: Milakov and Gimelshein 2018, FlashAttention, Dao et al. 2022), and never splits a row's keys
between threads: a row's result depends on its own query, keys and values only. Blocks that a row may not see
get weight zero, which changes no bit of it.
Rejected: split-KV for a lone long decode (its reduction order would depend on the split).

Legend: T rows of the batch, H query heads, G KV heads, D key dim, V value dim, B tokens of a block, S sequences.
"""

import math

import numpy as np
import torch
from numba import prange
from torch import Tensor

from attention.cpu_tiles import (
    LANES,
    add_rows_times_panel_f32,
    address_of,
    load_f32,
    rows_times_panel_f32,
    scale_block,
    serial_and_parallel,
    softmax_block,
)
from kvcache.step import Step

PARALLEL_PRODUCTS = 2_000_000  # some 200 us on one thread; less is not worth waking another for
TILE_ROWS = 48  # query rows per task: their scratch (queries, sums, scores) stays in L1


def _attend(  # type: ignore[no-untyped-def]
    query, strides, dims, keys, values, tiles, query_start, context, tables, scale, window, sinks, out
):
    token_stride, head_stride = strides
    heads, kv_heads, key_dim, value_dim = dims
    group = heads // kv_heads
    value_lanes = -(-value_dim // LANES) * LANES
    for task in prange(tiles.shape[0] * kv_heads):
        sequence, first, count = tiles[task // kv_heads]
        kv_head = task % kv_heads
        rows = count * group
        begin = context[sequence] - (
            query_start[sequence + 1] - query_start[sequence]
        )  # cached before this step
        position = begin + first  # of the tile's first query token
        q = np.empty((rows, key_dim), np.float32)
        scores = np.empty((rows, LANES), np.float32)
        sums = np.zeros((rows, value_lanes), np.float32)
        top = np.full(rows, -np.inf, np.float32)
        total = np.zeros(rows, np.float32)
        base = query + (query_start[sequence] + first) * token_stride + kv_head * group * head_stride
        for row in range(rows):
            source = base + (row // group) * token_stride + (row % group) * head_stride
            for dim in range(key_dim):
                q[row, dim] = load_f32(source + dim * 4)
        if sinks.shape[0]:
            for row in range(rows):
                top[row] = sinks[kv_head * group + row % group]
                total[row] = 1.0
        start = max(0, position - window + 1) // LANES if window > 0 else 0
        for column in range(start, (position + count - 1) // LANES + 1):
            block = tables[sequence, column] * kv_heads + kv_head
            key_panel = keys + block * key_dim * LANES * 4
            rows_times_panel_f32(
                address_of(q), key_dim * 4, key_panel, LANES * 4, key_dim, address_of(scores), LANES * 4, rows
            )
            for row in range(rows):
                here = position + row // group
                low = here - window + 1 - column * LANES if window > 0 else 0
                high = here + 1 - column * LANES
                seen, weight = softmax_block(address_of(scores) + row * LANES * 4, scale, low, high, top[row])
                if seen > top[row]:
                    shrink = np.float32(math.exp(top[row] - seen))
                    total[row] *= shrink
                    for lane in range(0, value_lanes, LANES):
                        scale_block(address_of(sums) + (row * value_lanes + lane) * 4, shrink)
                    top[row] = seen
                total[row] += weight
            value_panel = values + block * LANES * value_dim * 4
            for lane in range(0, value_lanes, LANES):
                add_rows_times_panel_f32(
                    address_of(scores), LANES * 4, value_panel + lane * 4, value_dim * 4, LANES,
                    address_of(sums) + lane * 4, value_lanes * 4, rows,
                )  # fmt: skip
        for row in range(rows):
            token = query_start[sequence] + first + row // group
            for dim in range(value_dim):
                out[token, kv_head * group + row % group, dim] = sums[row, dim] / total[row]


_attend_serial, _attend_parallel = serial_and_parallel(_attend)


def paged_attention(
    query_HTD: Tensor,
    keys_NGDB: Tensor,
    values_NGBV: Tensor,
    step: Step,
    *,
    scale: float,
    window: int = 0,
    sinks_H: Tensor | None = None,
) -> Tensor:
    """Attend every row of the step to its own sequence's cached tokens, itself included.

    Args:
        query_HTD: [H, T, D] float32, last dim contiguous; the rows that `step` describes come first.
        keys_NGDB: [N, G, D, 16] float32 pages. values_NGBV: [N, G, 16, V]; V a multiple of 16.
        step: rows, contexts and block tables; the pages already hold the step's own tokens.
        scale: factor on the scores.
        window: tokens a row sees, itself included; 0 is all.
        sinks_H: [H] float32 logits that take part in the softmax and carry no value (gpt-oss).

    Returns:
        [T, H, V] float32, new; padded rows are zero.
    """
    heads, tokens, key_dim = query_HTD.shape
    _, kv_heads, block_tokens, value_dim = values_NGBV.shape
    if block_tokens != LANES or value_dim % LANES:
        raise ValueError(
            f"CPU attention needs {LANES} tokens per block and value heads of a multiple of {LANES} values; "
            f"got {block_tokens} and {value_dim}"
        )
    out_THV = torch.zeros(tokens, heads, value_dim)
    products = step.num_pairs * heads * (key_dim + value_dim)
    kernel = _attend_parallel if step.is_parallel and products > PARALLEL_PRODUCTS else _attend_serial
    kernel(
        query_HTD.data_ptr(),
        (query_HTD.stride(1) * 4, query_HTD.stride(0) * 4),
        (heads, kv_heads, key_dim, value_dim),
        keys_NGDB.data_ptr(),
        values_NGBV.data_ptr(),
        step.tiles(max(1, TILE_ROWS // (heads // kv_heads))),
        step.query_start_S.numpy(),
        step.context_S.numpy(),
        step.block_table_SM.numpy(),
        np.float32(scale),
        window,
        np.empty(0, np.float32) if sinks_H is None else sinks_H.detach().numpy(),
        out_THV.numpy(),
    )
    return out_THV
