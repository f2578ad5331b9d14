"""Copies of background runs of other nodes' fronts, at the leading front (`run_copies`).

If such a node is lost, the leading front runs its responses again (`left_runs`) and keeps them. A front passes requests for a response
that it does not have on to the leading one (`http.several.forwarding`).
"""

import json
import logging
import os
from collections.abc import Iterable
from pathlib import Path

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from server.api.openai.responses.left_runs import FOLDER, LeftRuns, read_runs
from server.api.openai.responses.run_copies import FULL, KEPT, PATH, TAKEN
from server.front.several.seat import folder_of
from server.machine.whole_files import replace_text

_LOG = logging.getLogger("wideep.front")


class RunsOfOthers:
    """The copies at the leading front, in a folder for each front of another node."""

    def __init__(self, kept: Path, left: LeftRuns) -> None:
        """Args: kept is the folder that outlives a front; left has the runs of this front."""
        self._kept, self._left = kept, left
        self._taken: set[str] = set()  # response ids

    def take_over(self, numbers: Iterable[int]) -> None:
        """Run the copied runs of lost fronts again here."""
        for number in numbers:
            self._take_all(number)

    def _take_all(self, number: int, *, but: Iterable[str] = ()) -> None:
        """Take over the runs of one front, except those in `but`."""
        folder = self._folder_of(number)
        for run in read_runs(folder):
            if run.response_id not in but:
                self._taken.add(run.response_id)
                self._left.adopt(run)
                (folder / run.response_id).unlink(missing_ok=True)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a front of another node."""
        request = Request(scope, receive)
        number, _, response_id = request.url.path.removeprefix(f"{PATH}/").partition("/")
        if os.path.basename(response_id) != response_id:
            raise ValueError(f"{response_id!r} is not a response id")
        body = (await request.body()).decode()
        status = self._answer(request.method, int(number), response_id, body)
        await Response(status_code=status)(scope, receive, send)

    def _answer(self, method: str, number: int, response_id: str, body: str) -> int:
        """Return a status."""
        if not response_id:
            self._take_all(number, but=json.loads(body))
            return KEPT
        if response_id in self._taken or self._left.has(response_id):
            return TAKEN
        folder = self._folder_of(number)
        try:
            if method == "DELETE":
                (folder / response_id).unlink(missing_ok=True)
            else:
                folder.mkdir(mode=0o700, exist_ok=True)
                replace_text(folder / response_id, body)
        except OSError as error:
            _LOG.warning("cannot keep a background response of front %d: %s", number, error.strerror)
            return FULL
        return KEPT

    def _folder_of(self, number: int) -> Path:
        return self._kept / folder_of(FOLDER, number)
