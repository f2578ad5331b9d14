"""Where experts are when a service starts: what a file says, or evenly, with copies in the redundant slots."""

from pathlib import Path

import numpy as np
import torch.distributed as dist

from expert_placement.cluster import Cluster
from expert_placement.placement import Placement, linear_placement
from expert_placement.placement_file import PlacementFileError, load_placement
from expert_placement.planner import Rules, plan
from scheduler.config import ConfigError


def start_placement(
    num_layers: int, num_experts: int, num_ranks: int, *, num_redundant: int, file: Path | None
) -> Placement:
    """Return the placement to load. Deterministic, so that all ranks come to the same one.

    Args:
        num_redundant: slots of a layer beyond one for each expert; rounded up to full ranks. Not asked with a file.
        file: a placement; None: experts evenly.

    Raises:
        ConfigError: the file is no placement or one of another model or service; too many slots.
    """
    if file is not None:
        return _from_file(file, num_layers, num_experts, num_ranks)
    if num_redundant == 0:
        return linear_placement(num_layers, num_experts, num_ranks)
    slots_per_rank = -(-(num_experts + num_redundant) // num_ranks)
    if slots_per_rank > num_experts:
        raise ConfigError(
            f"num_redundant_experts is {num_redundant}; a rank holds no expert twice, so that {num_ranks} ranks have "
            f"use for at most {num_experts * (num_ranks - 1)} beside the model's {num_experts} experts"
        )
    even = np.ones((1, num_experts))
    row = plan(even, slots_per_rank, Rules(cluster=Cluster(num_ranks=num_ranks))).placement
    return Placement(np.repeat(row.slot_expert, num_layers, axis=0), num_experts, num_ranks)


def _from_file(file: Path, num_layers: int, num_experts: int, num_ranks: int) -> Placement:
    try:
        placement = load_placement(file)
    except PlacementFileError as error:
        raise ConfigError(str(error)) from error
    found = (placement.num_layers, placement.num_experts, placement.num_ranks)
    if found != (num_layers, num_experts, num_ranks):
        raise ConfigError(
            f"{file} is a placement of {found[0]} layers of {found[1]} experts on {found[2]} ranks; this service "
            f"has {num_layers} layers of {num_experts} experts on {num_ranks} ranks: plan one for it"
        )
    return placement


def check_agreed(placement: Placement, group: dist.ProcessGroup | None) -> None:
    """Check that all ranks start from the same placement; collective over `group`, None being one rank.

    Raises:
        ConfigError: they read different files.
    """
    if group is None:
        return
    told: list[str] = [""] * dist.get_world_size(group)
    dist.all_gather_object(told, f"{placement.digest()} version {placement.version}", group=group)
    if len(set(told)) > 1:
        raise ConfigError(
            f"the ranks start from different placements ({', '.join(told)}); give every node the same file"
        )
