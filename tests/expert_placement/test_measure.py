"""Figures about a placement: over the ranks of a layer first, over layers afterwards."""

import numpy as np
import pytest

from expert_placement.cost import Roofline
from expert_placement.measure import away_share, balancedness, imbalance, least_imbalance, rank_load
from expert_placement.moves import Move, align, moves_between, num_moved
from expert_placement.nodes import Cluster, group_homes, present_homes
from expert_placement.placement import EMPTY, Placement, linear_placement
from expert_placement.plan import Rules, plan


def test_imbalance_is_taken_over_the_ranks_of_each_layer() -> None:
    placement = linear_placement(2, 4, 2)
    load = np.array([[3.0, 3, 1, 1], [1.0, 1, 3, 3]])
    assert rank_load(placement, load).tolist() == [[6, 2], [2, 6]]
    assert imbalance(placement, load).tolist() == [1.5, 1.5], "summed over layers the ranks would look even"
    assert balancedness(placement, load) == pytest.approx([2 / 3, 2 / 3])


def test_a_layer_without_load_is_level() -> None:
    assert imbalance(linear_placement(1, 4, 2), np.zeros((1, 4))).tolist() == [1.0]


def test_shares_divide_an_experts_load() -> None:
    placement = Placement(np.array([[0, EMPTY, 0, 1]]), 2, 2, share=np.array([[0.75, 0, 0.25, 1]]))
    assert rank_load(placement, np.array([[8.0, 1]])).tolist() == [[6, 3]]


@pytest.mark.parametrize(
    ("load", "ranks", "slots", "bound"),
    [
        ([1.0] * 8, 4, 2, 1.0),
        ([5.0, 1, 1, 1], 4, 1, 2.5),
        ([8.0, 1, 1, 1, 1], 4, 2, 1.0),
        ([6.0, 1, 1], 4, 1, 1.5),
    ],
)
def test_the_bound_is_what_the_hottest_copy_must_carry(
    load: list[float], ranks: int, slots: int, bound: float
) -> None:
    row = np.array([load])
    assert least_imbalance(row, ranks, slots)[0] == pytest.approx(bound)
    reached = plan(row, slots, Rules(cluster=Cluster(num_ranks=ranks))).imbalance[0]
    assert reached >= bound - 1e-9


def test_aligned_slots_keep_what_their_rank_keeps() -> None:
    current = Placement(np.array([[0, 1, 2, 3, 4, 0]]), 5, 2)
    new = Placement(np.array([[1, 3, 0, 0, 2, 4]]), 5, 2)
    aligned = align(new, current)
    assert aligned.slot_expert.tolist() == [[0, 1, 3, 2, 4, 0]]
    assert num_moved(aligned, current).tolist() == [2]
    assert moves_between(current, aligned) == [Move(0, 2, 3, (3,)), Move(0, 3, 2, (2,))]


def test_shares_travel_with_their_experts_when_slots_are_aligned() -> None:
    current = Placement(np.array([[0, 1, 0, 2]]), 3, 2)
    new = Placement(np.array([[1, 0, 2, 0]]), 3, 2, share=np.array([[1, 0.3, 1, 0.7]]))
    assert align(new, current).share.tolist() == [[0.3, 1, 0.7, 1]]


def test_placements_of_different_sizes_have_no_moves() -> None:
    with pytest.raises(
        ValueError, match=r"\(layers, slots, experts, ranks\) is \(1, 4, 4, 2\) now and \(1, 4, 4, 4\)"
    ):
        num_moved(linear_placement(1, 4, 4), linear_placement(1, 4, 2))


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


ROOFLINE = Roofline(
    slot_bytes=44e6,
    token_flops=88e6,
    memory_bytes_per_s=3.3e12,
    flops_per_s=1e15,
    token_bytes=1e4,
    link_bytes_per_s=5e10,
)


def test_a_few_tokens_cost_their_experts_weights_and_many_their_multiplications() -> None:
    placement, load = linear_placement(1, 8, 4), np.array([[4.0, 1, 1, 1, 1, 1, 1, 1]])
    free = Roofline(slot_bytes=44e6, token_flops=88e6, memory_bytes_per_s=3.3e12, flops_per_s=1e15)
    few = free.rank_seconds(placement, load, 8 * 32)[0]
    assert few == pytest.approx(np.full(4, 2 * 44e6 / 3.3e12), rel=1e-3), "the hot rank takes no longer"
    many = free.rank_seconds(placement, load, 1e6)[0]
    assert many == pytest.approx(np.array([5, 2, 2, 2]) / 11 * 1e6 * 88e6 / 1e15)
    assert ROOFLINE.rank_seconds(placement, load, 1e6)[0, 0] > many[0], "and they have to travel"
    assert ROOFLINE.step_seconds(placement, load, 1e6) == ROOFLINE.rank_seconds(placement, load, 1e6).max()


def test_one_token_reads_one_expert() -> None:
    seconds = ROOFLINE.rank_seconds(linear_placement(1, 2, 1), np.array([[1.0, 0.0]]), 1)[0, 0]
    assert seconds == pytest.approx((1 - np.exp(-1)) * 44e6 / 3.3e12 + 1e4 / 5e10)
    assert ROOFLINE.move_seconds(10) == pytest.approx(440e6 / 5e10)


def test_rates_that_are_none_are_refused_by_name() -> None:
    with pytest.raises(ValueError, match="flops_per_s is 0; it must be above 0"):
        Roofline(slot_bytes=1, token_flops=1, memory_bytes_per_s=1, flops_per_s=0)
    with pytest.raises(ValueError, match="slot_bytes is -1; it must be 0 or more"):
        Roofline(slot_bytes=-1, token_flops=1, memory_bytes_per_s=1, flops_per_s=1)
