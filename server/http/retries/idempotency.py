"""Requests with an `Idempotency-Key`: a retry with the same key and body gets the first answer, which is generated once.

The header is that of draft-ietf-httpapi-idempotency-key-header, and Stripe's. Such an answer is generated independently of
its connection, so that it continues for a while if the connection breaks. A retry meanwhile gets the answer from its
beginning, a stream as a stream; a later retry gets the kept answer. A front that replaces a killed one has the keys
(`kept_answers`), and generates unfinished answers again. They have the same tokens, because the seed of a request without
one is derived from its key. Failed answers are not kept, so a retry runs the request again.

Rejected: a 409 for an early retry, which the draft allows. A client with a broken stream needs the answer, and would
have to poll for it.
"""

import asyncio
import contextlib
import hashlib
import hmac
import logging
from collections.abc import AsyncIterator, Callable
from typing import NamedTuple

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from server.front.errors import ApiError, bad_request
from server.http.bodies import replaying
from server.http.errors import ErrorResponse, route_path
from server.http.exchanges import current_exchange
from server.http.guards import key_of
from server.http.kept_stream import KeptStream
from server.http.retries.kept_answers import MAX_ANSWER_BYTES, KeptAnswers, WholeAnswer
from server.http.wire.protocol import DIRECT_BODY

HEADER = "Idempotency-Key"
_NAME = HEADER.lower().encode()
_REPLAYED = (b"idempotent-replayed", b"true")  # Stripe's
_PATHS = ("/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages")
MAX_KEY_CHARS = 255
_LOG = logging.getLogger("wideep.front")
HOLD_S = 60.0  # time that an answer continues without a reader
MAX_UNREAD = 32  # unread answers of one API key that continue; above it, the oldest ends


class IdempotentAnswers:
    """Answers each request with a key once."""

    def __init__(
        self,
        app: ASGIApp,
        kept: KeptAnswers,
        secret: str,
        *,
        hold_s: float = HOLD_S,
        max_unread: int = MAX_UNREAD,
    ) -> None:
        """Args: secret is the source of seeds, the same for every front of a service."""
        self._app, self._kept, self._secret, self._hold_s = app, kept, secret.encode(), hold_s
        self._max_unread = max_unread
        self._open: dict[str, _Recording] = {}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass on, or answer from the record of the key. Bodies must be whole."""
        is_meant = scope["type"] == "http" and scope["method"] == "POST" and route_path(scope) in _PATHS
        keys = [value for name, value in scope["headers"] if name == _NAME] if is_meant else []
        if not keys:
            await self._app(scope, receive, send)
            return
        taken = await receive()
        if taken["type"] != "http.request":
            return
        try:
            asked = _identify(keys, scope, taken["body"])
            await self._answer(asked, scope, replaying([taken], receive), send)
        except ApiError as failure:
            await ErrorResponse(failure)(scope, receive, send)

    async def _answer(self, asked: "_Asked", scope: Scope, receive: Receive, send: Send) -> None:
        name, fingerprint = asked.name, asked.fingerprint
        recording, is_again = self._open.get(name), True
        # The key may be forgotten while its answer is generated.
        used_for = self._kept.fingerprint_of(name) if recording is None else recording.fingerprint
        if used_for is not None and used_for != fingerprint:
            raise ApiError(
                422,
                f"The {HEADER} was used for another request. Use a new one for each request.",
                param=HEADER,
            )
        whole = self._kept.read(name)
        if whole is not None:
            headers = [*whole.headers, _REPLAYED]
            await send({"type": "http.response.start", "status": 200, "headers": headers})
            await send({"type": "http.response.body", "body": whole.body})
            return
        if recording is None:
            recording, is_again = self._begin(asked, scope, await receive()), False
        await recording.play(receive, send, (_REPLAYED,) if is_again else ())

    def _begin(self, asked: "_Asked", scope: Scope, request: Message) -> "_Recording":
        """Start the application independently of this connection."""
        name, fingerprint = asked.name, asked.fingerprint
        if self._kept.fingerprint_of(name) is None:
            try:
                self._kept.accept(name, fingerprint, asked.owner)
            except OSError as error:
                raise ApiError(
                    503, f"The {HEADER} cannot be kept: {error.strerror}.", param=HEADER
                ) from error
        exchange = current_exchange()
        if exchange is not None:
            drawn = hmac.digest(self._secret, f"{name} {fingerprint}".encode(), "sha256")
            exchange.seed = int.from_bytes(drawn[:8])
        recording = self._open[name] = _Recording(
            request,
            self._hold_s,
            asked.owner,
            fingerprint,
            on_too_long=lambda: self._drop(name),
            on_unread=self._bound_unread,
        )
        scope.get("extensions", {}).pop(DIRECT_BODY, None)  # the recording keeps the body
        recording.making = asyncio.create_task(self._make(name, recording, scope))
        return recording

    async def _make(self, name: str, recording: "_Recording", scope: Scope) -> None:
        try:
            await self._app(scope, recording.receive, recording.send)
        except Exception as error:  # noqa: BLE001 - it is raised to the readers
            recording.end(error)
        else:
            recording.end(None)
        if self._open.get(name) is not recording:  # it was dropped as too long
            return
        del self._open[name]
        exchange = current_exchange()
        whole = recording.whole
        if whole is None or (exchange is not None and exchange.failure):
            self._kept.forget(name)
        else:
            try:
                self._kept.finish(name, whole)
            except OSError as error:
                _LOG.error("cannot keep an answer for retries: %s", error)

    def _drop(self, name: str) -> None:
        """Forget an answer that is too long to be sent again. Present readers continue."""
        if self._open.pop(name, None) is not None:
            self._kept.forget(name)

    def _bound_unread(self, owner: str) -> None:
        """If an owner has too many unread answers, end those that have been unread for longest."""
        unread = [
            each for each in self._open.values() if each.owner == owner and each.unread_since_s is not None
        ]
        unread.sort(key=lambda each: each.unread_since_s or 0.0)
        for recording in unread[: max(0, len(unread) - self._max_unread)]:
            recording.give_up()


class _Asked(NamedTuple):
    """The identity of a request with a key."""

    name: str  # of the key, unique to its sender
    fingerprint: str  # of the request
    owner: str  # of the API key


def _identify(keys: list[bytes], scope: Scope, body: bytes) -> _Asked:
    """Return the key's name, the request's fingerprint and the owner.

    Raises:
        ApiError: The key is malformed.
    """
    key = keys[0].strip()
    if len(keys) > 1 or not 0 < len(key) <= MAX_KEY_CHARS or not all(0x20 <= char < 0x7F for char in key):
        raise bad_request(
            f"Send the header {HEADER} once, with 1 to {MAX_KEY_CHARS} printable ASCII characters.",
            HEADER,
        )
    exchange = current_exchange()
    sender = hashlib.sha256(key_of(scope)).digest()
    request = hashlib.sha256(route_path(scope).encode() + b"\n" + body)
    return _Asked(
        hashlib.sha256(sender + key).hexdigest(),
        request.hexdigest(),
        "" if exchange is None else exchange.owner,
    )


def with_way_on(failure: ApiError) -> ApiError:
    """Add to the error of a stream that was cut off how the client can get the whole answer."""
    if failure.status not in (500, 503):
        return failure
    exchange = current_exchange()
    key = None if exchange is None else exchange.headers.get(_NAME)
    way = (
        f"Send the request again with an {HEADER} to be able to retry it."
        if key is None
        else f"Send the request again with the same {HEADER}, {key.decode('latin-1')}, for the whole answer."
    )
    message = f"{failure.message} {way}"
    return ApiError(failure.status, message, param=failure.param, headers=failure.headers)


class _Recording:
    """An answer in progress. To the application it acts as the connection."""

    def __init__(
        self,
        request: Message,
        hold_s: float,
        owner: str,
        fingerprint: str,
        *,
        on_too_long: Callable[[], None],
        on_unread: Callable[[str], None],
    ) -> None:
        """Args: on_unread is called with the owner when the last reader leaves before the end."""
        self.making: asyncio.Task[None] | None = None
        self.owner, self.fingerprint = owner, fingerprint
        self.unread_since_s: float | None = None  # by the event loop's clock; None if it is read, or ends
        self._request: Message | None = request
        self._hold_s, self._on_too_long, self._on_unread = hold_s, on_too_long, on_unread
        self._head: Message = {}
        self._body = KeptStream()
        self._is_whole = False  # it has its last chunk
        self._failure: Exception | None = None
        self._given_up = asyncio.Event()
        self._timer: asyncio.TimerHandle | None = None

    @property
    def whole(self) -> WholeAnswer | None:
        """The answer to keep, or None if it is incomplete or not a success."""
        if not self._is_whole or self._head.get("status") != 200:
            return None
        return WholeAnswer(list(self._head.get("headers", ())), self._body.content)

    async def receive(self) -> Message:
        """Return the request to the application, and later a disconnect when no reader is left."""
        request, self._request = self._request, None
        if request is not None:
            return request
        await self._given_up.wait()
        return {"type": "http.disconnect"}

    async def send(self, message: Message) -> None:
        """Add a message from the application. If the answer gets too long, wait for its readers and drop its beginning."""
        if message["type"] == "http.response.start":
            self._head = message
            return
        self._is_whole = not message.get("more_body", False)
        self._body.add(message.get("body", b""))
        if self._body.num_bytes > MAX_ANSWER_BYTES and not self._is_whole:
            self._on_too_long()
            self._hold_s = 0.0  # a returning client could not get its beginning
            if not self._body.is_read:
                self.give_up()
            await self._body.drop_when_read()

    def end(self, failure: Exception | None) -> None:
        """Record that the application has returned."""
        self._failure = failure
        self._body.end()

    async def play(self, receive: Receive, send: Send, headers: tuple[tuple[bytes, bytes], ...]) -> None:
        """Send the answer from its beginning, until it ends or the client leaves."""
        self.unread_since_s = None
        if self._timer is not None:
            self._timer.cancel()
        try:
            async with contextlib.aclosing(self._body.follow(receive)) as chunks:
                await self._play(chunks, send, headers)
        except OSError:  # the connection is broken
            return
        finally:
            if not self._body.is_read and not self._body.has_ended:
                self._hold()

    async def _play(
        self, chunks: AsyncIterator[bytes], send: Send, headers: tuple[tuple[bytes, bytes], ...]
    ) -> None:
        has_begun = False
        async for body in chunks:
            is_last = self._is_whole
            if not has_begun:
                has_begun = True
                await send({**self._head, "headers": [*self._head.get("headers", ()), *headers]})
            await send({"type": "http.response.body", "body": body, "more_body": not is_last})
            if is_last:
                return
        if self._failure is not None:
            raise self._failure

    def _hold(self) -> None:
        """Continue for a while without a reader."""
        loop = asyncio.get_running_loop()
        self._timer = loop.call_later(self._hold_s, self.give_up)
        self.unread_since_s = loop.time()
        self._on_unread(self.owner)

    def give_up(self) -> None:
        """Signal a disconnect to the application, so that it ends."""
        self.unread_since_s = None
        self._given_up.set()
