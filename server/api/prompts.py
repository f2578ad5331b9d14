"""Convert messages, tools or text to a prompt's token ids.

`template_messages` prepares a chat's messages. This module renders them and tokenizes texts, within limits.
"""

from collections.abc import Iterator, Sequence
from typing import Any

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
from server.front import errors
from server.front.errors import bad_request
from server.front.tokenizer import ChatTemplateError
from server.http.json_writer import is_larger

LONG_TEXT = 20_000  # characters; rendering or tokenizing more takes milliseconds, so a thread does it
# Tokenizing takes two hundred times the memory of a text, so longer texts are first checked in slices of this size.
SLICE_CHARS = 1 << 19
SLACK_TOKENS = 16  # maximum difference in tokens that cutting a text causes


def check_unicode(text: str, param: str) -> None:
    """Raise if a text is not valid Unicode.

    Raises:
        ApiError: 400 if the text has a lone surrogate.
    """
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise bad_request(
            f"{param} is not valid Unicode: {error.reason} at character {error.start}.", param
        ) from None


async def encode(text: str, model: ServedModel, *, add_special_tokens: bool, param: str) -> list[int]:
    """Tokenize one text, like `encode_all`."""
    return (await encode_all([text], model, add_special_tokens=add_special_tokens, param=param))[0]


async def encode_all(
    texts: Sequence[str], model: ServedModel, *, add_special_tokens: bool, param: str
) -> list[list[int]]:
    """Tokenize texts. If they are long in all, a thread does it.

    Raises:
        ApiError: 400 if a text has a lone surrogate, is empty, cannot fit into the context, or has a token that is outside
            the model's vocabulary.
    """
    for text in texts:
        check_unicode(text, param)
        _check_length(len(text), model, param)

    def work() -> list[list[int]]:
        return [_encode(text, model, add_special_tokens=add_special_tokens, param=param) for text in texts]

    encoded = await model.run(work, is_long=sum(map(len, texts)) >= LONG_TEXT)
    if not all(encoded):
        raise bad_request(f"{param} is empty: generation needs at least one token.", param)
    _check_known(max(map(max, encoded)), model, param)
    return encoded


def _check_known(token_id: int, model: ServedModel, param: str) -> None:
    """Refuse a text if its highest token has no embedding."""
    last = model.tokenizer.vocab_size - 1
    if token_id > last:
        (token,) = model.tokenizer.token_strings([token_id])
        raise bad_request(
            f"{param} has the token {token!r}; its id {token_id} is outside the model's vocabulary (0 to {last}).",
            param,
        )


def _encode(text: str, model: ServedModel, *, add_special_tokens: bool, param: str) -> list[int]:
    if len(text) > SLICE_CHARS:
        _check_slices(text, model, param)
    return model.tokenizer.encode(text, add_special_tokens=add_special_tokens)


def _check_length(num_chars: int, model: ServedModel, param: str) -> None:
    """Refuse a text that would not fit even if all its tokens were the longest one."""
    least_tokens = -(-num_chars // model.tokenizer.longest_token_chars)
    if least_tokens > model.max_len():
        raise errors.too_long(least_tokens, model.max_len(), None, param, is_least=True)


def _check_slices(text: str, model: ServedModel, param: str) -> None:
    """Refuse a text if its beginning has more tokens than the context, without tokenizing the rest."""
    least_tokens = 0
    for start in range(0, len(text), SLICE_CHARS):
        slice_ids = model.tokenizer.encode(text[start : start + SLICE_CHARS], add_special_tokens=False)
        least_tokens += max(0, len(slice_ids) - SLACK_TOKENS)
        if least_tokens > model.max_len():
            raise errors.too_long(least_tokens, model.max_len(), None, param, is_least=True)


async def render_chat(
    body: ChatRequest, model: ServedModel, tools: ToolUse | None = None, *, takes_images: bool = False
) -> str:
    """Return a chat's rendered prompt. If it is long, a thread renders it.

    Args:
        tools: Result of `tool_use_of` for the body; None computes it.
        takes_images: Whether images are accepted if the model takes them. The prompt then has one token for each.

    Raises:
        ApiError: 400 if a message or a tool is invalid, the template refuses it, or the chat exceeds the context.
    """
    contents = [message.content for message in body.messages]
    check_num_parts(contents, "messages")
    if len(contents) > model.max_len():  # each message has at least one token
        raise errors.too_long(len(contents), model.max_len(), None, "messages", is_least=True)
    of_messages = [each for message in body.messages for each in (message.content, message.model_extra)]
    is_long = is_larger([*of_messages, body.tools, body.documents, body.chat_template_kwargs], LONG_TEXT)
    use = tools or tool_use_of(body)
    return await model.run(lambda: _rendered(body, model, use, takes_images=takes_images), is_long=is_long)


def _rendered(body: ChatRequest, model: ServedModel, tools: ToolUse, *, takes_images: bool) -> str:
    template = model.tokenizer.template
    refusal = ""
    why_no_images = (
        model.why_no_images if model.images is None else "" if takes_images else "only chats accept images"
    )
    given = template_messages(body.messages, why_no_images)
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
    """Yield the messages in the form that most templates accept, then in other forms for templates that refuse it."""
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
    """Return the template's variables other than the messages. The client's own take precedence."""
    effort = body.reasoning_effort
    variables: dict[str, Any] = {} if effort is None else {"reasoning_effort": effort}
    if effort == "none":
        variables["enable_thinking"] = False
    return variables | (body.chat_template_kwargs or {})
