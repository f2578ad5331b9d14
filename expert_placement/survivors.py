"""Where experts are while ranks are away: what the others hold stays where it is, and they take over what was lost.

A pure function of the placement at home, with all ranks there, and of who is left: whoever asks gets the same answer,
and when all are back it is home again. Nothing that a rank holds moves, so that a fault costs reading what was lost and
no more. The places of the new placement are those of the members, in ascending order of rank.

Rejected: planning anew for the ranks that are left, which balances better and moves experts while requests wait.
"""

from collections.abc import Sequence

import numpy as np

from expert_placement.placement import EMPTY, Placement


def surviving(home: Placement, members: Sequence[int]) -> Placement:
    """Return the placement over `members` that keeps all slots as they are at home, and adds what was lost.

    An expert of which a copy is left is served by what is left, in the proportions it has at home. One of which none is
    left comes to the member with the fewest such experts in that layer (among equals the first), in a new slot behind
    those of home. All members and layers have the same number of slots; those that nothing comes to are empty.

    Args:
        home: over all ranks.
        members: ranks of `home`, ascending; all of them give `home` itself.

    Returns:
        With as many ranks as there are members, and the version of `home`.

    Raises:
        ValueError: nobody is left, or `members` are not ascending ranks of `home`.
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
    """Let the shares of every expert's copies that are left add up to 1, evenly if they were all 0."""
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
