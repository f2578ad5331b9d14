"""Answers on their way out: server-sent events, or collected whole; either ends when the client leaves.

A plain ASGI response instead of Starlette's StreamingResponse, for three reasons: an error before the first piece is
a status and not an event, a client that leaves is noticed while nothing is being sent, and a chunk costs one send.
Where nothing is to be said for long, a comment is: proxies close connections that are silent for a minute.
"""

import asyncio
import contextlib
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Protocol

from starlette.requests import Request as HttpRequest
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from scheduler.policy.request import FinishReason, Logprobs
from server.api.answer_json import event
from server.errors import ApiError
from server.front.generations import Answer, ClientGone, Piece
from server.http.errors import ErrorResponse

DONE = b"data: [DONE]\n\n"
KEEP_ALIVE_S = 15.0  # of silence, before the first piece too: from then on a failure is an event
COMMENT = b": keep-alive\n\n"  # which every reader of server-sent events passes over
STREAM_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),  # nginx would hold the stream back
]


class Chunks(Protocol):
    """How an endpoint words its stream; each result is one or more whole events."""

    def piece(self, index: int, piece: Piece) -> bytes:
        """Word what a choice gained; may be empty."""
        ...

    def end(self) -> bytes:
        """Word what comes after the last choice ended, before [DONE]."""
        ...


def finish_word(reason: FinishReason | None) -> str | None:
    """Return OpenAI's word for how a choice ended, None while it goes on."""
    return None if reason is None else reason.value


class EventStream(Response):
    """Streams an answer as its pieces come."""

    def __init__(self, answer: Answer, chunks: Chunks, *, keep_alive_s: float = KEEP_ALIVE_S) -> None:
        super().__init__()
        self._answer = answer
        self._chunks = chunks
        self._keep_alive_s = keep_alive_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the stream; a failure before its first byte becomes a plain error response."""
        leaving = contextlib.suppress(
            ClientGone, OSError
        )  # OSError: the server's word for a broken connection
        with closing_when_gone(self._answer, receive), Line(send, self._keep_alive_s) as line, leaving:
            try:
                pieces = await self._answer.next()
            except ApiError as failure:
                if line.is_open:
                    await line.end(self.failing(failure))
                else:
                    await ErrorResponse(failure)(scope, receive, send)
                return
            await self._send_all(pieces, line)

    async def _send_all(self, pieces: list[tuple[int, Piece]], line: "Line") -> None:
        try:
            while pieces:
                body = b"".join(self._chunks.piece(index, piece) for index, piece in pieces)
                if body:
                    await line.say(body)
                pieces = await self._answer.next()
            last = self.ending()
        except ApiError as failure:
            last = self.failing(failure)
        await line.end(last)

    def ending(self) -> bytes:
        """Word the stream's end."""
        return self._chunks.end() + DONE

    def failing(self, failure: ApiError) -> bytes:
        """Word a failure after the stream's beginning."""
        return event(failure.body()) + DONE


class Line:
    """A stream's way to its client, open from the first word on, and never silent for long.

    A context; within it comments are sent where nothing else is.
    """

    def __init__(self, send: Send, keep_alive_s: float) -> None:
        self._send, self._keep_alive_s = send, keep_alive_s
        self.is_open = False
        self._spoken_s = time.monotonic()
        self._watch: asyncio.Task[None] | None = None

    def __enter__(self) -> "Line":
        self._watch = asyncio.create_task(self._keep_alive())
        return self

    def __exit__(self, *_: object) -> None:
        assert self._watch is not None, "it was entered"
        self._watch.cancel()

    async def say(self, events: bytes) -> None:
        """Send whole events."""
        await self._open()
        self._spoken_s = time.monotonic()
        await self._send({"type": "http.response.body", "body": events, "more_body": True})

    async def end(self, events: bytes) -> None:
        """Send the last events."""
        await self._open()
        assert self._watch is not None, "it was entered"
        self._watch.cancel()  # nothing may follow
        await self._send({"type": "http.response.body", "body": events, "more_body": False})

    async def _open(self) -> None:
        if not self.is_open:
            self.is_open = True
            await self._send({"type": "http.response.start", "status": 200, "headers": STREAM_HEADERS})

    async def _keep_alive(self) -> None:
        while True:
            left_s = self._spoken_s + self._keep_alive_s - time.monotonic()
            if left_s > 0:
                await asyncio.sleep(left_s)
            else:
                with contextlib.suppress(OSError):
                    await self.say(COMMENT)


@dataclass(slots=True)
class Choice:
    """A whole choice."""

    text: list[str] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[Logprobs] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None


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
                choice.finish_reason = piece.finish_reason
                choice.stop_reason = piece.stop_reason
    return choices


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
