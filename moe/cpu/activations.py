"""Memory for what programs compute, allocated once: a model's layers run one after the other and share it."""

import torch
from torch import Tensor

from moe.cpu.panels import Format
from moe.cpu.products import quantise_row

Rows = list[list[int]]  # of a program


class Activations:
    """Rooms by name, which grow.

    Attributes:
        rows: R, at most in a step.
        tokens_per_rank: for which there is room where rows come from other ranks, a power of two.
    """

    def __init__(self, rows: int) -> None:
        self.rows, self.tokens_per_rank = rows, 1
        self._rooms: dict[str, Tensor] = {}
        self._outgrown: list[Tensor] = []  # programs that were written before know their addresses

    def make_room(self, tokens_per_rank: int) -> None:
        """Let there be room for so many tokens of every rank, in programs that are written from now on."""
        while self.tokens_per_rank < tokens_per_rank:
            self.tokens_per_rank *= 2

    def room(self, name: str, columns: int, dtype: torch.dtype = torch.float32, rows: int = 0) -> Tensor:
        """Memory under a name: [R, columns], or [rows, columns]."""
        rows = rows or self.rows
        room = self._rooms.get(name)
        if room is None or room.numel() < rows * columns:
            if room is not None:
                self._outgrown.append(room)
            room = self._rooms[name] = torch.empty(rows * columns, dtype=dtype)
        return room[: rows * columns].view(rows, columns)

    def taken(self, kind: Format, x: Tensor, rows_at: int) -> tuple[Rows, int]:
        """Rows as a weight takes them: what makes them, and where they are; `rows_at`: where their number is."""
        if not kind.takes_integers:
            return [], x.data_ptr()
        made = self.room("quantised", kind.row_bytes, torch.uint8, rows=len(x)).data_ptr()
        return [quantise_row(x.data_ptr(), x.shape[1] * 4, kind.k, made, rows_at)], made
