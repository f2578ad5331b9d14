"""Calls that are written in tags, one pair per argument.

Documented in the model repositories of Qwen3-Coder (chat template), MiniMax-M2 (tool calling guide), GLM-4.5 and Hy3 (chat
templates), DeepSeek (encoding/; DSML: V3.2 has function_calls as the section's name, V4 tool_calls; bars are U+FF5C) and, for
Muse, in the parsers of vLLM and SGLang (muse_glimmer):

    <tool_call>\\n<function=NAME>\\n<parameter=KEY>\\nVALUE\\n</parameter>\\n</function>\\n</tool_call>
    <minimax:tool_call>\\n<invoke name="NAME">\\n<parameter name="KEY">VALUE</parameter>\\n</invoke>\\n</minimax:tool_call>
    <tool_call>NAME\\n<arg_key>KEY</arg_key>\\n<arg_value>VALUE</arg_value>\\n</tool_call>
    <tool_calls>\\n<tool_call>NAME<tool_sep>\\n<arg_key>KEY</arg_key>\\n<arg_value>VALUE</arg_value>\\n</tool_call>\\n</tool_calls>
    <|DSML|function_calls>\\n<|DSML|invoke name="NAME">\\n<|DSML|parameter name="KEY" string="true">VALUE</|DSML|parameter>\\n
    </|DSML|invoke>\\n</|DSML|function_calls>

A value is data, and data may quote tags: it ends at a closing tag only where the next argument, the call's end or the text's
end follows, and without one (models forget it) only where the rest has the form of what must follow. A value that holds the
very sequence that ends it cannot be told from its end.

DSML marks text itself; for the others the function's schema decides (see `arguments`). Text comes out as it comes in, other
arguments whole: only its end tells what a value is. If the text ends inside one, the object stays open, so that nobody takes
a call that was cut off for a whole one.
"""

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property, lru_cache

from server.api.parsers.arguments import ANY_JSON, ANY_TEXT
from server.api.parsers.arguments import ArgumentTypes as ArgumentTypes  # where others import it from
from server.api.parsers.reader import AHEAD, MarkupParser, NoCall, Reading

_SPACE = r"\s{0,64}"
_KEY = r"[^<>\n]{1,128}"
_QUOTED = re.compile(r"""\s*(?:"([^"]*)"|'([^']*)')""")


@dataclass(frozen=True)
class ArgumentTag:
    """What opens an argument. Patterns are of the text behind the head."""

    head: str
    rest: str  # has the argument's name as the group `key`
    cut: str  # of what there is of the rest where the text was cut off

    @cached_property
    def whole(self) -> re.Pattern[str]:
        """Return a pattern of the tag."""
        return re.compile(re.escape(self.head) + self.rest)

    @cached_property
    def begin(self) -> re.Pattern[str]:
        """Return a pattern of the tag where it was cut off."""
        return re.compile(re.escape(self.head) + self.cut)


@dataclass(frozen=True)
class End:
    """Where a tag ends a value: in front of which others, besides white space."""

    tags: tuple[str, ...]
    behind: re.Pattern[str]  # the same, whole; its group `key` is an argument that begins there
    cut: re.Pattern[str]  # an argument's tag that was cut off
    opens_argument: bool = False  # the tag is the next argument's: a model has forgotten this value's end
    starts_line: bool = False  # only at the begin of a line, then


def _end(tags: Iterable[str], argument: ArgumentTag | None = None) -> End:
    """Return an end before any of the tags, or before an argument."""
    tags = tuple(tags)
    if argument is None:
        return End(tags, re.compile(f"{_SPACE}(?:{'|'.join(map(re.escape, tags))})"), re.compile(r"(?!)"))
    head = re.escape(argument.head)
    before = "|".join((head + argument.rest, *map(re.escape, tags)))
    return End(
        (argument.head, *tags), re.compile(f"{_SPACE}(?:{before})"), re.compile(_SPACE + head + argument.cut)
    )


def _next_argument(argument: ArgumentTag, *, starts_line: bool) -> End:
    """Return the end of a value that nobody closed, at the next argument's head."""
    return End(
        ("",),
        re.compile(argument.rest),
        re.compile(argument.cut),
        opens_argument=True,
        starts_line=starts_line,
    )


class TagCallParser(MarkupParser):
    """What the forms have in common: arguments that make up an object, one by one."""

    line_end = ""  # stands before a value's closing tag and is not the value's

    def __init__(self, types: ArgumentTypes) -> None:
        super().__init__(types.offered)
        self._types = types
        self._function = ""
        self._keys: set[str] = set()
        self._key = ""

    def begin(self, function: str) -> None:
        """Begin a call."""
        self._function = self.begin_call(function)
        self._keys = set()

    def argument(self, key: str, ends: Mapping[str, End], types: ArgumentTypes | None = None) -> Reading[str]:
        """Read an argument's value, put it out, and return the tag that ended it; NOTHING if it was cut off.

        Args:
            ends: by the tag that ends the value.
            types: say what the value is; None asks the functions' schemas.
        """
        types = types or self._types
        self._key = key
        head = f"{', ' if self._keys else '{'}{_quoted(key)}: "

        def is_end(mark: str, before: str, behind: str, is_all: bool) -> bool | None:
            return self._is_end(ends[mark], before, behind, is_all)

        marks = tuple(ends)
        if types.is_text(self._function, key):
            self.add_arguments(f'{head}"')
            mark = yield from self.value_until(self._add_text, marks, is_end, line_end=self.line_end)
            self.add_arguments('"' if mark else "")
        else:
            parts: list[str] = []
            mark = yield from self.value_until(parts.append, marks, is_end, line_end=self.line_end)
            self.add_arguments(head + types.json_of(self._function, key, "".join(parts)) if mark else "")
        self._keys.add(key)
        return mark

    def _is_end(self, end: End, before: str, behind: str, is_all: bool) -> bool | None:
        if end.starts_line and before != "\n":
            return False
        if found := end.behind.match(behind):
            key = found.groupdict().get("key")
            return key is None or self._may_begin(self.name_in(key), end)
        if is_all and end.cut.fullmatch(behind):
            return None if end.opens_argument else True
        rest = behind.lstrip()
        if is_all:
            return not end.opens_argument and any(tag.startswith(rest) for tag in end.tags)
        may_come = any(tag.startswith(rest) or rest.startswith(tag) for tag in end.tags)
        return None if may_come and len(behind) < AHEAD else False

    def _may_begin(self, key: str, end: End) -> bool:
        """Tell whether an argument may begin here: an object has each once, and one that ends a value is known."""
        is_new = bool(key) and key not in self._keys and key != self._key
        return is_new and (not end.opens_argument or self._types.may_have(self._function, key))

    def name_in(self, tag: str) -> str:
        """Return the name at the begin of a tag's rest: perhaps in quotes, perhaps with more attributes behind it."""
        quoted = _QUOTED.match(tag)
        return ((quoted[1] or quoted[2] or "") if quoted else tag).strip()

    def _add_text(self, text: str) -> None:
        self.add_arguments(_quoted(text)[1:-1])

    def json_body(self) -> Reading[bool]:
        """Read arguments that stand as one JSON object where the form has tags; tell whether they were whole."""
        return (yield from self.json_text(self.add_arguments))

    def end(self) -> None:
        """End the call's arguments."""
        self.add_arguments("}" if self._keys else "{}")


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


@dataclass(frozen=True, kw_only=True)
class Tags:
    """Tags whose names carry the function's and the argument's name: opening (or its head) and closing."""

    sections: tuple[tuple[str, str], ...]
    call: tuple[str, str]
    argument: tuple[str, str]

    @property
    def openings(self) -> tuple[str, ...]:
        """What may begin calls. A call without its section's tags is one too: models forget them."""
        return (*(opening for opening, _ in self.sections), self.call[0])

    @property
    def closings(self) -> tuple[str, ...]:
        """What may end sections."""
        return tuple(closing for _, closing in self.sections)


QWEN3_CODER = Tags(
    sections=(("<tool_call>", "</tool_call>"),),
    call=("<function=", "</function>"),
    argument=("<parameter=", "</parameter>"),
)
MINIMAX_M2 = Tags(
    sections=(("<minimax:tool_call>", "</minimax:tool_call>"),),
    call=("<invoke name=", "</invoke>"),
    argument=("<parameter name=", "</parameter>"),
)
MUSE = Tags(
    sections=(("<atem:function_calls>", "</atem:function_calls>"),),
    call=("<atem:invoke name=", "</atem:invoke>"),
    argument=("<atem:parameter name=", "</atem:parameter>"),
)
TOKEN = "\uff5cDSML\uff5c"
_DSML_SECTIONS = ("function_calls", "tool_calls")  # V3.2's and V4's; a model may have learnt both
DSML = Tags(
    sections=tuple((f"<{TOKEN}{section}>", f"</{TOKEN}{section}>") for section in _DSML_SECTIONS),
    call=(f"<{TOKEN}invoke name=", f"</{TOKEN}invoke>"),
    argument=(f"<{TOKEN}parameter name=", f"</{TOKEN}parameter>"),
)


@lru_cache
def _argument_of(tags: Tags) -> ArgumentTag:
    return ArgumentTag(tags.argument[0], rf"(?P<key>{_KEY})>", rf"(?:{_KEY})?")


@lru_cache
def _ends_of(tags: Tags) -> dict[str, End]:
    """Return where a value ends, by the tag."""
    argument, after_call = _argument_of(tags), (*tags.closings, *tags.openings)
    return {
        tags.argument[1]: _end((tags.call[1], *after_call), argument),
        tags.argument[0]: _next_argument(argument, starts_line=True),
        tags.call[1]: _end(after_call),
        **dict.fromkeys(tags.closings, _end(tags.openings)),
    }


class NamedTagParser(TagCallParser):
    """Qwen3-Coder's and MiniMax-M2's form."""

    line_end = "\n"

    def __init__(self, tags: Tags, types: ArgumentTypes) -> None:
        super().__init__(types)
        self._tags = tags
        self.openings = tags.openings
        self.markers = tuple(tag for section in tags.sections for tag in section)

    def run(self) -> Reading[None]:
        """Read content and sections in turn."""
        yield from self.find_calls(*self.openings, read=self._section)

    def _section(self, mark: str) -> Reading[None]:
        return self.section(mark, self._tags.call[0], self._tags.closings, self._call)

    def _call(self) -> Reading[None]:
        tag = (yield from self.head(">")).text
        name = self.function(self.name_in(tag))
        if tag.endswith("/"):  # <invoke name="f"/>
            self.begin(name)
            self.end()
            return
        yield from self.skip_space()
        if (yield from self.object_comes()):
            self.begin(name)
            yield from self.json_body()
        elif (yield from self.coming(self._tags.argument[0], self._tags.call[1], *self._tags.closings)):
            self.begin(name)
            if not (yield from self._arguments()):
                return
            self.end()
        else:
            raise NoCall
        yield from self.end_tag(self._tags.call[1])

    def _arguments(self) -> Reading[bool]:
        """Read arguments; tell whether they are whole."""
        while (yield from self.coming(self._tags.argument[0])):
            found = yield from self.take_match(_argument_of(self._tags).whole)
            if found is None:
                self.pass_cut(_argument_of(self._tags).begin)
                return False
            if not (yield from self.read_argument(found["key"])):
                return False
            yield from self.skip_space()
        return not (yield from self.pass_cut_tag(self._tags.argument[0]))

    def read_argument(self, tag: str) -> Reading[bool]:
        """Read the argument whose opening tag has this rest; tell whether it was whole.

        A value may stand on lines of its own. Where it does not, a line end at its end is the value's.
        """
        self.line_end = yield from self.accept("\n")
        return (yield from self.read_value(self.name_in(tag)))

    def read_value(self, key: str, types: ArgumentTypes | None = None) -> Reading[bool]:
        """Read an argument's value; tell whether it was whole. `types` as in `argument`."""
        mark = yield from self.argument(key, _ends_of(self._tags), types)
        if mark != self._tags.argument[1]:
            self.put_back(mark)
        return bool(mark)


_IS_TEXT = re.compile(r"""\sstring=["'](true|false)["']""")


class DsmlParser(NamedTagParser):
    """Named tags with one more attribute. Text is raw: no line end is left out."""

    line_end = ""

    def __init__(self, types: ArgumentTypes) -> None:
        super().__init__(DSML, types)
        self.markers = (TOKEN,)

    def read_argument(self, tag: str) -> Reading[bool]:
        """Read an argument as the tag's attribute says."""
        said = _IS_TEXT.search(tag)
        types = None if said is None else ANY_TEXT if said[1] == "true" else ANY_JSON
        return (yield from self.read_value(self.name_in(tag), types))


@dataclass(frozen=True, kw_only=True)
class KeyTags:
    """Tags around keys and values: opening and closing."""

    call: tuple[str, str] = ("<tool_call>", "</tool_call>")
    key: tuple[str, str] = ("<arg_key>", "</arg_key>")
    value: tuple[str, str] = ("<arg_value>", "</arg_value>")
    separator: str = ""  # behind the function's name
    section: tuple[str, str] | None = None

    def spelled(self, suffix: str) -> "KeyTags":
        """Return the tags with a suffix in each."""

        def pair(tags: tuple[str, str]) -> tuple[str, str]:
            return (tags[0].replace(">", f"{suffix}>"), tags[1].replace(">", f"{suffix}>"))

        return KeyTags(
            call=pair(self.call),
            key=pair(self.key),
            value=pair(self.value),
            separator=self.separator.replace(">", f"{suffix}>"),
            section=pair(self.section) if self.section else None,
        )

    @property
    def all(self) -> tuple[str, ...]:
        """Every tag."""
        return (
            *(self.section or ()),
            *self.call,
            *((self.separator,) if self.separator else ()),
            *self.key,
            *self.value,
        )


GLM = KeyTags()
_HY3_TAGS = KeyTags(separator="<tool_sep>", section=("<tool_calls>", "</tool_calls>"))
HY3 = (
    _HY3_TAGS,
    _HY3_TAGS.spelled(":opensource"),
)  # the published checkpoints write the suffix, the preview none


@lru_cache
def _key_of(tags: KeyTags) -> ArgumentTag:
    """Return what stands before a value; models forget the key's closing tag."""
    closing, value = map(re.escape, (tags.key[1], tags.value[0]))
    cut = rf"{_begin_of(tags.key[1])}|{closing}{_SPACE}{_begin_of(tags.value[0])}|{_begin_of(tags.value[0])}"
    return ArgumentTag(
        tags.key[0],
        rf"(?P<key>{_KEY}){_SPACE}(?:{closing}{_SPACE})?{value}",
        rf"(?:{_KEY})?{_SPACE}(?:{cut})",
    )


def _begin_of(tag: str) -> str:
    """Return a pattern of as much of a tag as there may be."""
    return "".join(f"(?:{re.escape(char)}" for char in tag) + ")?" * len(tag)


@lru_cache
def _key_ends_of(tags: KeyTags) -> dict[str, End]:
    """Return where a value ends, by the tag."""
    argument, openings = _key_of(tags), (tags.call[0], *(tags.section or ()))
    return {
        tags.value[1]: _end((tags.call[1], *openings), argument),
        tags.key[0]: _next_argument(argument, starts_line=False),
        tags.call[1]: _end(openings),
    }


class KeyTagParser(TagCallParser):
    """GLM-4.5's and Hy3's form: tags around keys and values."""

    def __init__(self, spellings: tuple[KeyTags, ...], types: ArgumentTypes) -> None:
        super().__init__(types)
        self._by_opening = {tags.call[0]: tags for tags in spellings}
        self._by_opening |= {tags.section[0]: tags for tags in spellings if tags.section}
        self.openings = tuple(self._by_opening)
        self.markers = tuple(tag for tags in spellings for tag in tags.all)

    def run(self) -> Reading[None]:
        """Read content and calls in turn."""
        yield from self.find_calls(*self.openings, read=self._calls)

    def _calls(self, mark: str) -> Reading[None]:
        tags = self._by_opening[mark]
        closings = (tags.section[1],) if tags.section else ()
        return self.section(mark, tags.call[0], closings, lambda: self._call(tags))

    def _call(self, tags: KeyTags) -> Reading[None]:
        separators = (tags.separator,) if tags.separator else ()
        found = yield from self.head(*separators, tags.key[0], tags.call[1], tags.call[0], "{")
        name = self.function(found.text.strip())
        if found.mark in separators:
            yield from self.skip_space()
        elif found.mark == tags.call[0]:
            raise NoCall
        else:
            self.put_back(found.mark)
        if (yield from self.object_comes()):
            self.begin(name)
            yield from self.json_body()
        elif not (yield from self._key_arguments(tags, name)):
            return
        yield from self.end_tag(tags.call[1])

    def _key_arguments(self, tags: KeyTags, name: str) -> Reading[bool]:
        """Begin the call and read its arguments; tell whether they are whole."""
        found = yield from self.take_match(_key_of(tags).whole)
        if found is None and not (yield from self.coming(tags.call[1])):
            raise NoCall
        self.begin(name)
        while found is not None:
            mark = yield from self.argument(found["key"].strip(), _key_ends_of(tags))
            if mark != tags.value[1]:
                self.put_back(mark)
            if not mark:
                return False
            yield from self.skip_space()
            if (yield from self.pass_cut_tag(tags.key[0])):
                return False
            begins = yield from self.coming(tags.key[0])
            found = (yield from self.take_match(_key_of(tags).whole)) if begins else None
            if begins and found is None:
                self.pass_cut(_key_of(tags).begin)
                return False
        self.end()
        return True
