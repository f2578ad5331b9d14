"""Drafts from earlier text: what followed the newest few tokens of a text before.

An index maps each run of `key_tokens` tokens to the places after it, with a dictionary entry per token. Candidates are
the places after the text's last run. Only those that share the most tokens with the text's end are used.

Ideas: prompt lookup (Saxena, 2023) for one text; suffix decoding (Oliaro et al., 2024) for many, which takes the
frequency of a continuation as its probability. Rejected: the latter's suffix tree, which needs a node per token and
depth (24 in vLLM). A bounded number of candidates gives the same drafts except for the most frequent beginnings.
"""

from collections import Counter, OrderedDict, deque
from collections.abc import Sequence
from typing import NamedTuple

MOST_CANDIDATES = 64  # the newest places examined


class Continuation(NamedTuple):
    """A place at which a text continued, and how many tokens before it match."""

    token_ids: Sequence[int]
    place: int  # of the next token
    length: int


class TextIndex:
    """Growing texts, and the places of equal tokens in them."""

    def __init__(self, key_tokens: int) -> None:
        self._key_tokens = key_tokens
        self._texts: OrderedDict[int, list[int]] = OrderedDict()  # oldest first
        # The newest places after these tokens: number of the text, and the number of tokens before the place.
        self._places: dict[tuple[int, ...], deque[tuple[int, int]]] = {}

    def __len__(self) -> int:
        """Number of texts."""
        return len(self._texts)

    def extend(self, number: int, token_ids: Sequence[int]) -> None:
        """Append tokens to a text. Creates the text if it is new."""
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
        """Forget the oldest text. No older one exists, so its places come first in every list."""
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
        """Return the places after tokens equal to those at the end of `end`, newest first.

        Args:
            end: End of a text, which need not be in the index.
            longest: Most tokens to compare.
        """
        size, found = self._key_tokens, []
        if len(end) < size:
            return []
        for number, place in reversed(self._places.get(tuple(end[-size:]), ())):
            text, length = self._texts[number], size
            if place == len(text):  # nothing follows yet
                continue
            most = min(longest, place, len(end))
            while length < most and text[place - 1 - length] == end[-1 - length]:
                length += 1
            found.append(Continuation(text, place, length))
        return found


def continue_newest(candidates: Sequence[Continuation], most: int) -> list[int]:
    """Draft from the place with the most matching tokens. Of several, use the newest with enough text after it.

    Args:
        candidates: Newest first.
        most: Most drafts.
    """
    if not candidates:
        return []
    length = max(each.length for each in candidates)
    best = [each for each in candidates if each.length == length]
    whole = (each for each in best if each.place + most <= len(each.token_ids))
    chosen = next(whole, best[-1])
    return list(chosen.token_ids[chosen.place : chosen.place + most])


def continue_likeliest(candidates: Sequence[Continuation], most: int, least_share: float) -> list[int]:
    """Draft the most frequent continuation of the places with the most matching tokens, while it is likely.

    Args:
        candidates: Newest first; among equally frequent continuations the newest is used.
        most: Most drafts.
        least_share: Least share of these places that continued with the drafts so far.
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
