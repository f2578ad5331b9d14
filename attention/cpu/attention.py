"""Paged attention on CPU: flash-style, one fixed order of blocks, any number of query rows.

A task is one KV head of up to `TILE_ROWS` query rows of one sequence (query tokens times the heads that share the KV
head). It walks the sequence's blocks from the first visible one to the last and keeps a running maximum and sum (online
softmax: Milakov and Gimelshein, 2018; FlashAttention, Dao et al., 2022). The keys of a row are never split between
threads, so a row's result depends only on its own query, keys and values. Blocks that a row cannot see get weight
zero, which changes no bit of its result.
Rejected: split-KV for a single long decode (its reduction order would depend on the split).

Legend: T rows of the batch, H query heads, G KV heads, D key dim, V value dim, B tokens of a block, S sequences.
"""

import math
from typing import NamedTuple

import numpy as np
import torch
from numba import njit
from torch import Tensor

from attention.cpu.cached import add_values, fetch_next, kernels_of, score_rows
from attention.cpu.tiles import LANES, address_of, load_f32, scale_block, softmax_block
from dispatch.compiled.native import bits_of, float_of, floats, words
from dispatch.compiled.team import program_of, run
from kvcache.codes import key_dim_of
from kvcache.step import Step

PRODUCTS_PER_NS = 20  # approximate rate of one thread
TILE_ROWS = 48  # query rows per task: their scratch (queries, sums, scores) stays in L1


@njit(nogil=True, inline="always")
def _first_seen(position, window, chunk):  # type: ignore[no-untyped-def]
    if window > 0:
        return max(0, position - window + 1)
    return position // chunk * chunk if chunk > 0 else 0


def _attend(  # type: ignore[no-untyped-def]
    tile, query, token_stride, head_stride, heads, kv_heads, key_dim, value_dim, keys, values, scale_bits, window,
    sinks, out, tiles, num_tiles, query_starts, contexts, tables, table_stride, chunk, key_bytes, value_bytes,
    image_ends,
):  # fmt: skip
    scale = float_of(scale_bits)
    if tile < 0:
        return num_tiles * kv_heads
    group = heads // kv_heads
    value_lanes = -(-value_dim // LANES) * LANES
    part = words(tiles + tile // kv_heads * 24, 3)
    sequence, first, count = part[0], part[1], part[2]
    kv_head = tile % kv_heads
    starts, context, table = (
        words(query_starts + sequence * 8, 2),
        words(contexts + sequence * 8, 1)[0],
        tables + sequence * table_stride,
    )
    rows = count * group
    begin = context - (starts[1] - starts[0])  # tokens cached before this step
    position = begin + first  # position of the tile's first query token
    q = np.empty((rows, key_dim), np.float32)
    scores = np.empty((rows, LANES), np.float32)
    sums = np.zeros((rows, value_lanes), np.float32)
    top = np.full(rows, -np.inf, np.float32)
    total = np.zeros(rows, np.float32)
    base = query + (starts[0] + first) * token_stride + kv_head * group * head_stride
    for row in range(rows):
        source = base + (row // group) * token_stride + (row % group) * head_stride
        for dim in range(key_dim):
            q[row, dim] = load_f32(source + dim * 4)
    if sinks != 0:
        for row in range(rows):
            top[row] = load_f32(sinks + (kv_head * group + row % group) * 4)
            total[row] = 1.0
    ends = image_ends + (starts[0] + first) * 8 if image_ends != 0 else 0
    end = position + count
    for token in range(count if ends != 0 else 0):
        end = max(end, words(ends + token * 8, 1)[0])
    start, last = _first_seen(position, window, chunk) // LANES, (end - 1) // LANES
    for column in range(start, last + 1):
        block = words(table + column * 8, 1)[0] * kv_heads + kv_head
        key_panel = keys + block * key_bytes
        score_rows(address_of(q), key_dim, key_panel, address_of(scores), rows)
        for row in range(rows):
            here = position + row // group
            low = _first_seen(here, window, chunk) - column * LANES
            high = (
                max(here + 1, words(ends + row // group * 8, 1)[0]) if ends != 0 else here + 1
            ) - column * LANES
            seen, weight = softmax_block(address_of(scores) + row * LANES * 4, scale, low, high, top[row])
            if seen > top[row]:
                shrink = np.float32(math.exp(top[row] - seen))
                total[row] *= shrink
                for lane in range(0, value_lanes, LANES):
                    scale_block(address_of(sums) + (row * value_lanes + lane) * 4, shrink)
                top[row] = seen
            total[row] += weight
        if column < last:
            following = words(table + (column + 1) * 8, 1)[0] * kv_heads + kv_head
            fetch_next(keys + following * key_bytes, key_bytes, values + following * value_bytes, value_bytes)
        value_scales = key_panel + key_bytes - LANES * 4
        add_values(
            address_of(scores), values + block * value_bytes, value_lanes, value_scales, address_of(sums), rows
        )  # fmt: skip
    for row in range(rows):
        token = starts[0] + first + row // group
        to = floats(out + ((token * heads) + kv_head * group + row % group) * value_dim * 4, value_dim)
        for dim in range(value_dim):
            to[dim] = sums[row, dim] / total[row]
    return 0


ATTEND = kernels_of(_attend)
TILES, NUM_TILES = (ATTEND[torch.float32].place(name) for name in ("tiles", "num_tiles"))


def tile_tokens(heads: int, kv_heads: int) -> int:
    """Return the number of query tokens in a tile, for `Step.tiles`."""
    return max(1, TILE_ROWS // (heads // kv_heads))


class Queries(NamedTuple):
    """Location of the query rows: address, bytes from one token to the next, bytes from one head to the next."""

    address: int
    token_stride: int
    head_stride: int


def attention_row(
    queries: Queries,
    heads: int,
    keys_NGDB: Tensor,
    values_NGBV: Tensor,
    step: Step,
    *,
    value_dim: int,
    scale: float,
    window: int,
    chunk: int,
    sinks: int,
    out: int,
    sees_images: bool = False,
) -> list[int]:
    """Return one row of a program, for the batch that `step` describes now. Arguments as in `paged_attention`.

    Args:
        value_dim: Values per head in `out`, at most V. sinks: address of [H] float32, or 0 without sinks.
        out: Address of [T, H, value_dim] float32. Rows of padding are not written.
    """
    kv_heads, key_dim = keys_NGDB.shape[1], key_dim_of(keys_NGDB)
    key_bytes, value_bytes = (pages.stride(1) * pages.element_size() for pages in (keys_NGDB, values_NGBV))
    tiles, table = step.tiles(tile_tokens(heads, kv_heads)), step.block_table_SM
    return ATTEND[keys_NGDB.dtype].row(
        *queries, heads, kv_heads, key_dim, value_dim, keys_NGDB.data_ptr(), values_NGBV.data_ptr(), bits_of(scale),
        window, sinks, out, tiles.ctypes.data, len(tiles), step.query_start_S.data_ptr(), step.context_S.data_ptr(),
        table.data_ptr(), table.stride(0) * 8, chunk, key_bytes, value_bytes,
        step.image_end_T.data_ptr() if sees_images else 0,
    )  # fmt: skip


def paged_attention(
    query_HTD: Tensor,
    keys_NGDB: Tensor,
    values_NGBV: Tensor,
    step: Step,
    *,
    scale: float,
    window: int = 0,
    chunk: int = 0,
    sinks_H: Tensor | None = None,
    sees_images: bool = False,
) -> Tensor:
    """Attend every row of the step to the cached tokens of its sequence, including itself.

    Args:
        query_HTD: [H, T, D] float32, last dim contiguous. The rows that `step` describes come first.
        keys_NGDB: [N, G, D, 16] float32 pages, or codes with scales (`kvcache.codes`). values_NGBV: [N, G, 16, V] of the
            same type, V a multiple of 16.
        step: Rows, contexts and block tables. The pages already hold the step's own tokens.
        scale: Factor on the scores.
        window: Number of tokens that a row sees, including itself; 0 for all.
        chunk: Size of the chunks, counted from the first token. Rows see only their own chunk; 0 for no chunks. Excludes a window.
        sinks_H: [H] float32 logits that take part in the softmax and carry no value (gpt-oss).
        sees_images: Rows of an image also see the later rows of this image (Gemma 4).

    Returns:
        [T, H, V] float32, new; padded rows are zero.
    """
    heads, tokens, key_dim = query_HTD.shape
    block_tokens, value_dim = values_NGBV.shape[2:]
    if block_tokens != LANES or value_dim % LANES:
        raise ValueError(
            f"CPU attention needs blocks of {LANES} tokens and value heads with a multiple of {LANES} values; "
            f"got {block_tokens} and {value_dim}"
        )
    out_THV = torch.zeros(tokens, heads, value_dim)
    queries = Queries(query_HTD.data_ptr(), query_HTD.stride(1) * 4, query_HTD.stride(0) * 4)
    row = attention_row(
        queries, heads, keys_NGDB, values_NGBV, step, value_dim=value_dim, scale=scale, window=window,
        chunk=chunk, sinks=0 if sinks_H is None else sinks_H.data_ptr(), out=out_THV.data_ptr(),
        sees_images=sees_images,
    )  # fmt: skip
    run(program_of([row]), step.team, step.num_pairs * heads * (key_dim + value_dim) // PRODUCTS_PER_NS)
    return out_THV
