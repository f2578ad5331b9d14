"""Parse calls written in tags, with one pair per argument.

Documented in the model repositories of Qwen3-Coder (chat template), MiniMax-M2 (tool calling guide), GLM-4.5 and Hy3 (chat
templates), DeepSeek (encoding/; DSML: the section is named function_calls in V3.2, tool_calls in V4; bars are U+FF5C) and, for
Muse, in the parsers of vLLM and SGLang (muse_glimmer):

    <tool_call>\\n<function=NAME>\\n<parameter=KEY>\\nVALUE\\n</parameter>\\n</function>\\n</tool_call>
    <minimax:tool_call>\\n<invoke name="NAME">\\n<parameter name="KEY">VALUE</parameter>\\n</invoke>\\n</minimax:tool_call>
    <tool_call>NAME\\n<arg_key>KEY</arg_key>\\n<arg_value>VALUE</arg_value>\\n</tool_call>
    <tool_calls>\\n<tool_call>NAME<tool_sep>\\n<arg_key>KEY</arg_key>\\n<arg_value>VALUE</arg_value>\\n</tool_call>\\n</tool_calls>
    <|DSML|function_calls>\\n<|DSML|invoke name="NAME">\\n<|DSML|parameter name="KEY" string="true">VALUE</|DSML|parameter>\\n
    </|DSML|invoke>\\n</|DSML|function_calls>

A value is data, and data may quote tags. So it ends at a closing tag only if the next argument, the call's end or the text's
end follows. Without a closing tag (models forget it), it ends only if the rest has the form of what must follow. A value that
contains exactly the sequence that ends it cannot be distinguished from its end.

DSML marks which values are text; otherwise the function's schema decides (see `arguments`). Text is output while it arrives,
other arguments when complete, because only the end tag determines the value. If the text ends inside an argument, or is cut
off before the call's end, the object stays open, so that a client cannot mistake a truncated call for a complete one.
"""

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property, lru_cache

from server.api.parsers.arguments import ANY_JSON, ANY_TEXT
from server.api.parsers.arguments import ArgumentTypes as ArgumentTypes  # other modules import it from here
from server.api.parsers.reader import AHEAD, MarkupParser, NoCall, Reading

_SPACE = r"\s{0,64}"
_KEY = r"[^<>\n]{1,128}"
_QUOTED = re.compile(r"""\s*(?:"([^"]*)"|'([^']*)')""")


@dataclass(frozen=True)
class ArgumentTag:
    """The opening tag of an argument. Patterns apply to the text after the head."""

    head: str
    rest: str  # pattern of the rest, with the argument's name as the group `key`
    cut: str  # pattern of a truncated rest

    @cached_property
    def whole(self) -> re.Pattern[str]:
        """The pattern of the complete tag."""
        return re.compile(re.escape(self.head) + self.rest)

    @cached_property
    def begin(self) -> re.Pattern[str]:
        """The pattern of a truncated tag."""
        return re.compile(re.escape(self.head) + self.cut)


@dataclass(frozen=True)
class End:
    """The condition under which a tag ends a value: the tags that must follow, after optional whitespace."""

    tags: tuple[str, ...]
    behind: re.Pattern[str]  # matches these tags completely; its group `key` is an argument that begins there
    cut: re.Pattern[str]  # matches a truncated argument tag
    opens_argument: bool = False  # the tag opens the next argument: the model forgot to close this value
    starts_line: bool = False  # and it must be at the beginning of a line


def _end(tags: Iterable[str], argument: ArgumentTag | None = None) -> End:
    """Return the end of a value before any of the tags, or before an argument."""
    tags = tuple(tags)
    if argument is None:
        return End(tags, re.compile(f"{_SPACE}(?:{'|'.join(map(re.escape, tags))})"), re.compile(r"(?!)"))
    head = re.escape(argument.head)
    before = "|".join((head + argument.rest, *map(re.escape, tags)))
    return End(
        (argument.head, *tags), re.compile(f"{_SPACE}(?:{before})"), re.compile(_SPACE + head + argument.cut)
    )


def _next_argument(argument: ArgumentTag, *, starts_line: bool) -> End:
    """Return the end of an unclosed value, at the next argument's head."""
    return End(
        ("",),
        re.compile(argument.rest),
        re.compile(argument.cut),
        opens_argument=True,
        starts_line=starts_line,
    )


class TagCallParser(MarkupParser):
    """Base of the forms with tags: output arguments one by one as an object."""

    line_end = ""  # precedes a value's closing tag and does not belong to the value

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
        """Read and output an argument's value, and return the tag that ended it. Returns NOTHING if it was truncated.

        Args:
            ends: End conditions by the tag that ends the value.
            types: Types of the value; None uses the functions' schemas.
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
        """Return whether an argument may begin here. Each may occur once, and one that ends a value must be known."""
        is_new = bool(key) and key not in self._keys and key != self._key
        return is_new and (not end.opens_argument or self._types.may_have(self._function, key))

    def name_in(self, tag: str) -> str:
        """Return the name at the beginning of a tag's rest, which may be quoted and followed by attributes."""
        quoted = _QUOTED.match(tag)
        return ((quoted[1] or quoted[2] or "") if quoted else tag).strip()

    def _add_text(self, text: str) -> None:
        self.add_arguments(_quoted(text)[1:-1])

    def json_body(self) -> Reading[bool]:
        """Read arguments written as one JSON object instead of tags, and return whether they were complete."""
        return (yield from self.json_text(self.add_arguments))

    def end(self) -> None:
        """Close the call's arguments."""
        self.add_arguments("}" if self._keys else "{}")


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


@dataclass(frozen=True, kw_only=True)
class Tags:
    """Tags that contain the function's and the argument's name: opening (or its head) and closing."""

    sections: tuple[tuple[str, str], ...]
    call: tuple[str, str]
    argument: tuple[str, str]

    @property
    def openings(self) -> tuple[str, ...]:
        """The tags that may begin calls. A call may lack its section's tags: models forget them."""
        return (*(opening for opening, _ in self.sections), self.call[0])

    @property
    def closings(self) -> tuple[str, ...]:
        """The tags that may end sections."""
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
_DSML_SECTIONS = ("function_calls", "tool_calls")  # V3.2's and V4's; a model may have learned both
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
    """Return the end conditions of a value by tag."""
    argument, after_call = _argument_of(tags), (*tags.closings, *tags.openings)
    return {
        tags.argument[1]: _end((tags.call[1], *after_call), argument),
        tags.argument[0]: _next_argument(argument, starts_line=True),
        tags.call[1]: _end(after_call),
        **dict.fromkeys(tags.closings, _end(tags.openings)),
    }


class NamedTagParser(TagCallParser):
    """Parse Qwen3-Coder's, MiniMax-M2's and Muse's form."""

    line_end = "\n"

    def __init__(self, tags: Tags, types: ArgumentTypes) -> None:
        super().__init__(types)
        self._tags = tags
        self.openings = tags.openings
        self.markers = tuple(tag for section in tags.sections for tag in section)

    def run(self) -> Reading[None]:
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
        """Read arguments and return whether they are complete."""
        while (yield from self.coming(self._tags.argument[0])):
            found = yield from self.take_match(_argument_of(self._tags).whole)
            if found is None:
                self.pass_cut(_argument_of(self._tags).begin)
                return False
            if not (yield from self.read_argument(found["key"])):
                return False
            yield from self.skip_space()
        if (yield from self.pass_cut_tag(self._tags.argument[0])):
            return False
        return not self.is_cut_before(self._tags.call[1], *self._tags.closings, *self._tags.openings)

    def read_argument(self, tag: str) -> Reading[bool]:
        """Read an argument, given the rest of its opening tag, and return whether it was complete.

        A value may be on separate lines. If it is not, a line end at its end belongs to the value.
        """
        self.line_end = yield from self.accept("\n")
        return (yield from self.read_value(self.name_in(tag)))

    def read_value(self, key: str, types: ArgumentTypes | None = None) -> Reading[bool]:
        """Read an argument's value and return whether it was complete. `types` is as in `argument`."""
        mark = yield from self.argument(key, _ends_of(self._tags), types)
        if mark != self._tags.argument[1]:
            self.put_back(mark)
        return bool(mark)


_IS_TEXT = re.compile(r"""\sstring=["'](true|false)["']""")


class DsmlParser(NamedTagParser):
    """Parse named tags with one more attribute. Text is raw: line ends belong to it."""

    line_end = ""

    def __init__(self, types: ArgumentTypes) -> None:
        super().__init__(DSML, types)
        self.markers = (TOKEN,)

    def read_argument(self, tag: str) -> Reading[bool]:
        """Read an argument by the type in the tag's attribute."""
        said = _IS_TEXT.search(tag)
        types = None if said is None else ANY_TEXT if said[1] == "true" else ANY_JSON
        return (yield from self.read_value(self.name_in(tag), types))


@dataclass(frozen=True, kw_only=True)
class KeyTags:
    """Tags around keys and values: opening and closing."""

    call: tuple[str, str] = ("<tool_call>", "</tool_call>")
    key: tuple[str, str] = ("<arg_key>", "</arg_key>")
    value: tuple[str, str] = ("<arg_value>", "</arg_value>")
    separator: str = ""  # after the function's name
    section: tuple[str, str] | None = None

    def spelled(self, suffix: str) -> "KeyTags":
        """Return these tags with a suffix in each."""

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
        """All tags."""
        return (
            *(self.section or ()),
            *self.call,
            *((self.separator,) if self.separator else ()),
            *self.key,
            *self.value,
        )


GLM = KeyTags()
_HY3_TAGS = KeyTags(separator="<tool_sep>", section=("<tool_calls>", "</tool_calls>"))
# The published checkpoints write the suffix, the preview does not.
HY3 = (_HY3_TAGS, _HY3_TAGS.spelled(":opensource"))


@lru_cache
def _key_of(tags: KeyTags) -> ArgumentTag:
    """Return the tags before a value. Models forget the key's closing tag."""
    closing, value = map(re.escape, (tags.key[1], tags.value[0]))
    cut = rf"{_begin_of(tags.key[1])}|{closing}{_SPACE}{_begin_of(tags.value[0])}|{_begin_of(tags.value[0])}"
    return ArgumentTag(
        tags.key[0],
        rf"(?P<key>{_KEY}){_SPACE}(?:{closing}{_SPACE})?{value}",
        rf"(?:{_KEY})?{_SPACE}(?:{cut})",
    )


def _begin_of(tag: str) -> str:
    """Return a pattern of a tag's beginning, of any length."""
    return "".join(f"(?:{re.escape(char)}" for char in tag) + ")?" * len(tag)


@lru_cache
def _key_ends_of(tags: KeyTags) -> dict[str, End]:
    """Return the end conditions of a value by tag."""
    argument, openings = _key_of(tags), (tags.call[0], *(tags.section or ()))
    return {
        tags.value[1]: _end((tags.call[1], *openings), argument),
        tags.key[0]: _next_argument(argument, starts_line=False),
        tags.call[1]: _end(openings),
    }


class KeyTagParser(TagCallParser):
    """Parse GLM-4.5's and Hy3's form: tags around keys and values."""

    def __init__(self, spellings: tuple[KeyTags, ...], types: ArgumentTypes) -> None:
        super().__init__(types)
        self._by_opening = {tags.call[0]: tags for tags in spellings}
        self._by_opening |= {tags.section[0]: tags for tags in spellings if tags.section}
        self.openings = tuple(self._by_opening)
        self.markers = tuple(tag for tags in spellings for tag in tags.all)

    def run(self) -> Reading[None]:
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
        """Begin the call, read its arguments, and return whether they are complete."""
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
            if self.is_cut_before(*tags.call, *(tags.section or ())):
                return False
            begins = yield from self.coming(tags.key[0])
            found = (yield from self.take_match(_key_of(tags).whole)) if begins else None
            if begins and found is None:
                self.pass_cut(_key_of(tags).begin)
                return False
        self.end()
        return True
