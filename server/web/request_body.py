"""How much of a request is read: its body's bytes and how deep its JSON nests, checked before anybody parses it.

The body is held once, up to the limit, and handed on whole. What is longer is answered 413: at once where its length
was announced and nothing was sent yet (Expect: 100-continue), else after the rest was read and thrown away for a
while, because a server that closes while the client still sends makes it see a broken connection, not the answer.

Depth is bounded here because every later step, down to chat templates and schemas, walks the value recursively.
"""

import asyncio
import time
from typing import NamedTuple

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from server.errors import ApiError, bad_request
from server.openai.streaming import error_response

MAX_JSON_DEPTH = 100  # pydantic gives up at 255, Python at 1,000
_DISCARD_BYTES = 64 << 20  # of what is too long
_DISCARD_S = 5.0
_LONG_BODY = 1 << 18  # bytes; looking through more would hold up the event loop
_BODILESS = ("GET", "HEAD", "OPTIONS")
_NO_BRACKET = bytes(set(range(256)) - set(b'[]{}"'))
_AS_SQUARE = bytes.maketrans(b"{}", b"[]")


class _Read(NamedTuple):
    """A body as far as it was read."""

    body: bytes
    is_too_long: bool
    gone: Message | None  # the client left


class BodyGuard:
    """Reads bodies for the application behind it."""

    def __init__(self, app: ASGIApp, max_bytes: int) -> None:
        self._app, self._max_bytes = app, max_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a body that is short and flat enough, or answer 413 or 400."""
        if scope["type"] != "http" or scope["method"] in _BODILESS:
            await self._app(scope, receive, send)
            return
        headers = dict(scope["headers"])
        if _announced(headers) > self._max_bytes and b"100-continue" in headers.get(b"expect", b"").lower():
            await error_response(self._too_long())(scope, receive, send)
            return
        read = await self._read(receive)
        if read.is_too_long:
            await _discard(receive)
            await error_response(self._too_long())(scope, receive, send)
            return
        if b"json" in headers.get(b"content-type", b"json").lower() and await _nests_too_deep(read.body):
            failure = bad_request(f"The body nests deeper than {MAX_JSON_DEPTH} arrays and objects.")
            await error_response(failure)(scope, receive, send)
            return
        await self._app(scope, _replaying(read, receive), send)

    async def _read(self, receive: Receive) -> _Read:
        chunks: list[bytes] = []
        num_bytes = 0
        while True:
            message = await receive()
            if message["type"] != "http.request":
                return _Read(b"".join(chunks), False, message)
            chunk = message.get("body", b"")
            num_bytes += len(chunk)
            if num_bytes > self._max_bytes:
                return _Read(b"", True, None)
            chunks.append(chunk)
            if not message.get("more_body", False):
                return _Read(b"".join(chunks), False, None)

    def _too_long(self) -> ApiError:
        return ApiError(
            413,
            f"The body is longer than {self._max_bytes} bytes, the most that this server reads "
            "(--max-request-bytes).",
            headers={"Connection": "close"},
        )


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


async def _nests_too_deep(body: bytes) -> bool:
    if body.count(b"[") + body.count(b"{") <= MAX_JSON_DEPTH:
        return False
    if len(body) < _LONG_BODY:
        return json_depth_exceeds(body, MAX_JSON_DEPTH)
    return await asyncio.to_thread(json_depth_exceeds, body, MAX_JSON_DEPTH)


def json_depth_exceeds(body: bytes, depth: int) -> bool:
    """Say whether arrays and objects nest deeper than `depth`; what is not JSON may be judged either way.

    Strings go first, then all but brackets, then the innermost pairs, once per level: every pass is C code over what
    is left, where walking the bytes in Python would take a second per 10 MB. (A regular expression over the strings
    took 5 s for five million of them, and holds the interpreter for as long.)
    """
    plain = body.replace(rb"\\", b"").replace(rb"\"", b"")  # now every quote begins or ends a string
    plain = plain.translate(_AS_SQUARE, _NO_BRACKET).replace(b'""', b"")
    brackets = b"".join(plain.split(b'"')[::2])
    for _ in range(depth):
        if b"[" * (depth + 1) in brackets:
            return True
        brackets, before = brackets.replace(b"[]", b""), len(brackets)
        if len(brackets) == before:
            return False  # nothing left, or unbalanced: the parser will say so
    return b"[]" in brackets


def _replaying(read: _Read, receive: Receive) -> Receive:
    """Return a `receive` that hands out what was read, then goes on."""
    waiting: list[Message] = (
        [] if read.gone else [{"type": "http.request", "body": read.body, "more_body": False}]
    )
    waiting += [read.gone] if read.gone else []

    async def next_message() -> Message:
        return waiting.pop(0) if waiting else await receive()

    return next_message
