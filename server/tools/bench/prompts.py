"""Prompts of real text: whole prompts from a file, or passages cut to a number of tokens.

Random tokens are routed to experts differently from text, so a load on a Mixture-of-Experts model needs text. The default
text is Python's documentation, which is part of the standard library. Every passage begins at a different token, so that
none is an accidental prefix hit; prefixes that a trace shares (its hash ids) are shared. Tokens are the model's: the
service's /tokenize (WideEP, vLLM) or the checkpoint's tokenizer counts them.
"""

import contextlib
import json
import math
import pydoc_data.topics
import random
from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property
from itertools import cycle
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from server.http.client import ServiceClient, ServiceError
from server.options.flag import OptionsError

MOST_CHARS = 8 << 20  # of a file for passages
_PIECE_CHARS = 1 << 17  # of one request to /tokenize
_GOLDEN = 0.6180339887498949  # a stride that keeps passages apart as long as there is room (Weyl's sequence)
_REMEDY = "give its tokenizer with --tokenizer DIRECTORY, or send whole prompts: --prompts FILE"
_JSON_KEYS = ("prompt", "text", "question", "turns", "messages", "conversations")


class PromptTokenizer(Protocol):
    """The model's tokenizer, local or in the service."""

    def encode(self, text: str) -> list[int]:
        """Return a text's tokens, without special tokens at the beginning."""

    def decode(self, token_ids: list[int]) -> str:
        """Return the text of tokens."""

    @property
    def num_chat_tokens(self) -> int:
        """Return the number of tokens that the chat template adds to a message."""


class RequestLengths(NamedTuple):
    """The lengths of a request's prompt and answer."""

    output_tokens: int
    prompt_tokens: int | None = None  # None for a whole prompt from the file
    hash_ids: tuple[int, ...] = ()  # one per `block_tokens` of the prompt: the same id is the same text
    block_tokens: float = 0.0  # not whole if a trace is scaled


class Passages:
    """Passages of a text with different beginnings, until every token has been a beginning."""

    def __init__(self, token_ids: Sequence[int], *, seed: int = 0) -> None:
        """Begin the first passage at a random token that `seed` determines, or at the first token if it is 0."""
        self._ids = token_ids
        self._at = random.Random(seed).randrange(len(token_ids)) if seed else 0
        stride = max(1, int(len(token_ids) * _GOLDEN))
        self._stride = next(each for each in range(stride, 0, -1) if math.gcd(each, len(token_ids)) == 1)

    def take(self, num_tokens: int) -> list[int]:
        """Return the next passage; at the end of the text, it continues at the beginning."""
        begin, self._at = self._at, (self._at + self._stride) % len(self._ids)
        passage: list[int] = []
        while len(passage) < num_tokens:
            passage += self._ids[begin : begin + num_tokens - len(passage)]
            begin = 0
        return passage


class Prompts:
    """The prompts of a whole run; levels share no prompts, which would be prefix hits."""

    def __init__(
        self,
        source: Passages | Sequence[str],
        tokenizer: PromptTokenizer | None = None,
        *,
        is_chat: bool = True,
    ) -> None:
        """Use passages, or whole prompts, which repeat when all have been used.

        Args:
            tokenizer: Tokenizer that cuts passages.
            is_chat: Whether passages must be texts.
        """
        self._passages = source if isinstance(source, Passages) else None
        self._whole = cycle(() if isinstance(source, Passages) else source)
        self._tokenizer, self._is_chat = tokenizer, is_chat
        self._shared: dict[int, list[int]] = {}

    def begin_level(self) -> None:
        """Forget the texts of the hash ids."""
        self._shared.clear()

    def take(self, lengths: RequestLengths) -> str | list[int]:
        """Return the next prompt: a text, or token ids for a completion.

        Raises:
            ServiceError: The service cannot convert tokens to text.
        """
        if self._passages is None:
            return next(self._whole)
        assert self._tokenizer is not None and lengths.prompt_tokens is not None, "passages are cut by tokens"
        if not self._is_chat:
            return self._cut(lengths, lengths.prompt_tokens)
        num_tokens = max(1, lengths.prompt_tokens - self._tokenizer.num_chat_tokens)
        return self._tokenizer.decode(self._cut(lengths, num_tokens))

    def _cut(self, lengths: RequestLengths, num_tokens: int) -> list[int]:
        assert self._passages is not None
        if not lengths.hash_ids:
            return self._passages.take(num_tokens)
        passage: list[int] = []
        for place, hash_id in enumerate(lengths.hash_ids, start=1):
            if hash_id not in self._shared:
                self._shared[hash_id] = self._passages.take(math.ceil(lengths.block_tokens))
            passage += self._shared[hash_id][: round(place * lengths.block_tokens) - len(passage)]
        return passage[:num_tokens] or self._passages.take(num_tokens)


def passages_of(path: Path | None, tokenizer: PromptTokenizer, *, seed: int) -> Passages:
    """Tokenize a file's text, or Python's documentation, for passages.

    Raises:
        OptionsError: The file has no prompts.
        ServiceError: The service does not tokenize.
    """
    text = documentation() if path is None else "\n\n".join(read_prompts(path))
    pieces = [
        text[begin : begin + _PIECE_CHARS] for begin in range(0, min(len(text), MOST_CHARS), _PIECE_CHARS)
    ]
    return Passages([token_id for piece in pieces for token_id in tokenizer.encode(piece)], seed=seed)


def documentation() -> str:
    """Return the default text: Python's documentation, in English."""
    return "\n".join(pydoc_data.topics.topics.values())


def read_prompts(path: Path) -> list[str]:
    """Return the prompts in a file: one JSON object or string per line, or the paragraphs of a text.

    Raises:
        OptionsError: The file cannot be read or has no prompts; the message names the line.
    """
    try:
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise OptionsError(f"--prompts {path} cannot be read: {error}") from error
    if path.suffix in (".jsonl", ".json"):
        prompts = list(_json_prompts(path, _json_values(path, text)))
    else:
        prompts = [each.strip() for each in text.replace("\r\n", "\n").split("\n\n") if each.strip()]
    if not prompts:
        raise OptionsError(f"--prompts {path} has no prompts")
    return prompts


def _json_values(path: Path, text: str) -> Iterator[tuple[str, Any]]:
    """Yield the values of a list (.json) or of each line, with a text for their places."""
    whole = None
    with contextlib.suppress(ValueError):  # many files of lines are called .json
        whole = json.loads(text) if path.suffix == ".json" else None
    if whole is not None:
        values = whole if isinstance(whole, list) else [whole]
        yield from ((f"element {number}", each) for number, each in enumerate(values, start=1))
        return
    for number, line in enumerate(text.split("\n"), start=1):  # not splitlines: strings may contain U+2028
        if not line.strip():
            continue
        try:
            yield f"line {number}", json.loads(line)
        except ValueError as error:  # also for a number with thousands of digits
            raise OptionsError(f"--prompts {path}, line {number}: not JSON ({error})") from error


def _json_prompts(path: Path, values: Iterable[tuple[str, Any]]) -> Iterator[str]:
    for place, value in values:
        prompt = _prompt_of(value)
        if not prompt:
            raise OptionsError(
                f"--prompts {path}, {place}: no text; give a string or an object with one of "
                f"{', '.join(_JSON_KEYS)}"
            )
        yield prompt


def _prompt_of(value: Any) -> str:
    """Return the first text in a value. Returns an empty text if it has none."""
    if isinstance(value, str):
        return value
    if isinstance(value, list):  # turns, or messages: the first one that is not a system prompt
        return next((text for each in value if (text := _prompt_of(each))), "")
    if isinstance(value, dict) and value.get("role", value.get("from")) != "system":
        keys = (*_JSON_KEYS, "content", "value")
        return next((text for key in keys if (text := _prompt_of(value.get(key)))), "")
    return ""


class ServiceTokenizer:
    """The tokenizer behind a service's /tokenize and /detokenize. Its methods raise ServiceError if the service has none."""

    def __init__(self, service: ServiceClient, model: str) -> None:
        self._service, self._model = service, model

    def encode(self, text: str) -> list[int]:
        body = {"prompt": text, "add_special_tokens": False}
        token_ids: list[int] = self._ask("/tokenize", body, "tokens", list)
        if text and not token_ids:  # llama.cpp reads another field, which is missing
            raise ServiceError(f"{self._service.url}/tokenize is not compatible with vLLM's; {_REMEDY}")
        return token_ids

    def decode(self, token_ids: list[int]) -> str:
        return str(self._ask("/detokenize", {"tokens": token_ids}, "prompt", str))

    @cached_property
    def num_chat_tokens(self) -> int:
        chat = {"messages": [{"role": "user", "content": "x"}]}
        return len(self._ask("/tokenize", chat, "tokens", list)) - len(self.encode("x"))

    def _ask(self, path: str, body: dict[str, Any], name: str, kind: type) -> Any:
        try:
            answer = self._service.post(path, {"model": self._model, **body}).json()
            value = answer[name]
        except ServiceError as error:
            raise ServiceError(f"cannot count tokens with {path} ({error}); {_REMEDY}") from error
        except (ValueError, LookupError, TypeError) as error:
            raise ServiceError(
                f"{self._service.url}{path} is not compatible with vLLM's; {_REMEDY}"
            ) from error
        if not isinstance(value, kind):
            raise ServiceError(f"{self._service.url}{path} is not compatible with vLLM's; {_REMEDY}")
        return value


class CheckpointTokenizer:
    """A checkpoint's tokenizer, in this process."""

    def __init__(self, directory: str) -> None:
        """Load the tokenizer.

        Raises:
            OptionsError: The directory has no tokenizer.
        """
        # transformers takes seconds to load, and is needed only here.
        from server.front.tokenizer import Tokenizer, TokenizerError  # noqa: PLC0415

        try:
            self._tokenizer = Tokenizer(directory)
        except TokenizerError as error:
            raise OptionsError(f"--tokenizer: {error}") from error

    def encode(self, text: str) -> list[int]:
        return list(self._tokenizer.encode(text, add_special_tokens=False))

    def decode(self, token_ids: list[int]) -> str:
        return self._tokenizer.decode(token_ids, skip_special_tokens=False)

    @cached_property
    def num_chat_tokens(self) -> int:
        """Returns 0 if the checkpoint has no template: the service then uses another one, of unknown length."""
        if not self._tokenizer.has_chat_template:
            return 0
        chat = self._tokenizer.render_chat([{"role": "user", "content": "x"}])
        return len(self.encode(chat)) - len(self.encode("x"))
