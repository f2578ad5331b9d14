"""Calls that are written in tags, one pair per argument.

Documented in the model repositories of Qwen3-Coder (chat template), MiniMax-M2 (tool calling guide) and GLM-4.5 (chat
template):

    <tool_call>\\n<function=NAME>\\n<parameter=KEY>\\nVALUE\\n</parameter>\\n</function>\\n</tool_call>
    <minimax:tool_call>\\n<invoke name="NAME">\\n<parameter name="KEY">VALUE</parameter>\\n</invoke>\\n</minimax:tool_call>
    <tool_call>NAME\\n<arg_key>KEY</arg_key>\\n<arg_value>VALUE</arg_value>\\n</tool_call>

Text comes out as it comes in, other arguments whole: only its end tells what a value is. If the text ends inside one,
the object stays open, so that nobody takes a call that was cut off for a whole one.
"""

import json
import re
from collections.abc import Callable
from dataclasses import dataclass

from server.api.parsers.reader import Found, MarkupParser, Reading
from server.api.parsers.values import ArgumentTypes

_QUOTED = re.compile(r"""\s*(?:"([^"]*)"|'([^']*)')""")
_FUNCTION_NAME = re.compile(r"[\w.:/-]+")


class TagCallParser(MarkupParser):
    """What the forms have in common: arguments that make up an object, one by one."""

    def __init__(self, types: ArgumentTypes) -> None:
        super().__init__()
        self._types = types
        self._function = ""
        self._keys: set[str] = set()

    def begin(self, function: str) -> None:
        """Begin a call."""
        self.begin_call(function)
        self._function = function
        self._keys = set()

    def argument(
        self, key: str, *marks: str, trim: Callable[[str], str], types: ArgumentTypes | None = None
    ) -> Reading[str]:
        """Read an argument's value up to a mark, put it out, and return the mark.

        A key that comes again is passed over, for an object has each once. Text goes out as it comes.

        Args:
            types: say what the value is; None asks the functions' schemas.
        """
        types = types or self._types
        if key in self._keys:
            return (yield from self.until(*marks)).mark
        head = f"{', ' if self._keys else '{'}{_quoted(key)}: "
        if types.is_text(self._function, key):
            self._keys.add(key)
            self.add_arguments(f'{head}"')
            mark = yield from self.stream_until(self._add_text, *marks, trim=trim, keeps_rest=False)
            self.add_arguments('"' if mark else "")
            return mark
        found = yield from self.until(*marks)
        if found.mark:
            self._keys.add(key)
            value = types.json_of(self._function, key, trim(found.text))
            self.add_arguments(head + value)
        return found.mark

    def _add_text(self, text: str) -> None:
        self.add_arguments(_quoted(text)[1:-1])

    def end(self) -> None:
        """End the call's arguments."""
        self.add_arguments("}" if self._keys else "{}")


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _unchanged(text: str) -> str:
    return text


def _without_line_end(text: str) -> str:
    return text.removesuffix("\n")


@dataclass(frozen=True, kw_only=True)
class Tags:
    """Tags whose names carry the function's and the argument's name: opening (or its head) and closing."""

    section: tuple[str, str]
    call: tuple[str, str]
    argument: tuple[str, str]


QWEN3_CODER = Tags(
    section=("<tool_call>", "</tool_call>"),
    call=("<function=", "</function>"),
    argument=("<parameter=", "</parameter>"),
)
MINIMAX_M2 = Tags(
    section=("<minimax:tool_call>", "</minimax:tool_call>"),
    call=("<invoke name=", "</invoke>"),
    argument=("<parameter name=", "</parameter>"),
)


class NamedTagParser(TagCallParser):
    """Qwen3-Coder's and MiniMax-M2's form. A call without its section's tags is one too: models forget them."""

    def __init__(self, tags: Tags, types: ArgumentTypes) -> None:
        super().__init__(types)
        self._tags = tags
        self.markers = tags.section

    def run(self) -> Reading[None]:
        """Read content and sections in turn."""
        opening, closing = self._tags.section
        while mark := (yield from self.content_until(opening, self._tags.call[0])):
            self.keep(mark)
            if mark == opening:
                yield from self._section()
            else:
                yield from self._call()
                yield from self.skip_space()
                yield from self.accept(closing)
            self.say_kept()

    def _section(self) -> Reading[None]:
        opening, closing = self._tags.section
        while True:
            mark = (yield from self.until(self._tags.call[0], closing, opening)).mark
            if mark != self._tags.call[0]:
                break
            yield from self._call()
        if mark == opening:
            self.put_back(mark)

    def _call(self) -> Reading[None]:
        name = yield from self._name()
        if not name:
            return
        self.begin(name)
        heads = (self._tags.argument[0], self._tags.call[1], self._tags.call[0], self._tags.section[1])
        while True:
            mark = (yield from self.until(*heads)).mark
            if mark != self._tags.argument[0]:
                break
            if not (yield from self.read_argument()):
                return
        self.end()
        if mark in heads[2:]:
            self.put_back(mark)

    def read_argument(self) -> Reading[bool]:
        """Read one argument; tell whether it was whole."""
        key = yield from self._name()
        if not key:
            return False
        yield from self.accept("\n")
        return (yield from self.read_value(key, trim=_without_line_end))

    def read_value(
        self, key: str, *, trim: Callable[[str], str], types: ArgumentTypes | None = None
    ) -> Reading[bool]:
        """Read an argument's value; tell whether it was whole. `types` as in `argument`."""
        closing, *others = (self._tags.argument[1], self._tags.argument[0], self._tags.call[1])
        mark = yield from self.argument(key, closing, *others, trim=trim, types=types)
        if mark in others:
            self.put_back(mark)
        return bool(mark)

    def _name(self) -> Reading[str]:
        """Read the rest of a tag."""
        return self.name_in((yield from self.until(">")))

    def name_in(self, found: Found) -> str:
        """Return the name at the begin of a tag's rest: perhaps in quotes, perhaps with more attributes behind it."""
        quoted = _QUOTED.match(found.text)
        name = (quoted[1] or quoted[2] or "") if quoted else found.text
        return name.strip() if found.mark else ""


class GlmParser(TagCallParser):
    """GLM-4.5's form: tags around keys and values."""

    markers = ("<tool_call>", "</tool_call>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>")

    def run(self) -> Reading[None]:
        """Read content and calls in turn."""
        while (yield from self.content_until("<tool_call>")):
            self.keep("<tool_call>")
            found = yield from self.until("<arg_key>", "</tool_call>", "<tool_call>")
            if found.mark and _FUNCTION_NAME.fullmatch(found.text.strip()):
                self.begin(found.text.strip())
                yield from self._arguments(found.mark)
            elif found.mark == "<tool_call>":
                self.put_back(found.mark)
            elif found.mark == "<arg_key>":
                yield from self.until("</tool_call>")
            self.say_kept()

    def _arguments(self, mark: str) -> Reading[None]:
        while mark == "<arg_key>":
            key = (yield from self.until("</arg_key>")).text.strip()
            yield from self.until("<arg_value>")
            value_end = yield from self.argument(
                key, "</arg_value>", "<arg_key>", "</tool_call>", trim=_unchanged
            )
            if not value_end:
                return
            if value_end != "</arg_value>":
                self.put_back(value_end)
            mark = (yield from self.until("<arg_key>", "</tool_call>", "<tool_call>")).mark
        self.end()
        if mark == "<tool_call>":
            self.put_back(mark)
