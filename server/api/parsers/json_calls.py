"""Parse calls written as JSON objects: {"name": ..., "arguments": {...}}, alone or in a list, with or without tags.

Documented formats: Hermes function calling (NousResearch/Hermes-Function-Calling; also Qwen2.5, Qwen3, ERNIE 4.5, EXAONE),
Granite and Hunyuan model cards (a list after a tag), MiniMax-M1's function call guide (several objects in
<tool_calls>), Llama 3.1 prompt format ("parameters", the whole answer), Mistral's tokenizer guide ([TOOL_CALLS], a list
or name[ARGS]{...}), GigaChat 3's chat template (a message with the role "function call"), Cohere's tool use guide
("tool_name", "parameters", a list between <|START_ACTION|> and <|END_ACTION|>).

Arguments are passed on while they arrive. If the name follows them, they wait for it.
"""

import re
import secrets

from server.api.parsers.reader import NOTHING, MarkupParser, NoCall, Offered, Reading, decode_json

_NAMES = ("name", "tool_name")
_ARGUMENTS = ("arguments", "parameters")
# An object with other fields is a call only if it also has arguments.
_ABOUT_THE_CALL = ("id", "type", "index", "tool_call_id")
_MISTRAL_ID = re.compile(r"[a-zA-Z0-9]{9}")


class JsonCallParser(MarkupParser):
    """Read call objects. Subclasses find them in the text."""

    def json_calls(self) -> Reading[None]:
        """Read a call object or a list of them. Text after the last valid call stays unread.

        Raises:
            NoCall: The text does not begin with a call.
        """
        if not (yield from self.accept("[")):
            yield from self._call()
            return
        while True:
            space = yield from self.skip_space()
            if (yield from self.accept("]")):
                return
            if not (yield from self.attempt(NOTHING, self._call())):
                self.put_back(space)
                return
            yield from self.skip_space()
            yield from self.accept(",")

    def _call(self) -> Reading[None]:
        yield from self._expect("{")
        fields = _CallFields(self)
        while True:
            yield from self.skip_space()
            if (yield from self.accept("}")):
                break
            if (yield from self.accept(",")):
                continue
            yield from fields.field((yield from self._field_name()))
            if fields.has_begun:
                yield from self.attempt(NOTHING, self._rest_of_object())
                return
        fields.end()

    def _rest_of_object(self) -> Reading[None]:
        """Read the rest of an object after the call's name and arguments."""
        while True:
            yield from self.skip_space()
            if not (yield from self.peek()) or (yield from self.accept("}")):
                return
            if (yield from self.accept(",")):
                continue
            yield from self._field_name()
            if not (yield from self.json_text(_nowhere)) and (yield from self.peek()):
                raise NoCall

    def _field_name(self) -> Reading[object]:
        if (yield from self.peek()) != '"':
            raise NoCall
        key = yield from self.json_value()
        yield from self.skip_space()
        yield from self._expect(":")
        yield from self.skip_space()
        return key

    def json_value(self) -> Reading[object]:
        """Read one JSON value.

        Raises:
            NoCall: The text is not a JSON value.
        """
        parts: list[str] = []
        yield from self.json_text(parts.append)
        try:
            return decode_json("".join(parts))
        except ValueError as error:
            raise NoCall from error

    def _expect(self, mark: str) -> Reading[None]:
        if not (yield from self.accept(mark)):
            raise NoCall


class _CallFields:
    """The fields of one call object, in any order, until the call begins."""

    def __init__(self, parser: JsonCallParser) -> None:
        self._parser = parser
        self._name = ""
        self._early: str | None = None  # arguments that preceded the name
        self._has_others = False
        self.has_begun = False

    def field(self, key: object) -> Reading[None]:
        """Read a field's value."""
        parser = self._parser
        if key in _NAMES and not self._name:
            name = yield from parser.json_value()
            self._name = parser.function(name if isinstance(name, str) else "")
            if self._early is not None:
                self._begin(self._early)
        elif key in _ARGUMENTS and self._early is None:
            yield from self._arguments()
        else:
            self._has_others |= key not in _ABOUT_THE_CALL
            yield from parser.json_value()

    def _arguments(self) -> Reading[None]:
        parser = self._parser
        if not (yield from parser.object_comes()):
            text = _object_text((yield from parser.json_value()))
        elif self._name:
            self._begin("")
            yield from parser.json_text(parser.add_arguments)
            return
        else:
            parts: list[str] = []
            if not (yield from parser.json_text(parts.append)):
                raise NoCall
            text = "".join(parts)
        if self._name:
            self._begin(text)
        else:
            self._early = text

    def _begin(self, arguments: str) -> None:
        self._parser.begin_call(self._name)
        self._parser.add_arguments(arguments)
        self.has_begun = True

    def end(self) -> None:
        """Close the call. An object with a name and other fields is an answer, not a call without arguments."""
        if not self._name or self._has_others:
            raise NoCall
        self._begin("{}")


def _nowhere(_: str) -> None:
    pass


def _object_text(value: object) -> str:
    """Return the JSON object of arguments written otherwise: as JSON in a string, as some models do, or as an empty value."""
    if isinstance(value, str) and value.strip():
        try:
            decoded = decode_json(value)
        except ValueError as error:
            raise NoCall from error
        if isinstance(decoded, dict):
            return value
        raise NoCall
    if value:
        raise NoCall
    return "{}"


class TaggedJsonParser(JsonCallParser):
    """Parse call objects after a tag, one tag for each or one for all."""

    def __init__(self, offered: Offered, openings: tuple[str, ...], closing: str = NOTHING) -> None:
        super().__init__(offered)
        self.openings = openings
        self._closings = (closing,) if closing else ()
        self.markers = (*openings, *self._closings)

    def run(self) -> Reading[None]:
        yield from self.find_calls(*self.openings, read=self._calls)

    def _calls(self, _: str) -> Reading[None]:
        yield from self.skip_space()
        yield from self.json_calls()
        space = yield from self.skip_space()
        while (yield from self.peek()) in ("{", "["):
            if not (yield from self.attempt(NOTHING, self.json_calls())):
                self.put_back(space)
                return
            space = yield from self.skip_space()
        self.put_back(space)
        yield from self.end_tag(*self._closings)


class WholeJsonParser(JsonCallParser):
    """Parse an answer that either begins with calls or is content throughout."""

    markers = ("<|python_tag|>",)

    def run(self) -> Reading[None]:
        """Read calls, separated by whitespace, commas or semicolons. The rest is content."""
        while (yield from self.attempt(NOTHING, self._calls())):
            pass

    def _calls(self) -> Reading[None]:
        yield from self.skip_space()
        if self.num_calls:
            yield from self.accept(";", ",")
            yield from self.skip_space()
        yield from self.accept("<|python_tag|>")
        if (yield from self.peek()) not in ("{", "["):
            raise NoCall
        yield from self.json_calls()


class MistralParser(JsonCallParser):
    """Parse [TOOL_CALLS] and a list of call objects, or for each call its name, [ARGS] and its arguments."""

    markers = ("[TOOL_CALLS]", "[ARGS]", "[CALL_ID]")
    openings = ("[TOOL_CALLS]",)

    def new_call_id(self) -> str:
        """Return an id of nine letters and digits: Mistral's templates refuse other ids."""
        return secrets.token_hex(5)[:9]

    def run(self) -> Reading[None]:
        yield from self.find_calls(*self.openings, read=self._calls)

    def _calls(self, _: str) -> Reading[None]:
        yield from self.skip_space()
        if (yield from self.peek()) in ("[", "{"):
            yield from self.json_calls()
            return
        found = yield from self.head("[ARGS]", "[CALL_ID]", "{", "[TOOL_CALLS]")
        name, call_id = self.function(found.text.strip()), ""
        if found.mark == "[CALL_ID]":
            call_id = (yield from self.head("[ARGS]")).text
        elif found.mark == "{":
            self.put_back(found.mark)
        yield from self.skip_space()
        if not (yield from self.object_comes()):
            raise NoCall
        self.begin_call(name, call_id if _MISTRAL_ID.fullmatch(call_id) else None)
        yield from self.json_text(self.add_arguments)


class NamedCallParser(MarkupParser):
    """Parse an answer that is the arguments of one call, for a tool_choice that names the function."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self._name = name

    def run(self) -> Reading[None]:
        yield from self.skip_space()
        if (yield from self.peek()):
            self.begin_call(self._name)
            yield from self.json_text(self.add_arguments)


class JsonListParser(JsonCallParser):
    """Parse an answer that is a list of call objects, for tool_choice "required"."""

    def run(self) -> Reading[None]:
        """Read the calls. Without a list, the text is content."""
        space = yield from self.skip_space()
        if (yield from self.peek()) == "[":
            yield from self.attempt(NOTHING, self.json_calls())
        else:
            self.put_back(space)
