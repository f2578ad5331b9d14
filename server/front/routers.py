"""What `--routing-policy` names: the service's own router, and two to compare it with that know less."""

from collections.abc import Callable, Sequence

import numpy as np

from server.front.router import Router


class FewestTokens(Router):
    """The rank with the fewest outstanding tokens, whatever prefixes it holds: none are remembered."""

    def pick(self, prompt_ids: Sequence[int], session: str = "", *, untold: np.ndarray | None = None) -> int:
        """See `Router.pick`."""
        return super().pick(prompt_ids, untold=untold)

    def _remember(self, prompt_ids: Sequence[int], rank: int) -> int:
        return 0


class RoundRobin(Router):
    """One rank after the other, whatever they have to do."""

    def __init__(self, num_ranks: int) -> None:
        super().__init__(num_ranks)
        self._num_picked = 0

    def pick(self, prompt_ids: Sequence[int], session: str = "", *, untold: np.ndarray | None = None) -> int:
        """Of ranks that are there. There must be one."""
        ranks = np.flatnonzero(self._is_available)
        self._num_picked += 1
        return int(ranks[(self._num_picked - 1) % len(ranks)])

    def plan_moves(self, prompt_of: Callable[[str], Sequence[int]]) -> dict[str, int]:
        """Move nothing."""
        return {}


ROUTERS: dict[str, type[Router]] = {"prefix": Router, "fewest": FewestTokens, "round-robin": RoundRobin}
