"""English prompts of an exact number of tokens, none of which begins as another does.

The text is Python's own documentation, which the standard library carries. A prompt is a window of it; windows of
a second lap start in between those of the first, so that no block of a prefix cache is ever used twice.
"""

import pydoc_data.topics
from collections.abc import Callable, Sequence

LAPS = 4  # with windows of 128 tokens the starts are 32 tokens apart


class Prompts:
    """Hands out prompts, each once."""

    def __init__(self, encode: Callable[[str], Sequence[int]], num_tokens: int) -> None:
        """Tokenize the text once.

        Args:
            encode: text to token ids.
            num_tokens: of each prompt.
        """
        self._ids = list(encode("\n".join(pydoc_data.topics.topics.values())))
        self._num_tokens = num_tokens
        last = len(self._ids) - num_tokens
        laps = range(0, num_tokens, max(1, num_tokens // LAPS))
        self._starts = iter([start for lap in laps for start in range(lap, last, num_tokens)])

    def take(self, count: int) -> list[list[int]]:
        """Return the next prompts.

        Raises:
            ValueError: there are not so many.
        """
        starts = [start for _, start in zip(range(count), self._starts, strict=False)]
        if len(starts) < count:
            raise ValueError(
                f"the text has no {count} more prompts of {self._num_tokens} tokens; "
                f"lower --rounds or --requests-per-level"
            )
        return [self._ids[start : start + self._num_tokens] for start in starts]
