"""Sparse attention on CPU: an index chooses tokens from a sequence's pages, and attention reads only their latents.

Index keys have the layout of attention's keys, the 16 tokens of a block side by side, so that a row's index heads multiply
one block at a time. The choice depends only on the row's own scores: the largest win, and ties go to the earlier token.
Chosen tokens are passed on as cache slots (block * 16 + offset) in the order of the text, so layers that share a choice
need nothing else. If all tokens are chosen, attention gives the same bits as dense attention.

Legend: T rows, H query heads, I index heads, D index dim, K largest number of chosen tokens, N blocks, L latent dim, V value
dim, W width of a page's row, R current rows, G groups of 16 heads.
"""

import numpy as np
import torch
from numba import njit
from torch import Tensor

from attention.cpu.attention import PRODUCTS_PER_NS, Queries
from attention.cpu.cached import float_bytes, kernels_of, read_latent, score_rows
from attention.cpu.latent_tiles import mix_block, softmax_lanes, transpose_block
from attention.cpu.latents import (
    ROWS_AT_ONCE,
    TILE_TOKENS,
    TILES_AT_ONCE,
    AbsorbedWeight,
    absorb_rows,
    expand_rows,
    room_floats,
)
from attention.cpu.tiles import LANES, address_of, rows_times_panel_f32
from dispatch.compiled.native import bits_of, float_of, floats, int32s, words
from dispatch.compiled.team import Kernel, program_of, run
from kvcache.paged_cache import PagedCache
from kvcache.step import Step

_DIGIT_BITS = 11
COUNTS = 1 << _DIGIT_BITS  # size of the `counts` buffer of `largest`


@njit(nogil=True, inline="always")
def ordered(score):  # type: ignore[no-untyped-def]
    """Return whole numbers in the same order as the scores."""
    bits = np.float32(score).view(np.uint32)
    word = bits if score != np.float32(0.0) else np.uint32(0)  # no -0
    return ~word if word >> np.uint32(31) else word | np.uint32(0x80000000)


@njit(nogil=True, inline="always")
def largest(keys, count, wanted, counts):  # type: ignore[no-untyped-def]
    """Return the `wanted`-th largest of `count` keys and how many of its equals are wanted, found a digit at a time."""
    prefix, mask, shift = np.uint32(0), np.uint32(0), 32
    left = wanted
    while shift > 0:
        bits = min(_DIGIT_BITS, shift)
        shift -= bits
        counts[:] = 0
        for index in range(count):
            if keys[index] & mask == prefix:
                counts[(keys[index] >> np.uint32(shift)) & np.uint32((1 << bits) - 1)] += 1
        digit = (1 << bits) - 1
        while counts[digit] < left:
            left -= counts[digit]
            digit -= 1
        prefix |= np.uint32(digit) << np.uint32(shift)
        mask |= np.uint32((1 << bits) - 1) << np.uint32(shift)
    return prefix, left


def _choose(  # type: ignore[no-untyped-def]
    tile, query, weight, scale_bits, heads, dim, keys, wanted, out, query_starts, contexts, tables, facts,
    table_stride, panel_bytes,
):  # fmt: skip
    # A tile is one row: it scores all tokens up to itself, then writes the best as slots, followed by -1.
    scale = float_of(scale_bits)
    rows = words(facts, 4)[0]
    if tile < 0:
        return rows
    sequence = 0
    starts = words(query_starts, words(facts, 4)[3] + 1)
    while starts[sequence + 1] <= tile:
        sequence += 1
    context, table = words(contexts + sequence * 8, 1)[0], tables + sequence * table_stride
    count = context - (starts[sequence + 1] - tile) + 1  # tokens that the row sees
    chosen = int32s(out + tile * wanted * 4, wanted)
    if count <= wanted:
        for position in range(count):
            chosen[position] = words(table + position // LANES * 8, 1)[0] * LANES + position % LANES
        chosen[count:] = -1
        return 0
    blocks = (count + LANES - 1) // LANES
    sums, products = np.zeros(blocks * LANES, np.float32), np.empty((heads, LANES), np.float32)
    weights = floats(weight + tile * heads * 4, heads)
    for block in range(blocks):
        panel = keys + words(table + block * 8, 1)[0] * panel_bytes
        score_rows(query + tile * heads * dim * 4, dim, panel, address_of(products), heads)
        here = sums[block * LANES : (block + 1) * LANES]
        for head in range(heads):
            for lane in range(LANES):
                here[lane] += weights[head] * max(products[head, lane] * scale, np.float32(0.0))
    order = np.empty(count, np.uint32)  # whole numbers in the order of the float scores
    for position in range(count):
        order[position] = ordered(sums[position])
    least, equal = largest(order, count, wanted, np.empty(COUNTS, np.int64))
    place = 0
    for position in range(count):
        if order[position] == least:
            equal -= 1
        if order[position] > least or (order[position] == least and equal >= 0):
            chosen[place] = words(table + position // LANES * 8, 1)[0] * LANES + position % LANES
            place += 1
    return 0


def _attend_chosen(  # type: ignore[no-untyped-def]
    tile, query, width, groups, latents, row_bytes, chunk_at, chosen_at, most, sinks, scale_bits, out, latent_lanes,
    heads, latent,
):  # fmt: skip
    # A tile is 16 heads of one row. It writes the weighted means of latents to `out` [R, G, 16, padded L].
    chunk = words(chunk_at, 4)
    scale = float_of(scale_bits)
    if tile < 0:
        return chunk[3] * groups
    row, group = tile // groups, tile % groups
    here_heads = min(LANES, heads - group * LANES)
    chosen = int32s(chosen_at + (chunk[2] + row) * most * 4, most)
    count = most
    while count > 0 and chosen[count - 1] < 0:
        count -= 1
    scores = np.empty((LANES, LANES), np.float32)
    weights = np.empty((LANES, LANES), np.float32)
    top, total = np.full(LANES, -np.inf, np.float32), np.zeros(LANES, np.float32)
    shrink = np.empty(LANES, np.float32)
    if sinks != 0:
        for lane in range(here_heads):
            top[lane] = floats(sinks + (group * LANES + lane) * 4, 1)[0]
            total[lane] = 1.0
    page_bytes = float_bytes(row_bytes)
    room = np.zeros(LANES * page_bytes // 4 + LANES, np.float32)  # decoding may write after a row's end
    sums = out + (row * groups + group) * LANES * latent_lanes * 4
    floats(sums, LANES * latent_lanes)[:] = 0.0
    panel = query + (row * groups + group) * width * LANES * 4
    for first in range(0, count, LANES):
        here, page = min(LANES, count - first), address_of(room)
        for token in range(here):
            stored = latents + chosen[first + token] * row_bytes
            read_latent(stored, row_bytes, latent, width, page + token * page_bytes)
        rows_times_panel_f32(page, page_bytes, panel, LANES * 4, width, address_of(scores), LANES * 4, LANES)
        softmax_lanes(
            address_of(scores), scale, 0, here, address_of(top), address_of(total), address_of(shrink)
        )
        transpose_block(scores, weights)
        mix_block(
            address_of(weights), address_of(shrink), page, page_bytes, sums, latent_lanes * 4, 0, latent_lanes,
            here_heads,
        )  # fmt: skip
    for lane in range(here_heads):
        of_lane = floats(sums + lane * latent_lanes * 4, latent_lanes)
        for dim in range(latent_lanes):
            of_lane[dim] /= total[lane]
    return 0


CHOOSE_TOKENS, ATTEND_CHOSEN = kernels_of(_choose), kernels_of(_attend_chosen)


def sparse_kernels(latents: torch.dtype, index: torch.dtype) -> tuple[Kernel[...], ...]:
    """Return the kernels for latents and index keys of these types."""
    return CHOOSE_TOKENS[index], ATTEND_CHOSEN[latents]


def choose_tokens(
    query_TID: Tensor, weight_TI: Tensor, keys_NDB: Tensor, step: Step, *, scale: float, count: int
) -> Tensor:
    """Choose for every row of the step the tokens of its own sequence that its index heads score highest.

    Args:
        query_TID: [T, I, D], weight_TI: [T, I]. The rows that `step` describes come first.
        keys_NDB: [N, D, 16] float32 pages of index keys, or codes with scales (`kvcache.codes`). They already hold the step's
            own keys.
        scale: Factor on products, before their positive part is taken.
        count: K.

    Returns:
        [T, K] int32 cache slots in the order of the text, then -1; new. Rows of padding choose nothing.
    """
    rows, heads, dim = query_TID.shape
    query, weight = query_TID.float().contiguous(), weight_TI.float().contiguous()
    chosen_TK = torch.full((rows, count), -1, dtype=torch.int32)
    row = CHOOSE_TOKENS[keys_NDB.dtype].row(
        query.data_ptr(), weight.data_ptr(), bits_of(scale), heads, dim, keys_NDB.data_ptr(), count, chosen_TK.data_ptr(),
        step.query_start_S.data_ptr(), step.context_S.data_ptr(), step.block_table_SM.data_ptr(),
        step.facts[1:].data_ptr(), step.block_table_SM.stride(0) * 8, keys_NDB.stride(0) * keys_NDB.element_size(),
    )  # fmt: skip
    run(program_of([row]), step.team, step.num_pairs * heads * dim // PRODUCTS_PER_NS)
    return chosen_TK


def choose_from_pages(
    pages: PagedCache, layer: int, query_TID: Tensor, weight_TI: Tensor, scale: float, count: int
) -> Tensor:
    """Choose tokens from a cache's pages, as in `choose_tokens`, for `sparse_index.exchange`."""
    assert pages.step is not None, "a step must be set before the model runs"
    return choose_tokens(query_TID, weight_TI, pages.indexes[layer], pages.step, scale=scale, count=count)[
        None
    ]


def chosen_attention(
    query_HTD: Tensor,
    latents_NBW: Tensor,
    chosen_TK: Tensor,
    step: Step,
    weight: AbsorbedWeight,
    *,
    rotary_dim: int,
    scale: float,
    sinks_H: Tensor | None = None,
) -> Tensor:
    """Attend every row of the step to the latents that were chosen for it.

    Args:
        chosen_TK: Slots from `choose_tokens`.
        sinks_H: [H] float32 logits that take part in the softmax and carry no value.
        others: As in `attention.cpu.latents.latent_attention`.

    Returns:
        [T, H, V] float32, new; padded rows are zero.
    """
    heads, num_rows, _ = query_HTD.shape
    row_bytes, latent = latents_NBW.shape[2] * latents_NBW.element_size(), weight.value.shape[2]
    groups, latent_lanes = -(-heads // LANES), -(-latent // LANES) * LANES
    chosen = chosen_TK.contiguous()
    out_THV = torch.zeros(num_rows, heads, weight.value.shape[1] * LANES)
    at_once = min(ROWS_AT_ONCE, step.num_tokens)
    make = torch.zeros if heads % LANES else torch.empty  # unused lanes of the last group must be 0
    query, found = (make(at_once, size) for size in room_floats(heads, latent, rotary_dim))
    queries = Queries(query_HTD.data_ptr(), query_HTD.stride(1) * 4, query_HTD.stride(0) * 4)
    num_chunks = -(-len(step.tiles(TILE_TOKENS)) // TILES_AT_ONCE)
    adapters = step.adapter_T.data_ptr() if step.has_adapters else 0
    rows = []
    for chunk in step.chunks(TILE_TOKENS, TILES_AT_ONCE)[:num_chunks]:
        at = chunk.ctypes.data
        rows += [
            *absorb_rows(queries, heads, weight, at, query, rotary_dim, adapters),
            ATTEND_CHOSEN[latents_NBW.dtype].row(
                query.data_ptr(), latent + rotary_dim, groups, latents_NBW.data_ptr(), row_bytes, at, chosen.data_ptr(),
                chosen.shape[1], 0 if sinks_H is None else sinks_H.data_ptr(), bits_of(scale), found.data_ptr(),
                latent_lanes, heads, latent,
            ),
            *expand_rows(found, heads, weight, at, out_THV.data_ptr(), adapters),
        ]  # fmt: skip
    pairs = min(step.num_pairs, step.num_tokens * chosen.shape[1])
    products = pairs * heads * 2 * latent + step.num_tokens * (weight.key.numel() + weight.value.numel())
    run(program_of(rows), step.team, products // PRODUCTS_PER_NS)
    return out_THV[..., : weight.value_dim]
