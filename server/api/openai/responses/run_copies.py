"""Send a front's background runs to the leading front, if that one is on another node (`--fronts per-node`).

A front sends each run before its client has the id, and reports its end. The leading front keeps copies (`runs_of_others`). The service
ends with the leading front's node, so no other node needs copies.

A front that was restarted, or did not hear of the leading one for a time, sends its runs once more before it runs them again. Those
that the leading front has taken over are refused.
"""

import asyncio
import json
import logging
from collections.abc import Awaitable, Callable, Iterable
from typing import NamedTuple

import httpx

from server.machine.tasks import logging_errors

PATH = "/left_runs"  # on the socket for other fronts: PATH/FRONT/RESPONSE, and PATH/FRONT for the ids of all its runs
KEPT, TAKEN, FULL = 204, 409, 507  # answers of the leading front
_NOT_SENT = 0  # instead of an answer
_RETRY_S = 0.1
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
        if status == FULL:
            _LOG.warning("a background response is not kept for a loss of this node: the other disk is full")
        return status != TAKEN

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
            status = _NOT_SENT
            with logging_errors("cannot send background responses to the leading front"):
                status = await self._carry_out(order)
            if not order.status.cancelled():
                order.status.set_result(status)

    async def _carry_out(self, order: _Order) -> int:
        url = f"http://localhost{order.path}"
        while True:
            try:
                response = await self._ask(httpx.Request(order.method, url, content=order.content))
                break
            except httpx.HTTPError:
                await asyncio.sleep(_RETRY_S)
        await response.aclose()
        return response.status_code

    def _send(self, method: str, path: str, content: str = "") -> asyncio.Future[int]:
        status = asyncio.get_running_loop().create_future()
        self._orders.put_nowait(_Order(method, self._path + path, content, status))
        return status
