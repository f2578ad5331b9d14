"""Ranks and nodes, and which node is an expert's home.

Models with group-limited routing (DeepSeek-V3) send a token to a few groups of experts, so a group is best kept on one
node. Only a group's first copies are pinned there; further copies go where there is room. Pinning the copies too, as
DeepSeek EPLB's hierarchical policy does, costs 20 to 100 % of imbalance on real loads (research/placement).
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from expert_placement.placement import EMPTY, Placement


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """How many ranks there are, and on how many nodes: rank r is on node r * num_nodes // num_ranks."""

    num_ranks: int
    num_nodes: int = 1

    def __post_init__(self) -> None:
        """Check the numbers.

        Raises:
            ValueError: ranks do not divide by nodes.
        """
        if self.num_ranks < 1 or self.num_nodes < 1 or self.num_ranks % self.num_nodes:
            raise ValueError(
                f"{self.num_ranks} ranks on {self.num_nodes} nodes: there must be at least one of each, and as many "
                f"ranks on every node"
            )

    @property
    def node_of_rank(self) -> np.ndarray:
        """[ranks] int64."""
        return np.arange(self.num_ranks) * self.num_nodes // self.num_ranks


def num_nodes_of(hosts: Sequence[str]) -> int:
    """Count the nodes of ranks that say their hosts, in order of ranks.

    Returns:
        1 as well where nodes have not equally many ranks, one after the other: no `Cluster` describes that.
    """
    found = len(set(hosts))
    size = len(hosts) // max(found, 1)
    blocks = [set(hosts[begin : begin + size]) for begin in range(0, len(hosts), max(size, 1))]
    return found if len(blocks) == found and all(len(block) == 1 for block in blocks) else 1


def group_homes(load: np.ndarray, num_groups: int, num_nodes: int) -> np.ndarray:
    """Give every group of experts a home: as many groups for each node, the heaviest first to the lightest node.

    Args:
        load: [layers, experts]; group g is experts [g * experts // num_groups, ...).

    Returns:
        [layers, experts] int64: the home node of each expert.

    Raises:
        ValueError: experts do not divide by groups, or groups by nodes.
    """
    layers, experts = load.shape
    if num_groups < 1 or experts % num_groups or num_groups % num_nodes:
        raise ValueError(
            f"{experts} experts in {num_groups} groups on {num_nodes} nodes: experts must divide by groups, and "
            f"groups by nodes"
        )
    group_load = load.reshape(layers, num_groups, -1).sum(axis=2)
    home = np.empty((layers, num_groups), dtype=np.int64)
    for layer in range(layers):
        carried, room = np.zeros(num_nodes), np.full(num_nodes, num_groups // num_nodes)
        for group in np.argsort(-group_load[layer], kind="stable").tolist():
            node = int(np.argmin(np.where(room > 0, carried, np.inf)))
            home[layer, group] = node
            carried[node] += group_load[layer, group]
            room[node] -= 1
    return np.repeat(home, experts // num_groups, axis=1)


def present_homes(placement: Placement, num_groups: int, num_nodes: int) -> np.ndarray:
    """The homes that a placement was made with: a node that has a copy of every expert of the group.

    Returns:
        [layers, experts] int64; -1 where no node has the whole group.
    """
    cluster = Cluster(num_ranks=placement.num_ranks, num_nodes=num_nodes)
    node = np.repeat(cluster.node_of_rank, placement.slots_per_rank)
    size = placement.num_experts // num_groups
    homes = np.full((placement.num_layers, num_groups), -1, dtype=np.int64)
    for layer, row in enumerate(placement.slot_expert):
        copies = np.zeros((num_nodes, placement.num_experts), dtype=np.int64)
        held = row != EMPTY
        np.add.at(copies, (node[held], row[held]), 1)
        by_group = copies.reshape(num_nodes, num_groups, size)
        whole = by_group.min(axis=2) > 0
        # The roomiest fit: a node has more copies of its own groups than of those that visit.
        best = np.where(whole, by_group.sum(axis=2), -1).argmax(axis=0)
        homes[layer] = np.where(whole.any(axis=0), best, -1)
    return np.repeat(homes, size, axis=1)
