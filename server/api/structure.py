"""Read the structure that an answer must have: response_format, structured_outputs, guided_* and similar fields.

The fields are OpenAI's response_format, vLLM's structured_outputs and its older guided_*, and those of SGLang and llama.cpp
(json_schema, regex, ebnf, grammar). A request may have one structure. It is compiled before the request is accepted, so
an invalid structure gets a 400 with the reason.
"""

import importlib
import json
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any, NamedTuple

from scheduler.policy.request import Structure
from scheduler.structure.compiler import StructureError
from server.api.schemas import UNSET, SamplingFields, json_text
from server.api.served import ServedModel
from server.front.errors import bad_request
from server.front.generations import Pattern

MAX_CHARS = 1 << 18  # bytes of a schema, regex or grammar
MAX_DEPTH = 64  # levels of a schema
MAX_CHOICES = 10_000
MAX_STOP_REGEXES = 8
MAX_STOP_REGEX_CHARS = 512
_FORMATS = "response_format.type must be one of 'text', 'json_object', 'json_schema'"
_COMPACT = {"x-guidance": {"whitespace_flexible": False}}  # llguidance's own key in a schema


class WantedStructure(NamedTuple):
    """A structure and the field that requested it."""

    param: str
    structure: Structure


async def structure_of(body: SamplingFields, model: ServedModel) -> Structure | None:
    """Return the requested structure, or None if any text is allowed. Compiles it once as a check.

    Raises:
        ApiError: 400, naming the field, if the structure is invalid, cannot be compiled, or is not the only one.
    """
    asked = asked_structure(body)
    if asked is None:
        return None
    await check_structure(asked.structure, model, asked.param)
    return asked.structure


async def stop_patterns_of(body: SamplingFields, model: ServedModel) -> tuple[Pattern, ...]:
    """Return the compiled regexes that end a request's answers.

    Raises:
        ApiError: 400 if a regex is unusable; 429 if too many slow compilations are waiting.
    """
    regexes = [body.stop_regex] if isinstance(body.stop_regex, str) else body.stop_regex or []
    if not isinstance(regexes, list) or not all(isinstance(regex, str) and regex for regex in regexes):
        raise bad_request("stop_regex must be a non-empty string or a list of them.", "stop_regex")
    if len(regexes) > MAX_STOP_REGEXES or any(len(regex) > MAX_STOP_REGEX_CHARS for regex in regexes):
        raise bad_request(
            f"stop_regex accepts up to {MAX_STOP_REGEXES} regexes of up to {MAX_STOP_REGEX_CHARS} characters.",
            "stop_regex",
        )
    for regex in regexes:  # compile in a process with limits, before a thread of this process does it
        await check_structure(Structure("regex", regex), model, "stop_regex")
    if not regexes:
        return ()
    # Imported late: llguidance takes 0.1 s to import.
    module = importlib.import_module("scheduler.structure.stop_pattern")
    try:
        patterns: tuple[Pattern, ...] = await model.run(lambda: module.compile_all(regexes), is_long=True)
    except StructureError as error:
        raise bad_request(f"stop_regex {error}.", "stop_regex") from None
    return patterns


async def check_structure(structure: Structure, model: ServedModel, param: str) -> None:
    """Compile a structure as a check.

    Args:
        param: Field that errors name.

    Raises:
        ApiError: 400 if the structure is invalid; 429 if too many slow compilations are waiting.
    """
    try:
        size = max(len(structure.text.encode()), len(structure.after.encode()))
    except UnicodeEncodeError as error:
        raise bad_request(f"{param} is not valid Unicode: {error.reason}.", param) from None
    _check_size(size, param)
    why_not = await model.structures.why_not(structure, param)
    if why_not is not None:
        raise bad_request(f"{param} cannot be compiled: {why_not}.", param)


def _check_size(num_bytes: int, param: str) -> None:
    if num_bytes > MAX_CHARS:
        raise bad_request(f"{param} has {num_bytes} bytes; the maximum is {MAX_CHARS}.", param)


def refuse_second_structure(body: SamplingFields) -> None:
    """Refuse vLLM's fields together with a required call. response_format is allowed: it applies to answers without calls.

    Raises:
        ApiError: 400, naming the field.
    """
    asked = asked_structure(body)
    if asked is not None and not asked.param.startswith("response_format"):
        raise bad_request(
            f"{asked.param} cannot be combined with a tool_choice that requires a call: use structured outputs or "
            "tools, not both.",
            asked.param.partition(".")[0],
        )


def asked_structure(body: SamplingFields) -> WantedStructure | None:
    """Read the fields without compiling the structure.

    Raises:
        ApiError: 400, naming the field.
    """
    asked = list(_asked(body))
    if len(asked) > 1:
        raise bad_request(
            f"You can only use one kind of constraints: {asked[0].param} and {asked[1].param} both request a "
            "structure; leave one out.",
            asked[1].param,
        )
    return asked[0] if asked else None


def _asked(body: SamplingFields) -> Iterator[WantedStructure]:
    if body.response_format not in UNSET:
        structure = _from_response_format(body.response_format)
        if structure is not None:
            yield WantedStructure("response_format", structure)
    if body.structured_outputs not in UNSET:
        yield from _from_fields(_object(body.structured_outputs, "structured_outputs"), "structured_outputs.")
    older = {
        name: getattr(body, f"guided_{name}")
        for name in ("json", "regex", "choice", "grammar", "json_object")
    }
    yield from _from_fields(older, "guided_")
    for name, read in _PEERS_FIELDS.items():
        value = getattr(body, name)
        if value not in UNSET:
            yield WantedStructure(name, read(value, name))


def _from_response_format(value: Any) -> Structure | None:
    kind = _object(value, "response_format").get("type")
    if kind == "text":
        return None
    if kind == "json_object":
        if value.get("schema") is not None:  # llama.cpp and other servers
            return _json(value["schema"], "response_format.schema")
        return Structure("json_object")
    if kind == "json_schema":
        if value.get("json_schema") is None:
            param = "response_format.json_schema"
            raise bad_request(f"{param} must be provided: an object with a name and a schema.", param)
        described = _object(value["json_schema"], "response_format.json_schema")
        schema = described.get("schema", described.get("json_schema"))
        return _json(schema, "response_format.json_schema.schema")
    raise bad_request(f"{_FORMATS}; got {_quoted(kind)}.", "response_format")


def _from_fields(fields: Mapping[str, Any], prefix: str) -> Iterator[WantedStructure]:
    """Read vLLM's fields with a given prefix."""
    for name in ("structural_tag", "whitespace_pattern", "disable_additional_properties"):
        if fields.get(name):
            raise bad_request(f"{prefix}{name} is not supported; leave it out.", f"{prefix}{name}")
    unknown = [name for name, value in fields.items() if name not in _KNOWN and value not in UNSET]
    if unknown:
        raise bad_request(
            f"{prefix}{unknown[0]} is unknown; use one of {', '.join(_READERS)}, json_object.",
            f"{prefix}{unknown[0]}",
        )
    is_compact = bool(fields.get("disable_any_whitespace"))
    unset = UNSET if prefix == "guided_" else (None,)  # clients of the older fields send empty ones
    for name, read in _READERS.items():
        if fields.get(name) not in unset:
            structure = read(fields[name], f"{prefix}{name}")
            yield WantedStructure(f"{prefix}{name}", _compact(structure) if is_compact else structure)
    if fields.get("json_object"):
        structure = Structure("json_object")
        yield WantedStructure(f"{prefix}json_object", _compact(structure) if is_compact else structure)


def _compact(structure: Structure) -> Structure:
    """Forbid whitespace between the parts of JSON."""
    if structure.kind == "json_object":
        return Structure("json_schema", json.dumps({"type": "object", **_COMPACT}))
    schema = json.loads(structure.text) if structure.kind == "json_schema" else None
    return (
        Structure("json_schema", json.dumps({**schema, **_COMPACT}))
        if isinstance(schema, dict)
        else structure
    )


def _json(value: Any, param: str) -> Structure:
    """Read a schema, given as an object or as JSON text."""
    if isinstance(value, str):
        _check_size(len(value), param)  # before it is parsed
        try:
            value = json.loads(value)
        except (ValueError, RecursionError) as error:
            raise bad_request(f"{param} is not valid JSON: {error}.", param) from None
    if not isinstance(value, dict | bool):
        raise bad_request(f"{param} must be a JSON schema (an object); got {_quoted(value)}.", param)
    return Structure("json_schema", json_text(value, param, MAX_DEPTH))


def _plain(kind: str, value: Any, param: str) -> Structure:
    return Structure(kind, _text(value, param))


def _choice(value: Any, param: str) -> Structure:
    if not isinstance(value, list) or not value or not all(isinstance(each, str) and each for each in value):
        raise bad_request(f"{param} must be a list of one or more non-empty strings.", param)
    if len(value) > MAX_CHOICES:
        raise bad_request(f"{param} has {len(value)} choices; the maximum is {MAX_CHOICES}.", param)
    return Structure("choice", json.dumps(value))


_READERS: Mapping[str, Callable[[Any, str], Structure]] = {
    "json": _json,
    "regex": partial(_plain, "regex"),
    "choice": _choice,
    "grammar": partial(_plain, "grammar"),
}


_KNOWN = {*_READERS, "json_object", "disable_any_whitespace", "_backend", "_backend_was_auto"} | {
    *("structural_tag", "whitespace_pattern", "disable_additional_properties")
}
_PEERS_FIELDS: Mapping[str, Callable[[Any, str], Structure]] = {  # SGLang's and llama.cpp's
    "json_schema": _json,
    "regex": _READERS["regex"],
    "ebnf": _READERS["grammar"],
    "grammar": _READERS["grammar"],
}


def _text(value: Any, param: str) -> str:
    if not isinstance(value, str) or not value:
        raise bad_request(f"{param} must be a non-empty string; got {_quoted(value)}.", param)
    return value


def _object(value: Any, param: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise bad_request(f"{param} must be an object; got {_quoted(value)}.", param)
    return value


def _quoted(value: Any) -> str:
    """Quote a wrong value, shortened."""
    text = type(value).__name__ if isinstance(value, dict | list) else repr(value)
    return text if len(text) <= 80 else text[:80] + "..."
