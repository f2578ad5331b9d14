"""Assign ranks to a node that runs its own torchrun and wants to join (`--join`).

Ranks that came together under one torchrun are a node. A new node takes the place of a node that is entirely away and has
the same number of ranks. If there are several, it gets the one that has been away longest, because an engine that was killed
a moment ago is usually being restarted on its node. An assigned place is reserved for a while, so that two new nodes do not
load the same experts; after that another node may try. The node that attaches first keeps the rank, and the other is
refused. Uses no network and no clock.
"""

from collections import defaultdict
from collections.abc import Mapping

from server.link.messages import Claim, Claimed

RESERVED_S = 60.0


class Nodes:
    """The nodes of one service."""

    def __init__(self, num_ranks: int) -> None:
        self._num_ranks = num_ranks
        self._node_of: dict[int, str] = {}  # by rank: the node that attached it last
        self._num_restarts: dict[int, int] = defaultdict(int)  # by rank: the largest number seen
        self._given: dict[str, tuple[tuple[int, ...], float]] = {}  # by new node: its ranks, and since when

    def note(self, rank: int, node: str, num_restarts: int) -> None:
        """Record that a rank has attached."""
        self._node_of[rank] = node
        self._num_restarts[rank] = max(self._num_restarts[rank], num_restarts)

    def claim(self, claim: Claim, missing: Mapping[int, float], now_s: float) -> Claimed:
        """Assign a rank to a worker of a new node.

        Args:
            missing: The ranks that are away, and since when.
        """
        ranks, _ = self._given.get(claim.node, ((), 0.0))
        if not ranks or not set(ranks) <= missing.keys() | self._ranks_of(claim.node):
            away = self._away(missing, now_s)
            fitting = [each for each in away if len(each) == claim.num_ranks]
            if not fitting:
                return self._refuse(claim, away)
            ranks = min(fitting, key=lambda each: max(missing[rank] for rank in each))
            self._given[claim.node] = ranks, now_s
        rank = ranks[claim.local_rank]
        return Claimed(rank, self._num_ranks, self._num_restarts[rank] + 1)

    def _ranks_of(self, node: str) -> set[int]:
        return {rank for rank, its_node in self._node_of.items() if its_node == node}

    def _away(self, missing: Mapping[int, float], now_s: float) -> list[tuple[int, ...]]:
        """Return the ranks of each node that is entirely away and not reserved."""
        nodes: dict[str, list[int]] = defaultdict(list)
        for rank in range(self._num_ranks):
            nodes[self._node_of.get(rank, "")].append(rank)
        self._given = {node: given for node, given in self._given.items() if now_s - given[1] < RESERVED_S}
        given = {rank for ranks, _ in self._given.values() for rank in ranks}
        return [
            tuple(ranks)
            for ranks in nodes.values()
            if missing.keys() >= set(ranks) and not given & set(ranks)
        ]

    def _refuse(self, claim: Claim, away: list[tuple[int, ...]]) -> Claimed:
        asked = f"a node with --nproc-per-node {claim.num_ranks}"
        if not away:
            reason = f"no node is away, so {asked} cannot join"
            return Claimed(-1, self._num_ranks, 0, reason, may_come=True)
        sizes = ", ".join(sorted({str(len(ranks)) for ranks in away}))
        reason = f"{asked} cannot join: missing nodes had {sizes}; give torchrun that --nproc-per-node"
        return Claimed(-1, self._num_ranks, 0, reason)
