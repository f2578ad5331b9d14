"""Progress of loading: a line per stage in logs, bars on the terminal of `wideep serve`.

If `wideep serve` runs on a terminal, every engine writes its progress to a file in the folder named by WIDEEP_SCREEN. Serve
reads the files, sums over ranks and draws one bar at a time with tqdm, so only one process moves the
terminal's cursor. Files suffice because only the latest state counts, and no rank ever waits for serve. Otherwise (logs,
containers, torchrun, JSON) the first rank writes lines. Rejected: a pipe through launcher and supervisors, which would
need code in each of them.
"""

import json
import os
import sys
import time
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any, NamedTuple, TextIO

from tqdm import tqdm

from server.machine.lines import SCREEN_VARIABLE, is_json, say
from server.machine.whole_files import replace_text

IMPORTS = "torch and transformers"  # the first stage, until the rank writes its file
START = "the service: ranks meet, HTTP opens"  # the last stage, until /health answers
_EVERY_S = 0.1  # interval between writes within a stage
_BAR = "{desc}: {percentage:3.0f}%|{bar}| {n_fmt}/{total_fmt}{unit}, {elapsed}<{remaining}"
_CLOCK = "{desc}: {elapsed}"


class LoadingLines:
    """Logs two lines per stage, or nothing if `is_quiet`."""

    def __init__(self, *, is_quiet: bool) -> None:
        self._is_quiet = is_quiet
        self._stage = self._ended = ""

    def __call__(self, stage: str, done: int, total: int) -> None:
        """Log the start and the end of a stage."""
        is_first, is_end = stage != self._stage, done >= total
        self._stage = stage
        if self._is_quiet or not (is_first or is_end) or stage == self._ended:
            return
        self._ended = stage if is_end else ""
        say(f"{'Loaded' if is_end else 'Loading'} {stage}", error=True, level="info")

    def note(self, text: str, *, stage: str = "") -> None:
        """Log a fact or the start of a stage without progress."""
        if not self._is_quiet:
            say(text, error=True, level="info")

    def tell(self, **_facts: Any) -> None:
        """Ignore facts: only the terminal's summary shows them."""


class LoadingFile:
    """Writes one rank's progress to a file for `wideep serve`."""

    def __init__(
        self,
        folder: Path,
        rank: int,
        *,
        in_bytes: Collection[str],
        now_s: Callable[[], float] = time.monotonic,
    ) -> None:
        """Write that this rank has begun.

        Args:
            in_bytes: Names of the stages that count bytes.
        """
        self._path, self._in_bytes, self._now_s = _path(folder, rank), in_bytes, now_s
        self._stages: dict[str, list[Any]] = {}
        self._facts: dict[str, Any] = {}
        self._written_s = now_s()
        self._write()

    def __call__(self, stage: str, done: int, total: int) -> None:
        """Write the start and end of a stage, and progress at intervals. A new stage ends the previous one."""
        is_new = stage not in self._stages
        if is_new:
            for each in self._stages.values():
                each[0] = each[1]
        self._stages[stage] = [done, total, stage in self._in_bytes]
        if is_new or done >= total or self._now_s() - self._written_s >= _EVERY_S:
            self._write()

    def note(self, text: str, *, stage: str = "") -> None:
        """Write that a stage has begun, if one is given. Ignore the text, which the summary covers."""
        if stage:
            self(stage, 0, 1)

    def tell(self, **facts: Any) -> None:
        """Write facts and decisions for the summary."""
        self._facts |= facts
        self._write()

    def _write(self) -> None:
        self._written_s = self._now_s()
        replace_text(self._path, json.dumps({"stages": self._stages, "facts": self._facts}))


Loading = LoadingLines | LoadingFile


def loading_of(
    rank: int, *, is_restart: bool, in_bytes: Collection[str], environment: Mapping[str, str]
) -> Loading:
    """Return a rank's progress reporter. In logs, only the first rank's writes; a restarted engine's never does."""
    folder = environment.get(SCREEN_VARIABLE)
    if folder is None or is_restart:
        return LoadingLines(is_quiet=is_restart or rank > 0)
    return LoadingFile(Path(folder), rank, in_bytes=in_bytes)


def has_screen(environment: Mapping[str, str] = os.environ) -> bool:
    """Return whether this process may draw: stdout and stderr are terminals with cursor control, and logs are text."""
    streams = (sys.stdout, sys.stderr)
    return all(stream.isatty() for stream in streams) and environment.get("TERM") != "dumb" and not is_json()


class _Stage(NamedTuple):
    """A stage, summed over all ranks."""

    done: int
    total: int  # ranks that have not begun count with the largest total
    in_bytes: bool
    is_over: bool


class LoadingScreen:
    """Draws the loading of all ranks: a bar for the first unfinished stage, below those of finished stages."""

    def __init__(self, folder: Path, num_ranks: int, stream: TextIO | None = None) -> None:
        self._folder, self._num_ranks, self._stream = folder, num_ranks, stream or sys.stderr
        tqdm.monitor_interval = 0  # no thread in a process that forks; `update` is called often
        self._bar: Any = None
        self._shown = ""  # the bar's stage
        self._ended: set[str] = set()

    def update(self) -> None:
        """Redraw from the ranks' files."""
        for name, stage in self._stages().items():
            if name in self._ended:
                continue
            self._draw(name, stage)
            if not stage.is_over:
                return
            self._ended.add(name)
            self.close()
        if all(rank.get("facts") for rank in (self._read(rank) for rank in range(self._num_ranks))):
            self._draw(START, _Stage(0, 1, False, False))

    def close(self) -> None:
        """Leave the bar on the screen and move below it. May be called again."""
        if self._bar is not None:
            self._bar.close()
            self._bar = None

    def facts(self) -> dict[str, Any]:
        """Return the first rank's facts and decisions; empty until it has written them."""
        found: dict[str, Any] = self._read(0).get("facts", {})
        return found

    def _draw(self, name: str, stage: _Stage) -> None:
        if self._bar is None or self._shown != name:
            self.close()
            self._shown = name
            self._bar = tqdm(
                desc=f"Loading {name.partition(',')[0]}", total=stage.total, file=self._stream, dynamic_ncols=True,
                unit="B" if stage.in_bytes else "", unit_scale=stage.in_bytes, unit_divisor=1024,
                bar_format=_BAR if stage.total > self._num_ranks else _CLOCK,
            )  # fmt: skip
        self._bar.n, self._bar.total = stage.done, stage.total
        self._bar.refresh()

    def _stages(self) -> dict[str, _Stage]:
        ranks = [self._read(rank) for rank in range(self._num_ranks)]
        has_begun = all(ranks)
        found = {IMPORTS: _Stage(0, 1, False, has_begun)}
        names = dict.fromkeys(name for rank in ranks for name in rank.get("stages", {}))
        for name in names:
            parts = [rank["stages"][name] for rank in ranks if name in rank.get("stages", {})]
            absent = self._num_ranks - len(parts)
            found[name] = _Stage(
                done=sum(part[0] for part in parts),
                total=sum(part[1] for part in parts) + absent * max(part[1] for part in parts),
                in_bytes=any(part[2] for part in parts),
                is_over=not absent and all(part[0] >= part[1] for part in parts),
            )
        return found

    def _read(self, rank: int) -> dict[str, Any]:
        try:
            content: dict[str, Any] = json.loads(_path(self._folder, rank).read_text())
        except FileNotFoundError:
            return {}
        return content


def _path(folder: Path, rank: int) -> Path:
    return folder / f"loading_{rank}.json"
