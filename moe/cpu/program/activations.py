"""Memory for intermediate results of programs, allocated once. A model's layers run in sequence and share it."""

import torch
from torch import Tensor

from moe.cpu.kernels.panels import Format
from moe.cpu.kernels.products import QUANTISE

Rows = list[list[int]]  # rows of a program


class Activations:
    """Named buffers ("rooms") that grow on demand.

    Attributes:
        rows: Most rows R of a step.
        tokens_per_rank: Most tokens from each rank that the buffers can hold, a power of two.
    """

    def __init__(self, rows: int) -> None:
        self.rows, self.tokens_per_rank = rows, 1
        self._rooms: dict[str, Tensor] = {}
        self._outgrown: list[Tensor] = []  # older programs still use their addresses

    def make_room(self, tokens_per_rank: int) -> None:
        """Reserve room for this many tokens of every rank in programs that are written from now on."""
        while self.tokens_per_rank < tokens_per_rank:
            self.tokens_per_rank *= 2

    def room(self, name: str, columns: int, dtype: torch.dtype = torch.float32, rows: int = 0) -> Tensor:
        """Return the memory under a name: [R, columns], or [rows, columns]."""
        rows = rows or self.rows
        room = self._rooms.get(name)
        if room is None or room.numel() < rows * columns:
            if room is not None:
                self._outgrown.append(room)
            room = self._rooms[name] = torch.empty(rows * columns, dtype=dtype)
        return room[: rows * columns].view(rows, columns)

    def taken(self, kind: Format, x: Tensor, rows_at: int) -> tuple[Rows, int]:
        """Return program rows that put x in a weight's form, and the result's address; `rows_at`: address of the row count."""
        if not kind.takes_integers:
            return [], x.data_ptr()
        made = self.room("quantised", kind.row_bytes, torch.uint8, rows=len(x)).data_ptr()
        return [QUANTISE.row(x.data_ptr(), x.shape[1] * 4, kind.k, made, rows_at)], made
