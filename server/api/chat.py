"""POST /v1/chat/completions."""

import asyncio
import time
from collections.abc import Sequence
from typing import Any

from fastapi import APIRouter
from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, Response

from scheduler.policy.request import Logprobs
from server.api.answer_json import TextEvent, chat_logprobs, event, prompt_logprobs_list
from server.api.chat_turn import ChatMessage, ChatTurn
from server.api.parsers.deltas import ContentDelta, Delta, ReasoningDelta, ToolCallDelta
from server.api.parsers.registry import NONE
from server.api.schemas import ChatRequest
from server.api.served import ServedModel
from server.api.streaming import Choice, EventStream, collect
from server.front.generations import Piece
from server.front.requests import Requests
from server.http.routes import STREAM_RESPONSE, new_router

PATH = "/v1/chat/completions"
_MANY_TOKENS = 4096  # wording more leaves the event loop


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
        ApiError: the request is wrong or failed.
        ClientGone: the client left first.
    """
    turn = await ChatTurn.open(body, model, requests)
    if body.stream:
        return EventStream(turn.answer, ChatChunks(turn))
    choices = await collect(turn.answer, http)
    num_tokens = sum(len(choice.token_ids) for choice in choices)
    # A long prompt's logprobs take seconds to word, long reasoning is tokenized again to be counted.
    if body.prompt_logprobs is not None or num_tokens > _MANY_TOKENS:
        return await asyncio.to_thread(lambda: JSONResponse(_whole(turn, choices)))
    return JSONResponse(_whole(turn, choices))


def _whole(turn: ChatTurn, choices: Sequence[Choice]) -> dict[str, Any]:
    """Word a whole answer."""
    return {
        "id": turn.answer.request_id,
        "object": "chat.completion",
        "created": int(time.time()),
        "model": turn.name,
        "choices": [_whole_choice(turn, index, choice) for index, choice in enumerate(choices)],
        "usage": turn.usage(),
        "system_fingerprint": None,
        **_of_prompt(turn),
    }


def _of_prompt(turn: ChatTurn) -> dict[str, Any]:
    """Word what vLLM tells of the prompt, where it is asked for; every choice has the same one."""
    first, num_top = turn.answer.generations[0], turn.body.prompt_logprobs
    told = None
    if num_top is not None:
        told = prompt_logprobs_list(first.prompt_logprobs, turn.model.tokenizer, num_top)
    shown_ids = list(first.ask.request.prompt_ids) if turn.body.return_token_ids else None
    return {"prompt_logprobs": told, "prompt_token_ids": shown_ids}


def _whole_choice(turn: ChatTurn, index: int, choice: Choice) -> dict[str, Any]:
    body = turn.body
    message = turn.message(index, Piece(text="".join(choice.text), token_ids=choice.token_ids))
    return {
        "index": index,
        "message": _message(turn, message),
        "logprobs": _logprobs(turn, choice.logprobs) if body.logprobs else None,
        "finish_reason": turn.finish_word(index, choice.finish_reason),
        "stop_reason": choice.stop_reason,
        "token_ids": choice.token_ids if body.return_token_ids else None,
    }


def _logprobs(turn: ChatTurn, entries: Sequence[Logprobs]) -> dict[str, Any]:
    body = turn.body
    return chat_logprobs(
        entries,
        turn.model.tokenizer,
        len(body.logprob_token_ids or ()) or body.top_logprobs or 0,
        as_ids=bool(body.return_tokens_as_token_ids),
        shows_own=bool(body.logprob_token_ids),
    )


def _message(turn: ChatTurn, message: ChatMessage) -> dict[str, Any]:
    """Word a whole message. Content is null where there is none but calls or reasoning."""
    has_more = bool(message.tool_calls or message.reasoning) and not turn.tools.named  # then "", as in vLLM
    worded: dict[str, Any] = {
        "role": "assistant",
        "content": None if has_more and not message.content else message.content,
        "refusal": None,
    }
    if turn.model.markup.reasoning != NONE:
        worded |= _reasoning(message.reasoning or None)
    if message.tool_calls:
        worded["tool_calls"] = [
            {
                "id": call.call_id,
                "type": "function",
                "function": {"name": call.name, "arguments": call.arguments},
            }
            for call in message.tool_calls
        ]
    return worded


def _reasoning(text: str | None) -> dict[str, Any]:
    """Word reasoning by its old name, which most clients read, and by vLLM's new one."""
    return {"reasoning_content": text, "reasoning": text}


class ChatChunks:
    """Words a chat's stream."""

    def __init__(self, turn: ChatTurn) -> None:
        body = turn.body
        options = body.stream_options
        self._turn = turn
        self._logprobs = bool(body.logprobs)
        self._usage = bool(options and options.include_usage)
        self._usage_always = self._usage and bool(options and options.continuous_usage_stats)
        self._has_only_text = not (
            self._logprobs or self._usage_always or body.return_token_ids
        )  # in the middle
        self._text_events: dict[int, TextEvent] = {}
        self._begun: set[int] = set()
        self._told_prompt = False
        self._head = {
            "id": turn.answer.request_id,
            "object": "chat.completion.chunk",
            "created": int(time.time()),
            "model": turn.name,
            "system_fingerprint": None,
        }

    def piece(self, index: int, piece: Piece) -> bytes:
        """Word what a choice gained: the role first, once, and the finish reason with the last delta."""
        events = b""
        if index not in self._begun:
            events += self._begin(index)
        gained = self._deltas(index, piece)
        match gained:
            case [ContentDelta(text)] if self._has_only_text and not piece.finish_reason:
                return events + self._text_event(index).of(text)
        deltas = [_delta(delta) for delta in gained]
        logprobs = None
        if self._logprobs and piece.logprobs:
            logprobs = _logprobs(self._turn, piece.logprobs)
            deltas = deltas or [{"content": ""}]
        if self._turn.body.return_token_ids and piece.token_ids:
            deltas = deltas or [{"content": ""}]
        if piece.finish_reason:
            deltas = deltas or [{}]
        for number, delta in enumerate(deltas, start=1):
            events += event(self._chunk(index, delta, logprobs, piece if number == len(deltas) else None))
            logprobs = None
        return events

    def end(self) -> bytes:
        """Word the usage, if asked for."""
        if not self._usage:
            return b""
        return event({**self._head, "choices": [], "usage": self._turn.usage()})

    def _begin(self, index: int) -> bytes:
        """Word a choice's head: the role, then the echo. Its usage counts what was told before, as vLLM's does."""
        events = event(self._chunk(index, {"role": "assistant", "content": ""}, None, None))
        self._begun.add(index)
        echo = self._turn.echo()
        return events + event(self._chunk(index, {"content": echo}, None, None)) if echo else events

    def _text_event(self, index: int) -> TextEvent:
        """Return the event of a choice's pieces in the middle, the same one every time."""
        if index not in self._text_events:
            self._text_events[index] = TextEvent(
                lambda text: self._chunk(index, {"content": text}, None, None)
            )
        return self._text_events[index]

    def _deltas(self, index: int, piece: Piece) -> list[Delta]:
        parser = self._turn.parser(index)
        deltas = parser.push(piece)
        if piece.finish_reason:
            deltas += parser.finish()
        return deltas

    def _chunk(self, index: int, delta: dict[str, Any], logprobs: Any, last: Piece | None) -> dict[str, Any]:
        """Word one delta; `last` is the piece that it is the last of."""
        choice: dict[str, Any] = {
            "index": index,
            "delta": delta,
            "logprobs": logprobs,
            "finish_reason": self._turn.finish_word(index, last.finish_reason) if last else None,
        }
        if last is not None and last.stop_reason is not None:
            choice["stop_reason"] = last.stop_reason
        chunk: dict[str, Any] = {**self._head, "choices": [choice]}
        if self._turn.body.return_token_ids:
            choice["token_ids"] = last.token_ids if last is not None else []
            if not self._told_prompt:
                self._told_prompt = True
                chunk["prompt_token_ids"] = _of_prompt(self._turn)["prompt_token_ids"]
        if self._usage:
            chunk["usage"] = self._turn.usage(self._begun) if self._usage_always else None
        return chunk


def _delta(delta: Delta) -> dict[str, Any]:
    """Word one delta."""
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
