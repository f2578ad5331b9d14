"""Tables of low-rank factors for kernels: addresses of A and B for each place, and what they are multiplied with.

A place is one of the adapters that may be used in a step. A table has an entry for each place, or for each (place, slot) of experts.
Kernels read the entries at a fixed address. An entry without factors adds nothing. Entries change between steps only; they keep their
factors alive. The words of an entry are the addresses of A and B, the rank, and a word with the scale (float32) in its lower half and 1 for
bfloat16 in its upper half.

Legend: K input features, N output features, R rank (rounded up to W, a multiple of a vector), P places, S slots.
"""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from attention.cpu.adapted_latents import ENTRY_WORDS
from attention.cpu.tiles import LANES

NO_ADAPTER = -1  # of a row


class Factors(NamedTuple):
    """A low-rank product `scale * (x @ a) @ b`. Both tensors are float32, or both bfloat16."""

    a_KW: Tensor  # contiguous; columns after R are zero
    b_RN: Tensor  # contiguous
    scale: float = 1.0

    @property
    def num_bytes(self) -> int:
        """Bytes of both tensors."""
        return self.a_KW.nbytes + self.b_RN.nbytes

    def scaled(self) -> "Factors":
        """Return the factors in float32, with B times the scale."""
        return Factors(self.a_KW.float(), self.b_RN.float() * self.scale)


def factors_of(a_RK: Tensor, b_NR: Tensor, scale: float, dtype: torch.dtype = torch.float32) -> Factors:
    """Lay out a product for the kernels. `a_RK` and `b_NR` are of any floating type, and are rounded to `dtype`."""
    rank, width = a_RK.shape
    a_KW = torch.zeros(width, -(-rank // LANES) * LANES, dtype=dtype)
    a_KW[:, :rank] = a_RK.t()
    return Factors(a_KW, b_NR.to(dtype).t().contiguous(), scale)


class FactorTable:
    """Entries in a fixed order.

    Attributes:
        words: int64 [entries, 4], read by kernels.
    """

    def __init__(self, num_entries: int) -> None:
        self.words = np.zeros((num_entries, ENTRY_WORDS), np.int64)
        self._kept: list[Factors | None] = [None] * num_entries

    @property
    def address(self) -> int:
        """Address of the first entry."""
        return int(self.words.ctypes.data)

    @property
    def is_empty(self) -> bool:
        """Whether no entry has factors."""
        return not self.words[:, 2].any()

    def factors(self, entry: int) -> Factors | None:
        """Return an entry's factors, or None if it has none."""
        return self._kept[entry]

    def put(self, entry: int, factors: Factors | None) -> None:
        """Set an entry, or clear it with None. While no step runs."""
        self._kept[entry] = factors
        if factors is None:
            self.words[entry] = 0
        else:
            scale = int(np.float32(factors.scale).view(np.uint32))
            is_bf16 = factors.b_RN.dtype is torch.bfloat16
            addresses = factors.a_KW.data_ptr(), factors.b_RN.data_ptr()
            self.words[entry] = *addresses, len(factors.b_RN), scale | is_bf16 << 32


class ExpertAdapters:
    """The factors of a layer's experts, by place and this rank's slot: entry `place * S + slot`.

    Attributes:
        up, down: Tables of both products. They are replaced if the number of slots changes.
    """

    def __init__(
        self, num_places: int, num_slots: int, make_table: Callable[[int], FactorTable] = FactorTable
    ) -> None:
        """`make_table` returns an empty table with a number of entries."""
        self.num_places, self._make_table = num_places, make_table
        self._open(num_slots)

    def _open(self, num_slots: int) -> None:
        self.num_slots = num_slots
        self.up, self.down = (self._make_table(self.num_places * num_slots) for _ in range(2))

    def resize(self, num_slots: int) -> bool:
        """Empty the tables for another number of slots. Returns whether it changed."""
        if num_slots == self.num_slots:
            return False
        self._open(num_slots)
        return True

    def put(self, place: int, slot: int, up: Factors | None, down: Factors | None) -> None:
        """Set what a slot's expert adds for the adapter at a place. While no step runs."""
        entry = place * self.num_slots + slot
        self.up.put(entry, up)
        self.down.put(entry, down)
