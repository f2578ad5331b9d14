"""POST /v1/completions: text or token ids in, text out, without a chat template."""

import time
import uuid
from collections.abc import Sequence
from typing import Any

from fastapi import APIRouter
from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, Response

from server.described import STREAM_RESPONSE
from server.errors import bad_request
from server.generations import Answer, Piece
from server.openai.logprobs import completion_logprobs
from server.openai.params import asks_for, refuse_unserved
from server.openai.schemas import MAX_CHOICES, CompletionRequest
from server.openai.streaming import Choice, EventStream, collect, event, finish_word
from server.openai.text import encode
from server.openai.usage import usage_of
from server.requests import Requests
from server.served import ServedModel

DEFAULT_MAX_TOKENS = 16  # OpenAI's for this endpoint
_FORMS = "prompt must be a string, a list of strings, a list of token ids, or a list of lists of token ids."


def completion_routes(model: ServedModel, requests: Requests) -> APIRouter:
    """Return the endpoint's routes."""
    router = APIRouter()

    @router.post("/v1/completions", response_model=None, responses=STREAM_RESPONSE)
    async def create_completion(body: CompletionRequest, http: HttpRequest) -> Response:
        """Complete one or more prompts."""
        name = model.check_name(body.model)
        refuse_unserved(body)
        if body.echo and body.logprobs is not None:
            raise bad_request(
                "echo with logprobs needs prompt logprobs, which are not supported yet.", "echo"
            )
        prompts = await _encode_prompts(body, model)
        request_id = f"cmpl-{uuid.uuid4().hex}"
        asks = asks_for(
            body,
            model,
            prompts,
            request_id=request_id,
            max_tokens=body.max_tokens or _default_max_tokens(prompts, model),
            num_logprobs=body.logprobs,
            prompt_field="prompt",
        )
        answer = requests.open(request_id, asks)
        echoes = _echoes(body, prompts, model)
        if body.stream:
            return EventStream(answer, CompletionChunks(answer, body, name, model, echoes))
        choices = await collect(answer, http)
        return JSONResponse(_whole(answer, choices, body, name, model, echoes))

    return router


def _default_max_tokens(prompts: Sequence[Sequence[int]], model: ServedModel) -> int | None:
    """Return the default max_tokens, less where the context ends before."""
    room = model.max_len() - max(map(len, prompts))
    return DEFAULT_MAX_TOKENS if room >= DEFAULT_MAX_TOKENS else None


async def _encode_prompts(body: CompletionRequest, model: ServedModel) -> list[list[int]]:
    """Bring the four forms of a prompt to lists of token ids.

    Raises:
        ApiError: 400, none of the four forms, empty, or an id that the model does not have.
    """
    prompt = body.prompt
    if isinstance(prompt, str):
        return [await _encode_text(body, prompt, model)]
    if not isinstance(prompt, list) or not prompt:
        raise bad_request(_FORMS, "prompt")
    if all(type(each) is int for each in prompt):
        return [_check_ids(prompt, model)]
    if len(prompt) > MAX_CHOICES:
        raise bad_request(
            f"prompt is a list of {len(prompt)}; up to {MAX_CHOICES} are taken at once.", "prompt"
        )
    if all(isinstance(each, str) for each in prompt):
        return [await _encode_text(body, each, model) for each in prompt]
    if all(isinstance(each, list) and all(type(number) is int for number in each) for each in prompt):
        return [_check_ids(each, model) for each in prompt]
    raise bad_request(_FORMS, "prompt")


async def _encode_text(body: CompletionRequest, text: str, model: ServedModel) -> list[int]:
    return await encode(text, model, add_special_tokens=body.add_special_tokens is not False, param="prompt")


def _check_ids(token_ids: list[int], model: ServedModel) -> list[int]:
    if not token_ids:
        raise bad_request("prompt is empty: there is no token to start from.", "prompt")
    low, high = min(token_ids), max(token_ids)
    if low < 0 or high >= model.tokenizer.vocab_size:
        wrong = low if low < 0 else high
        raise bad_request(
            f"prompt has token id {wrong}; ids are 0 to {model.tokenizer.vocab_size - 1}.", "prompt"
        )
    return token_ids


def _echoes(body: CompletionRequest, prompts: Sequence[Sequence[int]], model: ServedModel) -> list[str]:
    """Return, per choice, the text that precedes the answer's."""
    n = body.n or 1
    if not body.echo:
        return [""] * (len(prompts) * n)
    sent = body.prompt if isinstance(body.prompt, list) else [body.prompt]
    texts = [
        each if isinstance(each, str) else model.tokenizer.decode(token_ids, skip_special_tokens=False)
        for each, token_ids in zip(sent if len(sent) == len(prompts) else [None], prompts, strict=True)
    ]
    return [text for text in texts for _ in range(n)]


def _whole(
    answer: Answer,
    choices: Sequence[Choice],
    body: CompletionRequest,
    name: str,
    model: ServedModel,
    echoes: Sequence[str],
) -> dict[str, Any]:
    """Word a whole answer."""
    return {
        "id": answer.request_id,
        "object": "text_completion",
        "created": int(time.time()),
        "model": name,
        "choices": [
            {
                "index": index,
                "text": echo + "".join(choice.text),
                "logprobs": None
                if body.logprobs is None
                else completion_logprobs(choice.logprobs, model.tokenizer, body.logprobs, 0),
                "finish_reason": finish_word(choice.finish_reason),
                "stop_reason": choice.stop_reason,
            }
            for index, (choice, echo) in enumerate(zip(choices, echoes, strict=True))
        ],
        "usage": usage_of(answer.generations, body.n or 1),
        "system_fingerprint": None,
    }


class CompletionChunks:
    """Words a completion's stream."""

    def __init__(
        self, answer: Answer, body: CompletionRequest, name: str, model: ServedModel, echoes: Sequence[str]
    ) -> None:
        options = body.stream_options
        self._answer = answer
        self._n = body.n or 1
        self._num_top = body.logprobs
        self._tokenizer = model.tokenizer
        self._usage = bool(options and options.include_usage)
        self._usage_always = self._usage and bool(options and options.continuous_usage_stats)
        self._echoes = list(echoes)  # what is left to echo, per choice
        self._offsets = [0] * len(echoes)
        self._head = {
            "id": answer.request_id,
            "object": "text_completion",
            "created": int(time.time()),
            "model": name,
            "system_fingerprint": None,
        }

    def piece(self, index: int, piece: Piece) -> bytes:
        """Word what a choice gained."""
        text = self._echoes[index] + piece.text
        self._echoes[index] = ""
        logprobs = None
        if self._num_top is not None and piece.logprobs:
            logprobs = completion_logprobs(
                piece.logprobs, self._tokenizer, self._num_top, self._offsets[index]
            )
            self._offsets[index] += sum(map(len, logprobs["tokens"]))
        if not (text or logprobs or piece.finish_reason):
            return b""
        choice = {
            "index": index,
            "text": text,
            "logprobs": logprobs,
            "finish_reason": finish_word(piece.finish_reason),
            "stop_reason": piece.stop_reason,
        }
        chunk: dict[str, Any] = {**self._head, "choices": [choice]}
        if self._usage:
            chunk["usage"] = usage_of(self._answer.generations, self._n) if self._usage_always else None
        return event(chunk)

    def end(self) -> bytes:
        """Word the usage, if asked for."""
        if not self._usage:
            return b""
        return event({**self._head, "choices": [], "usage": usage_of(self._answer.generations, self._n)})
