"""The way from logical experts to physical slots, for the tokens of one rank: a copy for every choice.

What `expert_placement.choose` decides, in tensors. A route belongs to one placement and is replaced as a whole when
all ranks switch to another one.

Legend: T tokens, K choices per token, E experts.
"""

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from expert_placement.choose import ReplicaChoice
from expert_placement.placement import Placement


class Route(NamedTuple):
    """One MoE layer's way to the slots of all ranks."""

    choice: ReplicaChoice
    layer: int

    def slots(self, ids_TK: Tensor) -> Tensor:
        """Return the physical slot of each choice: int64 [T, K], new. `ids_TK` is int64, contiguous."""
        return torch.from_numpy(self.choice.choose(self.layer, ids_TK.numpy()))


def routes(placement: Placement, rank: int, before: ReplicaChoice | None = None) -> list[Route]:
    """Return every layer's route for the tokens of `rank`; compiles what they need on first use.

    Args:
        before: the rank's choice under another placement; what layers have in common is taken from it.
    """
    choice = ReplicaChoice(placement, rank, before)
    choice.choose(0, np.zeros((1, 1), np.int64))
    return [Route(choice, layer) for layer in range(placement.num_layers)]
