"""Anthropic's system, messages and content blocks as chat messages."""

import json
from typing import Any

from server.api.anthropic.schemas import CountTokensRequest, InputMessage
from server.errors import bad_request

ChatMessage = dict[str, Any]

# Claude Code begins its system prompt with a block that differs in every request and would spoil the prefix cache.
_BILLING = "x-anthropic-billing-header"
_USER_BLOCKS = "text, tool_result"
_ASSISTANT_BLOCKS = "text, thinking, redacted_thinking, tool_use"


def messages_of(body: CountTokensRequest) -> list[ChatMessage]:
    """Return the conversation as chat messages.

    System messages between the turns join the first one: few chat templates take them elsewhere.

    Raises:
        ApiError: 400, naming the block.
    """
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
        raise bad_request("messages has no text in it.", "messages")
    return [*head, *messages]


def goes_on(last: ChatMessage) -> bool:
    """Tell whether the last message is the beginning of the answer, which the model is to continue."""
    return last["role"] == "assistant" and "tool_calls" not in last and bool(last["content"].strip())


def _system_texts(content: Any, where: str) -> list[str]:
    if content is None:
        return []
    if isinstance(content, str):
        return [content] if content else []
    texts = [
        _text(block, place) if _kind(block, place) == "text" else _refuse(block, place, "text")
        for block, place in _places(content, where)
    ]
    return [text for text in texts if text and not text.startswith(_BILLING)]


def _user_messages(message: InputMessage, where: str) -> list[ChatMessage]:
    """Tool results are messages of their own in a chat, and stay in order with the text around them."""
    if isinstance(message.content, str):
        return [{"role": "user", "content": message.content}]
    messages: list[ChatMessage] = []
    for block, place in _places(message.content, where):
        kind = _kind(block, place)
        if kind == "tool_result":
            tool_use_id = _name(block, "tool_use_id", place)
            content = _result_text(block.get("content"), f"{place}.content")
            messages.append({"role": "tool", "tool_call_id": tool_use_id, "content": content})
        elif kind == "text":
            if not messages or messages[-1]["role"] != "user":
                messages.append({"role": "user", "content": []})
            messages[-1]["content"].append({"type": "text", "text": _text(block, place)})
        else:
            _refuse(block, place, _USER_BLOCKS)
    if not messages:
        raise bad_request(f"{where} is empty.", where)
    return messages


def _assistant_message(message: InputMessage, where: str) -> ChatMessage:
    if isinstance(message.content, str):
        return {"role": "assistant", "content": message.content}
    texts: list[str] = []
    thoughts: list[str] = []
    calls: list[dict[str, Any]] = []
    for block, place in _places(message.content, where):
        kind = _kind(block, place)
        if kind == "text":
            texts.append(_text(block, place))
        elif kind == "thinking":
            thoughts.append(_string(block, "thinking", place))
        elif kind == "tool_use":
            calls.append(_call(block, place))
        elif kind != "redacted_thinking":  # which only Anthropic can read
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


def _result_text(content: Any, where: str) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    texts = [
        _text(block, place) if _kind(block, place) == "text" else _refuse(block, place, "text")
        for block, place in _places(content, where)
    ]
    return "\n".join(texts)


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
    raise bad_request(
        f"{place} is of type {block['type']!r}; this model takes only text, and here the types: {allowed}.",
        place,
    )


def _text(block: dict[str, Any], place: str) -> str:
    return _string(block, "text", place)


def _name(block: dict[str, Any], field: str, place: str) -> str:
    value = _string(block, field, place)
    if not value:
        raise bad_request(f"{place}.{field} must not be empty.", f"{place}.{field}")
    return value


def _string(block: dict[str, Any], field: str, place: str) -> str:
    value = block.get(field)
    if not isinstance(value, str):
        raise bad_request(f"{place}.{field} must be a string.", f"{place}.{field}")
    return value
