"""Choice of the copy that serves a token: deterministic, proportional to the shares, even in every batch.

The n-th of N choices of an expert goes to the copy with (n + phase) / N in its interval of the cumulative shares. So
every copy gets its share of the batch to within one token; a random choice would be off by the square root. The phase
depends only on rank and expert (a golden-ratio sequence over the ranks), so that ranks with one token each do not all
choose the same copy. Outputs do not depend on the copy, so a choice may depend on the batch.

Rejected: random and hashed choice (0.6 to 1.2 points more imbalance, research/placement); token index modulo copies
(biased between copies: vLLM's pull request 40810); new shares for every batch, for which all ranks would have to
exchange their counts before each layer (docs/LOG.md).

Legend: T tokens, K choices, P = T x K, E experts, C copies of all experts of a layer.
"""

from typing import NamedTuple

import numpy as np

from expert_placement.kernels.compiled import entry
from expert_placement.placement import Placement

_GOLDEN = 0.6180339887498949  # the fractional part of the golden ratio: its multiples fill [0, 1) most evenly
_ROOT_TWO = 0.41421356237309515  # spreads the experts' phases


class Table(NamedTuple):
    """One layer's copies by expert: expert e has entries `first[e]` to `first[e + 1]`."""

    first: np.ndarray  # [E + 1] int64
    slot: np.ndarray  # [C] int64
    until: np.ndarray  # [C] float64: cumulative shares within the expert; the last one is 1


@entry
def choose_slots(
    expert_P: np.ndarray,
    first_E: np.ndarray,
    slot_C: np.ndarray,
    until_C: np.ndarray,
    phase_E: np.ndarray,
    slot_P: np.ndarray,
) -> None:
    """Write the slot of each pair's expert into slot_P: one pass counts, one assigns. -1 stays -1."""
    num_E = np.zeros(phase_E.shape[0], np.int64)
    for pair in range(expert_P.shape[0]):
        if expert_P[pair] >= 0:
            num_E[expert_P[pair]] += 1
    seen_E = np.zeros(phase_E.shape[0], np.int64)
    for pair in range(expert_P.shape[0]):
        expert = expert_P[pair]
        if expert < 0:
            slot_P[pair] = -1
            continue
        copy, last = first_E[expert], first_E[expert + 1] - 1
        if copy < last:
            point = (seen_E[expert] + phase_E[expert]) / num_E[expert]
            while copy < last and point >= until_C[copy]:
                copy += 1
            seen_E[expert] += 1
        slot_P[pair] = slot_C[copy]


class ReplicaChoice:
    """One rank's mapping from logical experts to slots, for one placement.

    Attributes:
        placement: Placement of the copies.
        phase_E: [E] float64, the phase of each expert.
    """

    def __init__(self, placement: Placement, rank: int, before: "ReplicaChoice | None" = None) -> None:
        """Prepare the tables of all layers.

        Args:
            placement: Slots and shares.
            rank: Rank of the tokens; any number that differs between ranks.
            before: Choice for another placement. Layers that are equal in both share their tables, so that a change of
                some layers only takes time for these.
        """
        self.placement = placement
        self.phase_E = phases(placement.num_experts, rank)
        self._tables = [
            before.table(layer) if before is not None and is_kept else _table(placement, layer)
            for layer, is_kept in enumerate(_equal_layers(placement, before))
        ]

    def table(self, layer: int) -> Table:
        """Return the table of one layer."""
        return self._tables[layer]

    def choose(self, layer: int, expert_TK: np.ndarray) -> np.ndarray:
        """Return the slot of each choice. Local.

        Args:
            layer: MoE layer.
            expert_TK: Contiguous integers of any shape. -1 is no choice and stays -1. Not checked otherwise.

        Returns:
            New int64 array of the same shape.
        """
        slot_TK = np.empty(expert_TK.shape, np.int64)
        choose_slots(expert_TK.reshape(-1), *self._tables[layer], self.phase_E, slot_TK.reshape(-1))
        return slot_TK


def phases(num_experts: int, rank: int) -> np.ndarray:
    """Return each expert's phase on a rank: [experts] float64 in [0, 1)."""
    result: np.ndarray = ((rank + 0.5) * _GOLDEN + np.arange(num_experts) * _ROOT_TWO) % 1.0
    return result


def _equal_layers(placement: Placement, before: ReplicaChoice | None) -> list[bool]:
    """Return which layers have the same slots and shares as before."""
    if before is None or before.placement.slot_expert.shape != placement.slot_expert.shape:
        return [False] * placement.num_layers
    slots = (placement.slot_expert == before.placement.slot_expert).all(axis=1)
    shares = (placement.share == before.placement.share).all(axis=1)
    equal: list[bool] = (slots & shares).tolist()
    return equal


def _table(placement: Placement, layer: int) -> Table:
    copies = placement.copies(layer)
    total = np.concatenate(([0.0], np.cumsum(copies.share)))
    until = total[1:] - np.repeat(total[copies.first[:-1]], np.diff(copies.first))
    return Table(copies.first, copies.slot, until)
