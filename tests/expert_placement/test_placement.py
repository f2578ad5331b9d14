"""Placements: every expert has one slot, ranks have as many slots, and what is not so is refused by name."""

import dataclasses

import numpy as np
import pytest

from expert_placement.placement import EMPTY, Placement, linear_placement


@pytest.mark.parametrize(("experts", "ranks"), [(8, 1), (8, 2), (8, 4), (10, 4), (3, 4), (1, 3), (64, 7)])
def test_a_linear_placement_keeps_order_and_spreads_evenly(experts: int, ranks: int) -> None:
    placement = linear_placement(3, experts, ranks)
    assert placement.slot_expert.shape == (3, ranks * placement.slots_per_rank)
    for layer in range(3):
        held = [row[row != EMPTY].tolist() for row in (placement.local(rank)[layer] for rank in range(ranks))]
        assert [expert for own in held for expert in own] == list(range(experts))
        counts = [len(own) for own in held]
        assert max(counts) - min(counts) <= 1 and counts == sorted(counts, reverse=True)


def test_expert_slot_is_the_inverse_of_slot_expert() -> None:
    slots = np.array([[3, EMPTY, 0, 2, 1, EMPTY], [EMPTY, 1, 2, 0, EMPTY, 3]])
    placement = Placement(slots, num_experts=4, num_ranks=2)
    inverse = placement.expert_slot()
    for layer in range(2):
        for expert in range(4):
            assert slots[layer, inverse[layer, expert]] == expert
    assert placement.local(1).tolist() == [[2, 1, EMPTY], [0, EMPTY, 3]]


def test_a_placement_cannot_be_changed() -> None:
    slots = np.array([[0, 1]])
    placement = Placement(slots, num_experts=2, num_ranks=1)
    slots[0, 0] = 1
    assert placement.slot_expert.tolist() == [[0, 1]], "it keeps a copy"
    with pytest.raises(ValueError, match="read-only"):
        placement.slot_expert[0, 0] = 1
    with pytest.raises(dataclasses.FrozenInstanceError):
        placement.num_ranks = 2  # type: ignore[misc]


@pytest.mark.parametrize(
    ("slots", "experts", "ranks", "message"),
    [
        ([[0, 1], [0, 0]], 2, 1, r"layer 1: experts \[0, 1\] have \[2, 0\] slots"),
        ([[0, EMPTY]], 2, 1, r"layer 0: experts \[1\] have \[0\] slots"),
        ([[0, 1, 2]], 2, 1, r"layer 0: slots hold experts \[2\], which are not 0 to 1"),
        ([[0, 1, -2]], 2, 1, r"layer 0: slots hold experts \[-2\], which are not 0 to 1"),
        ([[0, 1, 2]], 3, 2, r"shape \(1, 3\).*multiple of the 2 ranks"),
        ([0, 1], 2, 1, r"shape \(2,\)"),
    ],
)
def test_what_is_no_placement_is_refused_by_name(
    slots: list[list[int]], experts: int, ranks: int, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        Placement(np.array(slots), num_experts=experts, num_ranks=ranks)
