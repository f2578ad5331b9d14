"""One placement of several: the cheapest layers, and no more moves than allowed."""

import numpy as np

from expert_placement.candidates import assembled, cheapest, cheapest_within
from expert_placement.placement import Placement, linear_placement
from tests.support.placements import random_placement


def test_a_layer_comes_whole_from_its_candidate_shares_and_all() -> None:
    made = [random_placement(3, 8, 2, 6, seed=seed) for seed in range(3)]
    mixed = assembled(made, np.array([2, 0, 1]))
    for layer, chosen in enumerate((2, 0, 1)):
        assert mixed.slot_expert[layer].tolist() == made[chosen].slot_expert[layer].tolist()
        assert mixed.share[layer].tolist() == made[chosen].share[layer].tolist()


def test_of_equals_the_first_is_taken() -> None:
    start, other = linear_placement(2, 4, 2), random_placement(2, 4, 2, 2, seed=1)
    assert cheapest([start, other], lambda _: np.ones(2)).digest() == start.digest()


def test_a_budget_that_the_cheapest_layers_exceed_leaves_the_cheapest_whole() -> None:
    costs = {0: [2.0, 9.0], 1: [1.0, 5.0], 2: [4.0, 1.0]}
    start = linear_placement(2, 4, 2)
    moved = [Placement(np.array(rows), 4, 2, version=number) for number, rows in (
        (1, [[2, 3, 0, 1], [0, 1, 2, 3]]), (2, [[0, 1, 2, 3], [2, 3, 0, 1]]),
    )]  # fmt: skip

    def seconds(placement: Placement) -> np.ndarray:
        return np.array(costs[placement.version])

    made = [start, *moved]
    assert cheapest(made, seconds).slot_expert.tolist() == [[2, 3, 0, 1], [2, 3, 0, 1]]
    assert cheapest_within(made, seconds, start, 8).slot_expert.tolist() == [[2, 3, 0, 1], [2, 3, 0, 1]]
    assert cheapest_within(made, seconds, start, 7) is moved[1]
