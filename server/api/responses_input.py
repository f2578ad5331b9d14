"""The items of /v1/responses as chat messages.

Items that one answer was made of (reasoning, a message, calls) become one assistant message again, because that is
what chat templates know. What a stored response adds in front is `responses_store`'s.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from server.errors import bad_request

ChatMessage = dict[str, Any]

_ROLES = ("user", "assistant", "system", "developer")
_TEXT_PARTS = ("input_text", "output_text", "text", "summary_text", "reasoning_text")
_ITEMS = "message, function_call, function_call_output, reasoning"
_MAX_ITEMS = 10_000


def messages_of(given: Any) -> list[ChatMessage]:
    """Return a request's input as chat messages.

    Raises:
        ApiError: 400, naming the item.
    """
    if isinstance(given, str):
        return [{"role": "user", "content": given}]
    if not isinstance(given, list) or not given:
        raise bad_request("input must be a string or a list of items, and not empty.", "input")
    if len(given) > _MAX_ITEMS:
        raise bad_request(f"input has {len(given)} items; up to {_MAX_ITEMS} are taken.", "input")
    messages = items_to_messages(given)
    if not messages:
        raise bad_request("input has only reasoning that is encrypted or empty.", "input")
    return messages


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
            raise bad_request(f"{where} is of type {kind!r}; this server takes {_ITEMS}.", f"{where}.type")
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
        parts = content if isinstance(content, str) else _text_parts(content, f"{where}.content")
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
    """What is encrypted is another server's and cannot be read; the rest comes back as the model wrote it."""
    parts = item.get("content") or item.get("summary") or []
    if not isinstance(parts, list):
        raise bad_request(f"{where}.content must be a list of parts.", f"{where}.content")
    text = _joined(parts, f"{where}.content")
    if text:
        messages.append({"role": "assistant", "content": None, "reasoning_content": text})


def _open_assistant(messages: list[ChatMessage]) -> ChatMessage | None:
    """Return the assistant message that the next item belongs to, None if the last message is another's."""
    return messages[-1] if messages and messages[-1]["role"] == "assistant" else None


def string_of(item: Mapping[str, Any], field: str, where: str) -> str:
    value = item.get(field)
    if not isinstance(value, str):
        raise bad_request(f"{where}.{field} must be a string.", f"{where}.{field}")
    return value


def _text_parts(parts: Sequence[Any], where: str) -> list[dict[str, str]]:
    return [
        {"type": "text", "text": _part_text(part, f"{where}.{number}")} for number, part in enumerate(parts)
    ]


def _joined(parts: Sequence[Any], where: str) -> str:
    return "".join(_part_text(part, f"{where}.{number}") for number, part in enumerate(parts))


def _part_text(part: Any, where: str) -> str:
    kind = part.get("type") if isinstance(part, dict) else None
    field = "refusal" if kind == "refusal" else "text"
    if field == "text" and kind not in _TEXT_PARTS:
        raise bad_request(f"{where} is of type {kind!r}; this model takes only text.", f"{where}.type")
    return string_of(part, field, where)
