"""From a chat request to its prompt's text: messages and tools as the model's template takes them."""

from collections.abc import Iterator
from typing import Any

from server.api.messages import TemplateMessage, template_messages, with_parts, with_text_arguments
from server.api.schemas import ChatRequest
from server.api.tool_prompt import as_text, mentions_tools, tell, tool_text
from server.api.tools import ToolUse, tool_use_of
from server.errors import bad_request
from server.front.served import ServedModel
from server.front.tokenizer import ChatTemplateError


def render_chat(body: ChatRequest, model: ServedModel, tools: ToolUse | None = None) -> str:
    """Return a chat's prompt.

    Args:
        tools: what `tool_use_of` made of the body's; None looks itself.

    Raises:
        ApiError: 400, a message, a tool, or the template's refusal of them.
    """
    tools = tools or tool_use_of(body)
    template = model.tokenizer.template
    refusal = ""
    for messages in _spellings(template_messages(body.messages), model, tools):
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
        tellings = [tell(messages, text), tell(messages, text, role="user")]
    else:
        tellings = [messages]
    for told in tellings:
        yield told
        if any(message.get("tool_calls") for message in told):
            yield with_text_arguments(told)


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
    """Return what the template is told beside the messages; the client's own words come last."""
    effort = body.reasoning_effort
    said: dict[str, Any] = {} if effort is None else {"reasoning_effort": effort}
    if effort == "none":
        said["enable_thinking"] = False
    return said | (body.chat_template_kwargs or {})
