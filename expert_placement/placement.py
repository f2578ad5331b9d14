"""Which physical slot holds which logical expert, and what share of its tokens: an immutable value.

Every rank has the same number of slots in every layer; a slot may be empty, so that experts need not divide by
ranks, and a layer may be given fewer slots than the widest one has (its last slots stay empty). An expert may have
copies, never two on one rank. Knows no weights and no torch (D4 of the design).
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

import numpy as np

EMPTY = -1
_SHARE_TOLERANCE = 1e-6  # how far the shares of an expert may be from adding up to 1


class Copies(NamedTuple):
    """The copies of a layer's experts: expert e has `slot[first[e]:first[e + 1]]`, ascending, with these shares."""

    first: np.ndarray  # [experts + 1] int64
    slot: np.ndarray  # [copies] int64
    share: np.ndarray  # [copies] float64


@dataclass(frozen=True, eq=False)
class Placement:
    """`slot_expert[layer, slot]` is an expert or `EMPTY`; rank r has slots [r * slots_per_rank, ...).

    Attributes:
        slot_expert: [layers, ranks * slots_per_rank] int64, read-only.
        share: [layers, slots] float64, read-only: the part of its expert's tokens that a slot serves; the shares
            of an expert add up to 1. By default copies share evenly.
        layer_slots: [layers] int64, read-only: how many of a rank's slots a layer may use; all by default.
        version: counted by whoever changes placements while serving; not part of the digest.
    """

    slot_expert: np.ndarray
    num_experts: int
    num_ranks: int
    share: np.ndarray = None  # type: ignore[assignment]  # filled in below
    layer_slots: np.ndarray = None  # type: ignore[assignment]  # filled in below
    version: int = 0

    def __post_init__(self) -> None:
        """Check the rules.

        Raises:
            ValueError: naming the layer and what is wrong: an expert without a slot, two copies on one rank,
                shares that do not add up, an expert in a slot that the layer may not use.
        """
        self._keep("slot_expert", np.array(self.slot_expert, dtype=np.int64))
        _check_shape(self.slot_expert, self.num_ranks)
        layers, slots = self.slot_expert.shape
        given = np.full(layers, self.slots_per_rank) if self.layer_slots is None else self.layer_slots
        self._keep("layer_slots", np.array(given, dtype=np.int64))
        if self.layer_slots.shape != (layers,) or np.any(
            (self.layer_slots < 0) | (self.layer_slots > self.slots_per_rank)
        ):
            raise ValueError(
                f"layer_slots is {self.layer_slots.tolist()}; it must be {layers} numbers from 0 to "
                f"{self.slots_per_rank}, one for each layer"
            )
        for layer in range(layers):
            self._check_layer(layer)
        shares = self._even_shares() if self.share is None else np.array(self.share, dtype=np.float64)
        if shares.shape != (layers, slots):
            raise ValueError(
                f"share has shape {shares.shape}; it must be that of slot_expert, {(layers, slots)}"
            )
        self._keep("share", shares)
        self._check_shares()

    def _keep(self, name: str, array: np.ndarray) -> None:
        array.setflags(write=False)
        object.__setattr__(self, name, array)

    def _check_layer(self, layer: int) -> None:
        row = self.slot_expert[layer]
        held = row[row != EMPTY]
        strange = np.unique(held[(held < 0) | (held >= self.num_experts)]).tolist()
        if strange:
            raise ValueError(
                f"layer {layer}: slots hold experts {strange[:8]}, which are not 0 to {self.num_experts - 1}"
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
        beyond = row.reshape(self.num_ranks, -1)[:, self.layer_slots[layer] :]
        if np.any(beyond != EMPTY):
            raise ValueError(
                f"layer {layer}: experts lie in slots past the {self.layer_slots[layer]} that the layer may use "
                f"on a rank"
            )

    def _even_shares(self) -> np.ndarray:
        held = self.slot_expert != EMPTY
        layer, slot = np.nonzero(held)
        shares = np.zeros(self.slot_expert.shape)
        expert = self.slot_expert[layer, slot]
        shares[layer, slot] = 1.0 / self.num_copies[layer, expert]
        return shares

    def _check_shares(self) -> None:
        bad = ~np.isfinite(self.share) | (self.share < 0) | ((self.slot_expert == EMPTY) & (self.share != 0))
        if bad.any():
            layer, slot = np.argwhere(bad)[0].tolist()
            raise ValueError(
                f"layer {layer}: slot {slot} has the share {self.share[layer, slot]}; shares are 0 to 1, and 0 "
                f"where a slot is empty"
            )
        wrong = np.argwhere(np.abs(self._per_expert(self.share) - 1.0) > _SHARE_TOLERANCE)
        if len(wrong):
            layer, expert = wrong[0].tolist()
            total = self._per_expert(self.share)[layer, expert]
            raise ValueError(f"layer {layer}: the shares of expert {expert} add up to {total:.9g}, not 1")

    def _per_expert(self, values: np.ndarray) -> np.ndarray:
        """Sum a value of slots by expert: [layers, experts] float64."""
        layer, slot = np.nonzero(self.slot_expert != EMPTY)
        index = layer * self.num_experts + self.slot_expert[layer, slot]
        total = np.bincount(index, values[layer, slot], minlength=self.num_layers * self.num_experts)
        return total.reshape(self.num_layers, self.num_experts)

    @property
    def num_layers(self) -> int:
        """MoE layers."""
        return int(self.slot_expert.shape[0])

    @property
    def slots_per_rank(self) -> int:
        """Slots of one rank in one layer, those that the layer may not use included."""
        return int(self.slot_expert.shape[1]) // self.num_ranks

    @cached_property
    def num_copies(self) -> np.ndarray:
        """How many slots hold each expert: [layers, experts] int64, read-only."""
        counts = self._per_expert(np.ones(self.slot_expert.shape)).astype(np.int64)
        counts.setflags(write=False)
        return counts

    def local(self, rank: int) -> np.ndarray:
        """The experts of one rank's slots: [layers, slots_per_rank] int64, `EMPTY` where there is none."""
        return self.slot_expert[:, rank * self.slots_per_rank : (rank + 1) * self.slots_per_rank]

    def expert_slot(self) -> np.ndarray:
        """One slot of every expert, the lowest: [layers, experts] int64. The only one where there are no copies."""
        result = np.empty((self.num_layers, self.num_experts), dtype=np.int64)
        for layer in range(self.num_layers):
            copies = self.copies(layer)
            result[layer] = copies.slot[copies.first[:-1]]
        return result

    def copies(self, layer: int) -> Copies:
        """The inverse of one layer's row: where each expert is, and with what shares."""
        row = self.slot_expert[layer]
        slots = np.flatnonzero(row != EMPTY)
        slots = slots[np.argsort(row[slots], kind="stable")]
        first = np.concatenate(([0], np.cumsum(self.num_copies[layer])))
        return Copies(first, slots, self.share[layer, slots])

    def with_shares(self, share: np.ndarray) -> "Placement":
        """The same slots with other shares: nothing moves."""
        return replace(self, share=share)

    def with_version(self, version: int) -> "Placement":
        """The same placement under another number."""
        return replace(self, version=version)

    def digest(self) -> str:
        """Sixteen hex digits that differ where slots, shares or sizes differ; the same on every machine."""
        return self._digest

    @cached_property
    def _digest(self) -> str:
        sizes = np.array([*self.slot_expert.shape, self.num_experts, self.num_ranks], dtype="<i8")
        parts: Sequence[np.ndarray] = (
            sizes,
            self.layer_slots.astype("<i8"),
            self.slot_expert.astype("<i8"),
            self.share.astype("<f8"),
        )
        return hashlib.sha256(b"".join(part.tobytes() for part in parts)).hexdigest()[:16]


def _check_shape(slot_expert: np.ndarray, num_ranks: int) -> None:
    if num_ranks < 1 or slot_expert.ndim != 2 or slot_expert.shape[1] % num_ranks:
        raise ValueError(
            f"slot_expert has shape {slot_expert.shape}; it must be [layers, slots] with slots "
            f"a multiple of the {num_ranks} ranks"
        )


def linear_placement(num_layers: int, num_experts: int, num_ranks: int) -> Placement:
    """Place experts in order, as evenly as they go: the first `num_experts % num_ranks` ranks hold one more."""
    slots_per_rank = -(-num_experts // num_ranks)
    row = np.full(num_ranks * slots_per_rank, EMPTY, dtype=np.int64)
    for rank, experts in enumerate(np.array_split(np.arange(num_experts), num_ranks)):
        row[rank * slots_per_rank : rank * slots_per_rank + len(experts)] = experts
    return Placement(np.tile(row, (num_layers, 1)), num_experts, num_ranks)
