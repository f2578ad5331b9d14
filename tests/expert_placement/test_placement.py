"""Placements: every expert has slots, never two on a rank, shares add up, and violations raise a named error."""

import dataclasses

import numpy as np
import pytest

from expert_placement.placement import EMPTY, Placement, imbalance, linear_placement, rank_load


@pytest.mark.parametrize(("experts", "ranks"), [(8, 1), (8, 2), (8, 4), (10, 4), (3, 4), (1, 3), (64, 7)])
def test_a_linear_placement_keeps_order_and_spreads_evenly(experts: int, ranks: int) -> None:
    placement = linear_placement(3, experts, ranks)
    assert placement.slot_expert.shape == (3, ranks * placement.slots_per_rank)
    for layer in range(3):
        held = [row[row != EMPTY].tolist() for row in (placement.local(rank)[layer] for rank in range(ranks))]
        assert [expert for own in held for expert in own] == list(range(experts))
        counts = [len(own) for own in held]
        assert max(counts) - min(counts) <= 1 and counts == sorted(counts, reverse=True)


def test_a_ranks_slots_are_its_part_of_the_row() -> None:
    slots = np.array([[3, EMPTY, 0, 2, 1, EMPTY], [EMPTY, 1, 2, 0, EMPTY, 3]])
    assert Placement(slots, num_experts=4, num_ranks=2).local(1).tolist() == [[2, 1, EMPTY], [0, EMPTY, 3]]


def test_a_placement_cannot_be_changed() -> None:
    slots = np.array([[0, 1]])
    placement = Placement(slots, num_experts=2, num_ranks=1)
    slots[0, 0] = 1
    assert placement.slot_expert.tolist() == [[0, 1]], "it must keep a copy"
    with pytest.raises(ValueError, match="read-only"):
        placement.slot_expert[0, 0] = 1
    with pytest.raises(dataclasses.FrozenInstanceError):
        placement.num_ranks = 2  # type: ignore[misc]


@pytest.mark.parametrize(
    ("slots", "experts", "ranks", "message"),
    [
        ([[0, 1], [0, 0]], 2, 1, r"layer 1: experts \[1\] have no slot"),
        ([[0, EMPTY]], 2, 1, r"layer 0: experts \[1\] have no slot"),
        ([[0, 1, 2]], 2, 1, r"layer 0: slots hold experts \[2\], which are not 0 to 1"),
        ([[0, 1, -2]], 2, 1, r"layer 0: slots hold experts \[-2\], which are not 0 to 1"),
        ([[0, 1, 2]], 3, 2, r"shape \(1, 3\).*multiple of the 2 ranks"),
        ([0, 1], 2, 1, r"shape \(2,\)"),
        ([[0, EMPTY, 1, 1]], 2, 2, "layer 0: rank 1 holds expert 1 twice; copies belong on different ranks"),
    ],
)
def test_what_is_no_placement_is_refused_by_name(
    slots: list[list[int]], experts: int, ranks: int, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        Placement(np.array(slots), num_experts=experts, num_ranks=ranks)


def test_copies_share_evenly_unless_told_otherwise() -> None:
    slots = np.array([[0, 1, 0, 2]])
    assert Placement(slots, 3, 2).share.tolist() == [[0.5, 1, 0.5, 1]]
    uneven = Placement(slots, 3, 2, share=np.array([[0.25, 1, 0.75, 1]]))
    assert uneven.copies(0).share.tolist() == [0.25, 0.75, 1, 1]
    assert uneven.with_even_shares().share.tolist() == [[0.5, 1, 0.5, 1]]


@pytest.mark.parametrize(
    ("slots", "share", "message"),
    [
        ([0, 1, 0, 2], [0.5, 1, 0.4, 1], "layer 0: the shares of expert 0 add up to 0.9, not 1"),
        ([0, 1, 0, 2], [1.5, 1, -0.5, 1], r"layer 0: slot 2 has the share -0.5"),
        ([0, 1, 0, 2], [0.5, 1, np.nan, 1], r"layer 0: slot 2 has the share nan"),
        ([0, EMPTY, 1, 2], [0.5, 0.5, 1, 1], r"layer 0: slot 1 has the share 0\.5"),
        ([0, 1, 0, 2], [0.5, 1], r"share has shape \(1, 2\); it must be that of slot_expert, \(1, 4\)"),
    ],
)
def test_shares_that_are_none_are_refused_by_name(slots: list[int], share: list[float], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Placement(np.array([slots]), 3, 2, share=np.array([share]))


def test_copies_are_the_inverse() -> None:
    slots = np.array([[3, EMPTY, 0, 2, 1, 0, EMPTY, 3, 0]])
    placement = Placement(slots, num_experts=4, num_ranks=3)
    copies = placement.copies(0)
    for expert in range(4):
        own = copies.slot[copies.first[expert] : copies.first[expert + 1]]
        assert own.tolist() == np.flatnonzero(slots[0] == expert).tolist()
        assert placement.num_copies[0, expert] == len(own)


def test_the_digest_speaks_of_slots_and_shares_and_not_of_the_version() -> None:
    slots = np.array([[0, 1, 0, 2]])
    placement = Placement(slots, 3, 2)
    assert placement.digest() == Placement(slots, 3, 2).with_version(7).digest()
    others = [
        Placement(slots, 3, 2, share=np.array([[0.25, 1, 0.75, 1]])),
        Placement(np.array([[0, 1, 2, 0]]), 3, 2),
        Placement(slots, 4 - 1, 2, share=np.array([[1, 1, 0, 1]])),
    ]
    assert placement.digest() == "504e589255deb192", "the digest must match stored files and histories"
    assert len({placement.digest(), *(other.digest() for other in others)}) == 4


def test_imbalance_is_taken_over_the_ranks_of_each_layer() -> None:
    placement = linear_placement(2, 4, 2)
    load = np.array([[3.0, 3, 1, 1], [1.0, 1, 3, 3]])
    assert rank_load(placement, load).tolist() == [[6, 2], [2, 6]]
    assert imbalance(placement, load).tolist() == [1.5, 1.5], "summed over layers, the ranks would look even"
