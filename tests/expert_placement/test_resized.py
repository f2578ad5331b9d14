"""Placements for another number of ranks: what ranks keep, balance, copies, and every expert's presence."""

import numpy as np
import pytest

from expert_placement.placement import EMPTY, Placement, imbalance, linear_placement
from expert_placement.resized import resized


def kept_experts(home: Placement, new: Placement, rank: int) -> list[int]:
    """Return how many experts a rank keeps, by layer."""
    return [
        len((set(new.local(rank)[layer].tolist()) & set(home.local(rank)[layer].tolist())) - {EMPTY})
        for layer in range(home.num_layers)
    ]


def test_ranks_that_stay_read_nothing_when_ranks_are_added() -> None:
    home = linear_placement(3, 8, 2)
    new = resized(home, 4, 2, np.zeros((3, 8)))
    assert [kept_experts(home, new, rank) for rank in range(2)] == [[2, 2, 2]] * 2
    assert (new.num_ranks, new.slots_per_rank) == (4, 2)
    assert (new.num_copies == 1).all()


def test_ranks_that_stay_keep_all_experts_when_ranks_leave() -> None:
    home = linear_placement(2, 8, 4)
    new = resized(home, 2, 4, np.zeros((2, 8)))
    assert [kept_experts(home, new, rank) for rank in range(2)] == [[2, 2]] * 2
    assert (new.num_copies == 1).all()


@pytest.mark.parametrize("sizes", [(2, 4), (4, 3), (3, 2), (2, 5), (5, 1), (1, 3), (3, 8)])
@pytest.mark.parametrize("num_redundant", [0, 3])
def test_every_expert_has_a_slot_at_any_size_and_load(sizes: tuple[int, int], num_redundant: int) -> None:
    generator = np.random.default_rng(3)
    before, after = sizes
    home = linear_placement(4, 8, before)
    slots = -(-(8 + min(num_redundant, 8 * (after - 1))) // after)
    new = resized(home, after, slots, generator.zipf(1.3, (4, 8)))
    assert (new.num_ranks, new.slots_per_rank) == (after, slots), "the placement itself checks the copies"
    assert (new.num_copies >= 1).all()


def test_a_loaded_rank_gives_its_heavy_experts_away() -> None:
    home = linear_placement(1, 8, 2)
    load = np.array([[9, 9, 9, 9, 1, 1, 1, 1]])
    new = resized(home, 4, 2, load)
    assert float(imbalance(new, load)[0]) == pytest.approx(1.0)
    grown = resized(linear_placement(1, 8, 4), 2, 4, load)
    assert float(imbalance(grown, load)[0]) == pytest.approx(1.0)


def test_spare_slots_get_copies_of_the_heaviest_experts() -> None:
    load = np.array([[100, 1, 1, 1, 1, 1, 1, 1]])
    new = resized(linear_placement(1, 8, 2), 4, 3, load)
    assert new.num_copies[0, 0] == 4, "one on each rank"
    assert float(imbalance(new, load)[0]) < 1.1


def test_there_and_back_holds_each_expert_once() -> None:
    home = linear_placement(2, 16, 2)
    new = home
    for size in (4, 3, 2):
        new = resized(new, size, -(-16 // size), np.ones((2, 16)))
    assert (new.num_copies == 1).all()
    assert new.slots_per_rank == home.slots_per_rank


def test_too_few_slots_are_refused() -> None:
    with pytest.raises(ValueError, match="3 ranks with 2 slots each cannot hold 8 experts"):
        resized(linear_placement(1, 8, 2), 3, 2, np.ones((1, 8)))
