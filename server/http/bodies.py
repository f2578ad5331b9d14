"""How much of a request is read, and for how long: its body's bytes, and how deep and wide its JSON nests.

The body is held once, up to the limit, and handed on whole. What is longer is answered 413: at once where its length
was announced and nothing was sent yet (Expect: 100-continue), else after the rest was read and thrown away for a
while, because a server that closes while the client still sends makes it see a broken connection, not the answer.
What comes more slowly than LEAST_BYTES_PER_S, after a grace, is answered 408.

Depth is bounded here because every later step, down to chat templates and schemas, walks the value recursively, and
the number of arrays and objects because each costs a Python object and its parsing happens in the event loop. Both are
told without parsing. Escapes go first, then all but quotes and brackets; of those, numpy adds up, a megabyte at a time,
what is outside strings. That takes a third of a second for 16 MB, mostly without the interpreter's lock. Rejected: walking
the bytes in Python (a second per 10 MB), taking out innermost pairs level by level (5 s for 16 MB that nest 99 deep), and a
regular expression over the strings (5 s for five million of them, with the lock held).
"""

import asyncio
import json
import time
from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from server.errors import ApiError, bad_request
from server.http.errors import OLLAMA_PATH, ErrorResponse, route_path

MAX_JSON_DEPTH = 100  # pydantic gives up at 255, Python at 1,000
MAX_JSON_VALUES = 2_000_000  # 128 prompts of 15,000 token ids; parsing holds the interpreter's lock
MAX_JSON_NODES = 250_000  # arrays and objects; 10,000 messages with parts and calls are 60,000
GRACE_S = 30.0  # for a body, however slowly it comes
LEAST_BYTES_PER_S = 16 << 10  # after that
_DISCARD_BYTES = 64 << 20  # of what is too long
_DISCARD_S = 5.0
_LONG_BODY = 1 << 18  # bytes; looking through more would hold up the event loop
TOO_LONG, TOO_SLOW = 413, 408  # statuses
_BODILESS = ("GET", "HEAD", "OPTIONS")


_NO_MARK = bytes(set(range(256)) - set(b'[]{}",'))
_CHUNK = 1 << 20  # marks looked through at once
_STEPS = np.zeros(256, np.int8)  # a byte -> how much deeper it leads
_STEPS[list(b"[{")], _STEPS[list(b"]}")] = 1, -1


class JsonShape(NamedTuple):
    """How a JSON text nests."""

    depth: int  # of arrays and objects
    num_nodes: int  # arrays and objects
    num_commas: int  # outside strings: a value each


def json_shape(body: bytes) -> JsonShape:
    """Measure how a JSON text nests; of what is not JSON any shape may be told."""
    encoding = json.detect_encoding(body)  # the parser's own guess: it takes UTF-16, too
    if not encoding.startswith("utf-8"):
        body = body.decode(encoding, "replace").encode()
    plain = body.replace(rb"\\", b"").replace(rb"\"", b"")  # now every quote begins or ends a string
    marks = np.frombuffer(plain.translate(None, _NO_MARK), np.uint8)
    depth = level = num_quotes = num_nodes = num_commas = 0
    for start in range(0, len(marks), _CHUNK):
        chunk = marks[start : start + _CHUNK]
        quotes = np.cumsum(chunk == ord('"'), dtype=np.int64) + num_quotes
        steps = np.where(quotes & 1, np.int8(0), _STEPS[chunk])
        levels = np.cumsum(steps, dtype=np.int64) + level
        depth = max(depth, int(levels.max()))
        num_nodes += int(np.count_nonzero(steps > 0))
        num_commas += int(np.count_nonzero((chunk == ord(",")) & ((quotes & 1) == 0)))
        num_quotes, level = int(quotes[-1]), int(levels[-1])
    return JsonShape(depth, num_nodes, num_commas)


class _Read(NamedTuple):
    """A body as far as it was read."""

    body: bytes = b""
    failure: ApiError | None = None  # it was too long, or came too slowly
    gone: Message | None = None  # the client left


class BodyGuard:
    """Reads bodies for the application behind it."""

    def __init__(self, app: ASGIApp, max_bytes: int, *, grace_s: float = GRACE_S) -> None:
        self._app, self._max_bytes, self._grace_s = app, max_bytes, grace_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a body that is short, quick and flat enough, or answer 413, 408 or 400."""
        if scope["type"] != "http" or scope["method"] in _BODILESS:
            await self._app(scope, receive, send)
            return
        headers = dict(scope["headers"])
        if _announced(headers) > self._max_bytes and b"100-continue" in headers.get(b"expect", b"").lower():
            await ErrorResponse(self._too_long())(scope, receive, send)
            return
        read = await self._read(receive)
        failure = read.failure
        if failure is not None and failure.status == TOO_LONG:
            await _discard(receive)
        elif failure is None and _may_be_json(scope):
            is_long = len(read.body) >= _LONG_BODY
            look = trouble_with_nesting
            failure = await asyncio.to_thread(look, read.body) if is_long else look(read.body)
        if failure is not None:
            await ErrorResponse(failure)(scope, receive, send)
            return
        whole = {"type": "http.request", "body": read.body, "more_body": False}
        await self._app(scope, replaying([read.gone or whole], receive), send)

    async def _read(self, receive: Receive) -> _Read:
        until_s = asyncio.get_running_loop().time() + self._grace_s
        try:
            async with asyncio.timeout_at(until_s) as limit:
                return await self._read_within(limit, until_s, receive)
        except TimeoutError:
            return _Read(failure=_too_slow(self._grace_s))

    async def _read_within(self, limit: asyncio.Timeout, until_s: float, receive: Receive) -> _Read:
        """Read to the end; what has come moves the limit."""
        chunks: list[bytes] = []
        num_bytes = 0
        while True:
            message = await receive()
            if message["type"] != "http.request":
                return _Read(b"".join(chunks), gone=message)
            chunk = message.get("body", b"")
            num_bytes += len(chunk)
            if num_bytes > self._max_bytes:
                return _Read(failure=self._too_long())
            chunks.append(chunk)
            if not message.get("more_body", False):
                return _Read(b"".join(chunks))
            limit.reschedule(until_s + num_bytes / LEAST_BYTES_PER_S)

    def _too_long(self) -> ApiError:
        return ApiError(
            TOO_LONG,
            f"The body is longer than {self._max_bytes} bytes, the most that this server reads "
            "(--max-request-bytes).",
            headers={"Connection": "close"},
        )


def _too_slow(grace_s: float) -> ApiError:
    return ApiError(
        TOO_SLOW,
        f"The body did not arrive in time: this server waits {grace_s:g} s, and one more for every "
        f"{LEAST_BYTES_PER_S} bytes.",
        headers={"Connection": "close"},
    )


def _may_be_json(scope: Scope) -> bool:
    """Whether a body may be parsed as JSON: by any of its types, if there are several, or because there is none.

    Ollama's routes read JSON whatever its type.
    """
    if route_path(scope).startswith(OLLAMA_PATH):
        return True
    kinds = [value for name, value in scope["headers"] if name == b"content-type"]
    return not kinds or any(b"json" in kind.lower() for kind in kinds)


def _announced(headers: dict[bytes, bytes]) -> int:
    length = headers.get(b"content-length", b"")
    return int(length) if length.isdigit() else 0


async def _discard(receive: Receive) -> None:
    """Read on and forget it, for a bounded time and amount."""
    num_bytes, until_s = 0, time.monotonic() + _DISCARD_S
    while num_bytes < _DISCARD_BYTES and (left_s := until_s - time.monotonic()) > 0:
        try:
            message = await asyncio.wait_for(receive(), left_s)
        except TimeoutError:
            return
        num_bytes += len(message.get("body", b""))
        if not message.get("more_body", False):
            return


def trouble_with_nesting(body: bytes) -> ApiError | None:
    """Return what is wrong with a body's arrays and objects, if anything is."""
    if body.count(b"[") + body.count(b"{") <= MAX_JSON_DEPTH and body.count(b",") <= MAX_JSON_VALUES:
        return None
    shape = json_shape(body)
    if shape.depth > MAX_JSON_DEPTH:
        return bad_request(f"The body nests deeper than {MAX_JSON_DEPTH} arrays and objects.")
    if shape.num_nodes > MAX_JSON_NODES:
        return bad_request(
            f"The body has {shape.num_nodes} arrays and objects; up to {MAX_JSON_NODES} are taken at once."
        )
    if shape.num_commas > MAX_JSON_VALUES:
        return bad_request(
            f"The body has {shape.num_commas} values and more; up to {MAX_JSON_VALUES} are taken at once."
        )
    return None


def replaying(taken: Sequence[Message], receive: Receive) -> Receive:
    """Return a `receive` that hands out what was taken, then goes on."""
    waiting = deque(taken)

    async def next_message() -> Message:
        return waiting.popleft() if waiting else await receive()

    return next_message
