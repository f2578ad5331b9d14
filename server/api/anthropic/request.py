"""Translate a /v1/messages request into the equivalent chat request, and its content blocks into chat messages.

Unknown keys are ignored, so that Anthropic's newer ones work. Other APIs' keys for a structure or stop conditions are refused.
"""

import json
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, WithJsonSchema

from server.api.images import FIELD
from server.api.media import why_unserved
from server.api.schemas import (
    MAX_MESSAGES,
    MAX_STOPS,
    MAX_TOOLS,
    ChatMessage,
    ChatRequest,
    check_num_parts,
    shared_fields,
    string_of,
)
from server.front.errors import bad_request
from server.http.routes import validated

_BLOCKS = {"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "object"}}]}
_Content = Annotated[Any, WithJsonSchema(_BLOCKS)]  # text or a list of blocks; checked by `messages_of`


class _Body(BaseModel):
    model_config = ConfigDict(extra="allow", allow_inf_nan=False)


class InputMessage(_Body):
    """A message of the conversation."""

    role: Literal["user", "assistant", "system"]  # Claude Code inserts system reminders between messages
    content: _Content


class Tool(_Body):
    """A tool that the client runs."""

    name: str = Field(min_length=1)
    type: str | None = None  # None or "custom"; other types run on Anthropic's servers
    description: str | None = None
    input_schema: dict[str, Any] | None = None


class ToolChoice(_Body):
    """The tool_choice object."""

    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class Thinking(_Body):
    """The thinking object. A budget is accepted but not enforced: open models cannot limit their thinking."""

    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: int | None = None


class OutputConfig(_Body):
    """The output_config object."""

    effort: str | None = None
    format: dict[str, Any] | None = None


class CountTokensRequest(_Body):
    """POST /v1/messages/count_tokens: the fields that make up a prompt."""

    model: str | None = None
    messages: list[InputMessage] = Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True)
    system: _Content = None
    tools: list[Tool] | None = Field(None, max_length=MAX_TOOLS, fail_fast=True)
    tool_choice: ToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    output_format: dict[str, Any] | None = None  # the name in the structured-outputs-2025-11-13 beta
    chat_template_kwargs: dict[str, Any] | None = None  # vLLM's extension


class MessagesRequest(CountTokensRequest):
    """POST /v1/messages."""

    max_tokens: int = Field(ge=1)
    stream: bool | None = None
    stop_sequences: list[str] | None = Field(None, max_length=MAX_STOPS, fail_fast=True)
    temperature: float | None = Field(None, ge=0, le=100)
    top_p: float | None = Field(None, gt=0, le=1)
    top_k: int | None = Field(None, ge=-1, le=2**31 - 1)
    metadata: dict[str, Any] | None = None


# Claude Code's system prompt begins with a block that differs in every request and would defeat the prefix cache.
_BILLING = "x-anthropic-billing-header"
_USER_BLOCKS = "text, image, tool_result"
_ASSISTANT_BLOCKS = "text, thinking, redacted_thinking, tool_use"


def messages_of(body: CountTokensRequest) -> list[ChatMessage]:
    """Return the conversation as chat messages.

    System messages between others join the first one: few chat templates accept them elsewhere.

    Raises:
        ApiError: 400, naming the block.
    """
    check_num_parts([body.system], "system")
    check_num_parts((message.content for message in body.messages), "messages")
    system = _system_texts(body.system, "system")
    messages: list[ChatMessage] = []
    for number, message in enumerate(body.messages):
        where = f"messages.{number}.content"
        if message.role == "system":
            system += _system_texts(message.content, where)
        elif message.role == "user":
            messages += _user_messages(message, where)
        else:
            messages.append(_assistant_message(message, where))
    head = [{"role": "system", "content": "\n\n".join(system)}] if system else []
    if not head and not messages:
        raise bad_request("messages contains no text.", "messages")
    return [*head, *messages]


def goes_on(last: ChatMessage) -> bool:
    """Return whether the last message is the beginning of an answer that the model must continue."""
    return last["role"] == "assistant" and "tool_calls" not in last and bool(last["content"].strip())


def _system_texts(content: Any, where: str) -> list[str]:
    if isinstance(content, str):
        return [content] if content else []
    return [text for text in _texts(content, where) if text and not text.startswith(_BILLING)]


def _user_messages(message: InputMessage, where: str) -> list[ChatMessage]:
    """Return a message's content as chat messages, in order: tool results become separate messages."""
    if isinstance(message.content, str):
        return [{"role": "user", "content": message.content}]
    messages: list[ChatMessage] = []
    for block, place in _places(message.content, where):
        kind = _kind(block, place)
        if kind == "tool_result":
            tool_use_id = _name(block, "tool_use_id", place)
            content = "\n".join(_texts(block.get("content"), f"{place}.content"))
            messages.append({"role": "tool", "tool_call_id": tool_use_id, "content": content})
        elif kind in ("text", "image"):
            if not messages or messages[-1]["role"] != "user":
                messages.append({"role": "user", "content": []})
            is_text = kind == "text"
            part = (
                {"type": "text", "text": string_of(block, "text", place)} if is_text else _image(block, place)
            )
            messages[-1]["content"].append(part)
        else:
            _refuse(block, place, _USER_BLOCKS)
    if not messages:
        raise bad_request(f"{where} is empty.", where)
    return messages


def _image(block: dict[str, Any], place: str) -> dict[str, str]:
    """Return an image block as a part of a chat message."""
    source, where = block.get("source"), f"{place}.source"
    if not isinstance(source, dict) or source.get("type") not in ("base64", "url", "file"):
        raise bad_request(f"{where} must be an object of type 'base64', 'url' or 'file'.", where)
    if source["type"] == "file":
        return {"type": "image", "file_id": string_of(source, "file_id", where), FIELD: place}
    if source["type"] == "url":
        return {"type": "image", "image": string_of(source, "url", where), FIELD: place}
    kind, content = (string_of(source, field, where) for field in ("media_type", "data"))
    return {"type": "image", "image": f"data:{kind};base64,{content}", FIELD: place}


def _assistant_message(message: InputMessage, where: str) -> ChatMessage:
    if isinstance(message.content, str):
        return {"role": "assistant", "content": message.content}
    texts: list[str] = []
    thoughts: list[str] = []
    calls: list[dict[str, Any]] = []
    for block, place in _places(message.content, where):
        kind = _kind(block, place)
        if kind == "text":
            texts.append(string_of(block, "text", place))
        elif kind == "thinking":
            thoughts.append(string_of(block, "thinking", place))
        elif kind == "tool_use":
            calls.append(_call(block, place))
        elif kind != "redacted_thinking":  # only Anthropic can read it
            _refuse(block, place, _ASSISTANT_BLOCKS)
    fields: ChatMessage = {"role": "assistant", "content": "".join(texts) if texts or not calls else None}
    if thoughts:
        fields["reasoning_content"] = "".join(thoughts)
    return fields | ({"tool_calls": calls} if calls else {})


def _call(block: dict[str, Any], place: str) -> dict[str, Any]:
    arguments = block.get("input")
    if not isinstance(arguments, dict):
        raise bad_request(f"{place}.input must be an object.", f"{place}.input")
    function = {"name": _name(block, "name", place), "arguments": json.dumps(arguments, ensure_ascii=False)}
    return {"id": _name(block, "id", place), "type": "function", "function": function}


def _texts(content: Any, where: str) -> list[str]:
    """Return the texts of a content that may have no other blocks."""
    if content is None or isinstance(content, str):
        return [content or ""]
    return [
        string_of(block, "text", place) if _kind(block, place) == "text" else _refuse(block, place, "text")
        for block, place in _places(content, where)
    ]


def _places(content: Any, where: str) -> list[tuple[Any, str]]:
    if not isinstance(content, list):
        raise bad_request(f"{where} must be a string or a list of blocks.", where)
    return [(block, f"{where}.{number}") for number, block in enumerate(content)]


def _kind(block: Any, place: str) -> str:
    if not isinstance(block, dict) or not isinstance(block.get("type"), str):
        raise bad_request(f"{place} must be an object with a type.", place)
    kind: str = block["type"]
    return kind


def _refuse(block: dict[str, Any], place: str, allowed: str) -> str:
    reason = why_unserved(block["type"]) or "it is not supported"
    raise bad_request(
        f"{place} is of type {block['type']!r}; {reason}. Allowed types here: {allowed}.",
        place,
    )


def _name(block: dict[str, Any], field: str, place: str) -> str:
    value = string_of(block, field, place)
    if not value:
        raise bad_request(f"{place}.{field} must not be empty.", f"{place}.{field}")
    return value


_CHOICES = {"auto": "auto", "any": "required", "none": "none"}
OWN_NAMES = {  # a field of the chat, or its beginning -> the name in errors
    r"stop\b": "stop_sequences",
    r"(tools\.\d+)\.function\.parameters\b": r"\1.input_schema",
    r"(tools\.\d+)\.function\b": r"\1",
    r"reasoning_effort\b": "output_config.effort",
    r"response_format\b.*": "output_config.format",
}


def chat_request(body: MessagesRequest) -> ChatRequest:
    """Return the equivalent chat request.

    Raises:
        ApiError: 400, naming the field.
    """
    fields = prompt_fields(body) | shared_fields(body)
    if body.stop_sequences:
        fields["stop"] = body.stop_sequences
    return validated(ChatRequest.model_validate, fields)


def prompt_request(body: CountTokensRequest) -> ChatRequest:
    """Return a chat request with the same prompt.

    Raises:
        ApiError: 400, naming the field.
    """
    return validated(ChatRequest.model_validate, {"model": body.model} | prompt_fields(body))


def prompt_fields(body: CountTokensRequest) -> dict[str, Any]:
    """Return the chat fields that make up the prompt."""
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
            raise bad_request("tool_choice.name is missing; type 'tool' requires it.", "tool_choice.name")
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
            f"{where} is {tool.type!r}, a built-in tool of Anthropic's; this server supports only 'custom' tools.",
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
    """Return the template variables for thinking and effort, and the structure of the answer."""
    kwargs: dict[str, Any] = {}
    if body.thinking is not None:
        on = body.thinking.type != "disabled"
        kwargs |= {"enable_thinking": on, "thinking": on}  # Qwen's and GLM's name, DeepSeek's name
    kwargs |= body.chat_template_kwargs or {}
    fields: dict[str, Any] = {"chat_template_kwargs": kwargs} if kwargs else {}
    config = body.output_config
    if config is not None and config.effort is not None:
        fields["reasoning_effort"] = config.effort
    schema = _wanted_schema(body)
    if schema is not None:
        inner = {"name": "output", "schema": schema}
        fields["response_format"] = {"type": "json_schema", "json_schema": inner}
    return fields


def _wanted_schema(body: CountTokensRequest) -> dict[str, Any] | None:
    """Return the answer's schema, from the newer field or the older one."""
    newer = body.output_config.format if body.output_config is not None else None
    if newer is not None and body.output_format is not None:
        raise bad_request(
            "output_format and output_config.format cannot both be set: leave out output_format, the older name.",
            "output_format",
        )
    field, wanted = (
        ("output_config.format", newer) if newer is not None else ("output_format", body.output_format)
    )
    if wanted is None:
        return None
    schema = wanted.get("schema")
    if wanted.get("type") != "json_schema" or not isinstance(schema, dict):
        raise bad_request(f"{field} must be {{'type': 'json_schema', 'schema': {{...}}}}.", field)
    return schema
