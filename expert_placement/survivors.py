"""Placement while ranks are missing: the other ranks keep their experts and take over the lost ones.

A pure function of the home placement (with all ranks) and of the remaining ranks: every caller gets the same result, and
when all ranks are back it is the home placement again. No held expert moves, so a fault only costs reading the lost
ones. The places of the new placement are those of the members, in ascending order of rank.

Rejected: a new plan for the remaining ranks, which balances better but moves experts while requests wait.
"""

from collections.abc import Sequence

import numpy as np

from expert_placement.placement import EMPTY, Placement


def surviving(home: Placement, members: Sequence[int]) -> Placement:
    """Return the placement over `members` that keeps all slots of `home` and adds the lost experts.

    An expert with remaining copies is served by these, in their proportions at home. An expert without any goes to the
    member with the fewest such experts in that layer (the first among equals), in a new slot after those of `home`. All
    members and layers have the same number of slots; unused ones are empty.

    Args:
        home: Placement over all ranks.
        members: Ranks of `home`, ascending. All ranks give `home` itself.

    Returns:
        A placement with one rank per member, and the version of `home`.

    Raises:
        ValueError: `members` is empty, or not ascending ranks of `home`.
    """
    _check_members(home, members)
    if len(members) == home.num_ranks:
        return home
    kept = list(members)
    slots, shares = (home.by_rank(part)[:, kept] for part in (home.slot_expert, home.share))
    lost = [np.setdiff1d(np.arange(home.num_experts), row) for row in slots]
    num_extra = [-(-len(experts) // len(members)) for experts in lost]
    behind = ((0, 0), (0, 0), (0, max(num_extra, default=0)))
    slots = np.pad(slots, behind, constant_values=EMPTY)
    shares = np.pad(shares, behind)
    for layer, experts in enumerate(lost):
        places, turns = np.arange(len(experts)) % len(members), np.arange(len(experts)) // len(members)
        slots[layer, places, home.slots_per_rank + turns] = experts
        shares[layer, places, home.slots_per_rank + turns] = 1.0
    flat = (home.num_layers, -1)
    return Placement(
        slots.reshape(flat),
        home.num_experts,
        len(members),
        share=_made_whole(slots.reshape(flat), shares.reshape(flat), home.num_experts),
        version=home.version,
    )


def _check_members(home: Placement, members: Sequence[int]) -> None:
    ranks = range(home.num_ranks)
    if not members or list(members) != [rank for rank in ranks if rank in members]:
        raise ValueError(
            f"members are {list(members)}; they must be some of ranks 0 to {home.num_ranks - 1}, ascending"
        )


def _made_whole(slots: np.ndarray, shares: np.ndarray, num_experts: int) -> np.ndarray:
    """Scale the shares of every expert's remaining copies to a sum of 1. They are even if all were 0."""
    result = np.zeros_like(shares)
    for layer, row in enumerate(slots):
        held = np.flatnonzero(row != EMPTY)
        total = np.bincount(row[held], shares[layer, held], minlength=num_experts)
        copies = np.bincount(row[held], minlength=num_experts)
        expert = row[held]
        is_idle = total[expert] == 0.0
        result[layer, held] = np.where(
            is_idle, 1.0 / copies[expert], shares[layer, held] / np.where(is_idle, 1.0, total[expert])
        )
    return result
