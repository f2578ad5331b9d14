"""Convert a chat's messages to the forms that chat templates accept.

Content becomes text or parts, calls get their arguments as objects, reasoning gets both of its names, and instructions get
roles that the template shows. Other keys of a message (name, tool_call_id, ...) reach the template as sent. Input from
OpenAI's clients that breaks templates is normalized here: null content next to calls, an empty list of calls, arguments as
a JSON string, even a truncated one.

If the template does not support tools, the system message describes them, and calls and results become text, in a form
that the model's parser reads: DeepSeek's own, which its templates leave to the server (the tool-call section of
DeepSeek-V3.1's model card), or Hermes' tags for all other models. A model that was not trained on tools may still not use
them. With tool_choice "required" or a named function, it at least sees what the arguments mean.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from pydantic_core import from_json

from server.api.images import NO_TOWER, image_part, place_of
from server.api.media import IMAGE_PARTS, refuse_other_fields, why_unserved
from server.api.parsers.token_calls import DEEPSEEK
from server.api.schemas import Message, is_deeper
from server.front.errors import ApiError, bad_request
from server.front.template_probe import ContentForm
from server.front.tokenizer import TemplateFacts
from server.http.json_text import parse_json, trouble_with_nesting

TemplateMessage = dict[str, Any]
MAX_DEPTH = 64  # levels of a call's arguments; templates write them recursively
_TEXT_PARTS = {"text": "text", "input_text": "text", "output_text": "text", "refusal": "refusal"}


def template_messages(messages: Sequence[Message], why_no_images: str = NO_TOWER) -> list[TemplateMessage]:
    """Return a chat's messages for the template. Content is a text, or a list of parts if there are several or an image.

    Args:
        why_no_images: Why images are refused; empty if they are accepted.

    Raises:
        ApiError: 400, naming the message and the field.
    """
    return [_template_message(place, message, why_no_images) for place, message in enumerate(messages)]


def text_of(content: Any) -> str:
    """Return content as a text. Several parts become lines, as in vLLM for templates that accept only text."""
    if isinstance(content, list):
        return "\n".join(part["text"] for part in content if part["type"] == "text")
    return content or ""


def _has_image(content: Any) -> bool:
    return isinstance(content, list) and any(part["type"] == "image" for part in content)


def with_content(
    messages: Sequence[TemplateMessage], form_of: Callable[[str], ContentForm]
) -> list[TemplateMessage]:
    """Return messages with content in the form that the template accepts for each role."""
    return [_with_content(message, form_of(message["role"])) for message in messages]


def _with_content(message: TemplateMessage, form: ContentForm) -> TemplateMessage:
    content = message.get("content")
    if form is ContentForm.PARTS and isinstance(content, str):
        return {**message, "content": [{"type": "text", "text": content}] if content else []}
    if form is ContentForm.TEXT and isinstance(content, list) and not _has_image(content):
        return {**message, "content": text_of(content)}
    return message


_INSTRUCTIONS = ("system", "developer")


def with_systems(messages: Sequence[TemplateMessage], template: TemplateFacts) -> list[TemplateMessage]:
    """Return messages with instructions that the template shows completely.

    The role `developer` becomes `system` if the template does not know it. Several instructions stay separate if the
    template shows all of them. Otherwise they become one message in front, as in vLLM for a `developer` message.
    """
    known = [*messages] if template.knows_developer else [_without_developer(message) for message in messages]
    head = 0
    while head < len(known) and known[head]["role"] in _INSTRUCTIONS:
        head += 1
    is_late = any(message["role"] in _INSTRUCTIONS for message in known[head:])
    if is_late and not template.takes_late_systems:
        return in_one_system(known)
    if head > 1 and not template.takes_two_systems:
        return [*in_one_system(known[:head]), *known[head:]]
    return known


def in_one_system(messages: Sequence[TemplateMessage]) -> list[TemplateMessage]:
    """Return messages with all instructions joined into one in front. There must be at least one instruction."""
    systems = [message for message in messages if message["role"] in _INSTRUCTIONS]
    texts = [text for message in systems if (text := text_of(message.get("content")))]
    others = [message for message in messages if message["role"] not in _INSTRUCTIONS]
    return [{**systems[0], "content": "\n\n".join(texts)}, *others]


def _without_developer(message: TemplateMessage) -> TemplateMessage:
    """Replace the role developer with system, and drop `tools`, which only templates with that role use."""
    if message["role"] != "developer":
        return message
    return {name: value for name, value in message.items() if name != "tools"} | {"role": "system"}


def with_text_arguments(messages: Sequence[TemplateMessage]) -> list[TemplateMessage]:
    """Return messages with the arguments of calls as JSON text: some templates print them unchanged."""
    return [
        {**message, "tool_calls": [_with_text_arguments(call) for call in message["tool_calls"]]}
        if message.get("tool_calls")
        else message
        for message in messages
    ]


def _template_message(place: int, message: Message, why_no_images: str) -> TemplateMessage:
    fields = message.model_dump(exclude_unset=True)
    content = message.content
    where = f"messages.{place}"
    refuse_other_fields(message.model_extra, f"{where}.")
    if isinstance(content, list):
        parts = [
            _part(f"{where}.content.{number}", part, why_no_images) for number, part in enumerate(content)
        ]
        fields["content"] = parts if len(parts) > 1 or _has_image(parts) else text_of(parts)
    elif content is not None and not isinstance(content, str):
        raise bad_request(f"{where}.content must be text or a list of text parts.", f"{where}.content")
    elif content is None and (message.role == "assistant" or "content" in fields):
        fields["content"] = ""  # templates would print "None"
    calls = fields.pop("tool_calls", None)
    if calls is not None:
        parsed = _calls(calls, f"{where}.tool_calls")
        fields |= {"tool_calls": parsed} if parsed else {}
    reasoning = fields.get("reasoning", fields.get("reasoning_content"))  # vLLM's order
    if isinstance(reasoning, str):
        fields |= {"reasoning_content": reasoning, "reasoning": reasoning}
        if fields.get("tool_calls") and not fields.get("content"):
            fields.setdefault("thinking", reasoning)  # gpt-oss' name, next to calls without content
    return fields


def _part(where: str, part: Any, why_no_images: str) -> dict[str, str]:
    if not isinstance(part, dict) or not isinstance(part.get("type"), str):
        raise bad_request(f"{where} must be an object with a type.", where)
    kind: str = part["type"]
    if kind in IMAGE_PARTS and not why_no_images:
        image_part(part, where)
        return {"type": "image"}
    if kind not in _TEXT_PARTS:
        where = place_of(part, where)
        raise bad_request(f"{where} is of type {kind!r}; {_supported(kind, why_no_images)}.", f"{where}.type")
    name = _TEXT_PARTS[kind]
    if not isinstance(part.get(name), str):
        raise bad_request(f"{where}.{name} must be a string.", f"{where}.{name}")
    return {"type": "text", "text": part[name]}


def _supported(kind: str, why_no_images: str) -> str:
    """Return what is supported instead of a part of this type."""
    if kind in IMAGE_PARTS:
        return f"this model supports only text, because {why_no_images}"
    if reason := why_unserved(kind):
        return reason
    return "this model supports only text" if why_no_images else "this model supports text and images"


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
            f"{where}.function.arguments must be a string that contains a JSON object.",
            f"{where}.function.arguments",
        )
    return {**call, "function": {**function, "arguments": _object_of(arguments)}}


def _object_of(arguments: str | dict[str, Any] | None) -> Any:
    """Return arguments as an object, or as sent if they are not valid: a history may contain a truncated call."""
    if not isinstance(arguments, str):
        return {} if arguments is None else arguments
    if not arguments.strip():
        return {}
    text = arguments.encode("utf-8", "surrogatepass")
    if trouble_with_nesting(text) is not None:
        return arguments
    try:
        parsed = parse_json(text)  # in pieces, because it may have megabytes
    except ApiError:
        return arguments
    return parsed if isinstance(parsed, dict) and not is_deeper(parsed, MAX_DEPTH) else arguments


def with_object_arguments(messages: Sequence[TemplateMessage]) -> list[TemplateMessage]:
    """Return messages with the arguments of all calls as objects: some templates accept nothing else.

    Truncated arguments (`{"city": "Pa`) become the part that arrived. Other text becomes the value of one key.
    """
    return [
        {**message, "tool_calls": [_with_object_arguments(call) for call in message["tool_calls"]]}
        if message.get("tool_calls")
        else message
        for message in messages
    ]


def _with_object_arguments(call: dict[str, Any]) -> dict[str, Any]:
    arguments = call["function"]["arguments"]
    if isinstance(arguments, str):
        try:
            read = from_json(arguments, allow_partial="trailing-strings", allow_inf_nan=False)
        except ValueError:
            read = None
        is_object = isinstance(read, dict) and not is_deeper(read, MAX_DEPTH)
        arguments = read if is_object else {"arguments": arguments}
    return {**call, "function": {**call["function"], "arguments": arguments}}


def _with_text_arguments(call: dict[str, Any]) -> dict[str, Any]:
    arguments = call["function"]["arguments"]
    text = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
    return {**call, "function": {**call["function"], "arguments": text}}


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
    """Return the description of tools for the system message.

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
    """Return whether a chat contains calls or results."""
    return any(message["role"] == "tool" or message.get("tool_calls") for message in messages)


def beginning_with(
    messages: Sequence[TemplateMessage], text: str, *, role: str = "system"
) -> list[TemplateMessage]:
    """Return messages that begin with a text.

    Args:
        role: "system", or "user" for templates that do not accept a system message.
    """
    first = messages[0]
    if first["role"] == role == "user":
        return [{**first, "content": _joined(text, first.get("content"))}, *messages[1:]]
    if role == "system" and first["role"] in ("system", "developer"):
        return [{**first, "content": _joined(first.get("content"), text)}, *messages[1:]]
    return [{"role": role, "content": text}, *messages]


def _joined(before: Any, behind: Any) -> Any:
    """Join two contents with a blank line. Lists keep their parts."""
    if isinstance(before, list):
        return [*before, {"type": "text", "text": f"\n\n{behind}"}]
    if isinstance(behind, list):
        return [{"type": "text", "text": f"{before}\n\n"}, *behind]
    return f"{before or ''}\n\n{behind or ''}"


def as_text(messages: Sequence[TemplateMessage], parser: str = "hermes") -> list[TemplateMessage]:
    """Return messages with calls and results written as text.

    Args:
        parser: Parser of the model's calls. LFM2 has its own form (model card); all other models get Hermes' tags.
    """
    return [_as_text(message, parser) for message in messages]


def _as_text(message: TemplateMessage, parser: str) -> TemplateMessage:
    content = text_of(message.get("content"))
    if message["role"] == "tool":
        if parser == "lfm2":
            return {**message, "content": f"<|tool_response_start|>{content}<|tool_response_end|>"}
        return {"role": "user", "content": f"<tool_response>\n{content}\n</tool_response>"}
    if not message.get("tool_calls"):
        return message
    functions = [call["function"] for call in message["tool_calls"]]
    if parser == "lfm2":
        texts = [f"<|tool_call_start|>[{', '.join(map(_as_python, functions))}]<|tool_call_end|>"]
    else:
        calls = [{"name": function["name"], "arguments": function["arguments"]} for function in functions]
        texts = [f"<tool_call>\n{_json(call)}\n</tool_call>" for call in calls]
    kept = {name: value for name, value in message.items() if name != "tool_calls"}
    return {**kept, "content": "\n".join([content, *texts] if content else texts)}


def _as_python(function: Mapping[str, Any]) -> str:
    """Return a call in Python's form: f(a='b'). Truncated arguments become one string."""
    arguments = function["arguments"]
    given = arguments if isinstance(arguments, dict) else {"arguments": arguments}
    return f"{function['name']}({', '.join(f'{name}={value!r}' for name, value in given.items())})"


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)
