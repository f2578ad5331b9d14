"""One pass over heads between their projection and attention: norms, rotary embedding and the cache.

This is a kernel of programs. A tile is one KV head with its query heads, for all rows, so no two tiles write the same
part of a block. The row that starts a block clears the block's tail, as in `kvcache.paged_cache`. With pages of codes it
quantises keys and values, each head with its own scale.

Legend: T rows, H query heads, G KV heads, D key dim, V value dim, E rotary dim, B tokens of a block (16).
"""

from typing import NamedTuple

import numpy as np
import torch
from numba import njit
from torch import Tensor

from attention.cpu.cached import kernels_of, write_head
from attention.cpu.norm import norm_row
from attention.cpu.tiles import LANES
from dispatch.compiled.native import bits_of, float_of, floats, words
from kvcache.codes import E4M3, key_dim_of
from kvcache.step import Step


@njit(nogil=True, inline="always")
def _rotate(x, cosine, sine, rotary):  # type: ignore[no-untyped-def]
    # Pairs are (i, i + E/2).
    half = rotary // 2
    for i in range(half):
        a, b = x[i], x[half + i]
        x[i] = a * cosine[i] - b * sine[i]
        x[half + i] = b * cosine[half + i] + a * sine[half + i]


def _heads(  # type: ignore[no-untyped-def]
    tile, x, stride, heads, kv_heads, key_dim, value_dim, rows_at, cosines, sines, rotary, query_weight, key_weight,
    eps_bits, keys, values, slots_at, query_dim, key_bytes, value_bytes, is_e4m3,
):  # fmt: skip
    rows, eps = words(rows_at, 1)[0], float_of(eps_bits)
    slots = words(slots_at, rows)
    if tile < 0:
        return kv_heads if rows > 0 else 0
    group, value_lanes = heads // kv_heads, (value_dim + LANES - 1) // LANES * LANES
    lanes = np.empty(LANES, np.float32)
    for row in range(rows):
        line = x + row * stride
        cosine, sine = floats(cosines + row * rotary * 4, rotary), floats(sines + row * rotary * 4, rotary)
        for head in range(tile * group, (tile + 1) * group):
            query = floats(line + head * query_dim * 4, key_dim)
            if query_weight != 0:
                norm_row(query, floats(query_weight, key_dim), eps, key_dim, query, lanes)
            _rotate(query, cosine, sine, rotary)
        key = floats(line + (heads * query_dim + tile * key_dim) * 4, key_dim)
        if key_weight != 0:
            norm_row(key, floats(key_weight, key_dim), eps, key_dim, key, lanes)
        _rotate(key, cosine, sine, rotary)
        behind_keys = heads * query_dim + kv_heads * key_dim
        value = floats(line + (behind_keys + tile * value_dim) * 4, value_dim)
        block, offset = slots[row] // LANES * kv_heads + tile, slots[row] % LANES
        pages = keys + block * key_bytes, values + block * value_bytes
        write_head(key, value, pages[0], pages[1], value_lanes, offset, is_e4m3)
    return 0


HEADS = kernels_of(_heads)
# Every step writes the addresses of [T, E] float32 here, and at the same places of rows of `latents.PLACE`.
COSINES, SINES = (HEADS[torch.float32].place(name) for name in ("cosines", "sines"))


class HeadNorms(NamedTuple):
    """Addresses of the norm weights [D] of query and key heads; 0 without a norm."""

    query: int = 0
    key: int = 0
    eps: float = 0.0


def heads_row(
    x: int, stride: int, heads: int, value_dim: int, rotary_dim: int, norms: HeadNorms, pages: tuple[Tensor, Tensor],
    step: Step, *, query_dim: int,
) -> list[int]:  # fmt: skip
    """Return one row of a program: norm and rotate the heads of rows [q | k | v] in place, and cache keys and values.

    Args:
        x: Address of [T, H * query_dim + G * D + G * V] float32. stride: bytes from one row to the next.
        heads: H. value_dim: V. rotary_dim: E. Each step writes the angles' addresses at COSINES and SINES.
        pages: Pages of a layer: [N, G, D, 16] and [N, G, 16, padded V], float32 or codes with scales (`kvcache.codes`).
        step: The step with these rows.
        query_dim: Values from one query head to the next; more than D if other values lie in between. Those are not changed.
    """
    keys_NGDB, values_NGBV = pages
    key_bytes, value_bytes = (each.stride(1) * each.element_size() for each in pages)
    return HEADS[keys_NGDB.dtype].row(
        x, stride, heads, keys_NGDB.shape[1], key_dim_of(keys_NGDB), value_dim, step.facts[1:].data_ptr(), 0, 0,
        rotary_dim, norms.query, norms.key, bits_of(norms.eps), keys_NGDB.data_ptr(), values_NGBV.data_ptr(),
        step.cache_slot_T.data_ptr(), query_dim, key_bytes, value_bytes, int(keys_NGDB.dtype is E4M3),
    )  # fmt: skip
