"""The counts that the fronts of one service share: a row of numbers for each front, in a file that all of them map.

Each front writes its own row and reads all rows, so routing, limits and fairness see every request of the service, although no
front sends a message for it. A number is written at once (8 aligned bytes). Two fronts that read at the same moment may
both take the last place, so limits are exact to one request of each other front.

The row of a killed front stays until its replacement clears it, which it does before its slow imports. Rejected: messages
between the fronts of a node, which are late by their interval and cost the more, the more requests there are.

If the service has fronts on several nodes, each node has such a file with the rows of all fronts. `mirror` copies the rows of
other nodes' fronts into it.
"""

import hashlib
import os
import time
import zlib
from enum import IntEnum
from pathlib import Path

import numpy as np

from server.front.routing.loads import RankCounts
from server.front.routing.prefixes import PrefixMemory
from server.front.several.shared_prefixes import SharedPrefixes, shared_numbers

MOST_RANKS = 4096  # columns, so that a resize finds room for its ranks
NUM_KEY_PLACES = 4096  # for the open choices by API key; keys that share a place share a limit
NUM_ADDRESS_PLACES = 1 << 16  # for connections by the client's address; as for keys
_NUM_SESSIONS = 1 << 16  # a session takes the place of an older one with the same place


class Cell(IntEnum):
    """The single numbers of a row."""

    PID = 0
    APPLIED = 1  # the newest state of the service that the front has applied
    IS_READY = 2  # it has links to all ranks, or had
    IS_DONE = 3  # it ends, and has no open request
    NUM_OPEN = 4  # accepted choices without an outcome
    NUM_ANSWERS = 5  # requests of clients that are being answered
    NUM_PARKED = 6  # choices that wait for a rank to return
    NUM_REPLAYED = 7
    NUM_CUT_OFF = 8  # choices that earlier processes of this front had open when they were killed
    ADAPTER_NEEDS = 9  # another number for each file of `adapter_needs`
    IS_ALIVE = 10  # of a front on another node: its process runs, as seen there
    NUM_SUBMITTED = 11  # accepted choices without an outcome that a rank has, or had


_SECTIONS = RankCounts._fields
# Cells of the first row, which belongs to no front.
_VERSION = 0
_LEADER_HEARD = 1  # when this node last heard of the leading one, on this machine's monotonic clock, in ns
_KEPT_CELLS = (Cell.NUM_REPLAYED, Cell.NUM_CUT_OFF)  # totals, which stay when a front is lost


class Board:
    """The rows of all fronts."""

    def __init__(
        self, path: Path, *, number: int, num_fronts: int, num_ranks: int, near: range | None = None
    ) -> None:
        """Map the file, which is created if it is missing.

        Args:
            number: The number of this process's front.
            num_ranks: Ranks at the start of the fronts.
            near: The numbers of the fronts on this node; None means all.
        """
        self.number, self.num_fronts = number, num_fronts
        self._near = range(num_fronts) if near is None else near
        num_loads = len(_SECTIONS) * MOST_RANKS
        ends = np.cumsum((len(Cell), num_loads, NUM_KEY_PLACES, NUM_ADDRESS_PLACES)).tolist()
        self.num_urgent_cells = int(ends[-2])  # of each row: all but the counts by address
        rows = shared_numbers(path, 1 + num_fronts, ends[-1])
        self._head, self._rows = rows[0], rows[1:]
        self._own = self._rows[number]
        _, all_loads, self._key_rows, self._address_rows = np.split(self._rows, ends[:-1], axis=1)
        # [fronts, sections, ranks]
        self._all_loads = all_loads.reshape(num_fronts, len(_SECTIONS), MOST_RANKS)
        self._shared_prefixes = SharedPrefixes(path.with_name("prefixes"), num_ranks)
        self.prefixes: PrefixMemory = self._shared_prefixes
        # A digest and a rank for each place.
        self._sessions = shared_numbers(path.with_name("sessions"), _NUM_SESSIONS, 2)

    def begin(self) -> int:
        """Take over this front's row. Returns the number of choices that a killed process of this front had open."""
        cut_off = self.clear(self.number)
        self._own[Cell.PID] = os.getpid()
        return cut_off

    def clear(self, number: int) -> int:
        """Clear the row of a front that is lost. Returns the number of choices that it had open."""
        row = self._rows[number]
        cut_off = 0 if row[Cell.IS_DONE] else int(row[Cell.NUM_OPEN])
        kept = row[list(_KEPT_CELLS)]
        row[:] = 0
        row[list(_KEPT_CELLS)] = kept
        row[Cell.NUM_CUT_OFF] += cut_off
        return cut_off

    @property
    def version(self) -> int:
        """The number of the newest state of the service."""
        return int(self._head[_VERSION])

    @version.setter
    def version(self, version: int) -> None:
        self._head[_VERSION] = version

    def set(self, cell: Cell, value: int) -> None:
        """Set a number of this front's row."""
        self._own[cell] = value

    def read(self, cell: Cell, number: int) -> int:
        """Return a number of a front."""
        return int(self._rows[number, cell])

    def total(self, cell: Cell) -> int:
        """Return a number's sum over all fronts."""
        return int(self._rows[:, cell].sum())

    def of_others(self, cell: Cell) -> int:
        """Return a number's sum over the other fronts."""
        return self.total(cell) - int(self._own[cell])

    def own_loads(self, num_ranks: int) -> RankCounts:
        """Return this front's share of the first ranks' loads, which it changes in place."""
        assert num_ranks <= MOST_RANKS, "no service has as many ranks"
        return RankCounts(*self._all_loads[self.number, :, :num_ranks])

    def loads(self, num_ranks: int) -> RankCounts:
        """Return the first ranks' loads, summed over all fronts."""
        return RankCounts(*self._all_loads[:, :, :num_ranks].sum(axis=0))

    @property
    def num_at_ranks(self) -> int:
        """Accepted choices that ranks have, of all fronts."""
        return int(self.loads(MOST_RANKS).num_open.sum())

    @property
    def num_submitted(self) -> int:
        """Accepted choices without an outcome that a rank has, or had, of all fronts."""
        return self.total(Cell.NUM_SUBMITTED)

    @property
    def num_open(self) -> int:
        """Accepted choices without an outcome, of all fronts."""
        return self.total(Cell.NUM_OPEN)

    @property
    def num_answers(self) -> int:
        """Requests of clients that are being answered, by all fronts."""
        return self.total(Cell.NUM_ANSWERS)

    def count_answer(self, by: int) -> None:
        """Count an answer that begins, or with -1 one that ends."""
        self._own[Cell.NUM_ANSWERS] += by

    def count_choice(self, key_id: str, by: int) -> None:
        """Count an accepted choice of an API key, or with -1 one that has its outcome."""
        self._own[Cell.NUM_OPEN] += by
        self._key_rows[self.number, _place(key_id, NUM_KEY_PLACES)] += by

    def count_submitted(self, by: int) -> None:
        """Count a choice that gets its first rank, or with -1 such a choice that has its outcome."""
        self._own[Cell.NUM_SUBMITTED] += by

    def num_of_key(self, key_id: str) -> int:
        """Return the number of open choices of an API key."""
        return int(self._key_rows[:, _place(key_id, NUM_KEY_PLACES)].sum())

    def num_keys(self, key_id: str) -> int:
        """Return the number of API keys with open choices, including this one."""
        counts = self._key_rows.sum(axis=0)
        return int(np.count_nonzero(counts)) + (not counts[_place(key_id, NUM_KEY_PLACES)])

    def count_connection(self, address: str, by: int) -> None:
        """Count a connection of a client's address that opens, or with -1 one that closes."""
        self._address_rows[self.number, _place(address, NUM_ADDRESS_PLACES)] += by

    def num_connections_of(self, address: str) -> int:
        """Return the number of open connections of a client's address."""
        return int(self._address_rows[:, _place(address, NUM_ADDRESS_PLACES)].sum())

    def rank_of_session(self, session: str) -> int | None:
        """Return the rank of a session's last request, or None if it is not known."""
        digest = _digest(session)
        known, rank = self._sessions[digest % _NUM_SESSIONS].tolist()
        return rank if known == digest else None

    def bind_session(self, session: str, rank: int) -> None:
        """Record the rank of a session's last request, at any front."""
        digest = _digest(session)
        self._sessions[digest % _NUM_SESSIONS] = digest, rank

    def rows_of(self, numbers: range) -> np.ndarray:
        """Return the rows of consecutive fronts, which may be changed: [fronts, cells] int64."""
        return self._rows[numbers.start : numbers.stop]

    @property
    def tables(self) -> dict[str, np.ndarray]:
        """The shared tables in which any front may replace an entry: by name, [entries, numbers] int64."""
        return {"prefixes": self._shared_prefixes.table, "sessions": self._sessions}

    def note_leader(self) -> None:
        """Record that this node has heard of the leading one."""
        self._head[_LEADER_HEARD] = time.monotonic_ns()

    @property
    def leader_silent_s(self) -> float:
        """The time since this node has heard of the leading one, in seconds."""
        return float(time.monotonic_ns() - self._head[_LEADER_HEARD]) / 1e9

    def others(self) -> list[int]:
        """Return the numbers of the other fronts."""
        return [number for number in range(self.num_fronts) if number != self.number]

    def is_running(self, number: int) -> bool:
        """Return whether a front's process runs and may still have requests."""
        return not self.read(Cell.IS_DONE, number) and self.is_alive(number)

    def is_alive(self, number: int) -> bool:
        """Return whether a front's process runs."""
        if number not in self._near:
            return bool(self.read(Cell.IS_ALIVE, number))
        pid = self.read(Cell.PID, number)
        if not pid:
            return False
        try:
            os.kill(pid, 0)
        except OSError:  # it has ended, or another user's process has its number
            return False
        return True


def _digest(session: str) -> int:
    """Return a number above 0 that is the same in every process."""
    return int.from_bytes(hashlib.blake2b(session.encode(), digest_size=7).digest()) + 1


def _place(name: str, num_places: int) -> int:
    return zlib.crc32(name.encode()) % num_places
