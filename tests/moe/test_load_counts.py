"""Counters of an expert layer against a plain loop: by phase, by expert, by rank; and choices that do not count."""

import numpy as np
import torch

from moe.load_counts import DECODE, PREFILL, LoadCounts

EXPERTS, RANKS, SLOTS, CHOICES = 6, 3, 4, 2


def counts(layers: int = 1) -> LoadCounts:
    return LoadCounts(layers, num_experts=EXPERTS, num_ranks=RANKS, slots_per_rank=SLOTS)


def choices(tokens: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return experts and slots of tokens. One slot in nine is empty."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(EXPERTS, (tokens, CHOICES), generator=generator)
    slots = torch.randint(RANKS * SLOTS, (tokens, CHOICES), generator=generator)
    slots[torch.rand(slots.shape, generator=generator) < 1 / 9] = -1
    return ids, slots


def oracle(ids: torch.Tensor, slots: torch.Tensor, num_decodes: int) -> np.ndarray:
    table = np.zeros((2, EXPERTS + RANKS), dtype=np.int64)
    for token in range(len(ids)):
        phase = DECODE if token < num_decodes else PREFILL
        for expert, slot in zip(ids[token].tolist(), slots[token].tolist(), strict=True):
            if slot >= 0:
                table[phase, expert] += 1
                table[phase, EXPERTS + slot // SLOTS] += 1
    return table


def test_counts_equal_a_plain_loop_over_decodes_and_prefills() -> None:
    for tokens, num_decodes in ((40, 0), (40, 40), (40, 13), (1, 1), (0, 0)):
        ours = counts()
        ids, slots = choices(tokens, seed=tokens + num_decodes)
        ours.layers[0].add(ids, slots, num_decodes)
        np.testing.assert_array_equal(ours.table[0], oracle(ids, slots, num_decodes))


def test_counts_add_up_over_steps_and_layers_stay_apart() -> None:
    ours, expected = counts(layers=2), np.zeros((2, 2, EXPERTS + RANKS), dtype=np.int64)
    for step in range(5):
        for layer in range(2):
            ids, slots = choices(9, seed=10 * step + layer)
            ours.layers[layer].add(ids, slots, step)
            expected[layer] += oracle(ids, slots, step)
    np.testing.assert_array_equal(ours.table, expected)
    np.testing.assert_array_equal(ours.layers[1].expert_E, expected[1, :, :EXPERTS].sum(axis=0))


def test_ids_that_are_a_view_of_another_matrix_are_read_where_they_lie() -> None:
    ours, (wide, slots) = counts(), choices(8, seed=3)
    ids = torch.cat((wide, wide), dim=1)[:, 1:3]
    assert not ids.is_contiguous()
    ours.layers[0].add(ids, slots, 2)
    np.testing.assert_array_equal(ours.table[0], oracle(ids, slots, 2))
