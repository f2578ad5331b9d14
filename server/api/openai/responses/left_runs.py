"""Background runs in files, so that a front that replaces a killed one runs them again.

A file has the request with its drawn seed, so the answer has the same tokens. It is written before the client has the id, and removed
at the end of the run. The events of the new run begin with number 0 again. Rejected: keeping the events, which costs a write per step.
"""

import contextlib
import json
import logging
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, NamedTuple

from server.machine.whole_files import replace_text

_LOG = logging.getLogger("wideep.front")


class LeftRun(NamedTuple):
    """A background run that has begun."""

    response: dict[str, Any]  # at the beginning
    body: dict[str, Any]  # of the request
    messages: list[Any]  # the conversation up to its input
    owner: str


async def _leave(_run: LeftRun) -> None:
    """Do nothing: no route runs it again."""


class LeftRuns:
    """The files of the runs that have not ended."""

    def __init__(self, directory: Path) -> None:
        """Read the runs that an earlier front left, if any."""
        directory.mkdir(mode=0o700, exist_ok=True)
        self._directory = directory
        self._found = [run for path in sorted(directory.glob("resp_*")) if (run := _read(path)) is not None]
        # Runs one again; set by the routes.
        self.run_again: Callable[[LeftRun], Awaitable[None]] = _leave

    def note(self, run: LeftRun) -> None:
        """Write a run that begins. If the disk is full, the run would not survive its front."""
        try:
            replace_text(self._directory / str(run.response["id"]), json.dumps(run._asdict()))
        except OSError as error:
            _LOG.warning("a background response is not kept for a restart of the front: %s", error.strerror)

    def forget(self, response_id: str) -> None:
        """Remove a run that has ended."""
        with contextlib.suppress(OSError):
            (self._directory / response_id).unlink(missing_ok=True)

    async def resume(self) -> None:
        """Run those again that an earlier front left."""
        while self._found:
            await self.run_again(self._found.pop(0))


def _read(path: Path) -> LeftRun | None:
    """Return the run in a file, or remove a file that has none."""
    try:
        run = LeftRun(**json.loads(path.read_text()))
    except (OSError, ValueError, TypeError):
        path.unlink(missing_ok=True)
        return None
    return run if run.response.get("id") == path.name else None
