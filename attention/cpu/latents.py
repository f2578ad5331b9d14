"""Absorbed attention to cached latents on CPU: each latent is read once for all heads and never expanded.

One half of `kv_b_proj` is multiplied into the query and the other into the output (DeepSeek-V2, 2024), so all heads of a
token share one key and value, the latent. Heads therefore take the place that a block's tokens have in
`attention.cpu.attention`: 16 heads of a query token form a panel of `attention.cpu.tiles`, and a block's 16 latents are
the rows multiplied by it. Softmax is computed per lane, one head each. A row's result depends only on its own query and
latents: every output is one chain over dims or tokens in order, regardless of the other rows.
Rejected: expanding prompts. Above about 170 rows it would cost half as much, but its bits would differ from a decode's.

Legend: T rows of the batch, H query heads, U unrotated dims of the key, E rotary dims, C = U + E, L latent dim, V value
dim, W width of a page's row (L + E, padded), N blocks, B tokens of a block, R rows of the current tiles, G groups of 16 heads.
"""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from numba import njit
from torch import Tensor

from attention.cpu.adapted_latents import adapt_absorbed_row, adapt_expanded_row
from attention.cpu.attention import PRODUCTS_PER_NS, Queries
from attention.cpu.cached import kernels_of, latent_room, latent_target, read_latents, write_latent
from attention.cpu.latent_tiles import mix_block, softmax_lanes, transpose_block
from attention.cpu.lone_latents import MOST, is_lone, lone_floats, lone_kernels, lone_rows, most_lone
from attention.cpu.norm import norm_row
from attention.cpu.tiles import (
    LANES,
    TILES_VERSION,
    TIMES_BF16,
    TIMES_F32,
    address_of,
    load_f32,
    rows_times_panel_f32,
    times_panel,
)
from dispatch.compiled.native import bits_of, float_of, floats, uint8s, words
from dispatch.compiled.team import Kernel, program_of, run
from kvcache.codes import E4M3, LATENT_SCALES_BYTES, is_coded
from kvcache.step import Step

TILE_TOKENS = 4  # query tokens per task: a block's latents stay in L1 from one to the next
# Tiles with queries and sums in memory at a time, in latent space: about 140 MB for DeepSeek-V3's 128 heads.
TILES_AT_ONCE = 64


@dataclass(frozen=True)
class AbsorbedWeight:
    """The halves of `kv_b_proj` in panels, float32 or bfloat16, from `moe.cpu.kernels.panels.pack`."""

    key: Tensor  # [H, ceil(L / 16), U, 16]: multiplies the query
    value: Tensor  # [H, ceil(V / 16), L, 16]: multiplies the sum of latents
    value_dim: int  # V
    adapters: int = 0  # address of the entries of adapters (`adapted_latents`); 0: it takes none


def _absorb(  # type: ignore[no-untyped-def]
    tile, query, token_bytes, head_bytes, weights, panel_bytes, times, heads, groups, unrotated, latent, rotary,
    chunk_at, out,
):  # fmt: skip
    # A tile multiplies one head's queries by one panel of its key half and writes to the head's lane of `out` [R, G, C, 16].
    chunk = words(chunk_at, 4)
    first_row, rows = chunk[2], chunk[3]
    panels = (latent + LANES - 1) // LANES
    if tile < 0:
        return heads * panels if rows > 0 else 0
    head, panel = tile // panels, tile % panels
    of_head = query + first_row * token_bytes + head * head_bytes
    made = np.empty((rows, LANES), np.float32)
    times_panel(
        times,
        of_head,
        token_bytes,
        weights + tile * panel_bytes,
        0,
        unrotated,
        0,
        address_of(made),
        LANES * 4,
        rows,
    )
    width = latent + rotary
    for row in range(rows):
        lanes = floats(
            out + ((row * groups + head // LANES) * width * LANES + head % LANES) * 4, width * LANES
        )
        for dim in range(min(LANES, latent - panel * LANES)):
            lanes[(panel * LANES + dim) * LANES] = made[row, dim]
        if panel == 0:
            for dim in range(rotary):
                lanes[(latent + dim) * LANES] = load_f32(of_head + row * token_bytes + (unrotated + dim) * 4)
    return 0


def _attend(  # type: ignore[no-untyped-def]
    tile, query, width, groups, latents, row_bytes, chunk_at, query_starts, contexts, tables, table_stride,
    scale_bits, window, out, latent_lanes, heads, most_lone, latent,
):  # fmt: skip
    # A tile is 16 heads of up to TILE_TOKENS tokens. It writes the weighted means of latents to `out` [R, G, 16, padded L].
    chunk = words(chunk_at, 4)
    num_tiles, base = chunk[1], chunk[2]
    scale = float_of(scale_bits)
    if tile < 0:
        return 0 if is_lone(chunk, groups, most_lone) else num_tiles * groups
    group = tile % groups
    here_heads = min(LANES, heads - group * LANES)
    part = words(chunk[0] + tile // groups * 24, 3)
    sequence, first, count = part[0], part[1], part[2]
    starts, context, table = (
        words(query_starts + sequence * 8, 2),
        words(contexts + sequence * 8, 1)[0],
        tables + sequence * table_stride,
    )
    position = context - (starts[1] - starts[0]) + first  # position of the tile's first query token
    place = starts[0] + first - base  # that token's row in `query` and `out`
    scores = np.empty((LANES, LANES), np.float32)  # [token, head]
    weights = np.empty((LANES, LANES), np.float32)  # [head, token]
    top = np.full((count, LANES), -np.inf, np.float32)
    total = np.zeros((count, LANES), np.float32)
    shrink, room = np.empty(LANES, np.float32), latent_room(row_bytes)
    for row in range(count):
        floats(out + ((place + row) * groups + group) * LANES * latent_lanes * 4, LANES * latent_lanes)[:] = (
            0.0
        )
    start = max(0, position - window + 1) // LANES if window > 0 else 0
    for column in range(start, (position + count - 1) // LANES + 1):
        block = latents + words(table + column * 8, 1)[0] * LANES * row_bytes
        page, page_bytes = read_latents(block, row_bytes, latent, width, room)
        for row in range(count):
            here = position + row
            low = here - window + 1 - column * LANES if window > 0 else 0
            high = here + 1 - column * LANES
            if high <= 0 or low >= LANES:
                continue
            panel = query + ((place + row) * groups + group) * width * LANES * 4
            rows_times_panel_f32(
                page, page_bytes, panel, LANES * 4, width, address_of(scores), LANES * 4, LANES
            )
            softmax_lanes(
                address_of(scores),
                scale,
                low,
                high,
                address_of(top[row]),
                address_of(total[row]),
                address_of(shrink),
            )
            transpose_block(scores, weights)
            mix_block(
                address_of(weights), address_of(shrink), page, page_bytes,
                out + ((place + row) * groups + group) * LANES * latent_lanes * 4, latent_lanes * 4, 0, latent_lanes, here_heads,
            )  # fmt: skip
    for row in range(count):
        for lane in range(here_heads):
            at_lane = out + (((place + row) * groups + group) * LANES + lane) * latent_lanes * 4
            sums_of_lane = floats(at_lane, latent_lanes)
            for dim in range(latent_lanes):
                sums_of_lane[dim] /= total[row, lane]
    return 0


def _expand(  # type: ignore[no-untyped-def]
    tile, found, token_bytes, head_bytes, weights, panel_bytes, times, heads, latent, chunk_at, out, value_lanes,
):  # fmt: skip
    # A tile multiplies one head's means of latents by one panel of its value half and writes to `out` [R, H, padded V].
    chunk = words(chunk_at, 4)
    first_row, rows = chunk[2], chunk[3]
    panels = value_lanes // LANES
    if tile < 0:
        return heads * panels if rows > 0 else 0
    head, panel = tile // panels, tile % panels
    times_panel(
        times, found + head * head_bytes, token_bytes, weights + tile * panel_bytes, 0, latent, 0,
        out + ((first_row * heads + head) * value_lanes + panel * LANES) * 4, heads * value_lanes * 4, rows,
    )  # fmt: skip
    return 0


@njit(nogil=True, inline="always")
def _rotated(x, cosine, sine, rotary, is_interleaved, out):  # type: ignore[no-untyped-def]
    # Pairs are (i, i + E/2) in `out`. In `x` they are the same, or (2i, 2i + 1) if interleaved.
    half = rotary // 2
    for i in range(half):
        a = x[2 * i] if is_interleaved != 0 else x[i]
        b = x[2 * i + 1] if is_interleaved != 0 else x[half + i]
        out[i] = a * cosine[i] - b * sine[i]
        out[half + i] = b * cosine[half + i] + a * sine[half + i]


_ROTATED_ROWS = 8  # rows of a tile


def _place(  # type: ignore[no-untyped-def]
    tile, latents, latent_stride, latent, weight, eps_bits, queries, token_bytes, cosines, sines, rotary,
    is_interleaved, heads, unrotated, rows_at, pages, row_bytes, slots_at, is_e4m3,
):  # fmt: skip
    # Tile 0 norms the latents of all rows and caches them with their rotated keys. It is a single tile because the row
    # that starts a block clears its tail. The other tiles rotate queries in place.
    eps, rows = float_of(eps_bits), words(rows_at, 1)[0]
    if tile < 0:
        return 1 + (rows + _ROTATED_ROWS - 1) // _ROTATED_ROWS if rows > 0 else 0
    if tile == 0:
        lanes, factors, slots = np.empty(LANES, np.float32), floats(weight, latent), words(slots_at, rows)
        room = np.empty(latent + rotary, np.float32)
        for row in range(rows):
            line = latents + row * latent_stride
            block, offset = slots[row] // LANES, slots[row] % LANES
            page = pages + block * LANES * row_bytes
            if offset == 0:
                uint8s(page, LANES * row_bytes)[:] = 0
            own = page + offset * row_bytes
            to = latent_target(own, room)
            norm_row(floats(line, latent), factors, eps, latent, floats(to, latent), lanes)
            cosine, sine = (
                floats(cosines + row * rotary * 4, rotary),
                floats(sines + row * rotary * 4, rotary),
            )
            _rotated(
                floats(line + latent * 4, rotary),
                cosine,
                sine,
                rotary,
                is_interleaved,
                floats(to + latent * 4, rotary),
            )
            write_latent(to, latent, rotary, own, row_bytes, is_e4m3)
        return 0
    made = np.empty(rotary, np.float32)
    first = (tile - 1) * _ROTATED_ROWS
    for row in range(first, min(first + _ROTATED_ROWS, rows)):
        cosine, sine = floats(cosines + row * rotary * 4, rotary), floats(sines + row * rotary * 4, rotary)
        for head in range(heads):
            query = floats(
                queries + row * token_bytes + (head * (unrotated + rotary) + unrotated) * 4, rotary
            )
            _rotated(query, cosine, sine, rotary, is_interleaved, made)
            query[:] = made
    return 0


ABSORB, EXPAND = Kernel(_absorb, TILES_VERSION), Kernel(_expand, TILES_VERSION)
ATTEND, PLACE = kernels_of(_attend), kernels_of(_place)


def latent_kernels(dtype: torch.dtype) -> tuple[Kernel[...], ...]:
    """Return the kernels for pages of this type."""
    return ABSORB, EXPAND, ATTEND[dtype], PLACE[dtype], *lone_kernels(dtype)


def place_row(
    latents: int, stride: int, norm: tuple[Tensor, float], queries: int, token_bytes: int, heads: int, unrotated: int,
    rotary_dim: int, pages_NBW: Tensor, step: Step, *, is_interleaved: bool,
) -> list[int]:  # fmt: skip
    """Return one row of a program: norm latents, cache them with their rotated keys, and rotate queries in place.

    The addresses of [T, E] cosines and sines are set every step, at `heads.COSINES` and `SINES`.

    Args:
        latents: Address of [T, L + E] float32. stride: bytes from one row to the next.
        norm: Weight [L] and epsilon of the latents' norm.
        queries: Address of [T, H, U + E] float32. token_bytes: bytes from one token to the next.
        heads: H. unrotated: U. rotary_dim: E.
        pages_NBW: Pages of the layer.
        step: The step with these rows.
        is_interleaved: Rotate neighbours as pairs, and store the two halves apart.
    """
    weight, eps = norm
    row_bytes = pages_NBW.shape[2] * pages_NBW.element_size()
    return PLACE[pages_NBW.dtype].row(
        latents, stride, len(weight), weight.data_ptr(), bits_of(eps), queries, token_bytes, 0, 0, rotary_dim,
        int(is_interleaved), heads, unrotated, step.facts[1:].data_ptr(), pages_NBW.data_ptr(), row_bytes,
        step.cache_slot_T.data_ptr(), int(pages_NBW.dtype is E4M3),
    )  # fmt: skip


class LatentRooms(NamedTuple):
    """Memory for queries and sums in latent space: `room_floats` values for each of `ROWS_AT_ONCE` rows."""

    query: Tensor
    found: Tensor
    lone: Tensor  # see `lone_latents.lone_rows`


ROWS_AT_ONCE = TILES_AT_ONCE * TILE_TOKENS


def room_floats(heads: int, latent: int, rotary_dim: int) -> tuple[int, int]:
    """Return the float32 values of `LatentRooms` per row. Zero the room for queries first if H is not a multiple of 16."""
    groups = -(-heads // LANES)
    return groups * (latent + rotary_dim) * LANES, groups * LANES * -(-latent // LANES) * LANES


def absorb_rows(
    queries: Queries, heads: int, weight: AbsorbedWeight, chunk: int, room: Tensor, rotary_dim: int, adapters: int = 0
) -> list[list[int]]:  # fmt: skip
    """Return rows of a program: multiply the queries of a chunk's rows into latent space, at `room`.

    Args:
        chunk: Address of the four words of a chunk (see `Step.chunks`).
        adapters: Address of [T] int64, the place of each row's adapter, or -1. 0: no row has one.
        others: As in `latent_attention` and `LatentRooms`.
    """
    unrotated, latent = weight.key.shape[2], weight.value.shape[2]
    absorb = ABSORB.row(
        queries.address, queries.token_stride, queries.head_stride, weight.key.data_ptr(),
        unrotated * LANES * weight.key.element_size(), _times(weight), heads, -(-heads // LANES), unrotated, latent,
        rotary_dim, chunk, room.data_ptr(),
    )  # fmt: skip
    if not (adapters and weight.adapters):
        return [absorb]
    adapt = adapt_absorbed_row(
        queries, heads, weight.adapters, adapters, chunk, room.data_ptr(), unrotated=unrotated, value_dim=weight.value_dim,
        latent=latent, rotary_dim=rotary_dim,
    )  # fmt: skip
    return [absorb, adapt]


def expand_rows(
    room: Tensor, heads: int, weight: AbsorbedWeight, chunk: int, out: int, adapters: int = 0
) -> list[list[int]]:
    """Return rows of a program: multiply the means of latents at `room` into values at `out` (see `absorb_rows`)."""
    latent, value_lanes = weight.value.shape[2], weight.value.shape[1] * LANES
    latent_lanes = -(-latent // LANES) * LANES
    expand = EXPAND.row(
        room.data_ptr(), -(-heads // LANES) * LANES * latent_lanes * 4, latent_lanes * 4, weight.value.data_ptr(),
        latent * LANES * weight.value.element_size(), _times(weight), heads, latent, chunk, out, value_lanes,
    )  # fmt: skip
    if not (adapters and weight.adapters):
        return [expand]
    adapt = adapt_expanded_row(
        room.data_ptr(), heads, weight.adapters, adapters, chunk, out, unrotated=weight.key.shape[2],
        value_dim=weight.value_dim, value_lanes=value_lanes, latent=latent,
    )  # fmt: skip
    return [expand, adapt]


def _times(weight: AbsorbedWeight) -> int:
    return (TIMES_BF16 if weight.key.dtype is torch.bfloat16 else TIMES_F32).address


def latent_rows(
    queries: Queries, heads: int, latents_NBW: Tensor, step: Step, weight: AbsorbedWeight, rooms: LatentRooms, *,
    rotary_dim: int, scale: float, window: int, out: int, has_adapters: bool = False,
) -> list[list[int]]:  # fmt: skip
    """Return rows of a program for the batch that `step` describes when it runs; every chunk of tiles has the same rows.

    Args:
        has_adapters: For steps in which rows have adapters.
        out: Address of [T, H, padded V] float32.
        others: As in `latent_attention`.
    """
    row_bytes, latent = latents_NBW.shape[2] * latents_NBW.element_size(), weight.value.shape[2]
    groups, latent_lanes = -(-heads // LANES), -(-latent // LANES) * LANES
    table, adapters = step.block_table_SM, step.adapter_T.data_ptr() if has_adapters else 0
    rows = []
    for chunk in step.chunks(TILE_TOKENS, TILES_AT_ONCE):
        at = chunk.ctypes.data
        lone = lone_rows(
            at, rooms.query.data_ptr(), rooms.found.data_ptr(), rooms.lone.data_ptr(), latents_NBW, step, heads=heads,
            width=latent + rotary_dim, latent_dim=latent, scale=scale, window=window,
        )  # fmt: skip
        rows += [
            *absorb_rows(queries, heads, weight, at, rooms.query, rotary_dim, adapters),
            ATTEND[latents_NBW.dtype].row(
                rooms.query.data_ptr(), latent + rotary_dim, groups, latents_NBW.data_ptr(), row_bytes, at,
                step.query_start_S.data_ptr(), step.context_S.data_ptr(), table.data_ptr(), table.stride(0) * 8,
                bits_of(scale), window, rooms.found.data_ptr(), latent_lanes, heads, most_lone(step), latent,
            ),
            *lone,
            *expand_rows(rooms.found, heads, weight, at, out, adapters),
        ]  # fmt: skip
    return rows


def latent_attention(
    query_HTD: Tensor,
    latents_NBW: Tensor,
    step: Step,
    weight: AbsorbedWeight,
    *,
    rotary_dim: int,
    scale: float,
    window: int = 0,
) -> Tensor:
    """Attend every row of the step to the cached latents of its sequence, including its own.

    Args:
        query_HTD: [H, T, U + E] float32, last dim contiguous. The rows that `step` describes come first.
        latents_NBW: [N, 16, W] float32 pages: L latent values, E rotary values, then any finite values. W is a multiple of
            16. Or codes with scales (`kvcache.codes`).
        step: Rows, contexts and block tables. The pages already hold the step's own tokens.
        weight: The halves of `kv_b_proj`.
        rotary_dim: E.
        scale: Factor on the scores.
        window: Number of tokens that a row sees, including itself; 0 for all.

    Returns:
        [T, H, V] float32, new; padded rows are zero.
    """
    heads, num_rows, _ = query_HTD.shape
    _, block_tokens, width = latents_NBW.shape
    width -= LATENT_SCALES_BYTES * is_coded(latents_NBW)
    latent = weight.value.shape[2]
    if block_tokens != LANES or width % LANES or width < latent + rotary_dim:
        raise ValueError(
            f"latent attention needs blocks of {LANES} tokens and rows that hold {latent} + {rotary_dim} values, "
            f"padded to a multiple of {LANES}; got {block_tokens} and {width}"
        )
    out_THV = torch.zeros(num_rows, heads, weight.value.shape[1] * LANES)
    products = step.num_pairs * heads * 2 * latent + step.num_tokens * (
        weight.key.numel() + weight.value.numel()
    )
    at_once = min(ROWS_AT_ONCE, step.num_tokens)
    make = torch.zeros if heads % LANES else torch.empty  # unused lanes of the last group must be 0
    query, found = (make(at_once, size) for size in room_floats(heads, latent, rotary_dim))
    rooms = LatentRooms(query, found, torch.empty(MOST, lone_floats(step.block_table_SM.shape[1])))
    queries = Queries(query_HTD.data_ptr(), query_HTD.stride(1) * 4, query_HTD.stride(0) * 4)
    rows = latent_rows(
        queries, heads, latents_NBW, step, weight, rooms, rotary_dim=rotary_dim, scale=scale, window=window,
        out=out_THV.data_ptr(), has_adapters=step.has_adapters,
    )  # fmt: skip
    num_chunks = -(-len(step.tiles(TILE_TOKENS)) // TILES_AT_ONCE)
    run(
        program_of(rows[: len(rows) // len(step.chunks(TILE_TOKENS, TILES_AT_ONCE)) * num_chunks]),
        step.team,
        products // PRODUCTS_PER_NS,
    )
    return out_THV[..., : weight.value_dim]
