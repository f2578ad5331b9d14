"""A chat's messages as templates want them: text or parts, calls with arguments as objects, reasoning by both names.

Everything else a client puts into a message (name, tool_call_id, ...) reaches the template as sent. What OpenAI's
clients send and templates trip over is brought to one form here: content null beside calls, an empty list of calls,
arguments as a JSON string.
"""

import json
from collections.abc import Sequence
from typing import Any

from server.api.nesting import is_deeper
from server.api.schemas import Message
from server.errors import bad_request

TemplateMessage = dict[str, Any]
MAX_DEPTH = 64  # of a call's arguments; templates write them out recursively
_TEXT_PARTS = {"text": "text", "input_text": "text", "output_text": "text", "refusal": "refusal"}


def template_messages(messages: Sequence[Message]) -> list[TemplateMessage]:
    """Return a chat's messages for the template, content as text.

    Raises:
        ApiError: 400, naming the message and the field.
    """
    return [_template_message(place, message) for place, message in enumerate(messages)]


def with_parts(messages: Sequence[TemplateMessage]) -> list[TemplateMessage]:
    """Return messages with content as a list of text parts."""
    return [
        {**message, "content": [{"type": "text", "text": message["content"]}] if message["content"] else []}
        if isinstance(message.get("content"), str)
        else message
        for message in messages
    ]


def with_text_arguments(messages: Sequence[TemplateMessage]) -> list[TemplateMessage]:
    """Return messages whose calls have their arguments as JSON text: some templates paste them as they are."""
    return [
        {**message, "tool_calls": [_with_text_arguments(call) for call in message["tool_calls"]]}
        if message.get("tool_calls")
        else message
        for message in messages
    ]


def _template_message(place: int, message: Message) -> TemplateMessage:
    fields = message.model_dump(exclude_unset=True)
    content = message.content
    where = f"messages.{place}"
    if isinstance(content, list):
        fields["content"] = "\n".join(
            _part_text(f"{where}.content.{number}", part) for number, part in enumerate(content)
        )
    elif content is not None and not isinstance(content, str):
        raise bad_request(f"{where}.content must be text or a list of text parts.", f"{where}.content")
    elif content is None and message.role == "assistant":
        fields["content"] = ""  # templates would print "None"
    calls = fields.pop("tool_calls", None)
    if calls is not None:
        parsed = _calls(calls, f"{where}.tool_calls")
        fields |= {"tool_calls": parsed} if parsed else {}
    reasoning = fields.get("reasoning", fields.get("reasoning_content"))  # vLLM's order
    if isinstance(reasoning, str):
        fields |= {"reasoning_content": reasoning, "reasoning": reasoning}
        if fields.get("tool_calls") and not fields.get("content"):
            fields.setdefault("thinking", reasoning)  # gpt-oss' name, taken beside calls without content
    return fields


def _part_text(where: str, part: Any) -> str:
    if not isinstance(part, dict) or not isinstance(part.get("type"), str):
        raise bad_request(f"{where} must be an object with a type.", where)
    if part["type"] not in _TEXT_PARTS:
        raise bad_request(
            f"{where} is of type {part['type']!r}; this model takes only text.", f"{where}.type"
        )
    name = _TEXT_PARTS[part["type"]]
    if not isinstance(part.get(name), str):
        raise bad_request(f"{where}.{name} must be a string.", f"{where}.{name}")
    text: str = part[name]
    return text


def _calls(calls: Any, where: str) -> list[dict[str, Any]]:
    if not isinstance(calls, list):
        raise bad_request(f"{where} must be a list of calls.", where)
    return [_call(call, f"{where}.{number}") for number, call in enumerate(calls)]


def _call(call: Any, where: str) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str) or not function["name"]:
        raise bad_request(
            f"{where} must be an object with function.name and function.arguments.", f"{where}.function"
        )
    arguments = function.get("arguments")
    if not isinstance(arguments, str | dict | None) or is_deeper(arguments, MAX_DEPTH):
        raise bad_request(
            f"{where}.function.arguments must be an object as JSON in a string.",
            f"{where}.function.arguments",
        )
    return {**call, "function": {**function, "arguments": _object_of(arguments)}}


def _object_of(arguments: str | dict[str, Any] | None) -> Any:
    """Return arguments as an object; as sent, if they are none: a history may hold a call that was cut off."""
    if not isinstance(arguments, str):
        return {} if arguments is None else arguments
    if not arguments.strip():
        return {}
    try:
        parsed = json.loads(arguments)
    except (ValueError, RecursionError):
        return arguments
    return parsed if isinstance(parsed, dict) and not is_deeper(parsed, MAX_DEPTH) else arguments


def _with_text_arguments(call: dict[str, Any]) -> dict[str, Any]:
    arguments = call["function"]["arguments"]
    text = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
    return {**call, "function": {**call["function"], "arguments": text}}
