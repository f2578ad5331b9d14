"""Check a request's tools and tool_choice, and derive the prompt's tools, the answer's structure and its parser.

auto lets the model decide. required and a named function force the answer to be JSON: a list of calls, or the arguments.
"""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from scheduler.policy.request import Structure
from scheduler.structure.schema import relocated
from server.api.parsers.arguments import ArgumentTypes
from server.api.parsers.deltas import TextParser
from server.api.parsers.json_calls import JsonListParser, NamedCallParser
from server.api.schemas import ChatRequest, check_num_values, json_text
from server.front.errors import bad_request

MAX_DEPTH = 64  # levels of a tool's description, including its schema
_NAME = re.compile(r"[\w.:/-]{1,128}", re.ASCII)
_CHOICES = (
    "tool_choice must be 'none', 'auto', 'required' or "
    '{"type": "function", "function": {"name": "..."}}'
)
_NO_PARAMETERS: dict[str, Any] = {"type": "object", "properties": {}}


@dataclass(frozen=True, kw_only=True)
class ToolUse:
    """The tools that the model may or must call."""

    tools: tuple[dict[str, Any], ...] = ()  # in OpenAI's form, as passed to the template
    choice: str = "none"  # none, auto, required or named
    named: str = ""  # the function's name, if the choice is named
    parallel: bool = True  # allows more than one call per answer

    @property
    def is_bound(self) -> bool:
        """Whether the answer must be JSON that contains the call."""
        return self.choice in ("required", "named")

    def types(self) -> ArgumentTypes:
        """Return the argument types that parsers of tagged arguments need."""
        return ArgumentTypes(self._parameters())

    def bound_parser(self) -> TextParser:
        """Return the parser of a bound answer."""
        return NamedCallParser(self.named) if self.choice == "named" else JsonListParser()

    def structure(self) -> Structure | None:
        """Return the structure of a bound answer, or None if the answer is not bound."""
        if self.choice == "named":
            return _structure(self._parameters()[self.named])
        if self.choice == "required":
            return _structure(_list_schema(self._parameters(), parallel=self.parallel))
        return None

    def _parameters(self) -> dict[str, Mapping[str, Any]]:
        return {tool["function"]["name"]: tool["function"]["parameters"] for tool in self.tools}


def tool_use_of(body: ChatRequest) -> ToolUse:
    """Check tools and tool_choice.

    Raises:
        ApiError: 400, naming the field.
    """
    choice, tools = body.tool_choice, body.tools
    may_be_without = (None, "none") if tools is None else (None, "none", "auto")
    if not tools and choice not in may_be_without:
        raise bad_request(
            "When using `tool_choice`, `tools` must be set. tool_choice selects one of them, but the request has no tools.",
            "tool_choice",
        )
    if not tools or choice == "none":
        return ToolUse()  # the model must not call tools, so the prompt omits them
    check_num_values(tools, "tools")
    checked = [_tool(tool, f"tools.{place}") for place, tool in enumerate(tools)]
    names = [tool["function"]["name"] for tool in checked]
    for place, name in enumerate(names):
        if name in names[:place]:
            raise bad_request(f"tools has two functions named {name!r}.", f"tools.{place}.function.name")
    kind, named = _choice(choice, names)
    return ToolUse(
        tools=tuple(checked), choice=kind, named=named, parallel=body.parallel_tool_calls is not False
    )


def _tool(tool: Any, where: str) -> dict[str, Any]:
    """Check one tool and return it with its default values filled in."""
    if not isinstance(tool, dict) or tool.get("type", "function") != "function":
        raise bad_request(
            f'{where}.type must be "function": this server has no built-in tools.', f"{where}.type"
        )
    function = tool.get("function")
    if not isinstance(function, dict):
        raise bad_request(
            f"{where}.function is missing; it must be an object with a name.", f"{where}.function"
        )
    name = function.get("name")
    if name is None:
        raise bad_request(f"{where}.function.name is missing.", f"{where}.function.name")
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise bad_request(
            f"{where}.function.name must be 1 to 128 letters, digits, or any of _ - . : /.",
            f"{where}.function.name",
        )
    parameters = function.get("parameters")
    json_text(tool, where, MAX_DEPTH)  # answers repeat the tool
    if not isinstance(parameters, dict | None):
        raise bad_request(
            f"{where}.function.parameters must be a JSON schema (an object).", f"{where}.function.parameters"
        )
    if not isinstance(function.get("description"), str | None):
        raise bad_request(f"{where}.function.description must be a string.", f"{where}.function.description")
    return {**tool, "type": "function", "function": {**function, "parameters": parameters or _NO_PARAMETERS}}


def _choice(choice: Any, names: Sequence[str]) -> tuple[str, str]:
    """Return the kind of choice, and the name of the function if the choice is named."""
    if choice is None:
        return "auto", ""
    if choice in ("auto", "required"):
        return str(choice), ""
    function = choice.get("function") if isinstance(choice, dict) else None
    name = function.get("name") if isinstance(function, dict) else None
    if not isinstance(choice, dict) or choice.get("type") != "function" or not isinstance(name, str):
        seen = "an object" if isinstance(choice, dict | list) else repr(choice)[:80]
        raise bad_request(f"{_CHOICES}; got {seen}.", "tool_choice")
    if name not in names:
        known = ", ".join(repr(each) for each in names)
        raise bad_request(f"tool_choice names {name!r}, which is not in tools ({known}).", "tool_choice")
    return "named", name


def _structure(schema: Mapping[str, Any]) -> Structure:
    return Structure("json_schema", json.dumps(schema))


def _list_schema(parameters: Mapping[str, Mapping[str, Any]], *, parallel: bool) -> dict[str, Any]:
    """Return the schema of a list of calls. Each call's arguments follow the schema of its function.

    The functions' schemas move under $defs, together with their references.
    """
    calls = [
        {
            "type": "object",
            "properties": {"name": {"const": name}, "arguments": {"$ref": f"#/$defs/{number}"}},
            "required": ["name", "arguments"],
            "additionalProperties": False,
        }
        for number, name in enumerate(parameters)
    ]
    return {
        "type": "array",
        "minItems": 1,
        **({} if parallel else {"maxItems": 1}),
        "items": {"anyOf": calls},
        "$defs": {
            str(number): relocated(schema, f"#/$defs/{number}")
            for number, schema in enumerate(parameters.values())
        },
    }
