"""Memory that grows and is never given back."""

import torch
from torch import Tensor


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
