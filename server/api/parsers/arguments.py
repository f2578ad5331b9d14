"""Find a request's functions by name, and convert the text of arguments by their schemas.

Formats with tags write "5" for both a number and a text, so the schema decides: text stays text if a string is allowed, and
is read as JSON otherwise. Models that saw Python's repr of arrays and objects write that, so it is read if the schema allows
an array or object. Text that does not fit stays text: the caller's own validation then sees what the model wrote.
"""

import json
import re
from collections.abc import Mapping
from typing import Any
from urllib.parse import unquote

from server.api.parsers.literals import read_literal
from server.api.parsers.reader import decode_json

Schema = Mapping[str, Any]
_WORDS = {"true": True, "false": False, "null": None, "none": None}
_MAX_DEPTH = 8  # levels of anyOf within anyOf


class ArgumentTypes:
    """The names of a request's functions and the schemas of their arguments."""

    def __init__(self, parameters: Mapping[str, Schema]) -> None:
        """Args: parameters has the JSON schema of each function's arguments, by the function's name."""
        self._parameters = parameters

    def offered(self, name: str) -> str | None:
        """Return the offered function for a name that a model wrote, or None.

        Accepts the function's own name, its name in harmony's namespace (functions.f), and f.f, which Muse writes for a
        function without a namespace.
        """
        short, _, last = name.removeprefix("functions.").partition(".")
        ways = (name, name.removeprefix("functions."), short if short == last else "")
        return next((way for way in ways if way in self._parameters), None)

    def of_call_id(self, call_id: str) -> str | None:
        """Return the offered function that a Kimi call id names.

        The form is functions.NAME:NUMBER. Clients replace characters that their ids may not have, and models copy the result.
        """
        before, _, number = call_id.partition(":")
        named = self.offered(before)
        if named is not None and (number.isdecimal() or not number):
            return named
        for name in sorted(self._parameters, key=len, reverse=True):
            spelled = "|".join(
                re.escape(each) for each in {name, re.sub(r"\W", "_", name), re.sub(r"\W", "", name)}
            )
            if re.fullmatch(rf"(?:functions?[._:-]?)?(?:{spelled})(?:[._:-]?\d+)?", call_id):
                return name
        return None

    def may_have(self, function: str, argument: str) -> bool:
        """Return whether a function's schema has an argument. True if it declares no properties."""
        properties = (self._parameters.get(function) or {}).get("properties")
        return not (isinstance(properties, Mapping) and properties) or argument in properties

    def is_text(self, function: str, argument: str) -> bool:
        """Return whether an argument is always text."""
        kinds = self._kinds(function, argument)
        return "string" in kinds and "null" not in kinds

    def excludes_text(self, function: str, argument: str) -> bool:
        """Return whether an argument is certainly not text."""
        kinds = self._kinds(function, argument)
        return bool(kinds) and not kinds & {"string", "other"}

    def json_of(self, function: str, argument: str, text: str) -> str:
        """Return an argument's JSON text."""
        kinds = self._kinds(function, argument)
        word = text.strip()
        if "string" in kinds and not (word.lower() == "null" and "null" in kinds):
            return json.dumps(text, ensure_ascii=False)
        if word.lower() in _WORDS:
            return json.dumps(_WORDS[word.lower()])
        try:
            value = decode_json(word)
        except ValueError:
            value = read_literal(word) if kinds & {"array", "object"} and word[:1] in "[{(" else text
        try:
            return json.dumps(value, ensure_ascii=False, allow_nan=False)
        except (ValueError, RecursionError):
            return json.dumps(text, ensure_ascii=False)

    def _kinds(self, function: str, argument: str) -> set[str]:
        root = self._parameters.get(function) or {}
        properties = root.get("properties")
        schema = properties.get(argument) if isinstance(properties, Mapping) else None
        return _kinds(schema, root, _MAX_DEPTH, set())


class _AnyText(ArgumentTypes):
    def is_text(self, function: str, argument: str) -> bool:
        return True


ANY_TEXT = _AnyText({})
ANY_JSON = ArgumentTypes({})  # without a schema: text that is valid JSON is read as JSON


def _kinds(schema: Any, root: Schema, depth: int, followed: set[str]) -> set[str]:
    """Collect the JSON types that a schema allows explicitly. Follows each reference once."""
    if not isinstance(schema, Mapping) or depth == 0:
        return set()
    said = schema.get("type")
    kinds = {each for each in (said if isinstance(said, list) else [said]) if isinstance(each, str)}
    for value in (*_listed(schema, "enum"), *([schema["const"]] if "const" in schema else [])):
        kinds.add(_kind_of(value))
    for way in ("anyOf", "oneOf", "allOf"):
        for each in _listed(schema, way):
            kinds |= _kinds(each, root, depth - 1, followed)
    reference = schema.get("$ref")
    if isinstance(reference, str) and reference not in followed:
        followed.add(reference)
        kinds |= _kinds(_resolve(reference, root), root, depth - 1, followed)
    if not kinds:
        implied = {"properties": "object", "items": "array"}
        kinds = {kind for key, kind in implied.items() if isinstance(schema.get(key), Mapping)}
    return kinds


def _kind_of(value: Any) -> str:
    if value is None:
        return "null"
    kinds = ((str, "string"), (list, "array"), (dict, "object"))
    return next((kind for python, kind in kinds if isinstance(value, python)), "other")


def _listed(schema: Schema, key: str) -> list[Any]:
    value = schema.get(key)
    return value if isinstance(value, list) else []


def _resolve(reference: str, root: Schema) -> Any:
    """Return the target of a reference within the same schema (RFC 6901, as a URI fragment), or None."""
    at: Any = root
    for step in unquote(reference.removeprefix("#")).split("/"):
        key = step.replace("~1", "/").replace("~0", "~")
        if not key:
            continue
        if isinstance(at, list):
            at = at[int(key)] if key.isdecimal() and int(key) < len(at) else None
        else:
            at = at.get(key) if isinstance(at, Mapping) else None
    return at
