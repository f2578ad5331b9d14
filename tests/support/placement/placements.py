"""Placements that no planner would produce, for tests of code that must accept any placement."""

import numpy as np

from expert_placement.placement import EMPTY, Placement


def random_placement(
    num_layers: int, num_experts: int, num_ranks: int, slots_per_rank: int, seed: int, version: int = 0
) -> Placement:
    """Place experts anywhere, some several times with uneven shares, with empty slots between them."""
    generator = np.random.default_rng(seed)
    rows = [_row(generator, num_experts, num_ranks, slots_per_rank).reshape(-1) for _ in range(num_layers)]
    slots = np.stack(rows)
    weight = np.where(slots == EMPTY, 0.0, generator.uniform(0.05, 1.0, slots.shape))
    total = np.zeros((num_layers, num_experts))
    layer, slot = np.nonzero(slots != EMPTY)
    np.add.at(total, (layer, slots[layer, slot]), weight[layer, slot])
    share = np.zeros(slots.shape)
    share[layer, slot] = weight[layer, slot] / total[layer, slots[layer, slot]]
    return Placement(slots, num_experts, num_ranks, share=share, version=version)


def _row(generator: np.random.Generator, experts: int, ranks: int, width: int) -> np.ndarray:
    grid = np.full((ranks, width), EMPTY, dtype=np.int64)
    for expert in generator.permutation(experts).tolist():  # one first copy each
        free = np.argwhere(grid == EMPTY)
        rank, slot = free[generator.integers(len(free))]
        grid[rank, slot] = expert
    for rank, slot in generator.permutation(np.argwhere(grid == EMPTY)).tolist():  # then further copies
        absent = np.setdiff1d(np.arange(experts), grid[rank])
        if len(absent) and generator.random() < 0.6:
            grid[rank, slot] = generator.choice(absent)
    return grid


def held(placement: Placement) -> list[list[tuple[int, float]]]:
    """Return experts and shares of every rank and layer, regardless of slots."""
    width = placement.slots_per_rank
    return [
        sorted(zip(experts[at : at + width].tolist(), shares[at : at + width].tolist(), strict=True))
        for experts, shares in zip(placement.slot_expert, placement.share, strict=True)
        for at in range(0, len(experts), width)
    ]
