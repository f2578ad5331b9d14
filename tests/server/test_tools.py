"""tools and tool_choice: what is checked, and what they bind the answer to."""

from typing import Any

import pytest

from server.errors import ApiError
from server.openai.schemas import ChatRequest
from server.openai.tools import ToolUse, tool_use_of

PARAMETERS = {
    "type": "object",
    "properties": {"a": {"$ref": "#/$defs/A"}, "again": {"$ref": "#"}},
    "$defs": {"A": {"type": "integer"}},
}


def tool(name: str = "f", **function: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, **function}}


def use(**fields: Any) -> ToolUse:
    return tool_use_of(ChatRequest.model_validate({"messages": [{"role": "user", "content": "x"}], **fields}))


def test_tools_are_for_the_model_to_choose_unless_the_client_does() -> None:
    assert use(tools=[tool()]).choice == "auto"
    assert use(tools=[tool()], tool_choice=None).choice == "auto"


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"tools": None},
        {"tools": []},
        {"tools": [], "tool_choice": "required"},
        {"tool_choice": "none"},
        {"tools": [tool()], "tool_choice": "none"},
    ],
)
def test_no_tools_are_no_tools(fields: dict[str, Any]) -> None:
    nothing = use(**fields)
    assert nothing == ToolUse() and nothing.types() is None


def test_parameters_are_never_missing_for_a_template() -> None:
    [described] = use(tools=[tool(description="d", strict=True)]).tools
    assert described["function"] == {
        "name": "f",
        "description": "d",
        "strict": True,
        "parameters": {"type": "object", "properties": {}},
    }


def deep(levels: int) -> dict[str, Any]:
    schema: dict[str, Any] = {}
    for _ in range(levels):
        schema = {"items": schema}
    return schema


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tool_choice": "auto"}, "tool_choice"),
        ({"tool_choice": "required", "tools": None}, "tool_choice"),
        ({"tools": ["f"]}, "tools.0.type"),
        ({"tools": [{"type": "web_search"}]}, "tools.0.type"),
        ({"tools": [{"type": "function"}]}, "tools.0.function"),
        ({"tools": [tool(), {"type": "function", "function": {}}]}, "tools.1.function.name"),
        ({"tools": [tool("")]}, "tools.0.function.name"),
        ({"tools": [tool("a b")]}, "tools.0.function.name"),
        ({"tools": [tool(5)]}, "tools.0.function.name"),  # type: ignore[arg-type]
        ({"tools": [tool(), tool()]}, "tools.1.function.name"),
        ({"tools": [tool(parameters=[])]}, "tools.0.function.parameters"),
        ({"tools": [tool(parameters=deep(100))]}, "tools.0"),
        ({"tools": [tool(description=5)]}, "tools.0.function.description"),
        ({"tools": [tool()], "tool_choice": "any"}, "tool_choice"),
        ({"tools": [tool()], "tool_choice": 5}, "tool_choice"),
        ({"tools": [tool()], "tool_choice": {"type": "function"}}, "tool_choice"),
        ({"tools": [tool()], "tool_choice": {"type": "function", "function": {"name": "g"}}}, "tool_choice"),
        ({"tools": [tool()], "tool_choice": {"function": {"name": "f"}}}, "tool_choice"),
    ],
)
def test_what_is_wrong_is_named(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(ApiError) as caught:
        use(**fields)
    assert (caught.value.status, caught.value.param) == (400, param)
