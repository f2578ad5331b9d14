"""tools and tool_choice: validation, and the constraints that they put on the answer."""

import json
from typing import Any

import pytest

from server.api.schemas import ChatRequest
from server.api.tools import ToolUse, tool_use_of
from tests.server.api.parsers.reading import Said, read

PARAMETERS = {
    "type": "object",
    "properties": {"a": {"$ref": "#/$defs/A"}, "again": {"$ref": "#"}},
    "$defs": {"A": {"type": "integer"}},
}


def tool(name: str = "f", **function: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, **function}}


def use(**fields: Any) -> ToolUse:
    return tool_use_of(ChatRequest.model_validate({"messages": [{"role": "user", "content": "x"}], **fields}))


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"tools": None},
        {"tools": []},
        {"tools": [], "tool_choice": "auto"},
        {"tool_choice": "none"},
        {"tools": [tool()], "tool_choice": "none"},
    ],
)
def test_no_tools_are_no_tools(fields: dict[str, Any]) -> None:
    nothing = use(**fields)
    assert nothing == ToolUse() and nothing.structure() is None


def test_parameters_are_never_missing_for_a_template() -> None:
    [described] = use(tools=[tool(description="d", strict=True)]).tools
    assert described["function"] == {
        "name": "f",
        "description": "d",
        "strict": True,
        "parameters": {"type": "object", "properties": {}},
    }


def test_required_binds_the_answer_to_a_list_of_calls() -> None:
    required = use(tools=[tool(parameters=PARAMETERS), tool("g")], tool_choice="required")
    structure = required.structure()
    assert structure is not None
    schema = json.loads(structure.text)
    assert (schema["type"], schema["minItems"], schema.get("maxItems")) == ("array", 1, None)
    names = [each["properties"]["name"]["const"] for each in schema["items"]["anyOf"]]
    assert names == ["f", "g"]
    assert schema["$defs"]["0"]["properties"] == {
        "a": {"$ref": "#/$defs/0/$defs/A"},
        "again": {"$ref": "#/$defs/0"},
    }
    said = read(
        required.bound_parser, '[{"name": "f", "arguments": {"a": 1}}, {"name": "g", "arguments": {}}]'
    )
    assert said == Said(calls=[("f", '{"a": 1}'), ("g", "{}")])


def test_one_call_at_a_time_is_in_the_form_too() -> None:
    structure = use(tools=[tool()], tool_choice="required", parallel_tool_calls=False).structure()
    assert structure is not None and json.loads(structure.text)["maxItems"] == 1
