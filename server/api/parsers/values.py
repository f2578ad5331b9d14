"""Arguments that a model writes as plain text between tags, brought to JSON by the function's schema.

Such formats (Qwen3-Coder, GLM-4.5, MiniMax-M2) say "5" for the number and for the text, so the schema decides: text
stays text where a string is allowed, and is read as JSON otherwise. What does not fit stays text: the caller's own
validation then sees what the model wrote. Knows no markup.
"""

import json
from collections.abc import Mapping
from typing import Any

from server.api.parsers.json_text import decode_json

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
        return _kinds(schema, root, _MAX_DEPTH)


def _kinds(schema: Any, root: Schema, depth: int) -> set[str]:
    """Collect the JSON types that a schema allows, as far as it says."""
    if not isinstance(schema, Mapping) or depth == 0:
        return set()
    said = schema.get("type")
    kinds = {said} if isinstance(said, str) else set(said if isinstance(said, list) else ())
    for value in _listed(schema, "enum"):
        kinds.add("string" if isinstance(value, str) else "null" if value is None else "other")
    for way in ("anyOf", "oneOf", "allOf"):
        for each in _listed(schema, way):
            kinds |= _kinds(each, root, depth - 1)
    if isinstance(schema.get("$ref"), str):
        kinds |= _kinds(_resolve(schema["$ref"], root), root, depth - 1)
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
