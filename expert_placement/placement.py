"""Which physical slot holds which logical expert: an immutable value.

Every rank has the same number of slots in every layer; a slot may be empty, so that experts need not divide by
ranks. Knows no weights and no torch (D4 of the design).
"""

from dataclasses import dataclass

import numpy as np

EMPTY = -1


@dataclass(frozen=True)
class Placement:
    """`slot_expert[layer, slot]` is an expert or `EMPTY`; rank r has slots [r * slots_per_rank, ...)."""

    slot_expert: np.ndarray  # [layers, ranks * slots_per_rank] int64, read-only
    num_experts: int
    num_ranks: int

    def __post_init__(self) -> None:
        """Check that every expert has exactly one slot.

        Raises:
            ValueError: naming the layer and the experts that have none or several.
        """
        object.__setattr__(self, "slot_expert", np.array(self.slot_expert, dtype=np.int64))
        self.slot_expert.setflags(write=False)
        if self.slot_expert.ndim != 2 or self.slot_expert.shape[1] % self.num_ranks:
            raise ValueError(
                f"slot_expert has shape {self.slot_expert.shape}; it must be [layers, slots] with slots "
                f"a multiple of the {self.num_ranks} ranks"
            )
        for layer, row in enumerate(self.slot_expert):
            held = row[row != EMPTY]
            strange = np.unique(held[(held < 0) | (held >= self.num_experts)]).tolist()
            if strange:
                raise ValueError(
                    f"layer {layer}: slots hold experts {strange[:8]}, which are not 0 to {self.num_experts - 1}"
                )
            counts = np.bincount(held, minlength=self.num_experts)
            wrong = np.flatnonzero(counts != 1).tolist()
            if wrong:
                raise ValueError(
                    f"layer {layer}: experts {wrong[:8]} have {counts[wrong[:8]].tolist()} slots, not 1"
                )

    @property
    def slots_per_rank(self) -> int:
        """Slots of one rank in one layer."""
        return int(self.slot_expert.shape[1]) // self.num_ranks

    def local(self, rank: int) -> np.ndarray:
        """The experts of one rank's slots: [layers, slots_per_rank] int64, `EMPTY` where there is none."""
        return self.slot_expert[:, rank * self.slots_per_rank : (rank + 1) * self.slots_per_rank]

    def expert_slot(self) -> np.ndarray:
        """The slot of every expert: [layers, experts] int64."""
        layers = self.slot_expert.shape[0]
        result = np.full((layers, self.num_experts), EMPTY, dtype=np.int64)
        for layer, row in enumerate(self.slot_expert):
            slots = np.flatnonzero(row != EMPTY)
            result[layer, row[slots]] = slots
        return result


def linear_placement(num_layers: int, num_experts: int, num_ranks: int) -> Placement:
    """Place experts in order, as evenly as they go: the first `num_experts % num_ranks` ranks hold one more."""
    slots_per_rank = -(-num_experts // num_ranks)
    row = np.full(num_ranks * slots_per_rank, EMPTY, dtype=np.int64)
    for rank, experts in enumerate(np.array_split(np.arange(num_experts), num_ranks)):
        row[rank * slots_per_rank : rank * slots_per_rank + len(experts)] = experts
    return Placement(np.tile(row, (num_layers, 1)), num_experts, num_ranks)
