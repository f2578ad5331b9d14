"""What an engine process says of itself: to its supervisor on a pipe, to the user while weights load."""

import json
import os
import sys
from collections.abc import Mapping
from typing import Any


class SupervisorPipe:
    """The pipe on which this process tells its supervisor how far it is."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        self._fd = int(environment["WIDEEP_READY_FD"]) if "WIDEEP_READY_FD" in environment else None

    def tell(self, **message: Any) -> None:
        """Write one JSON line."""
        if self._fd is not None:
            os.write(self._fd, (json.dumps(message) + "\n").encode())


class Progress:
    """Shows loading: on one line of a terminal, in a line per stage elsewhere."""

    def __init__(self) -> None:
        self._shown = ("", 0)

    def __call__(self, stage: str, fraction: float) -> None:
        """Show a stage's percentage when it changed."""
        percent = int(100 * fraction)
        if (stage, percent) == self._shown:
            return
        self._shown = (stage, percent)
        if sys.stderr.isatty():
            end = "\n" if percent == 100 else ""
            print(f"\rLoading {stage}: {percent:3d} %", end=end, file=sys.stderr, flush=True)
        elif percent == 100:
            print(f"Loaded {stage}", file=sys.stderr, flush=True)


def silent(_stage: str, _fraction: float) -> None:
    """Ranks other than the first load quietly."""
