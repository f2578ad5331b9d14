"""Ranks and nodes, and the rules that a placement must keep on them.

Models with group-limited routing (DeepSeek-V3) send a token to few groups of experts, so a group is best kept on one
node. Only a group's first copies are pinned there; further copies go to ranks with room. Pinning the copies too, as
DeepSeek EPLB's hierarchical policy does, costs 20 to 100 % of imbalance on real loads (research/placement).

A rule of `--eplb-config` that this service cannot keep (such as two nodes per expert with all ranks on one node) does
not stop it: the rule is dropped and reported. In a running service, groups keep their homes; a plan from nothing gives
them new ones.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from expert_placement.config import EplbConfig
from expert_placement.placement import EMPTY, Placement


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """The number of ranks and nodes. Rank r is on node r * num_nodes // num_ranks."""

    num_ranks: int
    num_nodes: int = 1

    def __post_init__(self) -> None:
        """Check the numbers.

        Raises:
            ValueError: Ranks do not divide by nodes.
        """
        if self.num_ranks < 1 or self.num_nodes < 1 or self.num_ranks % self.num_nodes:
            raise ValueError(
                f"{self.num_ranks} ranks on {self.num_nodes} nodes: there must be at least one of each, and the same "
                f"number of ranks on every node"
            )

    @property
    def node_of_rank(self) -> np.ndarray:
        """The node of each rank: [ranks] int64."""
        return np.arange(self.num_ranks) * self.num_nodes // self.num_ranks


@dataclass(frozen=True, kw_only=True)
class Rules:
    """The rules that every placement must keep.

    Attributes:
        cluster: Ranks and nodes.
        home: [layers, experts] the node that keeps a copy of the expert, or -1; see `group_homes`.
        min_nodes: Least number of nodes with a copy of each expert; one node fewer may be lost.
        spread: Copies go to different nodes while there are nodes without one.
        even: Copies share evenly, as programs without shares assume.
    """

    cluster: Cluster
    home: np.ndarray | None = None
    min_nodes: int = 1
    spread: bool = False
    even: bool = False

    def __post_init__(self) -> None:
        """Check what does not depend on a load.

        Raises:
            ValueError: `min_nodes` exceeds the number of nodes.
        """
        if not 1 <= self.min_nodes <= self.cluster.num_nodes:
            raise ValueError(
                f"min_nodes is {self.min_nodes}; it must be from 1 to the number of nodes, {self.cluster.num_nodes}"
            )


class NodeRules(NamedTuple):
    """The rules that a service can keep, and those it cannot."""

    rules: Rules
    left_out: tuple[str, ...]  # a sentence per dropped rule


def num_nodes_of(hosts: Sequence[str]) -> int:
    """Count the nodes in a list of the ranks' hosts, in order of ranks.

    Returns:
        The number; 1 if nodes differ in size or a node's ranks are not consecutive, which no `Cluster` describes.
    """
    found = len(set(hosts))
    size = len(hosts) // max(found, 1)
    blocks = [set(hosts[begin : begin + size]) for begin in range(0, len(hosts), max(size, 1))]
    return found if len(blocks) == found and all(len(block) == 1 for block in blocks) else 1


def group_homes(load: np.ndarray, num_groups: int, num_nodes: int) -> np.ndarray:
    """Give every group of experts a home node: the same number per node, the heaviest first to the lightest node.

    Args:
        load: [layers, experts]; group g is experts [g * experts // num_groups, ...).

    Returns:
        [layers, experts] int64: the home node of each expert.

    Raises:
        ValueError: Experts do not divide by groups, or groups by nodes.
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
    """Find the homes in an existing placement: nodes that have a copy of every expert of a group.

    Returns:
        [layers, experts] int64; -1 if no node has the whole group.
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
        # If several nodes have it, take the one with most copies: more of its own groups than of visiting ones.
        best = np.where(whole, by_group.sum(axis=2), -1).argmax(axis=0)
        homes[layer] = np.where(whole.any(axis=0), best, -1)
    return np.repeat(homes, size, axis=1)


def rules_for_plan(config: EplbConfig, hosts: Sequence[str], load: np.ndarray, num_slots: int) -> NodeRules:
    """Return the rules for a plan from nothing.

    Args:
        hosts: Hosts of the ranks, in order.
        load: [layers, experts]; heavy groups get their homes first.
        num_slots: Slots of a layer, on all ranks together.
    """
    made = _without_homes(config, hosts, load.shape[1], num_slots)
    cluster = made.rules.cluster
    if not _has_homes(config, cluster, load.shape[1]):
        return made
    home = group_homes(load, config.num_groups, cluster.num_nodes)
    return made._replace(rules=replace(made.rules, home=home))


def rules_for_repair(config: EplbConfig, hosts: Sequence[str], current: Placement) -> NodeRules:
    """Return the rules for a repair of a placement. Its groups keep their homes."""
    made = _without_homes(config, hosts, current.num_experts, current.slot_expert.shape[1])
    cluster = made.rules.cluster
    if not _has_homes(config, cluster, current.num_experts):
        return made
    home = present_homes(current, config.num_groups, cluster.num_nodes)
    return made._replace(rules=replace(made.rules, home=home))


def _without_homes(config: EplbConfig, hosts: Sequence[str], num_experts: int, num_slots: int) -> NodeRules:
    cluster = Cluster(num_ranks=len(hosts), num_nodes=num_nodes_of(hosts))
    possible = max(1, min(cluster.num_nodes, num_slots // num_experts))
    min_nodes = min(config.min_nodes, possible)
    left_out = []
    if min_nodes < config.min_nodes:
        left_out.append(
            f"min_nodes is {config.min_nodes}, but {num_slots} slots for {num_experts} experts on "
            f"{_nodes(cluster, hosts)} allow {possible}"
        )
    if config.spread and cluster.num_nodes == 1:
        left_out.append(f"spread needs several nodes; there is {_nodes(cluster, hosts)}")
    if config.num_groups and not _has_homes(config, cluster, num_experts):
        left_out.append(
            f"num_groups is {config.num_groups}; it needs several nodes, experts must divide by groups and groups by "
            f"nodes, and there are {num_experts} experts on {_nodes(cluster, hosts)}"
        )
    return NodeRules(Rules(cluster=cluster, min_nodes=min_nodes, spread=config.spread), tuple(left_out))


def _has_homes(config: EplbConfig, cluster: Cluster, num_experts: int) -> bool:
    groups, nodes = config.num_groups, cluster.num_nodes
    return groups > 0 and nodes > 1 and num_experts % groups == 0 and groups % nodes == 0


def _nodes(cluster: Cluster, hosts: Sequence[str]) -> str:
    if cluster.num_nodes == 1 and len(set(hosts)) > 1:
        return f"1 node ({len(set(hosts))} hosts without the same number of consecutive ranks count as one)"
    return f"{cluster.num_nodes} node{'s' if cluster.num_nodes > 1 else ''}"
