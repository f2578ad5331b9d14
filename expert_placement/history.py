"""What was decided and done about placements: a list in memory and, where wished, a file that survives a restart.

The file has one JSON object per line and is only appended to. Beside it lies the placement that serves, as
`FILE.placement.json`: a restart with `--expert-placement` of it starts warm.
"""

import json
from collections import deque
from pathlib import Path
from typing import Any

from expert_placement.placement import Placement
from expert_placement.placement_file import save_placement

KEPT = 1000  # entries in memory


class History:
    """Entries in order of time, each a JSON object with at least "time" and "kind"."""

    def __init__(self, file: Path | None = None) -> None:
        """Go on where a file ends.

        Raises:
            ValueError: the file is no history. OSError: it cannot be read.
        """
        self._file = file
        self.entries: deque[dict[str, Any]] = deque(maxlen=KEPT)
        if file is not None and file.exists():
            self.entries.extend(_entry(file, number, line) for number, line in _lines(file))

    @property
    def placement_file(self) -> Path | None:
        """Where the serving placement is kept."""
        return None if self._file is None else self._file.with_name(self._file.name + ".placement.json")

    def add(self, entry: dict[str, Any], serving: Placement | None = None) -> None:
        """Append an entry; `serving` is the placement that serves now, if that has changed.

        Raises:
            OSError: the file cannot be written.
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
        raise ValueError(f"{file}, line {number}: an entry is an object with a kind; this is {line[:80]!r}")
    return entry
