"""Shows how far the making of the demo model is: a bar in a terminal, one line per stage in a log."""

import sys
from collections.abc import Callable
from typing import TextIO

Report = Callable[[str, float], None]
"""Called with a stage ("converting") and the share of the whole work that is done, 0 to 1."""

BAR_CELLS = 30
CLEAR_TO_END_OF_LINE = "\x1b[K"


class ProgressBar:
    """Write progress to a stream, by default stderr. Call it as a `Report`; `close` ends the line."""

    def __init__(self, title: str, stream: TextIO | None = None) -> None:
        self._title = title
        self._stream = stream or sys.stderr
        self._is_terminal = self._stream.isatty()
        self._last_line = ""
        self._last_stage = ""

    def __call__(self, stage: str, fraction: float) -> None:
        """Show a stage and the share done; draws only what differs from what is shown."""
        if self._is_terminal:
            self._draw_bar(stage, fraction)
        elif stage != self._last_stage:
            self._stream.write(f"{self._title}: {fraction:4.0%}, {stage}\n")
            self._stream.flush()
        self._last_stage = stage

    def close(self) -> None:
        """End the line of a drawn bar."""
        if self._last_line:
            self._stream.write("\n")
            self._stream.flush()
            self._last_line = ""

    def _draw_bar(self, stage: str, fraction: float) -> None:
        filled = round(fraction * BAR_CELLS)
        bar = "#" * filled + "." * (BAR_CELLS - filled)
        line = f"{self._title} [{bar}] {fraction:4.0%} {stage}"
        if line != self._last_line:
            self._stream.write(f"\r{line}{CLEAR_TO_END_OF_LINE}")
            self._stream.flush()
            self._last_line = line
