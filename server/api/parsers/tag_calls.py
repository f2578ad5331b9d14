"""Calls that are written in tags, one pair per argument.

Documented in the model repositories of Qwen3-Coder (chat template), MiniMax-M2 (tool calling guide), GLM-4.5 (chat
template) and DeepSeek (encoding/; DSML: V3.2 has function_calls as the section's name, V4 tool_calls; bars are U+FF5C):

    <tool_call>\\n<function=NAME>\\n<parameter=KEY>\\nVALUE\\n</parameter>\\n</function>\\n</tool_call>
    <minimax:tool_call>\\n<invoke name="NAME">\\n<parameter name="KEY">VALUE</parameter>\\n</invoke>\\n</minimax:tool_call>
    <tool_call>NAME\\n<arg_key>KEY</arg_key>\\n<arg_value>VALUE</arg_value>\\n</tool_call>
    <|DSML|function_calls>\\n<|DSML|invoke name="NAME">\\n<|DSML|parameter name="KEY" string="true">VALUE</|DSML|parameter>\\n
    </|DSML|invoke>\\n</|DSML|function_calls>

Such formats write "5" for the number and for the text. DSML marks text itself; for the others the function's schema decides:
text stays text where a string is allowed, and is read as JSON otherwise. What does not fit stays text: the caller's own
validation then sees what the model wrote. Text comes out as it comes in, other arguments whole: only its end tells what a
value is. If the text ends inside one, the object stays open, so that nobody takes a call that was cut off for a whole one.
"""

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from server.api.parsers.reader import Found, MarkupParser, Reading, decode_json

Schema = Mapping[str, Any]
_WORDS = {"true": True, "false": False, "null": None, "none": None}
_MAX_DEPTH = 8  # of anyOf in anyOf


class ArgumentTypes:
    """The arguments' schemas of a request's functions."""

    def __init__(self, parameters: Mapping[str, Schema]) -> None:
        """Args: parameters are each function's JSON schema."""
        self._parameters = parameters

    def is_text(self, function: str, argument: str) -> bool:
        """Tell whether an argument is text whatever is written."""
        kinds = self._kinds(function, argument)
        return "string" in kinds and "null" not in kinds

    def json_of(self, function: str, argument: str, text: str) -> str:
        """Return an argument's JSON text."""
        kinds = self._kinds(function, argument)
        word = text.strip()
        if "string" in kinds and not (word.lower() == "null" and "null" in kinds):
            return json.dumps(text, ensure_ascii=False)
        if word.lower() in _WORDS:
            return json.dumps(_WORDS[word.lower()])
        try:
            return json.dumps(decode_json(word), ensure_ascii=False)
        except (ValueError, RecursionError):
            return json.dumps(text, ensure_ascii=False)

    def _kinds(self, function: str, argument: str) -> set[str]:
        root = self._parameters.get(function) or {}
        properties = root.get("properties")
        schema = properties.get(argument) if isinstance(properties, Mapping) else None
        return _kinds(schema, root, _MAX_DEPTH, set())


def _kinds(schema: Any, root: Schema, depth: int, followed: set[str]) -> set[str]:
    """Collect the JSON types that a schema allows, as far as it says; each reference is followed once."""
    if not isinstance(schema, Mapping) or depth == 0:
        return set()
    said = schema.get("type")
    kinds = {each for each in (said if isinstance(said, list) else [said]) if isinstance(each, str)}
    for value in _listed(schema, "enum"):
        kinds.add("string" if isinstance(value, str) else "null" if value is None else "other")
    for way in ("anyOf", "oneOf", "allOf"):
        for each in _listed(schema, way):
            kinds |= _kinds(each, root, depth - 1, followed)
    reference = schema.get("$ref")
    if isinstance(reference, str) and reference not in followed:
        followed.add(reference)
        kinds |= _kinds(_resolve(reference, root), root, depth - 1, followed)
    return kinds


def _listed(schema: Schema, key: str) -> list[Any]:
    value = schema.get(key)
    return value if isinstance(value, list) else []


def _resolve(reference: str, root: Schema) -> Any:
    """Return what a reference within the same schema points to, None if nothing."""
    at: Any = root
    for step in reference.removeprefix("#").split("/"):
        if step:
            at = at.get(step.replace("~1", "/").replace("~0", "~")) if isinstance(at, Mapping) else None
    return at


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


TOKEN = "\uff5cDSML\uff5c"
_IS_TEXT = re.compile(r"""\sstring=["'](true|false)["']""")
_ANY_JSON = ArgumentTypes({})  # knows no function: what is JSON is taken as such


def dsml_tags(section: str) -> Tags:
    """Return the tags of a version.

    Args:
        section: "function_calls" or "tool_calls".
    """
    return Tags(
        section=(f"<{TOKEN}{section}>", f"</{TOKEN}{section}>"),
        call=(f"<{TOKEN}invoke name=", f"</{TOKEN}invoke>"),
        argument=(f"<{TOKEN}parameter name=", f"</{TOKEN}parameter>"),
    )


class DsmlParser(NamedTagParser):
    """Named tags with one more attribute."""

    def __init__(self, section: str, types: ArgumentTypes) -> None:
        super().__init__(dsml_tags(section), types)
        self.markers = (TOKEN,)

    def read_argument(self) -> Reading[bool]:
        """Read one argument; tell whether it was whole. Its text is raw: no line end is left out."""
        found = yield from self.until(">")
        key = self.name_in(found)
        if not key:
            return False
        said = _IS_TEXT.search(found.text)
        types = None if said is None else _ANY_TEXT if said[1] == "true" else _ANY_JSON
        return (yield from self.read_value(key, trim=_unchanged, types=types))


class _AnyText(ArgumentTypes):
    def is_text(self, function: str, argument: str) -> bool:
        """Say that everything is."""
        return True


_ANY_TEXT = _AnyText({})
