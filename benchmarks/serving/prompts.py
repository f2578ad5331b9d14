"""English prompts of an exact number of tokens, no two of which begin alike, so that no prefix cache helps."""

from collections.abc import Callable, Sequence

from server.clients.bench.prompts import Passages, documentation


class ExactPrompts:
    """Hands out prompts, each once."""

    def __init__(self, encode: Callable[[str], Sequence[int]], num_tokens: int) -> None:
        """Tokenize the text once.

        Args:
            encode: text to token ids.
            num_tokens: of each prompt.
        """
        self._passages = Passages(encode(documentation()))
        self._num_tokens = num_tokens

    def take(self, count: int) -> list[list[int]]:
        """Return the next prompts."""
        return [self._passages.take(self._num_tokens) for _ in range(count)]
