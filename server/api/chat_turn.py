"""One turn of a chat, from the request to what the answer means: the part that is the same for every chat endpoint.

`ChatTurn.open` checks a request, renders and tokenizes its prompt and gives its choices to ranks. `parser` turns a
choice's pieces into content, reasoning and tool calls as they come, `message` a whole choice at once. How that is worded is
the endpoint's matter: /v1/chat/completions words it as it is, others turn their request into a ChatRequest first.
"""

import uuid
from collections.abc import Collection
from dataclasses import replace
from typing import Any

from scheduler.policy.request import FinishReason, Structure
from server.api.chat_prompt import render_chat
from server.api.message_parser import ChatMessage, MessageParser, ToolCall
from server.api.messages import template_messages
from server.api.params import asks_for, refuse_unserved
from server.api.parsers.deltas import ContentDelta, Delta, ReasoningDelta, TextParser, ToolCallDelta, merge
from server.api.parsers.registry import NONE
from server.api.reasoning_tokens import ReasoningCount
from server.api.schemas import ChatRequest
from server.api.streaming import finish_word
from server.api.structure import check_structure, refuse_second_form, structure_of
from server.api.text import LONG_TEXT, check_unicode, encode
from server.api.tools import ToolUse, tool_use_of
from server.api.usage import usage_of
from server.errors import bad_request
from server.front.generations import Answer, Ask, Piece
from server.front.requests import Requests
from server.front.served import ServedModel

__all__ = [
    "LONG_TEXT",
    "ChatMessage",
    "ChatTurn",
    "ContentDelta",
    "Delta",
    "MessageParser",
    "ReasoningDelta",
    "ToolCall",
    "ToolCallDelta",
    "check_unicode",
    "encode",
    "render_chat",
]


class ChatTurn:
    """A chat request that ranks are answering."""

    def __init__(
        self,
        body: ChatRequest,
        model: ServedModel,
        tools: ToolUse,
        prompt: str,
        answer: Answer,
        *,
        finds_calls: bool,
    ) -> None:
        """Use `open`. Args: finds_calls is whether calls are looked for in the answer's text."""
        self.body = body
        self.model = model
        self.name = model.check_name(body.model)  # that the answer carries
        self.tools = tools
        self.prompt = prompt
        self.answer = answer
        self._finds_calls = finds_calls
        self._parsers: dict[int, MessageParser] = {}

    @classmethod
    async def open(
        cls,
        body: ChatRequest,
        model: ServedModel,
        requests: Requests,
        *,
        request_id: str | None = None,
        cut_to_fit: bool = False,
    ) -> "ChatTurn":
        """Check a request and give its choices to ranks.

        Args:
            request_id: None draws one in chat's form.
            cut_to_fit: take max_tokens that the context has no room for as what it has room for.

        Raises:
            ApiError: 400 or 404, the request is wrong; 503, the service is not ready.
        """
        model.check_name(body.model)
        refuse_unserved(body)
        num_logprobs = _num_logprobs(body)
        tools = tool_use_of(body)
        structure = await _structure(body, model, tools)
        prompt = render_chat(body, model, tools)
        if structure is not None:
            bound = model.markup.bound(prompt)
            prompt, structure = prompt + bound.prompt, replace(structure, after=bound.after)
        prompt_ids = await encode(
            prompt, model, add_special_tokens=bool(body.add_special_tokens), param="messages"
        )
        max_tokens = body.max_completion_tokens or body.max_tokens
        if cut_to_fit and max_tokens is not None:
            max_tokens = min(max_tokens, max(1, model.max_len() - len(prompt_ids)))
        request_id = request_id or f"chatcmpl-{uuid.uuid4().hex}"
        asks = asks_for(
            body,
            model,
            [prompt_ids],
            request_id=request_id,
            max_tokens=max_tokens,
            num_logprobs=num_logprobs,
            prompt_field="messages",
            max_tokens_field="max_completion_tokens" if body.max_completion_tokens else "max_tokens",
            structure=structure,
        )
        finds_calls = tools.choice == "auto" and structure is None  # the client's form has no room for calls
        answer = requests.open(request_id, _showing_markup(asks, model, with_tools=finds_calls))
        return cls(body, model, tools, prompt, answer, finds_calls=finds_calls)

    def parser(self, index: int) -> MessageParser:
        """Return a choice's parser, the same one every time."""
        if index not in self._parsers:
            self._parsers[index] = MessageParser(
                self._text_parser(),
                ReasoningCount(self._count_tokens),
                max_calls=None if self.tools.parallel else 1,
                shows_reasoning=self.body.include_reasoning is not False,
            )
        return self._parsers[index]

    def echo(self) -> str:
        """Return the assistant's last message, which the answer begins with where the client wants an echo."""
        last = self.body.messages[-1]
        if not self.body.echo or last.role != "assistant":
            return ""
        return str(template_messages([last])[0].get("content") or "")

    def message(self, index: int, piece: Piece) -> ChatMessage:
        """Read a whole choice."""
        parser = self.parser(index)
        message = ChatMessage(content=self.echo())
        for delta in merge([*parser.push(piece), *parser.finish()]):
            match delta:
                case ContentDelta():
                    message.content += delta.text
                case ReasoningDelta():
                    message.reasoning += delta.text
                case ToolCallDelta(call_id=str(call_id), name=str(name)):
                    message.tool_calls.append(ToolCall(call_id, name, delta.arguments))
                case ToolCallDelta():
                    message.tool_calls[delta.index].arguments += delta.arguments
        return message

    def usage(self, told: Collection[int] | None = None) -> dict[str, Any]:
        """Count the request's tokens.

        Args:
            told: the choices whose output counts, by index; None is all.
        """
        counted = usage_of(self.answer.generations, self.body.n or 1, told=told)
        if self.model.markup.reasoning != NONE:
            num_tokens = sum(parser.num_reasoning_tokens for parser in self._parsers.values())
            counted["completion_tokens_details"] = {"reasoning_tokens": num_tokens}
        return counted

    def finish_word(self, index: int, reason: FinishReason | None) -> str | None:
        """Return chat's word for how a choice ended, None while it goes on.

        With a function that the request names it is "stop", as OpenAI documents and vLLM does.
        """
        return finish_word(reason) if self.tools.named else self.parser(index).finish_word(reason)

    def _count_tokens(self, text: str) -> int:
        return len(self.model.tokenizer.encode(text, add_special_tokens=False))

    def _text_parser(self) -> TextParser:
        markup = self.model.markup
        if self.tools.is_bound:
            return markup.bound_parser(self.prompt, self.tools.bound_parser())
        return markup.parser(self.prompt, self.tools.types() if self._finds_calls else None)


async def _structure(body: ChatRequest, model: ServedModel, tools: ToolUse) -> Structure | None:
    """Return the form that the answer is bound to: the call's, if there must be one, else what the body asks for."""
    structure = tools.structure()
    if structure is None:
        return await structure_of(body, model)
    refuse_second_form(body)
    await check_structure(structure, model, "tools")
    return structure


def _showing_markup(asks: list[Ask], model: ServedModel, *, with_tools: bool) -> list[Ask]:
    """Let the special tokens that a parser reads reach it, and no others unless the client wants to see them."""
    special = model.tokenizer.special_ids
    shown = {special[mark] for mark in model.markup.markers(with_tools=with_tools) if mark in special}
    if not shown:
        return asks
    hidden = frozenset(special.values()) - shown
    return [
        replace(ask, skip_special_tokens=False, hidden_ids=hidden) if ask.skip_special_tokens else ask
        for ask in asks
    ]


def _num_logprobs(body: ChatRequest) -> int | None:
    if body.top_logprobs and not body.logprobs:
        raise bad_request("top_logprobs needs logprobs=true.", "top_logprobs")
    return (body.top_logprobs or 0) if body.logprobs else None
