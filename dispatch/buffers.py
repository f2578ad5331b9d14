"""Memory that grows and is never given back, and what one Dispatcher needs of it.

Views that were handed out are kept for the next call of the same size: making one costs some microseconds, more than
a small step of the exchange.
"""

from typing import Any

import torch
from torch import Tensor

from dispatch.cpu_kernels.message import (
    ANSWERED_BYTES,
    HEADER_CALL,
    HEADER_ROW_BYTES,
    HEADER_WORDS,
    NUM_TABLES,
    SENT_BYTES,
)
from dispatch.wires.wire import RankTable

_MOST_VIEWS = 256  # of one buffer


class GrowingBuffer:
    """A one-dimensional tensor whose contents live until the next `reserve` that needs more.

    Attributes:
        address: of its first element.
        capacity: in elements.
    """

    def __init__(self, dtype: torch.dtype) -> None:
        self._memory = torch.empty(0, dtype=dtype)
        self._views: dict[int, Tensor] = {}
        self.capacity = 0
        self.address = 0

    def reserve(self, count: int) -> int:
        """Make room for `count` elements and return the address; contents are undefined when it grew."""
        if count > self.capacity:
            self.capacity = count * 3 // 2
            self._memory = torch.empty(self.capacity, dtype=self._memory.dtype)
            self._views.clear()
            self.address = self._memory.data_ptr()
        return self.address

    def view(self, count: int) -> Tensor:
        """Return the first `count` elements, without a copy."""
        return _kept(self._views, self._memory, count)


class GrowingRows:
    """A matrix with so many rows as the largest call needed, of the last call's width and type.

    Attributes:
        address: of its first row.
        num_rows: that there is room for.
    """

    def __init__(self) -> None:
        self._bytes = GrowingBuffer(torch.uint8)
        self._matrix = torch.empty(0, 0)
        self._views: dict[int, Tensor] = {}
        self._form: tuple[int, torch.dtype] = (0, torch.float32)
        self.num_rows = 0
        self.address = 0

    def reserve(self, num_rows: int, width: int, dtype: torch.dtype) -> int:
        """Make room and return the address; contents are undefined when it grew or changed its form."""
        if num_rows > self.num_rows or (width, dtype) != self._form:
            row_bytes = width * dtype.itemsize
            self.address = self._bytes.reserve(num_rows * row_bytes)
            self.num_rows, self._form = self._bytes.capacity // row_bytes, (width, dtype)
            in_use = self._bytes.view(self.num_rows * row_bytes)
            self._matrix = in_use.view(dtype).view(self.num_rows, width)
            self._views.clear()
        return self.address

    def room(self, width: int, dtype: torch.dtype) -> int:
        """Count the rows of this form that there is room for; -1 if the form is another."""
        return self.num_rows if (width, dtype) == self._form else -1

    def view(self, num_rows: int) -> Tensor:
        """Return the first rows, without a copy."""
        return _kept(self._views, self._matrix, num_rows)


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
        self._common: tuple[int, ...] = ()  # the header's words that a call shares with the last one
        self.scratch = GrowingBuffer(torch.uint8)
        self.row_of_pair, self.pair_of_answer = GrowingBuffer(torch.int64), GrowingBuffer(torch.int64)
        self.choices, self.own_slots = GrowingBuffer(torch.int32), GrowingBuffer(torch.int32)
        self.own_tokens = GrowingBuffer(torch.int64)

    def write_header(self, call: int, *words: int) -> None:
        """Set what every message of this call says alike: its number, then all other words after HEADER_PAIRS."""
        if words != self._common:
            self._common = words
            places = [word for word in range(HEADER_ROW_BYTES, HEADER_WORDS) if word != HEADER_CALL]
            for place, word in zip(places, words, strict=True):
                self.header[place] = word
        self.header[HEADER_CALL] = call

    def reserve_tokens(self, num_tokens: int, num_choices: int) -> None:
        """Make room for what a rank sends."""
        if num_tokens > self.own_tokens.capacity or num_tokens * num_choices > self.own_slots.capacity:
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


def _kept(views: dict[int, Tensor], memory: Tensor, count: int) -> Tensor:
    view = views.get(count)
    if view is None:
        if len(views) >= _MOST_VIEWS:
            views.clear()
        view = views[count] = memory[:count]
    return view
