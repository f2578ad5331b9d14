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

Entry = dict[str, Any]  # in the form of `chat_logprobs`


class _Waiting(NamedTuple):
    """A token that no text contains yet, or only in part."""

    entry: Entry
    spelling: bytes
    is_special: bool
    is_rest: bool = False  # the previous text contains its beginning


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

    def take(self, text: str) -> list[Entry]:
        """Return the entries of a text that follows the previous one. Forgets the tokens before it."""
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

    def extend(self, whole: list[Entry], taken: Sequence[Entry]) -> None:
        """Append the last entries to the earlier ones. Rejoins a token that was cut between them."""
        if whole and taken and self._goes_on:
            before = whole.pop()
            whole.append(_part_of(before, bytes([*before["bytes"], *taken[0]["bytes"]])))
            taken = taken[1:]
        whole.extend(taken)

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
