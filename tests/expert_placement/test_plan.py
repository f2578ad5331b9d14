"""The planner follows its rules and makes nothing worse. Shares are compared with the exact optimum, a maximum over all
sets of ranks."""

from itertools import combinations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from expert_placement.moves import num_moved
from expert_placement.nodes import Cluster, Rules, group_homes
from expert_placement.placement import EMPTY, Placement, imbalance, linear_placement, rank_load
from expert_placement.plan import plan, refresh, repair
from tests.support.placement.bounds import least_by_shares, least_imbalance

LAYERS = 2


def drifted(load: np.ndarray, sigma: float, seed: int) -> np.ndarray:
    result: np.ndarray = load * np.exp(np.random.default_rng(seed).normal(0, sigma, load.shape))
    return result


def lognormal(experts: int, seed: int, sigma: float = 0.8, layers: int = LAYERS) -> np.ndarray:
    return drifted(np.ones((layers, experts)), sigma, seed)


@st.composite
def cases(draw: st.DrawFn) -> tuple[np.ndarray, int, Rules, int]:
    """Draw a load, slots per rank, rules that can be satisfied, and a seed."""
    nodes = draw(st.sampled_from([1, 2, 4]))
    ranks = nodes * draw(st.integers(1, 3))
    experts = draw(st.sampled_from([4, 8, 12, 16]))
    seed = draw(st.integers(0, 2**20))
    load = lognormal(experts, seed, draw(st.sampled_from([0.0, 0.8, 2.5])))
    if draw(st.booleans()):
        load[0, : experts // 2] = 0.0
    min_nodes = draw(st.integers(1, min(2, nodes)))
    least = -(-experts * min_nodes // ranks)
    slots = draw(st.integers(least, max(least, min(experts, least + 3))))
    slots = min(slots, experts)
    home = None
    if min_nodes == 1 and experts % nodes == 0 and draw(st.booleans()):
        home = group_homes(load, nodes, nodes)
    rules = Rules(
        cluster=Cluster(num_ranks=ranks, num_nodes=nodes),
        home=home,
        min_nodes=min_nodes,
        spread=draw(st.booleans()) and home is None,
        even=draw(st.booleans()),
    )
    return load, slots, rules, seed


def check_rules(placement: Placement, rules: Rules) -> None:
    """Check all rules that `Placement` itself does not check."""
    node = np.repeat(rules.cluster.node_of_rank, placement.slots_per_rank)
    for layer, row in enumerate(placement.slot_expert):
        for expert in range(placement.num_experts):
            nodes = set(node[row == expert].tolist())
            assert len(nodes) >= rules.min_nodes
            if rules.home is not None:
                assert rules.home[layer, expert] in nodes


@given(cases())
@settings(max_examples=60, deadline=None)
def test_a_plan_keeps_to_the_rules_and_fills_every_slot(case: tuple[np.ndarray, int, Rules, int]) -> None:
    load, slots, rules, _ = case
    made = plan(load, slots, rules)
    assert made.placement.slot_expert.shape == (LAYERS, slots * rules.cluster.num_ranks)
    assert not (made.placement.slot_expert == EMPTY).any(), "no slot may be empty"
    check_rules(made.placement, rules)
    shares = made.placement._per_expert(made.placement.share)
    assert np.abs(shares - 1).max() < 1e-9
    if rules.even:
        assert np.array_equal(made.placement.share, Placement(made.placement.slot_expert, load.shape[1], rules.cluster.num_ranks).share)  # fmt: skip
    assert np.allclose(made.imbalance, imbalance(made.placement, load))
    assert plan(load, slots, rules).placement.digest() == made.placement.digest(), "deterministic"


@given(cases(), st.integers(0, 12))
@settings(max_examples=60, deadline=None)
def test_a_repair_is_never_worse_and_moves_within_its_budget(
    case: tuple[np.ndarray, int, Rules, int], budget: int
) -> None:
    load, slots, rules, seed = case
    current = plan(load, slots, rules).placement
    later = drifted(load, 0.7, seed + 1)
    made = repair(later, current, rules, max_moves=budget)
    check_rules(made.placement, rules)
    before = imbalance(current, later)
    assert (made.imbalance <= before).all()
    assert (imbalance(made.placement, later) <= before).all()
    assert num_moved(made.placement, current).sum() == made.moved.sum() <= budget
    assert repair(later, current, rules, max_moves=budget).placement.digest() == made.placement.digest()


@given(cases())
@settings(max_examples=30, deadline=None)
def test_refreshed_shares_move_nothing_and_are_never_worse_than_even_ones(
    case: tuple[np.ndarray, int, Rules, int],
) -> None:
    load, slots, rules, seed = case
    current = plan(load, slots, rules).placement.with_even_shares()
    later = drifted(load, 0.7, seed + 1)
    made = refresh(later, current)
    assert np.array_equal(made.slot_expert, current.slot_expert)
    assert (imbalance(made, later) <= imbalance(current, later) * (1 + 1e-3)).all()


def test_a_budget_is_spent_where_it_helps_most() -> None:
    load = np.stack([np.ones(16), lognormal(16, 5, 1.0, 1)[0]])
    rules = Rules(cluster=Cluster(num_ranks=4))
    start = plan(np.ones((2, 16)), 5, rules).placement
    made = repair(load, start, rules, max_moves=3)
    assert made.moved[0] == 0 and made.moved[1] > 0, "the first layer is already even"


def test_a_load_that_no_placement_can_level_comes_to_the_bound() -> None:
    load = np.ones((1, 8))
    load[0, 0] = 100.0
    made = plan(load, 2, Rules(cluster=Cluster(num_ranks=8)))
    assert made.imbalance[0] <= 1.05 * least_imbalance(load, 8, 2)[0]


def test_a_repair_fills_slots_that_are_empty() -> None:
    start = linear_placement(1, 10, 4)
    load = np.array([[30.0, 1, 1, 1, 1, 1, 1, 1, 1, 1]])
    made = repair(load, start, Rules(cluster=Cluster(num_ranks=4)), target=1.0)
    assert made.imbalance[0] < imbalance(start, load)[0] and made.placement.num_copies[0, 0] > 1


def test_copies_of_an_expert_go_to_different_nodes() -> None:
    load = lognormal(16, 10)
    rules = Rules(cluster=Cluster(num_ranks=8, num_nodes=4), spread=True)
    for placement in (
        plan(load, 5, rules).placement,
        repair(drifted(load, 1.0, 11), plan(load, 5, rules).placement, rules).placement,
    ):
        node = np.repeat(rules.cluster.node_of_rank, 5)
        for layer, row in enumerate(placement.slot_expert):
            for expert in range(16):
                nodes = node[row == expert]
                assert len(set(nodes.tolist())) == min(len(nodes), 4), (layer, expert)


@pytest.mark.parametrize(
    ("load", "slots", "message"),
    [
        (np.ones(8), 2, r"the load has shape \(8,\); it must be \[layers, experts\]"),
        (np.ones((1, 0)), 2, r"the load has shape \(1, 0\)"),
        (np.array([[1.0, -1.0]]), 1, "layer 0: expert 1 has the load -1.0"),
        (np.array([[1.0, np.nan]]), 1, "layer 0: expert 1 has the load nan"),
        (np.ones((1, 8)), 1, "there are 1 slots per rank; 8 experts on 4 ranks need 2 to 8"),
        (np.ones((1, 8)), 9, "there are 9 slots per rank; 8 experts on 4 ranks need 2 to 8"),
    ],
)
def test_what_cannot_be_planned_is_refused_by_name(load: np.ndarray, slots: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        plan(load, slots, Rules(cluster=Cluster(num_ranks=4)))


def test_rules_that_do_not_fit_are_refused_by_name() -> None:
    with pytest.raises(ValueError, match="min_nodes is 3; it must be from 1 to the number of nodes, 2"):
        Rules(cluster=Cluster(num_ranks=4, num_nodes=2), min_nodes=3)
    with pytest.raises(ValueError, match="5 ranks on 2 nodes"):
        Cluster(num_ranks=5, num_nodes=2)
    rules = Rules(cluster=Cluster(num_ranks=4), home=np.zeros((1, 3)))
    with pytest.raises(ValueError, match=r"home has shape \(1, 3\)"):
        plan(np.ones((1, 8)), 2, rules)
    with pytest.raises(ValueError, match="the placement is for 2 ranks and the rules for 4"):
        repair(np.ones((1, 8)), linear_placement(1, 8, 2), Rules(cluster=Cluster(num_ranks=4)))
    with pytest.raises(
        ValueError, match=r"the load has shape \(2, 8\); the placement has 1 layers of 8 experts"
    ):
        repair(np.ones((2, 8)), linear_placement(1, 8, 4), Rules(cluster=Cluster(num_ranks=4)))


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


def least_fullest(placement: Placement, load: np.ndarray) -> float:
    """Return the exact optimum: a set of ranks must serve all load that only it can, and the worst set decides (max-flow)."""
    ranks = np.arange(placement.slot_expert.shape[1]) // placement.slots_per_rank
    where = [
        set(ranks[placement.slot_expert[0] == expert].tolist()) for expert in range(placement.num_experts)
    ]
    worst = 0.0
    for size in range(1, placement.num_ranks + 1):
        for chosen in combinations(range(placement.num_ranks), size):
            bound_to = sum(load[0, e] for e, own in enumerate(where) if own <= set(chosen))
            worst = max(worst, bound_to / size)
    return worst


@st.composite
def placements(draw: st.DrawFn) -> tuple[Placement, np.ndarray]:
    ranks, experts = draw(st.integers(1, 6)), draw(st.integers(1, 10))
    seed = draw(st.integers(0, 2**32 - 1))
    rng = np.random.default_rng(seed)
    rows: list[list[int]] = [[] for _ in range(ranks)]
    for expert in range(experts):
        for rank in rng.permutation(ranks)[: rng.integers(1, ranks + 1)]:
            rows[rank].append(expert)
    width = max(map(len, rows))
    slots = [rng.permutation(row + [EMPTY] * (width - len(row))) for row in rows]
    load = np.exp(rng.normal(0, 1.5, (1, experts))) * (rng.random((1, experts)) > 0.1)
    return Placement(np.concatenate(slots)[None], experts, ranks), load


@given(placements())
@settings(max_examples=80, deadline=None)
def test_shares_reach_the_exact_optimum(case: tuple[Placement, np.ndarray]) -> None:
    placement, load = case
    fullest = rank_load(refresh(load, placement), load).max()
    assert fullest <= least_fullest(placement, load) + 1e-3 * load.sum() / placement.num_ranks


@given(placements())
@settings(max_examples=80, deadline=None)
def test_the_bound_of_shares_is_one_and_the_best_shares_meet_it(case: tuple[Placement, np.ndarray]) -> None:
    placement, load = case
    mean = load.sum() / placement.num_ranks
    best = refresh(load, placement)
    for shares in (placement, best):
        assert least_by_shares(shares, load)[0] * mean <= max(mean, least_fullest(placement, load)) * (
            1 + 1e-9
        )
    assert imbalance(best, load)[0] <= least_by_shares(best, load)[0] + 1e-3


def test_a_long_ring_is_levelled() -> None:
    ranks = 64  # rank r has expert r alone, and shares expert ranks + r with the next rank
    slots = np.array([[r, ranks + r, ranks + (r - 1) % ranks] for r in range(ranks)]).reshape(1, -1)
    load = np.ones((1, 2 * ranks))
    load[0, : ranks // 2] = 1.02
    load[0, ranks // 2 : ranks] = 0.98
    placement = refresh(load, Placement(slots, 2 * ranks, ranks))
    assert imbalance(placement, load)[0] < 1.002, "it was 1.01; half the surplus moves across 16 ranks"


def test_an_expert_without_load_keeps_even_shares() -> None:
    placement = Placement(np.array([[0, 1, 0, 2]]), 3, 2)
    again = refresh(np.array([[0.0, 1.0, 2.0]]), placement)
    assert again.share.tolist() == [[0.5, 1, 0.5, 1]]
