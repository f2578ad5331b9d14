"""Slots and counters on a device equal those of the CPU. Padded rows choose nothing and are not counted."""

from typing import NamedTuple

import numpy as np
import pytest
import torch

from expert_placement.choose import ReplicaChoice
from expert_placement.placement import linear_placement
from moe.load_counts import LoadCounts
from moe.slot_choice import SlotChoice
from tests.support.placement.placements import random_placement
from tests.support.ranks import RankPool

EXPERTS, CHOICES, DECODES = 8, 3, 20


class Chosen(NamedTuple):
    """Slots, counters and memory of two placements in turn."""

    slots: list[np.ndarray]
    counts: np.ndarray
    stays: bool


def ids_of(seed: int, rows: int) -> torch.Tensor:
    """Return ids with two additional rows of padding."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(-1, EXPERTS, (rows + 2, CHOICES), generator=generator)
    ids[10:30] = 5  # many rows choose one expert
    return ids


def placements(num_ranks: int, slots_per_rank: int) -> list:  # type: ignore[type-arg]
    if num_ranks * slots_per_rank == EXPERTS:
        return [
            linear_placement(2, EXPERTS, num_ranks),
            random_placement(2, EXPERTS, num_ranks, slots_per_rank, 3),
        ]
    return [random_placement(2, EXPERTS, num_ranks, slots_per_rank, seed) for seed in (1, 2)]


def choose(num_ranks: int, slots_per_rank: int, rows: int) -> Chosen:
    """Choose with two placements through one object."""
    from moe.gpu.choose import DeviceSlotChoice  # noqa: PLC0415 - in the interpreter

    both = [SlotChoice(ReplicaChoice(each, 1), 1) for each in placements(num_ranks, slots_per_rank)]
    choice = DeviceSlotChoice(
        both[0], slots_per_rank=slots_per_rank, num_ranks=num_ranks, device=torch.device("cpu")
    )
    addresses = [value.data_ptr() for value in vars(choice).values() if isinstance(value, torch.Tensor)]
    cache_slots = torch.arange(rows + 2)
    cache_slots[rows:] = -1
    counts = torch.zeros(2, EXPERTS + num_ranks, dtype=torch.int64)
    slots = []
    for seed, each in enumerate(both):
        choice.follow(each)
        slots.append(choice.slots(ids_of(seed, rows), cache_slots, torch.tensor([DECODES]), counts).numpy())
    after = [value.data_ptr() for value in vars(choice).values() if isinstance(value, torch.Tensor)]
    return Chosen(slots, counts.numpy(), addresses == after)


@pytest.mark.parametrize(
    ("num_ranks", "slots_per_rank", "rows"),
    [
        (1, 8, 50),
        (2, 4, 50),
        (4, 4, 50),
        pytest.param(2, 6, 690, marks=pytest.mark.slow),
    ],  # the last: 2,076 choices in two chunks
)
def test_slots_and_counts_are_the_cpus(
    num_ranks: int, slots_per_rank: int, rows: int, interpreter: RankPool
) -> None:
    found: Chosen = interpreter.run(choose, num_ranks, slots_per_rank, rows)[0]
    counters = LoadCounts(1, num_experts=EXPERTS, num_ranks=num_ranks, slots_per_rank=slots_per_rank)
    for seed, placement in enumerate(placements(num_ranks, slots_per_rank)):
        ids = ids_of(seed, rows)[:rows].contiguous()
        wanted = ReplicaChoice(placement, 1).choose(1, ids.numpy())
        assert np.array_equal(found.slots[seed][:rows], wanted)
        assert (found.slots[seed][rows:] == -1).all()
        counters.layers[0].add(ids, torch.from_numpy(wanted), DECODES)
    assert np.array_equal(found.counts, counters.table[0])
    assert found.counts.any() and found.stays
