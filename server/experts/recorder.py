"""Records loads with a time axis, between a start and a stop, in bounded memory.

A row is a second of reports. When rows take MAX_BYTES, neighbours are merged and rows become twice as long, so that a
recorder that was forgotten keeps its whole span and never grows (SGLang's per-token recorder does).
"""

import io
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from expert_placement.load import PHASES, measured_balancedness
from scheduler.moves.reports import ExpertMap

MAX_BYTES = 256 << 20
_MIN_ROWS = 2


@dataclass
class _Row:
    second: int  # in units of the recorder's `every_s`
    time_s: float  # since 1970, of the last report
    step: int
    version: int
    counts: np.ndarray  # [layers, 2, experts + ranks] int64


class Record(NamedTuple):
    """What was recorded, ready to be written."""

    model: str
    experts: ExpertMap
    time_s: np.ndarray  # [rows] seconds since 1970 at each row's end
    step: np.ndarray  # [rows] the last step in it
    version: np.ndarray  # [rows] of the placement
    counts: np.ndarray  # [rows, layers, 2, experts + ranks] int64

    def npz(self) -> bytes:
        """Our format: `load`, `prefill`, `decode` [rows, layers, experts], `rank_tokens` and the axes."""
        E = self.experts.num_experts
        arrays = {
            "load": self.counts[..., :E].sum(axis=2),
            **{phase: self.counts[:, :, index, :E] for index, phase in enumerate(PHASES)},
            "rank_tokens": self.counts[..., E:],  # [rows, layers, phases, ranks]
            "time_s": self.time_s,
            "step": self.step,
            "placement_version": self.version,
            "layers": np.array(self.experts.layers),
            "slot_expert": self.experts.slot_expert,
            "model": np.array(self.model),
        }
        content = io.BytesIO()
        np.savez_compressed(content, **arrays)
        return content.getvalue()

    def sglang(self) -> dict[str, Any]:
        """SGLang's `stat` record as lists: logical_count [rows, model layers, experts], dense layers zero."""
        E = self.experts.num_experts
        logical = np.zeros((len(self.counts), self.experts.num_hidden_layers, E), dtype=np.int64)
        logical[:, list(self.experts.layers)] = self.counts[..., :E].sum(axis=2)
        even = measured_balancedness(self.counts[..., E:].sum(axis=(0, 2)))
        return {
            "rank": 0,
            "logical_count": logical.tolist(),
            "average_utilization_rate_over_window": None if np.isnan(even).all() else float(np.nanmean(even)),
        }


class LoadRecorder:
    """Off, on, or stopped with something to take."""

    def __init__(self, max_bytes: int = MAX_BYTES) -> None:
        self.is_on = False
        self._rows: list[_Row] = []
        self._every_s = 1.0
        self._max_bytes = max_bytes

    @property
    def num_rows(self) -> int:
        """Rows recorded so far."""
        return len(self._rows)

    def start(self) -> None:
        """Forget what was recorded, and record."""
        self.clear()
        self.is_on = True

    def stop(self) -> None:
        """Record no more; what was recorded stays."""
        self.is_on = False

    def clear(self) -> None:
        """Forget what was recorded."""
        self._rows, self._every_s = [], 1.0

    def add(self, time_s: float, step: int, version: int, counts: np.ndarray) -> None:
        """Add one rank's counts since its last report; ignored while off."""
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

    def _merge(self) -> None:
        """Make rows twice as long."""
        self._every_s *= 2
        merged: list[_Row] = []
        for row in self._rows:
            row.second = int(row.time_s / self._every_s)
            if merged and merged[-1].second == row.second:
                row.counts += merged.pop().counts
            merged.append(row)
        self._rows = merged

    def take(self, model: str, experts: ExpertMap) -> Record:
        """Return a copy of what was recorded; there must be at least one row."""
        return Record(
            model,
            experts,
            np.array([row.time_s for row in self._rows]),
            np.array([row.step for row in self._rows]),
            np.array([row.version for row in self._rows]),
            np.stack([row.counts for row in self._rows]),
        )
