"""The adapters that the requests of each front need: a file of each front, which the leading one reads.

The leading front gives places to adapters, and takes them away only if no request of any front uses them. It first publishes that
a place takes no new requests. Each front writes its file before it marks that state as applied (`Cell.APPLIED`) and uses the
place for no new request afterwards. So a place is free if all fronts have applied the newest state and no file has the adapter.

The file of a killed front counts until its replacement empties it: its requests may still run at ranks. If a front is lost with its
node, `mirror` removes the copy of its file: the ranks have dropped its requests, and a replacement may never come.
"""

import json
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

from server.front.several.board import Board, Cell
from server.machine.whole_files import replace_text


class AdapterNeed(NamedTuple):
    """What the requests of one front need of an adapter."""

    num_open: int = 0  # accepted requests
    num_running: int = 0  # those at ranks
    is_waiting: bool = False  # some wait for a place
    num_requests: int = 0  # counter: that began to use it


def needs_file(folder: Path, front: int) -> Path:
    """Return the path of a front's file."""
    return folder / f"adapters-{front}.json"


def write_needs(folder: Path, board: Board, needs: Mapping[str, AdapterNeed]) -> None:
    """Replace this front's file: its needs by the digests of adapters.

    Raises:
        OSError: The file cannot be written.
    """
    replace_text(needs_file(folder, board.number), json.dumps(needs))
    board.set(Cell.ADAPTER_NEEDS, time.time_ns())  # another number than those of an earlier process


class NeedsElsewhere:
    """The needs of the other fronts, for the leading one."""

    def __init__(self, folder: Path, board: Board, all_follow: Callable[[], bool]) -> None:
        """Args: all_follow returns whether all other fronts have applied the present state, which it publishes before."""
        self._folder, self._board, self._all_follow = folder, board, all_follow
        # By front: the number of its file, and the content.
        self._read: dict[int, tuple[int, dict[str, AdapterNeed]]] = {}

    def forget(self, fronts: Iterable[int]) -> None:
        """Forget the needs of fronts that are lost with their node. If they come back, their needs count again."""
        self._read |= {front: (0, {}) for front in fronts}

    def may_use(self, digest: str) -> bool:
        """Return whether other fronts have requests with an adapter at ranks, or may submit some."""
        return not self._all_follow() or self.num_running(digest) > 0

    def may_keep(self, digest: str) -> bool:
        """Return whether other fronts have accepted requests with an adapter, or may accept some."""
        return not self._all_follow() or any(need.num_open for need in self._of(digest))

    def num_running(self, digest: str) -> int:
        """Return the number of other fronts' requests at ranks with an adapter."""
        return sum(need.num_running for need in self._of(digest))

    def num_requests(self, digest: str) -> int:
        """Return how many requests of other fronts have begun to use an adapter."""
        return sum(need.num_requests for need in self._of(digest))

    def waiting(self) -> Iterator[str]:
        """Yield the adapters for which requests wait, at fronts that know the present places."""
        for front, needs in self._needs():
            if self._board.read(Cell.APPLIED, front) == self._board.version:
                yield from (digest for digest, need in needs.items() if need.is_waiting)

    def _of(self, digest: str) -> Iterator[AdapterNeed]:
        return (needs[digest] for _, needs in self._needs() if digest in needs)

    def _needs(self) -> Iterator[tuple[int, dict[str, AdapterNeed]]]:
        """Yield each front with its needs, as it has written them last."""
        for front in self._board.others():
            number = self._board.read(Cell.ADAPTER_NEEDS, front)
            if front not in self._read or (number and self._read[front][0] != number):
                self._read[front] = number, _read_file(needs_file(self._folder, front))
            yield front, self._read[front][1]


def _read_file(path: Path) -> dict[str, AdapterNeed]:
    if not path.exists():  # the front has not begun
        return {}
    return {digest: AdapterNeed(*fields) for digest, fields in json.loads(path.read_text()).items()}
