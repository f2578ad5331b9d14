"""Token ids to text, as they come: never half a character, never the head of a stop string.

A token may end inside a UTF-8 character, and what a token looks like may depend on the one before it (a leading
blank). So the last shown tokens are decoded again with the new ones, and text is shown once it does not end in
U+FFFD: the window method of Hugging Face's text-generation-inference. Rejected: `tokenizers.decoders.DecodeStream`,
which raises on some byte sequences and cannot be flushed.

A stop string ends the text at its first occurrence. What could still become one is held back until the next characters
decide, so a reader never sees text that has to be taken back.
"""

from collections.abc import Sequence
from typing import NamedTuple, Protocol

REPLACEMENT = "\ufffd"
MAX_BYTES_OF_CHARACTER = 4  # in UTF-8; more pending tokens than this hold more than one character
MAX_SHOWN = (
    12  # tokens of context; a longer one is shortened to the newest tokens, which costs a second decoding
)
CONTEXT_TOKENS = 5  # of the prompt; enough for a leading blank and one character in bytes


class Decoder(Protocol):
    """What is needed of a tokenizer."""

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        """Return the text of a token sequence."""
        ...


class Detokenizer:
    """The text of one growing token sequence."""

    def __init__(
        self, decoder: Decoder, prompt_ids: Sequence[int], *, skip_special_tokens: bool = True
    ) -> None:
        self._decoder = decoder
        self._skip = skip_special_tokens
        self._shown = list(prompt_ids[-CONTEXT_TOKENS:])  # tokens whose text is out, kept as context
        self._shown_text = self._decode(self._shown)
        self._pending: list[int] = []  # tokens whose text is not

    def push(self, token_ids: Sequence[int]) -> str:
        """Take tokens; return the text that is complete now."""
        self._pending.extend(token_ids)
        if not self._pending:
            return ""
        text = self._decode(self._shown + self._pending)
        if not text.endswith(REPLACEMENT):
            return self._show(text)
        return self._show_whole_part() if len(self._pending) > MAX_BYTES_OF_CHARACTER else ""

    def flush(self) -> str:
        """Return what was held back, a broken character as U+FFFD: no more tokens come."""
        return self._show(self._decode(self._shown + self._pending))

    def _show(self, text: str, *, ends_within_token: bool = False) -> str:
        """Add the pending tokens to the context; return the text that they add."""
        new = text[len(self._shown_text) :]
        if new:  # else special tokens: they are no context for a leading blank
            self._shown, self._shown_text = self._shown + self._pending, text
            if len(self._shown) > MAX_SHOWN:
                self._shown = self._pending
                context = self._decode(self._shown)
                self._shown_text = context.removesuffix(REPLACEMENT) if ends_within_token else context
        self._pending = []
        return new

    def _show_whole_part(self) -> str:
        """Return the text before an unfinished character.

        The character usually begins at one of the last three tokens. If every token ends within a character, the text ends
        within a token. Otherwise the bytes are not UTF-8, and become U+FFFD.
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
    """What may be shown, and the stop string that ended the text, if one did."""

    text: str
    stop: str | None


class StopScreen:
    """Screens one growing text."""

    def __init__(self, stops: tuple[str, ...], *, include_stop: bool = False) -> None:
        """Args: stops without empty strings; include_stop shows the stop string that ended the text."""
        assert all(stops), "an empty stop string would end every text at once"
        self._stops = stops
        self._include = include_stop
        self._hold = max(map(len, stops), default=1) - 1
        self._held = ""

    def push(self, text: str) -> Screened:
        """Take more text; return what may be shown now."""
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
        """Take text that is not screened (before min_tokens); return it with what was held."""
        shown, self._held = self._held + text, ""
        return shown

    def flush(self) -> str:
        """Return what was held back: the text has ended, so it is no stop string."""
        shown, self._held = self._held, ""
        return shown

    def _first_stop(self, seen: str) -> tuple[int, str] | None:
        """Find the stop string that is complete first; of several ending together, the one that starts first."""
        hits = [(seen.find(stop), stop) for stop in self._stops]
        ends = [(at + len(stop), at, stop) for at, stop in hits if at >= 0]
        if not ends:
            return None
        _, at, stop = min(ends)
        return at, stop

    def _longest_head(self, seen: str) -> int:
        """Return how many characters at the end begin a stop string."""
        for length in range(min(self._hold, len(seen)), 0, -1):
            tail = seen[-length:]
            if any(stop.startswith(tail) for stop in self._stops):
                return length
        return 0
