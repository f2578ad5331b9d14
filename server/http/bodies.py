"""How much of requests is read, and for how long: one body's bytes and time, and the sum of all that are read at once.

The body is held once, up to the limit, and handed on whole; JSON is handed on parsed as well (`json_text`). What is longer is
answered 413: at once if its length was announced and nothing was sent yet (Expect: 100-continue), otherwise after the rest was
read and thrown away for a while, because a server that closes while the client still sends makes it see a broken connection,
not the answer. What comes more slowly than LEAST_BYTES_PER_S, after a grace, is answered 408.

All bodies together have a bound (`BodyBudget`). The first SMALL_BODY bytes of each are free, so that small requests never wait
for large ones. A body counts from its first bytes until the application has read it. If another one does not fit,
those that come more slowly than PRESSED_BYTES_PER_S end with a 408 to make room; if that is not enough, the new one is a 503.
Rejected: counting what a client announces, which lets a few heads without bodies fill the bound for half a minute.
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

GRACE_S = 30.0  # for a body, however slowly it comes
LEAST_BYTES_PER_S = 64 << 10  # after that: 32 MB have 9 minutes
SMALL_BODY = 64 << 10  # bytes of each that do not count
PRESSED_BYTES_PER_S = 1 << 20  # of bodies that may stay while others do not fit
_PRESSED_GRACE_S = 2.0
_MAX_PARSED_AT_ONCE = 2  # long ones; more threads only keep the event loop from the interpreter's lock
_DISCARD_BYTES = 64 << 20  # of what is too long
_DISCARD_S = 5.0
TOO_LONG, TOO_SLOW, NO_ROOM = 413, 408, 503  # statuses
_BODILESS = ("GET", "HEAD", "OPTIONS")
_BODILESS_PATHS = ("/ping",)  # POSTs that need no key (`guards`) and take no body: what comes is not read
_NOTHING: Message = {"type": "http.request", "body": b"", "more_body": False}


class _Read(NamedTuple):
    """A body as far as it was read."""

    body: bytes = b""
    failure: ApiError | None = None  # it was too long, came too slowly, or did not fit
    gone: Message | None = None  # the client left


@dataclass(eq=False, slots=True)
class _Share:
    """What one body takes of the budget."""

    begun_s: float
    limit: asyncio.Timeout | None = None  # of reading it; None: it is whole
    num_bytes: int = 0  # that have come
    num_charged: int = 0
    is_pressed: bool = False  # it ends because others need its room

    def bytes_per_s(self, now_s: float) -> float:
        """Return how fast it comes."""
        return self.num_bytes / max(now_s - self.begun_s, 1e-6)


class BodyBudget:
    """Bytes of all bodies that are in memory at once."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._shares: set[_Share] = set()
        self.num_bytes = 0  # charged

    def open(self, now_s: float) -> _Share:
        """Begin a body."""
        share = _Share(now_s)
        self._shares.add(share)
        return share

    def charge(self, share: _Share, num_bytes: int, now_s: float) -> bool:
        """Count bytes that have come; returns whether they fit."""
        share.num_bytes += num_bytes
        more = max(0, share.num_bytes - SMALL_BODY) - share.num_charged
        if not self.has_room(more, now_s, besides=share):
            return False
        share.num_charged += more
        self.num_bytes += more
        return True

    def has_room(self, num_bytes: int, now_s: float, *, besides: _Share | None = None) -> bool:
        """Tell whether so many bytes fit, after slow bodies were ended to make room."""
        if self.num_bytes + num_bytes > self._max_bytes:
            self._press(num_bytes, now_s, besides)
        return self.num_bytes + num_bytes <= self._max_bytes

    def close(self, share: _Share) -> None:
        """Forget a body. May be called again."""
        self._shares.discard(share)
        self.num_bytes -= share.num_charged
        share.num_charged, share.limit = 0, None

    def _press(self, num_bytes: int, now_s: float, besides: _Share | None) -> None:
        """End bodies that come slowly, the slowest first, until there is room."""
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
            assert share.limit is not None, "only those that are being read were taken"
            share.is_pressed = True
            share.limit.reschedule(now_s)
            self.close(share)


class BodyGuard:
    """Reads bodies for the application behind it."""

    def __init__(
        self, app: ASGIApp, max_bytes: int, budget: BodyBudget | None = None, *, grace_s: float = GRACE_S
    ) -> None:
        """Args: budget bounds all bodies together; None is eight of the longest."""
        self._app, self._max_bytes, self._grace_s = app, max_bytes, grace_s
        self._budget = budget or BodyBudget(8 * max_bytes)
        self._parsing = asyncio.Semaphore(_MAX_PARSED_AT_ONCE)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a body that is short, quick and flat enough and fits, or answer 413, 408, 503 or 400."""
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
        del read, message  # an answer takes long, and its request's text need not be kept meanwhile
        await self._app(scope, handing_over, send)

    def _refusal(self, announced: int) -> ApiError | None:
        """Return the error for a body by its announced length, None if it may come."""
        if announced > self._max_bytes:
            return self._too_long()
        num_bytes = max(0, announced - SMALL_BODY)
        return None if self._budget.has_room(num_bytes, _now_s()) else _no_room()

    def _handing_over(self, message: Message, share: _Share, receive: Receive) -> Receive:
        """Return a `receive` that hands out the body once. Who asks for more has read it, and it does not count any more."""
        waiting = [message]

        async def next_message() -> Message:
            if waiting:
                return waiting.pop()
            self._budget.close(share)
            return await receive()

        return next_message

    async def _parse(self, body: bytes, message: Message) -> ApiError | None:
        """Add the value to the message, or return the error; long bodies are parsed next to the event loop."""

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
        """Read to the end; what has come moves the limit."""
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


def _pressed() -> ApiError:
    return ApiError(
        TOO_SLOW,
        f"The body came more slowly than {PRESSED_BYTES_PER_S} bytes a second while other requests needed its room in memory "
        "(--max-inflight-request-bytes); try again.",
        headers={"Connection": "close", "Retry-After": "5"},
    )


def _no_room() -> ApiError:
    return ApiError(
        NO_ROOM,
        "The bodies of the requests that are being read leave no room for this one (--max-inflight-request-bytes); try again "
        f"soon. Bodies of up to {SMALL_BODY} bytes are always taken.",
        headers={"Connection": "close", "Retry-After": "1"},
    )


def _now_s() -> float:
    return asyncio.get_running_loop().time()


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


def replaying(taken: Sequence[Message], receive: Receive) -> Receive:
    """Return a `receive` that hands out what was taken, then goes on."""
    waiting = deque(taken)

    async def next_message() -> Message:
        return waiting.popleft() if waiting else await receive()

    return next_message
