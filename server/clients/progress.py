"""Progress of many requests: a bar on a terminal, optional lines elsewhere."""

import sys
import time
from collections.abc import Callable
from typing import Any, Self, TextIO

from tqdm import tqdm

LINE_EVERY_S = 10.0


class RequestProgress:
    """Counter of finished requests. A context manager: leaving it ends the bar."""

    def __init__(
        self,
        total: int | None,
        title: str,
        *,
        lines: bool = False,
        stream: TextIO | None = None,
        now_s: Callable[[], float] = time.monotonic,
    ) -> None:
        """Begin at 0 of `total`.

        Args:
            total: Number of requests. None if it is unknown.
            title: Text before the figures.
            lines: Whether to write lines if the stream is not a terminal.
            stream: Output stream (default: stderr).
            now_s: Clock in seconds.
        """
        self._stream = stream or sys.stderr
        self._title = title
        self._total = total
        self._lines = lines
        self._now_s = now_s
        self._begun_s = self._said_s = now_s()
        self.num_done = 0
        self.num_failed = 0
        self._bar: Any = None
        if self._stream.isatty():
            self._bar = tqdm(total=total, desc=title, unit="request", file=self._stream)

    def step(self, *, failed: bool = False, note: str = "") -> None:
        """Count one more request.

        Args:
            note: Additional text after the figures.
        """
        self.num_done += 1
        self.num_failed += failed
        if self._bar is not None:
            if failed:
                self._bar.set_postfix(failed=self.num_failed, refresh=False)
            if note:
                self._bar.set_postfix_str(note, refresh=False)
            self._bar.update()
        elif self._lines and self._now_s() - self._said_s >= LINE_EVERY_S:
            self._said_s = self._now_s()
            words = f"{self._title}: {self.figures()}" + (f", {note}" if note else "")
            print(words, file=self._stream, flush=True)

    def figures(self) -> str:
        """Return the progress as a text."""
        seconds = max(self._now_s() - self._begun_s, 1e-9)
        failed = f" ({self.num_failed} failed)" if self.num_failed else ""
        of_total = "" if self._total is None else f" of {self._total}"
        return f"{self.num_done}{of_total} done{failed}, {self.num_done / seconds:.1f} requests/s"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.close()
