"""The speed of all fronts, for the log line and GET /throughput of the leading one.

Each other front writes its figures of a period to its own file. The leading front adds the periods that it has not seen.
A front keeps its last periods in the file, because the two do not count at the same time.
"""

import contextlib
import json
from collections import deque
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from server.front.several.board import Cell
from server.front.several.seat import Seat
from server.http.observability.throughput import PeriodOfFront, Throughput
from server.machine.whole_files import replace_text

_KEPT_PERIODS = 4


class SharedSpeed:
    """Passes the periods of the other fronts to the leading one."""

    def __init__(self, throughput: Throughput, seat: Seat) -> None:
        self._throughput, self._seat = throughput, seat
        self._number = 0  # of the newest period of this front
        self._periods: deque[tuple[int, PeriodOfFront]] = deque(maxlen=_KEPT_PERIODS)
        # By front: its process, and the newest period that was added.
        self._seen: dict[int, tuple[int, int]] = {}

    def exchange(self) -> None:
        """Write this front's last period, or in the leading front add those of the others. Call it after each `tick`."""
        if self._seat.leads:
            for number in self._seat.board.others():
                self._take(number)
        else:
            self._number += 1
            self._periods.append((self._number, self._throughput.last_period))
            self._write()

    def _write(self) -> None:
        pid = self._seat.board.read(Cell.PID, self._seat.number)
        with contextlib.suppress(OSError):  # the disk is full: the next period may be written
            replace_text(
                self._path(self._seat.number), json.dumps({"pid": pid, "periods": list(self._periods)})
            )

    def _take(self, number: int) -> None:
        with contextlib.suppress(FileNotFoundError):  # that front has not written yet
            written = json.loads(self._path(number).read_text())
            pid, seen = self._seen.get(number, (0, 0))
            seen = seen if pid == written["pid"] else 0
            for at, fields in written["periods"]:
                if at > seen:
                    self._throughput.note_elsewhere(_period(fields))
                    seen = at
            self._seen[number] = written["pid"], seen

    def _path(self, number: int) -> Path:
        return self._seat.folder / f"speed-{number}.json"


def _period(fields: list[Any]) -> PeriodOfFront:
    *counts, first_tokens_s, ttft, itl, e2e = fields
    named = dict(zip(PeriodOfFront._fields, counts, strict=False))
    return PeriodOfFront(
        **named,
        first_tokens_s=tuple(first_tokens_s),
        ttft=_buckets(ttft),
        itl=_buckets(itl),
        e2e=_buckets(e2e),
    )


def _buckets(counts: Mapping[str, int]) -> dict[int, int]:
    """Return the counts of buckets. JSON stores their numbers as text."""
    return {int(bucket): count for bucket, count in counts.items()}
