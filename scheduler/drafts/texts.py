"""How texts went on before: from the newest few tokens of a text to drafts of what comes next.

A text's places are indexed by the tokens before them, `KEY` at a time, as they come: a dictionary entry per token.
Candidates are the places behind the same key, of which those count that share the most tokens with the text's end.

Ideas: prompt lookup (Saxena, 2023) for one text; suffix decoding (Oliaro et al., 2024) for many, with how often a text went on in
a way as the chance that it does again. Rejected from the latter: a suffix tree, which costs a node per token and depth
(24 in vLLM), where a bounded number of candidates gives the same drafts of all but the most frequent beginnings.
"""

from collections import Counter, OrderedDict, deque
from collections.abc import Sequence
from typing import NamedTuple

MOST_CANDIDATES = 64  # the newest places that are looked at


class Continuation(NamedTuple):
    """A place at which a text went on, and how much before it is alike."""

    token_ids: Sequence[int]
    place: int  # of the token that came next
    length: int


class TextIndex:
    """Texts that grow, and where the same tokens occurred in them."""

    def __init__(self, key_tokens: int) -> None:
        self._key_tokens = key_tokens
        self._texts: OrderedDict[int, list[int]] = OrderedDict()  # the oldest first
        # The newest places behind these tokens: which text, and how many tokens of it come before.
        self._places: dict[tuple[int, ...], deque[tuple[int, int]]] = {}

    def __len__(self) -> int:
        """Number of texts."""
        return len(self._texts)

    def extend(self, number: int, token_ids: Sequence[int]) -> None:
        """Take tokens at the end of a text, which begins with them if it is a new one."""
        size, text = self._key_tokens, self._texts.setdefault(number, [])
        for token_id in token_ids:
            text.append(token_id)
            if len(text) >= size:
                key = tuple(text[-size:])
                places = self._places.get(key)
                if places is None:
                    places = self._places[key] = deque(maxlen=MOST_CANDIDATES)
                places.append((number, len(text)))

    def forget_oldest(self) -> None:
        """Forget the text that began first; no older one is there, so that its places are the first everywhere."""
        number, text = self._texts.popitem(last=False)
        size = self._key_tokens
        for place in range(size, len(text) + 1):
            key = tuple(text[place - size : place])
            places = self._places.get(key)
            while places and places[0][0] == number:
                places.popleft()
            if places is not None and not places:
                del self._places[key]

    def candidates(self, end: Sequence[int], longest: int) -> list[Continuation]:
        """Where texts went on behind tokens that `end` ends with, the newest places first.

        Args:
            end: of a text, one of these or another.
            longest: tokens to compare.
        """
        size, found = self._key_tokens, []
        if len(end) < size:
            return []
        for number, place in reversed(self._places.get(tuple(end[-size:]), ())):
            text, length = self._texts[number], size
            if place == len(text):  # nothing came next yet
                continue
            most = min(longest, place, len(end))
            while length < most and text[place - 1 - length] == end[-1 - length]:
                length += 1
            found.append(Continuation(text, place, length))
        return found


def continue_newest(candidates: Sequence[Continuation], most: int) -> list[int]:
    """Draft what came next where the most tokens are alike; of several such places the newest, unless its text ends there.

    Args:
        candidates: the newest first.
        most: drafts.
    """
    if not candidates:
        return []
    length = max(each.length for each in candidates)
    best = [each for each in candidates if each.length == length]
    whole = (each for each in best if each.place + most <= len(each.token_ids))
    chosen = next(whole, best[-1])
    return list(chosen.token_ids[chosen.place : chosen.place + most])


def continue_likeliest(candidates: Sequence[Continuation], most: int, least_share: float) -> list[int]:
    """Draft the most frequent way on of the places where the most tokens are alike, while it is likely.

    Args:
        candidates: the newest first, which goes before older ones that are as frequent.
        most: drafts.
        least_share: of all those places, that went on as the drafts do so far.
    """
    length = max((each.length for each in candidates), default=0)
    alike = [each for each in candidates if each.length == length]
    total, drafts = len(alike), list[int]()
    while len(drafts) < most:
        at = len(drafts)
        next_ids = [
            each.token_ids[each.place + at] for each in alike if each.place + at < len(each.token_ids)
        ]
        if not next_ids:
            break
        token_id, count = Counter(next_ids).most_common(1)[0]
        if count < least_share * total:
            break
        drafts.append(token_id)
        alike = [
            each
            for each in alike
            if each.place + at < len(each.token_ids) and each.token_ids[each.place + at] == token_id
        ]
    return drafts
