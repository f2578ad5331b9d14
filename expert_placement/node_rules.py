"""What every placement of a service must keep to, from what its user wishes and the nodes that there are.

A wish that this service cannot grant (two nodes for every expert, all ranks on one) does not stop it: it is left out,
and said. Groups of a running service keep the homes that they have; a plan from nothing gives them new ones.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from expert_placement.config import EplbConfig
from expert_placement.nodes import Cluster, group_homes, num_nodes_of, present_homes
from expert_placement.placement import Placement
from expert_placement.plan import Rules


class NodeRules(NamedTuple):
    """Rules, and what they leave out of what was wished."""

    rules: Rules
    left_out: tuple[str, ...]  # a sentence for each


def rules_for_plan(config: EplbConfig, hosts: Sequence[str], load: np.ndarray, num_slots: int) -> NodeRules:
    """Rules of a plan from nothing.

    Args:
        hosts: of the ranks, in order.
        load: [layers, experts], heavy groups get their homes first.
        num_slots: of a layer, on all ranks together.
    """
    made = _without_homes(config, hosts, load.shape[1], num_slots)
    cluster = made.rules.cluster
    if not _has_homes(config, cluster, load.shape[1]):
        return made
    return _with_homes(made, group_homes(load, config.num_groups, cluster.num_nodes))


def rules_for_repair(config: EplbConfig, hosts: Sequence[str], current: Placement) -> NodeRules:
    """Rules of a repair of a placement, whose groups keep their homes."""
    made = _without_homes(config, hosts, current.num_experts, current.slot_expert.shape[1])
    cluster = made.rules.cluster
    if not _has_homes(config, cluster, current.num_experts):
        return made
    return _with_homes(made, present_homes(current, config.num_groups, cluster.num_nodes))


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
            f"num_groups is {config.num_groups}; experts must divide by groups and groups by nodes, which are more "
            f"than one, and there are {num_experts} experts on {_nodes(cluster, hosts)}"
        )
    return NodeRules(Rules(cluster=cluster, min_nodes=min_nodes, spread=config.spread), tuple(left_out))


def _with_homes(made: NodeRules, home: np.ndarray) -> NodeRules:
    rules = made.rules
    return made._replace(
        rules=Rules(cluster=rules.cluster, home=home, min_nodes=rules.min_nodes, spread=rules.spread)
    )


def _has_homes(config: EplbConfig, cluster: Cluster, num_experts: int) -> bool:
    groups, nodes = config.num_groups, cluster.num_nodes
    return groups > 0 and nodes > 1 and num_experts % groups == 0 and groups % nodes == 0


def _nodes(cluster: Cluster, hosts: Sequence[str]) -> str:
    if cluster.num_nodes == 1 and len(set(hosts)) > 1:
        return f"1 node ({len(set(hosts))} hosts without equally many ranks in a row count as one)"
    return f"{cluster.num_nodes} node{'s' if cluster.num_nodes > 1 else ''}"
