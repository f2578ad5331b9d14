"""The place of this process among the fronts of a service: its number, and the folder and the board that they share."""

import os
from pathlib import Path
from typing import NamedTuple, Self

from server.front.several.board import Board

FOLDER = "fronts"  # in the folder that outlives a front


class Seat(NamedTuple):
    """One of several fronts."""

    number: int  # 0 leads
    num_fronts: int
    kept: Path  # the folder that outlives a front; the leading one publishes the service's state there
    folder: Path  # shared by the processes of this node only
    board: Board
    num_cut_off: int  # choices that the process before this one had open when it was killed
    folder_fd: int

    @classmethod
    def take(cls, kept: Path, *, number: int, num_fronts: int, num_ranks: int) -> Self:
        """Take a front's place, after the process that had it has ended.

        Args:
            kept: The folder that outlives a front.
            num_ranks: Ranks at the start of the fronts.
        """
        folder = kept / FOLDER
        folder.mkdir(mode=0o700, exist_ok=True)
        board = Board(folder / "board", number=number, num_fronts=num_fronts, num_ranks=num_ranks)
        fd = os.open(folder, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
        return cls(number, num_fronts, kept, folder, board, board.begin(), fd)

    @property
    def leads(self) -> bool:
        """Whether this front orders epochs, moves experts, and runs batches."""
        return self.number == 0

    def socket_path(self, number: int) -> str:
        """Return the path of a front's socket for the other fronts. It is short, regardless of the folder's path."""
        return f"/proc/self/fd/{self.folder_fd}/{number}.sock"
