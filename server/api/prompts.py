"""From messages, tools or text to a prompt's token ids.

A chat's messages become what templates take: text or parts, calls with arguments as objects, reasoning by both names.
Everything else a client puts into a message (name, tool_call_id, ...) reaches the template as sent. What OpenAI's clients
send and templates trip over is brought to one form here: content null beside calls, an empty list of calls, arguments
as a JSON string.

Where the template knows no tools, they are described in the system message, and calls and results become text. The form is
one that the model's parser reads: DeepSeek's own, which its templates leave to the server (the tool-call section of
DeepSeek-V3.1's model card), or Hermes' tags for everybody else. A model that was never taught tools may still not use them;
with tool_choice "required" or a named function it then at least knows what the arguments mean.
"""

import json
from collections.abc import Iterator, Sequence
from typing import Any

from server import errors
from server.api.parsers.token_calls import DEEPSEEK
from server.api.schemas import ChatRequest, Message, check_num_parts, is_deeper
from server.api.served import ServedModel
from server.api.tools import ToolUse, tool_use_of
from server.errors import ApiError, bad_request
from server.front.tokenizer import ChatTemplateError
from server.http.json_text import parse_json, trouble_with_nesting

TemplateMessage = dict[str, Any]
LONG_TEXT = 20_000  # characters; rendering or tokenizing more takes milliseconds and leaves the event loop
VALUE_CHARS = 16  # that a value counts beside its text: rendering takes as long
SLICE_CHARS = (
    1 << 19
)  # tokenizing takes two hundred times a text's memory, so no more is tokenized unless it fits
SLACK_TOKENS = 16  # by which a text's tokens may differ where it is cut
MAX_DEPTH = 64  # of a call's arguments; templates write them out recursively
_TEXT_PARTS = {"text": "text", "input_text": "text", "output_text": "text", "refusal": "refusal"}


def check_unicode(text: str, param: str) -> None:
    """Refuse what is no text.

    Raises:
        ApiError: 400, half a surrogate pair.
    """
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise bad_request(
            f"{param} is not valid Unicode: {error.reason} at character {error.start}.", param
        ) from None


async def encode(text: str, model: ServedModel, *, add_special_tokens: bool, param: str) -> list[int]:
    """Tokenize one text, as `encode_all`."""
    return (await encode_all([text], model, add_special_tokens=add_special_tokens, param=param))[0]


async def encode_all(
    texts: Sequence[str], model: ServedModel, *, add_special_tokens: bool, param: str
) -> list[list[int]]:
    """Tokenize texts, beside the event loop where they are long together.

    Raises:
        ApiError: 400, a text has half a surrogate pair, is empty, or longer than any text that fits, or has a token that
            the tokenizer knows and the model does not.
    """
    for text in texts:
        check_unicode(text, param)
        _check_length(len(text), model, param)

    def work() -> list[list[int]]:
        return [_encode(text, model, add_special_tokens=add_special_tokens, param=param) for text in texts]

    encoded = await model.run(work, is_long=sum(map(len, texts)) >= LONG_TEXT)
    if not all(encoded):
        raise bad_request(f"{param} is empty: there is no token to start from.", param)
    _check_known(max(map(max, encoded)), model, param)
    return encoded


def _check_known(token_id: int, model: ServedModel, param: str) -> None:
    """Refuse a text's highest token where it has no embedding."""
    last = model.tokenizer.vocab_size - 1
    if token_id > last:
        (token,) = model.tokenizer.token_strings([token_id])
        raise bad_request(
            f"{param} has the token {token!r}, whose id {token_id} is the tokenizer's alone: the model's are 0 to {last}.",
            param,
        )


def is_larger(value: Any, most_chars: int) -> bool:
    """Tell whether a JSON value has more text than that; looks no further than it must."""
    size, waiting = 0, [value]
    while waiting and size <= most_chars:
        each = waiting.pop()
        size += VALUE_CHARS
        if isinstance(each, str):
            size += len(each)
        elif isinstance(each, dict):
            size += VALUE_CHARS * len(each)
            waiting += each.values()
        elif isinstance(each, list):
            waiting += each
    return size > most_chars


def _encode(text: str, model: ServedModel, *, add_special_tokens: bool, param: str) -> list[int]:
    if len(text) > SLICE_CHARS:
        _check_slices(text, model, param)
    return model.tokenizer.encode(text, add_special_tokens=add_special_tokens)


def _check_length(num_chars: int, model: ServedModel, param: str) -> None:
    """Refuse a text that would not fit if all its tokens were the longest one."""
    least_tokens = -(-num_chars // model.tokenizer.longest_token_chars)
    if least_tokens > model.max_len():
        raise errors.too_long(least_tokens, model.max_len(), None, param, is_least=True)


def _check_slices(text: str, model: ServedModel, param: str) -> None:
    """Refuse a text whose beginning has more tokens than the context, without tokenizing the rest."""
    least_tokens = 0
    for start in range(0, len(text), SLICE_CHARS):
        slice_ids = model.tokenizer.encode(text[start : start + SLICE_CHARS], add_special_tokens=False)
        least_tokens += max(0, len(slice_ids) - SLACK_TOKENS)
        if least_tokens > model.max_len():
            raise errors.too_long(least_tokens, model.max_len(), None, param, is_least=True)


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
    text = arguments.encode("utf-8", "surrogatepass")
    if trouble_with_nesting(text) is not None:
        return arguments
    try:
        parsed = parse_json(text)  # in pieces: it may be megabytes
    except ApiError:
        return arguments
    return parsed if isinstance(parsed, dict) and not is_deeper(parsed, MAX_DEPTH) else arguments


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
    """Tell whether a chat has calls or results in it."""
    return any(message["role"] == "tool" or message.get("tool_calls") for message in messages)


def beginning_with(
    messages: Sequence[TemplateMessage], text: str, *, role: str = "system"
) -> list[TemplateMessage]:
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


async def render_chat(body: ChatRequest, model: ServedModel, tools: ToolUse | None = None) -> str:
    """Return a chat's prompt, rendered beside the event loop where it is long.

    Args:
        tools: what `tool_use_of` made of the body's; None looks itself.

    Raises:
        ApiError: 400, a message, a tool, or the template's refusal of them; or they are more than the context holds.
    """
    contents = [message.content for message in body.messages]
    check_num_parts(contents, "messages")
    if len(contents) > model.max_len():  # each has a token at least
        raise errors.too_long(len(contents), model.max_len(), None, "messages", is_least=True)
    of_messages = [each for message in body.messages for each in (message.content, message.model_extra)]
    is_long = is_larger([*of_messages, body.tools, body.documents, body.chat_template_kwargs], LONG_TEXT)
    use = tools or tool_use_of(body)
    return await model.run(lambda: _rendered(body, model, use), is_long=is_long)


def _rendered(body: ChatRequest, model: ServedModel, tools: ToolUse) -> str:
    template = model.tokenizer.template
    refusal = ""
    given = template_messages(body.messages)
    _check_length(sum(len(message.get("content") or "") for message in given), model, "messages")
    for messages in _spellings(given, model, tools):
        try:
            return _render(body, model, with_parts(messages) if template.wants_parts else messages, tools)
        except ChatTemplateError as error:
            refusal = refusal or f"{error}"
    raise bad_request(refusal, "messages")


def _spellings(
    messages: list[TemplateMessage], model: ServedModel, tools: ToolUse
) -> Iterator[list[TemplateMessage]]:
    """Yield the messages as most templates take them, then in other ways for those that refuse."""
    template, form = model.tokenizer.template, model.markup.taught_form
    if mentions_tools(messages) and not template.knows_calls:
        messages = as_text(messages)
    if tools.tools and form is not None and not template.knows_tools:
        text = tool_text(tools.tools, form)
        candidates = [beginning_with(messages, text), beginning_with(messages, text, role="user")]
    else:
        candidates = [messages]
    for candidate in candidates:
        yield candidate
        if any(message.get("tool_calls") for message in candidate):
            yield with_text_arguments(candidate)


def _render(body: ChatRequest, model: ServedModel, messages: list[TemplateMessage], tools: ToolUse) -> str:
    continues = bool(body.continue_final_message)
    begins = body.add_generation_prompt
    return model.tokenizer.render_chat(
        messages,
        tools=tools.tools if model.tokenizer.template.knows_tools else (),
        add_generation_prompt=not continues if begins is None else begins,
        continue_final_message=continues,
        documents=body.documents or (),
        template_kwargs=_template_kwargs(body),
    )


def _template_kwargs(body: ChatRequest) -> dict[str, Any]:
    """Return the template's variables beside the messages; the client's own come last."""
    effort = body.reasoning_effort
    variables: dict[str, Any] = {} if effort is None else {"reasoning_effort": effort}
    if effort == "none":
        variables["enable_thinking"] = False
    return variables | (body.chat_template_kwargs or {})
