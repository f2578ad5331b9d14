"""POST /v1/chat/completions: answer a chat in OpenAI's format."""

from collections.abc import Sequence
from typing import Any

from fastapi import APIRouter
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from scheduler.policy.request import Logprobs
from server.api.answer_json import chat_logprobs, encoded_prompt_logprobs, event
from server.api.chat_turn import AnswerMessage, ChatTurn
from server.api.parsers.deltas import ContentDelta, Delta, ReasoningDelta, ToolCallDelta
from server.api.sampling import count_of
from server.api.schemas import ALL, ChatRequest
from server.api.served import ServedModel
from server.api.streaming import Choice, EventStream, JsonChunks, collect, has_many_entries, json_answer
from server.front.generations import Piece
from server.front.requests import Requests
from server.http.routes import STREAM_RESPONSE, new_router

PATH = "/v1/chat/completions"


def chat_routes(model: ServedModel, requests: Requests) -> APIRouter:
    """Return the endpoint's routes."""
    router = new_router()

    @router.post(PATH, response_model=None, responses=STREAM_RESPONSE)
    async def create_chat_completion(body: ChatRequest, http: HttpRequest) -> Response:
        """Answer a chat."""
        return await answer_chat(body, http, model, requests)

    return router


async def answer_chat(
    body: ChatRequest, http: HttpRequest, model: ServedModel, requests: Requests
) -> Response:
    """Answer a chat, whole or as a stream.

    Raises:
        ApiError: The request is invalid or failed.
        ClientGone: The client disconnected first.
    """
    turn = await ChatTurn.open(body, model, requests)
    chunks = ChatChunks(turn)
    if body.stream:
        return EventStream(turn.answer, chunks)
    choices = await collect(turn.answer, http)
    # Spelling a long prompt's logprobs takes seconds, and counting long reasoning tokenizes it again.
    has_many = has_many_entries(choices, body.top_logprobs if body.logprobs else None)
    is_long = body.prompt_logprobs is not None or body.top_logprobs == ALL or has_many
    return await json_answer(lambda: _whole(turn, chunks, choices), model, is_long=is_long)


def _whole(turn: ChatTurn, chunks: "ChatChunks", choices: Sequence[Choice]) -> dict[str, Any]:
    """Return a whole answer."""
    return {
        **chunks.head,
        "object": "chat.completion",
        "choices": [_whole_choice(turn, index, choice.piece()) for index, choice in enumerate(choices)],
        "usage": turn.usage(),
        **chunks.weights(),
        **chunks.metrics(),
        **_about_prompt(turn),
    }


def _about_prompt(turn: ChatTurn) -> dict[str, Any]:
    """Return vLLM's fields about the prompt, if requested. All choices have the same prompt."""
    first, num_top = turn.answer.generations[0], turn.body.prompt_logprobs
    logprobs = None
    if num_top is not None:
        num_top = count_of(num_top, turn.model)
        logprobs = encoded_prompt_logprobs(first.prompt_logprobs, turn.model.tokenizer, num_top)
    shown_ids = list(first.ask.request.prompt_ids) if turn.body.return_token_ids else None
    return {"prompt_logprobs": logprobs, "prompt_token_ids": shown_ids}


def _whole_choice(turn: ChatTurn, index: int, whole: Piece) -> dict[str, Any]:
    message = turn.message(index, whole)
    return {
        "index": index,
        "message": _message(turn, message),
        "logprobs": _logprobs(turn, whole.logprobs) if turn.body.logprobs else None,
        "finish_reason": turn.finish_reason(index, whole.finish_reason),
        "stop_reason": whole.stop_reason,
        "matched_stop": whole.matched_stop,
        "token_ids": whole.token_ids if turn.body.return_token_ids else None,
    }


def _logprobs(turn: ChatTurn, entries: Sequence[Logprobs]) -> dict[str, Any]:
    body = turn.body
    return chat_logprobs(
        entries,
        turn.model.tokenizer,
        len(body.logprob_token_ids or ()) or count_of(body.top_logprobs or 0, turn.model),
        as_ids=bool(body.return_tokens_as_token_ids),
        shows_own=bool(body.logprob_token_ids),
    )


def _message(turn: ChatTurn, message: AnswerMessage) -> dict[str, Any]:
    """Return a complete message. Content is null if there are only calls or reasoning."""
    has_more = bool(message.tool_calls or message.reasoning) and not turn.tools.named  # named: "", as in vLLM
    fields: dict[str, Any] = {
        "role": "assistant",
        "content": None if has_more and not message.content else message.content,
        "refusal": None,
        **_reasoning(message.reasoning or None),
    }
    if message.tool_calls:
        fields["tool_calls"] = [
            {
                "id": call.call_id,
                "type": "function",
                "function": {"name": call.name, "arguments": call.arguments},
            }
            for call in message.tool_calls
        ]
    return fields


def _reasoning(text: str | None) -> dict[str, Any]:
    """Return reasoning under its old name, which most clients read, and under vLLM's new one."""
    return {"reasoning_content": text, "reasoning": text}


class ChatChunks(JsonChunks):
    """The chunks of a chat's stream."""

    def __init__(self, turn: ChatTurn) -> None:
        body = turn.body
        super().__init__(
            turn.answer,
            "chat.completion.chunk",
            turn.model_name,
            body.stream_options,
            turn.usage,
            has_metrics=turn.model.has_metrics,
        )
        self._turn = turn
        self._has_logprobs, self._has_ids = bool(body.logprobs), bool(body.return_token_ids)
        # True if pieces between the first and the last carry nothing but text.
        self._has_only_text = not (self._has_logprobs or self._has_ids or self.has_usage_always)
        self._begun: set[int] = set()
        self._has_shown_prompt = False

    def piece(self, index: int, piece: Piece) -> bytes:
        """Return the events for a choice's new piece. The first event has the role, and the last delta has the finish
        reason."""
        events = b"" if index in self._begun else self._begin(index)
        gained = self._deltas(index, piece)
        match gained:
            case [ContentDelta(text)] if self._has_only_text and not piece.finish_reason:
                return events + self.text_event(
                    index, text, lambda mark: self._delta_chunk(index, {"content": mark}, None, None)
                )
        deltas = [_delta(delta) for delta in gained]
        logprobs = _logprobs(self._turn, piece.logprobs) if self._has_logprobs and piece.logprobs else None
        if logprobs or (self._has_ids and piece.token_ids):
            deltas = deltas or [{"content": ""}]
        if piece.finish_reason:
            deltas = deltas or [{}]
        for number, delta in enumerate(deltas, start=1):
            last = piece if number == len(deltas) else None
            events += event(self._delta_chunk(index, delta, logprobs, last))
            logprobs = None
        return events

    def _begin(self, index: int) -> bytes:
        """Return a choice's first events: the role, then the echo. Its usage counts only earlier choices, as in vLLM."""
        events = event(self._delta_chunk(index, {"role": "assistant", "content": ""}, None, None))
        self._begun.add(index)
        echo = self._turn.echo()
        return events + event(self._delta_chunk(index, {"content": echo}, None, None)) if echo else events

    def _deltas(self, index: int, piece: Piece) -> list[Delta]:
        parser = self._turn.parser(index)
        deltas = parser.push(piece)
        if piece.finish_reason:
            deltas += parser.finish()
        return deltas

    def _delta_chunk(
        self, index: int, delta: dict[str, Any], logprobs: Any, last: Piece | None
    ) -> dict[str, Any]:
        """Return the chunk of a delta; `last` is the piece if this is its last delta."""
        choice: dict[str, Any] = {
            "index": index,
            "delta": delta,
            "logprobs": logprobs,
            "finish_reason": self._turn.finish_reason(index, last.finish_reason) if last else None,
        }
        if last is not None and last.finish_reason is not None:
            choice["matched_stop"] = last.matched_stop
            if last.stop_reason is not None:
                choice["stop_reason"] = last.stop_reason
        if self._has_ids:
            choice["token_ids"] = last.token_ids if last is not None else []
        chunk = self.chunk(choice, self._turn.usage(self._begun) if self.has_usage_always else None)
        if self._has_ids and not self._has_shown_prompt:
            self._has_shown_prompt = True
            chunk["prompt_token_ids"] = _about_prompt(self._turn)["prompt_token_ids"]
        return chunk


def _delta(delta: Delta) -> dict[str, Any]:
    match delta:
        case ContentDelta():
            return {"content": delta.text}
        case ReasoningDelta():
            return _reasoning(delta.text)
        case ToolCallDelta(call_id=None):
            return {"tool_calls": [{"index": delta.index, "function": {"arguments": delta.arguments}}]}
        case ToolCallDelta():
            function = {"name": delta.name, "arguments": delta.arguments}
            return {
                "tool_calls": [
                    {"index": delta.index, "id": delta.call_id, "type": "function", "function": function}
                ]
            }
