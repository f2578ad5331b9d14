"""The results of a day, written whenever a unit ends, so that a run which is cut short loses one unit at most.

The file's name carries the device and a digest of the sources that were run, so a resumed run takes up only what the
same code did on the same kind of device. (A commit would not do: a machine may have the files and not the repository.)
"""

import hashlib
import json
import os
from pathlib import Path
from typing import Any

from benchmarks.card import slug
from benchmarks.gpu.rows import Row, Setting

DONE, FAILED, TIMED_OUT = "done", "failed", "timed out"
SOURCES = ("attention", "benchmarks/gpu", "dispatch", "expert_placement", "kvcache", "moe", "scheduler")
_DIGITS = 12


class Ledger:
    """What is known so far of one day."""

    def __init__(self, path: Path, head: dict[str, Any], *, resumes: bool) -> None:
        """Open, or begin anew where nothing is to be resumed; `head` is kept beside the units.

        Raises:
            ValueError: the file to resume is not one of ours.
        """
        self.path, self._content = path, {**head, "names": {}, "units": {}}
        if resumes and path.is_file():
            self._content |= _read(path)

    @property
    def num_done(self) -> int:
        """Units that have ended well."""
        return sum(entry["status"] == DONE for entry in self.units.values())

    @property
    def units(self) -> dict[str, dict[str, Any]]:
        """Entries by "part/unit", in the order in which they ended."""
        units: dict[str, dict[str, Any]] = self._content["units"]
        return units

    def names(self, part: str) -> list[str]:
        """A part's units, as it said itself; none where it has not been asked."""
        names: list[str] = self._content["names"].get(part, [])
        return names

    def note_names(self, part: str, names: list[str]) -> None:
        """Keep what a part's units are, from the next `write` on."""
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
        """Whether a unit has ended well, in this run or in one that it resumes."""
        entry = self.units.get(f"{part}/{unit}")
        return entry is not None and entry["status"] == DONE

    def write(self, part: str, unit: str, status: str, rows: list[Row], *, seconds: float, note: str) -> None:
        """Enter a unit's end, and save: whole or not at all."""
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
        """Drop an entry, if there is one, from what is written next."""
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
    """Name the results of a device and sources."""
    return f"gpu-day-{slug(device)}{'-tiny' if setting.is_tiny else ''}-{source}.json"


def source_digest(root: Path) -> str:
    """Return a digest of the Python files that a day runs."""
    digest = hashlib.sha256()
    for folder in SOURCES:
        for path in sorted((root / folder).rglob("*.py")):
            digest.update(str(path.relative_to(root)).encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()[:_DIGITS]


def _read(path: Path) -> dict[str, Any]:
    """What a run left: its units, and the names of all that its parts have."""
    try:
        content = json.loads(path.read_bytes())
        return {"names": dict(content.get("names", {})), "units": dict(content["units"])}
    except (AttributeError, ValueError, KeyError, TypeError) as error:
        raise ValueError(
            f"{path} cannot be resumed, it is not the result of a day ({error!r}); move it away"
        ) from error
