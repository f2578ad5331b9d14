"""From messages, tools or text to a prompt's token ids.

`template_messages` has the forms of a chat's messages; here they are rendered, and texts are tokenized, within limits.
"""

from collections.abc import Iterator, Sequence
from typing import Any

from server import errors
from server.api.schemas import ChatRequest, check_num_parts
from server.api.served import ServedModel
from server.api.template_messages import (
    TemplateMessage,
    as_text,
    beginning_with,
    mentions_tools,
    template_messages,
    text_of,
    tool_text,
    with_content,
    with_object_arguments,
    with_systems,
    with_text_arguments,
)
from server.api.tools import ToolUse, tool_use_of
from server.errors import bad_request
from server.front.tokenizer import ChatTemplateError

LONG_TEXT = 20_000  # characters; rendering or tokenizing more takes milliseconds and leaves the event loop
VALUE_CHARS = 16  # that a value counts beside its text: rendering takes as long
SLICE_CHARS = (
    1 << 19
)  # tokenizing takes two hundred times a text's memory, so no more is tokenized unless it fits
SLACK_TOKENS = 16  # by which a text's tokens may differ where it is cut


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
    _check_length(sum(len(text_of(message.get("content"))) for message in given), model, "messages")
    for messages in _spellings(with_systems(given, template), model, tools):
        try:
            return _render(body, model, messages, tools)
        except ChatTemplateError as error:
            refusal = refusal or f"{error}"
    raise bad_request(refusal, "messages")


def _spellings(
    messages: list[TemplateMessage], model: ServedModel, tools: ToolUse
) -> Iterator[list[TemplateMessage]]:
    """Yield the messages as most templates take them, then in other ways for those that refuse."""
    template, form = model.tokenizer.template, model.markup.taught_form
    if mentions_tools(messages) and not template.knows_calls:
        messages = as_text(messages, model.markup.tools)
    if tools.tools and form is not None and not template.knows_tools:
        text = tool_text(tools.tools, form)
        candidates = [beginning_with(messages, text), beginning_with(messages, text, role="user")]
    else:
        candidates = [messages]
    for candidate in candidates:
        spelled = with_content(candidate, template.form_of)
        yield spelled
        if any(message.get("tool_calls") for message in candidate):
            yield with_text_arguments(spelled)
            yield with_object_arguments(spelled)


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
