"""Tools for models whose chat template knows none: described in the system message, calls and results as text.

The form is one that the model's parser reads: DeepSeek's own, which its templates leave to the server (the tool-call
section of DeepSeek-V3.1's model card), or Hermes' tags for everybody else. A model that was never taught tools may still not
use them; with tool_choice "required" or a named function it then at least knows what the arguments mean.
"""

import json
from collections.abc import Sequence
from typing import Any

from server.api.messages import TemplateMessage
from server.api.parsers.token_calls import DEEPSEEK

_HERMES = (
    "You can call these functions, each described in JSON:\n<tools>\n{tools}\n</tools>\n"
    "To call one, write its name and arguments like this, once per call, and nothing after it:\n"
    '<tool_call>\n{{"name": "NAME", "arguments": {{...}}}}\n</tool_call>'
)
_DEEPSEEK = (
    "## Tools\nYou have access to the following tools:\n\n{tools}\n\n"
    "IMPORTANT: ALWAYS adhere to this exact format for tool use:\n{call}\n\n"
    "The name must be that of a tool above, the arguments JSON by its parameters. Chain calls without separators."
)
_DEEPSEEK_CALL = {
    "deepseek_v3": f"function{DEEPSEEK.separator}NAME\n```json\nARGUMENTS\n```",
    "deepseek_v31": f"NAME{DEEPSEEK.separator}ARGUMENTS",
}


def tool_text(tools: Sequence[dict[str, Any]], form: str) -> str:
    """Return what a model is told of its tools.

    Args:
        form: "hermes", "deepseek_v3" or "deepseek_v31".
    """
    if form == "hermes":
        return _HERMES.format(tools="\n".join(map(_json, tools)))
    call = _DEEPSEEK_CALL[form].join(DEEPSEEK.call).join(DEEPSEEK.section)
    described = [
        f"### {tool['function']['name']}\nDescription: {tool['function'].get('description') or ''}\n\n"
        f"Parameters: {_json(tool['function']['parameters'])}"
        for tool in tools
    ]
    return _DEEPSEEK.format(tools="\n\n".join(described), call=call)


def mentions_tools(messages: Sequence[TemplateMessage]) -> bool:
    """Tell whether a chat has calls or results in it."""
    return any(message["role"] == "tool" or message.get("tool_calls") for message in messages)


def tell(messages: Sequence[TemplateMessage], text: str, *, role: str = "system") -> list[TemplateMessage]:
    """Return messages that begin with a text.

    Args:
        role: "system", or "user" for templates that take no system message.
    """
    first = messages[0]
    content = first.get("content") or ""
    if first["role"] == role == "user":
        return [{**first, "content": f"{text}\n\n{content}"}, *messages[1:]]
    if role == "system" and first["role"] in ("system", "developer"):
        return [{**first, "content": f"{content}\n\n{text}"}, *messages[1:]]
    return [{"role": role, "content": text}, *messages]


def as_text(messages: Sequence[TemplateMessage]) -> list[TemplateMessage]:
    """Return messages with calls and results written out in Hermes' tags."""
    return [_as_text(message) for message in messages]


def _as_text(message: TemplateMessage) -> TemplateMessage:
    content = message.get("content") or ""
    if message["role"] == "tool":
        return {"role": "user", "content": f"<tool_response>\n{content}\n</tool_response>"}
    if not message.get("tool_calls"):
        return message
    functions = [call["function"] for call in message["tool_calls"]]
    calls = [{"name": function["name"], "arguments": function["arguments"]} for function in functions]
    texts = [f"<tool_call>\n{_json(call)}\n</tool_call>" for call in calls]
    kept = {name: value for name, value in message.items() if name != "tool_calls"}
    return {**kept, "content": "\n".join([content, *texts] if content else texts)}


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)
