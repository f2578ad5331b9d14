"""Runs a parser over a text in pieces, and brings what it said to a form that tests compare."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from server.api.parsers.deltas import ContentDelta, Delta, ReasoningDelta, TextParser, ToolCallDelta, merge


@dataclass
class Said:
    """A whole answer."""

    content: str = ""
    reasoning: str = ""
    calls: list[tuple[str, str]] = field(default_factory=list)  # name, arguments


def deltas_of(parser: TextParser, pieces: Sequence[str]) -> list[Delta]:
    """Feed the pieces; return everything that was said, unmerged."""
    return [delta for piece in pieces for delta in parser.push(piece)] + parser.finish()


def said(deltas: Sequence[Delta]) -> Said:
    """Add up; checks what holds for every stream of deltas."""
    whole, ids = Said(), []
    for delta in deltas:
        match delta:
            case ContentDelta(text):
                assert text, "no empty deltas"
                whole.content += text
            case ReasoningDelta(text):
                assert text, "no empty deltas"
                whole.reasoning += text
            case ToolCallDelta(index, arguments, call_id, name):
                assert (call_id is None) == (name is None)
                if name is not None:
                    assert index == len(whole.calls), "calls begin in order, each once"
                    ids.append(call_id)
                    whole.calls.append((name, ""))
                assert index == len(whole.calls) - 1, "only the last call grows"
                whole.calls[index] = (whole.calls[index][0], whole.calls[index][1] + arguments)
    assert len(set(ids)) == len(ids)
    return whole


def without_ids(deltas: Sequence[Delta]) -> list[Delta]:
    """Merge, and leave out the ids, which are drawn."""
    return [
        ToolCallDelta(delta.index, delta.arguments, delta.name and "id", delta.name)
        if isinstance(delta, ToolCallDelta)
        else delta
        for delta in merge(deltas)
    ]


def read(make: Callable[[], TextParser], text: str) -> Said:
    """Read a whole text, and check that it reads the same character by character."""
    whole = deltas_of(make(), [text])
    single = deltas_of(make(), list(text))
    assert without_ids(single) == without_ids(whole)
    return said(whole)
