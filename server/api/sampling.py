"""Turn a client's request into one `Ask` per choice: check the fields and apply the defaults.

The end of the file checks the fields about single tokens (biases, bad words, allowed and watched ids, truncation). Limits
are those of vLLM, if it has them.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from scheduler.policy.request import Request, SamplingParams, Structure, TokenBias
from server.api.images import NO_IMAGES, PromptImages
from server.api.schemas import (
    ALL,
    MAX_CHOICES,
    MAX_LOGPROBS,
    MAX_STOPS,
    ChatRequest,
    CompletionRequest,
    OwnFields,
    SamplingFields,
)
from server.api.served import ServedModel
from server.front import errors
from server.front.errors import ApiError, bad_request
from server.front.generations import Ask, Pattern
from server.front.tokenizer import Tokenizer
from server.http.exchanges import draw_seed

MAX_STOP_CHARS = 4096
MAX_LOGPROB_ENTRIES = 1_000_000  # per answer (90 MB of JSON); a prompt counts each time it is shown
GREEDY_BELOW = 1e-5  # vLLM's: lower temperatures are greedy, because their inverse is numerically useless
# A rank gets these as the client or the checkpoint sets them, unless `_sampling` converts them.
_OF_REQUESTS = SamplingFields.model_fields.keys() & Request.__dataclass_fields__.keys()
_OF_PARAMS = SamplingFields.model_fields.keys() & SamplingParams.__dataclass_fields__.keys()


def asks_for(
    body: ChatRequest | CompletionRequest,
    model: ServedModel,
    prompts: Sequence[Sequence[int]],
    *,
    request_id: str,
    structure: Structure | None,
    patterns: tuple[Pattern, ...] = (),
    cut_to_fit: bool = False,
    images: PromptImages = NO_IMAGES,
) -> list[Ask]:
    """Return n `Ask`s per prompt, in the order of the choices' indexes. If the answer is not streamed, only the first choice of
    each prompt requests the prompt's log-probabilities (`Answer.prompt_logprobs_of`).

    Args:
        body: The request.
        model: The served model.
        prompts: Token ids, not empty.
        request_id: Prefix of the ranks' request ids.
        structure: Structure of the answers, already checked (`api.structure`).
        patterns: Regexes that end answers (`structure.stop_patterns_of`).
        cut_to_fit: Reduce max_tokens to the space left in the context.
        images: Images of the only prompt.

    Raises:
        ApiError: 400, naming the field.
    """
    if images.ranges and body.truncate_prompt_tokens is not None:
        raise _refusal("truncate_prompt_tokens", "cannot cut a prompt with images; leave it out")
    n, own, max_len = body.n or 1, body.own(), model.max_len()
    max_tokens = own.max_tokens
    if cut_to_fit and max_tokens is not None:
        max_tokens = min(max_tokens, max(1, max_len - max(map(len, prompts))))
    _check_priority(body, model)
    if len(prompts) * n > MAX_CHOICES:
        raise bad_request(f"{len(prompts)} prompts times n={n} is more than {MAX_CHOICES} choices.", "n")
    stops = _stops(body)
    of_request = {name: value for name in _OF_REQUESTS if (value := getattr(body, name)) is not None}
    model.check_name(body.model)  # again: an adapter may have been unloaded meanwhile
    adapter = model.adapter_of(body.model)
    seed = draw_seed(model.draw_seed) if body.seed is None else body.seed
    shared = _sampling(body, own, model, structure)
    kept_tokens = max_len - (1 if max_tokens is None else max_tokens)
    cut = [tuple(truncated(body, each, kept_tokens, max_len=max_len)) for each in prompts]
    rooms = _rooms(body, own, model, [len(each) for each in cut], max_tokens)
    later = shared if body.stream else replace(shared, num_prompt_logprobs=None)
    asks: list[Ask] = []
    for prompt_ids, room in zip(cut, rooms, strict=True):
        for choice in range(n):
            params = later if choice else shared
            request = Request(
                request_id=f"{request_id}-{len(asks)}",
                prompt_ids=prompt_ids,
                params=replace(params, max_tokens=room, seed=(seed + choice) % 2**64),
                arrival_s=0.0,
                adapter="" if adapter is None else adapter.digest,
                images=images.ranges,
                **of_request,
            )
            asks.append(
                Ask(
                    request=request,
                    stops=stops,
                    include_stop=bool(body.include_stop_str_in_output),
                    skip_special_tokens=body.skip_special_tokens is not False,
                    eos_ids=model.tokenizer.eos_ids,
                    patterns=patterns,
                    images=images.files,
                )
            )
    return asks


def count_of(num_top: int, model: ServedModel) -> int:
    """Convert a client's number of log-probabilities. ALL becomes the vocabulary's size, which is also the maximum."""
    vocab_size = model.tokenizer.vocab_size
    return vocab_size if num_top == ALL else min(num_top, vocab_size)


def _check_priority(body: SamplingFields, model: ServedModel) -> None:
    """Refuse a priority under the first-come, first-served policy, as vLLM does."""
    if body.priority and not model.has_priorities:
        raise bad_request(
            f"priority is {body.priority}, but this server runs requests in order of arrival (--scheduling-policy fcfs): "
            "leave it out, or start the server with --scheduling-policy priority.",
            "priority",
        )


def _check_count(num_top: int | None, field: str, model: ServedModel) -> None:
    """Refuse more log-probabilities per token than the service allows."""
    if num_top is None or model.max_logprobs == ALL or (num_top == ALL and model.max_logprobs is None):
        return
    limit = MAX_LOGPROBS if model.max_logprobs is None else model.max_logprobs
    if num_top == ALL or num_top > limit:
        seen = "-1 (all log-probabilities)" if num_top == ALL else str(num_top)
        raise bad_request(f"{field} is {seen}; this server returns at most {limit} (--max-logprobs).", field)


def _check_entries(
    body: SamplingFields, field: str, num_top: int, num_tokens: int, model: ServedModel
) -> None:
    """Refuse more log-probabilities than an answer may have, including each token's own. A whole vocabulary takes megabytes
    per token; 20 per token of a long prompt, repeated for many choices, take gigabytes."""
    seen = "-1 (all log-probabilities)" if num_top == ALL else str(num_top)
    if body.stream and num_top == ALL:
        raise bad_request(f"{field} is {seen}: it needs stream=false.", field)
    each = min(count_of(num_top, model) + 1, model.tokenizer.vocab_size)
    if num_tokens * each > MAX_LOGPROB_ENTRIES:
        raise bad_request(
            f"{field} is {seen}: {each} for each of {num_tokens} tokens is more than the {MAX_LOGPROB_ENTRIES} per answer "
            "(a prompt counts once for every choice that shows it): request fewer of them, or fewer choices.",
            field,
        )


def _rooms(
    body: ChatRequest | CompletionRequest,
    own: OwnFields,
    model: ServedModel,
    lengths: Sequence[int],
    max_tokens: int | None,
) -> list[int]:
    """Return the maximum number of tokens to generate for each prompt, by the prompts' lengths. Check what depends on it."""
    n = body.n or 1
    if asked := _prompt_logprobs(body, own):
        num_shown = sum(lengths) * (1 if own.shows_prompt_once else n)
        most = max(asked, key=lambda count: count_of(count, model))
        _check_entries(body, "prompt_logprobs", most, num_shown, model)
    rooms = [_room(length, model.max_len(), max_tokens, own) for length in lengths]
    if max_tokens is None:
        most_tokens = own.default_max_tokens or model.sampling_defaults.get("max_new_tokens")
        rooms = [min(room, most_tokens or room) for room in rooms]
    if own.num_logprobs is not None and (own.num_logprobs == ALL or own.num_logprobs > MAX_LOGPROBS):
        _check_entries(body, own.logprobs_field, own.num_logprobs, sum(rooms) * n, model)
    if small := [room for room in rooms if room < (body.min_tokens or 0)]:
        raise bad_request(
            f"min_tokens ({body.min_tokens}) is more than {own.max_tokens_field} ({small[0]}).", "min_tokens"
        )
    return rooms


def _room(num_prompt_tokens: int, max_len: int, max_tokens: int | None, own: OwnFields) -> int:
    room, least = max_len - num_prompt_tokens, 0 if max_tokens == 0 else 1
    if room < least or (max_tokens is not None and max_tokens > room):
        to_change = own.prompt_field if room < least else own.max_tokens_field
        raise errors.too_long(num_prompt_tokens, max_len, max_tokens or None, to_change)
    return room if max_tokens is None else max(1, max_tokens)


def _prompt_logprobs(body: SamplingFields, own: OwnFields) -> list[int]:
    """Return the requested numbers of log-probabilities per prompt token. The largest is sent."""
    return [count for count in (own.num_prompt_logprobs, body.prompt_logprobs) if count is not None]


def _sampling(
    body: SamplingFields, own: OwnFields, model: ServedModel, structure: Structure | None
) -> SamplingParams:
    """Return the parameters that all choices share. `asks_for` adds max_tokens and seed."""
    _check_count(body.prompt_logprobs, "prompt_logprobs", model)
    _check_count(own.num_logprobs, own.logprobs_field, model)
    num_logprobs = None if own.num_logprobs is None else count_of(own.num_logprobs, model)
    asked = _prompt_logprobs(body, own)
    sent = {name: value for name in _OF_PARAMS if (value := getattr(body, name)) is not None}
    given = {name: value for name, value in model.sampling_defaults.items() if name in _OF_PARAMS} | sent
    if body.logprob_token_ids == []:
        raise bad_request("logprob_token_ids must not be an empty list.", "logprob_token_ids")
    if body.logprob_token_ids and num_logprobs is None:
        raise bad_request(
            "logprob_token_ids needs logprobs: when using `logprob_token_ids`, `logprobs` must be set.",
            "logprob_token_ids",
        )
    tokenizer = model.tokenizer
    vocab_size = tokenizer.vocab_size
    # No token can match an id beyond the vocabulary, which SGLang's kits send.
    known = [each for each in body.stop_token_ids or () if each < vocab_size]
    stop_ids = set(check_ids("stop_token_ids", known, vocab_size))
    if not body.ignore_eos:
        stop_ids |= tokenizer.eos_ids
    if given.get("temperature", 1.0) < GREEDY_BELOW:
        given["temperature"] = 0.0
    given |= {
        "max_tokens": 1,
        "top_k": max(0, given.get("top_k", 0)),
        "stop_token_ids": tuple(sorted(stop_ids)),
        "num_logprobs": num_logprobs,
        "structure": structure,
        "logprob_token_ids": check_ids("logprob_token_ids", body.logprob_token_ids or (), vocab_size),
        "num_prompt_logprobs": max((count_of(count, model) for count in asked), default=None),
        "allowed_token_ids": check_ids("allowed_token_ids", body.allowed_token_ids or (), vocab_size),
        "bad_words": bad_words_of(body.bad_words, tokenizer),
        "logit_bias": logit_bias_of(body.logit_bias, vocab_size),
    }
    return SamplingParams(**given)


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
            f"stop accepts up to {MAX_STOPS} strings of up to {MAX_STOP_CHARS} characters.", "stop"
        )
    if not all(stops):
        raise bad_request("stop contains an empty string, which would end every answer at once.", "stop")
    return tuple(stops)


MAX_BIASES = 1024  # vLLM's MAX_NUM_LOGIT_BIAS_TOKENS
MAX_BIAS = 100.0  # OpenAI's
MAX_BAD_CHARS = 8192  # for all bad words together; vLLM allows 1,024 tokens
MAX_ID_DIGITS = 10
_SHOWN = 5  # maximum number of wrong values in an error message


def logit_bias_of(value: Any, vocab_size: int) -> tuple[TokenBias, ...]:
    """Parse {"token id": bias}.

    Raises:
        ApiError: 400, naming every wrong key or value.
    """
    if not value:
        return ()
    if not isinstance(value, dict) or len(value) > MAX_BIASES:
        raise _refusal("logit_bias", f"must be an object of up to {MAX_BIASES} biases by token id")
    wrong = [key for key in value if not (key.isascii() and key.isdecimal() and len(key) <= MAX_ID_DIGITS)]
    if wrong:
        raise _refusal("logit_bias", f"has keys that are not token ids: {_shown(wrong)}")
    wrong = [key for key, bias in value.items() if not _is_bias(bias)]
    if wrong:
        raise _refusal(
            "logit_bias", f"has biases that are not numbers from -100 to 100, for tokens {_shown(wrong)}"
        )
    check_ids("logit_bias", [int(key) for key in value], vocab_size)
    return tuple(TokenBias(int(key), float(bias)) for key, bias in value.items())


def _is_bias(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= MAX_BIAS


def check_ids(field: str, token_ids: Sequence[int], vocab_size: int) -> tuple[int, ...]:
    """Return the ids in order, without duplicates.

    Raises:
        ApiError: 400 if the model does not have an id.
    """
    wrong = [token_id for token_id in token_ids if not 0 <= token_id < vocab_size]
    if wrong:
        raise _refusal(
            field,
            f"has token ids that this model does not have: {_shown(wrong)}; its vocabulary of {vocab_size} "
            f"has ids 0 to {vocab_size - 1}",
        )
    return tuple(dict.fromkeys(token_ids))


def bad_words_of(words: Sequence[str] | None, tokenizer: Tokenizer) -> tuple[tuple[int, ...], ...]:
    """Return the token sequences of words, for the start of a text and after a space.

    Raises:
        ApiError: 400 if a word has no tokens, or all together have too many characters.
    """
    if words and sum(map(len, words)) > MAX_BAD_CHARS:
        raise _refusal("bad_words", f"may have at most {MAX_BAD_CHARS} characters in all")
    sequences: dict[tuple[int, ...], None] = {}
    for word in words or ():
        bare = word.lstrip()
        if not bare or not _is_unicode(bare):
            raise _refusal("bad_words", f"must be words of at least one character; got {word[:40]!r}")
        for text in (bare, " " + bare):
            sequences[tuple(tokenizer.encode(text, add_special_tokens=False))] = None
    sequences.pop((), None)
    return tuple(ids for ids in sequences if max(ids) < tokenizer.vocab_size)  # others never occur


def truncated(body: SamplingFields, prompt_ids: Sequence[int], room: int, *, max_len: int) -> Sequence[int]:
    """Cut a prompt to truncate_prompt_tokens: its last tokens, or the first if truncation_side is "right".

    Args:
        body: The request.
        prompt_ids: Token ids, not empty.
        room: Number of tokens to keep if truncate_prompt_tokens is -1.
        max_len: Length of the context, in tokens.

    Raises:
        ApiError: 400 if the length is 0 or exceeds the context.
    """
    wanted = body.truncate_prompt_tokens
    if wanted is None:
        return prompt_ids
    if wanted > max_len:
        raise _refusal(
            "truncate_prompt_tokens",
            f"value ({wanted}) is greater than max_model_len ({max_len}); select a smaller truncation size",
        )
    if wanted == 0:
        raise _refusal("truncate_prompt_tokens", "is 0, which leaves no prompt; set -1 or at least 1")
    count = max(1, room) if wanted == -1 else wanted
    return prompt_ids[:count] if body.truncation_side == "right" else prompt_ids[-count:]


def _is_unicode(text: str) -> bool:
    """Return whether a text has no lone surrogates."""
    return not any("\ud800" <= char <= "\udfff" for char in text)


def _shown(values: Sequence[Any]) -> str:
    more = f" and {len(values) - _SHOWN} more" if len(values) > _SHOWN else ""
    return ", ".join(repr(value)[:40] for value in values[:_SHOWN]) + more


def _refusal(field: str, trouble: str) -> ApiError:
    return bad_request(f"{field} {trouble}.", field)
