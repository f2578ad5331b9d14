"""Deltas of an answer's text: content, reasoning and tool calls, piece by piece.

The interface between parsers (text in, deltas out) and endpoints (deltas in, JSON out). Pieces of one kind are concatenated:
the parts of a call's `arguments` form one JSON text, regardless of the sizes of the pieces.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import groupby
from typing import Protocol


@dataclass(slots=True)  # not frozen: most tokens make one, and frozen ones take three times as long
class ContentDelta:
    """More content for the user."""

    text: str


@dataclass(frozen=True, slots=True)
class ReasoningDelta:
    """More of the model's reasoning."""

    text: str


@dataclass(frozen=True, slots=True)
class ToolCallDelta:
    """More of one call. Only a call's first delta has its id and name."""

    index: int  # of the call in the answer, from 0
    arguments: str = ""  # a piece of JSON text
    call_id: str | None = None
    name: str | None = None


Delta = ContentDelta | ReasoningDelta | ToolCallDelta


class TextParser(Protocol):
    """Parse one answer's text while it grows. Once merged, the deltas do not depend on how the text was split."""

    def push(self, text: str) -> list[Delta]:
        """Add text and return the deltas that are certain now."""

    def finish(self, cut_at: str | None = None) -> list[Delta]:
        """Return the remaining deltas, at the end of the text.

        Args:
            cut_at: The client's stop that ended the text, or "" if a limit did. None if the model ended it.
        """


class PlainParser:
    """Treat all text as content."""

    def push(self, text: str) -> list[Delta]:
        return [ContentDelta(text)] if text else []

    def finish(self, cut_at: str | None = None) -> list[Delta]:
        return []


def merge(deltas: Iterable[Delta]) -> list[Delta]:
    """Join adjacent deltas of one kind."""
    return [_joined(list(each)) for _, each in groupby(deltas, key=_kind)]


def _kind(delta: Delta) -> tuple[type, int]:
    return type(delta), delta.index if isinstance(delta, ToolCallDelta) else 0


def _joined(deltas: list[Delta]) -> Delta:
    match deltas[0]:
        case ToolCallDelta() as first:
            arguments = "".join(each.arguments for each in deltas if isinstance(each, ToolCallDelta))
            return ToolCallDelta(first.index, arguments, first.call_id, first.name)
        case first:
            return type(first)("".join(each.text for each in deltas if not isinstance(each, ToolCallDelta)))
