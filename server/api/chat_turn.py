"""Run one turn of a chat, from the request to the parsed answer. All chat endpoints share this code.

`ChatTurn.open` checks a request, renders and tokenizes its prompt and sends its choices to ranks. `parser` turns the
pieces of a choice into content, reasoning and tool calls as they arrive; `message` parses a whole choice at once. Each
endpoint writes its own JSON. Endpoints other than /v1/chat/completions first translate their request into a ChatRequest.
"""

import uuid
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from scheduler.policy.request import FinishReason, Structure
from server.api.answer_json import usage_of
from server.api.images import NO_IMAGES, encode_images, image_parts
from server.api.parsers.deltas import ContentDelta, Delta, ReasoningDelta, TextParser, ToolCallDelta, merge
from server.api.parsers.reader import decode_json
from server.api.parsers.registry import Markup
from server.api.prompts import encode, render_chat
from server.api.sampling import asks_for
from server.api.schemas import ChatRequest, refuse_unserved
from server.api.served import ServedModel
from server.api.structure import check_structure, refuse_second_structure, stop_patterns_of, structure_of
from server.api.template_messages import template_messages, text_of
from server.api.tools import ToolUse, tool_use_of
from server.front.generations import Answer, Ask, Piece
from server.front.requests import Requests


class ReasoningCount:
    """Count the reasoning tokens of an answer while it grows.

    Parsers return text, not tokens. If a piece became reasoning only, all its tokens count, including those of the markup
    before it. If it became several kinds, the text of its reasoning is tokenized again.
    """

    def __init__(self, count_tokens: Callable[[str], int]) -> None:
        """Args: count_tokens returns the number of tokens in a text."""
        self.num_tokens = 0
        self._count_tokens = count_tokens
        self._num_pending = 0  # tokens with text that the parser has not returned yet

    def note(self, deltas: Sequence[Delta], num_tokens: int) -> None:
        """Record the deltas that a piece became and its number of tokens."""
        self._num_pending += num_tokens
        if not deltas:
            return
        thoughts = [delta.text for delta in deltas if isinstance(delta, ReasoningDelta)]
        if len(thoughts) == len(deltas):
            self.num_tokens += self._num_pending
        elif thoughts:
            self.num_tokens += min(self._num_pending, self._count_tokens("".join(thoughts)))
        self._num_pending = 0


@dataclass(slots=True)
class ToolCall:
    """A complete tool call."""

    call_id: str
    name: str
    arguments: str = ""  # JSON text


@dataclass(slots=True)
class AnswerMessage:
    """The parsed content of a complete choice."""

    content: str = ""
    reasoning: str = ""
    tool_calls: list[ToolCall] = field(default_factory=list)


class MessageParser:
    """Parse one choice while its pieces arrive."""

    def __init__(
        self,
        parser: TextParser,
        reasoning: ReasoningCount,
        *,
        text_of: Callable[[int], str] = lambda _token_id: "",
        max_calls: int | None = None,
        shows_reasoning: bool = True,
        separates_reasoning: bool = True,
    ) -> None:
        """Args: text_of returns the text of a stop token; max_calls is the maximum number of calls to return; None returns all."""
        self._parser = parser
        self._reasoning = reasoning
        self._text_of = text_of
        self._max_calls = max_calls
        self._shows_reasoning = shows_reasoning
        self._separates_reasoning = separates_reasoning
        self.num_calls = 0
        self._cut_at: str | None = None  # as in `TextParser.finish`
        self._open_arguments: list[str] | None = None  # of the call with which the deltas end

    @property
    def cuts_call(self) -> bool:
        """Whether a limit or the client's stop ended the choice inside its last call. Known after `finish`."""
        if self._cut_at is None or self._open_arguments is None:
            return False
        return not _is_object("".join(self._open_arguments))

    @property
    def num_reasoning_tokens(self) -> int:
        """The number of reasoning tokens so far, shown or hidden."""
        return self._reasoning.num_tokens

    def push(self, piece: Piece) -> list[Delta]:
        """Return the deltas of a new piece."""
        if piece.finish_reason is not None:
            self._cut_at = self._cut_of(piece)
        return self._passed(self._parser.push(piece.text), len(piece.token_ids))

    def finish(self) -> list[Delta]:
        """Return the remaining deltas at the end of the choice. May be called more than once."""
        return self._passed(self._parser.finish(self._cut_at), 0)

    def finish_reason(self, reason: FinishReason | None) -> str | None:
        """Return OpenAI's finish reason, or None while the choice is unfinished.

        A truncated call has "length", or "stop" after the client's stop, like truncated text. If the request names a function,
        OpenAI and vLLM return "stop" instead of "tool_calls": `ChatTurn.finish_reason` handles this case.
        """
        if self.num_calls and reason is FinishReason.STOP and not self.cuts_call:
            return "tool_calls"
        return None if reason is None else reason.value

    def _passed(self, deltas: list[Delta], num_tokens: int) -> list[Delta]:
        self._reasoning.note(deltas, num_tokens)
        if len(deltas) == 1 and isinstance(deltas[0], ContentDelta):
            self._open_arguments = None
            return deltas  # the usual case
        if not self._separates_reasoning:
            deltas = [
                ContentDelta(each.text) if isinstance(each, ReasoningDelta) else each for each in deltas
            ]
        return [delta for delta in deltas if self._passes(delta)]

    def _cut_of(self, last: Piece) -> str | None:
        if last.finish_reason is not None and last.finish_reason.is_cut:
            return ""
        return self._text_of(last.stop_reason) if isinstance(last.stop_reason, int) else last.stop_reason

    def _passes(self, delta: Delta) -> bool:
        if not isinstance(delta, ToolCallDelta):
            self._open_arguments = None
            return self._shows_reasoning or not isinstance(delta, ReasoningDelta)
        if self._max_calls is not None and delta.index >= self._max_calls:
            self._open_arguments = None
            return False
        self.num_calls = max(self.num_calls, delta.index + 1)
        if self._open_arguments is None or delta.name is not None:
            self._open_arguments = []
        self._open_arguments.append(delta.arguments)
        return True


class ChatTurn:
    """A chat request that ranks are processing."""

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
        """Use `open` instead. Args: finds_calls is whether the answer's text is searched for calls."""
        self.body = body
        self.model = model
        self.model_name = model.check_name(body.model)  # as shown in the answer
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
        """Check a request and send its choices to ranks.

        Args:
            request_id: Id of the request; None generates one in chat's format.
            cut_to_fit: Reduce max_tokens to the space left in the context.

        Raises:
            ApiError: 400 or 404 if the request is invalid; 503 if the service is not ready.
        """
        model.check_name(body.model)
        refuse_unserved(body)
        tools = tool_use_of(body)
        structure = await _structure(body, model, tools)
        prompt = await render_chat(body, model, tools, takes_images=True)
        if structure is not None:
            bound = _markup_of(model, body).bound(prompt)
            prompt, structure = prompt + bound.prompt, replace(structure, after=bound.after)
        prompt_ids = await encode(
            prompt, model, add_special_tokens=bool(body.add_special_tokens), param="messages"
        )
        images = NO_IMAGES
        if parts := [*image_parts([message.content for message in body.messages])]:
            assert model.images is not None, "render_chat refuses images for other models"
            prompt_ids, images = await encode_images(prompt_ids, parts, model.images)
        request_id = request_id or f"chatcmpl-{uuid.uuid4().hex}"
        asks = asks_for(
            body,
            model,
            [prompt_ids],
            request_id=request_id,
            structure=structure,
            patterns=await stop_patterns_of(body, model),
            cut_to_fit=cut_to_fit,
            images=images,
        )
        # A structure from the client does not allow calls.
        finds_calls = tools.choice == "auto" and structure is None
        answer = requests.open(request_id, _showing_markup(asks, model, with_tools=finds_calls))
        return cls(body, model, tools, prompt, answer, finds_calls=finds_calls)

    def parser(self, index: int) -> MessageParser:
        """Return the parser of a choice. Repeated calls return the same one."""
        if index not in self._parsers:
            self._parsers[index] = MessageParser(
                self._text_parser(),
                ReasoningCount(self._count_tokens),
                text_of=lambda token_id: self.model.tokenizer.decode([token_id], skip_special_tokens=False),
                max_calls=None if self.tools.parallel else 1,
                shows_reasoning=self.body.include_reasoning is not False,
                separates_reasoning=self.body.separate_reasoning is not False,
            )
        return self._parsers[index]

    def echo(self) -> str:
        """Return the assistant's last message if the client requested an echo. The answer begins with it."""
        last = self.body.messages[-1]
        if not self.body.echo or last.role != "assistant":
            return ""
        return text_of(template_messages([last], "")[0].get("content"))

    def message(self, index: int, piece: Piece) -> AnswerMessage:
        """Parse a complete choice.

        Drops a call that the client's stop cut off, because the finish reason does not show it, and a truncated call that the
        structure enforced: its arguments are not valid JSON.
        """
        parser = self.parser(index)
        message = AnswerMessage(content=self.echo())
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
        if parser.cuts_call and (self.tools.is_bound or piece.finish_reason is FinishReason.STOP):
            message.tool_calls.pop()
        return message

    def usage(self, begun: Collection[int] | None = None) -> dict[str, Any]:
        """Count the request's tokens.

        Args:
            begun: Indexes of the choices that count as output; None counts all.
        """
        num_thoughts = sum(parser.num_reasoning_tokens for parser in self._parsers.values())
        return usage_of(
            self.answer.generations, self.body.n or 1, begun=begun, num_reasoning_tokens=num_thoughts
        )

    def finish_reason(self, index: int, reason: FinishReason | None) -> str | None:
        """Return chat's finish reason, or None while the choice is unfinished.

        It is "stop" for a function that the request names, as OpenAI documents and vLLM does.
        """
        if self.tools.named:
            return None if reason is None else reason.value
        return self.parser(index).finish_reason(reason)

    def _count_tokens(self, text: str) -> int:
        return len(self.model.tokenizer.encode(text, add_special_tokens=False))

    def _text_parser(self) -> TextParser:
        markup = _markup_of(self.model, self.body)
        if self.tools.is_bound:
            return markup.bound_parser(self.prompt, self.tools.bound_parser())
        if self.body.separate_reasoning is False:
            markup = markup.without_reasoning()
        return markup.parser(self.prompt, self.tools.types() if self._finds_calls else None)


def _markup_of(model: ServedModel, body: ChatRequest) -> Markup:
    return replace(model.markup, continues=bool(body.continue_final_message))


async def _structure(body: ChatRequest, model: ServedModel, tools: ToolUse) -> Structure | None:
    """Return the structure of a required call; without one, return the structure that the body requests."""
    structure = tools.structure()
    if structure is None:
        return await structure_of(body, model)
    refuse_second_structure(body)
    await check_structure(structure, model, "tools")
    return structure


def _showing_markup(asks: list[Ask], model: ServedModel, *, with_tools: bool) -> list[Ask]:
    """Show the parser the special tokens that it needs. Hide the others unless the client requested them."""
    special = model.tokenizer.special_ids
    shown = {special[mark] for mark in model.markup.markers(with_tools=with_tools) if mark in special}
    if not shown:
        return asks
    hidden = frozenset(special.values()) - shown
    return [
        replace(ask, skip_special_tokens=False, hidden_ids=hidden) if ask.skip_special_tokens else ask
        for ask in asks
    ]


def _is_object(text: str) -> bool:
    try:
        return isinstance(decode_json(text), dict)
    except ValueError:
        return False
