"""Translate a /v1/responses request into the equivalent chat request, and its items into chat messages.

Unknown keys are accepted; known keys of unsupported features are refused by name. The sampling fields that vLLM adds to its
own /v1/responses (top_k, seed, stop, ...) are those of chat. Items of one answer (reasoning, a message, calls) become one
assistant message again, because chat templates expect that.
"""

from collections.abc import Mapping, Sequence
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, WithJsonSchema

from server.api.images import FIELD
from server.api.media import why_unserved
from server.api.schemas import (
    MAX_LOGPROBS,
    MAX_TOOLS,
    ChatMessage,
    ChatRequest,
    SamplingFields,
    check_num_parts,
    refuse_foreign,
    refuse_named,
    shared_fields,
    string_of,
)
from server.front.errors import bad_request
from server.http.routes import validated

LOGPROBS = "message.output_text.logprobs"  # value of `include`
MAX_METADATA = 16  # OpenAI's
_INPUT = {"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "object"}}]}
_METADATA = {"anyOf": [{"type": "object", "additionalProperties": {"type": "string"}}, {"type": "null"}]}

_UNSERVED = {
    "conversation": "send the history as input, or use previous_response_id",
    "prompt": "this server stores no prompt templates; send the text as input",
    "echo": "an answer does not include the text before it",
}


class Reasoning(BaseModel):
    """The reasoning object. `summary` is accepted and has no effect: answers contain the reasoning itself."""

    model_config = ConfigDict(extra="allow")

    effort: str | None = None


class TextConfig(BaseModel):
    """The text object."""

    model_config = ConfigDict(extra="allow")

    format: dict[str, Any] | None = None


class ResponsesRequest(SamplingFields):
    """POST /v1/responses."""

    # text or a list of items; checked in `messages_of`
    input: Annotated[Any, WithJsonSchema(_INPUT)] = None
    instructions: str | None = None
    max_output_tokens: int | None = Field(None, ge=1)
    metadata: Annotated[Any, WithJsonSchema(_METADATA)] = None  # checked below
    tools: list[dict[str, Any]] | None = Field(None, max_length=MAX_TOOLS, fail_fast=True)
    tool_choice: Any = None  # a string or an object; checked in `chat_request`
    parallel_tool_calls: bool | None = None
    text: TextConfig | None = None
    reasoning: Reasoning | None = None
    include: list[str] | None = Field(None, fail_fast=True)
    top_logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS)
    previous_response_id: str | None = None
    store: bool | None = None
    background: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    enable_response_messages: bool | None = None  # vLLM: include the raw prompt and answer, as text and ids

    @property
    def wants_logprobs(self) -> bool:
        """Whether the client requested log-probabilities of the answer's text."""
        return LOGPROBS in (self.include or ()) or bool(self.top_logprobs)


def _check_metadata(metadata: Any) -> None:
    """Check the metadata, which the service only echoes. One error covers any number of wrong values."""
    if metadata is None:
        return
    if not isinstance(metadata, dict) or len(metadata) > MAX_METADATA:
        raise bad_request(f"metadata must be an object of up to {MAX_METADATA} strings.", "metadata")
    for name, value in metadata.items():
        if not isinstance(value, str):
            raise bad_request(f"metadata.{name} must be a string.", f"metadata.{name}")


def refuse_unserved_responses(body: ResponsesRequest) -> None:
    """Refuse fields that would be silently ignored, and metadata that cannot be echoed.

    Raises:
        ApiError: 400, naming the field.
    """
    _check_metadata(body.metadata)
    if body.background and body.store is False:
        raise bad_request("background can only be used when `store` is true: leave store out.", "background")
    extra = body.model_extra or {}
    refuse_foreign(extra, form="text.format", stop="stop")
    refuse_named(extra, _UNSERVED)
    for name in ("prompt_logprobs", "return_token_ids"):
        wish = getattr(body, name)
        if wish is not None and wish is not False:
            raise bad_request(f"{name!r} is supported only by /v1/chat/completions; leave it out.", name)
    if (body.n or 1) != 1:
        raise bad_request("n must be 1: a response has one answer.", "n")


_ROLES = ("user", "assistant", "system", "developer")
_TEXT_PARTS = ("input_text", "output_text", "text", "summary_text", "reasoning_text")
_ITEMS = "message, function_call, function_call_output, reasoning"


def messages_of(given: Any) -> list[ChatMessage]:
    """Return a request's input as chat messages.

    Raises:
        ApiError: 400, naming the item.
    """
    if isinstance(given, str):
        return [{"role": "user", "content": given}]
    if not isinstance(given, list) or not given:
        raise bad_request("input must be a string or a non-empty list of items.", "input")
    check_num_parts((_content_of(item) for item in given), "input")
    messages = items_to_messages(given)
    if not messages:
        raise bad_request("input contains only reasoning that is encrypted or empty.", "input")
    return messages


def _content_of(item: Any) -> Any:
    """Return the value of an item that may be a list of parts."""
    if not isinstance(item, dict):
        return None
    return item.get("content") or item.get("output") or item.get("summary")


def items_to_messages(items: Sequence[Any]) -> list[ChatMessage]:
    """Return a list of input or output items as chat messages.

    Raises:
        ApiError: 400, naming the item.
    """
    messages: list[ChatMessage] = []
    for number, item in enumerate(items):
        where = f"input.{number}"
        if not isinstance(item, dict):
            raise bad_request(f"{where} must be an object; got {type(item).__name__}.", where)
        kind = item.get("type") or ("message" if "role" in item else None)
        if kind == "message":
            _add_message(messages, item, where)
        elif kind == "function_call":
            _add_call(messages, item, where)
        elif kind == "function_call_output":
            _add_call_output(messages, item, where)
        elif kind == "reasoning":
            _add_reasoning(messages, item, where)
        else:
            raise bad_request(f"{where} is of type {kind!r}; this server supports {_ITEMS}.", f"{where}.type")
    return messages


def _add_message(messages: list[ChatMessage], item: Mapping[str, Any], where: str) -> None:
    role = item.get("role")
    if role not in _ROLES:
        raise bad_request(
            f"{where}.role is {role!r}; it must be one of {', '.join(_ROLES)}.", f"{where}.role"
        )
    content = item.get("content")
    if not isinstance(content, str | list):
        raise bad_request(f"{where}.content must be a string or a list of parts.", f"{where}.content")
    if role != "assistant":
        parts = content if isinstance(content, str) else _parts(content, f"{where}.content")
        messages.append({"role": role, "content": parts})
        return
    text = content if isinstance(content, str) else _joined(content, f"{where}.content")
    current = _open_assistant(messages)
    if current is not None and current["content"] is None:
        current["content"] = text
    else:
        messages.append({"role": "assistant", "content": text})


def _add_call(messages: list[ChatMessage], item: Mapping[str, Any], where: str) -> None:
    call_id, name, arguments = (string_of(item, field, where) for field in ("call_id", "name", "arguments"))
    call = {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}
    current = _open_assistant(messages)
    if current is None:
        current = {"role": "assistant", "content": None}
        messages.append(current)
    current.setdefault("tool_calls", []).append(call)


def _add_call_output(messages: list[ChatMessage], item: Mapping[str, Any], where: str) -> None:
    output = item.get("output")
    if not isinstance(output, str | list):
        raise bad_request(f"{where}.output must be a string or a list of parts.", f"{where}.output")
    text = output if isinstance(output, str) else _joined(output, f"{where}.output")
    messages.append({"role": "tool", "tool_call_id": string_of(item, "call_id", where), "content": text})


def _add_reasoning(messages: list[ChatMessage], item: Mapping[str, Any], where: str) -> None:
    """Add reasoning as the model wrote it. Encrypted reasoning comes from another server and cannot be read."""
    parts = item.get("content") or item.get("summary") or []
    if not isinstance(parts, list):
        raise bad_request(f"{where}.content must be a list of parts.", f"{where}.content")
    text = _joined(parts, f"{where}.content")
    if text:
        messages.append({"role": "assistant", "content": None, "reasoning_content": text})


def _open_assistant(messages: list[ChatMessage]) -> ChatMessage | None:
    """Return the last message if it is the assistant's, so that the next item extends it."""
    return messages[-1] if messages and messages[-1]["role"] == "assistant" else None


def _parts(parts: Sequence[Any], where: str) -> list[dict[str, Any]]:
    """Return a user's parts as those of a chat message. The chat checks images and types that are not supported."""
    return [
        {**part, FIELD: f"{where}.{number}"}
        if isinstance(part, dict)
        and isinstance(kind := part.get("type"), str)
        and kind not in (*_TEXT_PARTS, "refusal")
        else {"type": "text", "text": _part_text(part, f"{where}.{number}")}
        for number, part in enumerate(parts)
    ]


def _joined(parts: Sequence[Any], where: str) -> str:
    return "".join(_part_text(part, f"{where}.{number}") for number, part in enumerate(parts))


def _part_text(part: Any, where: str) -> str:
    kind = part.get("type") if isinstance(part, dict) else None
    field = "refusal" if kind == "refusal" else "text"
    if field == "text" and kind not in _TEXT_PARTS:
        reason = why_unserved(kind) or "only text is supported here"
        raise bad_request(f"{where} is of type {kind!r}; {reason}.", f"{where}.type")
    return string_of(part, field, where)


_FOREIGN = {"conversation", "prompt", "truncation", "max_tool_calls", "service_tier"}
OWN_NAMES = {  # a field of the chat, or its beginning -> the name in errors
    r"messages\b.*": "input",
    r"max_completion_tokens": "max_output_tokens",
    r"response_format\.json_schema\b": "text.format",
    r"response_format\b": "text.format",
    r"reasoning_effort": "reasoning.effort",
    r"(tools\.\d+)\.function\b": r"\1",
}


def chat_request(body: ResponsesRequest, history: Sequence[ChatMessage]) -> ChatRequest:
    """Return the equivalent chat request.

    Args:
        history: All messages except the instructions, oldest first.

    Raises:
        ApiError: 400, naming the field.
    """
    extra = {name: value for name, value in (body.model_extra or {}).items() if name not in _FOREIGN}
    fields: dict[str, Any] = extra | shared_fields(body)
    fields.pop("stream_options", None)  # the Responses API has other ones
    fields["messages"] = _with_instructions(body.instructions, history)
    fields["max_completion_tokens"] = body.max_output_tokens
    if body.wants_logprobs:
        fields |= {"logprobs": True, "top_logprobs": body.top_logprobs or 0}
    fields |= _tool_fields(body)
    response_format = _response_format(body)
    if response_format is not None:
        for name in ("structured_outputs", "response_format"):
            if getattr(body, name):
                raise bad_request(f"Cannot specify both {name} and text.format.", name)
        fields["response_format"] = response_format
    if body.reasoning and body.reasoning.effort is not None:
        fields["reasoning_effort"] = body.reasoning.effort
    if body.chat_template_kwargs:
        fields["chat_template_kwargs"] = body.chat_template_kwargs
    if _goes_on(body.input, history[-1]):
        fields |= {"continue_final_message": True, "add_generation_prompt": False}
    return validated(ChatRequest.model_validate, fields)


def _with_instructions(instructions: str | None, history: Sequence[ChatMessage]) -> list[ChatMessage]:
    """Put the instructions first and join them with leading system messages of text: many templates accept only one."""
    head = [instructions] if instructions else []
    begin = 0
    for message in history:
        content = message["content"]
        if message["role"] not in ("system", "developer") or not _is_text(content):
            break
        head.append(content if isinstance(content, str) else "\n".join(part["text"] for part in content))
        begin += 1
    system = [{"role": "system", "content": "\n\n".join(head)}] if head else []
    return [*system, *history[begin:]]


def _is_text(content: str | list[dict[str, Any]]) -> bool:
    return isinstance(content, str) or all(part["type"] == "text" for part in content)


def _tool_fields(body: ResponsesRequest) -> dict[str, Any]:
    tools, choice = body.tools or [], body.tool_choice
    for number, tool in enumerate(tools):
        if tool.get("type") != "function":
            where = f"tools.{number}"
            raise bad_request(
                f"{where} is of type {tool.get('type')!r}; this server has no built-in tools and supports only "
                "type 'function'.",
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
    """Resolve a tool_choice object: one function, or a selection of functions."""
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
    """Return text.format in chat's structure."""
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


def _goes_on(given: Any, message: ChatMessage) -> bool:
    """Return whether the last item is a truncated answer to continue; `message` is the item as a message."""
    last = given[-1] if isinstance(given, list) else None
    cut = isinstance(last, dict) and last.get("status") in ("in_progress", "incomplete")
    return cut and message["role"] == "assistant" and "tool_calls" not in message and bool(message["content"])
