"""Background runs in files, so that a front that replaces a killed one runs them again.

A file has the request with its drawn seed, so the answer has the same tokens. It is written before the client has the id, and removed
at the end of the run. The events of the new run begin with number 0 again. Rejected: keeping the events, which costs a write per step.
"""

import asyncio
import contextlib
import json
import logging
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from server.api.openai.responses.run_copies import RunCopies
from server.machine.tasks import logging_errors
from server.machine.whole_files import replace_text

FOLDER = "background"  # as in `folder_of`
_COPY_TIMEOUT_S = 2.0  # for the leading front to take a new run; after that, its client does not wait for it
_LOG = logging.getLogger("wideep.front")


class LeftRun(NamedTuple):
    """A background run that has begun."""

    response: dict[str, Any]  # at the beginning
    body: dict[str, Any]  # of the request
    messages: list[Any]  # the conversation up to its input
    owner: str

    @property
    def response_id(self) -> str:
        """The response's id, which is the name of the file."""
        return str(self.response["id"])


async def _leave(_run: LeftRun) -> None:
    """Do nothing: no route runs it again."""


class LeftRuns:
    """The files of the runs that have not ended."""

    def __init__(self, directory: Path, copies: RunCopies | None = None) -> None:
        """Read the runs that an earlier front left, if any."""
        directory.mkdir(mode=0o700, exist_ok=True)
        self._directory, self._copies = directory, copies
        self._found: asyncio.Queue[LeftRun] = asyncio.Queue()
        for run in read_runs(directory):
            self._found.put_nowait(run)
        # Runs one again; set by the routes.
        self.run_again: Callable[[LeftRun], Awaitable[None]] = _leave

    def note(self, run: LeftRun) -> None:
        """Write a run that begins. If the disk is full, the run would not survive its front."""
        try:
            replace_text(self._directory / run.response_id, _text(run))
        except OSError as error:
            _LOG.warning("a background response is not kept for a restart of the front: %s", error.strerror)

    async def copy(self, run: LeftRun) -> None:
        """Wait until another node has a copy of a new run, if it needs one. Waits for _COPY_TIMEOUT_S at most."""
        if self._copies is None:
            return
        try:
            await asyncio.wait_for(self._copies.keep(run.response_id, _text(run)), _COPY_TIMEOUT_S)
        except TimeoutError:
            _LOG.warning("the leading front has not taken a background response within %g s", _COPY_TIMEOUT_S)

    async def is_taken(self, run: LeftRun) -> bool:
        """Return whether the leading front has taken a run over. Waits until that front answers."""
        return self._copies is not None and not await self._copies.keep(run.response_id, _text(run))

    def has(self, response_id: str) -> bool:
        """Return whether a run has not ended."""
        return (self._directory / response_id).exists()

    def forget(self, response_id: str) -> None:
        """Remove a run that has ended."""
        with contextlib.suppress(OSError):
            (self._directory / response_id).unlink(missing_ok=True)
        if self._copies is not None:
            self._copies.drop(response_id)

    def adopt(self, run: LeftRun) -> None:
        """Run a lost front's run again here."""
        self.note(run)
        self.resume_later(run)

    def resume_later(self, run: LeftRun) -> None:
        """Run a run again as soon as the service is ready."""
        self._found.put_nowait(run)

    async def resume(self) -> None:
        """Run those again that an earlier front left, and later ones, until cancelled."""
        if self._copies is not None:
            with logging_errors("the leading front does not learn which background responses are here"):
                self._copies.claim(run.response_id for run in read_runs(self._directory))
        async with asyncio.TaskGroup() as group:
            while True:
                group.create_task(self._resume(await self._found.get()))

    async def _resume(self, run: LeftRun) -> None:
        with logging_errors(f"cannot run background response {run.response_id} again"):
            await self.run_again(run)


def read_runs(directory: Path) -> Iterator[LeftRun]:
    """Yield the runs in a folder, and remove files that have none."""
    for path in sorted(directory.glob("resp_*")):
        run = _read(path)
        if run is not None:
            yield run


def _text(run: LeftRun) -> str:
    return json.dumps(run._asdict())


def _read(path: Path) -> LeftRun | None:
    """Return the run in a file, or remove a file that has none. A file that cannot be read stays for the next front."""
    try:
        run = LeftRun(**json.loads(path.read_text()))
    except FileNotFoundError:  # it has just ended
        return None
    except OSError as error:
        _LOG.warning(
            "background response %s cannot be read, and is not run again: %s", path.name, error.strerror
        )
        return None
    except (ValueError, TypeError):
        path.unlink(missing_ok=True)
        return None
    return run if run.response.get("id") == path.name else None
