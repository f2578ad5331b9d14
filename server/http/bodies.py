"""Limits on the size, the time and the total memory of request bodies.

The body is held once, up to the limit, and passed on whole; JSON is passed on parsed as well (`json_text`). A longer
body gets 413: at once if its length was announced and nothing was sent yet (Expect: 100-continue), otherwise after reading and
discarding the rest for a while. A server that closes while the client still sends makes the client see a broken
connection instead of the answer. A body that arrives at less than LEAST_BYTES_PER_S, after a grace period, gets 408.

`BodyBudget` limits all bodies together. The first SMALL_BODY bytes of each are free, so that small requests never wait
for large ones. A body counts from its first bytes until the application has read it. If another body does not fit,
bodies slower than PRESSED_BYTES_PER_S end with a 408 to make room; if that is not enough, the new one gets 503.
Rejected: counting announced lengths, because a few heads without bodies would fill the budget for half a minute.
"""

import asyncio
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from server.front.errors import ApiError
from server.http.errors import OLLAMA_PATH, ErrorResponse, route_path
from server.http.json_text import PARSED, PIECE_BYTES, parse_json, trouble_with_nesting

GRACE_S = 30.0  # for a body at any rate
LEAST_BYTES_PER_S = 64 << 10  # after the grace period: 32 MB have 9 minutes
SMALL_BODY = 64 << 10  # bytes of each body that do not count
PRESSED_BYTES_PER_S = 1 << 20  # slower bodies end if others do not fit
_PRESSED_GRACE_S = 2.0
_MAX_PARSED_AT_ONCE = 2  # long bodies; more threads would only compete with the event loop for the GIL
_DISCARD_BYTES = 64 << 20  # of a body that is too long
_DISCARD_S = 5.0
TOO_LONG, TOO_SLOW, NO_ROOM = 413, 408, 503  # statuses
_BODILESS = ("GET", "HEAD", "OPTIONS")
_BODILESS_PATHS = ("/ping",)  # POSTs without a key (`guards`); a body is not read
_NOTHING: Message = {"type": "http.request", "body": b"", "more_body": False}


class _Read(NamedTuple):
    """The result of reading a body."""

    body: bytes = b""
    failure: ApiError | None = None  # it was too long, too slow, or did not fit
    gone: Message | None = None  # set if the client left


@dataclass(eq=False, slots=True)
class _Share:
    """One body's part of the budget."""

    begun_s: float
    limit: asyncio.Timeout | None = None  # for reading it; None if it is whole
    num_bytes: int = 0  # received
    num_charged: int = 0
    is_pressed: bool = False  # it is being ended to make room

    def bytes_per_s(self, now_s: float) -> float:
        """Return its average rate."""
        return self.num_bytes / max(now_s - self.begun_s, 1e-6)


class BodyBudget:
    """The budget for all bodies that are in memory at once."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._shares: set[_Share] = set()
        self.num_bytes = 0  # charged

    def open(self, now_s: float) -> _Share:
        """Register a body."""
        share = _Share(now_s)
        self._shares.add(share)
        return share

    def charge(self, share: _Share, num_bytes: int, now_s: float) -> bool:
        """Count received bytes; return whether they fit."""
        share.num_bytes += num_bytes
        more = max(0, share.num_bytes - SMALL_BODY) - share.num_charged
        if not self.has_room(more, now_s, besides=share):
            return False
        share.num_charged += more
        self.num_bytes += more
        return True

    def has_room(self, num_bytes: int, now_s: float, *, besides: _Share | None = None) -> bool:
        """Return whether `num_bytes` fit, after ending slow bodies to make room."""
        if self.num_bytes + num_bytes > self._max_bytes:
            self._press(num_bytes, now_s, besides)
        return self.num_bytes + num_bytes <= self._max_bytes

    def close(self, share: _Share) -> None:
        """Remove a body. May be called again."""
        self._shares.discard(share)
        self.num_bytes -= share.num_charged
        share.num_charged, share.limit = 0, None

    def _press(self, num_bytes: int, now_s: float, besides: _Share | None) -> None:
        """End slow bodies, the slowest first, until there is room."""
        slow = [
            (rate, share)
            for share in self._shares
            if share is not besides
            and share.limit is not None
            and not share.limit.expired()
            and share.num_charged
            and now_s - share.begun_s > _PRESSED_GRACE_S
            and (rate := share.bytes_per_s(now_s)) < PRESSED_BYTES_PER_S
        ]
        for _, share in sorted(slow, key=lambda each: each[0]):
            if self.num_bytes + num_bytes <= self._max_bytes:
                return
            assert share.limit is not None, "only bodies that are being read were selected"
            share.is_pressed = True
            share.limit.reschedule(now_s)
            self.close(share)


class BodyGuard:
    """Reads bodies for the inner application."""

    def __init__(
        self, app: ASGIApp, max_bytes: int, budget: BodyBudget | None = None, *, grace_s: float = GRACE_S
    ) -> None:
        """Args: budget limits all bodies together; by default it holds eight of the longest."""
        self._app, self._max_bytes, self._grace_s = app, max_bytes, grace_s
        self._budget = budget or BodyBudget(8 * max_bytes)
        self._parsing = asyncio.Semaphore(_MAX_PARSED_AT_ONCE)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass on an acceptable body, or answer 413, 408, 503 or 400."""
        if scope["type"] != "http" or scope["method"] in _BODILESS:
            await self._app(scope, receive, send)
            return
        if route_path(scope) in _BODILESS_PATHS:
            await self._app(scope, replaying([_NOTHING], receive), send)
            return
        headers = dict(scope["headers"])
        failure = self._refusal(_announced(headers))
        if failure is not None and b"100-continue" in headers.get(b"expect", b"").lower():
            await ErrorResponse(failure)(scope, receive, send)
            return
        share = self._budget.open(_now_s())
        try:
            await self._read_and_pass(failure, share, scope, receive, send)
        finally:
            self._budget.close(share)

    async def _read_and_pass(
        self, failure: ApiError | None, share: _Share, scope: Scope, receive: Receive, send: Send
    ) -> None:
        read = _Read(failure=failure) if failure is not None else await self._read(share, receive)
        failure = read.failure
        if failure is not None and failure.status != TOO_SLOW:
            self._budget.close(share)
            await _discard(receive)
        message: Message = read.gone or {"type": "http.request", "body": read.body, "more_body": False}
        if failure is None and read.body and _may_be_json(scope):
            failure = await self._parse(read.body, message)
        if failure is not None:
            await ErrorResponse(failure)(scope, receive, send)
            return
        handing_over = self._handing_over(message, share, receive)
        del read, message  # an answer takes long, so free the request's text
        await self._app(scope, handing_over, send)

    def _refusal(self, announced: int) -> ApiError | None:
        """Return the error for a body with this announced length, or None if it may be sent."""
        if announced > self._max_bytes:
            return self._too_long()
        num_bytes = max(0, announced - SMALL_BODY)
        return None if self._budget.has_room(num_bytes, _now_s()) else _no_room()

    def _handing_over(self, message: Message, share: _Share, receive: Receive) -> Receive:
        """Return a `receive` that yields the body once. The next call means that it was read, so it no longer counts."""
        waiting = [message]

        async def next_message() -> Message:
            if waiting:
                return waiting.pop()
            self._budget.close(share)
            return await receive()

        return next_message

    async def _parse(self, body: bytes, message: Message) -> ApiError | None:
        """Add the parsed value to the message, or return the error. Long bodies are parsed in a thread."""

        def parse() -> ApiError | None:
            failure = trouble_with_nesting(body)
            if failure is None and len(body) > PIECE_BYTES:
                try:
                    message[PARSED] = parse_json(body)
                except ApiError as error:
                    failure = error
            return failure

        if len(body) <= PIECE_BYTES:
            return parse()
        async with self._parsing:
            return await asyncio.to_thread(parse)

    async def _read(self, share: _Share, receive: Receive) -> _Read:
        until_s = asyncio.get_running_loop().time() + self._grace_s
        try:
            async with asyncio.timeout_at(until_s) as limit:
                share.limit = limit
                return await self._read_within(limit, until_s, share, receive)
        except TimeoutError:
            return _Read(failure=_pressed() if share.is_pressed else _too_slow(self._grace_s))
        finally:
            share.limit = None

    async def _read_within(
        self, limit: asyncio.Timeout, until_s: float, share: _Share, receive: Receive
    ) -> _Read:
        """Read the body to its end, and extend the time limit with each received chunk."""
        chunks: list[bytes] = []
        while True:
            message = await receive()
            if message["type"] != "http.request":
                return _Read(gone=message)
            chunk = message.get("body", b"")
            if share.num_bytes + len(chunk) > self._max_bytes:
                return _Read(failure=self._too_long())
            if not share.is_pressed and not self._budget.charge(share, len(chunk), _now_s()):
                return _Read(failure=_no_room())
            chunks.append(chunk)
            if not message.get("more_body", False):
                return _Read(b"".join(chunks))
            if not share.is_pressed:
                limit.reschedule(until_s + share.num_bytes / LEAST_BYTES_PER_S)

    def _too_long(self) -> ApiError:
        return ApiError(
            TOO_LONG,
            f"The body is longer than {self._max_bytes} bytes, the limit of this server "
            "(--max-request-bytes).",
            headers={"Connection": "close"},
        )


def _too_slow(grace_s: float) -> ApiError:
    return ApiError(
        TOO_SLOW,
        f"The body did not arrive in time: this server allows {grace_s:g} s, and another second for every "
        f"{LEAST_BYTES_PER_S} bytes.",
        headers={"Connection": "close"},
    )


def _pressed() -> ApiError:
    return ApiError(
        TOO_SLOW,
        f"The body arrived more slowly than {PRESSED_BYTES_PER_S} bytes per second while other requests needed its memory "
        "(--max-inflight-request-bytes). Try again.",
        headers={"Connection": "close", "Retry-After": "5"},
    )


def _no_room() -> ApiError:
    return ApiError(
        NO_ROOM,
        "Other requests' bodies leave no room for this one (--max-inflight-request-bytes). Try again "
        f"soon. Bodies of up to {SMALL_BODY} bytes are always accepted.",
        headers={"Connection": "close", "Retry-After": "1"},
    )


def _now_s() -> float:
    return asyncio.get_running_loop().time()


def _may_be_json(scope: Scope) -> bool:
    """Return whether a body may be JSON: it has no Content-Type, or any of its types is JSON.

    Ollama's routes read JSON regardless of the type.
    """
    if route_path(scope).startswith(OLLAMA_PATH):
        return True
    kinds = [value for name, value in scope["headers"] if name == b"content-type"]
    return not kinds or any(b"json" in kind.lower() for kind in kinds)


def _announced(headers: dict[bytes, bytes]) -> int:
    length = headers.get(b"content-length", b"")
    return int(length) if length.isdigit() else 0


async def _discard(receive: Receive) -> None:
    """Read and discard messages, for a bounded time and amount."""
    num_bytes, until_s = 0, time.monotonic() + _DISCARD_S
    while num_bytes < _DISCARD_BYTES and (left_s := until_s - time.monotonic()) > 0:
        try:
            message = await asyncio.wait_for(receive(), left_s)
        except TimeoutError:
            return
        num_bytes += len(message.get("body", b""))
        if not message.get("more_body", False):
            return


def replaying(taken: Sequence[Message], receive: Receive) -> Receive:
    """Return a `receive` that first yields the messages in `taken`."""
    waiting = deque(taken)

    async def next_message() -> Message:
        return waiting.popleft() if waiting else await receive()

    return next_message
