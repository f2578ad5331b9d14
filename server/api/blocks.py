"""Split an answer into a sequence of blocks (reasoning, text and tool calls), one of which is open at a time.

Chat's deltas may change their kind at any time. /v1/responses and /v1/messages instead open, extend and close every block
under its own number. This module does the bookkeeping for both. Each endpoint has a draft, an object that grows with the
blocks and returns the endpoint's events. A stream sends the events, and a whole answer is the finished draft, so the two
cannot differ. Whitespace before anything but text (the empty line between thinking and a call) does not become a block:
Anthropic's API refuses such blocks when a client sends them back.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Any, NamedTuple, Protocol

from pydantic_core import from_json
from starlette.requests import Request as HttpRequest

from server.api.chat_turn import MessageParser
from server.api.parsers.deltas import ContentDelta, Delta, ReasoningDelta, ToolCallDelta
from server.api.streaming import EventStream, closing_when_gone
from server.front.errors import ApiError
from server.front.generations import Answer, Piece, Pieces, Reader
from server.http.json_writer import json_bytes, long_json_pieces


class BlockKind(Enum):
    """Kind of a block's content."""

    REASONING = "reasoning"
    TEXT = "text"
    CALL = "call"


@dataclass(slots=True, eq=False)
class Block:
    """One section of an answer."""

    kind: BlockKind
    index: int  # its place in the answer
    call_id: str = ""  # only for a call, like the next two fields
    name: str = ""
    call_index: int = -1
    pieces: list[str] = field(default_factory=list)  # text, or a call's arguments

    @property
    def text(self) -> str:
        """The whole text."""
        return "".join(self.pieces)

    def arguments(self) -> dict[str, Any]:
        """Return a call's arguments. Truncated ones keep the complete part, as in Anthropic's own clients."""
        try:
            content = from_json(self.text or "{}", allow_partial="trailing-strings")
        except ValueError:
            return {}
        return content if isinstance(content, dict) else {}


class Opened(NamedTuple):
    """A block began."""

    block: Block


class Grew(NamedTuple):
    """A block gained text."""

    block: Block
    text: str


class Closed(NamedTuple):
    """A block is complete."""

    block: Block


BlockEvent = Opened | Grew | Closed


class Blocks:
    """The blocks of one growing answer."""

    def __init__(self) -> None:
        self.all: list[Block] = []
        self._open: Block | None = None
        self._blank = ""  # whitespace that becomes text only if text follows

    @property
    def has_calls(self) -> bool:
        """Whether the model called a tool."""
        return any(block.kind is BlockKind.CALL for block in self.all)

    def push(self, deltas: Iterable[Delta]) -> list[BlockEvent]:
        """Add the answer's new deltas and return the resulting block events, in order.

        The blocks in the events already contain all of the new text.
        """
        return [event for delta in deltas for event in self._take(delta)]

    def finish(self) -> list[BlockEvent]:
        """Close the open block at the end of the answer. An answer of whitespace only still gets a text block."""
        if not self.all and self._blank:
            return [*self._grow(BlockKind.TEXT, self._blank), *self._close()]
        return self._close()

    def _take(self, delta: Delta) -> list[BlockEvent]:
        match delta:
            case ReasoningDelta(text):
                return self._grow(BlockKind.REASONING, text)
            case ContentDelta(text):
                return self._grow_text(text)
            case ToolCallDelta():
                return self._grow_call(delta)

    def _grow_text(self, text: str) -> list[BlockEvent]:
        if self._open is None or self._open.kind is not BlockKind.TEXT:
            text = self._blank + text
            if not text.strip():
                self._blank = text
                return []
        return self._grow(BlockKind.TEXT, text)

    def _grow(self, kind: BlockKind, text: str) -> list[BlockEvent]:
        if not text:
            return []
        events: list[BlockEvent] = []
        if self._open is None or self._open.kind is not kind:
            events += self._begin(Block(kind, len(self.all)))
        assert self._open is not None, "no block is open after _begin"
        self._open.pieces.append(text)
        return [*events, Grew(self._open, text)]

    def _grow_call(self, delta: ToolCallDelta) -> list[BlockEvent]:
        events: list[BlockEvent] = []
        block = self._open
        if block is None or block.call_index != delta.index:
            assert delta.name is not None, f"call {delta.index} grows before its name or after its end"
            block = Block(BlockKind.CALL, len(self.all), delta.call_id or "", delta.name, delta.index)
            events += self._begin(block)
        if delta.arguments:
            block.pieces.append(delta.arguments)
            events.append(Grew(block, delta.arguments))
        return events

    def _begin(self, block: Block) -> list[BlockEvent]:
        closed = self._close()
        self._blank = ""
        self._open = block
        self.all.append(block)
        return [*closed, Opened(block)]

    def _close(self) -> list[BlockEvent]:
        closed, self._open = self._open, None
        return [] if closed is None else [Closed(closed)]


Event = dict[str, Any]


class Draft(Protocol):
    """An endpoint's growing answer. Each method returns the endpoint's events, in order."""

    def begin(self) -> list[Event]:
        """Return the first events."""
        ...

    def push(self, deltas: Sequence[Delta], piece: Piece) -> list[Event]:
        """Return the events for new deltas; `piece` is the piece that they were parsed from."""
        ...

    def finish(self, piece: Piece, *, cuts_call: bool = False) -> list[Event]:
        """Return the last events; `piece` is the last piece, and `cuts_call` is whether it ended inside the last block, a call."""
        ...

    def fail(self, failure: ApiError) -> list[Event]:
        """Return the events of a failure after `begin`."""
        ...


def token_by_token(piece: Piece) -> list[Piece]:
    """Split a piece with log-probabilities into one piece per token. The last one has the finish reason."""
    if len(piece.logprobs) < 2 or len(piece.ends) != len(piece.logprobs):
        return [piece]
    starts, last = [0, *piece.ends[:-1]], len(piece.ends) - 1
    cut = [
        Piece(piece.text[start:end], [token_id], [logprobs])
        for start, end, token_id, logprobs in zip(
            starts, piece.ends, piece.token_ids, piece.logprobs, strict=True
        )
    ]
    text = piece.text[starts[last] :]
    cut[last] = replace(
        piece, text=text, token_ids=piece.token_ids[last:], logprobs=piece.logprobs[last:], ends=[]
    )
    return cut


class DraftChunks:
    """Feed a draft from the answer's only choice, and encode its events."""

    def __init__(
        self, parser: MessageParser, draft: Draft, on_end: Callable[[], None] = lambda: None
    ) -> None:
        """Args: on_end is called once, when the draft is complete."""
        self._parser = parser
        self._draft = draft
        self._on_end = on_end
        self._begun = False

    def piece(self, index: int, piece: Piece) -> bytes:
        return self.encode(self.events(piece))

    def events(self, piece: Piece) -> list[Event]:
        """Begin the draft, unless it has begun, and add a piece."""
        begun = [] if self._begun else self.begin()
        return [*begun, *self.feed(piece)]

    def begin(self) -> list[Event]:
        """Begin the draft."""
        self._begun = True
        return self._draft.begin()

    def feed(self, piece: Piece) -> list[Event]:
        """Add a piece to the draft. With log-probabilities, add it token by token, so that each token can be located."""
        return [event for each in token_by_token(piece) for event in self._feed(each)]

    def _feed(self, piece: Piece) -> list[Event]:
        deltas = list(self._parser.push(piece))
        if piece.finish_reason is None:
            return self._draft.push(deltas, piece)
        events = self._draft.push([*deltas, *self._parser.finish()], piece)
        events += self._draft.finish(piece, cuts_call=self._parser.cuts_call)
        self._on_end()
        return events

    def end(self) -> bytes:
        """Return nothing: the draft's last event ends these streams."""
        return b""

    def fail(self, failure: ApiError) -> bytes:
        """Return the events of a failure."""
        return self.encode(self._draft.fail(failure))

    def encode(self, events: Sequence[Event]) -> bytes:
        """Return the bytes of events."""
        return named_events(events)


def named_events(events: Sequence[Event]) -> bytes:
    """Return server-sent events with their type as the event name."""
    return b"".join(b"event: %s\ndata: %s\n\n" % (each["type"].encode(), json_bytes(each)) for each in events)


def event_pieces(events: Sequence[Event]) -> Iterator[bytes]:
    """Yield the bytes of `named_events` in pieces, for a thread."""
    for each in events:
        yield b"event: %s\ndata: " % each["type"].encode()
        yield from long_json_pieces(each)
        yield b"\n\n"


async def complete(answer: Answer, chunks: DraftChunks, http: HttpRequest) -> None:
    """Feed the draft until the answer has ended.

    Raises:
        ApiError: The request failed.
        ClientGone: The client disconnected first.
    """

    def take(pieces: Pieces) -> None:
        for _, piece in pieces:
            chunks.feed(piece)

    with closing_when_gone(answer, http.receive):
        while pieces := await answer.next(Reader(take)):
            take(pieces)


class DraftStream(EventStream):
    """Stream a draft's events. The draft's last event ends the stream, without [DONE]."""

    def __init__(self, answer: Answer, chunks: DraftChunks) -> None:
        super().__init__(answer, chunks)
        self.draft_chunks = chunks

    def ending(self) -> bytes:
        """Return nothing: the draft has sent its last event."""
        return b""

    def failing(self, failure: ApiError) -> bytes:
        return self.draft_chunks.fail(failure)
