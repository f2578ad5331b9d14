"""POST /v1/chat/completions."""

import asyncio
import time
import uuid
from collections.abc import Sequence
from typing import Any

from fastapi import APIRouter
from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, Response

from server.errors import bad_request
from server.generations import Answer, Piece
from server.openai.logprobs import chat_logprobs
from server.openai.params import asks_for, refuse_unserved
from server.openai.schemas import ChatRequest, Message
from server.openai.streaming import Choice, EventStream, collect, event, finish_word
from server.openai.usage import usage_of
from server.requests import Requests
from server.served import ServedModel
from server.tokenizer import ChatTemplateError

LONG_TEXT = 20_000  # characters; encoding more takes milliseconds and leaves the event loop


def chat_routes(model: ServedModel, requests: Requests) -> APIRouter:
    """Return the endpoint's routes."""
    router = APIRouter()

    @router.post("/v1/chat/completions", response_model=None)
    async def create_chat_completion(body: ChatRequest, http: HttpRequest) -> Response:
        """Answer a chat."""
        name = model.check_name(body.model)
        refuse_unserved(body)
        num_logprobs = _num_logprobs(body)
        prompt_ids = await encode_chat(body, model)
        asked = body.max_completion_tokens or body.max_tokens
        request_id = f"chatcmpl-{uuid.uuid4().hex}"
        asks = asks_for(
            body,
            model,
            [prompt_ids],
            request_id=request_id,
            max_tokens=asked,
            num_logprobs=num_logprobs,
            prompt_field="messages",
        )
        answer = requests.open(request_id, asks)
        if body.stream:
            return EventStream(answer, ChatChunks(answer, body, name, model))
        choices = await collect(answer, http)
        return JSONResponse(_whole(answer, choices, body, name, model))

    return router


async def encode_chat(body: ChatRequest, model: ServedModel) -> list[int]:
    """Render and tokenize a chat.

    Raises:
        ApiError: 400, a message or the template's refusal of it.
    """
    messages = [_template_message(place, message) for place, message in enumerate(body.messages)]
    continues = bool(body.continue_final_message)
    try:
        text = model.tokenizer.render_chat(
            messages,
            add_generation_prompt=(not continues)
            if body.add_generation_prompt is None
            else body.add_generation_prompt,
            continue_final_message=continues,
            template_kwargs=body.chat_template_kwargs,
        )
    except ChatTemplateError as error:
        raise bad_request(f"{error}", "messages") from error
    return await encode(text, model, add_special_tokens=False, param="messages")


async def encode(text: str, model: ServedModel, *, add_special_tokens: bool, param: str) -> list[int]:
    """Tokenize, long texts beside the event loop.

    Raises:
        ApiError: 400, the text has half a surrogate pair or is empty.
    """
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise bad_request(
            f"{param} is not valid Unicode: {error.reason} at character {error.start}.", param
        ) from None
    if len(text) < LONG_TEXT:
        token_ids = model.tokenizer.encode(text, add_special_tokens=add_special_tokens)
    else:
        token_ids = await asyncio.to_thread(
            model.tokenizer.encode, text, add_special_tokens=add_special_tokens
        )
    if not token_ids:
        raise bad_request(f"{param} is empty: there is no token to start from.", param)
    return token_ids


def _template_message(place: int, message: Message) -> dict[str, Any]:
    """Return a message as templates want it: content as text, everything else as sent."""
    fields = message.model_dump(exclude_unset=True)
    content = message.content
    if isinstance(content, list):
        fields["content"] = "\n".join(_part_text(place, number, part) for number, part in enumerate(content))
    elif content is not None and not isinstance(content, str):
        raise bad_request(
            f"messages.{place}.content must be text or a list of text parts.", f"messages.{place}.content"
        )
    return fields


def _part_text(place: int, number: int, part: Any) -> str:
    where = f"messages.{place}.content.{number}"
    if not isinstance(part, dict) or not isinstance(part.get("type"), str):
        raise bad_request(f"{where} must be an object with a type.", where)
    if part["type"] not in ("text", "input_text", "output_text"):
        raise bad_request(
            f"{where} is of type {part['type']!r}; this model takes only text.", f"{where}.type"
        )
    if not isinstance(part.get("text"), str):
        raise bad_request(f"{where}.text must be a string.", f"{where}.text")
    text: str = part["text"]
    return text


def _num_logprobs(body: ChatRequest) -> int | None:
    if body.top_logprobs and not body.logprobs:
        raise bad_request("top_logprobs needs logprobs=true.", "top_logprobs")
    return (body.top_logprobs or 0) if body.logprobs else None


def _whole(
    answer: Answer, choices: Sequence[Choice], body: ChatRequest, name: str, model: ServedModel
) -> dict[str, Any]:
    """Word a whole answer."""
    top = body.top_logprobs or 0
    return {
        "id": answer.request_id,
        "object": "chat.completion",
        "created": int(time.time()),
        "model": name,
        "choices": [
            {
                "index": index,
                "message": {"role": "assistant", "content": "".join(choice.text), "refusal": None},
                "logprobs": chat_logprobs(choice.logprobs, model.tokenizer, top) if body.logprobs else None,
                "finish_reason": finish_word(choice.finish_reason),
                "stop_reason": choice.stop_reason,
            }
            for index, choice in enumerate(choices)
        ],
        "usage": usage_of(answer.generations, body.n or 1),
        "system_fingerprint": None,
    }


class ChatChunks:
    """Words a chat's stream."""

    def __init__(self, answer: Answer, body: ChatRequest, name: str, model: ServedModel) -> None:
        options = body.stream_options
        self._answer = answer
        self._n = body.n or 1
        self._logprobs = bool(body.logprobs)
        self._top = body.top_logprobs or 0
        self._tokenizer = model.tokenizer
        self._usage = bool(options and options.include_usage)
        self._usage_always = self._usage and bool(options and options.continuous_usage_stats)
        self._begun: set[int] = set()
        self._head = {
            "id": answer.request_id,
            "object": "chat.completion.chunk",
            "created": int(time.time()),
            "model": name,
            "system_fingerprint": None,
        }

    def piece(self, index: int, piece: Piece) -> bytes:
        """Word what a choice gained: the role first, once, and the finish reason with the last text."""
        events = b""
        if index not in self._begun:
            self._begun.add(index)
            events += self._chunk(index, {"role": "assistant", "content": ""}, None, None)
        shows_logprobs = self._logprobs and bool(piece.logprobs)
        if not (piece.text or shows_logprobs or piece.finish_reason):
            return events
        logprobs = chat_logprobs(piece.logprobs, self._tokenizer, self._top) if shows_logprobs else None
        delta = {"content": piece.text} if piece.text or shows_logprobs else {}
        return events + self._chunk(index, delta, logprobs, piece)

    def end(self) -> bytes:
        """Word the usage, if asked for."""
        if not self._usage:
            return b""
        return event({**self._head, "choices": [], "usage": usage_of(self._answer.generations, self._n)})

    def _chunk(self, index: int, delta: dict[str, Any], logprobs: Any, piece: Piece | None) -> bytes:
        choice: dict[str, Any] = {
            "index": index,
            "delta": delta,
            "logprobs": logprobs,
            "finish_reason": finish_word(piece.finish_reason) if piece else None,
        }
        if piece is not None and piece.stop_reason is not None:
            choice["stop_reason"] = piece.stop_reason
        chunk: dict[str, Any] = {**self._head, "choices": [choice]}
        if self._usage:
            chunk["usage"] = usage_of(self._answer.generations, self._n) if self._usage_always else None
        return event(chunk)
