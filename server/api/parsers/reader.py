"""Base of the parsers: a coroutine that reads marks and values from a text that is still growing.

A family's parser is straight-line code, `run`. It reads "the text up to this mark" or "one JSON value" and waits if the text
has not arrived yet (every `yield` is such a wait). So it reads like a parser of complete texts, and its result cannot depend
on how the text was split. The rejected alternative, one state machine per family, causes most streaming bugs in the parsers
of other servers.

One place decides what is a call: `attempt` reads the text after a mark, and returns all of it as text unless it reaches
`begin_call` with a function that the request offered. After a call, too, text that does not belong to it is content. So no
text is lost, and prose about the syntax stays prose.

Text is held back only while it may still become a mark, or is whitespace that a mark may follow. Held-back text is short
(AHEAD) or taken out of the buffer, so the work per piece does not grow with the answer.
"""

import json
import re
import secrets
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator
from functools import lru_cache
from typing import NamedTuple, TypeVar

from server.api.parsers.deltas import ContentDelta, Delta, ReasoningDelta, ToolCallDelta, merge
from server.api.parsers.json_span import JsonSpan
from server.http.json_text import finite, refuse_constant

AHEAD = 256  # maximum number of characters to inspect before a decision; names and tags are shorter
# Maximum number of characters read twice per answer. Beyond it, the text of a failed call becomes content at once.
_MAX_REREAD = 1 << 20
_SLICE = 4096  # characters of a long text to process at a time
_SPACE = re.compile(r"\s*")
_OBJECT = re.compile(r"\{\s*(\S)")


def decode_json(text: str) -> object:
    """Decode one JSON value. Strings may contain control characters; NaN and infinities are errors.

    Raises:
        ValueError: The text is not JSON, is too deep or long, or has a number that JSON cannot represent.
    """
    try:
        return json.loads(text, strict=False, parse_constant=refuse_constant, parse_float=finite)
    except RecursionError as error:
        raise ValueError("nested too deeply") from error


T = TypeVar("T")
Reading = Generator[None, None, T]  # waits by yielding, returns what it read
Offered = Callable[[str], str | None]  # returns the offered function for a written name, or None
NOTHING = ""  # the mark if the text ended before one was found


class NoCall(Exception):  # noqa: N818 - not an error: the text becomes content
    """The text after a mark is not a call of an offered function."""


class Found(NamedTuple):
    """Text, and the mark that ended it."""

    text: str
    mark: str


class MarkupParser(ABC):
    """Base of the families' parsers."""

    markers: tuple[str, ...] = ()  # marks that must reach the parser even if they are special tokens
    openings: tuple[str, ...] = ()  # marks that begin calls within a text

    def __init__(self, offered: Offered = str) -> None:
        """Args: offered finds the request's function for a name; by default every name is a function."""
        self.num_calls = 0
        self.gap = ""  # whitespace before the last mark
        self._offered = offered
        self._call_ids: set[str] = set()
        self._text, self._at = "", 0  # received text; everything before `_at` has been read
        self._ended = False
        self._cut_at: str | None = None  # as in `TextParser.finish`
        self._deltas: list[Delta] = []
        self._trims = False  # the next content begins a new line: drop whitespace before it
        self._kept: list[str] | None = None  # text read by an attempt that has not begun a call yet
        self._reread = 0
        self._reading: Reading[None] = self._read_all()

    @abstractmethod
    def run(self) -> Reading[None]:
        """Read the whole answer. Unread text becomes content."""

    def push(self, text: str) -> list[Delta]:
        """Add text and return the deltas that are certain now."""
        self._text, self._at = self._text[self._at :] + text, 0
        return self._advance()

    def finish(self, cut_at: str | None = None) -> list[Delta]:
        """Return the deltas that were held back, at the end of the text. May be called more than once."""
        self._ended, self._cut_at = True, cut_at
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

    # Output.

    def say(self, text: str) -> None:
        """Output content."""
        if self._trims:
            text = text.lstrip()
        if text:
            self._trims = False
            self._deltas.append(ContentDelta(text))

    def think(self, text: str) -> None:
        """Output reasoning."""
        if text:
            self._deltas.append(ReasoningDelta(text))

    def function(self, name: str) -> str:
        """Return the offered function for a name.

        Raises:
            NoCall: No function with this name was offered.
        """
        function = self._offered(name) if name else None
        if not function:
            raise NoCall
        return function

    def begin_call(self, name: str, call_id: str | None = None) -> str:
        """Output a call's id and function, and return the function. Whitespace after the call is not content.

        Args:
            call_id: The model's id. A missing or repeated one is replaced by a random id.

        Raises:
            NoCall: The function was not offered.
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
        """Return a random call id in OpenAI's form."""
        return f"call_{secrets.token_hex(12)}"

    def add_arguments(self, text: str) -> None:
        """Output more of the last call's arguments."""
        assert self.num_calls, "arguments were added before a call began"
        if text:
            self._deltas.append(ToolCallDelta(self.num_calls - 1, _encodable(text)))

    # Calls.

    def find_calls(self, *marks: str, read: Callable[[str], Reading[None]]) -> Reading[None]:
        """Output text as content, and read the calls that begin at marks."""
        while mark := (yield from self.stream_until(self.say, *marks)):
            yield from self.attempt(mark, read(mark), gap=self.gap)

    def attempt(self, mark: str, reading: Reading[None], *, gap: str = "") -> Reading[bool]:
        """Read the text after a mark, and return whether it was a call.

        If not (NoCall), gap and mark become content, and the text after them is read again. Within another attempt that
        has not begun a call, NoCall propagates to the outer attempt.
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
        """Read calls up to the end of their section.

        Args:
            mark: The mark already read: the section's opening, or the first call's head if a model forgot the opening.
            head: The mark that begins each call.
            closings: The marks that end the section; they may be missing.
            call: Reads a call after its head.
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
        """Number of received characters that were not read."""
        return len(self._text) - self._at

    def take(self, length: int) -> str:
        """Take characters that have been received."""
        taken = self._text[self._at : self._at + length]
        self._at += len(taken)
        if self._kept is not None:
            self._kept.append(taken)
        return taken

    def put_back(self, text: str) -> None:
        """Put back the text of the last `take`, so that it is read again."""
        if not text:
            return
        if self._text.endswith(text, 0, self._at):
            self._at -= len(text)
        else:
            self._text, self._at = text + self._text[self._at :], 0
        if self._kept:
            assert self._kept[-1] == text, "only the text of the last take can be put back"
            self._kept.pop()

    def stream_until(self, out: Callable[[str], None], *marks: str) -> Reading[str]:
        """Pass text on while it arrives, up to the first mark, and return the mark. Sets `gap` to the whitespace before it."""
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
        """Pass a value on while it arrives, up to the first mark that really ends it, and return the mark.

        Args:
            is_end: Gets a mark, the character before it (a line end at the start), up to AHEAD characters after it, and
                whether the text ends with these. Returns None if it needs more text, or if the text was truncated within
                the mark's tag.
            line_end: Omitted before the mark that ends the value.
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
                assert verdict is not None or len(behind) < AHEAD, "is_end must decide after AHEAD characters"
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
                if self._ended:  # truncated: the held-back text was the beginning of a mark
                    self.take(self.num_unread)
                    return NOTHING
                yield

    def _certain(self, marks: tuple[str, ...]) -> int:
        """Return the position from which the unread text may become a mark."""
        return len(self._text) - longest_head(self._text, marks, self._at)

    def skip_space(self) -> Reading[str]:
        """Skip whitespace and return it."""
        parts: list[str] = []
        while True:
            found = _SPACE.match(self._text, self._at)
            assert found is not None, "the pattern matches empty whitespace"
            parts.append(self.take(found.end() - self._at))
            if self.num_unread or self._ended:
                return "".join(parts)
            yield

    def coming(self, *marks: str) -> Reading[str]:
        """Return the longest of the marks that comes next, without taking it. Returns NOTHING if none comes next."""
        while True:
            rest = self._text[self._at : self._at + AHEAD]
            if self._ended or not any(mark.startswith(rest) and mark != rest for mark in marks):
                return max((mark for mark in marks if rest.startswith(mark)), key=len, default=NOTHING)
            yield

    def accept(self, *marks: str) -> Reading[str]:
        """Take one of the marks if it comes next, and return it. Otherwise return NOTHING."""
        mark = yield from self.coming(*marks)
        self.take(len(mark))
        return mark

    def head(self, *marks: str) -> Reading[Found]:
        """Read up to the first of the marks, including the mark.

        Raises:
            NoCall: The next AHEAD characters contain no mark.
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
        """Read the match of a pattern. Returns None and reads nothing if the next AHEAD characters do not begin with it."""
        while True:
            window = self._text[self._at : self._at + AHEAD]
            if found := pattern.match(window):
                self.take(found.end())
                return found
            if self._ended or len(window) == AHEAD:
                return None
            yield

    def peek(self) -> Reading[str]:
        """Return the next character without taking it. Returns an empty string at the end."""
        while not self.num_unread and not self._ended:
            yield
        return self._text[self._at : self._at + 1]

    def pass_cut_tag(self, *tags: str) -> Reading[bool]:
        """Skip the end of the text if it is the beginning of a truncated tag, and return whether it is."""
        mark = yield from self.coming(*tags)
        rest = self._text[self._at : self._at + AHEAD]
        is_cut = self._ended and bool(rest) and not mark and any(tag.startswith(rest) for tag in tags)
        self.take(len(rest) if is_cut else 0)
        return is_cut

    def is_cut_before(self, *tags: str) -> bool:
        """Return whether the text was cut off at this position, by something other than one of the tags."""
        if self._cut_at is None or not self._ended or self.num_unread:
            return False
        return not self._cut_at.lstrip().startswith(tags)

    def pass_cut(self, begin: re.Pattern[str]) -> None:
        """Skip the rest of the text if it is truncated: the text has ended, and the pattern matches the rest completely."""
        if self._ended and begin.fullmatch(self._text, self._at):
            self.take(self.num_unread)

    def end_tag(self, *tags: str) -> Reading[None]:
        """Skip whitespace and one of the tags, which may be truncated. If no tag comes next, skip nothing."""
        space = yield from self.skip_space()
        if not (yield from self.pass_cut_tag(*tags)) and not (yield from self.accept(*tags)):
            self.put_back(space)

    def object_comes(self) -> Reading[bool]:
        """Return whether a JSON object comes next, judging by its first two characters."""
        while True:
            window = self._text[self._at : self._at + AHEAD]
            if found := _OBJECT.match(window):
                return found[1] in '"}'
            if self._ended or len(window) == AHEAD or window[:1] not in ("", "{"):
                return False
            yield

    def json_text(self, out: Callable[[str], None]) -> Reading[bool]:
        """Pass the text of one JSON value on while it arrives, and return whether it was complete."""
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
    """Return the position of the first mark and the longest mark there, or (-1, NOTHING)."""
    found = _any_of(marks).search(text, start)
    return (found.start(), found[0]) if found else (-1, NOTHING)


@lru_cache(maxsize=256)
def _any_of(marks: tuple[str, ...]) -> re.Pattern[str]:
    return re.compile("|".join(map(re.escape, sorted(marks, key=len, reverse=True))) or r"(?!)")


def longest_head(text: str, marks: tuple[str, ...], start: int = 0) -> int:
    """Return the number of characters at the end of the text that begin a mark."""
    heads = {mark[0] for mark in marks}
    for at in range(max(start, len(text) - max(map(len, marks), default=0) + 1), len(text)):
        if text[at] in heads and any(mark.startswith(text[at:]) for mark in marks):
            return len(text) - at
    return 0


def _encodable(text: str) -> str:
    """Replace lone surrogates, which come from JSON's escapes, by these escapes."""
    return text.encode("utf-8", "backslashreplace").decode()
