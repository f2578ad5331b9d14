"""POST /v1/completions: continue text or token ids, without a chat template."""

import uuid
from collections.abc import Sequence
from typing import Any

from fastapi import APIRouter
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from scheduler.policy.request import FinishReason
from server.api.answer_json import CompletionLogprobs, encoded_prompt_logprobs, event, usage_of
from server.api.images import NO_IMAGES, PromptImages, encode_images, listed_images
from server.api.prompts import encode_all
from server.api.sampling import asks_for, count_of
from server.api.schemas import ALL, MAX_CHOICES, CompletionRequest, refuse_unserved
from server.api.served import ServedModel
from server.api.streaming import Choice, EventStream, JsonChunks, collect, has_many_entries, json_answer
from server.api.structure import stop_patterns_of, structure_of
from server.front import errors
from server.front.errors import bad_request
from server.front.generations import Answer, Generation, Piece
from server.front.requests import Requests
from server.http.json_writer import EncodedList
from server.http.routes import STREAM_RESPONSE, new_router

PATH = "/v1/completions"
_MANY_IDS = 20_000  # checking more takes milliseconds, so a thread does it


def completion_routes(model: ServedModel, requests: Requests) -> APIRouter:
    """Return the endpoint's routes."""
    router = new_router()

    @router.post(PATH, response_model=None, responses=STREAM_RESPONSE)
    async def create_completion(body: CompletionRequest, http: HttpRequest) -> Response:
        """Complete one or more prompts."""
        return await answer_completion(body, http, model, requests)

    return router


async def answer_completion(
    body: CompletionRequest, http: HttpRequest, model: ServedModel, requests: Requests
) -> Response:
    """Complete one or more prompts, whole or as a stream.

    Raises:
        ApiError: The request is invalid or failed.
        ClientGone: The client disconnected first.
    """
    name = model.check_name(body.model)
    if body.max_tokens == 0 and not body.echo:
        raise bad_request("max_tokens is 0, which is allowed only with echo=true.", "max_tokens")
    answer = await open_completion(body, model, requests, "cmpl")
    chunks = CompletionChunks(answer, body, name, model)
    if body.stream:
        return EventStream(answer, chunks)
    choices = await collect(answer, http)
    is_long = body.echo or body.prompt_logprobs is not None or body.logprobs == ALL
    is_long = is_long or has_many_entries(choices, body.logprobs)
    return await json_answer(lambda: chunks.whole(choices), model, is_long=bool(is_long))


async def open_completion(
    body: CompletionRequest, model: ServedModel, requests: Requests, kind: str, *, cut_to_fit: bool = False
) -> Answer:
    """Check a request and send its choices to ranks, or raise ApiError.

    Args: kind is the prefix of the request's id; cut_to_fit reduces max_tokens to the space left in the context.
    """
    refuse_unserved(body)
    structure = await structure_of(body, model)
    prompts, images = await _with_images(await encode_prompts(body, model), body, model)
    request_id = f"{kind}-{uuid.uuid4().hex}"
    asks = asks_for(
        body,
        model,
        prompts,
        request_id=request_id,
        structure=structure,
        patterns=await stop_patterns_of(body, model),
        # A client cannot know how many tokens an image becomes.
        cut_to_fit=cut_to_fit or bool(images.ranges),
        images=images,
    )
    return requests.open(request_id, asks)


async def _with_images(
    prompts: list[list[int]], body: CompletionRequest, model: ServedModel
) -> tuple[list[list[int]], PromptImages]:
    """Read and encode a request's images. They take the places of the image tokens in its only prompt.

    Raises:
        ApiError: 400, naming the field.
    """
    if not body.images:
        return prompts, NO_IMAGES
    own = body.own()
    field, prompt_field = own.images_field, own.prompt_field
    parts = listed_images(body.images, field)
    if model.images is None:
        raise bad_request(f"{field}: this model supports only text, because {model.why_no_images}.", field)
    if len(prompts) != 1:
        reason = f"{prompt_field} has {len(prompts)} prompts; images belong to a single one."
        raise bad_request(reason, prompt_field)
    prompt_ids, images = await encode_images(
        prompts[0], parts, model.images, prompt_field=prompt_field, images_field=field
    )
    return [prompt_ids], images


class CompletionChunks(JsonChunks):
    """Build the JSON of an answer, whole or in chunks."""

    def __init__(self, answer: Answer, body: CompletionRequest, model_name: str, model: ServedModel) -> None:
        super().__init__(
            answer,
            "text_completion",
            model_name,
            body.stream_options,
            self._count,
            has_metrics=model.has_metrics,
        )
        self._answer, self._model = answer, model
        self._body = body
        self._n = body.n or 1
        self._has_only_text = (  # whether pieces between the first and the last carry only text
            body.logprobs is None
            and not body.return_token_ids
            and not self.has_usage_always
            and body.max_tokens != 0
        )
        self._choices = [
            _ChoiceJson(answer, generation, body, self._echo(generation, model), model)
            for generation in answer.generations
        ]

    def whole(self, choices: Sequence[Choice]) -> dict[str, Any]:
        """Return a whole answer."""
        of_prompts = [self._prompt_logprobs(place) for place in range(0, len(choices), self._n)]
        return {
            **self.head,
            "choices": [
                json.whole(choice.piece(), of_prompts[place // self._n])
                for place, (json, choice) in enumerate(zip(self._choices, choices, strict=True))
            ],
            "usage": self._count(),
            **self.weights(),
            **self.metrics(),
        }

    def piece(self, index: int, piece: Piece) -> bytes:
        json = self._choices[index]
        if self._has_only_text and json.is_begun and piece.text and not piece.finish_reason:
            return self.text_event(
                index, piece.text, lambda mark: self.chunk(json.of_piece(Piece(mark)), None)
            )
        choice = json.gained(piece)
        if choice is None:
            return b""
        return event(self.chunk(choice, self._count() if self.has_usage_always else None))

    def _prompt_logprobs(self, index: int) -> EncodedList | None:
        """Return the log-probabilities of a prompt, given its first choice. All its choices share their encoded form."""
        if self._body.prompt_logprobs is None:
            return None
        num_top = count_of(self._body.prompt_logprobs, self._model)
        entries = self._answer.generations[index].prompt_logprobs
        return encoded_prompt_logprobs(entries, self._model.tokenizer, num_top)

    def _echo(self, generation: Generation, model: ServedModel) -> str:
        """Return the text before the choice's own: the prompt as sent, or decoded if it was ids or is truncated."""
        if not self._body.echo:
            return ""
        sent = [self._body.prompt] if isinstance(self._body.prompt, str) else self._body.prompt
        text = sent[generation.index // self._n]
        if isinstance(text, str) and self._body.truncate_prompt_tokens is None:
            return text
        return model.tokenizer.decode(generation.ask.request.prompt_ids, skip_special_tokens=False)

    def _count(self) -> dict[str, Any]:
        usage = usage_of(self._answer.generations, self._n)
        if self._body.max_tokens == 0:  # the token generated to score the prompt is hidden
            usage |= {"completion_tokens": 0, "total_tokens": usage["prompt_tokens"]}
        return usage


class _ChoiceJson:
    """Build the JSON of one choice: the echo, then its pieces."""

    def __init__(
        self, answer: Answer, generation: Generation, body: CompletionRequest, echo: str, model: ServedModel
    ) -> None:
        self._answer, self._generation = answer, generation
        self._body = body
        self._tokenizer = model.tokenizer
        self._echo = echo
        self.is_begun = False
        self._logprobs = None
        if body.logprobs is not None:
            num_top = len(body.logprob_token_ids or ()) or count_of(body.logprobs, model)
            as_ids = bool(body.return_tokens_as_token_ids)
            self._logprobs = CompletionLogprobs(model.tokenizer, num_top, as_ids=as_ids)

    def whole(self, piece: Piece, prompt_logprobs: EncodedList | None) -> dict[str, Any]:
        """Return a whole choice."""
        return {
            "token_ids": None,
            "prompt_token_ids": None,
            **self.of_piece(piece),
            "prompt_logprobs": prompt_logprobs,
        }

    def gained(self, piece: Piece) -> dict[str, Any] | None:
        """Return the JSON of a piece, or None if there is nothing to show yet."""
        shows_ids = self._body.return_token_ids and piece.token_ids
        shows_logprobs = self._logprobs is not None and piece.logprobs
        is_empty = not (piece.text or piece.finish_reason or shows_ids or shows_logprobs)
        if is_empty and (self.is_begun or not self._echo):
            return None
        return self.of_piece(piece)

    def of_piece(self, piece: Piece) -> dict[str, Any]:
        """Return the JSON of a piece, even an empty one."""
        if self._body.max_tokens == 0:
            finish = piece.finish_reason and FinishReason.LENGTH
            piece = Piece(finish_reason=finish)
        begins, self.is_begun = not self.is_begun, True
        choice: dict[str, Any] = {
            "index": self._generation.index,
            "text": self._echo + piece.text if begins else piece.text,
            "logprobs": self._logprobs_of(piece, begins=begins),
            "finish_reason": piece.finish_reason and piece.finish_reason.value,
            "stop_reason": piece.stop_reason,
        }
        if piece.finish_reason is not None:
            choice["matched_stop"] = piece.matched_stop
        if self._body.return_token_ids:
            choice["token_ids"] = piece.token_ids
            if begins:
                choice["prompt_token_ids"] = list(self._generation.ask.request.prompt_ids)
        return choice

    def _logprobs_of(self, piece: Piece, *, begins: bool) -> dict[str, Any] | None:
        if self._logprobs is None:
            return None
        if begins and self._body.echo:
            self._logprobs.push_first(self._generation.ask.request.prompt_ids[0])
            of_prompt = self._answer.prompt_logprobs_of(self._generation.index, self._body.n or 1)
            self._logprobs.push(of_prompt)
        self._logprobs.push(piece.logprobs)
        return self._logprobs.take()


_FORMS = "prompt must be a string, a list of strings, a list of token ids, or a list of lists of token ids."
_NONE = f"Either prompt or prompt_embeds must be provided and non-empty, and this server does not support embeddings. {_FORMS}"


async def encode_prompts(body: CompletionRequest, model: ServedModel) -> list[list[int]]:
    """Convert the four forms of a prompt to lists of token ids.

    Raises:
        ApiError: 400 if the prompt has none of the four forms, is empty, or has an id that the model does not have.
    """
    prompt = body.prompt
    if isinstance(prompt, str):
        return await _encode_texts(body, [prompt], model)
    if prompt is None or prompt == []:
        raise bad_request(_NONE, "prompt")
    if not isinstance(prompt, list):
        raise bad_request(_FORMS, "prompt")
    _check_lengths(body, prompt, model)
    if type(prompt[0]) is not int and len(prompt) > MAX_CHOICES:
        raise bad_request(
            f"prompt is a list of {len(prompt)} entries; the maximum is {MAX_CHOICES}.", "prompt"
        )
    if type(prompt[0]) is int or isinstance(prompt[0], list):
        num_ids = sum(len(each) if isinstance(each, list) else 1 for each in prompt)
        return await model.run(lambda: _id_lists(prompt, model), is_long=num_ids > _MANY_IDS)
    if all(isinstance(each, str) for each in prompt):
        return await _encode_texts(body, prompt, model)
    raise bad_request(_FORMS, "prompt")


def _id_lists(prompt: list[Any], model: ServedModel) -> list[list[int]]:
    if all(type(each) is int for each in prompt):
        return [_check_ids(prompt, model)]
    if all(isinstance(each, list) and all(type(number) is int for number in each) for each in prompt):
        return [_check_ids(each, model) for each in prompt]
    raise bad_request(_FORMS, "prompt")


async def _encode_texts(body: CompletionRequest, texts: Sequence[str], model: ServedModel) -> list[list[int]]:
    special = body.add_special_tokens is not False
    return await encode_all(texts, model, add_special_tokens=special, param="prompt")


def _check_lengths(body: CompletionRequest, prompt: list[Any], model: ServedModel) -> None:
    """Refuse a prompt with too many token ids before checking each id. A prompt to be truncated may have more."""
    id_lists = [prompt] if isinstance(prompt[0], int) else [each for each in prompt if isinstance(each, list)]
    longest = max(map(len, id_lists), default=0)
    if longest > model.max_len() and body.truncate_prompt_tokens is None:
        raise errors.too_long(longest, model.max_len(), None, "prompt")


def _check_ids(token_ids: list[int], model: ServedModel) -> list[int]:
    if not token_ids:
        raise bad_request("prompt is empty: generation needs at least one token.", "prompt")
    low, high, last = min(token_ids), max(token_ids), model.tokenizer.vocab_size - 1
    if low < 0:
        raise bad_request(f"prompt has token id {low}; ids must be greater than or equal to 0.", "prompt")
    if high > last:
        raise bad_request(
            f"prompt has token id {high}, which is out of vocabulary; ids are 0 to {last}.", "prompt"
        )
    return token_ids
