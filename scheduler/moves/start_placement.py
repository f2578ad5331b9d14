"""Placement of experts at start: from a file, or even, with copies in the redundant slots."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from expert_placement.config import EplbConfig, EplbConfigError, slots_of_rank
from expert_placement.files import PlacementFileError, load_placement
from expert_placement.nodes import rules_for_plan
from expert_placement.placement import Placement, linear_placement
from expert_placement.plan import plan
from scheduler.policy.config import ConfigError


def start_placement(
    num_layers: int,
    num_experts: int,
    num_ranks: int,
    *,
    eplb: EplbConfig,
    hosts: Sequence[str],
    file: Path | None,
) -> Placement:
    """Return the placement to load. Deterministic, so that all ranks compute the same one.

    Args:
        eplb: Redundant experts (slots of a layer beyond one per expert), rounded up to full ranks, and the node rules
            for their copies. Ignored with a file.
        hosts: Hosts of the ranks, in order.
        file: File with a placement. With None, experts are placed evenly.

    Raises:
        ConfigError: The file is invalid or for another model or service, or there are too many slots.
    """
    if file is not None:
        return _from_file(file, num_layers, num_experts, num_ranks)
    num_redundant = eplb.num_redundant_experts
    if num_redundant == 0:
        return linear_placement(num_layers, num_experts, num_ranks)
    try:
        num_slots = slots_of_rank(num_experts, num_ranks, num_redundant)
    except EplbConfigError as error:
        raise ConfigError(str(error)) from error
    even = np.ones((1, num_experts))
    rules = rules_for_plan(eplb, hosts, even, num_slots * num_ranks).rules
    row = plan(even, num_slots, rules).placement
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
