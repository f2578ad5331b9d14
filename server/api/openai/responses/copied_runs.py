"""Copies of background runs at the leading front, for the fronts of other nodes (`--fronts per-node`).

A front of another node sends each run before its client has the id, and reports its end. If that node is lost, the leading front
runs these responses again (`left_runs`) and keeps them. A front passes requests for a response that it does not have on to the leading
one (`http.several.forwarding`). The service ends with the leading front's node, so no other node needs copies.

A front that was restarted, or did not hear of the leading one for a time, sends its runs once more before it runs them again. Those
that the leading front has taken over are refused.
"""

import asyncio
import json
import logging
import os
from collections.abc import Awaitable, Callable, Iterable
from pathlib import Path
from typing import NamedTuple

import httpx
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from server.api.openai.responses.left_runs import FOLDER, LeftRuns, read_runs
from server.front.several.seat import folder_of
from server.machine.whole_files import replace_text

PATH = "/left_runs"  # on the socket for other fronts: PATH/FRONT/RESPONSE, and PATH/FRONT for the ids of all its runs
_RETRY_S = 0.1
_KEPT, _TAKEN, _FULL = 204, 409, 507  # answers of the leading front
_LOG = logging.getLogger("wideep.front")


class _Order(NamedTuple):
    method: str
    path: str
    content: str
    status: asyncio.Future[int]


class RunCopies:
    """Sends the runs of this front to the leading one, in order."""

    def __init__(self, ask: Callable[[httpx.Request], Awaitable[httpx.Response]], number: int) -> None:
        """Args: ask sends a request to the leading front; number is this front's."""
        self._ask, self._path = ask, f"{PATH}/{number}"
        self._orders: asyncio.Queue[_Order] = asyncio.Queue()

    async def keep(self, response_id: str, run: str) -> bool:
        """Send a run, and wait for the answer. Returns False if the leading front has taken the run over."""
        status = await self._send("PUT", f"/{response_id}", run)
        if status == _FULL:
            _LOG.warning("a background response is not kept for a loss of this node: the other disk is full")
        return status != _TAKEN

    def drop(self, response_id: str) -> None:
        """Report the end of a run."""
        self._send("DELETE", f"/{response_id}")

    def claim(self, response_ids: Iterable[str]) -> None:
        """Send the ids of the runs that this front has. The leading front takes over its other copies."""
        self._send("PUT", "", json.dumps(list(response_ids)))

    async def serve(self) -> None:
        """Send what is to be sent, until cancelled. While the leading front does not answer, try again."""
        while True:
            order = await self._orders.get()
            url = f"http://localhost{order.path}"
            while True:
                try:
                    response = await self._ask(httpx.Request(order.method, url, content=order.content))
                    break
                except httpx.HTTPError:
                    await asyncio.sleep(_RETRY_S)
            await response.aclose()
            if not order.status.cancelled():
                order.status.set_result(response.status_code)

    def _send(self, method: str, path: str, content: str = "") -> asyncio.Future[int]:
        status = asyncio.get_running_loop().create_future()
        self._orders.put_nowait(_Order(method, self._path + path, content, status))
        return status


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
            return _KEPT
        if response_id in self._taken or self._left.has(response_id):
            return _TAKEN
        folder = self._folder_of(number)
        try:
            if method == "DELETE":
                (folder / response_id).unlink(missing_ok=True)
            else:
                folder.mkdir(mode=0o700, exist_ok=True)
                replace_text(folder / response_id, body)
        except OSError as error:
            _LOG.warning("cannot keep a background response of front %d: %s", number, error.strerror)
            return _FULL
        return _KEPT

    def _folder_of(self, number: int) -> Path:
        return self._kept / folder_of(FOLDER, number)
