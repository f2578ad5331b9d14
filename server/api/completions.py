"""POST /v1/completions: text or token ids in, text out, without a chat template."""

import asyncio
import time
import uuid
from collections.abc import Sequence
from functools import partial
from typing import Any

from fastapi import APIRouter
from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, Response

from scheduler.policy.request import FinishReason
from server.api.logprobs import CompletionLogprobs, prompt_logprobs_list
from server.api.params import asks_for, refuse_unserved
from server.api.prompts import echo_of, encode_prompts
from server.api.schemas import CompletionRequest
from server.api.streaming import Choice, EventStream, collect, finish_word
from server.api.structure import structure_of
from server.api.text_event import TextEvent, event
from server.api.usage import usage_of
from server.errors import bad_request
from server.front.generations import Answer, Generation, Piece
from server.front.requests import Requests
from server.front.served import ServedModel
from server.http.described import STREAM_RESPONSE
from server.http.hot_routes import HotEndpoint

PATH = "/v1/completions"
DEFAULT_MAX_TOKENS = 16  # OpenAI's for this endpoint


def completion_routes(model: ServedModel, requests: Requests) -> APIRouter:
    """Return the endpoint's routes."""
    router = APIRouter()

    @router.post(PATH, response_model=None, responses=STREAM_RESPONSE)
    async def create_completion(body: CompletionRequest, http: HttpRequest) -> Response:
        """Complete one or more prompts."""
        return await answer_completion(body, http, model, requests)

    return router


def hot_completion(model: ServedModel, requests: Requests) -> HotEndpoint:
    """Return the endpoint for requests that are as they should be."""
    return HotEndpoint(
        path=PATH, schema=CompletionRequest, answer=partial(answer_completion, model=model, requests=requests)
    )


async def answer_completion(
    body: CompletionRequest, http: HttpRequest, model: ServedModel, requests: Requests
) -> Response:
    """Complete one or more prompts, whole or as a stream.

    Raises:
        ApiError: the request is wrong or failed.
        ClientGone: the client left first.
    """
    name = model.check_name(body.model)
    refuse_unserved(body)
    if body.max_tokens == 0 and not body.echo:
        raise bad_request("max_tokens is 0, which only echo=true gives a meaning.", "max_tokens")
    structure = await structure_of(body, model)
    prompts = await encode_prompts(body, model)
    request_id = f"cmpl-{uuid.uuid4().hex}"
    asks = asks_for(
        body,
        model,
        prompts,
        request_id=request_id,
        max_tokens=_max_tokens(body, prompts, model),
        num_logprobs=body.logprobs,
        prompt_field="prompt",
        num_prompt_logprobs=body.logprobs if body.echo else None,
        structure=structure,
    )
    answer = requests.open(request_id, asks)
    worded = Worded(answer, body, name, model)
    if body.stream:
        return EventStream(answer, worded)
    choices = await collect(answer, http)
    if body.echo or body.prompt_logprobs is not None:  # may take seconds to word, if logprobs are wanted
        return await asyncio.to_thread(lambda: JSONResponse(worded.whole(choices)))
    return JSONResponse(worded.whole(choices))


def _max_tokens(body: CompletionRequest, prompts: Sequence[Sequence[int]], model: ServedModel) -> int | None:
    """Return how many tokens are generated: 1, not shown, where 0 are wanted; the default is less where the context
    ends before."""
    if body.max_tokens is not None:
        return max(1, body.max_tokens)
    cut = body.truncate_prompt_tokens
    if cut == -1:
        return DEFAULT_MAX_TOKENS
    longest = max(map(len, prompts))
    room = model.max_len() - (min(longest, cut) if cut else longest)
    return DEFAULT_MAX_TOKENS if room >= DEFAULT_MAX_TOKENS else None


class Worded:
    """Words an answer, whole or as a stream."""

    def __init__(self, answer: Answer, body: CompletionRequest, name: str, model: ServedModel) -> None:
        options = body.stream_options
        self._answer = answer
        self._body = body
        self._tokenizer = model.tokenizer
        self._n = body.n or 1
        self._usage = bool(options and options.include_usage)
        self._usage_always = self._usage and bool(options and options.continuous_usage_stats)
        self._has_only_text = (  # of pieces in the middle
            body.logprobs is None
            and not body.return_token_ids
            and not self._usage_always
            and body.max_tokens != 0
        )
        self._text_events: dict[int, TextEvent] = {}
        self._choices = [
            _WordedChoice(generation, body, self._echo(generation, model), model)
            for generation in answer.generations
        ]
        self._head = {
            "id": answer.request_id,
            "object": "text_completion",
            "created": int(time.time()),
            "model": name,
            "system_fingerprint": None,
        }

    def whole(self, choices: Sequence[Choice]) -> dict[str, Any]:
        """Word a whole answer."""
        pieces = [
            Piece(
                "".join(choice.text),
                choice.token_ids,
                choice.logprobs,
                choice.finish_reason,
                choice.stop_reason,
            )
            for choice in choices
        ]
        worded = [choice.whole(piece) for choice, piece in zip(self._choices, pieces, strict=True)]
        return {**self._head, "choices": worded, "usage": self._count()}

    def piece(self, index: int, piece: Piece) -> bytes:
        """Word what a choice gained."""
        worded = self._choices[index]
        if self._has_only_text and worded.is_begun and piece.text and not piece.finish_reason:
            return self._text_event(index).of(piece.text)
        choice = worded.piece(piece)
        return b"" if choice is None else event(self._chunk(choice))

    def end(self) -> bytes:
        """Word the usage, if asked for."""
        if not self._usage:
            return b""
        return event({**self._head, "choices": [], "usage": self._count()})

    def _text_event(self, index: int) -> TextEvent:
        """Return the event of a choice's pieces in the middle, the same one every time."""
        if index not in self._text_events:
            choice = self._choices[index]
            self._text_events[index] = TextEvent(lambda text: self._chunk(choice.word(Piece(text))))
        return self._text_events[index]

    def _chunk(self, choice: dict[str, Any]) -> dict[str, Any]:
        chunk: dict[str, Any] = {**self._head, "choices": [choice]}
        if self._usage:
            chunk["usage"] = self._count() if self._usage_always else None
        return chunk

    def _echo(self, generation: Generation, model: ServedModel) -> str:
        """Return the text that precedes a choice's."""
        if not self._body.echo:
            return ""
        prompt_ids = generation.ask.request.prompt_ids
        return echo_of(self._body, generation.index // self._n, prompt_ids, model)

    def _count(self) -> dict[str, Any]:
        usage = usage_of(self._answer.generations, self._n)
        if self._body.max_tokens == 0:  # what was generated to score the prompt is nobody's
            usage |= {"completion_tokens": 0, "total_tokens": usage["prompt_tokens"]}
        return usage


class _WordedChoice:
    """Words one choice: the echo first, then what it gains."""

    def __init__(
        self, generation: Generation, body: CompletionRequest, echo: str, model: ServedModel
    ) -> None:
        self._generation = generation
        self._body = body
        self._tokenizer = model.tokenizer
        self._echo = echo
        self.is_begun = False
        self._logprobs = None
        if body.logprobs is not None:
            num_top = len(body.logprob_token_ids or ()) or body.logprobs
            as_ids = bool(body.return_tokens_as_token_ids)
            self._logprobs = CompletionLogprobs(model.tokenizer, num_top, as_ids=as_ids)

    def whole(self, piece: Piece) -> dict[str, Any]:
        """Word a whole choice."""
        num_top = self._body.prompt_logprobs
        of_prompt = None
        if num_top is not None:
            of_prompt = prompt_logprobs_list(self._generation.prompt_logprobs, self._tokenizer, num_top)
        return {
            "token_ids": None,
            "prompt_token_ids": None,
            **self.word(piece),
            "prompt_logprobs": of_prompt,
        }

    def piece(self, piece: Piece) -> dict[str, Any] | None:
        """Word what was gained; None where nothing is to be shown yet."""
        shows_ids = self._body.return_token_ids and piece.token_ids
        shows_logprobs = self._logprobs is not None and piece.logprobs
        is_empty = not (piece.text or piece.finish_reason or shows_ids or shows_logprobs)
        if is_empty and (self.is_begun or not self._echo):
            return None
        return self.word(piece)

    def word(self, piece: Piece) -> dict[str, Any]:
        """Word a piece, whatever it has."""
        if self._body.max_tokens == 0:
            finish = piece.finish_reason and FinishReason.LENGTH
            piece = Piece(finish_reason=finish)
        begins, self.is_begun = not self.is_begun, True
        choice: dict[str, Any] = {
            "index": self._generation.index,
            "text": self._echo + piece.text if begins else piece.text,
            "logprobs": self._word_logprobs(piece, begins=begins),
            "finish_reason": finish_word(piece.finish_reason),
            "stop_reason": piece.stop_reason,
        }
        if self._body.return_token_ids:
            choice["token_ids"] = piece.token_ids
            if begins:
                choice["prompt_token_ids"] = list(self._generation.ask.request.prompt_ids)
        return choice

    def _word_logprobs(self, piece: Piece, *, begins: bool) -> dict[str, Any] | None:
        if self._logprobs is None:
            return None
        if begins and self._body.echo:
            self._logprobs.push_first(self._generation.ask.request.prompt_ids[0])
            self._logprobs.push(self._generation.prompt_logprobs)
        self._logprobs.push(piece.logprobs)
        return self._logprobs.take()
