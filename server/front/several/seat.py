"""The place of this process among the fronts of a service: its number, and the folder and the board that they share.

Fronts of one node share them directly. Those of several nodes (`--fronts per-node`) have a copy on each node, see `mirror`.
"""

import os
from pathlib import Path
from typing import NamedTuple, Self

from server.front.several.board import Board
from server.front.several.front_map import FrontMap

FOLDER = "fronts"  # in the folder that outlives a front


def folder_of(name: str, number: int) -> str:
    """Return the name of a folder in which a front keeps what its replacement needs."""
    return f"{name}-{number}" if number else name


class Seat(NamedTuple):
    """One of several fronts."""

    number: int  # 0 leads
    num_fronts: int
    kept: Path  # the folder that outlives a front; the leading one publishes the service's state there
    folder: Path  # shared by the processes of this node only
    board: Board
    num_cut_off: int  # choices that the process before this one had open when it was killed
    folder_fd: int
    fronts: FrontMap | None = None  # if they are on several nodes

    @classmethod
    def take(
        cls, kept: Path, *, number: int, num_fronts: int, num_ranks: int, fronts: FrontMap | None = None
    ) -> Self:
        """Take a front's place, after the process that had it has ended.

        Args:
            kept: The folder that outlives a front.
            num_ranks: Ranks at the start of the fronts.
            fronts: The map of all fronts, if they are on several nodes.
        """
        folder = kept / FOLDER
        folder.mkdir(mode=0o700, exist_ok=True)
        board = Board(
            folder / "board", number=number, num_fronts=num_fronts, num_ranks=num_ranks,
            near=None if fronts is None else fronts.near,
        )  # fmt: skip
        fd = os.open(folder, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
        return cls(number, num_fronts, kept, folder, board, board.begin(), fd, fronts)

    @property
    def leads(self) -> bool:
        """Whether this front orders epochs, moves experts, and runs batches."""
        return self.number == 0

    def socket_path(self, number: int) -> str:
        """Return the path of a front's socket for this one. It is short, regardless of the folder's path.

        For a front of another node, this front listens there and passes the bytes on.
        """
        is_near = self.fronts is None or number in self.fronts.near
        name = str(number) if is_near else f"{self.number}-{number}"
        return f"/proc/self/fd/{self.folder_fd}/{name}.sock"
