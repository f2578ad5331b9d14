# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator"
"""Chunked prefill over a paged prefix on GPUs: each row attends to the cached tokens of its own sequence up to itself.

A program has a tile of query tokens of one sequence, for one KV head, and walks the context in tiles from the first visible
token, in one fixed order. With long chunks it is bound by operations, 4 * H * D per pair of tokens. Every tile of rows reads
its context again, mostly from the L2 cache.

Tiles of the context that all rows see are not masked, in a separate loop. The cut of a prompt decides which rows are in a
tile, and so in which loop a row meets a tile. Its bits do not depend on that, nor on the chunk it comes in: `soften` leaves no
choice of fused operations to the compiler, a tile of which a row sees nothing leaves its sums as they are, and every tile
begins at a multiple of its size.
Rows of an image may also see later tokens: those up to their image's end, which one step runs.
Programs with the longest contexts start first, so that the last ones to end are short. A key dim that is not a power of 2
(192 of expanded latents) is multiplied in two parts, instead of being padded to the next one.

Ideas: FlashAttention (Dao et al., 2022) and FlashAttention-2 (2023), GQA packing as in `decode`.

Legend: T rows of the batch, H query heads, G KV heads, D key dim, V value dim, N blocks, B tokens of a block, X tiles.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from attention.gpu.limits import LARGEST_DIM, WIDE_DIM, check_heads, check_layout, check_tile
from attention.gpu.pages import LOG2_E, blocks_of, bound, capped, first_seen, rows_in, soften, widened
from attention.gpu.tiles import device_names, shape_key, tile_of
from kvcache.gpu.write import Scales

_LEAST_PART = 16  # of a key dim: the least of a product on tensor cores
_LONG_WINDOW = 1024  # from this size on, most tiles of a window or chunk need no mask


class PrefillTile(NamedTuple):
    """Size of a program's work. `tokens` determines the order in which numbers are added."""

    tokens: int = 64  # tokens of the context per product
    warps: int = 8
    stages: int = 3  # of the pipeline: two tiles are being loaded while one is computed
    # Query tokens times the heads that share a KV head. Several programs share a step's larger tile.
    rows: int = 128


@triton.jit
def attend_tokens(
    at, blocks, q, q_rest, position, last_seen, top, total, sum_RV, keys, values, key_scales, value_scales, own_table,
    stop, kv_head, scale, factor,
    KV_HEADS: tl.constexpr, D: tl.constexpr, D_PAD: tl.constexpr, D_REST: tl.constexpr, V: tl.constexpr,
    V_PAD: tl.constexpr, BLOCK: tl.constexpr, TILE: tl.constexpr, WINDOW: tl.constexpr, CHUNK: tl.constexpr,
    SOFT_CAP: tl.constexpr, HAS_SCALES: tl.constexpr, IS_MASKED: tl.constexpr,
):  # fmt: skip
    """Attend to the TILE tokens from `at`. Return the next tile's blocks, and the rows' maxima and sums."""
    dim, value_dim = tl.arange(0, D_PAD), tl.arange(0, V_PAD)
    token = at + tl.arange(0, TILE)
    place = rows_in(blocks, kv_head, KV_HEADS, BLOCK, TILE)
    blocks = blocks_of(own_table, at + TILE, stop, BLOCK, TILE)
    own_keys = keys + place[None, :] * D
    is_key, is_value = dim[:, None] < D, value_dim[None, :] < V
    if IS_MASKED:
        is_key, is_value = is_key & (token[None, :] < stop), is_value & (token[:, None] < stop)
    key_DC = tl.load(own_keys + dim[:, None], mask=is_key, other=0.0)
    scores = tl.dot(q, widened(key_DC, q), input_precision="ieee")
    if D_REST > 0:
        rest = D_PAD + tl.arange(0, D_REST)
        is_rest = rest[:, None] < D
        if IS_MASKED:
            is_rest = is_rest & (token[None, :] < stop)
        rest_DC = tl.load(own_keys + rest[:, None], mask=is_rest, other=0.0)
        scores = tl.dot(q_rest, widened(rest_DC, q), scores, input_precision="ieee")
    if HAS_SCALES:
        is_stored = token < stop if IS_MASKED else token >= 0
        scores *= tl.load(key_scales + place, mask=is_stored, other=0.0)[None, :]
    if SOFT_CAP > 0:
        scores = capped(scores * scale, SOFT_CAP)
    if IS_MASKED:
        is_seen = token[None, :] <= last_seen[:, None]
        if WINDOW > 0 or CHUNK > 0:
            is_seen &= token[None, :] >= first_seen(position, WINDOW, CHUNK)[:, None]
        scores = tl.where(is_seen, scores, float("-inf"))
    weights, top, total, shrink = soften(scores, factor, top, total)
    value_CV = tl.load(values + place[:, None] * V + value_dim[None, :], mask=is_value, other=0.0)
    if HAS_SCALES:
        weights *= tl.load(value_scales + place, mask=is_stored, other=0.0)[None, :]
    added = tl.dot(weights.to(q.dtype), widened(value_CV, q), input_precision="ieee")
    return blocks, top, total, sum_RV * shrink[:, None] + added


@triton.jit
def attend_tile(
    query, keys, values, key_scales, value_scales, tiles, query_start, context, table, sinks, image_ends, out,
    query_stride, out_stride, table_stride, scale,
    GROUP: tl.constexpr, ROWS: tl.constexpr, KV_HEADS: tl.constexpr, D: tl.constexpr, D_PAD: tl.constexpr,
    D_REST: tl.constexpr, V: tl.constexpr, V_PAD: tl.constexpr, BLOCK: tl.constexpr, TILE: tl.constexpr,
    WINDOW: tl.constexpr, CHUNK: tl.constexpr, SOFT_CAP: tl.constexpr, HAS_SINKS: tl.constexpr,
    HAS_SCALES: tl.constexpr, HAS_INNER: tl.constexpr, HAS_IMAGES: tl.constexpr,
):  # fmt: skip
    """Run as program (tile, KV head, part of the tile's query tokens).

    `tiles` int64 [tiles, 3]: sequence, first query token within its rows, query tokens.
    """
    tile = tl.num_programs(0) - 1 - tl.program_id(0)  # a sequence's last tiles see most tokens
    kv_head, before = tl.program_id(1), tl.program_id(2) * (ROWS // GROUP)
    sequence = tl.load(tiles + tile * 3)
    first = tl.load(tiles + tile * 3 + 1).to(tl.int32) + before
    count = tl.minimum(tl.load(tiles + tile * 3 + 2).to(tl.int32) - before, ROWS // GROUP)
    if count <= 0:
        return
    row_begin, row_end = tl.load(query_start + sequence), tl.load(query_start + sequence + 1)
    cached = (tl.load(context + sequence) - (row_end - row_begin)).to(tl.int32)
    stop = cached + first + count
    row, dim, value_dim = tl.arange(0, ROWS), tl.arange(0, D_PAD), tl.arange(0, V_PAD)
    is_row = row < count * GROUP
    position = cached + first + row // GROUP
    head = kv_head * GROUP + row % GROUP
    token_row = row_begin + first + row // GROUP
    last_seen = position
    if HAS_IMAGES:
        image_end = tl.load(image_ends + token_row, mask=is_row, other=0).to(tl.int32)
        last_seen = tl.maximum(position, image_end - 1)
        stop = tl.maximum(stop, tl.max(image_end, axis=0))
    own_query = query + token_row[:, None] * query_stride + head[:, None] * D
    q = tl.load(own_query + dim[None, :], mask=is_row[:, None] & (dim[None, :] < D), other=0.0)
    q_rest = q
    if D_REST > 0:
        rest = D_PAD + tl.arange(0, D_REST)
        q_rest = tl.load(own_query + rest[None, :], mask=is_row[:, None] & (rest[None, :] < D), other=0.0)
    factor = LOG2_E if SOFT_CAP > 0 else scale * LOG2_E
    top, total = tl.full([ROWS], float("-inf"), tl.float32), tl.zeros([ROWS], tl.float32)
    if HAS_SINKS:
        top = tl.load(sinks + head, mask=is_row, other=0.0).to(tl.float32) * LOG2_E / factor
        total += 1.0
    sum_RV = tl.zeros([ROWS, V_PAD], tl.float32)
    own_table = table + sequence * table_stride
    begin = first_seen(cached + first, WINDOW, CHUNK) // TILE * TILE
    last_row = cached + first + count - 1
    blocks = blocks_of(own_table, begin, stop, BLOCK, TILE)
    inner = begin  # all rows see the tiles from here to the next mark
    last = begin
    if HAS_INNER:
        last = tl.maximum((cached + first + 1) // TILE * TILE, begin)
        if WINDOW > 0 or CHUNK > 0:
            inner = tl.minimum(tl.cdiv(first_seen(last_row, WINDOW, CHUNK), TILE) * TILE, last)
            for at in range(bound(begin), bound(inner), TILE):
                blocks, top, total, sum_RV = attend_tokens(
                    at, blocks, q, q_rest, position, last_seen, top, total, sum_RV, keys, values, key_scales, value_scales,
                    own_table, stop, kv_head, scale, factor, KV_HEADS, D, D_PAD, D_REST, V, V_PAD, BLOCK, TILE, WINDOW, CHUNK,
                    SOFT_CAP, HAS_SCALES, True,
                )  # fmt: skip
        for at in range(bound(inner), bound(last), TILE):
            blocks, top, total, sum_RV = attend_tokens(
                at, blocks, q, q_rest, position, last_seen, top, total, sum_RV, keys, values, key_scales, value_scales,
                own_table, stop, kv_head, scale, factor, KV_HEADS, D, D_PAD, D_REST, V, V_PAD, BLOCK, TILE, WINDOW, CHUNK,
                SOFT_CAP, HAS_SCALES, False,
            )  # fmt: skip
    for at in range(bound(last), bound(stop), TILE):
        blocks, top, total, sum_RV = attend_tokens(
            at, blocks, q, q_rest, position, last_seen, top, total, sum_RV, keys, values, key_scales, value_scales, own_table,
            stop, kv_head, scale, factor, KV_HEADS, D, D_PAD, D_REST, V, V_PAD, BLOCK, TILE, WINDOW, CHUNK, SOFT_CAP,
            HAS_SCALES, True,
        )  # fmt: skip
    result = sum_RV / tl.where(total > 0, total, 1.0)[:, None]
    tl.store(
        out + token_row[:, None] * out_stride + head[:, None] * V + value_dim[None, :],
        result.to(out.dtype.element_ty), mask=is_row[:, None] & (value_dim[None, :] < V),
    )  # fmt: skip


def prefill_tile(
    dtype: torch.dtype, key_dim: int, value_dim: int, group: int, device: torch.device
) -> PrefillTile:
    """Return the tile for heads of this shape and type of pages on a device."""
    is_short = dtype.itemsize <= 2
    fallback = PrefillTile() if is_short else PrefillTile(tokens=32)
    if dtype.itemsize == 1:  # codes are decoded in registers, which 128 rows fill
        fallback = PrefillTile(tokens=32, rows=64)
    if not _is_narrow(key_dim, value_dim) or (key_dim > 128 and not is_short):
        fallback = PrefillTile(tokens=32, rows=64)
    if max(key_dim, value_dim) > WIDE_DIM:  # twice the memory again, which leaves room for two stages
        fallback = PrefillTile(stages=2 if is_short else 1, tokens=32 if is_short else 16, rows=32)
    shape = shape_key(dtype, D=key_dim, V=value_dim, GROUP=group)
    return tile_of("paged_prefill", shape, fallback, device_names(device))


def parts_of(dim: int) -> tuple[int, int]:
    """Return the sizes, powers of 2, of the two parts in which a key dim is multiplied. The second is 0 if one is as small."""
    whole = int(triton.next_power_of_2(dim))
    rest = max(_LEAST_PART, int(triton.next_power_of_2(dim - whole // 2)))
    return (whole // 2, rest) if dim < whole and rest < whole // 2 else (whole, 0)


def _is_narrow(key_dim: int, value_dim: int) -> bool:
    """Return whether 128 rows' queries and sums fit registers and shared memory. Keys of 192 are two parts."""
    return key_dim <= 192 and value_dim <= 128


def tile_tokens(heads: int, kv_heads: int, key_dim: int = LARGEST_DIM, value_dim: int = LARGEST_DIM) -> int:
    """Return the largest number of query tokens in a tile, for `Step.tiles`. The default dims are safe for all heads."""
    widest = 128 if _is_narrow(key_dim, value_dim) else 64 if max(key_dim, value_dim) <= WIDE_DIM else 32
    return max(1, widest // (heads // kv_heads))


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
    scales: Scales | None = None,
    window: int = 0,
    chunk: int = 0,
    soft_cap: float = 0.0,
    sinks_H: Tensor | None = None,
    image_end_T: Tensor | None = None,
    out: Tensor | None = None,
    tile: PrefillTile | None = None,
) -> Tensor:
    """Attend every row to the cached tokens of its own sequence up to itself.

    Args:
        query_THD: [T, H, D], heads contiguous.
        keys_NGBD, values_NGBV: Pages of the same type, or of codes, contiguous. They already hold the rows' own tokens.
        tiles_X3: int64 [X, 3] from `Step.tiles(tile_tokens(...))`. A tile of 0 tokens does nothing.
        query_start_S: int64 [S + 1], first row of each sequence and the end. context_S: int64 [S], tokens after this step.
        block_table_SM, scale, scales, window, chunk, soft_cap, sinks_H: As in `decode.paged_decode`.
        image_end_T: int64 [T], by row of an image the image's end in the sequence, as `Step.image_end_T`. Such a row also sees
            the tokens up to there. None: no row does.
        out: [T, H, V] to write into, heads contiguous; by default a new tensor of zeros.
        tile: Tile to use; by default from the table.

    Returns:
        `out`; rows that no tile covers are not changed.

    Raises:
        ValueError: The kernel does not support the heads, type or layout.
    """
    T, H, D = query_THD.shape
    _, G, block, V = values_NGBV.shape
    check_heads(H, G, D, V, query_THD.dtype)
    check_layout(query_THD, keys_NGBD, values_NGBV, has_codes=scales is not None)
    group = H // G
    tile = tile or prefill_tile(keys_NGBD.dtype, D, V, group, query_THD.device)
    check_tile(tile.tokens, block)
    if out is None:
        out = query_THD.new_zeros(T, H, V)
    main, rest = parts_of(D)
    rows = max(tile.rows, triton.next_power_of_2(group))
    parts = triton.cdiv(tile_tokens(H, G, D, V), rows // group)
    attend_tile[(tiles_X3.shape[0], G, parts)](
        query_THD, keys_NGBD, values_NGBV, *(scales or (None, None)), tiles_X3, query_start_S, context_S, block_table_SM,
        sinks_H, image_end_T, out, query_THD.stride(0), out.stride(0), block_table_SM.stride(0), scale, GROUP=group,
        ROWS=rows, KV_HEADS=G, D=D, D_PAD=main, D_REST=rest, V=V,
        V_PAD=triton.next_power_of_2(V), BLOCK=block, TILE=tile.tokens, WINDOW=window, CHUNK=chunk, SOFT_CAP=soft_cap,
        HAS_SINKS=sinks_H is not None, HAS_SCALES=scales is not None,
        HAS_INNER=not (window or chunk) or (window or chunk) >= _LONG_WINDOW, HAS_IMAGES=image_end_T is not None,
        num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip
    return out
