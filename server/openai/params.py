"""From what a client sent to what a rank is asked: checks, defaults and one `Ask` per choice."""

import secrets
from collections.abc import Sequence
from typing import Any

from scheduler.request import Request, SamplingParams, Structure
from server import errors
from server.errors import bad_request
from server.generations import Ask
from server.openai.schemas import MAX_CHOICES, MAX_STOPS, SamplingFields
from server.served import ServedModel

MAX_STOP_CHARS = 4096
_NOTHING: tuple[Any, ...] = (None, False, 0, "", [], {})
# Known to clients, not served yet: refused unless the value asks for nothing.
_UNSERVED: dict[str, tuple[Any, ...]] = {
    "functions": (),
    "function_call": ("none", "auto"),
    "response_format": ({"type": "text"},),
    "structured_outputs": (),
    "guided_json": (),
    "guided_regex": (),
    "guided_choice": (),
    "guided_grammar": (),
    "logit_bias": (),
    "bad_words": (),
    "allowed_token_ids": (),
    "prompt_logprobs": (),
    "use_beam_search": (),
    "best_of": (1,),
    "suffix": (),
    "audio": (),
    "modalities": (["text"],),
    "chat_template": (),
    "truncate_prompt_tokens": (),
}


def refuse_unserved(body: SamplingFields) -> None:
    """Refuse what would be silently ignored.

    Raises:
        ApiError: 400, naming the field.
    """
    extra = body.model_extra or {}
    for name, harmless in _UNSERVED.items():
        value = extra.get(name)
        if value in _NOTHING or value in harmless:
            continue
        raise bad_request(f"{name!r} is not supported by this server yet; leave it out.", name)


def asks_for(
    body: SamplingFields,
    model: ServedModel,
    prompts: Sequence[Sequence[int]],
    *,
    request_id: str,
    max_tokens: int | None,
    num_logprobs: int | None,
    prompt_field: str,
    max_tokens_field: str = "max_tokens",
    structure: Structure | None = None,
) -> list[Ask]:
    """Return n asks per prompt, in the order of the choices' indexes.

    Args:
        prompts: token ids, not empty.
        max_tokens: None is up to the context's end.
        structure: the form that answers must have, checked (`openai.structure`).

    Raises:
        ApiError: 400, naming the field.
    """
    n = body.n or 1
    if len(prompts) * n > MAX_CHOICES:
        raise bad_request(f"{len(prompts)} prompts times n={n} is more than {MAX_CHOICES} choices.", "n")
    stops = _stops(body)
    seed = secrets.randbits(64) if body.seed is None else body.seed
    asks: list[Ask] = []
    for prompt_ids in prompts:
        room = _room(len(prompt_ids), model.max_len(), max_tokens, prompt_field, max_tokens_field)
        if (body.min_tokens or 0) > room:
            raise bad_request(
                f"min_tokens ({body.min_tokens}) is more than {max_tokens_field} ({room}).", "min_tokens"
            )
        for choice in range(n):
            params = _sampling(
                body,
                model,
                max_tokens=room,
                seed=(seed + choice) % 2**64,
                num_logprobs=num_logprobs,
                structure=structure,
            )
            request = Request(
                request_id=f"{request_id}-{len(asks)}",
                prompt_ids=tuple(prompt_ids),
                params=params,
                arrival_s=0.0,
            )
            asks.append(_ask(body, model, request, stops))
    return asks


def _ask(body: SamplingFields, model: ServedModel, request: Request, stops: tuple[str, ...]) -> Ask:
    return Ask(
        request=request,
        stops=stops,
        include_stop=bool(body.include_stop_str_in_output),
        skip_special_tokens=body.skip_special_tokens is not False,
        eos_ids=model.tokenizer.eos_ids,
    )


def _room(
    num_prompt_tokens: int, max_len: int, max_tokens: int | None, prompt_field: str, max_tokens_field: str
) -> int:
    """Return how many tokens may be generated."""
    room = max_len - num_prompt_tokens
    if room < 1 or (max_tokens is not None and max_tokens > room):
        to_change = prompt_field if room < 1 else max_tokens_field
        raise errors.too_long(num_prompt_tokens, max_len, max_tokens, to_change)
    return room if max_tokens is None else max_tokens


def _sampling(
    body: SamplingFields,
    model: ServedModel,
    *,
    max_tokens: int,
    seed: int,
    num_logprobs: int | None,
    structure: Structure | None,
) -> SamplingParams:
    def said(name: str, otherwise: Any) -> Any:
        """The client's value, else the checkpoint's, else the usual one."""
        value = getattr(body, name)
        return model.sampling_defaults.get(name, otherwise) if value is None else value

    stop_ids = set(body.stop_token_ids or ())
    for token_id in stop_ids:
        if not 0 <= token_id < model.tokenizer.vocab_size:
            allowed = f"0 to {model.tokenizer.vocab_size - 1}"
            raise bad_request(f"stop_token_ids has {token_id}; token ids are {allowed}.", "stop_token_ids")
    if not body.ignore_eos:
        stop_ids |= model.tokenizer.eos_ids
    return SamplingParams(
        max_tokens=max_tokens,
        min_tokens=body.min_tokens or 0,
        temperature=float(said("temperature", 1.0)),
        top_p=float(said("top_p", 1.0)),
        top_k=max(0, int(said("top_k", 0))),
        min_p=float(said("min_p", 0.0)),
        presence_penalty=body.presence_penalty or 0.0,
        frequency_penalty=body.frequency_penalty or 0.0,
        repetition_penalty=float(said("repetition_penalty", 1.0)),
        seed=seed,
        stop_token_ids=tuple(sorted(stop_ids)),
        num_logprobs=num_logprobs,
        structure=structure,
    )


def _stops(body: SamplingFields) -> tuple[str, ...]:
    stops = body.stop
    if stops is None:
        return ()
    if isinstance(stops, str):
        stops = [stops]
    if not isinstance(stops, list) or not all(isinstance(stop, str) for stop in stops):
        raise bad_request("stop must be a string or a list of strings.", "stop")
    if len(stops) > MAX_STOPS or any(len(stop) > MAX_STOP_CHARS for stop in stops):
        raise bad_request(
            f"stop takes up to {MAX_STOPS} strings of up to {MAX_STOP_CHARS} characters.", "stop"
        )
    if not all(stops):
        raise bad_request("stop has an empty string, which would end every answer at once.", "stop")
    return tuple(stops)
