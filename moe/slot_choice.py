"""Choose the physical slot, one of the expert's copies, for each choice of the tokens of one rank.

Wraps `expert_placement.choose` for tensors. A choice belongs to one placement and is replaced as a whole when
all ranks switch to another one.

Legend: T tokens, K choices per token.
"""

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from expert_placement.choose import ReplicaChoice
from expert_placement.placement import Placement


class SlotChoice(NamedTuple):
    """A placement's choice of slots at one layer."""

    replicas: ReplicaChoice
    layer: int

    def slots(self, ids_TK: Tensor) -> Tensor:
        """Return the physical slot of each choice: int64 [T, K], new. `ids_TK` is int64, contiguous."""
        return torch.from_numpy(self.replicas.choose(self.layer, ids_TK.numpy()))


def slot_choices(placement: Placement, rank: int, before: ReplicaChoice | None = None) -> list[SlotChoice]:
    """Return every layer's choice for the tokens of `rank`. Compiles the code on first use.

    Args:
        before: The rank's choice under another placement. Parts that layers have in common are reused.
    """
    replicas = ReplicaChoice(placement, rank, before)
    replicas.choose(0, np.zeros((1, 1), np.int64))
    return [SlotChoice(replicas, layer) for layer in range(placement.num_layers)]
