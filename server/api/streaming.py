"""Send answers: as server-sent events, or collected whole. Both end when the client disconnects.

A plain ASGI response replaces Starlette's StreamingResponse for three reasons: an error before the first piece becomes an
HTTP status instead of an event, a disconnect is noticed even while nothing is being sent, and a chunk costs one send.
A stream's task only handles its beginning, its end and slow clients: all other pieces are written to the connection in the
step that brings them (`DirectBody`). Silent streams send comments, because proxies close connections that are silent for a minute.
"""

import asyncio
import contextlib
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from starlette.requests import Request as HttpRequest
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from scheduler.policy.request import FinishReason, Logprobs
from server.api.answer_json import TextEvent, event, metrics_of
from server.api.schemas import StreamOptions
from server.api.served import ServedModel
from server.front.errors import ApiError
from server.front.generations import Answer, ClientGone, Piece, Pieces, Reader
from server.http.errors import ErrorResponse
from server.http.json_writer import json_response, long_json_pieces
from server.http.kept_stream import until_gone
from server.http.retries.idempotency import with_way_on
from server.http.wire.protocol import DIRECT_BODY, DirectBody

DONE = b"data: [DONE]\n\n"
KEEP_ALIVE_S = 15.0  # of silence before each comment; after the first comment, failures are events
_MANY_ENTRIES = 4096  # with more entries, a thread builds the JSON
COMMENT = b": keep-alive\n\n"  # readers of server-sent events ignore it
EVENT_STREAM = b"text/event-stream; charset=utf-8"
STREAM_HEADERS = [
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),  # otherwise nginx buffers the stream
]


class Chunks(Protocol):
    """The events of an endpoint's stream. Each method returns whole events."""

    def piece(self, index: int, piece: Piece) -> bytes:
        """Return the events for a choice's new piece; may be empty."""
        ...

    def end(self) -> bytes:
        """Return the events between the end of the last choice and [DONE]."""
        ...


class JsonChunks:
    """Base of the chunks of /v1/chat/completions and /v1/completions."""

    def __init__(
        self,
        answer: Answer,
        kind: str,
        model_name: str,
        options: StreamOptions | None,
        usage: Callable[[], dict[str, Any]],
        *,
        has_metrics: bool,
    ) -> None:
        """Args: usage returns the token counts; has_metrics adds durations to the last event."""
        self.head = {
            "id": answer.request_id,
            "object": kind,
            "created": int(time.time()),
            "model": model_name,
            "system_fingerprint": None,
        }
        self.has_usage = bool(options and options.include_usage)
        self.has_usage_always = self.has_usage and bool(options and options.continuous_usage_stats)
        self._answer, self._usage, self._has_metrics = answer, usage, has_metrics
        self._text_events: dict[int, TextEvent] = {}

    def chunk(self, choice: dict[str, Any], usage: dict[str, Any] | None) -> dict[str, Any]:
        """Return a chunk; `usage` is the count so far, if the client is to see it."""
        chunk = {**self.head, "choices": [choice]}
        if choice.get("finish_reason") is not None:
            chunk |= self.weights()
        return {**chunk, "usage": usage} if self.has_usage else chunk

    def text_event(self, index: int, text: str, chunk_of: Callable[[str], dict[str, Any]]) -> bytes:
        """Return the event of a chunk in which only the text differs between pieces."""
        if index not in self._text_events:
            self._text_events[index] = TextEvent(chunk_of)
        return self._text_events[index].of(text)

    def end(self) -> bytes:
        """Return the event with the usage, if the client requested it."""
        if not self.has_usage:
            return b""
        return event({**self.head, "choices": [], "usage": self._usage(), **self.weights(), **self.metrics()})

    def weights(self) -> dict[str, Any]:
        """Return the `weight_version` field with the label of the weights that drew the last tokens, if they have one."""
        labels = [generation.weight_version for generation in self._answer.generations]
        label = next((each for each in reversed(labels) if each), "")
        return {"weight_version": label} if label else {}

    def metrics(self) -> dict[str, Any]:
        """Return the `metrics` field with the answer's durations, if the operator enabled it."""
        return {"metrics": metrics_of(self._answer)} if self._has_metrics else {}


class EventStream(Response):
    """Stream an answer while its pieces arrive."""

    content_type = EVENT_STREAM

    def __init__(self, answer: Answer, chunks: Chunks, *, keep_alive_s: float = KEEP_ALIVE_S) -> None:
        super().__init__()
        self._answer = answer
        self._chunks = chunks
        self._keep_alive_s = keep_alive_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the stream. A failure before its first byte becomes a plain error response."""
        leaving = contextlib.suppress(ClientGone, OSError)  # OSError: the connection is broken
        with (
            closing_when_gone(self._answer, receive),
            EventSender(
                send,
                self._keep_alive_s,
                content_type=self.content_type,
                comment=self.comment(),
                direct=scope.get("extensions", {}).get(DIRECT_BODY),
            ) as sender,
            leaving,
        ):
            try:
                pieces = await self._answer.next()
            except ApiError as failure:
                if sender.has_begun:
                    await sender.end(self.failing(with_way_on(failure)))
                else:
                    sender.stop()
                    await ErrorResponse(failure)(scope, receive, send)
                return
            await self._send_all(pieces, sender)

    async def _send_all(self, pieces: Pieces, sender: "EventSender") -> None:
        reader = sender.reader(self._events, self.is_short)
        try:
            while pieces:
                await self.send_pieces(pieces, sender)
                pieces = await self._answer.next(reader)
            last = self.ending()
        except ApiError as failure:
            last = self.failing(with_way_on(failure))
        await sender.end(last)

    async def send_pieces(self, pieces: Pieces, sender: "EventSender") -> None:
        """Send the events of pieces that the stream's task takes."""
        body = self._events(pieces)
        if body:
            await sender.send(body)

    def is_short(self) -> bool:
        """Return whether the events of the next pieces are short. Otherwise, the stream's task takes the pieces."""
        return True

    def _events(self, pieces: Pieces) -> bytes:
        if len(pieces) == 1:  # the usual case
            return self._chunks.piece(*pieces[0])
        return b"".join([self._chunks.piece(index, piece) for index, piece in pieces])

    def comment(self) -> bytes:
        """Return the bytes to send when the stream is silent for long."""
        return COMMENT

    def ending(self) -> bytes:
        """Return the stream's last events."""
        return self._chunks.end() + DONE

    def failing(self, failure: ApiError) -> bytes:
        """Return the events of a failure after the stream has begun."""
        return event(failure.body()) + DONE


class EventSender:
    """Send a stream's events and avoid long silences. The first event begins the response.

    A context manager: within it, comments are sent after `keep_alive_s` without events.
    """

    def __init__(
        self,
        send: Send,
        keep_alive_s: float,
        *,
        content_type: bytes = EVENT_STREAM,
        comment: bytes = COMMENT,
        direct: DirectBody | None = None,
    ) -> None:
        """Args: direct writes without waiting; None if only `send` can."""
        self._send, self._keep_alive_s, self._comment, self._direct = send, keep_alive_s, comment, direct
        self._headers = [(b"content-type", content_type), *STREAM_HEADERS]
        self.has_begun = False
        self._last_sent_s = time.monotonic()
        self._watch: asyncio.Task[None] | None = None
        self._within = asyncio.Lock()  # while an event or a comment is sent in part

    def __enter__(self) -> "EventSender":
        self._watch = asyncio.create_task(self._keep_alive())
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def stop(self) -> None:
        """Stop sending comments. Nothing of the stream may follow."""
        assert self._watch is not None, "stop was called before __enter__"
        self._watch.cancel()

    async def send(self, events: bytes) -> None:
        """Send whole events."""
        await self._begin()
        self._last_sent_s = time.monotonic()
        await self._send({"type": "http.response.body", "body": events, "more_body": True})

    async def send_long(self, pieces: Iterable[bytes]) -> None:
        """Send whole events in pieces, and wait while the connection's buffer is full. Comments wait for the last piece."""
        async with self._within:
            for piece in pieces:
                await self.send(piece)
                await asyncio.sleep(0)  # let other requests run while a client reads quickly

    def reader(self, events_of: Callable[[Pieces], bytes], is_short: Callable[[], bool]) -> Reader | None:
        """Return a reader that writes the events of pieces at once, or None if only `send` can.

        Args: is_short returns whether the events of the next pieces are short enough for that.
        """
        direct = self._direct
        if direct is None:
            return None

        def take(pieces: Pieces) -> None:
            events = events_of(pieces)
            if events:
                self._last_sent_s = time.monotonic()
                direct.write(events)

        return Reader(take, lambda: direct.is_free() and is_short())

    async def end(self, events: bytes) -> None:
        """Send the last events."""
        await self._begin()
        self.stop()
        await self._send({"type": "http.response.body", "body": events, "more_body": False})

    async def _begin(self) -> None:
        if not self.has_begun:
            self.has_begun = True
            await self._send({"type": "http.response.start", "status": 200, "headers": self._headers})

    async def _keep_alive(self) -> None:
        while True:
            left_s = self._last_sent_s + self._keep_alive_s - time.monotonic()
            if left_s > 0:
                await asyncio.sleep(left_s)
            else:
                with contextlib.suppress(OSError):
                    async with self._within:
                        await self.send(self._comment)


@dataclass(slots=True)
class Choice:
    """The collected pieces of a choice."""

    text: list[str] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[Logprobs] = field(default_factory=list)
    last: Piece = field(default_factory=Piece)  # has the finish reason

    @property
    def finish_reason(self) -> FinishReason | None:
        """Why the choice ended, or None if it has not ended."""
        return self.last.finish_reason

    def piece(self) -> Piece:
        """Return the choice as one piece."""
        last = self.last
        return Piece(
            "".join(self.text),
            self.token_ids,
            self.logprobs,
            last.finish_reason,
            last.stop_reason,
            last.matched_stop,
        )


async def collect(answer: Answer, http: HttpRequest) -> list[Choice]:
    """Wait until every choice has ended.

    Raises:
        ApiError: The request failed.
        ClientGone: The client disconnected first.
    """
    choices = [Choice() for _ in answer.generations]

    def take(pieces: Pieces) -> None:
        for index, piece in pieces:
            choice = choices[index]
            choice.text.append(piece.text)
            choice.token_ids += piece.token_ids
            choice.logprobs += piece.logprobs
            choice.last = piece

    with closing_when_gone(answer, http.receive):
        while pieces := await answer.next(Reader(take)):
            take(pieces)
    return choices


def has_many_entries(choices: Sequence[Choice], num_top: int | None) -> bool:
    """Return whether the JSON of an answer's tokens and their top log-probabilities takes milliseconds to make."""
    return sum(len(choice.token_ids) for choice in choices) * (1 + (num_top or 0)) > _MANY_ENTRIES


async def json_answer(make: Callable[[], Any], model: ServedModel, *, is_long: bool) -> Response:
    """Make the JSON of a whole answer. If it is long, a thread makes it, in pieces that do not block the event loop."""
    if not is_long:
        return json_response(make())
    return LongJson(await model.run(lambda: list(long_json_pieces(make())), is_long=True))


class LongJson(Response):
    """A whole answer, sent piece by piece: the connection buffers only one piece."""

    media_type = "application/json"

    def __init__(self, pieces: Sequence[bytes]) -> None:
        super().__init__(headers={"content-length": str(sum(map(len, pieces)))})
        self._pieces = pieces

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the pieces, and wait while the connection's buffer is full."""
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        for piece in self._pieces:
            await send({"type": "http.response.body", "body": piece, "more_body": True})
            await asyncio.sleep(0)  # let other requests run while a client reads quickly
        await send({"type": "http.response.body", "body": b"", "more_body": False})


@contextlib.contextmanager
def closing_when_gone(answer: Answer, receive: Receive) -> Iterator[None]:
    """Close the answer when the client disconnects, and at the end of the block."""
    watch = asyncio.create_task(_close_when_gone(answer, receive))
    try:
        yield
    finally:
        watch.cancel()
        answer.close()


async def _close_when_gone(answer: Answer, receive: Receive) -> None:
    await until_gone(receive)
    answer.close()
