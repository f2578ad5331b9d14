"""The exported unit: the bytes of one block, or of one state slot, of all layers, and their checksum.

Everything that keeps or moves cached state outside the pages (tiers, later transfers between ranks) uses these bytes: each
layer's parts in order, as they are in memory. Both sides compare the digest of their meaning, `layout_of`. The owner computes
the checksum; the taker computes it again over the memory into which the bytes were written.

The checksum is the sum of all 32-bit words, each times an odd 64-bit number that depends on its place, modulo 2^64: Fletcher's
idea with wider weights. One changed word, or two that were exchanged, always change it, and the words can be summed in any
order, so that every device computes the same number. It detects faults, not forgeries.

Legend: N blocks or state slots, W words of a part.
"""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import asdict
from itertools import accumulate
from typing import Any, Protocol

import numpy as np
import torch
from numba import njit
from torch import Tensor

from kvcache.paged_cache import BLOCK_TOKENS, PagedCache

# As signed numbers of 64 bits. STEP is even and FIRST is odd, so that every weight is odd.
STEP = 0x9E3779B97F4A7C14 - (1 << 64)
FIRST = 0xD1B54A32D192ED03 - (1 << 64)
MASK = (1 << 64) - 1
WORD_BYTES = 4
_UNSIGNED_STEP, _UNSIGNED_FIRST = STEP & MASK, FIRST & MASK


@njit(nogil=True, cache=True)
def _sum_words(words_W, place):  # type: ignore[no-untyped-def]
    total, step = np.uint64(0), np.uint64(_UNSIGNED_STEP)
    weight = np.uint64(_UNSIGNED_FIRST) + step * np.uint64(place)
    for index in range(len(words_W)):
        total += np.uint64(words_W[index]) * (weight + step * np.uint64(index))
    return total


def sum_of(parts: Sequence[Tensor]) -> int:
    """Return the checksum of contiguous tensors, one after the other, with torch's own operations, on any device."""
    total = place = 0
    for part in parts:
        words_W = part.reshape(-1).view(torch.uint8).view(torch.int32).long() & 0xFFFFFFFF
        at_W = torch.arange(place, place + len(words_W), device=part.device)
        weights_W = at_W * STEP + FIRST
        total = (total + int((words_W * weights_W).sum())) & MASK
        place += len(words_W)
    return total


def sum_of_bytes(record: memoryview) -> int:
    """Return the checksum of a record with all its parts in one piece. The memory is aligned to words."""
    return int(_sum_words(np.frombuffer(record, np.uint32), 0)) & MASK


class Unit(Protocol):
    """Records of bytes in a cache: its blocks, or its state slots. For one thread at a time."""

    @property
    def num_bytes(self) -> int:
        """Size of a record."""

    def export(self, index: int) -> tuple[list[memoryview], int]:
        """Return a record's bytes, valid until the next call, and their checksum. Nothing may write the record meanwhile."""

    def buffers(self, index: int) -> list[memoryview]:
        """Return memory for the bytes of a record that is taken over."""

    def take(self, index: int) -> int:
        """Move the bytes from the buffers to their place, if they are not there already. Returns the checksum of the place."""


class CacheUnit:
    """A `Unit` in memory that the CPU addresses: nothing is copied."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        """Refer to tensors [N, ...], contiguous, with the same N. Empty ones are left out.

        Raises:
            ValueError: A part is not a whole number of words.
        """
        self._parts: list[
            tuple[memoryview, np.ndarray[Any, Any], int]
        ] = []  # bytes, words [N, W], bytes of one
        for tensor in filled(tensors):
            memory_NB = tensor.view(len(tensor), -1).view(torch.uint8).numpy()
            size = memory_NB.shape[1]
            self._parts.append((memory_NB.reshape(-1).data, memory_NB.view(np.uint32), size))
        # Bytes of a record before each part, and of all parts.
        self.offsets = [0, *accumulate(size for _, _, size in self._parts)]
        self.num_bytes = self.offsets[-1]

    def export(self, index: int) -> tuple[list[memoryview], int]:
        return self.buffers(index), self.take(index)

    def buffers(self, index: int, parts: slice = slice(None)) -> list[memoryview]:
        return [memory[index * size : (index + 1) * size] for memory, _, size in self._parts[parts]]

    def take(self, index: int) -> int:
        return self.sum_parts(index, slice(None))

    def sum_parts(self, index: int, parts: slice) -> int:
        """Return the share of some of a record's parts in its checksum. The checksum is the sum of all shares, modulo 2^64."""
        total = 0
        for (_, words_NW, _), offset in zip(self._parts[parts], self.offsets[:-1][parts], strict=True):
            total += int(_sum_words(words_NW[index], offset // WORD_BYTES))
        return total & MASK


def filled(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Return the tensors [N, ...] that are not empty.

    Raises:
        ValueError: One of them has no whole number of words per index.
    """
    parts = [tensor for tensor in tensors if tensor.numel()]
    for part in parts:
        size = part[0].numel() * part.element_size()
        if size % WORD_BYTES:
            raise ValueError(f"a part of a record has {size} bytes, not a multiple of {WORD_BYTES}")
    return parts


def block_parts(cache: PagedCache) -> list[Tensor]:
    """Return what the blocks of a cache consist of: tensors [N, ...], scales of codes included."""
    return [part for layer in range(len(cache.shapes)) for part in cache.parts(layer)]


def parts_after(cache: PagedCache) -> list[int]:
    """Return how many parts of a block the first 0, 1, 2, ... layers of a cache have. Empty parts do not count."""
    parts = (cache.parts(layer) for layer in range(len(cache.shapes)))
    return [0, *accumulate(sum(part.numel() > 0 for part in each) for each in parts)]


def state_parts(cache: PagedCache) -> list[Tensor]:
    """Return what the state slots of a cache consist of: tensors [N, ...]."""
    return [part for pair in zip(cache.tails, cache.states, strict=True) for part in pair]


def layout_of(cache: PagedCache, facts: dict[str, str]) -> bytes:
    """Return the digest of all that gives the bytes their meaning: 32 bytes.

    Args:
        facts: Whatever else decides the bytes: the checkpoint, the computing device, types, versions.
    """
    parts = [[list(part.shape[1:]), str(part.dtype)] for part in (*block_parts(cache), *state_parts(cache))]
    told = {
        "block_tokens": BLOCK_TOKENS,
        "layers": [asdict(shape) for shape in cache.shapes],
        "parts": parts,
        "facts": facts,
    }
    return hashlib.sha256(json.dumps(told, sort_keys=True, default=str).encode()).digest()
