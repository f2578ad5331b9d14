"""Routers to compare: the service's own, and two that know less."""

from collections.abc import Sequence

import numpy as np

from server.front.router import Router


class FewestTokens(Router):
    """The rank with the fewest outstanding tokens, whatever prefixes it holds."""

    def pick(self, prompt_ids: Sequence[int], session: str = "", *, untold: np.ndarray | None = None) -> int:
        """See `Router.pick`."""
        return super().pick((), untold=untold)


class RoundRobin(Router):
    """One rank after the other, whatever they have to do."""

    def __init__(self, num_ranks: int) -> None:
        super().__init__(num_ranks)
        self._num_ranks, self._num_picked = num_ranks, 0

    def pick(self, prompt_ids: Sequence[int], session: str = "", *, untold: np.ndarray | None = None) -> int:
        """Of ranks that are all there."""
        self._num_picked += 1
        return (self._num_picked - 1) % self._num_ranks


ROUTERS: dict[str, type[Router]] = {"prefix": Router, "fewest": FewestTokens, "round-robin": RoundRobin}
