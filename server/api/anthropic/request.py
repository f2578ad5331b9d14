"""From a /v1/messages request to the chat request that asks for the same."""

from typing import Any

from server.api.anthropic.conversation import goes_on, messages_of
from server.api.anthropic.schemas import CountTokensRequest, MessagesRequest, Tool
from server.api.responses_chat import validated
from server.api.schemas import ChatRequest
from server.errors import bad_request

_CHOICES = {"auto": "auto", "any": "required", "none": "none"}
_SAMPLING = ("model", "temperature", "top_p", "top_k", "stream")


def chat_request(body: MessagesRequest) -> ChatRequest:
    """Return the chat request.

    Raises:
        ApiError: 400, naming the field.
    """
    fields = prompt_fields(body) | body.model_dump(include=set(_SAMPLING), exclude_unset=True)
    fields["max_completion_tokens"] = body.max_tokens
    if body.stop_sequences:
        fields["stop"] = body.stop_sequences
    return validated(fields)


def prompt_request(body: CountTokensRequest) -> ChatRequest:
    """Return a chat request of the same prompt.

    Raises:
        ApiError: 400, naming the field.
    """
    return validated({"model": body.model} | prompt_fields(body))


def prompt_fields(body: CountTokensRequest) -> dict[str, Any]:
    """Return the fields that make up the prompt."""
    messages = messages_of(body)
    fields: dict[str, Any] = {"messages": messages} | _tool_fields(body) | _output_fields(body)
    if goes_on(messages[-1]):
        fields |= {"continue_final_message": True, "add_generation_prompt": False}
    return fields


def _tool_fields(body: CountTokensRequest) -> dict[str, Any]:
    fields: dict[str, Any] = {}
    if body.tools:
        fields["tools"] = [_chat_tool(number, tool) for number, tool in enumerate(body.tools)]
    choice = body.tool_choice
    if choice is None:
        return fields
    if choice.type == "tool":
        if not choice.name:
            raise bad_request("tool_choice.name is missing: type 'tool' names the tool.", "tool_choice.name")
        fields["tool_choice"] = {"type": "function", "function": {"name": choice.name}}
    else:
        fields["tool_choice"] = _CHOICES[choice.type]
    if choice.disable_parallel_tool_use:
        fields["parallel_tool_calls"] = False
    return fields


def _chat_tool(number: int, tool: Tool) -> dict[str, Any]:
    if tool.type not in (None, "custom"):
        where = f"tools.{number}.type"
        raise bad_request(
            f"{where} is {tool.type!r}, a tool of Anthropic's own; this server takes 'custom' tools only.",
            where,
        )
    if tool.input_schema is None:
        where = f"tools.{number}.input_schema"
        raise bad_request(f"{where} is missing.", where)
    parameters = {"type": "object"} | tool.input_schema
    function = {"name": tool.name, "description": tool.description, "parameters": parameters}
    return {
        "type": "function",
        "function": {name: value for name, value in function.items() if value is not None},
    }


def _output_fields(body: CountTokensRequest) -> dict[str, Any]:
    """Return what templates read of thinking and effort, and the structure that the text must have."""
    kwargs: dict[str, Any] = {}
    if body.thinking is not None:
        on = body.thinking.type != "disabled"
        kwargs |= {"enable_thinking": on, "thinking": on}  # Qwen's and GLM's word, DeepSeek's word
    kwargs |= body.chat_template_kwargs or {}
    fields: dict[str, Any] = {"chat_template_kwargs": kwargs} if kwargs else {}
    config = body.output_config
    if config is not None and config.effort is not None:
        fields["reasoning_effort"] = config.effort
    wanted = config.format if config is not None else None
    if wanted is not None:
        if wanted.get("type") != "json_schema" or not isinstance(wanted.get("schema"), dict):
            raise bad_request(
                "output_config.format must be {'type': 'json_schema', 'schema': {...}}.",
                "output_config.format",
            )
        inner = {"name": "output", "schema": wanted["schema"]}
        fields["response_format"] = {"type": "json_schema", "json_schema": inner}
    return fields
