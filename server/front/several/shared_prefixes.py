"""The prefixes that ranks have seen, in memory that all fronts share, so that a conversation finds its rank at every front.

A table of a fixed size in a file that every front maps. A prefix has one place in it, and the newer one of two that have the same place
stays. Two fronts may write a place at once; the estimate is then wrong for that prefix, as after an eviction in the rank.
A word of a row has a bit for each of 63 ranks. A rank that a resize adds beyond the last word has no prefixes here.
Unlike `PrefixMemory`, it does not count the requests that brought a prefix, so that `forget` may forget too much.
"""

import mmap
import os
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from server.front.routing.prefixes import MAX_PREFIX_CHUNKS, PREFIX_CHUNK_TOKENS, PrefixMemory, chain

_NUM_PLACES = 2 * MAX_PREFIX_CHUNKS
_RANKS_PER_WORD = 63  # the sign is left out


def shared_numbers(path: Path, num_rows: int, num_columns: int) -> np.ndarray:
    """Map a file of numbers, which is created with zeros if it is missing: [rows, columns] int64."""
    num_bytes = num_rows * num_columns * 8
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        os.ftruncate(fd, num_bytes)
        mapped = mmap.mmap(fd, num_bytes)
    finally:
        os.close(fd)
    return np.frombuffer(mapped, np.int64).reshape(num_rows, num_columns)


class SharedPrefixes(PrefixMemory):
    """The prefixes of all fronts."""

    def __init__(self, path: Path, num_ranks: int) -> None:
        """Map the file, which is created if it is missing. Other fronts may have begun with another number of ranks and words."""
        num_words = -(-num_ranks // _RANKS_PER_WORD)
        # [places, 1 + words] int64: the digest of a prefix and its ranks.
        self.table = shared_numbers(path.with_name(f"{path.name}-{num_words}"), _NUM_PLACES, 1 + num_words)
        self._chunks, self._masks = self.table[:, 0], self.table[:, 1:]
        self._most_ranks = num_words * _RANKS_PER_WORD

    def leave(self, rank: int) -> None:
        if rank >= self._most_ranks:
            return
        word, bit = divmod(rank, _RANKS_PER_WORD)
        self._masks[:, word] &= ~(1 << bit)

    def clear(self) -> None:
        self._masks[:] = 0

    def held_tokens(self, prompt_ids: Sequence[int]) -> dict[int, int]:
        held: dict[int, int] = {}
        still: int | None = None  # a bit per rank
        num_tokens = 0
        for chunk in chain(prompt_ids):
            holders = self._holders_of(chunk)
            left = 0 if still is None else still & ~holders
            held |= dict.fromkeys(_ranks(left), num_tokens)
            still = holders if still is None else still & holders
            if not still:
                break
            num_tokens += PREFIX_CHUNK_TOKENS
        return held | dict.fromkeys(_ranks(still or 0), num_tokens)

    def forget(self, prompt_ids: Sequence[int], rank: int) -> None:
        if rank >= self._most_ranks:
            return
        word, bit = divmod(rank, _RANKS_PER_WORD)
        for chunk in chain(prompt_ids):
            place = chunk % _NUM_PLACES
            if self._chunks[place] == chunk:
                self._masks[place, word] &= ~(1 << bit)

    def remember(self, prompt_ids: Sequence[int], rank: int) -> int:
        if rank >= self._most_ranks:
            return 0
        word, bit = divmod(rank, _RANKS_PER_WORD)
        num_held, is_held = 0, True
        for chunk in chain(prompt_ids):
            place = chunk % _NUM_PLACES
            if self._chunks[place] != chunk:
                self._masks[place] = 0
                self._chunks[place] = chunk
            is_held = is_held and bool(self._masks[place, word] >> bit & 1)
            num_held += PREFIX_CHUNK_TOKENS * is_held
            self._masks[place, word] |= 1 << bit
        return num_held

    def _holders_of(self, chunk: int) -> int:
        """Return the ranks that have seen a prefix, as bits."""
        place = chunk % _NUM_PLACES
        if self._chunks[place] != chunk:
            return 0
        words = self._masks[place].tolist()
        return sum(mask << (_RANKS_PER_WORD * at) for at, mask in enumerate(words))


def _ranks(bits: int) -> list[int]:
    found = []
    while bits:
        low = bits & -bits
        found.append(low.bit_length() - 1)
        bits ^= low
    return found
