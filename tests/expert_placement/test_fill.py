"""Shares: compared with the exact optimum, which is a maximum over all sets of ranks."""

from itertools import combinations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from expert_placement.placement import EMPTY, Placement, imbalance, rank_load
from expert_placement.plan import refresh
from tests.support.placement_bounds import least_by_shares


def least_fullest(placement: Placement, load: np.ndarray) -> float:
    """The oracle: what only a set of ranks can serve, it must serve; the worst set per rank decides (max-flow)."""
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
    assert imbalance(placement, load)[0] < 1.002, "it was 1.01; half the surplus has to travel 16 ranks"


def test_an_expert_without_load_keeps_even_shares() -> None:
    placement = Placement(np.array([[0, 1, 0, 2]]), 3, 2)
    again = refresh(np.array([[0.0, 1.0, 2.0]]), placement)
    assert again.share.tolist() == [[0.5, 1, 0.5, 1]]
