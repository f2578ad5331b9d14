"""Choice of the copy that serves: compared with a plain loop, and with the shares in every batch and over ranks."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from expert_placement.choose import ReplicaChoice, phases
from expert_placement.placement import EMPTY, Placement
from tests.support.placement.placements import random_placement

PLACEMENT = Placement(
    np.array([[0, 1, EMPTY, 0, 2, 3, 2, 0, EMPTY]]),
    num_experts=4,
    num_ranks=3,
    share=np.array([[0.5, 1, 0, 0.125, 0.25, 1, 0.75, 0.375, 0]]),
)


def choose_slowly(placement: Placement, layer: int, experts: list[int], rank: int) -> list[int]:
    """Count, then walk along the shares. The oracle."""
    copies, start = placement.copies(layer), phases(placement.num_experts, rank)
    seen = dict.fromkeys(experts, 0)
    slots = []
    for expert in experts:
        if expert < 0:
            slots.append(-1)
            continue
        own = range(copies.first[expert], copies.first[expert + 1])
        point = (seen[expert] + start[expert]) / experts.count(expert)
        seen[expert] += 1
        reached, chosen = 0.0, own[-1]
        for copy in own:
            reached += copies.share[copy]
            if point < reached - 1e-12:
                chosen = copy
                break
        slots.append(int(copies.slot[chosen]))
    return slots


@given(experts=st.lists(st.integers(-1, 3), max_size=40), rank=st.integers(0, 400))
@settings(max_examples=60, deadline=None)
def test_choices_equal_a_plain_loop(experts: list[int], rank: int) -> None:
    chosen = ReplicaChoice(PLACEMENT, rank).choose(0, np.array(experts, dtype=np.int64))
    assert chosen.tolist() == choose_slowly(PLACEMENT, 0, experts, rank)


@pytest.mark.parametrize("dtype", [np.int32, np.int64])
def test_a_choice_has_the_shape_of_what_was_asked(dtype: type[np.signedinteger[Any]]) -> None:
    asked = np.array([[0, 2], [1, -1], [3, 0]], dtype=dtype)
    chosen = ReplicaChoice(PLACEMENT, 0).choose(0, asked)
    assert chosen.shape == (3, 2) and chosen.dtype == np.int64 and chosen[1].tolist() == [1, -1]
    held = np.where(asked >= 0, PLACEMENT.slot_expert[0][chosen], -1)
    assert held.tolist() == asked.tolist()


@pytest.mark.parametrize("tokens", [1, 2, 7, 64, 1000])
def test_every_copy_gets_its_share_of_a_batch_to_within_one_token(tokens: int) -> None:
    for rank in range(5):
        chosen = ReplicaChoice(PLACEMENT, rank).choose(0, np.zeros(tokens, np.int64))
        counts = np.bincount(chosen, minlength=9)
        for slot in (0, 3, 7):
            assert abs(counts[slot] - tokens * PLACEMENT.share[0, slot]) < 1.0 + 1e-9


def test_ranks_with_one_token_each_do_not_all_pick_one_copy() -> None:
    ranks = 64
    chosen = [int(ReplicaChoice(PLACEMENT, rank).choose(0, np.array([2]))[0]) for rank in range(ranks)]
    assert abs(chosen.count(4) - ranks / 4) <= 2, "shares 1/4 and 3/4, chosen by a low-discrepancy sequence"


def test_a_copy_with_no_share_is_never_chosen() -> None:
    placement = replace(PLACEMENT, share=np.array([[0, 1, 0, 1, 0, 1, 1, 0, 0]], dtype=float))
    for rank in range(20):
        chosen = ReplicaChoice(placement, rank).choose(0, np.array([0, 2] * 9))
        assert set(chosen.tolist()) == {3, 6}


def test_a_choice_shares_the_tables_of_layers_that_a_change_leaves_alone() -> None:
    before = random_placement(4, 16, 4, 6, seed=1)
    other = random_placement(4, 16, 4, 6, seed=2)
    moved = (np.arange(4) % 2 == 1)[:, None]
    after = Placement(
        np.where(moved, other.slot_expert, before.slot_expert), 16, 4,
        share=np.where(moved, other.share, before.share),
    )  # fmt: skip
    old = ReplicaChoice(before, 1)
    made, fresh = ReplicaChoice(after, 1, old), ReplicaChoice(after, 1)
    assert [made.table(layer) is old.table(layer) for layer in range(4)] == [True, False] * 2
    asked = np.random.default_rng(0).integers(0, 16, (50, 2))
    for layer in range(4):
        assert made.choose(layer, asked).tolist() == fresh.choose(layer, asked).tolist()
    assert ReplicaChoice(random_placement(2, 16, 4, 6, seed=1), 1, old).choose(1, asked).shape == (50, 2)
