"""An answer as a row of blocks: stretches of reasoning, text and tool calls, one open at a time.

Chat's deltas may change kind from one to the next; /v1/responses and /v1/messages want every stretch opened, grown
and closed under a number of its own. That bookkeeping is here, once; how the events are worded is the endpoints'.
A whole answer goes the same way as a stream, so that the two cannot differ. Blank text in front of anything but text
(the empty line between thinking and a call) makes no block: Anthropic's own API refuses such blocks when they are
sent back.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import Enum
from typing import NamedTuple

from server.api.parsers.deltas import ContentDelta, Delta, ReasoningDelta, ToolCallDelta


class BlockKind(Enum):
    """What a block holds."""

    REASONING = "reasoning"
    TEXT = "text"
    CALL = "call"


@dataclass(slots=True, eq=False)
class Block:
    """One stretch of an answer."""

    kind: BlockKind
    index: int  # its place in the answer
    call_id: str = ""  # of a call, as the next two
    name: str = ""
    call_index: int = -1
    pieces: list[str] = field(default_factory=list)  # text, or a call's arguments

    @property
    def text(self) -> str:
        """All of it."""
        return "".join(self.pieces)


class Opened(NamedTuple):
    """A block began."""

    block: Block


class Grew(NamedTuple):
    """A block gained text."""

    block: Block
    text: str


class Closed(NamedTuple):
    """A block will not grow any more."""

    block: Block


BlockEvent = Opened | Grew | Closed


class Blocks:
    """The blocks of one growing answer."""

    def __init__(self) -> None:
        self.all: list[Block] = []
        self._open: Block | None = None
        self._blank = ""  # text of blanks alone, until it is known whether text follows

    @property
    def has_calls(self) -> bool:
        """Whether the model called a tool."""
        return any(block.kind is BlockKind.CALL for block in self.all)

    def push(self, deltas: Iterable[Delta]) -> list[BlockEvent]:
        """Take what the answer gained; return what happened to its blocks, in order.

        The blocks in the events have grown by all of it already.
        """
        return [event for delta in deltas for event in self._take(delta)]

    def finish(self) -> list[BlockEvent]:
        """Close what is open: the answer has ended. An answer of blanks alone is still an answer."""
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
        assert self._open is not None, "a block was just begun"
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
