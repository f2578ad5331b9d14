"""From a /v1/responses request to the chat request that asks for the same."""

import re
from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import ValidationError

from server.api.responses_input import ChatMessage, string_of
from server.api.responses_schemas import ResponsesRequest
from server.api.schemas import ChatRequest, SamplingFields
from server.errors import bad_request, trouble_in

_FOREIGN = {"conversation", "prompt", "truncation", "max_tool_calls", "service_tier"}
_OWN_NAMES = (  # a field of the chat request, or its beginning -> of the response's
    (re.compile(r"messages\b.*"), "input"),
    (re.compile(r"max_completion_tokens"), "max_output_tokens"),
    (re.compile(r"response_format\.json_schema\b"), "text.format"),
    (re.compile(r"response_format\b"), "text.format"),
    (re.compile(r"reasoning_effort"), "reasoning.effort"),
    (re.compile(r"(tools\.\d+)\.function\b"), r"\1"),
)


def chat_request(body: ResponsesRequest, history: Sequence[ChatMessage]) -> ChatRequest:
    """Return the chat request that asks for the same.

    Args:
        history: every message but the instructions, oldest first.

    Raises:
        ApiError: 400, naming the field.
    """
    shared = set(SamplingFields.model_fields) - {"max_tokens", "stream_options"}
    extra = {name: value for name, value in (body.model_extra or {}).items() if name not in _FOREIGN}
    fields: dict[str, Any] = extra | body.model_dump(include=shared, exclude_unset=True)
    fields["messages"] = _with_instructions(body.instructions, history)
    fields["max_completion_tokens"] = body.max_output_tokens or body.max_tokens
    if body.wants_logprobs:
        fields |= {"logprobs": True, "top_logprobs": body.top_logprobs or 0}
    fields |= _tool_fields(body)
    response_format = _response_format(body)
    if response_format is not None:
        if body.structured_outputs:
            raise bad_request("Cannot specify both structured_outputs and text.format.", "structured_outputs")
        fields["response_format"] = response_format
    fields |= _reasoning_fields(body)
    if _goes_on(body.input, history[-1]):
        fields |= {"continue_final_message": True, "add_generation_prompt": False}
    return validated(fields)


def own_name(param: str) -> str:
    """Return the name under which /v1/responses has a chat request's field."""
    for pattern, name in _OWN_NAMES:
        if pattern.match(param):
            return pattern.sub(name, param)
    return param


def validated(fields: Mapping[str, Any]) -> ChatRequest:
    """Build a chat request from translated fields.

    Raises:
        ApiError: 400, in the words of chat's own check.
    """
    try:
        return ChatRequest.model_validate(fields)
    except ValidationError as error:
        first = error.errors()[0]
        param = ".".join(str(step) for step in first["loc"])
        raise bad_request(f"{param} is wrong: {trouble_in(first)}.", param) from error


def _with_instructions(instructions: str | None, history: Sequence[ChatMessage]) -> list[ChatMessage]:
    """Put the instructions in front; many templates take one system message only, so those at the head are joined."""
    head = [instructions] if instructions else []
    begin = 0
    for message in history:
        if message["role"] not in ("system", "developer"):
            break
        content = message["content"]
        head.append(content if isinstance(content, str) else "\n".join(part["text"] for part in content))
        begin += 1
    system = [{"role": "system", "content": "\n\n".join(head)}] if head else []
    return [*system, *history[begin:]]


def _tool_fields(body: ResponsesRequest) -> dict[str, Any]:
    tools, choice = body.tools or [], body.tool_choice
    for number, tool in enumerate(tools):
        if tool.get("type") != "function":
            where = f"tools.{number}"
            raise bad_request(
                f"{where} is of type {tool.get('type')!r}; this server runs no tools of its own and takes "
                "type 'function' only.",
                f"{where}.type",
            )
        string_of(tool, "name", f"tools.{number}")
    if choice == "required" and not tools:
        raise bad_request("Tool choice 'required' must be specified with 'tools' parameter.", "tool_choice")
    if isinstance(choice, dict):
        tools, choice = _chosen(tools, choice)
    fields: dict[str, Any] = {}
    if tools:
        fields["tools"] = [_chat_tool(tool) for tool in tools]
    if choice is not None and (tools or choice != "auto"):
        fields["tool_choice"] = choice
    if body.parallel_tool_calls is not None and tools:
        fields["parallel_tool_calls"] = body.parallel_tool_calls
    return fields


def _chosen(tools: list[dict[str, Any]], choice: Mapping[str, Any]) -> tuple[list[dict[str, Any]], Any]:
    """Resolve a tool_choice that is an object: one function, or a selection of them."""
    kind = choice.get("type")
    if kind == "function":
        name = choice.get("name")
        if name not in [tool.get("name") for tool in tools]:
            param = "tool_choice" if isinstance(name, str) else "tool_choice.name"
            raise bad_request(f"Tool choice {name!r} not found in 'tools' parameter.", param)
        return tools, {"type": "function", "function": {"name": name}}
    if kind == "allowed_tools" and isinstance(choice.get("tools"), list):
        allowed = [each.get("name") for each in choice["tools"] if isinstance(each, dict)]
        return [tool for tool in tools if tool.get("name") in allowed], choice.get("mode", "auto")
    raise bad_request(
        f"tool_choice is of type {kind!r}; an object must be of type 'function' or 'allowed_tools'.",
        "tool_choice",
    )


def _chat_tool(tool: Mapping[str, Any]) -> dict[str, Any]:
    function = {
        name: tool[name]
        for name in ("name", "description", "parameters", "strict")
        if tool.get(name) is not None
    }
    return {"type": "function", "function": function}


def _response_format(body: ResponsesRequest) -> dict[str, Any] | None:
    """Return text.format in chat's nesting."""
    wanted = body.text.format if body.text else None
    if wanted is None or wanted.get("type") == "text":
        return None
    if wanted.get("type") == "json_schema":
        inner = {name: value for name, value in wanted.items() if name != "type"}
        return {"type": "json_schema", "json_schema": inner}
    if wanted.get("type") == "json_object":
        return {"type": "json_object"}
    raise bad_request(
        f"text.format is of type {wanted.get('type')!r}; it must be text, json_object or json_schema.",
        "text.format.type",
    )


def _reasoning_fields(body: ResponsesRequest) -> dict[str, Any]:
    fields: dict[str, Any] = {}
    if body.reasoning and body.reasoning.effort is not None:
        fields["reasoning_effort"] = body.reasoning.effort
    if body.chat_template_kwargs:
        fields["chat_template_kwargs"] = body.chat_template_kwargs
    return fields


def _goes_on(given: Any, message: ChatMessage) -> bool:
    """Tell whether the last item is an answer that was cut short, to be continued; `message` is what it became."""
    last = given[-1] if isinstance(given, list) else None
    cut = isinstance(last, dict) and last.get("status") in ("in_progress", "incomplete")
    return cut and message["role"] == "assistant" and "tool_calls" not in message and bool(message["content"])
