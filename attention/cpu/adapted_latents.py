"""LoRA adapters of `kv_b_proj` in absorbed form: each half of its low-rank product acts in latent space, as the weight's halves do.

The key half adds `(q @ B_key) @ A` to a head's query, the value half adds `(mean @ A) @ B_value` to its output. A row's sums have a fixed
order. Rows without an adapter are not touched.

Legend: T rows, H query heads, U unrotated dims of the key, V value dim, L latent dim, R rank (W: rounded up to vectors), G groups of 16
heads.
"""

import numpy as np
from numba import njit

from attention.cpu.attention import Queries
from attention.cpu.tiles import LANES, TILES_VERSION
from dispatch.compiled.native import floats, words
from dispatch.compiled.team import Kernel

# Words of an adapter's entry in a table (`moe.lora.tables`): addresses of A [L, W] and B [R, H * (U + V)], R, and the factors' scale and
# type, which are 1 and float32 here.
ENTRY_WORDS = 4
_ENTRY_BYTES = 8 * ENTRY_WORDS


@njit(nogil=True)
def _place(tile, heads, chunk, table, adapters_at):  # type: ignore[no-untyped-def]
    # A tile's row in the chunk, its head, and the address of the row's entry, or 0 if it has no adapter.
    row, head = tile // heads, tile % heads
    place = words(adapters_at, chunk[2] + row + 1)[chunk[2] + row]
    return row, head, table + place * _ENTRY_BYTES if place >= 0 else 0


def _adapt_absorbed(  # type: ignore[no-untyped-def]
    tile, query, token_bytes, head_bytes, table, adapters_at, heads, groups, unrotated, value, latent, rotary, chunk_at,
    out,
):  # fmt: skip
    # A tile is one head of one row; it adds to the head's lane of `out` [R, G, L + E, 16].
    chunk = words(chunk_at, 4)
    first_row, rows = chunk[2], chunk[3]
    if tile < 0:
        return heads * rows if rows > 0 else 0
    row, head, entry_at = _place(tile, heads, chunk, table, adapters_at)
    if entry_at == 0:
        return 0
    entry = words(entry_at, 3)
    rank = entry[2]
    width, columns, begin = (
        (rank + LANES - 1) // LANES * LANES,
        heads * (unrotated + value),
        head * (unrotated + value),
    )
    given = floats(query + (first_row + row) * token_bytes + head * head_bytes, unrotated)
    first, second = floats(entry[0], latent * width), floats(entry[1], rank * columns)
    low = np.zeros(width, np.float32)
    for each in range(rank):
        for dim in range(unrotated):
            low[each] += given[dim] * second[each * columns + begin + dim]
    size = (latent + rotary) * LANES
    lanes = floats(out + ((row * groups + head // LANES) * size + head % LANES) * 4, size)
    for dim in range(latent if rank > 0 else 0):
        made = np.float32(0.0)
        for each in range(rank):
            made += low[each] * first[dim * width + each]
        lanes[dim * LANES] += made
    return 0


def _adapt_expanded(  # type: ignore[no-untyped-def]
    tile, found, table, adapters_at, heads, groups, unrotated, value, value_lanes, latent, chunk_at, out,
):  # fmt: skip
    # A tile is one head of one row; it adds to `out` [T, H, padded V] from `found` [R, G, 16, padded L].
    chunk = words(chunk_at, 4)
    first_row, rows = chunk[2], chunk[3]
    if tile < 0:
        return heads * rows if rows > 0 else 0
    row, head, entry_at = _place(tile, heads, chunk, table, adapters_at)
    if entry_at == 0:
        return 0
    entry = words(entry_at, 3)
    rank = entry[2]
    width, columns = (rank + LANES - 1) // LANES * LANES, heads * (unrotated + value)
    latent_lanes, begin = (latent + LANES - 1) // LANES * LANES, head * (unrotated + value) + unrotated
    means = floats(found + (row * groups * LANES + head) * latent_lanes * 4, latent)
    first, second = floats(entry[0], latent * width), floats(entry[1], rank * columns)
    low = np.zeros(width, np.float32)
    for dim in range(latent if rank > 0 else 0):
        for each in range(width):
            low[each] += means[dim] * first[dim * width + each]
    made = floats(out + ((first_row + row) * heads + head) * value_lanes * 4, value)
    for each in range(rank):
        for dim in range(value):
            made[dim] += low[each] * second[each * columns + begin + dim]
    return 0


ADAPT_ABSORBED = Kernel(_adapt_absorbed, TILES_VERSION)
ADAPT_EXPANDED = Kernel(_adapt_expanded, TILES_VERSION)


def adapt_absorbed_row(
    queries: Queries, heads: int, table: int, adapters: int, chunk: int, room: int, *, unrotated: int, value_dim: int,
    latent: int, rotary_dim: int,
) -> list[int]:  # fmt: skip
    """Return a program row that adds to the queries in latent space at `room`, after `latents.absorb_row`.

    Args:
        table: Address of the entries of all places. adapters: Address of [T] int64, the place of each row's adapter, or -1.
        chunk: Address of the four words of a chunk (see `Step.chunks`).
    """
    return ADAPT_ABSORBED.row(
        queries.address, queries.token_stride, queries.head_stride, table, adapters, heads, -(-heads // LANES), unrotated,
        value_dim, latent, rotary_dim, chunk, room,
    )  # fmt: skip


def adapt_expanded_row(
    room: int, heads: int, table: int, adapters: int, chunk: int, out: int, *, unrotated: int, value_dim: int,
    value_lanes: int, latent: int,
) -> list[int]:  # fmt: skip
    """Return a program row that adds to the values at `out`, after `latents.expand_row`. Arguments as in `adapt_absorbed_row`."""
    return ADAPT_EXPANDED.row(
        room,
        table,
        adapters,
        heads,
        -(-heads // LANES),
        unrotated,
        value_dim,
        value_lanes,
        latent,
        chunk,
        out,
    )
