"""What an answer's text turns into: content, reasoning and tool calls, piece by piece.

The common tongue of parsers (text in, deltas out) and of endpoints (deltas in, their own words out). Pieces of one
kind concatenate: the parts of a call's `arguments` make one JSON text, whatever the sizes of the pieces.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class ContentDelta:
    """More of what the user is told."""

    text: str


@dataclass(frozen=True, slots=True)
class ReasoningDelta:
    """More of what the model thinks."""

    text: str


@dataclass(frozen=True, slots=True)
class ToolCallDelta:
    """More of one call. A call's first delta, and no other, has its id and name."""

    index: int  # of the call in the answer, from 0
    arguments: str = ""  # a piece of JSON text
    call_id: str | None = None
    name: str | None = None


Delta = ContentDelta | ReasoningDelta | ToolCallDelta


class TextParser(Protocol):
    """Takes one answer's text as it grows. The deltas do not depend on how the text is split, once merged."""

    def push(self, text: str) -> list[Delta]:
        """Take more text; return what is certain now."""
        ...

    def finish(self) -> list[Delta]:
        """Return what was held back: no more text comes."""
        ...


class PlainParser:
    """All text is content."""

    def push(self, text: str) -> list[Delta]:
        """Return the text as content."""
        return [ContentDelta(text)] if text else []

    def finish(self) -> list[Delta]:
        """Return nothing: nothing is held back."""
        return []


def merge(deltas: Iterable[Delta]) -> list[Delta]:
    """Join neighbours of one kind."""
    merged: list[Delta] = []
    for delta in deltas:
        joined = _joined(merged[-1], delta) if merged else None
        if joined is None:
            merged.append(delta)
        else:
            merged[-1] = joined
    return merged


def _joined(first: Delta, second: Delta) -> Delta | None:
    """Return both as one, None if they do not belong together."""
    match first, second:
        case ContentDelta(), ContentDelta():
            return ContentDelta(first.text + second.text)
        case ReasoningDelta(), ReasoningDelta():
            return ReasoningDelta(first.text + second.text)
        case ToolCallDelta(), ToolCallDelta() if first.index == second.index:
            return ToolCallDelta(first.index, first.arguments + second.arguments, first.call_id, first.name)
    return None
