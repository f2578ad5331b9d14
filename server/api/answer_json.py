"""JSON that several endpoints share: server-sent events, the `usage` object, log-probabilities.

Most events of a stream differ only in their text. Such an event is encoded once, with a mark in place of the text. Later
events encode only the text, which takes 0.2 us instead of 4.5 us for the whole object (measured).

Completions spell a token that is not valid UTF-8 by itself as "bytes:\\xe2\\x82", as OpenAI does: otherwise two such
tokens could become the same key. Chats have a separate field for the bytes and show U+FFFD.
"""

import codecs
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from typing import Any

from scheduler.policy.request import Logprobs
from server.front.generations import Answer, Generation
from server.front.timing import timing_of
from server.front.tokenizer import Tokenizer
from server.http.json_writer import EncodedList, encode_json

_MARK = "\ue000text\ue000"  # Unicode's private use area, so no name contains it


def event(content: dict[str, Any]) -> bytes:
    """Return one server-sent event."""
    return b"data: " + encode_json(content).encode() + b"\n\n"


class TextEvent:
    """An event that is encoded once, except for its text."""

    def __init__(self, content_of: Callable[[str], dict[str, Any]]) -> None:
        """Args: content_of returns the event's content for a text, which must occur in it exactly once."""
        self._before, self._after = event(content_of(_MARK)).split(encode_json(_MARK).encode())

    def of(self, text: str) -> bytes:
        """Return the event with this text, equal to the bytes that `event` returns."""
        return self._before + encode_json(text).encode() + self._after


def usage_of(
    generations: Iterable[Generation],
    n: int,
    *,
    begun: Collection[int] | None = None,
    num_reasoning_tokens: int = 0,
) -> dict[str, Any]:
    """Count a request's tokens.

    Args:
        generations: All choices, n in a row per prompt. A prompt counts once, not once per choice.
        n: Choices per prompt.
        begun: Indexes of the choices that count as output; None counts all.
        num_reasoning_tokens: Number of output tokens that were reasoning.
    """
    choices = list(generations)
    prompt_tokens = sum(len(choice.ask.request.prompt_ids) for choice in choices[::n])
    output_tokens = sum(choice.num_tokens for choice in choices if begun is None or choice.index in begun)
    # Only the first of a prompt's n choices can find the prompt uncached, so its count is the prompt's.
    cached_tokens = sum(choice.num_cached_tokens for choice in choices[::n])
    details = {"reasoning_tokens": num_reasoning_tokens}
    if num_drafts := sum(choice.num_draft_tokens for choice in choices):
        accepted = sum(choice.num_accepted_tokens for choice in choices)
        details |= {
            "accepted_prediction_tokens": accepted,
            "rejected_prediction_tokens": num_drafts - accepted,
        }
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": output_tokens,
        "total_tokens": prompt_tokens + output_tokens,
        "prompt_tokens_details": {"cached_tokens": cached_tokens, **cached_by_tier(choices[::n])},
        "completion_tokens_details": details,
    }


def cached_by_tier(choices: Iterable[Generation]) -> dict[str, dict[str, int]]:
    """Return where cached tokens came from, under SGLang's name, or nothing if all were on the device."""
    found = Counter[str]()
    for each in choices:
        found.update(
            device=each.num_cached_tokens
            - each.num_host_tokens
            - each.num_disk_tokens
            - each.num_peer_tokens,
            host=each.num_host_tokens,
            disk=each.num_disk_tokens,
            peer=each.num_peer_tokens,
        )
    if not found["host"] + found["disk"] + found["peer"]:
        return {}
    # Only services of several nodes have peers.
    shown = [source for source in ("device", "host", "disk", "peer") if source != "peer" or found[source]]
    return {"cached_tokens_details": {source: max(0, found[source]) for source in shown}}


def metrics_of(answer: Answer) -> dict[str, float | None] | None:
    """Return vLLM's durations of one request, in milliseconds, or None if several choices share the request."""
    if len(answer.generations) != 1:
        return None
    [choice] = answer.generations
    timing = timing_of(choice, now_s=choice.last_token_s)
    num_gaps = choice.num_tokens - 1
    return {
        "time_to_first_token_ms": 1e3 * timing.prefill_s,  # from the first step on a rank
        "generation_time_ms": 1e3 * timing.decode_s,
        "queue_time_ms": 1e3 * timing.queue_s,
        "mean_itl_ms": 1e3 * timing.decode_s / num_gaps if num_gaps > 0 else None,
        "tokens_per_second": choice.num_tokens / timing.decode_s if timing.decode_s > 0 else None,
    }


LEAST = -9999.0  # vLLM's minimum; JSON has no minus infinity


def chat_logprobs(
    entries: Sequence[Logprobs],
    tokenizer: Tokenizer,
    num_top: int,
    *,
    as_ids: bool = False,
    shows_own: bool = False,
) -> dict[str, Any]:
    """Return chat's `logprobs` object: one entry per token, with its top tokens.

    Args:
        entries: Log-probabilities of the tokens.
        tokenizer: Spells the tokens.
        num_top: Number of top tokens to show.
        as_ids: Spell tokens as "token_id:5" (return_tokens_as_token_ids).
        shows_own: Show the token itself first among its top tokens (as vLLM does with logprob_token_ids).
    """
    return {
        "content": [
            {
                **_chat_entry(entry.token_id, entry.logprob, tokenizer, as_ids),
                "top_logprobs": [
                    _chat_entry(token_id, logprob, tokenizer, as_ids)
                    for token_id, logprob in _shown(entry, num_top, shows_own=shows_own)
                ],
            }
            for entry in entries
        ]
    }


class CompletionLogprobs:
    """Build the `logprobs` objects of one completion choice, piece by piece. Offsets continue across pieces."""

    def __init__(self, tokenizer: Tokenizer, num_top: int, *, as_ids: bool = False) -> None:
        """Args: num_top is the number of top tokens to show; as_ids spells tokens as "token_id:5"."""
        self._tokenizer, self._num_top, self._as_ids = tokenizer, num_top, as_ids
        self._characters = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._offset = 0  # characters of text before the next token
        self._object = _empty()

    def push_first(self, token_id: int) -> None:
        """Add a prompt's first token. Nothing precedes it, so it has no probability."""
        self._push(token_id, None, None)

    def push(self, entries: Sequence[Logprobs]) -> None:
        """Add tokens."""
        for entry in entries:
            top = {self._spell(each): _finite(value) for each, value in _likeliest(entry, self._num_top)}
            # vLLM's clients expect the chosen token first among the top ones, even if it is not likely.
            own = {self._spell(entry.token_id): _finite(entry.logprob)}
            self._push(entry.token_id, _finite(entry.logprob), own | top | own)

    def take(self) -> dict[str, Any]:
        """Return the object of the tokens added since the last call."""
        content, self._object = self._object, _empty()
        return content

    def _push(self, token_id: int, logprob: float | None, top: dict[str, float] | None) -> None:
        content = self._object
        content["tokens"].append(self._spell(token_id))
        content["token_logprobs"].append(logprob)
        content["top_logprobs"].append(top)
        content["text_offset"].append(self._offset)
        self._offset += len(self._characters.decode(self._tokenizer.token_bytes(token_id)))

    def _spell(self, token_id: int) -> str:
        raw = self._tokenizer.token_bytes(token_id)
        if self._as_ids or not raw:  # a vocabulary may have padding ids without text
            return f"token_id:{token_id}"
        try:
            return raw.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)


def prompt_logprobs_list(
    entries: Iterable[Logprobs], tokenizer: Tokenizer, num_top: int
) -> Iterator[dict[str, Any] | None]:
    """Yield the items of vLLM's `prompt_logprobs`: None for the first token, then {id: {logprob, rank, decoded_token}}, with
    the prompt's own token first.

    Args:
        entries: Log-probabilities of the prompt's tokens from index 1.
        tokenizer: Spells the tokens.
        num_top: Number of top tokens to show.
    """
    yield None
    for entry in entries:
        ranked = {str(entry.token_id): (entry.logprob, entry.rank)}
        for rank, (token_id, logprob) in enumerate(_likeliest(entry, num_top), start=1):
            ranked.setdefault(str(token_id), (logprob, rank))
        yield {
            token_id: {
                "logprob": _finite(logprob),
                "rank": rank,
                "decoded_token": tokenizer.token_bytes(int(token_id)).decode(errors="replace"),
            }
            for token_id, (logprob, rank) in ranked.items()
        }


def encoded_prompt_logprobs(entries: Iterable[Logprobs], tokenizer: Tokenizer, num_top: int) -> EncodedList:
    """Return `prompt_logprobs_list` encoded token by token: the objects of a long prompt would take a gigabyte."""
    return EncodedList([encode_json(item) for item in prompt_logprobs_list(entries, tokenizer, num_top)])


def _empty() -> dict[str, list[Any]]:
    return {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}


def _chat_entry(token_id: int, logprob: float, tokenizer: Tokenizer, as_ids: bool) -> dict[str, Any]:
    raw = tokenizer.token_bytes(token_id)
    token = f"token_id:{token_id}" if as_ids else raw.decode(errors="replace")
    return {"token": token, "logprob": _finite(logprob), "bytes": list(raw)}


def _shown(entry: Logprobs, num_top: int, *, shows_own: bool) -> list[tuple[int, float]]:
    """Return the top tokens of an entry, with the token itself first if `shows_own`."""
    likeliest = _likeliest(entry, num_top)
    if not shows_own:
        return likeliest
    return [(entry.token_id, entry.logprob), *(each for each in likeliest if each[0] != entry.token_id)]


def _likeliest(entry: Logprobs, num_top: int) -> list[tuple[int, float]]:
    return list(zip(entry.top_ids, entry.top_logprobs, strict=True))[:num_top]


def _finite(logprob: float) -> float:
    """Clamp to LEAST. NaN becomes LEAST, too."""
    return logprob if logprob > LEAST else LEAST
