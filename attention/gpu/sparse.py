# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator"
"""Sparse attention on GPUs: an index chooses tokens from a sequence's pages, and attention reads only their latents.

As on CPU (`attention.sparse.cpu`), a row's index heads score all tokens that it sees. The tokens with the largest scores
win; ties go to the earlier token. Chosen tokens are given as cache slots, in the order of the text. Scores are kept in
memory of fixed size, for some rows at a time. Separate programs score, choose for and attend each row, so its bits do not
depend on other rows. Rejected: torch.topk, which does not define the order of ties.

Ideas: DeepSeek Sparse Attention (2025); selection digit by digit, as in radix sort.

Legend: P rows of the step, padding included, R rows at a time, H query heads, I index heads, D index dim, K most tokens
chosen, N blocks, B tokens of a block, M most blocks of a sequence, L latent dim, E rotary dim, C most tokens seen by a row.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from attention.gpu.decode import LEAST_ROWS, padded_sequences
from attention.gpu.limits import check_latents, check_layout, score_rows
from attention.gpu.mla import LatentTile, latent_tile
from attention.gpu.pages import LOG2_E, bound, rows_of, weigh, widened
from attention.sparse.pools import Pooling
from kvcache.gpu.cache import DeviceCache
from kvcache.gpu.write import Scales

_SCORED = 64  # tokens per product
_SCORED_BY = 16  # programs per row, which take turns
_SCANNED = 1024  # scores at a time
_POOLED_BY = 8  # programs per sequence, which take turns


@triton.jit
def seen_by(position, cache_slot, row):
    """Return how many tokens a row sees, including itself; 0 for padding."""
    count = tl.load(position + row).to(tl.int32) + 1
    return tl.where(tl.load(cache_slot + row) < 0, 0, count)


@triton.jit
def table_of(table, query_start, row, num_sequences, table_stride, S_PAD: tl.constexpr):
    """Return the address of the block table of a row's sequence."""
    number = tl.arange(0, S_PAD)
    end = tl.load(query_start + 1 + number, mask=number < num_sequences, other=1 << 30)
    sequence = tl.sum((end <= row).to(tl.int64), axis=0)
    return table + tl.minimum(sequence, num_sequences - 1) * table_stride


@triton.jit
def slots_of(own_table, token, is_wanted, BLOCK: tl.constexpr):
    """Return the cache slots of a sequence's tokens: block * BLOCK + offset."""
    return tl.load(own_table + token // BLOCK, mask=is_wanted, other=0) * BLOCK + token % BLOCK


@triton.jit
def pooled_at(slot, dim, D: tl.constexpr, SIZE: tl.constexpr, WIDTH: tl.constexpr):
    """Return the positions of a pool's key. Each row of its tokens holds D / SIZE values, after the token's key and gates.

    `slot` is that of the pool's first token.
    """
    return (slot + dim // (D // SIZE)) * WIDTH + 2 * D + dim % (D // SIZE)


@triton.jit
def make_pool_keys(
    keys, bias, query_start, context, table, table_stride, D: tl.constexpr, D_PAD: tl.constexpr, BLOCK: tl.constexpr,
    SIZE: tl.constexpr, SIZE_PAD: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Run as program (sequence, turn): make keys of the pools that the step completes. `bias` [SIZE, D] float32."""
    sequence, turns = tl.program_id(0), tl.num_programs(1)
    rows = tl.load(query_start + sequence + 1) - tl.load(query_start + sequence)
    end = tl.load(context + sequence)
    first = ((end - rows) // SIZE).to(tl.int32)
    count = (end // SIZE).to(tl.int32) - first
    own_table = table + sequence.to(tl.int64) * table_stride
    place, dim = tl.arange(0, SIZE_PAD), tl.arange(0, D_PAD)
    is_in = (place[:, None] < SIZE) & (dim[None, :] < D)
    added = tl.load(bias + place[:, None] * D + dim[None, :], mask=is_in, other=0.0)
    for step in range(bound(tl.cdiv(tl.maximum(count - tl.program_id(1), 0), turns))):
        pool = first + tl.program_id(1) + step * turns
        slot = slots_of(own_table, pool * SIZE, True, BLOCK)
        own = keys + (slot + place[:, None]) * WIDTH + dim[None, :]
        gates = tl.load(own + D, mask=is_in, other=0.0).to(tl.float32) + added
        gates = tl.where(place[:, None] < SIZE, gates, float("-inf"))
        shares = tl.exp(gates - tl.max(gates, axis=0)[None, :])
        shares = shares / tl.sum(shares, axis=0)[None, :]
        mean = tl.sum(shares * tl.load(own, mask=is_in, other=0.0).to(tl.float32), axis=0)
        to = keys + pooled_at(slot, dim, D, SIZE, WIDTH)
        tl.store(to, mean.to(keys.dtype.element_ty), mask=dim < D)


@triton.jit(do_not_specialize=["num_sequences", "first_row"])
def score_items(
    query, weight, keys, key_scales, position, cache_slot, query_start, table, scores, num_sequences, first_row, table_stride,
    scores_stride, scale, S_PAD: tl.constexpr, HEADS: tl.constexpr, HEADS_PAD: tl.constexpr, D: tl.constexpr,
    D_PAD: tl.constexpr, BLOCK: tl.constexpr, TILE: tl.constexpr, SIZE: tl.constexpr, WIDTH: tl.constexpr,
    HAS_SCALES: tl.constexpr,
):  # fmt: skip
    """Run as program (row, turn): write `scores` [R, C] float32 of its tiles of tokens, or of pools of SIZE tokens."""
    row = first_row + tl.program_id(0)
    count = seen_by(position, cache_slot, row) // SIZE
    own_table = table_of(table, query_start, row, num_sequences, table_stride, S_PAD)
    head, dim = tl.arange(0, HEADS_PAD), tl.arange(0, D_PAD)
    place = row.to(tl.int64) * HEADS + head
    is_query = (head[:, None] < HEADS) & (dim[None, :] < D)
    q = tl.load(query + place[:, None] * D + dim[None, :], mask=is_query, other=0.0)
    shares = tl.load(weight + place, mask=head < HEADS, other=0.0)
    own_scores = scores + tl.program_id(0).to(tl.int64) * scores_stride
    turns = tl.num_programs(1)
    for step in range(bound(tl.cdiv(tl.maximum(count - tl.program_id(1) * TILE, 0), TILE * turns))):
        at = (step * turns + tl.program_id(1)) * TILE
        item = at + tl.arange(0, TILE)
        is_seen = item < count
        if SIZE == 1:
            key_row = rows_of(own_table, at, count, 0, 1, BLOCK, TILE)
            key = (keys + key_row * WIDTH)[None, :] + dim[:, None]
        else:
            row_of_pool = slots_of(own_table, item * SIZE, is_seen, BLOCK)[None, :]
            key = keys + pooled_at(row_of_pool, dim[:, None], D, SIZE, WIDTH)
        key_DT = tl.load(key, mask=is_seen[None, :] & (dim[:, None] < D), other=0.0)
        products = tl.dot(q, widened(key_DT, q), input_precision="ieee") * scale
        if HAS_SCALES:
            products *= tl.load(key_scales + key_row, mask=is_seen, other=0.0)[None, :]
        summed = tl.sum(shares[:, None] * tl.maximum(products, 0.0), axis=0)
        tl.store(own_scores + item, summed, mask=is_seen)


@triton.jit
def ranked(scores, token, count):
    """Return scores as whole numbers in the same order."""
    score = tl.load(scores + token, mask=token < count, other=0.0)
    bits = tl.where(score == 0.0, 0.0, score).to(tl.uint32, bitcast=True)  # no -0
    return tl.where(bits >> 31 != 0, bits ^ 0xFFFFFFFF, bits | 0x80000000)


@triton.jit(do_not_specialize=["num_sequences", "first_row"])
def choose_best(
    scores, position, cache_slot, query_start, table, chosen, num_sequences, first_row, table_stride, scores_stride,
    S_PAD: tl.constexpr, K: tl.constexpr, BLOCK: tl.constexpr, TILE: tl.constexpr, SIZE: tl.constexpr,
    SIZE_PAD: tl.constexpr,
):  # fmt: skip
    """Run as program (row): write `chosen` [P, K * SIZE + SIZE - 1], the slots of the tokens of its best K items, then those of
    the tokens after the last item, then -1."""
    row = first_row + tl.program_id(0)
    seen = seen_by(position, cache_slot, row)
    count = seen // SIZE
    own_table = table_of(table, query_start, row, num_sequences, table_stride, S_PAD)
    own_scores = scores + tl.program_id(0).to(tl.int64) * scores_stride
    own_chosen = chosen + row.to(tl.int64) * (K * SIZE + SIZE - 1)
    within = tl.arange(0, SIZE_PAD)
    lane, digits = tl.arange(0, TILE), tl.arange(0, 256)
    tiles = tl.cdiv(count, TILE)
    # Find `least`, the K-th largest, a digit at a time; `left` items equal to it are wanted. Fewer than K are all wanted.
    least, mask, left = tl.zeros([], tl.uint32), tl.zeros([], tl.uint32), tl.zeros([], tl.int32) + K
    for digit in tl.static_range(4):
        shift = 24 - 8 * digit
        histogram = tl.zeros([256], tl.int32)
        for step in range(bound(tiles)):
            item = step * TILE + lane
            number = ranked(own_scores, item, count)
            is_in = (item < count) & ((number & mask) == least)
            histogram += tl.histogram(((number >> shift) & 255).to(tl.int32), 256, mask=is_in)
        at_least = tl.sum(histogram, axis=0) - tl.cumsum(histogram, axis=0) + histogram
        best = tl.maximum(tl.sum((at_least >= left).to(tl.int32), axis=0) - 1, 0)
        left -= tl.sum(tl.where(digits > best, histogram, 0), axis=0)
        least |= best.to(tl.uint32) << shift
        mask |= tl.full([], 255, tl.uint32) << shift
    whole, behind = tl.minimum(count, K) * SIZE, seen - count * SIZE
    for step in tl.static_range((K * SIZE + SIZE - 1 + TILE - 1) // TILE):
        place = step * TILE + lane
        tl.store(own_chosen + place, -1, mask=(place >= whole + behind) & (place < K * SIZE + SIZE - 1))
    if SIZE > 1:
        last = slots_of(own_table, count * SIZE + within, within < behind, BLOCK)
        tl.store(own_chosen + whole + within, last.to(tl.int32), mask=within < behind)
    num_equal, num_chosen = tl.zeros([], tl.int32), tl.zeros([], tl.int32)
    for step in range(bound(tiles)):
        item = step * TILE + lane
        number = ranked(own_scores, item, count)
        is_seen = item < count
        equal = (is_seen & (number == least)).to(tl.int32)
        is_taken = is_seen & ((count <= K) | (number > least))
        is_taken |= (equal > 0) & (num_equal + tl.cumsum(equal, axis=0) <= left)
        taken = is_taken.to(tl.int32)
        place = num_chosen + tl.cumsum(taken, axis=0) - 1
        slot = slots_of(own_table, item * SIZE, is_taken, BLOCK)[:, None] + within[None, :]
        is_token = is_taken[:, None] & (within[None, :] < SIZE)
        tl.store(own_chosen + place[:, None] * SIZE + within[None, :], slot.to(tl.int32), mask=is_token)
        num_equal += tl.sum(equal, axis=0)
        num_chosen += tl.sum(taken, axis=0)


@triton.jit(do_not_specialize=["first_row"])
def attend_chosen(
    query, latents, latent_scales, rope_scales, chosen, sinks, out, first_row, query_stride, scale, H: tl.constexpr, HEADS: tl.constexpr,
    L: tl.constexpr, E: tl.constexpr, E_PAD: tl.constexpr, K: tl.constexpr, K_PAD: tl.constexpr, TILE: tl.constexpr,
    HAS_SINKS: tl.constexpr, HAS_SCALES: tl.constexpr,
):  # fmt: skip
    """Run as program (row, tile of heads): `out` [R, H, L]; `query` [R, H, L + E] of the same rows."""
    row, own = first_row + tl.program_id(0), tl.program_id(0).to(tl.int64)
    own_chosen = chosen + row.to(tl.int64) * K
    number = tl.arange(0, K_PAD)
    count = tl.sum((tl.load(own_chosen + number, mask=number < K, other=-1) >= 0).to(tl.int32), axis=0)
    latent_dim, rope_dim = tl.arange(0, L), tl.arange(0, E_PAD)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    is_head = head[:, None] < H
    at_query = query + own * query_stride + head[:, None] * (L + E)
    q_latent = tl.load(at_query + latent_dim[None, :], mask=is_head, other=0.0)
    q_rope = tl.load(at_query + L + rope_dim[None, :], mask=is_head & (rope_dim[None, :] < E), other=0.0)
    top, total = tl.full([HEADS], float("-inf"), tl.float32), tl.zeros([HEADS], tl.float32)
    if HAS_SINKS:
        top = tl.load(sinks + head, mask=head < H, other=0.0).to(tl.float32) * LOG2_E
        total += 1.0
    sum_HL = tl.zeros([HEADS, L], tl.float32)
    for step in range(bound(tl.cdiv(count, TILE))):
        token = step * TILE + tl.arange(0, TILE)
        is_seen = token < count
        slot = tl.load(own_chosen + token, mask=is_seen, other=0).to(tl.int64)
        place = latents + slot * (L + E)
        latent_CL = tl.load(place[:, None] + latent_dim[None, :], mask=is_seen[:, None], other=0.0)
        is_rope = is_seen[None, :] & (rope_dim[:, None] < E)
        rope_EC = tl.load(place[None, :] + L + rope_dim[:, None], mask=is_rope, other=0.0)
        latent_CL = widened(latent_CL, q_latent)
        products = tl.dot(q_latent, tl.trans(latent_CL), input_precision="ieee")
        of_rope = tl.dot(q_rope, widened(rope_EC, q_latent), input_precision="ieee")
        if HAS_SCALES:
            latent_scale = tl.load(latent_scales + slot, mask=is_seen, other=0.0)
            products *= latent_scale[None, :]
            of_rope *= tl.load(rope_scales + slot, mask=is_seen, other=0.0)[None, :]
        products = (products + of_rope) * (scale * LOG2_E)
        weights, top, total, shrink = weigh(products, is_seen[None, :], top, total)
        if HAS_SCALES:
            weights *= latent_scale[None, :]
        added = tl.dot(weights.to(latent_CL.dtype), latent_CL, input_precision="ieee")
        sum_HL = sum_HL * shrink[:, None] + added
    result = sum_HL / tl.where(total > 0, total, 1.0)[:, None]
    to = out + (own * H + head[:, None]) * L + latent_dim[None, :]
    tl.store(to, result.to(out.dtype.element_ty), mask=is_head)


def choose_from_pages(
    pages: DeviceCache, layer: int, query_PID: Tensor, weight_PI: Tensor, scale: float, count: int
) -> Tensor:
    """Choose for every row of the step the tokens of its own sequence that its index heads score highest.

    Args:
        pages: The cache. Its step is set and it holds the step's own index keys.
        query_PID: [P, I, D], weight_PI: [P, I].
        scale: Factor on products, before their positive part is taken.
        count: K.

    Returns:
        [1, P, K] int32 cache slots in the order of the text, then -1. Rows of padding choose nothing.
    """
    return _choose(pages, layer, query_PID, weight_PI, scale, count, 1)


def choose_pools(
    pages: DeviceCache, layer: int, query_PID: Tensor, weight_PI: Tensor, scale: float, pooling: Pooling
) -> Tensor:
    """Choose pools of tokens, like `attention.sparse.cpu_pools.choose_pools`, with rows as in `choose_from_pages`."""
    step, keys = pages.step, pages.indexes[layer]
    assert step is not None, "a step must be set before the model runs"
    on, dim, size = step.on_device, query_PID.shape[2], pooling.pool_tokens
    make_pool_keys[(len(on.context_S), min(_POOLED_BY, -(-len(query_PID) // size)))](
        keys, pooling.bias_BD.float().contiguous(), on.query_start_S, on.context_S, on.table_SM, on.table_SM.stride(0),
        D=dim, D_PAD=max(16, triton.next_power_of_2(dim)), BLOCK=keys.shape[1], SIZE=size,
        SIZE_PAD=triton.next_power_of_2(size), WIDTH=keys.shape[2],
    )  # fmt: skip
    return _choose(pages, layer, query_PID, weight_PI, scale, pooling.num_chosen, size)


def _choose(
    pages: DeviceCache, layer: int, query_PID: Tensor, weight_PI: Tensor, scale: float, count: int, size: int
) -> Tensor:
    """Choose `count` items of `size` tokens, and the tokens after the last item: [1, P, count * size + size - 1]."""
    step, keys = pages.step, pages.indexes[layer]
    assert step is not None, "a step must be set before the model runs"
    P, heads, dim = query_PID.shape
    key_scales = pages.index_scales[layer]
    query = (query_PID.to(keys.dtype) if key_scales is None else query_PID).contiguous()
    weight = weight_PI.float().contiguous()
    max_context = -(-step.max_context // _SCANNED) * _SCANNED
    at_once = score_rows(step.max_rows, step.sizes[-1], max_context)
    scores_RC = pages.room(
        ("scores",), lambda: torch.empty(at_once, max_context, dtype=torch.float32, device=step.device)
    )
    chosen_PK = torch.empty(P, count * size + size - 1, dtype=torch.int32, device=step.device)
    on, S = step.on_device, len(step.on_device.query_start_S) - 1
    about = on.position_P, on.cache_slot_P, on.query_start_S, on.table_SM
    turns = min(_SCORED_BY, max_context // _SCORED)
    sizes = {"S_PAD": padded_sequences(S), "BLOCK": keys.shape[1], "SIZE": size}
    for first in range(0, P, at_once):
        rows = min(at_once, P - first)
        score_items[(rows, turns)](
            query, weight, keys, key_scales, *about, scores_RC, S, first, on.table_SM.stride(0), max_context, scale, HEADS=heads,
            HEADS_PAD=max(LEAST_ROWS, triton.next_power_of_2(heads)), D=dim,
            D_PAD=max(16, triton.next_power_of_2(dim)), TILE=_SCORED, WIDTH=keys.shape[2],
            HAS_SCALES=key_scales is not None, **sizes,
        )  # fmt: skip
        choose_best[(rows,)](
            scores_RC, *about, chosen_PK, S, first, on.table_SM.stride(0), max_context, K=count,
            TILE=max(16, _SCANNED // size),
            SIZE_PAD=triton.next_power_of_2(size), **sizes,
        )  # fmt: skip
    return chosen_PK[None]


def chosen_attention(
    query_RHC: Tensor,
    latents_NBC: Tensor,
    chosen_PK: Tensor,
    first_row: int,
    *,
    latent_dim: int,
    scale: float,
    scales: Scales | None = None,
    sinks_H: Tensor | None = None,
    tile: LatentTile | None = None,
) -> Tensor:
    """Attend some rows of the step to the latents that were chosen for them.

    Args:
        query_RHC: [R, H, L + E], heads contiguous: the absorbed query, then its rotary part. Its rows start at `first_row`.
        latents_NBC: [N, B, L + E] pages of the same type, or of codes, contiguous.
        chosen_PK: Slots for the step's rows, from `choose_from_pages` or `choose_pools`.
        scale: Factor on the scores. scales: those of pages of codes. sinks_H: [H] logits that take part in the softmax and carry no value.
        latent_dim: L, a power of 2. tile: by default from the table.

    Returns:
        [R, H, L], new; zeros for padded rows.

    Raises:
        ValueError: The kernel does not support the latents, type or layout.
    """
    R, H, width = query_RHC.shape
    rope_dim = width - latent_dim
    check_latents(latent_dim, rope_dim, query_RHC.dtype)
    check_layout(query_RHC, latents_NBC, has_codes=scales is not None)
    tile = tile or latent_tile(latents_NBC.dtype, H, latent_dim, query_RHC.device)
    out_RHL = query_RHC.new_empty(R, H, latent_dim)
    attend_chosen[(R, triton.cdiv(H, tile.heads))](
        query_RHC, latents_NBC, *(scales or (None, None)), chosen_PK, sinks_H, out_RHL, first_row, query_RHC.stride(0), scale, H=H,
        HEADS=tile.heads, L=latent_dim, E=rope_dim, E_PAD=max(16, triton.next_power_of_2(max(1, rope_dim))),
        K=chosen_PK.shape[1], K_PAD=triton.next_power_of_2(chosen_PK.shape[1]), TILE=tile.tokens, HAS_SINKS=sinks_H is not None,
        HAS_SCALES=scales is not None, num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip
    return out_RHL
