"""How many of an answer's tokens were reasoning.

Parsers give text, not tokens. A piece that became reasoning alone counts whole, with the markup before it; only in a
piece that became several kinds is the reasoning's own text counted again.
"""

from collections.abc import Callable, Sequence

from server.api.parsers.deltas import Delta, ReasoningDelta


class ReasoningCount:
    """The count for one growing answer."""

    def __init__(self, count_tokens: Callable[[str], int]) -> None:
        """Args: count_tokens tokenizes a text and returns how many tokens it has."""
        self.num_tokens = 0
        self._count_tokens = count_tokens
        self._num_pending = 0  # tokens whose text is held back

    def note(self, deltas: Sequence[Delta], num_tokens: int) -> None:
        """Take note of a piece: what it became, and how many tokens it had."""
        self._num_pending += num_tokens
        if not deltas:
            return
        thoughts = [delta.text for delta in deltas if isinstance(delta, ReasoningDelta)]
        if len(thoughts) == len(deltas):
            self.num_tokens += self._num_pending
        elif thoughts:
            self.num_tokens += min(self._num_pending, self._count_tokens("".join(thoughts)))
        self._num_pending = 0
