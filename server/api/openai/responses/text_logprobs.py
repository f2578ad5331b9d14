"""Find the log-probabilities of exactly the tokens in an output text.

Parsers remove reasoning, calls and markup from the model's output, and return text, not tokens. The tokens of a text are
therefore found by their bytes, at the first match after the previous text. The first match leaves all bytes that a later text
needs: the parser may hold back a second copy of the same text ("<tool<tool", if "<tool_call>" is a tag).
A token that is only partly in the text (a trimmed space, a tag that begins within it) is cut to that part, so the tokens
spell exactly the text.

Chats instead show all tokens in `logprobs.content`, including those of reasoning and calls, as OpenAI and vLLM do.
"""

from collections.abc import Callable, Collection, Sequence
from typing import Any, NamedTuple

from scheduler.policy.request import Logprobs
from server.http.json_writer import encode_json

Entry = dict[str, Any]  # in the form of `chat_logprobs`


class _Waiting(NamedTuple):
    """A token that no text contains yet, or only in part."""

    entry: Entry
    spelling: bytes
    is_special: bool
    is_rest: bool = False  # the previous text contains its beginning


class TextEntries:
    """The entries of a growing text. Each is encoded once, because several events and the response repeat it."""

    def __init__(self) -> None:
        self.encoded: list[str] = []
        self.num_chars = 0
        self._last: Entry | None = None

    def add(self, taken: Sequence[Entry], *, goes_on: bool) -> list[str]:
        """Append entries, and return them encoded. With `goes_on`, the first one is the rest of the last token so far."""
        encoded = [encode_json(each) for each in taken]
        last = self._last
        if encoded and last is not None and goes_on:
            rejoined = _part_of(last, bytes([*last["bytes"], *taken[0]["bytes"]]))
            self.encoded[-1] = encode_json(rejoined)
            taken = [rejoined, *taken[1:]]
            self.encoded += encoded[1:]
        else:
            self.encoded += encoded
        self._last = taken[-1] if taken else last
        self.num_chars += sum(map(len, encoded))
        return encoded


class TextLogprobs:
    """The log-probabilities of one answer's output text."""

    def __init__(
        self, spell: Callable[[Sequence[Logprobs]], list[Entry]], special_ids: Collection[int] = ()
    ) -> None:
        """Args: spell returns the entries of tokens; special_ids are tokens that a text may omit."""
        self._spell = spell
        self._special_ids = frozenset(special_ids)
        self._waiting: list[_Waiting] = []
        self._goes_on = False  # the last text begins within a token

    def push(self, logprobs: Sequence[Logprobs]) -> None:
        """Add the log-probabilities of the next tokens."""
        for each, entry in zip(logprobs, self._spell(logprobs), strict=True):
            spelling = bytes(entry["bytes"])
            self._waiting.append(_Waiting(entry, spelling, each.token_id in self._special_ids))

    def take(self, text: str, whole: TextEntries) -> list[str]:
        """Return the entries of a text that follows the previous one, encoded, and append them to those of the whole text.

        Forgets the tokens before it. Rejoins a token that was cut between two texts.
        """
        taken = self._take(text)
        return whole.add(taken, goes_on=self._goes_on)

    def _take(self, text: str) -> list[Entry]:
        if not self._waiting:
            return []
        shown = [each for each in self._waiting if not each.is_special]
        for tokens in (self._waiting, shown):
            at = b"".join(each.spelling for each in tokens).find(text.encode())
            if at >= 0:
                return self._cut(tokens, at, at + len(text.encode()))
        self._goes_on = False
        # Invalid UTF-8 appears in the text as U+FFFD, so the tokens cannot be matched: return all of them.
        found = [each.entry for each in shown]
        self.drop()
        return found

    def drop(self) -> None:
        """Forget the tokens so far: they became reasoning or a call."""
        self._waiting = []

    def _cut(self, tokens: Sequence[_Waiting], start: int, end: int) -> list[Entry]:
        """Return the entries of the bytes from start to end, and keep the bytes after them."""
        found: list[Entry] = []
        kept: list[_Waiting] = []
        begin = 0
        self._goes_on = False
        for each in tokens:
            first, last = max(start - begin, 0), end - begin
            begin += len(each.spelling)
            part, rest = each.spelling[first : max(last, 0)], each.spelling[max(last, 0) :]
            if part:
                self._goes_on |= not found and each.is_rest
                found.append(_part_of(each.entry, part))
            if rest:
                kept.append(each._replace(spelling=rest, is_rest=bool(part)))
        self._waiting = kept
        return found


def _part_of(entry: Entry, part: bytes) -> Entry:
    if len(part) == len(entry["bytes"]):
        return entry
    return {**entry, "token": part.decode(errors="replace"), "bytes": list(part)}
