"""Requests that another front of the service must answer: this one passes them on, and the answer back.

The kernel gives each connection to any front. Most requests can be answered by every front. The others belong to one:

- files, batches, operators' requests and the figures of the whole service: to the front that leads;
- a stored or background response, and one that continues it: to the front that created it, which its id names. If the node of
  that front is or was lost, to the leading front, which runs its background responses again;
- a request with an `Idempotency-Key`: to the front that the key names, so that a retry finds the answer.

A request for a front that is being restarted waits for it. If a front is killed while it answers, the connection to the client is cut.
Only listed paths are answered by every front. All others go to the leading front, so that a new endpoint is correct before it is
fast. Fronts reach each other on Unix sockets in a folder that only the user of the service can open; behind the socket of a front
on another node is a stream to it (`serve.front.other_nodes`).
"""

import asyncio
import contextlib
import json
import time
import uuid
import zlib
from collections.abc import Callable, Collection
from typing import Any

import httpx
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from server.front.errors import ApiError
from server.http.bodies import replaying
from server.http.errors import ErrorResponse, route_path
from server.http.exchanges import current_exchange
from server.http.guards import key_of
from server.http.kept_stream import until_gone

WAIT_S = 20.0  # for a front that is being restarted
_RETRY_S = 0.05
LEADER = 0
KEPT_CONNECTIONS = 32  # idle ones to each other front
_ANYWHERE = frozenset((
    *("/", "/health", "/ping", "/version", "/load", "/docs", "/openapi.json", "/favicon.ico", "/dashboard"),
    *("/v1/chat/completions", "/v1/completions", "/v1/messages", "/v1/messages/count_tokens", "/v1/models"),
    *("/generate", "/invocations", "/tokenize", "/detokenize", "/tokenizer_info", "/health_generate"),
    *("/get_model_info", "/model_info", "/get_server_info", "/server_info"),
))  # fmt: skip
_ANYWHERE_UNDER = ("/v1/models/", "/api/", "/dashboard/")
_RESPONSES = "/v1/responses"
_PREVIOUS = "previous_response_id"
_KEYED = ("/v1/chat/completions", "/v1/completions", "/v1/messages")  # with _RESPONSES, as in `idempotency`
_KEY = b"idempotency-key"
# Headers of one connection, or of a browser's page that this front has checked already.
_NOT_PASSED_ON = (
    b"host",
    b"connection",
    b"content-length",
    b"transfer-encoding",
    b"expect",
    b"origin",
    b"x-request-id",
    b"x-forwarded-for",
)
PASSED_ON = "wideep.passed_on"  # in the scope of requests that come from other fronts
_NOT_PASSED_BACK = (b"connection", b"date", b"transfer-encoding", b"x-request-id")


class Owners:
    """Which front must answer a request."""

    def __init__(self, number: int, num_fronts: int) -> None:
        self.number, self._num_fronts = number, num_fronts
        self.lost: Collection[int] = ()  # fronts of nodes that do not answer
        # Whether this front has a response that its id names; if not, the leading one may have it.
        self.has_response: Callable[[str], bool] = lambda _: True

    def new_response_id(self) -> str:
        """Return an id for a response that this front stores."""
        while True:
            response_id = f"resp_{uuid.uuid4().hex}"
            if self._first_named_by(response_id.encode()) == self.number:
                return response_id

    def owner_of(self, scope: Scope, body: bytes) -> int | None:
        """Return the number of another front that must answer, or None if this one can."""
        path = route_path(scope)
        response_id = _response_of(path, body)
        if response_id is not None:
            owner = self._owner_of_response(response_id, is_passed_on=PASSED_ON in scope)
        elif PASSED_ON in scope:
            owner = self.number
        else:
            owner = self._owner_of(scope, path)
        return None if owner == self.number else owner

    def _owner_of(self, scope: Scope, path: str) -> int:
        if path in _KEYED or path == _RESPONSES or path.startswith(f"{_RESPONSES}/"):
            return self._owner_of_key(scope)
        if path in _ANYWHERE or path.startswith(_ANYWHERE_UNDER):
            return self.number
        return LEADER

    def _owner_of_response(self, response_id: str, *, is_passed_on: bool) -> int:
        named = self._first_named_by(response_id.encode())
        if named == self.number:
            return self.number if self.has_response(response_id) else LEADER
        if is_passed_on:
            return self.number
        return LEADER if named in self.lost else named

    def _owner_of_key(self, scope: Scope) -> int:
        key = next((value for name, value in scope["headers"] if name == _KEY), None)
        return self.number if key is None else self._named_by(key_of(scope) + b"\n" + key.strip())

    def _named_by(self, text: bytes) -> int:
        """Return the front that a text names. In place of a lost one, the text names one of the others.

        This front has its own answers, even if the leading one does not know yet that it is back.
        """
        named = self._first_named_by(text)
        if named == self.number or named not in self.lost:
            return named
        others = [number for number in range(self._num_fronts) if number not in self.lost]
        return others[zlib.crc32(text) % len(others)]

    def _first_named_by(self, text: bytes) -> int:
        """Return the front that a text names if none is lost."""
        return zlib.crc32(text) % self._num_fronts


def _response_of(path: str, body: bytes) -> str | None:
    """Return the id of the response that a request is for or continues, or None."""
    if path != _RESPONSES and not path.startswith(f"{_RESPONSES}/"):
        return None
    named = path.removeprefix(_RESPONSES).strip("/").partition("/")[0]
    return named if named and named != "input_tokens" else _previous_of(body)


def _previous_of(body: bytes) -> str | None:
    """Return the id of the response that a request continues, or None."""
    if _PREVIOUS.encode() not in body:
        return None
    with contextlib.suppress(ValueError):
        fields = json.loads(body)
        previous = fields.get(_PREVIOUS) if isinstance(fields, dict) else None
        return previous if isinstance(previous, str) else None
    return None


class Forwarding:
    """Passes requests on to the fronts that must answer them. Bodies must be whole."""

    def __init__(self, app: ASGIApp, owners: Owners, socket_path: Callable[[int], str]) -> None:
        """Args: socket_path returns the path of a front's socket."""
        self._app, self._owners, self._socket_path = app, owners, socket_path
        self._clients: dict[int, httpx.AsyncClient] = {}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer here, or pass on."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        taken: list[Message] = []
        body = b""
        if scope["method"] not in ("GET", "HEAD", "OPTIONS"):
            message = await receive()
            taken.append(message)
            body = message.get("body", b"")
        owner = self._owners.owner_of(scope, body)
        if owner is None:
            await self._app(scope, replaying(taken, receive), send)
            return
        exchange = current_exchange()
        if exchange is not None:
            exchange.is_forwarded = True
        passing = asyncio.create_task(self._pass_on(owner, scope, body, send))
        gone = asyncio.create_task(until_gone(receive))
        try:
            await asyncio.wait((passing, gone), return_when=asyncio.FIRST_COMPLETED)
            if passing.done():
                passing.result()
        finally:
            for task in (passing, gone):
                task.cancel()
            await asyncio.gather(passing, gone, return_exceptions=True)

    async def fetch(self, number: int, path: str, *, timeout_s: float) -> bytes:
        """GET a document of another front.

        Raises:
            httpx.HTTPError: The front does not answer.
        """
        response = await self._client(number).get(path, timeout=timeout_s)
        return response.raise_for_status().content

    async def close(self) -> None:
        """Close the connections to other fronts."""
        for client in self._clients.values():
            await client.aclose()

    async def _pass_on(self, owner: int, scope: Scope, body: bytes, send: Send) -> None:
        request = _request(scope, body)
        try:
            response = await self.ask(owner, request)
        except httpx.HTTPError as error:
            failure = ApiError(
                503,
                f"Front {owner} of this service, which must answer this request, was lost or does not answer "
                f"({type(error).__name__}). Try again.",
                headers={"Retry-After": "1"},
            )
            await ErrorResponse(failure)(scope, _no_more, send)
            return
        async with contextlib.aclosing(response):
            headers = [each for each in response.headers.raw if each[0].lower() not in _NOT_PASSED_BACK]
            await send(
                {"type": "http.response.start", "status": response.status_code, "headers": _lower(headers)}
            )
            # If that front is lost, the connection to the client is cut, because the answer is not whole.
            with contextlib.suppress(httpx.HTTPError):
                async for chunk in response.aiter_raw():
                    await send({"type": "http.response.body", "body": chunk, "more_body": True})
                await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def ask(self, owner: int, request: httpx.Request) -> httpx.Response:
        """Send a request, and wait while the front is not there. A request that was sent is sent again if that changes nothing."""
        until_s = time.monotonic() + WAIT_S
        may_repeat = request.method in ("GET", "HEAD") or _KEY.decode() in request.headers
        while True:
            try:
                return await self._client(owner).send(request, stream=True)
            except httpx.TransportError as error:
                is_sent = not isinstance(error, httpx.ConnectError)
                if time.monotonic() >= until_s or (is_sent and not may_repeat):
                    raise
            await asyncio.sleep(_RETRY_S)

    def _client(self, number: int) -> httpx.AsyncClient:
        client = self._clients.get(number)
        if client is None:
            limits = httpx.Limits(max_connections=None, max_keepalive_connections=KEPT_CONNECTIONS)
            client = self._clients[number] = httpx.AsyncClient(
                transport=httpx.AsyncHTTPTransport(uds=self._socket_path(number), limits=limits),
                timeout=None,
                base_url="http://localhost",
                trust_env=False,
            )
        return client


def _request(scope: Scope, body: bytes) -> httpx.Request:
    """Return the request as another front gets it."""
    headers = [each for each in scope["headers"] if each[0] not in _NOT_PASSED_ON]
    exchange = current_exchange()
    if exchange is not None:
        headers.append((b"x-request-id", exchange.request_id.encode()))
        headers.append((b"x-forwarded-for", exchange.client.rpartition(":")[0].encode()))
    path, query = scope.get("raw_path") or scope["path"].encode(), scope.get("query_string", b"")
    url = httpx.URL("http://localhost", raw_path=path + (b"?" + query if query else b""))
    return httpx.Request(scope["method"], url, headers=headers, content=body)


def _lower(headers: list[tuple[bytes, bytes]]) -> list[tuple[bytes, bytes]]:
    return [(name.lower(), value) for name, value in headers]


async def _no_more() -> Any:
    """Return that the client sends nothing more."""
    return {"type": "http.disconnect"}
