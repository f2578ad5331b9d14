"""Record loads with a time axis, between a start and a stop, in bounded memory, and write records.

A row covers a second of reports. When rows exceed MAX_BYTES, neighbours are merged and rows become twice as long. So a
forgotten recorder keeps its whole time span and never grows (SGLang's per-token recorder does).

A record is a list of the recorder's rows. Only the last row is copied, so that the event loop does little work.
A thread writes files row by row, so that the rows are not copied a second time and the GIL is released between
them.
"""

import json
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import IO, NamedTuple

import numpy as np

from expert_placement.load import PHASES, measured_balancedness
from scheduler.moves.reports import ExpertMap
from server.http.json_writer import json_parts

MAX_BYTES = 256 << 20
_MIN_ROWS = 2


@dataclass
class _Row:
    second: int  # in units of the recorder's `every_s`
    time_s: float  # since 1970, of the last report
    step: int
    version: int  # of the placement
    counts: np.ndarray  # [layers, 2, experts + ranks] int64


class Record(NamedTuple):
    """Recorded load, ready to be written. Nothing in it changes later."""

    model: str
    experts: ExpertMap
    rows: list[_Row]

    def write_npz(self, file: IO[bytes]) -> None:
        """Write WideEP's format: `load`, `prefill`, `decode` [rows, layers, experts], `rank_tokens` and the axes."""
        E = self.experts.num_experts
        by_row: dict[str, Callable[[np.ndarray], np.ndarray]] = {
            "load": lambda counts: counts[..., :E].sum(axis=1),
            **{phase: lambda counts, at=at: counts[:, at, :E] for at, phase in enumerate(PHASES)},  # type: ignore[misc]
            "rank_tokens": lambda counts: counts[..., E:],  # [layers, phases, ranks]
        }
        about = {
            "time_s": np.array([row.time_s for row in self.rows]),
            "step": np.array([row.step for row in self.rows]),
            "placement_version": np.array([row.version for row in self.rows]),
            "layers": np.array(self.experts.layers),
            "slot_expert": self.experts.slot_expert,
            "model": np.array(self.model),
        }
        with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive:
            for name, part in by_row.items():
                with archive.open(f"{name}.npy", "w", force_zip64=True) as member:
                    _write_rows(member, [row.counts for row in self.rows], part)
            for name, array in about.items():
                with archive.open(f"{name}.npy", "w") as member:
                    np.lib.format.write_array(member, array, allow_pickle=False)

    def sglang_json(self) -> Iterator[str]:
        """Yield SGLang's `stat` record as JSON: logical_count [rows, model layers, experts], with zeros for dense layers."""
        E, layers = self.experts.num_experts, list(self.experts.layers)
        yield '{"rank": 0, "logical_count": ['
        rank_tokens = np.zeros_like(self.rows[0].counts[:, 0, E:])
        for index, row in enumerate(self.rows):
            logical = np.zeros((self.experts.num_hidden_layers, E), dtype=np.int64)
            logical[layers] = row.counts[..., :E].sum(axis=1)
            rank_tokens += row.counts[..., E:].sum(axis=1)
            yield "," * bool(index)
            yield from json_parts(logical)
        even = measured_balancedness(rank_tokens)
        mean = None if np.isnan(even).all() else float(np.nanmean(even))
        yield f'], "average_utilization_rate_over_window": {json.dumps(mean)}}}'


def _write_rows(file: IO[bytes], rows: list[np.ndarray], part: Callable[[np.ndarray], np.ndarray]) -> None:
    """Write one part of every row as a .npy array, [rows, ...] int64."""
    shape = (len(rows), *part(rows[0]).shape)
    header = {"shape": shape, "fortran_order": False, "descr": "<i8"}
    np.lib.format.write_array_header_2_0(file, header)
    for row in rows:
        file.write(np.ascontiguousarray(part(row), dtype="<i8").tobytes())


def _wider(counts: np.ndarray, num_ranks: int) -> np.ndarray:
    """Append columns of zeros for more ranks."""
    return np.pad(counts, ((0, 0), (0, 0), (0, num_ranks)))


class LoadRecorder:
    """Records loads while it is on, and keeps the rows after a stop."""

    def __init__(self, max_bytes: int = MAX_BYTES) -> None:
        self.is_on = False
        self._rows: list[_Row] = []
        self._every_s = 1.0
        self._max_bytes = max_bytes

    @property
    def num_rows(self) -> int:
        """Number of recorded rows."""
        return len(self._rows)

    def start(self) -> None:
        """Clear the rows and start recording."""
        self.clear()
        self.is_on = True

    def stop(self) -> None:
        """Stop recording; the rows stay."""
        self.is_on = False

    def clear(self) -> None:
        """Clear the rows."""
        self._rows, self._every_s = [], 1.0

    def forget(self, record: Record) -> None:
        """Remove a record's counts; later ones stay. `clear` must not have been called since `take`."""
        by_second = {row.second: row for row in self._rows}
        for old in record.rows:
            row = by_second[int(old.time_s / self._every_s)]
            missing = row.counts.shape[2] - old.counts.shape[2]
            row.counts = row.counts - _wider(old.counts, missing)  # a new array: records may hold the old one
        last_s = record.rows[-1].time_s
        self._rows = [row for row in self._rows if row.time_s > last_s or row.counts.any()]
        if not self._rows:
            self.clear()

    def add(self, time_s: float, step: int, version: int, counts: np.ndarray) -> None:
        """Add one rank's counts since its last report. Ignored while off."""
        if not self.is_on:
            return
        second = int(time_s / self._every_s)
        if not self._rows or self._rows[-1].second < second:
            self._rows.append(_Row(second, time_s, step, version, np.zeros(counts.shape, dtype=np.int64)))
        row = self._rows[-1]
        row.counts += counts
        row.time_s, row.step, row.version = time_s, max(step, row.step), max(version, row.version)
        if len(self._rows) > max(_MIN_ROWS, self._max_bytes // row.counts.nbytes):
            self._merge()

    def widen(self, num_ranks: int) -> None:
        """Make room for the counts of more ranks."""
        self._rows = [replace(row, counts=_wider(row.counts, num_ranks)) for row in self._rows]

    def _merge(self) -> None:
        """Double the length of rows."""
        self._every_s *= 2
        merged: list[_Row] = []
        for old in self._rows:
            row = replace(old, second=int(old.time_s / self._every_s))
            if merged and merged[-1].second == row.second:
                row = replace(row, counts=row.counts + merged.pop().counts)  # records may hold the old arrays
            merged.append(row)
        self._rows = merged

    def take(self, model: str, experts: ExpertMap) -> Record:
        """Return a record of the rows, which later reports do not change. Requires at least one row."""
        last = self._rows[-1]
        return Record(model, experts, [*self._rows[:-1], replace(last, counts=last.counts.copy())])
