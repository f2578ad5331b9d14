"""The routers that `--routing-policy` selects: the service's own, and two simpler ones for comparison."""

from collections.abc import Callable, Mapping, Sequence

import numpy as np

from server.front.routing.loads import SharedLoads
from server.front.routing.prefixes import PrefixMemory
from server.front.routing.router import Router
from server.options.pools import PREFILL_THRESHOLD


class _NoPrefixes(PrefixMemory):
    """Remembers nothing."""

    def remember(self, prompt_ids: Sequence[int], rank: int) -> int:
        return 0


class FewestTokens(Router):
    """Picks the rank with the fewest outstanding tokens. It remembers no prefixes."""

    def __init__(
        self,
        num_ranks: int,
        *,
        prefill_threshold: int = PREFILL_THRESHOLD,
        shared: SharedLoads | None = None,
    ) -> None:
        super().__init__(num_ranks, prefill_threshold=prefill_threshold, shared=shared)
        self._prefixes = _NoPrefixes()

    def _choose(
        self, held: Mapping[int, int], session: str, untold: np.ndarray | None, among: np.ndarray
    ) -> int:
        return super()._choose(held, "", untold, among)


class RoundRobin(Router):
    """Picks the available ranks in turn, regardless of their load."""

    def __init__(
        self,
        num_ranks: int,
        *,
        prefill_threshold: int = PREFILL_THRESHOLD,
        shared: SharedLoads | None = None,
    ) -> None:
        super().__init__(num_ranks, prefill_threshold=prefill_threshold, shared=shared)
        self._num_picked = 0
        self._picked_at = np.zeros(num_ranks, dtype=np.int64)  # count of picks at the rank's last one

    def grow(self, num_ranks: int) -> None:
        super().grow(num_ranks)
        more = self.num_ranks - len(self._picked_at)
        self._picked_at = np.append(self._picked_at, np.zeros(more, dtype=np.int64))

    def _choose(
        self, held: Mapping[int, int], session: str, untold: np.ndarray | None, among: np.ndarray
    ) -> int:
        ranks = np.flatnonzero(among)
        rank = int(ranks[self._picked_at[ranks].argmin()])
        self._num_picked += 1
        self._picked_at[rank] = self._num_picked
        return rank

    def plan_moves(self, prompt_of: Callable[[str], Sequence[int]]) -> dict[str, int]:
        return {}

    def plan_relief(self, prompt_of: Callable[[str], Sequence[int]]) -> dict[str, int]:
        return {}


ROUTERS: dict[str, type[Router]] = {"prefix": Router, "fewest": FewestTokens, "round-robin": RoundRobin}
