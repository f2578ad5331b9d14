"""Answers of endpoints that keep a draft: fed piece by piece, streamed as named events or waited for.

What /v1/responses and /v1/messages have in common: a draft object that grows with the answer's deltas and says what
happened to it. A stream sends what it says; a whole answer is the draft at the end.
"""

from collections.abc import Callable, Sequence
from typing import Any, Protocol

from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from server.api.message_parser import MessageParser
from server.api.parsers.deltas import Delta
from server.api.streaming import EventStream, closing_when_gone
from server.api.text_event import encode_json
from server.errors import ApiError
from server.front.generations import Answer, Piece

Event = dict[str, Any]


class Draft(Protocol):
    """An endpoint's answer while it grows; each result is the events that say so, in order."""

    def begin(self) -> list[Event]:
        """Word the beginning."""
        ...

    def push(self, deltas: Sequence[Delta], piece: Piece) -> list[Event]:
        """Word what was gained; `piece` is what the deltas were read from."""
        ...

    def finish(self, piece: Piece) -> list[Event]:
        """Word the end; `piece` is the last."""
        ...

    def fail(self, failure: ApiError) -> list[Event]:
        """Word a failure after the beginning."""
        ...


class DraftChunks:
    """Feeds a draft from the answer's only choice, and words its events."""

    def __init__(
        self, parser: MessageParser, draft: Draft, on_end: Callable[[], None] = lambda: None
    ) -> None:
        """Args: on_end is called once, when the draft is complete."""
        self._parser = parser
        self._draft = draft
        self._on_end = on_end
        self._begun = False

    def piece(self, index: int, piece: Piece) -> bytes:
        """Word what the choice gained."""
        events = [] if self._begun else self.begin()
        return named_events([*events, *self.feed(piece)])

    def begin(self) -> list[Event]:
        """Begin the draft."""
        self._begun = True
        return self._draft.begin()

    def feed(self, piece: Piece) -> list[Event]:
        """Let the draft grow by a piece."""
        deltas = list(self._parser.push(piece))
        if piece.finish_reason is None:
            return self._draft.push(deltas, piece)
        events = self._draft.push([*deltas, *self._parser.finish()], piece) + self._draft.finish(piece)
        self._on_end()
        return events

    def end(self) -> bytes:
        """Word nothing: the draft's last event ends these streams."""
        return b""

    def fail(self, failure: ApiError) -> bytes:
        """Word a failure."""
        return named_events(self._draft.fail(failure))


def named_events(events: Sequence[Event]) -> bytes:
    """Return server-sent events that carry their type as a name, too."""
    return b"".join(b"event: %s\ndata: %s\n\n" % (each["type"].encode(), json_bytes(each)) for each in events)


def json_bytes(content: Any) -> bytes:
    """Return JSON in UTF-8; half a surrogate pair (a client's own, echoed) becomes its escape, which is JSON too."""
    return encode_json(content).encode("utf-8", "backslashreplace")


async def complete(answer: Answer, chunks: DraftChunks, http: HttpRequest) -> None:
    """Feed the draft until the answer has ended.

    Raises:
        ApiError: the request failed.
        ClientGone: the client left first.
    """
    with closing_when_gone(answer, http.receive):
        while pieces := await answer.next():
            for _, piece in pieces:
                chunks.feed(piece)


def json_response(content: Any) -> Response:
    """Return a whole answer as a response."""
    return Response(json_bytes(content), media_type="application/json")


class DraftStream(EventStream):
    """Streams a draft's events; its own last event ends it, without [DONE]."""

    def __init__(self, answer: Answer, chunks: DraftChunks) -> None:
        super().__init__(answer, chunks)
        self._draft_chunks = chunks

    def ending(self) -> bytes:
        """Word nothing more."""
        return b""

    def failing(self, failure: ApiError) -> bytes:
        """Word a failure as the draft does."""
        return self._draft_chunks.fail(failure)
