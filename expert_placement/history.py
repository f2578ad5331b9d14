"""History of placement decisions and changes: a list in memory and, optionally, a file that survives a restart.

The file has one JSON object per line and is only appended to. The serving placement is stored next to it as
`FILE.placement.json`; pass that to `--expert-placement` to restart with it. The last BACK earlier placements, to which a
service can return, are stored as `FILE.before-VERSION.json`.
"""

import json
import re
from collections import deque
from pathlib import Path
from typing import Any

from expert_placement.files import load_placement, save_placement
from expert_placement.placement import Placement

KEPT = 1000  # entries in memory
BACK = 8  # earlier placements kept


class History:
    """Entries in order of time, each a JSON object with at least "time" and "kind", and the earlier placements.

    Attributes:
        before: Earlier placements, newest last. Change it only with `push` and `pop`.
    """

    def __init__(self, file: Path | None = None) -> None:
        """Continue the history in a file.

        Raises:
            ValueError: The file is not a history, or a file next to it is not a placement. OSError: It cannot be read.
        """
        self._file = file
        self.entries: deque[dict[str, Any]] = deque(maxlen=KEPT)
        self.before: deque[Placement] = deque(maxlen=BACK)
        if file is not None and file.exists():
            self.entries.extend(_entry(file, number, line) for number, line in _lines(file))
            self.before.extend(load_placement(path) for path in self._before_files())

    @property
    def placement_file(self) -> Path | None:
        """The file of the serving placement."""
        return None if self._file is None else self._file.with_name(self._file.name + ".placement.json")

    @property
    def last_digest(self) -> str | None:
        """The digest of the last recorded placement, or None before any change."""
        return next((entry["digest"] for entry in reversed(self.entries) if entry.get("digest")), None)

    def push(self, placement: Placement) -> None:
        """Store a placement that served until now. The oldest may be dropped.

        Raises:
            OSError: The file cannot be written.
        """
        self.before.append(placement)
        self._write_before()

    def pop(self) -> Placement:
        """Remove and return the newest earlier placement.

        Raises:
            OSError: Its file cannot be removed.
        """
        placement = self.before.pop()
        self._write_before()
        return placement

    def forget_before(self) -> None:
        """Drop all earlier placements.

        Raises:
            OSError: A file cannot be removed.
        """
        self.before.clear()
        self._write_before()

    def _write_before(self) -> None:
        """Make the files match `before`. Placements have distinct versions and never change."""
        if self._file is None:
            return
        wanted = {self._before_file(placement): placement for placement in self.before}
        for path in self._before_files():
            if path not in wanted:
                path.unlink()
        for path, placement in wanted.items():
            if not path.exists():
                save_placement(placement, path)

    def _before_file(self, placement: Placement) -> Path:
        assert self._file is not None, "only a history with a file has placement files"
        return self._file.with_name(f"{self._file.name}.before-{placement.version}.json")

    def _before_files(self) -> list[Path]:
        """Return the files by version, oldest first."""
        assert self._file is not None, "only a history with a file has placement files"
        name = re.compile(re.escape(self._file.name) + r"\.before-(\d+)\.json")
        found = ((name.fullmatch(path.name), path) for path in self._file.parent.iterdir())
        return [path for _, path in sorted((int(match[1]), path) for match, path in found if match)]

    def add(self, entry: dict[str, Any], serving: Placement | None = None) -> None:
        """Append an entry. `serving`: the placement that serves now, if it has changed.

        Raises:
            OSError: The file cannot be written.
        """
        self.entries.append(entry)
        if self._file is None or self.placement_file is None:
            return
        if serving is not None:
            save_placement(serving, self.placement_file)
        with self._file.open("a") as file:
            file.write(json.dumps(entry) + "\n")


def _lines(file: Path) -> list[tuple[int, str]]:
    return [(number, line) for number, line in enumerate(file.read_text().splitlines(), 1) if line.strip()]


def _entry(file: Path, number: int, line: str) -> dict[str, Any]:
    try:
        entry = json.loads(line)
    except ValueError as error:
        raise ValueError(f"{file}, line {number}: {error}") from error
    if not isinstance(entry, dict) or "kind" not in entry:
        raise ValueError(f"{file}, line {number}: an entry must be an object with a kind, not {line[:80]!r}")
    return entry
