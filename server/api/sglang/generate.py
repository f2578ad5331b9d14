"""POST /generate: SGLang's own interface, for scripts written for SGLang.

The request is translated into a completion's fields and checked like one. Answers have SGLang's form: `text`, `output_ids`
and `meta_info`, as one object, or as a list if there are several prompts or choices. A stream's events contain the whole
answer so far, as by default in SGLang (without `--incremental-streaming-output`). Fields of unsupported features are
refused by name.

Repeating all log-probabilities in each event would be quadratic: 800 tokens with 20 each take 229 MB. Instead each is encoded
once, and after an event over LONG_EVENT the next one waits until the answer has grown by a sixteenth: a stream has at most
seventeen times the bytes of its answer. SGLang's clients accept events of several tokens (its `stream_interval`).
"""

import uuid
from collections.abc import Sequence
from typing import Annotated, Any

from fastapi import APIRouter
from pydantic import BaseModel, ConfigDict, Field
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from scheduler.policy.request import FinishReason, Logprobs
from server.api.answer_json import cached_by_tier, event
from server.api.images import FIELD
from server.api.media import refuse_other_fields
from server.api.openai.completions import open_completion
from server.api.schemas import MAX_LOGPROBS, CompletionRequest, OwnFields
from server.api.served import ServedModel
from server.api.streaming import Choice, EventStream, collect, json_answer
from server.front.errors import bad_request, named_by
from server.front.generations import Answer, Generation, Piece
from server.front.requests import Requests
from server.front.tokenizer import Tokenizer
from server.http.json_writer import EncodedList, encode_json, long_json_bytes
from server.http.routes import STREAM_RESPONSE, new_router, validated

DEFAULT_MAX_NEW_TOKENS = 128  # SGLang's
LONG_EVENT = 16 << 10  # characters of log-probabilities
_GROWTH = 1 / 16  # minimum growth of an event over the previous one, if that was long
_WHERE = "sampling_params"
_SAME = (
    *("temperature", "top_p", "top_k", "min_p", "n", "stop", "stop_regex", "stop_token_ids", "ignore_eos"),
    *("logit_bias", "frequency_penalty", "presence_penalty", "repetition_penalty", "skip_special_tokens"),
    *("json_schema", "regex", "ebnf"),
)
_FIELD_OF = {  # key of sampling_params -> field of a completion
    "max_new_tokens": "max_tokens",
    "min_new_tokens": "min_tokens",
    "sampling_seed": "seed",
    "no_stop_trim": "include_stop_str_in_output",
    **{name: name for name in _SAME},
}
_OWN_NAMES = {rf"{ours}(?=\.|$)": f"{_WHERE}.{theirs}" for theirs, ours in _FIELD_OF.items()}
_HARMLESS = ("log_metrics", "spaces_between_special_tokens", "stream_interval")  # have no effect here
# Lists are fail_fast, as in `schemas`.
_Texts = Annotated[list[str], Field(fail_fast=True)]
_TokenIds = Annotated[list[int], Field(fail_fast=True)]


class GenerateRequest(BaseModel):
    """POST /generate."""

    model_config = ConfigDict(extra="allow", allow_inf_nan=False)

    text: str | _Texts | None = None
    input_ids: _TokenIds | Annotated[list[_TokenIds], Field(fail_fast=True)] | None = None
    sampling_params: dict[str, Any] | None = None
    rid: str | None = Field(None, min_length=1, max_length=128)
    stream: bool | None = None
    return_logprob: bool | None = None
    logprob_start_len: int | None = Field(None, ge=-1)  # first prompt token to score; -1: none
    top_logprobs_num: int | None = Field(None, ge=0, le=MAX_LOGPROBS)
    return_text_in_logprobs: bool | None = None
    lora_path: str | None = None  # the name of a loaded adapter
    image_data: Any = (
        None  # a URL or base64 text, or a list of them, one for each image token; checked in `_image_parts`
    )

    @property
    def wants_prompt_logprobs(self) -> bool:
        """Whether the client requested log-probabilities of the prompt."""
        return bool(self.return_logprob) and self.logprob_start_len not in (None, -1)


class _Completion(CompletionRequest):
    """A request as a completion, with SGLang's names and default."""

    def own(self) -> OwnFields:
        is_text = isinstance(self.prompt, str) or isinstance(self.prompt[0], str)
        own = super().own()
        return own._replace(
            prompt_field="text" if is_text else "input_ids",
            max_tokens_field=f"{_WHERE}.max_new_tokens",
            default_max_tokens=DEFAULT_MAX_NEW_TOKENS,
            logprobs_field="top_logprobs_num",
            images_field="image_data",
        )


def generate_routes(model: ServedModel, requests: Requests) -> APIRouter:
    """Return the endpoint's routes."""
    router = new_router()

    @router.post("/generate", response_model=None, responses=STREAM_RESPONSE)
    async def generate(body: GenerateRequest, http: HttpRequest) -> Response:
        """Continue prompts, as SGLang's own endpoint does."""
        return await answer_generate(body, http, model, requests)

    return router


async def answer_generate(
    body: GenerateRequest, http: HttpRequest, model: ServedModel, requests: Requests
) -> Response:
    """Continue one or more prompts, whole or as a stream.

    Raises:
        ApiError: The request is invalid or failed.
        ClientGone: The client disconnected first.
    """
    fields = completion_of(body)
    if body.lora_path and model.adapter_of(body.lora_path) is None:
        raise bad_request(f"lora_path is {body.lora_path!r}, which is not a loaded adapter.", "lora_path")
    request_id = body.rid or uuid.uuid4().hex
    answer = await open_completion(fields, model, requests, "gen")
    is_list = isinstance(fields.prompt, list) and not isinstance(fields.prompt[0], int)
    chunks = _GenerateJson(
        answer,
        body,
        request_id,
        model.tokenizer,
        n=fields.n or 1,
        is_list=is_list or len(answer.generations) > 1,
        only_scores=fields.max_tokens == 0,
    )
    if body.stream:
        return EventStream(answer, chunks)
    choices = await collect(answer, http)
    return await json_answer(lambda: chunks.whole(choices), model, is_long=bool(body.return_logprob))


def completion_of(body: GenerateRequest) -> CompletionRequest:
    """Translate a request to a completion.

    Raises:
        ApiError: 400, naming the field that is invalid or not supported.
    """
    if (body.text is None) == (body.input_ids is None):
        raise bad_request("Set either text or input_ids.", "text")
    refuse_other_fields(body.model_extra)
    _refuse_others(body.model_extra or {}, "")
    params = dict(body.sampling_params or {})
    fields = {ours: params.pop(theirs) for theirs, ours in _FIELD_OF.items() if theirs in params}
    _refuse_others(params, f"{_WHERE}.")
    num_top = body.top_logprobs_num or 0
    if body.lora_path:
        fields["model"] = body.lora_path
    fields |= {
        "prompt": body.input_ids if body.text is None else body.text,
        "stream": body.stream,
        "logprobs": num_top if body.return_logprob else None,
        "prompt_logprobs": num_top if body.wants_prompt_logprobs else None,
        "images": _image_parts(body.image_data),
    }
    with named_by(_OWN_NAMES):
        return validated(_Completion.model_validate, fields)


def _image_parts(given: Any) -> list[dict[str, str]] | None:
    """Return images as parts of a chat. A text without a scheme is base64; file names need `file://`.

    Raises:
        ApiError: 400 if they are not texts.
    """
    if not given:
        return None
    is_one = isinstance(given, str)
    images = [given] if is_one else given
    if not isinstance(images, list) or not all(isinstance(image, str) for image in images):
        raise bad_request(
            "image_data must be a URL or a base64 text, or a list of them for one prompt.", "image_data"
        )
    return [
        {
            "type": "image",
            "image": image if ":" in image[:8] else f"data:;base64,{image}",
            FIELD: "image_data" if is_one else f"image_data.{number}",
        }
        for number, image in enumerate(images)
    ]


def _refuse_others(fields: dict[str, Any], where: str) -> None:
    for name, value in fields.items():
        if name not in _HARMLESS and value not in (None, False, [], {}, ""):
            raise bad_request(
                f"{where}{name} is not supported by this server; leave it out.", f"{where}{name}"
            )


class _Spelled:
    """A choice's log-probabilities as JSON, each encoded once."""

    def __init__(self) -> None:
        self.own: list[str] = []  # entries of the tokens themselves
        self.top: list[str] = []  # entries of each token's top alternatives
        self.num_chars = 0
        self.num_told = 0  # characters in the last event

    @property
    def has_grown(self) -> bool:
        """Whether the new characters suffice for another event."""
        return self.num_told < LONG_EVENT or self.num_chars >= self.num_told * (1 + _GROWTH)

    def add(self, own: str, top: str | None) -> None:
        """Add the entries of a token."""
        self.own.append(own)
        self.num_chars += len(own)
        if top is not None:
            self.top.append(top)
            self.num_chars += len(top)


class _GenerateJson:
    """Build the JSON of an answer, whole or in events."""

    def __init__(
        self,
        answer: Answer,
        body: GenerateRequest,
        request_id: str,
        tokenizer: Tokenizer,
        *,
        n: int,
        is_list: bool,
        only_scores: bool = False,
    ) -> None:
        """Args: n is the number of choices per prompt; is_list returns a list; only_scores hides the generated tokens."""
        self._answer, self._body, self._tokenizer = answer, body, tokenizer
        self._request_id, self._n, self._is_list = request_id, n, is_list
        self._only_scores = only_scores
        self._so_far = [Choice() for _ in answer.generations]
        self._spelled = [_Spelled() for _ in answer.generations]
        self._of_prompts: dict[int, _Spelled] = {}  # by the index of the prompt's first choice

    def whole(self, choices: Sequence[Choice]) -> dict[str, Any] | list[dict[str, Any]]:
        """Return a whole answer."""
        for spelled, choice in zip(self._spelled, choices, strict=True):
            self._spell(spelled, () if self._only_scores else choice.logprobs)
        objects = [
            self._object(generation, choice)
            for generation, choice in zip(self._answer.generations, choices, strict=True)
        ]
        return objects if self._is_list else objects[0]

    def piece(self, index: int, piece: Piece) -> bytes:
        """Return the event with a choice so far, or b"" if it is too early to repeat a long one."""
        choice, spelled = self._so_far[index], self._spelled[index]
        choice.text.append(piece.text)
        choice.token_ids += piece.token_ids
        choice.last = piece
        has_logprobs = bool(self._body.return_logprob)
        if has_logprobs:
            self._spell(spelled, () if self._only_scores else piece.logprobs)
            if not (spelled.has_grown or piece.finish_reason):
                return b""
        content = self._object(self._answer.generations[index], choice)
        content = {"index": index, **content} if self._is_list else content
        return b"data: " + long_json_bytes(content) + b"\n\n" if has_logprobs else event(content)

    def end(self) -> bytes:
        """Return nothing: every event has its counts."""
        return b""

    def _object(self, generation: Generation, choice: Choice) -> dict[str, Any]:
        if self._only_scores:
            choice = Choice(last=Piece(finish_reason=choice.finish_reason and FinishReason.LENGTH))
        request = generation.ask.request
        name = f"{self._request_id}_{generation.index}" if self._is_list else self._request_id
        info: dict[str, Any] = {
            "id": name,
            "finish_reason": _finish_of(choice),
            "prompt_tokens": len(request.prompt_ids),
            "completion_tokens": len(choice.token_ids),
            "cached_tokens": generation.num_cached_tokens,
            **cached_by_tier([generation]),
            "weight_version": generation.weight_version or "default",
            "e2e_latency": generation.last_token_s - request.arrival_s,
        }
        if self._body.return_logprob:
            info |= self._logprobs(generation)
        return {"text": "".join(choice.text), "output_ids": list(choice.token_ids), "meta_info": info}

    def _logprobs(self, generation: Generation) -> dict[str, Any]:
        spelled, has_top = self._spelled[generation.index], bool(self._body.top_logprobs_num)
        spelled.num_told = spelled.num_chars
        found: dict[str, Any] = {"output_token_logprobs": EncodedList(spelled.own)}
        if has_top:
            found["output_top_logprobs"] = EncodedList(spelled.top)
        if not self._body.wants_prompt_logprobs:
            return found
        of_prompt, start = self._prompt_logprobs(generation), self._body.logprob_start_len or 0
        found["input_token_logprobs"] = EncodedList(of_prompt.own[start:])
        if has_top:
            found["input_top_logprobs"] = EncodedList(of_prompt.top[start:])
        return found

    def _prompt_logprobs(self, generation: Generation) -> _Spelled:
        """Return the log-probabilities of a choice's prompt, which the prompt's choices share."""
        first = generation.index - generation.index % self._n
        if first not in self._of_prompts:
            spelled = self._of_prompts[first] = _Spelled()
            first_id = generation.ask.request.prompt_ids[0]
            spelled.add(encode_json([None, first_id, self._text(first_id)]), "null")  # no log-probability
            self._spell(spelled, self._answer.prompt_logprobs_of(generation.index, self._n))
        return self._of_prompts[first]

    def _spell(self, spelled: _Spelled, entries: Sequence[Logprobs]) -> None:
        for each in entries:
            top = encode_json(self._top(each)) if self._body.top_logprobs_num else None
            spelled.add(encode_json([each.logprob, each.token_id, self._text(each.token_id)]), top)

    def _top(self, each: Logprobs) -> list[list[Any]]:
        pairs = zip(each.top_logprobs, each.top_ids, strict=True)
        return [[value, token_id, self._text(token_id)] for value, token_id in pairs]

    def _text(self, token_id: int) -> str | None:
        if not self._body.return_text_in_logprobs:
            return None
        return self._tokenizer.decode([token_id], skip_special_tokens=False)


def _finish_of(choice: Choice) -> dict[str, Any] | None:
    """Return SGLang's finish reason, or None while the choice is unfinished."""
    reason = choice.finish_reason
    if reason is None:
        return None
    if reason is FinishReason.LENGTH:
        return {"type": "length", "length": len(choice.token_ids)}
    return {"type": reason.value, "matched": choice.last.matched_stop}
