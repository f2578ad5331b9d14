"""What an answer's text turns into: content, reasoning and tool calls, piece by piece.

The common tongue of parsers (text in, deltas out) and of endpoints (deltas in, their own words out). Pieces of one
kind concatenate: the parts of a call's `arguments` make one JSON text, whatever the sizes of the pieces.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import groupby
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
    return [_joined(list(each)) for _, each in groupby(deltas, key=_kind)]


def _kind(delta: Delta) -> tuple[type, int]:
    return type(delta), delta.index if isinstance(delta, ToolCallDelta) else 0


def _joined(deltas: list[Delta]) -> Delta:
    """Return deltas of one kind as one."""
    match deltas[0]:
        case ToolCallDelta() as first:
            arguments = "".join(each.arguments for each in deltas if isinstance(each, ToolCallDelta))
            return ToolCallDelta(first.index, arguments, first.call_id, first.name)
        case first:
            return type(first)("".join(each.text for each in deltas if not isinstance(each, ToolCallDelta)))
