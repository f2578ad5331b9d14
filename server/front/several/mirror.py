"""The board of one node, copied to the others: what its fronts have written, and what other nodes' fronts have.

Every node has a board with the rows of all fronts (`board`). The first front of a node sends the changes of its node's rows to
the first front of each other node, 50 times per second. With them travel the small files that fronts share: the state that the
leading front publishes, the needs of adapters, and the figures of speed. Routing, limits and decisions then see the requests of
all nodes, late by one interval. The tables of prefixes and sessions, and the counts of connections by address, travel 4 times per
second.

The order of a change keeps the promises of `adapter_needs` and `leading`: a front that has applied a state (`Cell.APPLIED`) has
written everything else before, so a copy of this cell is read first and written last. A file is written before the number that
announces it.

A node that has not heard of another one for LOST_S clears the rows of its fronts and removes their needs of adapters: the ranks
have dropped their requests. A node that has not heard of the leading one for FENCE_S ends its requests before that (`following`),
because decisions no longer take them into account.
"""

import os
from pathlib import Path

import numpy as np

from server.front.several.adapter_needs import needs_file
from server.front.several.board import Cell
from server.front.several.front_map import LEADING_NODE, FrontMap
from server.front.several.seat import Seat
from server.front.several.service_state import STATE_FILE
from server.link.messages import BoardChange, MirroredFile, TableRows
from server.machine.whole_files import replace_text


class Mirror:
    """The changes of this node's fronts, and the copies of those of other nodes."""

    def __init__(self, seat: Seat, fronts: FrontMap) -> None:
        """Begin as the first front of a node; everything is new."""
        self._board, self._fronts = seat.board, fronts
        self._kept, self._folder = seat.kept, seat.folder
        self._rows = np.zeros_like(seat.board.rows_of(fronts.near))  # as sent
        self._tables = {name: np.zeros_like(table) for name, table in seat.board.tables.items()}  # as sent
        self._files: dict[Path, tuple[int, int]] = {}  # as sent: inode and time of change
        self._version = 0  # as sent

    def take_changes(self, *, of_all: bool) -> BoardChange | None:
        """Return what has changed since the last call, or None.

        Args:
            of_all: Whether to look at the tables and the counts by address, too. Takes about a millisecond.
        """
        num_cells = None if of_all else self._board.num_urgent_cells
        version, rows = self._present(num_cells)
        cells = _differences(rows, self._rows)
        self._rows[:, :num_cells] = rows
        tables = [self._take_table(name) for name in self._tables] if of_all else []
        tables = [each for each in tables if len(each.entries)]
        files = [self._read(path) for path in self._paths(self._fronts.node) if self._is_changed(path)]
        is_changed = bool(len(cells) or tables or files or version != self._version)
        self._version = version
        return BoardChange(False, version, files, cells, tables) if is_changed else None

    def everything(self) -> BoardChange:
        """Return all that this node's fronts have written. It may be newer than the last changes."""
        version, rows = self._present()
        tables = [
            TableRows(name, _entries(table, np.flatnonzero(table.any(axis=1))))
            for name, table in self._board.tables.items()
        ]
        files = [self._read(path) for path in self._paths(self._fronts.node) if path.exists()]
        return BoardChange(True, version, files, _differences(rows, np.zeros_like(rows)), tables)

    def beat(self) -> BoardChange:
        """Return a change without content, which shows that this node is there."""
        return empty_change(self._version)

    def apply(self, node: int, change: BoardChange) -> None:
        """Write what the fronts of another node have written.

        Raises:
            ValueError: The change does not fit the board or names another file.
            OSError: A file cannot be written.
        """
        paths = {path.name: path for path in self._paths(node)}
        for name, content in change.files:
            if name not in paths:
                raise ValueError(f"the fronts of node {node} do not write {name!r}")
            replace_text(paths[name], content)
        for table in change.tables:
            self._apply_table(table)
        self._apply_cells(self._board.rows_of(self._fronts.fronts_of(node)), change)
        if node == LEADING_NODE:
            if change.version and change.version != self._board.version:
                self._board.version = change.version
            self._board.note_leader()

    def lose(self, node: int) -> None:
        """Clear the rows of a lost node's fronts, and remove what their requests needed.

        Raises:
            OSError: A file cannot be removed.
        """
        for number in self._fronts.fronts_of(node):
            needs_file(self._folder, number).unlink(missing_ok=True)
            self._board.clear(number)

    def _present(self, num_cells: int | None = None) -> tuple[int, np.ndarray]:
        """Return the version, 0 unless this node leads, and a copy of this node's rows, or of the first cells of each."""
        version = self._board.version if self._fronts.node == LEADING_NODE else 0
        own = self._board.rows_of(self._fronts.near)[:, :num_cells]
        applied = own[:, Cell.APPLIED].copy()
        rows = own.copy()
        rows[:, Cell.APPLIED] = applied
        rows[:, Cell.IS_ALIVE] = [self._board.is_alive(number) for number in self._fronts.near]
        return version, rows

    def _apply_cells(self, rows: np.ndarray, change: BoardChange) -> None:
        flat = rows.reshape(-1)
        places, numbers = change.cells.reshape(-1, 2).T
        if len(places) and not (places.min() >= 0 and places.max() < flat.size):
            raise ValueError("a cell is outside of the rows")
        if change.is_whole:
            new = np.zeros_like(rows)
            new.reshape(-1)[places] = numbers
            new[:, Cell.APPLIED] = 0
            rows[:] = new
        is_applied = places % rows.shape[1] == Cell.APPLIED
        for part in (~is_applied, is_applied):
            flat[places[part]] = numbers[part]

    def _apply_table(self, change: TableRows) -> None:
        table, sent = self._board.tables.get(change.name), self._tables.get(change.name)
        if table is None or sent is None:
            raise ValueError(f"unknown table {change.name!r}")
        if change.entries.shape[1:] != (1 + table.shape[1],):
            return  # that node's fronts began with another number of ranks
        places = change.entries[:, 0]
        if len(places) and not (places.min() >= 0 and places.max() < len(table)):
            raise ValueError("an entry is outside of its table")
        table[places] = change.entries[:, 1:]
        sent[places] = change.entries[:, 1:]  # the other nodes have it from the same sender

    def _take_table(self, name: str) -> TableRows:
        table, sent = self._board.tables[name], self._tables[name]
        changed = np.unique(np.flatnonzero((table != sent).reshape(-1)) // table.shape[1])
        entries = _entries(table, changed)
        sent[changed] = entries[:, 1:]
        return TableRows(name, entries)

    def _paths(self, node: int) -> list[Path]:
        """Return the shared files that a node's fronts write, which may be missing."""
        own = [
            path
            for number in self._fronts.fronts_of(node)
            for path in (self._folder / f"speed-{number}.json", needs_file(self._folder, number))
        ]
        return [self._kept / STATE_FILE, *own] if node == LEADING_NODE else own

    def _is_changed(self, path: Path) -> bool:
        try:
            status = os.stat(path)
        except FileNotFoundError:
            return False
        now = status.st_ino, status.st_mtime_ns
        is_changed = self._files.get(path) != now
        self._files[path] = now
        return is_changed

    @staticmethod
    def _read(path: Path) -> MirroredFile:
        return MirroredFile(path.name, path.read_text())


def empty_change(version: int = 0) -> BoardChange:
    """Return a change without content. The version of the service's state is 0 unless the leading node sends it."""
    return BoardChange(False, version, [], np.zeros((0, 2), np.int64), [])


def _differences(now: np.ndarray, before: np.ndarray) -> np.ndarray:
    """Return the places and numbers of changed cells: [cells, 2] int64. `now` may have only the first cells of each row."""
    width = now.shape[1]
    changed = np.flatnonzero((now != before[:, :width]).reshape(-1))
    places = changed // width * before.shape[1] + changed % width
    return np.stack([places, now.reshape(-1)[changed]], axis=1)


def _entries(table: np.ndarray, places: np.ndarray) -> np.ndarray:
    """Return entries of a table with their places: [entries, 1 + numbers] int64."""
    return np.concatenate([places[:, None], table[places]], axis=1)
