"""The KV cache in eight bits: a row's numbers as int8 or e4m3 codes with one float32 scale per token and head.

A row (a head's key or value, a latent, its rotary key, an index key) is quantised once, when it is written. Its largest
magnitude becomes the largest code, and the others are rounded to nearest, ties to even. So codes depend on nothing but the
row: neither on the batch nor on the cut of a prompt. A row with an infinity or NaN has the scale NaN. Scales lie inside the block,
so that a block stays one piece of memory. e4m3 (Micikevicius et al., arXiv 2209.05433) has a constant relative error and
suits rows with outliers; int8 has a constant absolute one and is decoded faster on a CPU.

Layout on a CPU, as in `kvcache.paged_cache` but with bytes. A key panel [D, 16] is followed by `SCALE_ROWS` rows of 16 bytes:
the scales of the block's 16 keys, then those of its 16 values. A panel of index keys is followed by the scales of its keys. A
row of latents is followed by 16 bytes: the scales of its latent and of its rotary key, and zeros.

Legend: T tokens, G KV heads, D dims of a row, V value dim, N blocks, B tokens of a block (16), W bytes of a latent's row.
"""

import numpy as np
import torch
from numba import njit
from torch import Tensor

BLOCK_TOKENS = 16
INT8, E4M3 = torch.int8, torch.float8_e4m3fn
CODES = {"auto": None, "fp8": E4M3, "int8": INT8}  # by the value of --kv-cache-dtype
SCALE_BYTES = 4  # float32
INDEX_SCALE_ROWS = SCALE_BYTES  # rows of 16 bytes for the scales of 16 rows
SCALE_ROWS = 2 * INDEX_SCALE_ROWS
LATENT_SCALES_BYTES = 16

_LARGEST_INT8, _LARGEST_E4M3 = np.float32(127.0), np.float32(448.0)
_INFINITY = 0x7F800000
_LEAST = np.float32(1e-30)  # rows with smaller numbers become 0: their factor would be infinite
_ROUNDING = np.float32(12582912.0)  # 1.5 * 2^23: adding it rounds to an integer, in the sum's lower bits
_NORMAL_FROM = 121 << 23  # 2^-6, the smallest normal e4m3
_TO_E4M3 = (7 - 127) * (1 << 23) + 0x7FFFF  # from float32's exponents to e4m3's, plus just under half a step
_STEPS = np.float32(512.0)  # of 2^-9, the subnormals


@njit(nogil=True, error_model="numpy")
def quantise(x, is_e4m3, out):  # type: ignore[no-untyped-def]
    """Write the codes of a row to uint8 `out`, and return its scale. `x`: contiguous float32."""
    bits = x.view(np.int32)
    size, top = np.int32(0), np.float32(0.0)
    for i in range(len(x)):
        size = max(size, np.int32(bits[i] & 0x7FFFFFFF))  # as integers NaN is the largest
        top = max(top, abs(x[i]))
    if size >= _INFINITY or top < _LEAST:
        for i in range(len(x)):
            out[i] = 0
        return np.float32(np.nan) if size >= _INFINITY else np.float32(0.0)
    largest = _LARGEST_E4M3 if is_e4m3 else _LARGEST_INT8
    factor = largest / top
    if is_e4m3:
        for i in range(len(x)):
            word = np.int64(np.float32(x[i] * factor).view(np.uint32))
            magnitude = word & 0x7FFFFFFF
            normal = (magnitude + _TO_E4M3 + ((magnitude >> 20) & 1)) >> 20
            steps = np.float32(abs(x[i] * factor) * _STEPS + _ROUNDING).view(np.uint32) & 0xFF
            code = normal if magnitude >= _NORMAL_FROM else np.int64(steps)
            out[i] = np.uint8((word >> 24) & 0x80 | code)
    else:
        for i in range(len(x)):
            out[i] = np.uint8(np.float32(x[i] * factor + _ROUNDING).view(np.uint32) & 0xFF)
    return top / largest


@njit(nogil=True, cache=True)
def write_heads(key_TGD, value_TGV, slots, count, is_e4m3, keys, values, scales):  # type: ignore[no-untyped-def]
    """Write rows of keys and values. `scales` views `keys` as float32."""
    key_dim = key_TGD.shape[2]
    for row in range(count):
        block, offset = slots[row] // BLOCK_TOKENS, slots[row] % BLOCK_TOKENS
        if offset == 0:  # a block's tail is read with weight 0, which requires finite scales
            keys[block] = 0
            values[block] = 0
        place, lane = key_dim + offset // 4, offset % 4
        for head in range(key_TGD.shape[1]):
            own = keys[block, head]
            scales[block, head, place, lane] = quantise(key_TGD[row, head], is_e4m3, own[:key_dim, offset])
            to = values[block, head, offset, : value_TGV.shape[2]]
            scales[block, head, place + INDEX_SCALE_ROWS, lane] = quantise(value_TGV[row, head], is_e4m3, to)


@njit(nogil=True, cache=True)
def write_latents(latent_TR, rotary_TE, slots, count, is_e4m3, pages, scales):  # type: ignore[no-untyped-def]
    """Write latents and their rotary keys. `scales` views `pages` [N, B, W] as float32."""
    rank, rotary = latent_TR.shape[1], rotary_TE.shape[1]
    place = (pages.shape[2] - LATENT_SCALES_BYTES) // 4
    for row in range(count):
        block, offset = slots[row] // BLOCK_TOKENS, slots[row] % BLOCK_TOKENS
        if offset == 0:  # as above
            pages[block] = 0
        own = pages[block, offset]
        scales[block, offset, place] = quantise(latent_TR[row], is_e4m3, own[:rank])
        scales[block, offset, place + 1] = quantise(rotary_TE[row], is_e4m3, own[rank : rank + rotary])


@njit(nogil=True, cache=True)
def write_index(key_TD, slots, count, is_e4m3, pages, scales):  # type: ignore[no-untyped-def]
    """Write index keys. `scales` views `pages` as float32."""
    dim = key_TD.shape[1]
    for row in range(count):
        block, offset = slots[row] // BLOCK_TOKENS, slots[row] % BLOCK_TOKENS
        if offset == 0:  # as above
            pages[block] = 0
        own = pages[block]
        scales[block, dim + offset // 4, offset % 4] = quantise(key_TD[row], is_e4m3, own[:dim, offset])


def is_coded(pages: Tensor) -> bool:
    """Return whether pages hold codes."""
    return pages.dtype.itemsize == 1


def key_dim_of(keys_NGDB: Tensor) -> int:
    """Return the key dim of a CPU's pages of keys, with scales or without."""
    return int(keys_NGDB.shape[2]) - SCALE_ROWS * is_coded(keys_NGDB)


def bytes_of(pages: Tensor) -> np.ndarray:
    """View pages of codes as bytes."""
    return pages.view(torch.uint8).numpy()


def scales_of(pages: Tensor) -> np.ndarray:
    """View pages of codes as float32, which their scales are."""
    return bytes_of(pages).view(np.float32)
