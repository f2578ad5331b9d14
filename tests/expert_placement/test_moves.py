"""Orders of transfers: complete and without deadlocks; changes are cut into complete placements."""

import numpy as np
import pytest

from expert_placement.moves import Transfer, align, num_moved, stages, transfers_between
from expert_placement.placement import EMPTY, Placement, linear_placement
from tests.support.placement.placements import random_placement


def pair(seed: int, ranks: int = 4, slots: int = 5) -> tuple[Placement, Placement]:
    current = random_placement(3, 8, ranks, slots, seed=seed)
    return current, align(random_placement(3, 8, ranks, slots, seed=seed + 100), current)


@pytest.mark.parametrize("seed", range(8))
def test_carrying_out_the_transfers_gives_the_new_placement(seed: int) -> None:
    current, new = pair(seed)
    slots = np.where(new.slot_expert == EMPTY, EMPTY, current.slot_expert)
    for transfer in transfers_between(current, new):
        assert current.slot_expert[transfer.layer, transfer.source] == transfer.expert
        slots[transfer.layer, transfer.target] = transfer.expert
    assert np.array_equal(slots, new.slot_expert)


@pytest.mark.parametrize("seed", range(8))
def test_ranks_that_wait_for_each_other_in_this_order_all_get_through(seed: int) -> None:
    """Simulate the order: a transfer runs when it is the next one of both its ranks."""
    current, new = pair(seed)
    queues: list[list[tuple[int, int, int]]] = [[] for _ in range(4)]
    for index, transfer in enumerate(transfers_between(current, new)):
        ends = transfer.source // 5, transfer.target // 5
        for rank in set(ends):
            queues[rank].append((index, *ends))
    while any(queues):
        heads = [queue[0] for queue in queues if queue]
        ready = [head for head in heads if all(queues[rank][0] == head for rank in head[1:])]
        assert ready, "no rank can continue"
        for rank in set(ready[0][1:]):
            queues[rank].pop(0)


def test_copies_share_the_work_of_sending() -> None:
    slots = np.array([[0, 1, EMPTY, 0, 2, EMPTY, 3, EMPTY, EMPTY, 4, EMPTY, EMPTY]])
    new = slots.copy()
    new[0, [7, 10]] = 0
    made = transfers_between(Placement(slots, 5, 4), Placement(new, 5, 4))
    assert {transfer.source for transfer in made} == {0, 3}


def test_a_rank_that_has_the_expert_in_another_slot_copies_it_itself() -> None:
    current = Placement(np.array([[0, 1, EMPTY, 2]]), 3, 2)
    new = Placement(np.array([[1, 0, EMPTY, 2]]), 3, 2)
    assert [(t.source, t.target) for t in transfers_between(current, new)] == [(1, 0), (0, 1)]


@pytest.mark.parametrize("most", [5, 7, 100])
def test_stages_are_whole_placements_that_end_in_the_new_one(most: int) -> None:
    current, new = pair(3)
    made = stages(current, new, most)
    before = current
    for stage in made:
        arriving = np.array([t.target // 5 for t in transfers_between(before, stage)])
        assert np.bincount(arriving, minlength=4).max() <= most
        before = stage
    assert made[-1].digest() == new.digest()
    assert [stage.version for stage in made] == list(range(1, len(made) + 1))
    assert len(made) == {5: 3, 7: len(made), 100: 1}[most]


def test_equal_placements_need_no_stage_and_shares_alone_need_one() -> None:
    current, _ = pair(1)
    assert stages(current, current, 5) == []
    even = current.with_even_shares()
    (only,) = stages(current, even, 5)
    assert transfers_between(current, only) == [] and only.digest() == even.digest()


def test_a_layer_that_needs_more_spare_slots_than_there_are_is_refused() -> None:
    current = linear_placement(1, 8, 2)
    new = Placement(np.array([[4, 5, 6, 7, 0, 1, 2, 3]]), 8, 2)
    with pytest.raises(
        ValueError, match="4 experts would move to one rank in one layer, but it has 3 spare slots"
    ):
        stages(current, new, 3)


def test_aligned_slots_keep_what_their_rank_keeps() -> None:
    current = Placement(np.array([[0, 1, 2, 3, 4, 0]]), 5, 2)
    new = Placement(np.array([[1, 3, 0, 0, 2, 4]]), 5, 2)
    aligned = align(new, current)
    assert aligned.slot_expert.tolist() == [[0, 1, 3, 2, 4, 0]]
    assert num_moved(aligned, current).tolist() == [2]
    assert transfers_between(current, aligned) == [Transfer(0, 3, 3, 2), Transfer(0, 2, 2, 3)]


def test_shares_travel_with_their_experts_when_slots_are_aligned() -> None:
    current = Placement(np.array([[0, 1, 0, 2]]), 3, 2)
    new = Placement(np.array([[1, 0, 2, 0]]), 3, 2, share=np.array([[1, 0.3, 1, 0.7]]))
    assert align(new, current).share.tolist() == [[0.3, 1, 0.7, 1]]


def test_placements_of_different_sizes_have_no_moves() -> None:
    with pytest.raises(
        ValueError, match=r"\(layers, slots, experts, ranks\) is \(1, 4, 4, 2\) now and \(1, 4, 4, 4\)"
    ):
        num_moved(linear_placement(1, 4, 4), linear_placement(1, 4, 2))
