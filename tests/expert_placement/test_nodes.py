"""Rules about nodes: applied if the hosts allow it, reported if not."""

import numpy as np
import pytest

from expert_placement.config import EplbConfig
from expert_placement.nodes import (
    Cluster,
    Rules,
    group_homes,
    num_nodes_of,
    present_homes,
    rules_for_plan,
    rules_for_repair,
)
from expert_placement.placement import linear_placement
from expert_placement.plan import plan, repair
from expert_placement.tools.simulate import away_share

TWO = ("a", "a", "b", "b")
LOAD = np.random.default_rng(1).lognormal(0, 0.8, (3, 16)) * 100


@pytest.mark.parametrize(
    ("hosts", "nodes"),
    [
        (TWO, 2),
        (("a",) * 4, 1),
        (("a", "b", "c", "d"), 4),
        (("a", "b", "a", "b"), 1),
        (("a", "b", "b", "b"), 1),
        (("a",), 1),
    ],
)
def test_nodes_are_equal_blocks_of_hosts_or_one(hosts: tuple[str, ...], nodes: int) -> None:
    assert num_nodes_of(hosts) == nodes


def test_every_expert_is_on_two_nodes_after_a_plan_and_stays_so_after_a_repair() -> None:
    config = EplbConfig(min_nodes=2, spread=True)
    made = plan(LOAD, 10, rules_for_plan(config, TWO, LOAD, 40).rules).placement
    mended = repair(LOAD[::-1].copy(), made, rules_for_repair(config, TWO, made).rules).placement
    for placement in (made, mended):
        for row in placement.slot_expert:
            assert set(range(16)) <= set(row[:20]) and set(range(16)) <= set(row[20:])


def test_groups_keep_their_homes_in_a_repair() -> None:
    config = EplbConfig(num_groups=4)
    made = plan(LOAD, 6, rules_for_plan(config, TWO, LOAD, 24).rules).placement
    rules = rules_for_repair(config, TWO, made).rules
    assert rules.home is not None and rules.home.min() >= 0
    mended = repair(LOAD[::-1].copy(), made, rules).placement
    for row, home in zip(mended.slot_expert, rules.home, strict=True):
        for node in (0, 1):
            assert set(np.flatnonzero(home == node)) <= set(row[12 * node : 12 * node + 12])


def test_wishes_that_cannot_be_granted_are_left_out_and_said() -> None:
    config = EplbConfig(min_nodes=3, spread=True, num_groups=5)
    rules, left_out = rules_for_repair(config, ("a",) * 4, linear_placement(3, 16, 4))
    assert (rules.min_nodes, rules.home) == (1, None)
    assert "min_nodes is 3, but 16 slots for 16 experts on 1 node allow 1" in left_out[0]
    assert "spread needs several nodes" in left_out[1] and "num_groups is 5" in left_out[2]
    _, left_out = rules_for_plan(EplbConfig(min_nodes=2), TWO, LOAD, 20)
    assert "20 slots for 16 experts on 2 nodes allow 1" in left_out[0], "too few slots, not too few nodes"
    _, left_out = rules_for_plan(EplbConfig(spread=True), ("a", "b", "a", "b"), LOAD, 20)
    assert "2 hosts without the same number of consecutive ranks count as one" in left_out[0]


def test_groups_get_homes_of_equal_size_and_are_found_again() -> None:
    load = np.exp(np.random.default_rng(0).normal(0, 1, (3, 32)))
    home = group_homes(load, 4, 2)
    assert (np.sort(home[:, ::8], axis=1) == [0, 0, 1, 1]).all()
    rules = Rules(cluster=Cluster(num_ranks=8, num_nodes=2), home=home)
    placement = plan(load, 5, rules).placement
    found = present_homes(placement, 4, 2)
    assert (found >= 0).all()
    away = away_share(placement, load, home, rules.cluster.node_of_rank)
    assert ((away >= 0) & (away < 0.5)).all()
    assert away_share(placement, load, np.full((3, 32), -1), rules.cluster.node_of_rank).tolist() == [0, 0, 0]
    with pytest.raises(ValueError, match="32 experts in 5 groups on 2 nodes"):
        group_homes(load, 5, 2)
