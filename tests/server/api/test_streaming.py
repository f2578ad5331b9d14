"""Streams stay open during long silences. Errors are HTTP statuses until the first piece is sent."""

import asyncio
import json
from collections.abc import Awaitable
from typing import Any, cast

from starlette.types import Message

from server.api.streaming import COMMENT, DONE, EventStream
from server.front.errors import ApiError
from server.front.generations import Answer, Piece, Pieces, Reader

NEVER_S = 1000.0


class Scripted:
    """An answer that waits and then yields one word or fails."""

    def __init__(self, wait: Awaitable[None], failure: ApiError | None = None) -> None:
        self._wait, self._failure, self._num_pieces = wait, failure, 0

    async def next(self, reader: Reader | None = None) -> Pieces:
        self._num_pieces += 1
        if self._num_pieces > 1:
            return []
        await self._wait
        if self._failure is not None:
            raise self._failure
        return [(0, Piece(text="word"))]

    def close(self) -> None:
        """Nothing to free."""


class Words:
    """Format pieces as their text."""

    def piece(self, index: int, piece: Piece) -> bytes:
        return piece.text.encode()

    def end(self) -> bytes:
        return b""


def stream(
    num_comments: int, failure: ApiError | None = None, *, keep_alive_s: float = 0.001
) -> list[Message]:
    """Stream an answer that comes after `num_comments` comments were sent."""

    async def scenario() -> list[Message]:
        sent: list[Message] = []
        enough = asyncio.Event()

        async def send(message: Message) -> None:
            sent.append(message)
            if sum(each.get("body") == COMMENT for each in sent) >= num_comments:
                enough.set()

        async def receive() -> Message:
            await asyncio.Event().wait()
            raise AssertionError("the client stays connected")

        if not num_comments:
            enough.set()
        answer = cast(Answer, Scripted(cast(Any, enough.wait()), failure))
        scope = {"type": "http", "method": "POST", "path": "/v1/completions", "headers": []}
        await EventStream(answer, Words(), keep_alive_s=keep_alive_s)(scope, receive, send)
        num_sent = len(sent)
        await asyncio.sleep(10 * keep_alive_s if keep_alive_s < 1 else 0)
        assert len(sent) == num_sent, "nothing follows the end"
        return sent

    return asyncio.run(scenario())


def bodies(sent: list[Message]) -> list[bytes]:
    assert [each["type"] for each in sent] == ["http.response.start"] + ["http.response.body"] * (
        len(sent) - 1
    )
    assert [each["more_body"] for each in sent[1:]] == [True] * (len(sent) - 2) + [False]
    return [each["body"] for each in sent[1:]]


def test_silence_is_filled_with_comments() -> None:
    said = bodies(stream(3))
    assert said[:3] == [COMMENT] * 3 and said[-2:] == [b"word", DONE]


def test_who_speaks_in_time_makes_no_comments() -> None:
    assert bodies(stream(0, keep_alive_s=NEVER_S)) == [b"word", DONE]


def test_an_error_is_a_status_until_something_was_said() -> None:
    start, body = stream(0, ApiError(503, "out of luck"), keep_alive_s=NEVER_S)
    assert start["status"] == 503 and json.loads(body["body"])["error"]["message"] == "out of luck"
    said = bodies(stream(1, ApiError(503, "out of luck")))
    assert said[0] == COMMENT and said[-1].endswith(DONE) and b"out of luck" in said[-1]


def test_no_comment_comes_while_an_error_is_being_sent() -> None:
    sent: list[Message] = []

    async def scenario() -> None:
        async def send(message: Message) -> None:
            await asyncio.sleep(0.02)  # a client that reads slowly
            sent.append(message)

        async def receive() -> Message:
            await asyncio.Event().wait()
            raise AssertionError("the client stays connected")

        begun = asyncio.Event()
        begun.set()
        answer = cast(Answer, Scripted(cast(Any, begun.wait()), ApiError(503, "out of luck")))
        scope = {"type": "http", "method": "POST", "path": "/v1/completions", "headers": []}
        await EventStream(answer, Words(), keep_alive_s=0.005)(scope, receive, send)

    asyncio.run(scenario())
    assert [each.get("status", "body") for each in sent] == [503, "body"]
