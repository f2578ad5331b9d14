"""A sparse index over pools of tokens on CPU: the keys of pools are made once and stored in the pages; rows choose whole pools.

A page of index keys holds the keys and gates of its tokens, then the keys of its pools: a pool lies within a block. A
pool's key is made in the step that adds its last token, from the pages alone, so no bit depends on how a prompt was cut.

Legend: T rows, I index heads, D index dim, K largest number of chosen tokens, N blocks.
"""

import math

import numpy as np
import torch
from torch import Tensor

from attention.cpu.attention import PRODUCTS_PER_NS
from attention.cpu.tiles import LANES, TILES_VERSION
from attention.sparse.cpu import COUNTS, largest, ordered
from attention.sparse.pools import Pooling
from dispatch.compiled.native import bits_of, float_of, floats, int32s, words
from dispatch.compiled.team import Kernel, program_of, run
from kvcache.paged_cache import PagedCache


def _pool(  # type: ignore[no-untyped-def]
    tile, pages, dims, dim, size, bias, query_starts, contexts, tables, sequences_at, table_stride,
):  # fmt: skip
    # A tile is one sequence: it makes the keys of the pools that its rows complete.
    if tile < 0:
        return words(sequences_at, 1)[0]
    starts, context = words(query_starts + tile * 8, 2), words(contexts + tile * 8, 1)[0]
    table = tables + tile * table_stride
    first = (context - (starts[1] - starts[0])) // size
    biases = floats(bias, size * dim)
    shares = np.empty(size, np.float32)
    for pool in range(first, context // size):
        page = pages + words(table + pool * size // LANES * 8, 1)[0] * dims * LANES * 4
        lane = pool * size % LANES
        pooled = floats(page + (2 * dim * LANES + lane // size * dim) * 4, dim)
        for channel in range(dim):
            keys = floats(page + (channel * LANES + lane) * 4, size)
            gates = floats(page + ((dim + channel) * LANES + lane) * 4, size)
            top, total, mean = np.float32(-np.inf), np.float32(0.0), np.float32(0.0)
            for place in range(size):
                shares[place] = gates[place] + biases[place * dim + channel]
                top = max(top, shares[place])
            for place in range(size):
                shares[place] = np.float32(math.exp(shares[place] - top))
                total += shares[place]
            for place in range(size):
                mean += shares[place] / total * keys[place]
            pooled[channel] = mean
    return 0


def _choose_pools(  # type: ignore[no-untyped-def]
    tile, query, weight, scale_bits, heads, dim, pages, dims, size, wanted, out, query_starts, contexts, tables,
    facts_at, table_stride,
):  # fmt: skip
    # A tile is one row: it writes the tokens of its best pools as slots, then those of the incomplete pool, then -1.
    scale = float_of(scale_bits)
    facts = words(facts_at, 4)
    if tile < 0:
        return facts[0]
    sequence = 0
    starts = words(query_starts, facts[3] + 1)
    while starts[sequence + 1] <= tile:
        sequence += 1
    seen = words(contexts + sequence * 8, 1)[0] - (starts[sequence + 1] - tile) + 1  # visible tokens
    table, pools = tables + sequence * table_stride, seen // size
    width = wanted * size + size - 1
    chosen = int32s(out + tile * width * 4, width)
    weights = floats(weight + tile * heads * 4, heads)
    order = np.empty(max(pools, 1), np.uint32)
    least, equal = np.uint32(0), np.int64(pools)
    if pools > wanted:
        for pool in range(pools):
            page = pages + words(table + pool * size // LANES * 8, 1)[0] * dims * LANES * 4
            pooled = floats(page + (2 * dim * LANES + pool * size % LANES // size * dim) * 4, dim)
            score = np.float32(0.0)
            for head in range(heads):
                of_head = floats(query + (tile * heads + head) * dim * 4, dim)
                product = np.float32(0.0)
                for channel in range(dim):
                    product += of_head[channel] * pooled[channel]
                score += weights[head] * max(product * scale, np.float32(0.0))
            order[pool] = ordered(score)
        least, equal = largest(order, pools, wanted, np.empty(COUNTS, np.int64))
    place = 0
    for pool in range(pools):
        is_chosen = pools <= wanted or order[pool] > least
        if not is_chosen and order[pool] == least and equal > 0:
            is_chosen = True
            equal -= 1
        if is_chosen:
            slot = words(table + pool * size // LANES * 8, 1)[0] * LANES + pool * size % LANES
            for token in range(size):
                chosen[place + token] = slot + token
            place += size
    for position in range(pools * size, seen):
        chosen[place] = words(table + position // LANES * 8, 1)[0] * LANES + position % LANES
        place += 1
    chosen[place:] = -1
    return 0


POOL_KEYS, CHOOSE_POOLS = Kernel(_pool, TILES_VERSION), Kernel(_choose_pools, TILES_VERSION)
POOL_KERNELS = POOL_KEYS, CHOOSE_POOLS


def choose_pools(
    pages: PagedCache, layer: int, query_TID: Tensor, weight_TI: Tensor, scale: float, pooling: Pooling
) -> Tensor:
    """Choose for every row of the step the pools of its own sequence that its index heads score highest.

    Args:
        pages: The cache. Its step is set and it holds the step's own keys and gates.
        query_TID: [T, I, D], weight_TI: [T, I]. The rows of the step come first.
        scale: Factor on products, before their positive part is taken.

    Returns:
        [1, T, K] int32 cache slots in the order of the text, then -1. Rows of padding choose nothing.
    """
    step = pages.step
    assert step is not None, "a step must be set before the model runs"
    rows, heads, dim = query_TID.shape
    query, weight = query_TID.float().contiguous(), weight_TI.float().contiguous()
    bias, keys = pooling.bias_BD.float().contiguous(), pages.indexes[layer]
    chosen_TK = torch.full((rows, pooling.num_tokens), -1, dtype=torch.int32)
    batch = step.query_start_S.data_ptr(), step.context_S.data_ptr(), step.block_table_SM.data_ptr()
    stride = step.block_table_SM.stride(0) * 8
    program = program_of([
        POOL_KEYS.row(
            keys.data_ptr(), keys.shape[1], dim, pooling.pool_tokens, bias.data_ptr(), *batch, step.facts[4:].data_ptr(), stride
        ),
        CHOOSE_POOLS.row(
            query.data_ptr(), weight.data_ptr(), bits_of(scale), heads, dim, keys.data_ptr(), keys.shape[1],
            pooling.pool_tokens, pooling.num_chosen, chosen_TK.data_ptr(), *batch, step.facts[1:].data_ptr(), stride,
        ),
    ])  # fmt: skip
    run(program, step.team, step.num_pairs * heads * dim // pooling.pool_tokens // PRODUCTS_PER_NS)
    return chosen_TK[None]
