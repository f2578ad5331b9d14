"""What parsers are made of: a coroutine that reads marks and values from a text that is still growing.

A family's parser is straight code, `run`, that asks for "the text up to this mark" or "one JSON value" and waits where
the text has not come yet (every `yield` is such a wait). So it reads like a parser of whole texts, and cannot depend
on where the text was split. The rejected alternative, one state machine per family, is what most of the streaming
bugs of other servers' parsers are about.

Text is held back only while it may still become a mark, or is white space that a mark may follow.
"""

import json
import re
import secrets
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator
from typing import NamedTuple, TypeVar

from server.api.parsers.deltas import ContentDelta, Delta, ReasoningDelta, ToolCallDelta, merge

# Outside strings "<" is not JSON: the value is broken there, and a closing tag may begin.
_JSON_MARKS = re.compile(r'["{}\[\]<]')
_JSON_IN_STRING = re.compile(r'["\\]')
_JSON_SCALAR_END = re.compile(r"[,\]}\s<]")
_CONTROL = re.compile(r"[\x00-\x1f]")


class JsonSpan:
    """Finds where one JSON value ends, without checking what is in it.

    Models write line ends into strings, which JSON has as escapes: they become these.
    """

    def __init__(self) -> None:
        self.done = False
        self.broken = False
        self._depth = 0
        self._in_string = False
        self._escaped = False
        self._begun = False

    def push(self, text: str) -> tuple[int, str]:
        """Take more text; return how much of it belongs to the value, and this as JSON."""
        at, parts, is_scalar = 0, [], False
        while at < len(text) and not self.done and not is_scalar:
            begin, was_in_string = at, self._in_string
            is_scalar = not was_in_string and not self._depth and (self._begun or text[at] not in '"{[')
            if is_scalar:
                at = self._scalar(text, at)
            else:
                at = self._in_text(text, at) if was_in_string else self._structure(text, at)
            piece = text[begin:at]
            parts.append(_CONTROL.sub(_as_escape, piece) if was_in_string else piece)
        return at, "".join(parts)

    def _in_text(self, text: str, at: int) -> int:
        if self._escaped:
            self._escaped = False
            return at + 1
        found = _JSON_IN_STRING.search(text, at)
        if found is None:
            return len(text)
        if found[0] == "\\":
            self._escaped = True
        else:
            self._in_string = False
            self.done = not self._depth
        return found.end()

    def _scalar(self, text: str, at: int) -> int:
        """A number or a word ends before what follows it."""
        self._begun = True
        found = _JSON_SCALAR_END.search(text, at)
        self.done = found is not None
        return len(text) if found is None else found.start()

    def _structure(self, text: str, at: int) -> int:
        found = _JSON_MARKS.search(text, at)
        if found is None:
            return len(text)
        if found[0] == "<":
            self.done = self.broken = True
            return found.start()
        if found[0] == '"':
            self._in_string = True
        else:
            self._depth += 1 if found[0] in "{[" else -1
            self.done = not self._depth
        return found.end()


def decode_json(text: str) -> object:
    """Read one JSON value; control characters in strings are taken, NaN and infinities are not.

    Raises:
        ValueError: it is not JSON, or too deep or long to be read.
    """
    try:
        return json.loads(text, strict=False, parse_constant=_refuse)
    except RecursionError as error:
        raise ValueError("nested too deeply") from error


def _refuse(constant: str) -> object:
    raise ValueError(f"{constant} is not JSON")


T = TypeVar("T")
Reading = Generator[None, None, T]  # waits by yielding, returns what it read
NOTHING = ""  # the mark that was found when the text ended first


class Found(NamedTuple):
    """Text, and the mark that ended it; NOTHING if no mark did."""

    text: str
    mark: str


class MarkupParser(ABC):
    """Base of the families' parsers; see the module."""

    markers: tuple[str, ...] = ()  # that a tokenizer may have as special tokens; they must reach the parser

    def __init__(self) -> None:
        self.num_calls = 0
        self._call_ids: set[str] = set()
        self.unread = ""  # come, not read
        self._ended = False
        self._deltas: list[Delta] = []
        self._trims = False  # the next content starts a line of its own: drop white space before it
        self._kept: list[str] | None = None  # read since `keep`, in case it is no call after all
        self._reading: Reading[None] = self._read_all()

    @abstractmethod
    def run(self) -> Reading[None]:
        """Read the whole answer. What it leaves unread is content."""

    def push(self, text: str) -> list[Delta]:
        """Take more text; return what is certain now."""
        self.unread += text
        return self._advance()

    def finish(self) -> list[Delta]:
        """Return what was held back: no more text comes. May be called again."""
        self._ended = True
        return self._advance()

    def _advance(self) -> list[Delta]:
        next(self._reading, None)
        deltas, self._deltas = self._deltas, []
        return merge(deltas)

    def _read_all(self) -> Reading[None]:
        yield from self.run()
        while not self._ended or self.unread:
            self.say(self.take(len(self.unread)))
            yield

    # What was read goes out as one of these.

    def say(self, text: str) -> None:
        """Put out content."""
        if self._trims:
            text = text.lstrip()
        if text:
            self._trims = False
            self._deltas.append(ContentDelta(text))

    def think(self, text: str) -> None:
        """Put out reasoning."""
        if text:
            self._deltas.append(ReasoningDelta(text))

    def begin_call(self, name: str, call_id: str | None = None) -> None:
        """Put out a call's id and name; an id that is missing or taken is drawn. White space after it is not content."""
        if not call_id or call_id in self._call_ids:
            call_id = new_call_id()
        self._call_ids.add(call_id)
        self._deltas.append(ToolCallDelta(self.num_calls, "", call_id, _encodable(name)))
        self.num_calls += 1
        self._trims = True
        self._kept = None

    def add_arguments(self, text: str) -> None:
        """Put out more of the last call's arguments."""
        assert self.num_calls, "arguments belong to a call that has begun"
        if text:
            self._deltas.append(ToolCallDelta(self.num_calls - 1, _encodable(text)))

    def keep(self, mark: str) -> None:
        """Begin to remember what is read, from a mark that was: if no call begins, `say_kept` puts it out."""
        self._kept = [mark]

    def say_kept(self) -> None:
        """Put out, as content, what was read since `keep`, unless a call began in it."""
        if self._kept is not None:
            text, self._kept = "".join(self._kept), None
            self.say(text)

    # Reading.

    def take(self, length: int) -> str:
        """Take characters that have come."""
        taken, self.unread = self.unread[:length], self.unread[length:]
        if self._kept is not None:
            self._kept.append(taken)
        return taken

    def put_back(self, mark: str) -> None:
        """Let a mark that was just read come again; NOTHING changes nothing."""
        if not mark:
            return
        self.unread = mark + self.unread
        if self._kept is not None:
            assert self._kept[-1] == mark, "only what was read last can be put back"
            self._kept.pop()

    def until(self, *marks: str) -> Reading[Found]:
        """Read up to the first of the marks, and the mark; to the end of the text if there is none."""
        searched = 0
        while True:
            at, mark = first_mark(self.unread, marks, searched)
            if mark:
                found = Found(self.take(at), mark)
                self.take(len(mark))
                return found
            if self._ended:
                return Found(self.take(len(self.unread)), NOTHING)
            searched = max(0, len(self.unread) - max(map(len, marks)) + 1)
            yield

    def stream_until(
        self,
        out: Callable[[str], None],
        *marks: str,
        trim: Callable[[str], str] = str.rstrip,
        keeps_rest: bool = True,
    ) -> Reading[str]:
        """Pass text on as it comes, up to the first of the marks; return the mark.

        Args:
            trim: takes from a text's end what is left out before a mark.
            keeps_rest: pass on what is held back for a mark, too, where the text ends without one.
        """
        while True:
            at, mark = first_mark(self.unread, marks)
            if mark:
                out(trim(self.take(at)))
                self.take(len(mark))
                return mark
            certain = self.unread[: len(self.unread) - longest_head(self.unread, marks)]
            out(self.take(len(trim(certain))))
            if self._ended:
                rest = self.take(len(self.unread))
                out(rest if keeps_rest else "")
                return NOTHING
            yield

    def content_until(self, *marks: str) -> Reading[str]:
        """Put text out as content, up to the first of the marks; return the mark."""
        return (yield from self.stream_until(self.say, *marks))

    def skip_space(self) -> Reading[str]:
        """Pass over white space; return it."""
        space = ""
        while True:
            stripped = self.unread.lstrip()
            space += self.take(len(self.unread) - len(stripped))
            if stripped or self._ended:
                return space
            yield

    def accept(self, mark: str) -> Reading[bool]:
        """Pass over the mark if it comes next."""
        while len(self.unread) < len(mark) and mark.startswith(self.unread) and not self._ended:
            yield
        if not self.unread.startswith(mark):
            return False
        self.take(len(mark))
        return True

    def peek(self) -> Reading[str]:
        """Return the next character without taking it; empty at the end."""
        while not self.unread and not self._ended:
            yield
        return self.unread[:1]

    def json_text(self, out: Callable[[str], None]) -> Reading[bool]:
        """Pass the text of one JSON value on as it comes; tell whether it was whole."""
        span = JsonSpan()
        while True:
            length, text = span.push(self.unread)
            self.take(length)
            out(text)
            if span.done:
                return not span.broken
            if self._ended:
                return False
            yield


def _as_escape(found: re.Match[str]) -> str:
    return f"\\u{ord(found[0]):04x}"


def first_mark(text: str, marks: tuple[str, ...], start: int = 0) -> tuple[int, str]:
    """Return where the first mark is, and which; no mark is a prefix of another."""
    hits = [(at, mark) for mark in marks if (at := text.find(mark, start)) >= 0]
    return min(hits, default=(-1, NOTHING))


def longest_head(text: str, marks: tuple[str, ...]) -> int:
    """Return how many characters at the end of the text begin a mark."""
    heads = {mark[0] for mark in marks}
    for at in range(max(0, len(text) - max(map(len, marks)) + 1), len(text)):
        if text[at] in heads and any(mark.startswith(text[at:]) for mark in marks):
            return len(text) - at
    return 0


def _encodable(text: str) -> str:
    """Return text with halves of surrogate pairs, which JSON's escapes can spell, as such escapes again."""
    return text.encode("utf-8", "backslashreplace").decode()


def new_call_id() -> str:
    """Return an id for a call, in OpenAI's form."""
    return f"call_{secrets.token_hex(12)}"
