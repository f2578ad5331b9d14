"""Answers on their way out: server-sent events, or collected whole; either ends when the client leaves.

A plain ASGI response instead of Starlette's StreamingResponse, for three reasons: an error before the first piece is
a status and not an event, a client that leaves is noticed while nothing is being sent, and a chunk costs one send.
Where nothing is to be sent for long, a comment is: proxies close connections that are silent for a minute.
"""

import asyncio
import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, Response
from starlette.types import Receive, Scope, Send

from scheduler.policy.request import FinishReason, Logprobs
from server.api.answer_json import TextEvent, event, metrics_of
from server.api.schemas import StreamOptions
from server.api.served import ServedModel
from server.errors import ApiError
from server.front.generations import Answer, ClientGone, Piece
from server.http.errors import ErrorResponse
from server.http.idempotency import with_way_on
from server.http.json_parts import encoded_pieces

DONE = b"data: [DONE]\n\n"
KEEP_ALIVE_S = 15.0  # of silence, before the first piece too: from then on a failure is an event
_MANY_ENTRIES = 4096  # the JSON of more is made beside the event loop
COMMENT = b": keep-alive\n\n"  # which every reader of server-sent events passes over
EVENT_STREAM = b"text/event-stream; charset=utf-8"
STREAM_HEADERS = [
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),  # nginx would hold the stream back
]


class Chunks(Protocol):
    """An endpoint's stream; each result is one or more whole events."""

    def piece(self, index: int, piece: Piece) -> bytes:
        """Return the events of what a choice gained; may be empty."""
        ...

    def end(self) -> bytes:
        """Return what comes after the last choice ended, before [DONE]."""
        ...


class JsonChunks:
    """What the chunks of /v1/chat/completions and /v1/completions have in common."""

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
        """Args: usage counts what was generated, at the end; has_metrics adds how long it took."""
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
        """Return a chunk; `usage` is what the client is shown of it so far."""
        chunk = {**self.head, "choices": [choice]}
        return {**chunk, "usage": usage} if self.has_usage else chunk

    def text_event(self, index: int, text: str, chunk_of: Callable[[str], dict[str, Any]]) -> bytes:
        """Return the event of a chunk in which nothing but the text changes from piece to piece."""
        if index not in self._text_events:
            self._text_events[index] = TextEvent(chunk_of)
        return self._text_events[index].of(text)

    def end(self) -> bytes:
        """Return the event with the usage, if asked for."""
        if not self.has_usage:
            return b""
        return event({**self.head, "choices": [], "usage": self._usage(), **self.metrics()})

    def metrics(self) -> dict[str, Any]:
        """Return the field that tells how long the answer took, where the operator wants it."""
        return {"metrics": metrics_of(self._answer)} if self._has_metrics else {}


class EventStream(Response):
    """Streams an answer as its pieces come."""

    content_type = EVENT_STREAM

    def __init__(self, answer: Answer, chunks: Chunks, *, keep_alive_s: float = KEEP_ALIVE_S) -> None:
        super().__init__()
        self._answer = answer
        self._chunks = chunks
        self._keep_alive_s = keep_alive_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the stream; a failure before its first byte becomes a plain error response."""
        leaving = contextlib.suppress(ClientGone, OSError)  # OSError: the connection is broken
        with (
            closing_when_gone(self._answer, receive),
            EventSender(
                send, self._keep_alive_s, content_type=self.content_type, comment=self.comment()
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

    async def _send_all(self, pieces: list[tuple[int, Piece]], sender: "EventSender") -> None:
        try:
            while pieces:
                body = b"".join(self._chunks.piece(index, piece) for index, piece in pieces)
                if body:
                    await sender.send(body)
                pieces = await self._answer.next()
            last = self.ending()
        except ApiError as failure:
            last = self.failing(with_way_on(failure))
        await sender.end(last)

    def comment(self) -> bytes:
        """Return what is sent where nothing else is for long."""
        return COMMENT

    def ending(self) -> bytes:
        """Return the stream's last events."""
        return self._chunks.end() + DONE

    def failing(self, failure: ApiError) -> bytes:
        """Return the events of a failure after the stream's beginning."""
        return event(failure.body()) + DONE


class EventSender:
    """Sends a stream's events, begins the response with the first of them, and is never silent for long.

    A context; within it comments are sent where nothing else is.
    """

    def __init__(
        self,
        send: Send,
        keep_alive_s: float,
        *,
        content_type: bytes = EVENT_STREAM,
        comment: bytes = COMMENT,
    ) -> None:
        self._send, self._keep_alive_s, self._comment = send, keep_alive_s, comment
        self._headers = [(b"content-type", content_type), *STREAM_HEADERS]
        self.has_begun = False
        self._last_sent_s = time.monotonic()
        self._watch: asyncio.Task[None] | None = None

    def __enter__(self) -> "EventSender":
        self._watch = asyncio.create_task(self._keep_alive())
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def stop(self) -> None:
        """Send no more comments: nothing of the stream may follow."""
        assert self._watch is not None, "it was entered"
        self._watch.cancel()

    async def send(self, events: bytes) -> None:
        """Send whole events."""
        await self._begin()
        self._last_sent_s = time.monotonic()
        await self._send({"type": "http.response.body", "body": events, "more_body": True})

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
                    await self.send(self._comment)


@dataclass(slots=True)
class Choice:
    """A whole choice."""

    text: list[str] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[Logprobs] = field(default_factory=list)
    last: Piece = field(default_factory=Piece)  # says how it ended

    @property
    def finish_reason(self) -> FinishReason | None:
        """Why it ended."""
        return self.last.finish_reason

    def piece(self) -> Piece:
        """Return all of it as one piece."""
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
    """Wait for every choice's end.

    Raises:
        ApiError: the request failed.
        ClientGone: the client left first.
    """
    choices = [Choice() for _ in answer.generations]
    with closing_when_gone(answer, http.receive):
        while pieces := await answer.next():
            for index, piece in pieces:
                choice = choices[index]
                choice.text.append(piece.text)
                choice.token_ids += piece.token_ids
                choice.logprobs += piece.logprobs
                choice.last = piece
    return choices


def has_many_entries(choices: Sequence[Choice], num_top: int | None) -> bool:
    """Tell whether an answer's JSON takes milliseconds to make: of tokens, and of log-probabilities beside each."""
    return sum(len(choice.token_ids) for choice in choices) * (1 + (num_top or 0)) > _MANY_ENTRIES


async def json_answer(make: Callable[[], Any], model: ServedModel, *, is_long: bool) -> Response:
    """Make a whole answer's JSON; where it is long, beside the event loop, and in parts that do not hold it up."""
    if not is_long:
        return JSONResponse(make())
    return LongJson(await model.run(lambda: list(encoded_pieces(make())), is_long=True))


class LongJson(Response):
    """A whole answer that is sent piece by piece: the connection's buffer holds one of them."""

    media_type = "application/json"

    def __init__(self, pieces: Sequence[bytes]) -> None:
        super().__init__(headers={"content-length": str(sum(map(len, pieces)))})
        self._pieces = pieces

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send it; each piece when the client has read the one before."""
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        for piece in self._pieces:
            await send({"type": "http.response.body", "body": piece, "more_body": True})
            await asyncio.sleep(0)  # a client that reads quickly leaves others their turns
        await send({"type": "http.response.body", "body": b"", "more_body": False})


@contextlib.contextmanager
def closing_when_gone(answer: Answer, receive: Receive) -> Iterator[None]:
    """Close the answer when the client leaves, and in any case at the end of the block."""
    watch = asyncio.create_task(_close_when_gone(answer, receive))
    try:
        yield
    finally:
        watch.cancel()
        answer.close()


async def until_gone(receive: Receive) -> None:
    """Wait until the client leaves."""
    while (await receive())["type"] != "http.disconnect":
        pass


async def _close_when_gone(answer: Answer, receive: Receive) -> None:
    await until_gone(receive)
    answer.close()
