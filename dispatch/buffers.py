"""Memory that grows and is never released.

Buffers keep the views that they returned, for the next call of the same size: making a view takes some microseconds,
more than a small step of the exchange.
"""

from typing import Any

import numpy as np
import torch
from torch import Tensor

_MOST_VIEWS = 256  # per buffer
_ALIGNMENT = 64


class GrowingBuffer:
    """A one-dimensional tensor. A `reserve` that needs more room discards its contents.

    Attributes:
        address: Address of the first element.
        capacity: Room, in elements.
    """

    def __init__(self, dtype: torch.dtype) -> None:
        self._memory = torch.empty(0, dtype=dtype)
        self._views: dict[int, Tensor] = {}
        self.capacity = 0
        self.address = 0

    def reserve(self, count: int) -> int:
        """Make room for `count` elements and return the address. If the buffer grew, its contents are undefined."""
        if count > self.capacity:
            self.capacity = count * 3 // 2
            self._memory = torch.empty(self.capacity, dtype=self._memory.dtype)
            self._views.clear()
            self.address = self._memory.data_ptr()
        return self.address

    def view(self, count: int) -> Tensor:
        """Return the first `count` elements, without a copy."""
        return _kept(self._views, self._memory, count)


class AlignedBytes:
    """Bytes at an address that is aligned for messages. Pages that are never written take address space only.

    Attributes:
        memory: The whole buffer, uint8.
        address, capacity: Its address, and its size in bytes.
    """

    def __init__(self) -> None:
        self.capacity = self.address = 0
        self.memory = torch.empty(0, dtype=torch.uint8)

    def reserve(self, num_bytes: int) -> None:
        """Make room. If the buffer grew, its contents are undefined."""
        if num_bytes > self.capacity:
            self.capacity = -(-num_bytes * 5 // 4 // _ALIGNMENT) * _ALIGNMENT
            store: Any = np.empty(self.capacity + _ALIGNMENT, dtype=np.uint8)
            skip = -store.ctypes.data % _ALIGNMENT
            self.memory = torch.from_numpy(store)[skip : skip + self.capacity]
            self.address = self.memory.data_ptr()


class GrowingRows:
    """A matrix of the last call's width and type, with enough rows for the largest call so far.

    Attributes:
        address: Address of the first row.
        num_rows: Room, in rows.
    """

    def __init__(self) -> None:
        self._bytes = GrowingBuffer(torch.uint8)
        self._matrix = torch.empty(0, 0)
        self._views: dict[int, Tensor] = {}
        self._form: tuple[int, torch.dtype] = (0, torch.float32)
        self.num_rows = 0
        self.address = 0

    def reserve(self, num_rows: int, width: int, dtype: torch.dtype) -> int:
        """Make room and return the address. If the matrix grew or changed its form, its contents are undefined."""
        if num_rows > self.num_rows or (width, dtype) != self._form:
            row_bytes = width * dtype.itemsize
            self.address = self._bytes.reserve(num_rows * row_bytes)
            self.num_rows, self._form = self._bytes.capacity // row_bytes, (width, dtype)
            in_use = self._bytes.view(self.num_rows * row_bytes)
            self._matrix = in_use.view(dtype).view(self.num_rows, width)
            self._views.clear()
        return self.address

    def room(self, width: int, dtype: torch.dtype) -> int:
        """Return how many rows of this form fit, or -1 if the matrix has another form."""
        return self.num_rows if (width, dtype) == self._form else -1

    def view(self, num_rows: int) -> Tensor:
        """Return the first rows, without a copy."""
        return _kept(self._views, self._matrix, num_rows)


def _kept(views: dict[int, Tensor], memory: Tensor, count: int) -> Tensor:
    view = views.get(count)
    if view is None:
        if len(views) >= _MOST_VIEWS:
            views.clear()
        view = views[count] = memory[:count]
    return view
