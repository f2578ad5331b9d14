"""Log-probabilities in the two forms that OpenAI gave them."""

from collections.abc import Sequence
from typing import Any

from scheduler.request import Logprobs
from server.tokenizer import Tokenizer

LEAST = -9999.0  # JSON has no minus infinity; vLLM's floor


def chat_logprobs(entries: Sequence[Logprobs], tokenizer: Tokenizer, num_top: int) -> dict[str, Any]:
    """Return chat's `logprobs` object: one entry per token, with the likeliest beside it."""
    return {
        "content": [
            {
                **_chat_entry(entry.token_id, entry.logprob, tokenizer),
                "top_logprobs": [
                    _chat_entry(token_id, logprob, tokenizer)
                    for token_id, logprob in _likeliest(entry, num_top)
                ],
            }
            for entry in entries
        ]
    }


def completion_logprobs(
    entries: Sequence[Logprobs], tokenizer: Tokenizer, num_top: int, offset: int
) -> dict[str, Any]:
    """Return completions' `logprobs` object; `offset` is the characters of text before the first token."""
    tokens, offsets, tops = [], [], []
    for entry in entries:
        token = _text(entry.token_id, tokenizer)
        tokens.append(token)
        offsets.append(offset)
        offset += len(token)
        top = {
            _text(token_id, tokenizer): _finite(logprob) for token_id, logprob in _likeliest(entry, num_top)
        }
        tops.append(top | {token: _finite(entry.logprob)})  # the chosen token is always among them
    return {
        "tokens": tokens,
        "token_logprobs": [_finite(entry.logprob) for entry in entries],
        "top_logprobs": tops,
        "text_offset": offsets,
    }


def _chat_entry(token_id: int, logprob: float, tokenizer: Tokenizer) -> dict[str, Any]:
    raw = tokenizer.token_bytes(token_id)
    return {"token": raw.decode(errors="replace"), "logprob": _finite(logprob), "bytes": list(raw)}


def _likeliest(entry: Logprobs, num_top: int) -> list[tuple[int, float]]:
    return list(zip(entry.top_ids, entry.top_logprobs, strict=True))[:num_top]


def _text(token_id: int, tokenizer: Tokenizer) -> str:
    return tokenizer.token_bytes(token_id).decode(errors="replace")


def _finite(logprob: float) -> float:
    """Clamp; not a number counts as the least."""
    return logprob if logprob > LEAST else LEAST
