"""Placement: the logical expert in each physical slot and the slot's share of its tokens, as an immutable value.

Every rank has the same number of slots in every layer. A slot may be empty, so experts need not divide by ranks. An
expert may have copies, but never two on one rank. Does not know weights or torch.

How evenly a placement carries a load is measured per layer: ranks wait for each other in every layer, and a sum over
layers would hide that layers have different slowest ranks.
"""

import hashlib
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

import numpy as np

EMPTY = -1
_SHARE_TOLERANCE = 1e-6  # how far an expert's shares may be from a sum of 1


class Copies(NamedTuple):
    """The copies of a layer's experts: expert e has `slot[first[e]:first[e + 1]]`, ascending, with these shares."""

    first: np.ndarray  # [experts + 1] int64
    slot: np.ndarray  # [copies] int64
    share: np.ndarray  # [copies] float64


@dataclass(frozen=True, eq=False)
class Placement:
    """Experts by slot: `slot_expert[layer, slot]` is an expert or `EMPTY`. Rank r has slots [r * slots_per_rank, ...).

    Attributes:
        slot_expert: [layers, ranks * slots_per_rank] int64, read-only.
        share: [layers, slots] float64, read-only: the part of its expert's tokens that a slot serves. The shares of
            an expert add up to 1. By default copies share evenly.
        version: Number of the placement in a running service. Not part of the digest.
    """

    slot_expert: np.ndarray
    num_experts: int
    num_ranks: int
    share: np.ndarray = None  # type: ignore[assignment]  # filled in below
    version: int = 0

    def __post_init__(self) -> None:
        """Check the rules.

        Raises:
            ValueError: The message names the layer and the problem: an expert without a slot, two copies on one
                rank, shares that do not add up.
        """
        self._keep("slot_expert", np.array(self.slot_expert, dtype=np.int64))
        shape, ranks = self.slot_expert.shape, self.num_ranks
        if ranks < 1 or len(shape) != 2 or shape[1] % ranks:
            raise ValueError(
                f"slot_expert has shape {shape}; it must be [layers, slots] with slots a multiple of the {ranks} ranks"
            )
        for layer in range(self.num_layers):
            self._check_layer(layer)
        shares = self._even_shares() if self.share is None else np.array(self.share, dtype=np.float64)
        if shares.shape != shape:
            raise ValueError(f"share has shape {shares.shape}; it must be that of slot_expert, {shape}")
        self._keep("share", shares)
        self._check_shares()

    def _keep(self, name: str, array: np.ndarray) -> None:
        array.setflags(write=False)
        object.__setattr__(self, name, array)

    def _check_layer(self, layer: int) -> None:
        row = self.slot_expert[layer]
        held = row[row != EMPTY]
        unknown = np.unique(held[(held < 0) | (held >= self.num_experts)]).tolist()
        if unknown:
            raise ValueError(
                f"layer {layer}: slots hold experts {unknown[:8]}, which are not 0 to {self.num_experts - 1}"
            )
        absent = np.flatnonzero(np.bincount(held, minlength=self.num_experts) == 0).tolist()
        if absent:
            raise ValueError(f"layer {layer}: experts {absent[:8]} have no slot; every expert needs one")
        block = np.sort(row.reshape(self.num_ranks, -1), axis=1)
        twice = np.argwhere((block[:, 1:] == block[:, :-1]) & (block[:, 1:] != EMPTY))
        if len(twice):
            rank, column = twice[0].tolist()
            raise ValueError(
                f"layer {layer}: rank {rank} holds expert {block[rank, column]} twice; copies belong on different ranks"
            )

    def _even_shares(self) -> np.ndarray:
        layer, slot = np.nonzero(self.slot_expert != EMPTY)
        shares = np.zeros(self.slot_expert.shape)
        shares[layer, slot] = 1.0 / self.num_copies[layer, self.slot_expert[layer, slot]]
        return shares

    def _check_shares(self) -> None:
        bad = ~np.isfinite(self.share) | (self.share < 0) | ((self.slot_expert == EMPTY) & (self.share != 0))
        if bad.any():
            layer, slot = np.argwhere(bad)[0].tolist()
            raise ValueError(
                f"layer {layer}: slot {slot} has the share {self.share[layer, slot]}; shares are 0 to 1, and 0 "
                f"for an empty slot"
            )
        total = self._per_expert(self.share)
        wrong = np.argwhere(np.abs(total - 1.0) > _SHARE_TOLERANCE)
        if len(wrong):
            layer, expert = wrong[0].tolist()
            raise ValueError(
                f"layer {layer}: the shares of expert {expert} add up to {total[layer, expert]:.9g}, not 1"
            )

    def _per_expert(self, values: np.ndarray) -> np.ndarray:
        """Sum the values of slots by expert: [layers, experts] float64."""
        layer, slot = np.nonzero(self.slot_expert != EMPTY)
        index = layer * self.num_experts + self.slot_expert[layer, slot]
        total = np.bincount(index, values[layer, slot], minlength=self.num_layers * self.num_experts)
        return total.reshape(self.num_layers, self.num_experts)

    @property
    def num_layers(self) -> int:
        """Number of MoE layers."""
        return int(self.slot_expert.shape[0])

    @property
    def slots_per_rank(self) -> int:
        """Number of slots of one rank in one layer."""
        return int(self.slot_expert.shape[1]) // self.num_ranks

    @cached_property
    def num_copies(self) -> np.ndarray:
        """Number of slots with each expert: [layers, experts] int64, read-only."""
        counts = self._per_expert(np.ones(self.slot_expert.shape)).astype(np.int64)
        counts.setflags(write=False)
        return counts

    def by_rank(self, values: np.ndarray) -> np.ndarray:
        """View values of slots [layers, slots] as [layers, ranks, slots_per_rank]."""
        return values.reshape(self.num_layers, self.num_ranks, self.slots_per_rank)

    def local(self, rank: int) -> np.ndarray:
        """Return the experts in one rank's slots: [layers, slots_per_rank] int64; `EMPTY` for an empty slot."""
        return self.by_rank(self.slot_expert)[:, rank]

    def copies(self, layer: int) -> Copies:
        """Return the inverse of one layer's row: each expert's slots and their shares."""
        row = self.slot_expert[layer]
        slots = np.flatnonzero(row != EMPTY)
        slots = slots[np.argsort(row[slots], kind="stable")]
        first = np.concatenate(([0], np.cumsum(self.num_copies[layer])))
        return Copies(first, slots, self.share[layer, slots])

    def with_even_shares(self) -> "Placement":
        """Return the same slots with even shares."""
        return replace(self, share=None)  # type: ignore[arg-type]

    def with_version(self, version: int) -> "Placement":
        """Return the same placement with another version."""
        return replace(self, version=version)

    def with_layers(self, other: "Placement", is_taken: np.ndarray) -> "Placement":
        """Replace some layers (slots and shares) by those of another placement of the same size.

        Args:
            is_taken: [layers] bool, the layers to replace.
        """
        taken = is_taken[:, None]
        return replace(
            self,
            slot_expert=np.where(taken, other.slot_expert, self.slot_expert),
            share=np.where(taken, other.share, self.share),
        )

    def digest(self) -> str:
        """Return sixteen hex digits that depend on slots, shares and sizes. Equal on every machine."""
        return self._digest

    @cached_property
    def _digest(self) -> str:
        sizes = [*self.slot_expert.shape, self.num_experts, self.num_ranks]
        per_layer = [self.slots_per_rank] * self.num_layers  # as in format version 1 of the files
        parts = (
            np.array([*sizes, *per_layer], dtype="<i8"),
            self.slot_expert.astype("<i8"),
            self.share.astype("<f8"),
        )
        return hashlib.sha256(b"".join(part.tobytes() for part in parts)).hexdigest()[:16]


def linear_placement(num_layers: int, num_experts: int, num_ranks: int) -> Placement:
    """Place experts in order and evenly: the first `num_experts % num_ranks` ranks hold one more."""
    slots_per_rank = -(-num_experts // num_ranks)
    row = np.full(num_ranks * slots_per_rank, EMPTY, dtype=np.int64)
    for rank, experts in enumerate(np.array_split(np.arange(num_experts), num_ranks)):
        row[rank * slots_per_rank : rank * slots_per_rank + len(experts)] = experts
    return Placement(np.tile(row, (num_layers, 1)), num_experts, num_ranks)


def slot_load(placement: Placement, load: np.ndarray) -> np.ndarray:
    """Return each slot's part of a load [layers, experts] in any unit: [layers, slots] float64.

    Raises:
        ValueError: The load's shape does not match the placement.
    """
    if load.shape != (placement.num_layers, placement.num_experts):
        raise ValueError(
            f"the load has shape {load.shape}; the placement has {placement.num_layers} layers of "
            f"{placement.num_experts} experts"
        )
    expert = np.where(placement.slot_expert == EMPTY, 0, placement.slot_expert)
    result: np.ndarray = np.take_along_axis(load, expert, axis=1) * placement.share
    return result


def rank_load(placement: Placement, load: np.ndarray) -> np.ndarray:
    """Return each rank's load: [layers, ranks] float64."""
    result: np.ndarray = placement.by_rank(slot_load(placement, load)).sum(axis=2)
    return result


def imbalance(placement: Placement, load: np.ndarray) -> np.ndarray:
    """Return fullest rank over mean rank by layer: [layers] float64. 1 is ideal; it is also 1 without load."""
    ranks = rank_load(placement, load)
    mean = ranks.mean(axis=1)
    result: np.ndarray = np.divide(ranks.max(axis=1), mean, out=np.ones_like(mean), where=mean > 0)
    return result
