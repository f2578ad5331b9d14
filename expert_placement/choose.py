"""Which copy of an expert serves a token's choice: deterministic, in proportion to the shares, even in every batch.

The n-th of N choices of an expert goes where (n + phase) / N falls among the shares, summed up: a grid, so every copy
gets its share of the batch to within one token, where a random choice would be off by the square root. The phase
follows from rank and expert alone (a golden-ratio sequence over the ranks), so that ranks with one token each do not
all pick the same copy. Where the ranks know one another's counts, `choose_together` lays one grid over all of them and
chooses the shares for this batch. Outputs do not depend on the copy (I2), so a choice may depend on the batch.
Rejected: random and hashed choice (0.6 to 1.2 points more imbalance, research/placement), token index modulo copies
(biased between copies: vLLM's pull request 40810).

Legend: T tokens, K choices, E experts, R ranks, S slots.
"""

from typing import NamedTuple

import numpy as np

from expert_placement.kernels.choose import choose_slots
from expert_placement.layer_plan import fill_layers
from expert_placement.placement import Copies, Placement

_GOLDEN = 0.6180339887498949  # the fractional part of the golden ratio: its multiples fill [0, 1) most evenly
_ROOT_TWO = 0.41421356237309515  # moves the experts' phases against one another
_BATCH_SWEEPS, _BATCH_TOLERANCE = 60, 1e-4
_OWN_TOTAL = np.empty(0, dtype=np.int64)


class Table(NamedTuple):
    """One layer's copies, by expert."""

    first: np.ndarray  # [E + 1] int64
    slot: np.ndarray  # [copies] int64
    until: np.ndarray  # [copies] float64: shares summed up within the expert


class _Kept(NamedTuple):
    copies: Copies
    until: np.ndarray  # [copies] float64: shares summed up within the expert


class ReplicaChoice:
    """One rank's way from logical experts to slots, for one placement.

    Attributes:
        phase_E: [E] float64, where each expert's grid begins.
    """

    def __init__(self, placement: Placement, rank: int, before: "ReplicaChoice | None" = None) -> None:
        """Prepare the tables of all layers.

        Args:
            placement: slots and shares.
            rank: whose tokens these are; any number that differs between ranks.
            before: of another placement; the tables of layers that are equal in both are shared, so that a change
                of some layers takes the time of these.
        """
        self._placement = placement
        layers, kept = range(placement.num_layers), _equal_layers(placement, before)
        self._copies = [kept[layer].copies if layer in kept else placement.copies(layer) for layer in layers]
        self._until = [
            kept[layer].until if layer in kept else _until(self._copies[layer]) for layer in layers
        ]
        self.phase_E = phases(placement.num_experts, rank)

    def table(self, layer: int) -> Table:
        """What a choice in this layer looks up; views."""
        copies = self._copies[layer]
        return Table(copies.first, copies.slot, self._until[layer])

    def choose(self, layer: int, expert_TK: np.ndarray) -> np.ndarray:
        """Return the slot of each choice; local.

        Args:
            layer: MoE layer.
            expert_TK: any shape, integers, contiguous; -1 is no choice and stays -1. Not checked otherwise.

        Returns:
            int64 of the same shape, new.
        """
        slot_TK = np.empty(expert_TK.shape, np.int64)
        copies, until = self._copies[layer], self._until[layer]
        choose_slots(
            expert_TK.reshape(-1),
            copies.first,
            copies.slot,
            until,
            self.phase_E,
            _OWN_TOTAL,
            slot_TK.reshape(-1),
        )
        return slot_TK

    def layer(self, layer: int) -> _Kept:
        """The tables of one layer, for a choice under another placement."""
        return _Kept(self._copies[layer], self._until[layer])

    @property
    def placement(self) -> Placement:
        """Whose copies these are."""
        return self._placement

    def choose_together(
        self, layer: int, expert_TK: np.ndarray, before_E: np.ndarray, total_E: np.ndarray
    ) -> np.ndarray:
        """Return the slot of each choice, levelled for this very batch; local, given what all ranks counted.

        Args:
            layer, expert_TK: as for `choose`.
            before_E: [E] int64, choices of each expert on the ranks before this one.
            total_E: [E] int64, on all ranks.
        """
        copies = self._copies[layer]
        x_C = copies.share * np.repeat(total_E, np.diff(copies.first))
        share_C = batch_shares(self._placement, layer, total_E, x_C)
        slot_TK = np.empty(expert_TK.shape, np.int64)
        choose_slots(
            expert_TK.reshape(-1),
            copies.first,
            copies.slot,
            _until(copies._replace(share=share_C)),
            before_E + 0.5,
            total_E,
            slot_TK.reshape(-1),
        )
        return slot_TK


def batch_shares(placement: Placement, layer: int, total_E: np.ndarray, x_C: np.ndarray) -> np.ndarray:
    """Return the shares of a layer's copies that level the ranks for one batch: [copies] float64, by expert.

    Args:
        total_E: [E], tokens of the batch.
        x_C: [copies] float64, by expert: where the search starts, the tokens of each copy.
    """
    copies = placement.copies(layer)
    x_1S = np.zeros((1, placement.slot_expert.shape[1]))
    x_1S[0, copies.slot] = x_C
    slots_1S = placement.slot_expert[layer : layer + 1]
    load_1E = np.asarray(total_E, dtype=np.float64)[None]
    fill_layers(load_1E, slots_1S, placement.slots_per_rank, _BATCH_SWEEPS, _BATCH_TOLERANCE, x_1S)
    total_C = np.repeat(load_1E[0], np.diff(copies.first))
    return np.where(total_C > 0, x_1S[0, copies.slot] / np.maximum(total_C, 1.0), copies.share)


def phases(num_experts: int, rank: int) -> np.ndarray:
    """Where each expert's grid begins on a rank: [experts] float64 in [0, 1)."""
    result: np.ndarray = ((rank + 0.5) * _GOLDEN + np.arange(num_experts) * _ROOT_TWO) % 1.0
    return result


def _equal_layers(placement: Placement, before: ReplicaChoice | None) -> dict[int, _Kept]:
    """The tables of layers whose slots and shares are the same under both."""
    if before is None or before.placement.slot_expert.shape != placement.slot_expert.shape:
        return {}
    slots = (placement.slot_expert == before.placement.slot_expert).all(axis=1)
    shares = (placement.share == before.placement.share).all(axis=1)
    return {layer: before.layer(layer) for layer in np.flatnonzero(slots & shares).tolist()}


def _until(copies: Copies) -> np.ndarray:
    """Sum up shares within each expert."""
    total = np.concatenate(([0.0], np.cumsum(copies.share)))
    result: np.ndarray = total[1:] - np.repeat(total[copies.first[:-1]], np.diff(copies.first))
    return result
