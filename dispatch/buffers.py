"""Memory that grows and is never given back, and what one Dispatcher needs of it."""

from typing import Any

import torch
from torch import Tensor

from dispatch.cpu_kernels.message import (
    ANSWERED_BYTES,
    HEADER_ROW_BYTES,
    HEADER_WORDS,
    NUM_TABLES,
    SENT_BYTES,
)
from dispatch.transport import RankTable


class GrowingBuffer:
    """A one-dimensional tensor whose contents live until the next `reserve` that needs more.

    Attributes:
        address: of its first element.
    """

    def __init__(self, dtype: torch.dtype) -> None:
        self._memory = torch.empty(0, dtype=dtype)
        self._capacity = 0
        self.address = 0

    def reserve(self, count: int) -> int:
        """Make room for `count` elements and return the address; contents are undefined when it grew."""
        if count > self._capacity:
            self._capacity = count * 3 // 2
            self._memory = torch.empty(self._capacity, dtype=self._memory.dtype)
            self.address = self._memory.data_ptr()
        return self.address

    def view(self, count: int) -> Tensor:
        """Return the first `count` elements, without a copy."""
        return self._memory[:count]


class GrowingRows:
    """A matrix with so many rows as the largest call needed, of the last call's width and type."""

    def __init__(self) -> None:
        self._bytes = GrowingBuffer(torch.uint8)
        self._matrix = torch.empty(0, 0)

    def reserve(self, num_rows: int, width: int, dtype: torch.dtype) -> int:
        """Make room and return the address; contents are undefined when it grew or changed its form."""
        matrix = self._matrix
        if num_rows > matrix.shape[0] or width != matrix.shape[1] or dtype != matrix.dtype:
            num_bytes = num_rows * width * dtype.itemsize
            self._bytes.reserve(num_bytes)
            self._matrix = self._bytes.view(num_bytes).view(dtype).view(num_rows, width)
        return self._bytes.address

    @property
    def address(self) -> int:
        """Of the first row."""
        return self._bytes.address

    def view(self, num_rows: int) -> Tensor:
        """Return the first rows, without a copy."""
        return self._matrix[:num_rows]


class Workspace:
    """The tables and buffers behind one Dispatcher's calls; the passes of `cpu_kernels` share them by address."""

    def __init__(self, slots_per_rank: int, world_size: int) -> None:
        self.send_bytes, self.answer_send, self.answer_recv = (RankTable(world_size) for _ in range(3))
        self._counts = torch.zeros(NUM_TABLES, world_size, dtype=torch.int64)
        self._header = torch.zeros(HEADER_WORDS, dtype=torch.int64)
        self._rank_of_slot = torch.arange(world_size, dtype=torch.int32).repeat_interleave(slots_per_rank)
        self.slot_offsets = torch.zeros(slots_per_rank + 1, dtype=torch.int64)
        self.tables, self.header_at = self._counts.data_ptr(), self._header.data_ptr()
        self.offsets_at, self.homes_at = self.slot_offsets.data_ptr(), self._rank_of_slot.data_ptr()
        self.header: Any = memoryview(self._header.numpy())  # type: ignore[arg-type]
        self.scratch = GrowingBuffer(torch.uint8)
        self.row_of_pair, self.pair_of_answer = GrowingBuffer(torch.int64), GrowingBuffer(torch.int64)
        self.choices, self.own_slots = GrowingBuffer(torch.int32), GrowingBuffer(torch.int32)
        self.own_tokens = GrowingBuffer(torch.int64)

    def write_header(self, *words: int) -> None:
        """Set what every message of this call says alike, from HEADER_ROW_BYTES on; see `message`."""
        for index, word in enumerate(words, HEADER_ROW_BYTES):
            self.header[index] = word

    def reserve_tokens(self, num_tokens: int, num_choices: int) -> None:
        """Make room for what a rank sends."""
        self.choices.reserve(2 * num_tokens * num_choices)
        self.own_slots.reserve(num_tokens * num_choices)
        self.own_tokens.reserve(num_tokens)

    def reserve_pairs(self, num_pairs: int) -> None:
        """Make room for the order of what a rank receives."""
        self.row_of_pair.reserve(num_pairs)
        self.pair_of_answer.reserve(num_pairs)

    def sent_bytes(self) -> tuple[int, int]:
        """Return the bytes that went to other ranks so far, by dispatches and by combines."""
        return int(self._counts[SENT_BYTES].sum()), int(self._counts[ANSWERED_BYTES].sum())

    def sent_to_ranks(self) -> tuple[list[int], list[int]]:
        """Return the bytes that went to each rank so far, by dispatches and by combines."""
        return self._counts[SENT_BYTES].tolist(), self._counts[ANSWERED_BYTES].tolist()
