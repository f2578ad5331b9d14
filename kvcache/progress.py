"""How far the running step is: how many layers have written its rows to the pages.

Threads that copy blocks while a step fills them read it. One word holds the number of the run and its layers, so both
change together. The number changes when a run begins and again when it ends. A thread that finds the number of a run before
and after a copy has copied what that run had written.
"""

import contextlib
from collections.abc import Iterator

import numpy as np

_LAYER_BITS = 16
WORD_BYTES = 8


class Progress:
    """The progress of one cache's steps. One thread runs steps; any thread reads."""

    def __init__(self) -> None:
        self._words = np.zeros(2, np.int64)  # the word, and its value without layers

    @property
    def address(self) -> int:
        """Address of the word. The next word is its value without layers; compiled code adds the number of layers to it."""
        return int(self._words.ctypes.data)

    @property
    def run(self) -> int:
        """Number of the present run: odd while a step runs, even between two steps."""
        return int(self._words[0]) >> _LAYER_BITS

    def layers_of(self, run: int) -> int:
        """Return how many of the first layers have written their rows of a run. 0 if it has not begun or has ended."""
        word = int(self._words[0])
        return word & ((1 << _LAYER_BITS) - 1) if word >> _LAYER_BITS == run else 0

    def note(self, num_layers: int) -> None:
        """Note that the first layers have written all their rows of the running step."""
        self._words[0] = self._words[1] + num_layers

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """Begin a run, and end it also if the step fails."""
        self._next()
        try:
            yield
        finally:
            self._next()

    def _next(self) -> None:
        self._words[1] += 1 << _LAYER_BITS
        self._words[0] = self._words[1]
