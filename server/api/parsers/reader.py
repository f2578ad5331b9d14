"""What parsers are made of: a coroutine that reads marks and values from a text that is still growing.

A family's parser is straight code, `run`, that asks for "the text up to this mark" or "one JSON value" and waits where
the text has not come yet (every `yield` is such a wait). So it reads like a parser of whole texts, and cannot depend
on where the text was split. The rejected alternative, one state machine per family, is what most of the streaming
bugs of other servers' parsers are about.

One place decides what is a call: `attempt` reads what a mark may have begun, and gives everything back as text unless
`begin_call` is reached with a function that the request offered. Behind a call, too, text that is no further part of it
is content. So no text vanishes, and prose about the syntax stays prose.

Text is held back only while it may still become a mark, or is white space that a mark may follow. What is held back is
short (AHEAD) or taken out of the buffer, so the work per piece does not grow with the answer.
"""

import json
import math
import re
import secrets
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator
from functools import lru_cache
from typing import NamedTuple, TypeVar

from server.api.parsers.deltas import ContentDelta, Delta, ReasoningDelta, ToolCallDelta, merge
from server.api.parsers.json_span import JsonSpan

AHEAD = 256  # characters that are looked at, at most, before a decision; names and tags are shorter
_MAX_REREAD = (
    1 << 20
)  # characters that an answer may make us read again; behind them, failed calls are passed over
_SLICE = 4096  # of a long text is looked at in one go
_SPACE = re.compile(r"\s*")
_OBJECT = re.compile(r"\{\s*(\S)")


def decode_json(text: str) -> object:
    """Read one JSON value; control characters in strings are taken, NaN and infinities are not.

    Raises:
        ValueError: it is not JSON, or too deep or long to be read, or has a number that JSON cannot hold.
    """
    try:
        return json.loads(text, strict=False, parse_constant=_refuse, parse_float=_finite)
    except RecursionError as error:
        raise ValueError("nested too deeply") from error


def _refuse(constant: str) -> object:
    raise ValueError(f"{constant} is not JSON")


def _finite(number: str) -> float:
    value = float(number)
    if not math.isfinite(value):
        raise ValueError(f"{number} is too large")
    return value


T = TypeVar("T")
Reading = Generator[None, None, T]  # waits by yielding, returns what it read
Offered = Callable[[str], str | None]  # the offered function that a written name means, None if there is none
NOTHING = ""  # the mark that was found when the text ended first


class NoCall(Exception):  # noqa: N818 - not a fault: the text is content then
    """What a mark began is no call of an offered function."""


class Found(NamedTuple):
    """Text, and the mark that ended it."""

    text: str
    mark: str


class MarkupParser(ABC):
    """Base of the families' parsers; see the module."""

    markers: tuple[str, ...] = ()  # that a tokenizer may have as special tokens; they must reach the parser
    openings: tuple[str, ...] = ()  # marks that begin calls within a text

    def __init__(self, offered: Offered = str) -> None:
        """Args: offered tells the request's functions; by default every name is one."""
        self.num_calls = 0
        self.gap = ""  # white space before the mark that was read last
        self._offered = offered
        self._call_ids: set[str] = set()
        self._text, self._at = "", 0  # come; what is before `_at` has been read
        self._ended = False
        self._deltas: list[Delta] = []
        self._trims = False  # the next content starts a line of its own: drop white space before it
        self._kept: list[str] | None = None  # read by an attempt that has not come to a call
        self._reread = 0
        self._reading: Reading[None] = self._read_all()

    @abstractmethod
    def run(self) -> Reading[None]:
        """Read the whole answer. What it leaves unread is content."""

    def push(self, text: str) -> list[Delta]:
        """Take more text; return what is certain now."""
        self._text, self._at = self._text[self._at :] + text, 0
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
        while not self._ended or self.num_unread:
            self.say(self.take(self.num_unread))
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

    def function(self, name: str) -> str:
        """Return the offered function that a name means.

        Raises:
            NoCall: none was offered under this name.
        """
        function = self._offered(name) if name else None
        if not function:
            raise NoCall
        return function

    def begin_call(self, name: str, call_id: str | None = None) -> str:
        """Put out a call's id and function, and return the function. White space behind the call is not content.

        Args:
            call_id: the model's own; an id that is missing or taken is drawn.

        Raises:
            NoCall: the function was not offered.
        """
        function = self.function(name)
        if not call_id or call_id in self._call_ids:
            call_id = self.new_call_id()
        self._call_ids.add(call_id)
        self._deltas.append(ToolCallDelta(self.num_calls, "", _encodable(call_id), _encodable(function)))
        self.num_calls += 1
        self._trims = True
        self._kept = None
        return function

    def new_call_id(self) -> str:
        """Return an id for a call, in OpenAI's form."""
        return f"call_{secrets.token_hex(12)}"

    def add_arguments(self, text: str) -> None:
        """Put out more of the last call's arguments."""
        assert self.num_calls, "arguments belong to a call that has begun"
        if text:
            self._deltas.append(ToolCallDelta(self.num_calls - 1, _encodable(text)))

    # What is a call.

    def find_calls(self, *marks: str, read: Callable[[str], Reading[None]]) -> Reading[None]:
        """Put text out as content; where a mark comes, read the calls that it begins."""
        while mark := (yield from self.stream_until(self.say, *marks)):
            yield from self.attempt(mark, read(mark), gap=self.gap)

    def attempt(self, mark: str, reading: Reading[None], *, gap: str = "") -> Reading[bool]:
        """Read what a mark has begun; tell whether it was a call.

        If it was none (NoCall), gap and mark are content, and what was read behind them comes again. Within another
        attempt that has not come to a call, the failure is the outer one's.
        """
        if self._kept is not None:
            yield from reading
            return True
        self._kept = []
        try:
            yield from reading
        except NoCall:
            kept, self._kept = "".join(self._kept or ()), None
            self.say(gap + mark)
            self._reread += len(kept)
            if self._reread > _MAX_REREAD:
                self.say(kept)
            else:
                self.put_back(kept)
            return False
        self._kept = None
        return True

    def section(
        self, mark: str, head: str, closings: tuple[str, ...], call: Callable[[], Reading[None]]
    ) -> Reading[None]:
        """Read calls up to their section's end.

        Args:
            mark: has been read: what opens the section, or the first call's head where a model forgot it.
            head: begins each call.
            closings: end the section; they may be missing.
            call: reads a call behind its head.
        """
        if mark != head:
            yield from self.skip_space()
            if not (yield from self.accept(head)):
                raise NoCall
        yield from call()
        yield from self.skip_space()
        while (yield from self.accept(head)):
            if not (yield from self.attempt(head, call())):
                return
            yield from self.skip_space()
        yield from self.end_tag(*closings)

    # Reading.

    @property
    def num_unread(self) -> int:
        """Characters that have come and were not read."""
        return len(self._text) - self._at

    def take(self, length: int) -> str:
        """Take characters that have come."""
        taken = self._text[self._at : self._at + length]
        self._at += len(taken)
        if self._kept is not None:
            self._kept.append(taken)
        return taken

    def put_back(self, text: str) -> None:
        """Let text that was just taken, in one piece, come again."""
        if not text:
            return
        if self._text.endswith(text, 0, self._at):
            self._at -= len(text)
        else:
            self._text, self._at = text + self._text[self._at :], 0
        if self._kept:
            assert self._kept[-1] == text, "only what was read last can be put back"
            self._kept.pop()

    def stream_until(self, out: Callable[[str], None], *marks: str) -> Reading[str]:
        """Pass text on as it comes, up to the first of the marks; return the mark. White space before it is `gap`."""
        gap: list[str] = []
        while True:
            at, mark = _first_mark(self._text, marks, self._at)
            piece = self.take((at if mark else self._certain(marks)) - self._at)
            if not mark and self._ended:
                piece += self.take(self.num_unread)
            body = piece.rstrip()
            if body:
                out("".join(gap) + body)
                gap = []
            if len(body) < len(piece):
                gap.append(piece[len(body) :])
            if mark:
                self.gap = "".join(gap)
                self.take(len(mark))
                return mark
            if self._ended:
                out("".join(gap))
                return NOTHING
            yield

    def value_until(
        self,
        out: Callable[[str], None],
        marks: tuple[str, ...],
        is_end: Callable[[str, str, str, bool], bool | None],
        *,
        line_end: str = "",
    ) -> Reading[str]:
        """Pass a value on as it comes, up to the first mark that really ends it; return the mark.

        Args:
            is_end: gets a mark, the character before it (a line end if there is none), up to AHEAD characters behind
                it, and whether these are all that will ever come; returns None as long as it needs more, or if the
                text was cut off within the mark's tag.
            line_end: is left out before the mark that ends the value.
        """
        before = "\n"
        while True:
            at, mark = _first_mark(self._text, marks, self._at)
            end = at if mark else self._certain(marks)
            verdict = None
            if mark:
                behind = self._text[end + len(mark) : end + len(mark) + AHEAD]
                is_all = self._ended and end + len(mark) + len(behind) == len(self._text)
                last = self._text[end - 1] if end > self._at else before
                verdict = is_end(mark, last, behind, is_all)
                assert verdict is not None or len(behind) < AHEAD, "it must decide now"
            if verdict:
                out(self.take(end - self._at).removesuffix(line_end))
                self.take(len(mark))
                return mark
            if verdict is False:
                end += len(mark)
            elif line_end and self._text.endswith(line_end, self._at, end):
                end -= len(line_end)
            piece = self.take(end - self._at)
            before = piece[-1:] or before
            out(piece)
            if verdict is None:
                if self._ended:  # cut off: what is held back was the begin of a mark
                    self.take(self.num_unread)
                    return NOTHING
                yield

    def _certain(self, marks: tuple[str, ...]) -> int:
        """Return where the unread text's last characters begin that may become a mark."""
        return len(self._text) - longest_head(self._text, marks, self._at)

    def skip_space(self) -> Reading[str]:
        """Pass over white space; return it."""
        parts: list[str] = []
        while True:
            found = _SPACE.match(self._text, self._at)
            assert found is not None, "no white space is white space too"
            parts.append(self.take(found.end() - self._at))
            if self.num_unread or self._ended:
                return "".join(parts)
            yield

    def coming(self, *marks: str) -> Reading[str]:
        """Return which of the marks comes next (the longest), without taking it; NOTHING if none does."""
        while True:
            rest = self._text[self._at : self._at + AHEAD]
            if self._ended or not any(mark.startswith(rest) and mark != rest for mark in marks):
                return max((mark for mark in marks if rest.startswith(mark)), key=len, default=NOTHING)
            yield

    def accept(self, *marks: str) -> Reading[str]:
        """Pass over one of the marks if it comes next, and return it; otherwise NOTHING."""
        mark = yield from self.coming(*marks)
        self.take(len(mark))
        return mark

    def head(self, *marks: str) -> Reading[Found]:
        """Read up to the first of the marks, and the mark.

        Raises:
            NoCall: none is near.
        """
        while True:
            window = self._text[self._at : self._at + AHEAD]
            length, mark = _first_mark(window, marks, 0)
            if mark:
                return Found(self.take(length), self.take(len(mark)))
            if self._ended or len(window) == AHEAD:
                raise NoCall
            yield

    def take_match(self, pattern: re.Pattern[str]) -> Reading[re.Match[str] | None]:
        """Read what a pattern matches; None, and nothing is read, if the next AHEAD characters do not begin with it."""
        while True:
            window = self._text[self._at : self._at + AHEAD]
            if found := pattern.match(window):
                self.take(found.end())
                return found
            if self._ended or len(window) == AHEAD:
                return None
            yield

    def peek(self) -> Reading[str]:
        """Return the next character without taking it; empty at the end."""
        while not self.num_unread and not self._ended:
            yield
        return self._text[self._at : self._at + 1]

    def pass_cut_tag(self, *tags: str) -> Reading[bool]:
        """Pass over the text's end if it is the begin of a tag that was cut off; tell whether it is."""
        mark = yield from self.coming(*tags)
        rest = self._text[self._at : self._at + AHEAD]
        is_cut = self._ended and bool(rest) and not mark and any(tag.startswith(rest) for tag in tags)
        self.take(len(rest) if is_cut else 0)
        return is_cut

    def pass_cut(self, begin: re.Pattern[str]) -> None:
        """Pass over the text's end if it is the begin of something that was cut off: if the pattern matches it whole."""
        if self._ended and begin.fullmatch(self._text, self._at):
            self.take(self.num_unread)

    def end_tag(self, *tags: str) -> Reading[None]:
        """Pass over white space and one of the tags, or as much of it as was not cut off; over nothing if none comes."""
        space = yield from self.skip_space()
        if not (yield from self.pass_cut_tag(*tags)) and not (yield from self.accept(*tags)):
            self.put_back(space)

    def object_comes(self) -> Reading[bool]:
        """Tell whether a JSON object comes next, as far as its first two characters tell."""
        while True:
            window = self._text[self._at : self._at + AHEAD]
            if found := _OBJECT.match(window):
                return found[1] in '"}'
            if self._ended or len(window) == AHEAD or window[:1] not in ("", "{"):
                return False
            yield

    def json_text(self, out: Callable[[str], None]) -> Reading[bool]:
        """Pass the text of one JSON value on as it comes; tell whether it was whole."""
        span = JsonSpan()
        while True:
            while self.num_unread and not span.done:
                length, text = span.push(self._text[self._at : self._at + _SLICE])
                self.take(length)
                out(text)
            if span.done:
                return not span.broken
            if self._ended:
                return False
            yield


def _first_mark(text: str, marks: tuple[str, ...], start: int) -> tuple[int, str]:
    """Return where the first mark is, and which: the longest there; (-1, NOTHING) if there is none."""
    found = _any_of(marks).search(text, start)
    return (found.start(), found[0]) if found else (-1, NOTHING)


@lru_cache(maxsize=256)
def _any_of(marks: tuple[str, ...]) -> re.Pattern[str]:
    return re.compile("|".join(map(re.escape, sorted(marks, key=len, reverse=True))) or r"(?!)")


def longest_head(text: str, marks: tuple[str, ...], start: int = 0) -> int:
    """Return how many characters at the end of the text begin a mark."""
    heads = {mark[0] for mark in marks}
    for at in range(max(start, len(text) - max(map(len, marks), default=0) + 1), len(text)):
        if text[at] in heads and any(mark.startswith(text[at:]) for mark in marks):
            return len(text) - at
    return 0


def _encodable(text: str) -> str:
    """Return text with halves of surrogate pairs, which JSON's escapes can spell, as such escapes again."""
    return text.encode("utf-8", "backslashreplace").decode()
