"""Results of a day with a GPU: rows of named figures, the file that stores them, and their tables. Does not import torch.

The file is written whenever a unit ends, so an interrupted run loses at most one unit. Its name contains the device and a
digest of the sources, so a resumed run continues only results of the same code on the same kind of device. (Rejected: the
commit. A machine may have the files and not the repository.)
"""

import hashlib
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.card import slug

Figure = float | int | str | None


@dataclass(frozen=True, kw_only=True)
class Row:
    """One line of a part's table."""

    name: str
    figures: Mapping[str, Figure]
    note: str = ""
    is_right: bool = True  # False if an answer is wrong, or if the unit's work did not run
    goals: Mapping[str, float] = field(default_factory=dict)  # least values of figures, by name

    def as_json(self) -> dict[str, Any]:
        return asdict(self)

    def missed(self) -> list[str]:
        """Return the names of the figures below their goals."""
        return [
            name
            for name, goal in self.goals.items()
            if isinstance(value := self.figures.get(name), float | int) and value < goal
        ]


@dataclass(frozen=True, kw_only=True)
class Setting:
    """Input of every unit of a day."""

    device: str  # "cuda", or "interpreter": Triton's, on CPU tensors, with meaningless times
    is_tiny: bool  # shapes small enough for the interpreter
    known: Mapping[str, float] = field(default_factory=dict)  # figures so far, by "part/unit/row/figure"

    @property
    def is_interpreted(self) -> bool:
        """Whether this day runs without a GPU."""
        return self.device == "interpreter"

    def as_json(self) -> dict[str, Any]:
        return asdict(self)

    def ceiling(self, name: str) -> float | None:
        """Return a ceiling that the day measured, or None if it did not."""
        keys = [key for key in self.known if key.startswith("ceilings/") and key.endswith(f"/{name}")]
        return self.known[keys[-1]] if keys else None


DONE, FAILED, TIMED_OUT = "done", "failed", "timed out"
SOURCES = ("attention", "benchmarks/gpu", "dispatch", "expert_placement", "kvcache", "moe", "scheduler")
_DIGITS = 12


class Ledger:
    """All results of one day so far."""

    def __init__(self, path: Path, head: dict[str, Any], *, resumes: bool) -> None:
        """Open the file, or start a new one unless `resumes`. `head` is stored next to the units.

        Raises:
            ValueError: The file to resume is not one of ours.
        """
        self.path, self._content = path, {**head, "names": {}, "units": {}}
        if resumes and path.is_file():
            self._content |= _read(path)

    @property
    def num_done(self) -> int:
        """Number of units that succeeded."""
        return sum(entry["status"] == DONE for entry in self.units.values())

    @property
    def units(self) -> dict[str, dict[str, Any]]:
        """Entries by "part/unit", in the order in which they ended."""
        units: dict[str, dict[str, Any]] = self._content["units"]
        return units

    def names(self, part: str) -> list[str]:
        """Return the units that a part reported, or [] if it has not reported them."""
        names: list[str] = self._content["names"].get(part, [])
        return names

    def note_names(self, part: str, names: list[str]) -> None:
        """Record a part's units; the next `write` saves them."""
        self._content["names"][part] = names

    def summary(self) -> dict[str, int]:
        """Count units, and rows that are wrong or miss a goal."""
        rows = [Row(**row) for entry in self.units.values() for row in entry["rows"]]
        return {
            "units": len(self.units),
            "failed": len(self.units) - self.num_done,
            "rows": len(rows),
            "wrong_rows": sum(not row.is_right for row in rows),
            "missed_goals": sum(len(row.missed()) for row in rows),
        }

    def is_done(self, part: str, unit: str) -> bool:
        """Whether a unit succeeded, in this run or in one that it resumes."""
        entry = self.units.get(f"{part}/{unit}")
        return entry is not None and entry["status"] == DONE

    def write(self, part: str, unit: str, status: str, rows: list[Row], *, seconds: float, note: str) -> None:
        """Record the end of a unit and save the file atomically."""
        self.units[f"{part}/{unit}"] = {
            "status": status,
            "seconds": round(seconds, 1),
            "note": note,
            "rows": [row.as_json() for row in rows],
        }
        self.path.parent.mkdir(parents=True, exist_ok=True)
        scratch = self.path.with_suffix(f".{os.getpid()}")
        scratch.write_text(json.dumps(self._content, indent=1) + "\n")
        os.replace(scratch, self.path)

    def forget(self, part: str, unit: str) -> None:
        """Remove an entry if it exists; the next `write` saves that."""
        self.units.pop(f"{part}/{unit}", None)

    def known(self) -> dict[str, float]:
        """Return all numbers so far, by "part/unit/row/figure"."""
        return {
            f"{key}/{row['name']}/{name}": float(value)
            for key, entry in self.units.items()
            for row in entry["rows"]
            for name, value in row["figures"].items()
            if isinstance(value, float | int)
        }


def file_name(device: str, setting: Setting, source: str) -> str:
    """Return the file name for a device and sources."""
    return f"gpu-day-{slug(device)}{'-tiny' if setting.is_tiny else ''}-{source}.json"


def source_digest(root: Path) -> str:
    """Return a digest of the Python files that a day runs."""
    digest = hashlib.sha256()
    for folder in SOURCES:
        for path in sorted((root / folder).rglob("*.py")):
            digest.update(str(path.relative_to(root)).encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()[:_DIGITS]


def _read(path: Path) -> dict[str, Any]:
    """Read the results of an earlier run: its units, and the names of all units of its parts."""
    try:
        content = json.loads(path.read_bytes())
        return {"names": dict(content.get("names", {})), "units": dict(content["units"])}
    except (AttributeError, ValueError, KeyError, TypeError) as error:
        raise ValueError(
            f"{path} cannot be resumed: it is not a day's result file ({error!r}); move it away"
        ) from error


_GAP = "  "


def part_lines(entries: Mapping[str, Mapping[str, Any]]) -> Iterator[str]:
    """Yield a part's rows, grouped by their figures, then its failures."""
    rows = [Row(**row) for entry in entries.values() for row in entry["rows"]]
    for head, group in _by_head(rows):
        yield from _table(head, group)
    for unit, entry in entries.items():
        if entry["status"] != DONE:
            yield f"  {unit}: {entry['status'].upper()}: {entry['note']}"


def _by_head(rows: Sequence[Row]) -> Iterator[tuple[tuple[str, ...], list[Row]]]:
    """Group consecutive rows with the same figures."""
    group: list[Row] = []
    for row in rows:
        if group and tuple(row.figures) != tuple(group[0].figures):
            yield tuple(group[0].figures), group
            group = []
        group.append(row)
    if group:
        yield tuple(group[0].figures), group


def _table(head: Sequence[str], rows: Sequence[Row]) -> Iterator[str]:
    cells = [[row.name, *(_cell(row, name) for name in head)] for row in rows]
    widths = [max(map(len, column)) for column in zip(["", *head], *cells, strict=True)]
    yield "  " + _line(["", *head], widths)
    for row, line in zip(rows, cells, strict=True):
        yield ("  " if row.is_right else "! ") + _line(line, widths) + (_GAP + row.note if row.note else "")


def _line(cells: Sequence[str], widths: Sequence[int]) -> str:
    first, *rest = (f"{cell:<{width}}" if at == 0 else f"{cell:>{width}}" for at, (cell, width) in enumerate(zip(cells, widths, strict=True)))  # fmt: skip
    return _GAP.join((first, *rest)).rstrip()


def _cell(row: Row, name: str) -> str:
    """Format a figure, with a mark if it has a goal: + reached, - missed."""
    mark = "" if name not in row.goals else "-" if name in row.missed() else "+"
    return _number(row.figures[name]) + mark


def _number(value: Figure) -> str:
    if value is None:
        return "."
    if isinstance(value, str | int):
        return str(value)
    if value == 0 or 1e-3 <= abs(value) < 1e5:
        return f"{value:.0f}" if abs(value) >= 1000 else f"{value:.3g}"
    return f"{value:.2e}"
