"""The routers that `--routing-policy` selects: the service's own, and two simpler ones for comparison."""

from collections.abc import Callable, Sequence

import numpy as np

from server.front.prefixes import PrefixMemory
from server.front.router import Router


class _NoPrefixes(PrefixMemory):
    """Remembers nothing."""

    def remember(self, prompt_ids: Sequence[int], rank: int) -> int:
        return 0


class FewestTokens(Router):
    """Picks the rank with the fewest outstanding tokens. It remembers no prefixes."""

    def __init__(self, num_ranks: int) -> None:
        super().__init__(num_ranks)
        self._prefixes = _NoPrefixes()

    def pick(self, prompt_ids: Sequence[int], session: str = "", *, untold: np.ndarray | None = None) -> int:
        return super().pick(prompt_ids, untold=untold)


class RoundRobin(Router):
    """Picks the available ranks in turn, regardless of their load."""

    def __init__(self, num_ranks: int) -> None:
        super().__init__(num_ranks)
        self._num_picked = 0

    def pick(self, prompt_ids: Sequence[int], session: str = "", *, untold: np.ndarray | None = None) -> int:
        ranks = np.flatnonzero(self._receivers())
        self._num_picked += 1
        return int(ranks[(self._num_picked - 1) % len(ranks)])

    def plan_moves(self, prompt_of: Callable[[str], Sequence[int]]) -> dict[str, int]:
        return {}

    def plan_relief(self, prompt_of: Callable[[str], Sequence[int]]) -> dict[str, int]:
        return {}


ROUTERS: dict[str, type[Router]] = {"prefix": Router, "fewest": FewestTokens, "round-robin": RoundRobin}
