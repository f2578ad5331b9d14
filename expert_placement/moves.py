"""What has to move to get from one placement to another.

A slot whose rank already has the expert, in whatever slot, needs no transfer: `align` gives such experts their old
slots, and what then differs are the moves.
"""

from dataclasses import replace
from typing import NamedTuple

import numpy as np

from expert_placement.placement import EMPTY, Placement


class Move(NamedTuple):
    """One expert's weights into one slot."""

    layer: int
    slot: int
    expert: int
    sources: tuple[int, ...]  # slots of the layer that hold the expert before anything moves


def align(new: Placement, current: Placement) -> Placement:
    """Reorder the slots within each rank of `new` so that experts which the rank keeps stay where they are.

    Raises:
        ValueError: the placements differ in layers, experts, ranks or slots.
    """
    _check_alike(new, current)
    slots, shares = np.full_like(new.slot_expert, EMPTY), np.zeros_like(new.share)
    width = new.slots_per_rank
    for layer in range(new.num_layers):
        for begin in range(0, slots.shape[1], width):
            here = slice(begin, begin + width)
            order = _order(
                new.slot_expert[layer, here], current.slot_expert[layer, here], int(new.layer_slots[layer])
            )
            taken = order >= 0
            slots[layer, here][taken] = new.slot_expert[layer, here][order[taken]]
            shares[layer, here][taken] = new.share[layer, here][order[taken]]
    return replace(new, slot_expert=slots, share=shares)


def _order(new: np.ndarray, current: np.ndarray, usable: int) -> np.ndarray:
    """For each slot of a rank the place in `new` that comes here, or -1 for an empty slot."""
    place = {expert: at for at, expert in enumerate(new.tolist()) if expert != EMPTY}
    order = np.full(len(new), -1)
    for slot, expert in enumerate(current.tolist()[:usable]):
        order[slot] = place.pop(expert, -1)
    free = [slot for slot in range(usable) if order[slot] < 0]
    for slot, at in zip(free, place.values(), strict=False):
        order[slot] = at
    return order


def num_moved(new: Placement, current: Placement) -> np.ndarray:
    """How many slots need a transfer, layer by layer: experts that come to a rank which has them not. [layers] int64."""
    _check_alike(new, current)
    return np.array(
        [(_presence(new, layer) & ~_presence(current, layer)).sum() for layer in range(new.num_layers)]
    )


def moves_between(current: Placement, new: Placement) -> list[Move]:
    """The transfers, by layer and slot. `new` should be aligned, else experts move within their rank as well."""
    _check_alike(new, current)
    differs = (new.slot_expert != current.slot_expert) & (new.slot_expert != EMPTY)
    moves = []
    for layer, slot in np.argwhere(differs).tolist():
        expert = int(new.slot_expert[layer, slot])
        sources = np.flatnonzero(current.slot_expert[layer] == expert).tolist()
        moves.append(Move(layer, slot, expert, tuple(sources)))
    return moves


def _presence(placement: Placement, layer: int) -> np.ndarray:
    """Whether a rank has an expert: [ranks, experts] bool."""
    presence = np.zeros((placement.num_ranks, placement.num_experts), dtype=bool)
    slots = np.flatnonzero(placement.slot_expert[layer] != EMPTY)
    presence[slots // placement.slots_per_rank, placement.slot_expert[layer, slots]] = True
    return presence


def _check_alike(new: Placement, current: Placement) -> None:
    sizes = [(*p.slot_expert.shape, p.num_experts, p.num_ranks) for p in (current, new)]
    if sizes[0] != sizes[1]:
        raise ValueError(
            f"the placements differ: (layers, slots, experts, ranks) is {sizes[0]} now and {sizes[1]} in the new one"
        )
