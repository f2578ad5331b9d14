"""Placement of experts while ranks are lost: held experts do not move, none is lost, and all return home at the end."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from expert_placement.placement import EMPTY, Placement, linear_placement
from expert_placement.survivors import surviving
from tests.support.placement.placements import random_placement


@st.composite
def homes_and_members(draw: st.DrawFn) -> tuple[Placement, list[int]]:
    ranks, experts = draw(st.integers(1, 5)), draw(st.integers(1, 12))
    width = min(experts, -(-experts // ranks) + draw(st.integers(0, 3)))
    home = random_placement(draw(st.integers(1, 3)), experts, ranks, width, draw(st.integers(0, 99)), 7)
    members = draw(st.sets(st.integers(0, ranks - 1), min_size=1))
    return home, sorted(members)


@given(homes_and_members())
@settings(max_examples=60, deadline=None)
def test_members_keep_their_slots_and_take_over_what_is_lost_as_evenly_as_it_goes(
    case: tuple[Placement, list[int]],
) -> None:
    home, members = case
    found = surviving(home, members)  # checked by `Placement` itself: each expert is there, shares add up
    assert (found.num_ranks, found.num_experts, found.version) == (len(members), home.num_experts, 7)
    width = home.slots_per_rank
    for place, rank in enumerate(members):
        assert np.array_equal(found.local(place)[:, :width], home.local(rank))
    for layer in range(home.num_layers):
        extra = [found.local(place)[layer, width:] for place in range(len(members))]
        counts = [int((experts != EMPTY).sum()) for experts in extra]
        assert counts == sorted(counts, reverse=True) and max(counts) - min(counts) <= 1
        lost = set(range(home.num_experts)) - {e for r in members for e in home.local(r)[layer].tolist()}
        assert sorted(e for experts in extra for e in experts.tolist() if e != EMPTY) == sorted(lost)


@given(homes_and_members())
@settings(max_examples=40, deadline=None)
def test_what_is_left_of_an_experts_copies_keeps_its_proportions(case: tuple[Placement, list[int]]) -> None:
    home, members = case
    found, width = surviving(home, members), home.slots_per_rank
    kept = found.share.reshape(home.num_layers, len(members), -1)[:, :, :width].reshape(home.num_layers, -1)
    before = home.share.reshape(home.num_layers, home.num_ranks, width)[:, members].reshape(
        home.num_layers, -1
    )
    slots = home.slot_expert.reshape(home.num_layers, home.num_ranks, width)[:, members].reshape(
        home.num_layers, -1
    )
    for layer in range(home.num_layers):
        for expert in range(home.num_experts):
            copies = slots[layer] == expert
            if copies.any():
                wanted = before[layer, copies] / before[layer, copies].sum()
                assert np.allclose(kept[layer, copies], wanted)


def test_all_members_are_at_home() -> None:
    home = linear_placement(2, 8, 3)
    assert surviving(home, [0, 1, 2]) is home


def test_copies_whose_last_one_had_no_share_share_evenly() -> None:
    home = Placement(np.array([[0, 1, 0]]), 2, 3, share=np.array([[1.0, 1.0, 0.0]]))
    assert surviving(home, [1, 2]).share.tolist() == [[1.0, 1.0]]


@pytest.mark.parametrize("members", [[], [1, 0], [0, 0], [3], [-1]])
def test_members_that_are_not_ascending_ranks_of_home_are_refused(members: list[int]) -> None:
    with pytest.raises(ValueError, match=r"members are .*; they must be some of ranks 0 to 2, ascending"):
        surviving(linear_placement(1, 6, 3), members)
