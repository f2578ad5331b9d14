"""Incremental detokenization that never emits half a character or the start of a stop string.

A token may end inside a UTF-8 character, and a token's text may depend on the previous one (a leading space). So the
last emitted tokens are decoded again together with the new ones, and text is emitted once it does not end in U+FFFD:
the window method of Hugging Face's text-generation-inference. Rejected: `tokenizers.decoders.DecodeStream`, which
raises on some byte sequences and cannot be flushed.

Most tokens of a byte-level vocabulary are whole characters by themselves. Their text does not depend on other tokens, so it is
looked up (`LoneTexts`) instead of decoded with the window. The result is the same.

A stop string ends the text at its first occurrence. Text that could still become a stop string is held back until the
next characters decide, so emitted text is never retracted.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple, Protocol

REPLACEMENT = "\ufffd"
MAX_BYTES_OF_CHARACTER = 4  # in UTF-8; more pending tokens than this hold more than one character
# Tokens of context. A longer context is cut to the newest tokens, which costs a second decoding.
MAX_SHOWN = 12
CONTEXT_TOKENS = 5  # of the prompt; enough for a leading space and one character in bytes


class Decoder(Protocol):
    """The part of a tokenizer that `Detokenizer` uses."""

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        """Return the text of a token sequence."""
        ...

    def lone_texts(self, *, skip_special_tokens: bool) -> Mapping[int, str | None] | None:
        """Return the texts of tokens that do not depend on their neighbours, as `LoneTexts` does, or None if they all may."""
        ...


class LoneTexts(dict[int, str | None]):
    """The text of each token that is whole characters by itself, and None for other tokens. Computed at the first use of a token.

    Only for decoders that join the bytes of all tokens and then decode UTF-8, with U+FFFD for invalid bytes. There such a token
    adds the same text after any tokens.
    """

    def __init__(self, decoder: Decoder, *, skip_special_tokens: bool) -> None:
        super().__init__()
        self._decoder, self._skip = decoder, skip_special_tokens

    def __missing__(self, token_id: int) -> str | None:
        text = self._decoder.decode([token_id], skip_special_tokens=self._skip)
        self[token_id] = lone = text if text and REPLACEMENT not in text else None
        return lone


class Detokenizer:
    """The text of one growing token sequence."""

    def __init__(
        self, decoder: Decoder, prompt_ids: Sequence[int], *, skip_special_tokens: bool = True
    ) -> None:
        self._decoder = decoder
        self._skip = skip_special_tokens
        self._lone_texts = decoder.lone_texts(skip_special_tokens=skip_special_tokens)
        self._shown = list(prompt_ids[-CONTEXT_TOKENS:])  # emitted tokens, kept as context
        self._shown_text = self._decode(self._shown)
        self._ends_within_token = False  # the emitted text ends before the last bytes of the emitted tokens
        self._pending: list[int] = []  # tokens without emitted text

    def push(self, token_ids: Sequence[int]) -> str:
        """Add tokens; return the text that is now complete.

        One token after the other: over invalid UTF-8 the number of U+FFFD would depend on the tokens per step, which drafts
        and moves to other ranks change.
        """
        return "".join(map(self._push, token_ids))

    def _push(self, token_id: int) -> str:
        if self._lone_texts is not None and not self._pending and not self._ends_within_token:
            lone = self._lone_texts[token_id]
            if lone is not None:
                self._add(token_id, lone)
                return lone
        self._pending.append(token_id)
        text = self._decode(self._shown + self._pending)
        if not text.endswith(REPLACEMENT):
            return self._show(text)
        return self._show_whole_part() if len(self._pending) > MAX_BYTES_OF_CHARACTER else ""

    def _add(self, token_id: int, text: str) -> None:
        """Add a token and its text to the context: what `_show` does for one pending token."""
        self._shown.append(token_id)
        self._shown_text += text
        if len(self._shown) > MAX_SHOWN:
            self._shown, self._shown_text = [token_id], text

    def flush(self) -> str:
        """Return the text that was held back, with U+FFFD for a broken character. Call it after the last token."""
        return self._show(self._decode(self._shown + self._pending))

    def _show(self, text: str, *, ends_within_token: bool = False) -> str:
        """Add the pending tokens to the context; return the text that they add."""
        new = text[len(self._shown_text) :]
        if new:  # without text, these are special tokens, which give no context for a leading space
            self._shown, self._shown_text = self._shown + self._pending, text
            self._ends_within_token = ends_within_token
            if len(self._shown) > MAX_SHOWN:
                self._shown = self._pending
                context = self._decode(self._shown)
                self._shown_text = context.removesuffix(REPLACEMENT) if ends_within_token else context
        self._pending = []
        return new

    def _show_whole_part(self) -> str:
        """Return the text before an unfinished character.

        The character usually begins at one of the last three tokens. If every token ends within a character, the text ends
        within a token. Otherwise the bytes are not valid UTF-8 and become U+FFFD.
        """
        whole = self._decode(self._shown + self._pending).removesuffix(REPLACEMENT)
        for num_held in range(1, MAX_BYTES_OF_CHARACTER):
            text = self._decode(self._shown + self._pending[:-num_held])
            if not text.endswith(REPLACEMENT):
                break
        else:
            if REPLACEMENT not in whole[len(self._shown_text) :]:
                return self._show(whole, ends_within_token=True)
        held = self._pending[-num_held:]
        del self._pending[-num_held:]
        new = self._show(text)
        self._pending = held
        return new

    def _decode(self, token_ids: list[int]) -> str:
        return self._decoder.decode(token_ids, skip_special_tokens=self._skip) if token_ids else ""


class Screened(NamedTuple):
    """Text that may be shown, and the stop string that ended it or None."""

    text: str
    stop: str | None


class StopScreen:
    """Searches one growing text for stop strings."""

    def __init__(self, stops: tuple[str, ...], *, include_stop: bool = False) -> None:
        """Args: stops are non-empty; include_stop keeps the stop string that ended the text in the text."""
        assert all(stops), "an empty stop string would end every text at once"
        self._stops = stops
        self._include = include_stop
        self._hold = max(map(len, stops), default=1) - 1
        self._held = ""

    def push(self, text: str) -> Screened:
        """Add text; return the part that may be shown now."""
        if not self._stops:
            return Screened(text, None)
        seen = self._held + text
        found = self._first_stop(seen)
        if found is not None:
            at, stop = found
            self._held = ""
            return Screened(seen[: at + len(stop)] if self._include else seen[:at], stop)
        cut = len(seen) - self._longest_head(seen)
        self._held = seen[cut:]
        return Screened(seen[:cut], None)

    def pass_by(self, text: str) -> str:
        """Return the held text and `text` without searching them (before min_tokens)."""
        shown, self._held = self._held + text, ""
        return shown

    def flush(self) -> str:
        """Return the held text. Call it at the end of the text, when no stop string can follow."""
        shown, self._held = self._held, ""
        return shown

    def _first_stop(self, seen: str) -> tuple[int, str] | None:
        """Find the stop string that ends first. If several end at the same place, return the one that starts first."""
        hits = [(seen.find(stop), stop) for stop in self._stops]
        ends = [(at + len(stop), at, stop) for at, stop in hits if at >= 0]
        if not ends:
            return None
        _, at, stop = min(ends)
        return at, stop

    def _longest_head(self, seen: str) -> int:
        """Return the length of the longest tail that begins a stop string."""
        for length in range(min(self._hold, len(seen)), 0, -1):
            tail = seen[-length:]
            if any(stop.startswith(tail) for stop in self._stops):
                return length
        return 0
