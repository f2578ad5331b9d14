"""Placement for another number of ranks: ranks that stay keep as many of their experts as balance allows.

Keeping an expert costs nothing, and a rank that lacks one reads it before the resize. New ranks read all of theirs while they
start. Layers are planned separately, with the heaviest experts first. Deterministic.

Rejected: a new plan (`plan.plan`), which balances a little better but lets ranks read nearly all their experts; rebalancing
improves the placement afterwards anyway.
"""

import numpy as np

from expert_placement.placement import EMPTY, Placement
from expert_placement.plan import refresh

SLACK = 1.05  # load of a rank over the mean, up to which it keeps an expert that it has


def resized(home: Placement, num_ranks: int, slots_per_rank: int, load: np.ndarray) -> Placement:
    """Return a placement of the same experts over ranks 0 to `num_ranks` - 1.

    Args:
        home: Placement over the present ranks. Ranks with the same number stay.
        slots_per_rank: Slots of every layer; those beyond one for each expert get copies of the heaviest ones.
        load: [layers, experts], tokens or seconds, at least 0. A layer without load counts as even.

    Returns:
        A placement with the version of `home`.

    Raises:
        ValueError: There are fewer slots than experts.
    """
    if num_ranks * slots_per_rank < home.num_experts:
        raise ValueError(
            f"{num_ranks} ranks with {slots_per_rank} slots each cannot hold {home.num_experts} experts"
        )
    load = np.where(load.any(axis=1, keepdims=True), load, 1).astype(np.float64)
    slots = np.full((home.num_layers, num_ranks, slots_per_rank), EMPTY, dtype=np.int64)
    has_LRE = np.zeros((home.num_layers, max(num_ranks, home.num_ranks), home.num_experts), dtype=bool)
    layers, places = np.nonzero(home.slot_expert != EMPTY)
    has_LRE[layers, places // home.slots_per_rank, home.slot_expert[layers, places]] = True
    for layer in range(home.num_layers):
        gets_RE = _layer(has_LRE[layer, :num_ranks], load[layer], slots_per_rank)
        for rank, gets_E in enumerate(gets_RE):
            experts = np.flatnonzero(gets_E)
            slots[layer, rank, : len(experts)] = experts
    placed = Placement(slots.reshape(home.num_layers, -1), home.num_experts, num_ranks, version=home.version)
    return refresh(load, placed) if (placed.num_copies > 1).any() else placed


def _layer(has_RE: np.ndarray, load_E: np.ndarray, slots_per_rank: int) -> np.ndarray:
    """Return which rank gets which expert of a layer: [ranks, experts] bool.

    Args:
        has_RE: Which rank has which expert now.
    """
    num_ranks, num_experts = has_RE.shape
    most = -(-num_experts // num_ranks)  # experts of a rank, before copies
    gets_RE = np.zeros_like(has_RE)
    load_R, mean = np.zeros(num_ranks), load_E.sum() / num_ranks
    for expert in np.argsort(-load_E, kind="stable").tolist():
        has_room = gets_RE.sum(axis=1) < most
        stays = has_RE[:, expert] & has_room & (load_R + load_E[expert] <= SLACK * mean)
        # Of equal ranks, a new one: the others keep experts that they have.
        rank = _lightest(load_R, stays if stays.any() else has_room, has_RE[:, expert] | ~has_RE.any(axis=1))
        gets_RE[rank, expert] = True
        load_R[rank] += load_E[expert]
    copies_E = np.ones(num_experts)
    for _ in range(num_ranks * slots_per_rank - num_experts):
        has_room = gets_RE.sum(axis=1) < slots_per_rank
        rank = _lightest(load_R, has_room, has_room)
        part_E = np.where(gets_RE[rank], -1.0, load_E / copies_E)
        expert = int(part_E.argmax())
        if part_E[expert] < 0:  # it has all of them
            break
        gets_RE[rank, expert] = True
        load_R += gets_RE[:, expert] * (load_E[expert] / (copies_E[expert] + 1))
        load_R -= (gets_RE[:, expert] & (np.arange(num_ranks) != rank)) * (load_E[expert] / copies_E[expert])
        copies_E[expert] += 1
    return gets_RE


def _lightest(load_R: np.ndarray, among_R: np.ndarray, preferred_R: np.ndarray) -> int:
    """Return the rank with the least load of some ranks; of equal ones a preferred one, then the first."""
    ranks = np.flatnonzero(among_R)
    order = np.lexsort((ranks, ~preferred_R[ranks], load_R[ranks]))
    return int(ranks[order[0]])
