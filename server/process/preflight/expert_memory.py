"""What a rank's experts take: the slots that serve, and the spare ones into which experts arrive while those serve.

A plan is carried out a few layers at a time, with as many spare slots as one layer has on a rank (`moe.spare_slots`).
They are reserved when first needed, so whatever promises memory has to leave them out beforehand. Knows no torch.
"""

import math
from typing import NamedTuple

from server.process.preflight.start_file import slots_in


class ExpertMemory(NamedTuple):
    """Bytes of one rank."""

    slots_per_rank: int  # of a layer
    serving: int  # all its slots, of all layers
    spare: int


def expert_memory(
    expert_bytes: int, *, num_layers: int, num_experts: int, num_ranks: int, slots_per_rank: int
) -> ExpertMemory:
    """Add up.

    Args:
        expert_bytes: of all experts of all `num_layers` layers that have any, once each.
    """
    of_slots = expert_bytes * slots_per_rank / max(1, num_experts)
    spare = of_slots / max(1, num_layers) if num_ranks > 1 else 0  # one rank has nowhere to move to
    return ExpertMemory(slots_per_rank, math.ceil(of_slots), math.ceil(spare))


def slots_per_rank(
    num_experts: int, num_ranks: int, *, num_redundant: int, placement_file: str | None
) -> int:
    """How many slots a layer will have on a rank.

    Args:
        placement_file: what is no placement counts as none; `checks.check_placement` refuses it.
    """
    if placement_file:
        found = slots_in(placement_file)
        if found:
            return found
        num_redundant = 0  # is not asked with a file
    return min(num_experts, -(-(num_experts + num_redundant) // num_ranks))
