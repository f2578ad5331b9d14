"""Run a parser over a text in pieces and merge its deltas into a form that tests can compare."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from server.api.parsers.deltas import ContentDelta, Delta, ReasoningDelta, TextParser, ToolCallDelta, merge


@dataclass
class Said:
    """A whole answer."""

    content: str = ""
    reasoning: str = ""
    calls: list[tuple[str, str]] = field(default_factory=list)  # name, arguments


def deltas_of(parser: TextParser, pieces: Sequence[str], cut_at: str | None = None) -> list[Delta]:
    """Feed the pieces and return all deltas, unmerged; `cut_at` is as in `TextParser.finish`."""
    return [delta for piece in pieces for delta in parser.push(piece)] + parser.finish(cut_at)


def said(deltas: Sequence[Delta]) -> Said:
    """Merge deltas into an answer, and check the rules of every stream of deltas."""
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
                    assert index == len(whole.calls), "each call begins once and in order"
                    ids.append(call_id)
                    whole.calls.append((name, ""))
                assert index == len(whole.calls) - 1, "only the last call grows"
                whole.calls[index] = (whole.calls[index][0], whole.calls[index][1] + arguments)
    assert len(set(ids)) == len(ids)
    return whole


def without_ids(deltas: Sequence[Delta]) -> list[Delta]:
    """Merge deltas and replace the ids, which are random."""
    return [
        ToolCallDelta(delta.index, delta.arguments, delta.name and "id", delta.name)
        if isinstance(delta, ToolCallDelta)
        else delta
        for delta in merge(deltas)
    ]


def read(make: Callable[[], TextParser], text: str) -> Said:
    """Parse a whole text, and check that parsing it character by character gives the same."""
    whole = deltas_of(make(), [text])
    single = deltas_of(make(), list(text))
    assert without_ids(single) == without_ids(whole)
    return said(whole)
