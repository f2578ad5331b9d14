"""From one placement to another: which experts move, which rank sends them, in what order and stages.

If a rank already has an expert, in any slot, no transfer is needed: `align` gives such experts their old slots, and the
remaining differences have to move.

All ranks derive the same order from the same two placements, so it need not be sent. A rank takes part in one transfer
at a time, and all ranks follow one common order. So pairs without a common rank move at the same time, and ranks cannot
deadlock. An expert with copies is sent by the copy on the rank that is free first.
"""

from collections.abc import Iterable
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from expert_placement.placement import EMPTY, Placement

BUSY_PART = 0.04  # part of a step that a rank may work on transfers; p99 of steps stays within 1.1 times


class Transfer(NamedTuple):
    """The move of one expert between slots, both counted over all ranks."""

    layer: int
    expert: int
    source: int
    target: int


def align(new: Placement, current: Placement) -> Placement:
    """Reorder the slots within each rank of `new` so that experts that stay on the rank keep their slots.

    Raises:
        ValueError: The placements differ in layers, experts, ranks or slots.
    """
    _check_alike(new, current)
    slots, shares = np.full_like(new.slot_expert, EMPTY), np.zeros_like(new.share)
    width = new.slots_per_rank
    for layer in range(new.num_layers):
        for begin in range(0, slots.shape[1], width):
            here = slice(begin, begin + width)
            order = _order(new.slot_expert[layer, here], current.slot_expert[layer, here])
            taken = order >= 0
            slots[layer, here][taken] = new.slot_expert[layer, here][order[taken]]
            shares[layer, here][taken] = new.share[layer, here][order[taken]]
    return replace(new, slot_expert=slots, share=shares)


def _order(new: np.ndarray, current: np.ndarray) -> np.ndarray:
    """Return, for each slot of a rank, the place in `new` of its expert, or -1 for an empty slot."""
    place = {expert: at for at, expert in enumerate(new.tolist()) if expert != EMPTY}
    order = np.array([place.pop(expert, -1) for expert in current.tolist()])
    for slot, at in zip(np.flatnonzero(order < 0).tolist(), place.values(), strict=False):
        order[slot] = at
    return order


def num_moved(new: Placement, current: Placement) -> np.ndarray:
    """Count the experts that are new on a rank, by layer: [layers] int64."""
    _check_alike(new, current)
    return np.array(
        [(_presence(new, layer) & ~_presence(current, layer)).sum() for layer in range(new.num_layers)]
    )


def _presence(placement: Placement, layer: int) -> np.ndarray:
    """Return whether a rank has an expert: [ranks, experts] bool."""
    presence = np.zeros((placement.num_ranks, placement.num_experts), dtype=bool)
    slots = np.flatnonzero(placement.slot_expert[layer] != EMPTY)
    presence[slots // placement.slots_per_rank, placement.slot_expert[layer, slots]] = True
    return presence


def transfers_between(current: Placement, new: Placement) -> list[Transfer]:
    """Return the required transfers, in the order in which all ranks must make them.

    `new` should be aligned; otherwise experts also move within their rank.
    """
    width = current.slots_per_rank
    busy: list[set[int]] = [set() for _ in range(current.num_ranks)]  # the rounds of each rank
    timed = []
    for layer, slot in np.argwhere(_to_fill(current, new)).tolist():
        expert, here = int(new.slot_expert[layer, slot]), slot // width
        sources = np.flatnonzero(current.slot_expert[layer] == expert).tolist()
        assert sources, f"expert {expert} of layer {layer} has no slot"
        source, round_ = next(((own, 0) for own in sources if own // width == here), (-1, -1))
        if source < 0:
            round_, _, source = min(_offers(sources, width, here, busy))
            busy[here].add(round_)
            busy[source // width].add(round_)
        timed.append((round_, Transfer(layer, expert, source, slot)))
    timed.sort(key=lambda entry: entry[0])
    return [transfer for _, transfer in timed]


def _to_fill(current: Placement, new: Placement) -> np.ndarray:
    """Return which slots get another expert: [layers, slots] bool."""
    _check_alike(new, current)
    result: np.ndarray = (new.slot_expert != current.slot_expert) & (new.slot_expert != EMPTY)
    return result


def _offers(
    sources: list[int], width: int, here: int, busy: list[set[int]]
) -> Iterable[tuple[int, int, int]]:
    """Yield, for each source, the first round in which both ranks are free, its rank's number of sends, and the source."""
    for source in sources:
        taken, round_ = busy[source // width] | busy[here], 0
        while round_ in taken:
            round_ += 1
        yield round_, len(busy[source // width]), source


def stages(current: Placement, new: Placement, most_per_rank: int) -> list[Placement]:
    """Split a change by layers into successive valid placements.

    Args:
        most_per_rank: Most experts that may move to one rank in a stage; no less than any single layer needs.

    Returns:
        Placements with versions after current's; the last one is `new`. Empty if nothing differs.

    Raises:
        ValueError: A single layer moves more to one rank, or the placements differ in their sizes.
    """
    incoming = current.by_rank(_to_fill(current, new)).sum(axis=2)  # [layers, ranks]
    if incoming.max(initial=0) > most_per_rank:
        raise ValueError(
            f"{incoming.max()} experts would move to one rank in one layer, but it has {most_per_rank} spare slots"
        )
    differs = ((current.slot_expert != new.slot_expert) | (current.share != new.share)).any(axis=1)
    groups: list[list[int]] = []
    filled = np.zeros(current.num_ranks, dtype=np.int64)
    for layer in np.flatnonzero(differs).tolist():
        if not groups or ((filled + incoming[layer]) > most_per_rank).any():
            groups.append([])
            filled[:] = 0
        groups[-1].append(layer)
        filled += incoming[layer]
    made, is_done = [], np.zeros(current.num_layers, dtype=bool)
    for index, layers in enumerate(groups, 1):
        is_done[layers] = True
        made.append(current.with_layers(new, is_done).with_version(current.version + index))
    return made


def _check_alike(new: Placement, current: Placement) -> None:
    sizes = [(*p.slot_expert.shape, p.num_experts, p.num_ranks) for p in (current, new)]
    if sizes[0] != sizes[1]:
        raise ValueError(
            f"the placements differ in size: (layers, slots, experts, ranks) is {sizes[0]} now and {sizes[1]} in the new one"
        )
