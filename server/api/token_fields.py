"""Request fields that speak of single tokens: biases, bad words, allowed and watched ids, truncation.

Each function checks one field and returns what a rank is asked. Limits are vLLM's where it has one.
"""

from collections.abc import Sequence
from typing import Any

from scheduler.policy.request import TokenBias
from server.api.schemas import SamplingFields
from server.errors import ApiError, bad_request
from server.front.tokenizer import Tokenizer

MAX_BIASES = 1024  # vLLM's MAX_NUM_LOGIT_BIAS_TOKENS
MAX_BIAS = 100.0  # OpenAI's
MAX_BAD_CHARS = 8192  # of all bad words together; vLLM takes 1,024 tokens
MAX_ID_DIGITS = 10
_SHOWN = 5  # wrong values that an error quotes


def logit_bias_of(value: Any, vocab_size: int) -> tuple[TokenBias, ...]:
    """Read {"token id": bias}.

    Raises:
        ApiError: 400, naming every key or value that is wrong.
    """
    if not value:
        return ()
    if not isinstance(value, dict) or len(value) > MAX_BIASES:
        raise _refusal("logit_bias", f"must be an object of up to {MAX_BIASES} entries, token id to bias")
    wrong = [key for key in value if not (key.isascii() and key.isdecimal() and len(key) <= MAX_ID_DIGITS)]
    if wrong:
        raise _refusal("logit_bias", f"has keys that are not token ids: {_shown(wrong)}")
    wrong = [key for key, bias in value.items() if not _is_bias(bias)]
    if wrong:
        raise _refusal(
            "logit_bias", f"has biases that are not numbers from -100 to 100, of tokens {_shown(wrong)}"
        )
    check_ids("logit_bias", [int(key) for key in value], vocab_size)
    return tuple(TokenBias(int(key), float(bias)) for key, bias in value.items())


def _is_bias(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= MAX_BIAS


def check_ids(field: str, token_ids: Sequence[int], vocab_size: int) -> tuple[int, ...]:
    """Return the ids, each once, in order.

    Raises:
        ApiError: 400, an id that the model does not have.
    """
    wrong = [token_id for token_id in token_ids if not 0 <= token_id < vocab_size]
    if wrong:
        raise _refusal(
            field,
            f"has token ids that this model does not have: {_shown(wrong)}; its vocabulary of {vocab_size} "
            f"has 0 to {vocab_size - 1}",
        )
    return tuple(dict.fromkeys(token_ids))


def bad_words_of(words: Sequence[str] | None, tokenizer: Tokenizer) -> tuple[tuple[int, ...], ...]:
    """Return the token sequences of words, each as it is at a text's start and after a blank.

    Raises:
        ApiError: 400, a word that has no tokens, or too many characters in all.
    """
    if words and sum(map(len, words)) > MAX_BAD_CHARS:
        raise _refusal("bad_words", f"takes words of {MAX_BAD_CHARS} characters together")
    sequences: dict[tuple[int, ...], None] = {}
    for word in words or ():
        bare = word.lstrip()
        if not bare or not _is_unicode(bare):
            raise _refusal("bad_words", f"must be words of at least one character; got {word[:40]!r}")
        for text in (bare, " " + bare):
            sequences[tuple(tokenizer.encode(text, add_special_tokens=False))] = None
    sequences.pop((), None)
    return tuple(sequences)


def truncated(body: SamplingFields, prompt_ids: Sequence[int], room: int, *, max_len: int) -> Sequence[int]:
    """Cut a prompt to truncate_prompt_tokens: its last tokens, or its first with truncation_side "right".

    Args:
        body: the request.
        prompt_ids: not empty.
        room: what -1 means, in tokens.
        max_len: the context's length, in tokens.

    Raises:
        ApiError: 400, nothing would be left, or more than the context has room for.
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
        raise _refusal("truncate_prompt_tokens", "is 0, which leaves no prompt; give -1 or at least 1")
    count = max(1, room) if wanted == -1 else wanted
    return prompt_ids[:count] if body.truncation_side == "right" else prompt_ids[-count:]


def _is_unicode(text: str) -> bool:
    """Whether there is no half of a surrogate pair in it."""
    return not any("\ud800" <= char <= "\udfff" for char in text)


def _shown(values: Sequence[Any]) -> str:
    more = f" and {len(values) - _SHOWN} more" if len(values) > _SHOWN else ""
    return ", ".join(repr(value)[:40] for value in values[:_SHOWN]) + more


def _refusal(field: str, trouble: str) -> ApiError:
    return bad_request(f"{field} {trouble}.", field)
