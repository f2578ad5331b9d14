"""Calls that are written as JSON objects: {"name": ..., "arguments": {...}}, alone or in a list, with or without tags.

Documented formats: Hermes function calling (NousResearch/Hermes-Function-Calling; Qwen2.5, Qwen3, ERNIE 4.5, EXAONE
write it too), Granite and Hunyuan model cards (a list after a tag), Llama 3.1 prompt format ("parameters", the whole
answer), Mistral's tokenizer guide ([TOOL_CALLS], a list or name[ARGS]{...}).

Arguments are passed on as they come. The name may stand after them; then they wait for it.
"""

import secrets

from server.api.parsers.reader import NOTHING, MarkupParser, Reading, decode_json

_ARGUMENTS = ("arguments", "parameters")


class Malformed(Exception):  # noqa: N818 - not a fault: the text is content then
    """What should be a call is none."""


class JsonCallParser(MarkupParser):
    """Reads call objects; subclasses know where they stand."""

    def json_calls(self) -> Reading[bool]:
        """Read a call object or a list of them; tell whether it was whole and well-formed."""
        try:
            if not (yield from self.accept("[")):
                yield from self._call()
                return True
            while True:
                yield from self.skip_space()
                if (yield from self.accept("]")):
                    return True
                if not (yield from self.accept(",")):
                    yield from self._call()
        except Malformed:
            return False

    def _call(self) -> Reading[None]:
        yield from self._expect("{")
        reader = _CallFields(self)
        while True:
            yield from self.skip_space()
            if (yield from self.accept("}")):
                break
            if (yield from self.accept(",")):
                continue
            if (yield from self.peek()) != '"':
                raise Malformed
            key = yield from self.json_value()
            yield from self.skip_space()
            yield from self._expect(":")
            yield from self.skip_space()
            yield from reader.field(key)
        reader.end()

    def json_value(self) -> Reading[object]:
        """Read one JSON value.

        Raises:
            Malformed: it is none.
        """
        parts: list[str] = []
        yield from self.json_text(parts.append)
        try:
            return decode_json("".join(parts))
        except ValueError as error:
            raise Malformed from error

    def _expect(self, mark: str) -> Reading[None]:
        if not (yield from self.accept(mark)):
            raise Malformed


class _CallFields:
    """The fields of one call object, in any order."""

    def __init__(self, parser: JsonCallParser) -> None:
        self._parser = parser
        self._begun = False
        self._early: str | None = None  # arguments that came before the name
        self._has_arguments = False

    def field(self, key: object) -> Reading[None]:
        """Read a field's value."""
        if key == "name" and not self._begun:
            name = yield from self._parser.json_value()
            if not isinstance(name, str) or not name:
                raise Malformed
            self._parser.begin_call(name)
            self._begun = True
            self._parser.add_arguments(self._early or "")
        elif key in _ARGUMENTS and not self._has_arguments:
            self._has_arguments = True
            yield from self._arguments()
        else:
            yield from self._parser.json_value()

    def _arguments(self) -> Reading[None]:
        if (yield from self._parser.peek()) == "{":
            parts: list[str] = []
            out = self._parser.add_arguments if self._begun else parts.append
            if not (yield from self._parser.json_text(out)):
                raise Malformed
            text = "".join(parts)
        else:
            text = _object_text((yield from self._parser.json_value()))
        if self._begun:
            self._parser.add_arguments(text)
        else:
            self._early = text

    def end(self) -> None:
        """Close the call."""
        if not self._begun:
            raise Malformed
        if not self._has_arguments:
            self._parser.add_arguments("{}")


def _object_text(value: object) -> str:
    """Arguments that are no object: JSON in a string, which some models write, or nothing at all."""
    if isinstance(value, str) and value.strip():
        return value
    if value:
        raise Malformed
    return "{}"


class TaggedJsonParser(JsonCallParser):
    """Call objects, each or all after a tag."""

    def __init__(self, opening: str, closing: str | None = None) -> None:
        super().__init__()
        self._opening = opening
        self._ends = (opening,) if closing is None else (opening, closing)
        self.markers = self._ends

    def run(self) -> Reading[None]:
        """Read content and calls in turn."""
        while (yield from self.content_until(self._opening)):
            self.keep(self._opening)
            yield from self.skip_space()
            whole = yield from self.json_calls()
            if not (whole and len(self._ends) == 1):
                mark = (yield from self.until(*self._ends)).mark
                if mark == self._opening:
                    self.put_back(mark)
            self.say_kept()


class WholeJsonParser(JsonCallParser):
    """An answer that is nothing but calls: from its first character, or content throughout."""

    markers = ("<|python_tag|>",)

    def run(self) -> Reading[None]:
        """Read calls, separated by white space, commas or semicolons, as long as there are any."""
        whole = True
        while whole:
            while self.num_calls and (yield from self.peek()) in (";", ",", " ", "\n"):
                self.take(1)
            self.keep(NOTHING)
            yield from self.skip_space()
            yield from self.accept("<|python_tag|>")
            if (yield from self.peek()) not in ("{", "["):
                break
            whole = yield from self.json_calls()
        self.say_kept()


class MistralParser(JsonCallParser):
    """[TOOL_CALLS] and a list of call objects, or for each call its name, [ARGS] and its arguments."""

    markers = ("[TOOL_CALLS]", "[ARGS]", "[CALL_ID]")

    def begin_call(self, name: str, call_id: str | None = None) -> None:
        """Put out a call's id and name; Mistral's templates refuse ids of other than nine letters and digits."""
        super().begin_call(name, call_id or secrets.token_hex(5)[:9])

    def run(self) -> Reading[None]:
        """Read content, then calls."""
        mark = yield from self.content_until("[TOOL_CALLS]")
        while mark:
            self.keep(mark)
            yield from self.skip_space()
            if (yield from self.peek()) in ("[", "{"):
                yield from self.json_calls()
            else:
                yield from self._named_call()
            self.say_kept()
            mark = yield from self.content_until("[TOOL_CALLS]")

    def _named_call(self) -> Reading[None]:
        found = yield from self.until("[ARGS]", "[CALL_ID]", "{", "[TOOL_CALLS]")
        name = found.text.strip()
        if found.mark == "[CALL_ID]":
            yield from self.until("[ARGS]")
        if found.mark in ("{", "[TOOL_CALLS]"):
            self.put_back(found.mark)
        else:
            yield from self.skip_space()
        if name and found.mark and (yield from self.peek()) == "{":
            self.begin_call(name)
            yield from self.json_text(self.add_arguments)


class NamedCallParser(MarkupParser):
    """An answer that is the arguments of one call, whose name is known: tool_choice names a function."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self._name = name

    def run(self) -> Reading[None]:
        """Read the arguments."""
        yield from self.skip_space()
        if (yield from self.peek()):
            self.begin_call(self._name)
            yield from self.json_text(self.add_arguments)


class JsonListParser(JsonCallParser):
    """An answer that is a list of call objects: what tool_choice "required" binds it to."""

    def run(self) -> Reading[None]:
        """Read the calls; what is no list is content."""
        yield from self.skip_space()
        if (yield from self.peek()) == "[":
            self.keep(NOTHING)
            yield from self.json_calls()
            self.say_kept()
