"""How one placement becomes another: which experts move, who sends them, in what order, and in which stages.

A slot whose rank already has the expert, in whatever slot, needs no transfer: `align` gives such experts their old
slots, and what then differs has to move.

All ranks derive the same order from the same two placements, so that no rank has to be sent it. A rank takes part in one
transfer at a time and all go through theirs in one common order: pairs that share no rank move at the same time, and
nobody can wait in a circle. An expert with copies is sent by the copy whose rank is free first.
"""

from collections.abc import Iterable
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from expert_placement.placement import EMPTY, Placement

BUSY_PART = 0.04  # of a step that a rank may work on transfers beside it, for p99 within 1.1 times


class Transfer(NamedTuple):
    """One expert from slot to slot, both counted over all ranks."""

    layer: int
    expert: int
    source: int
    target: int


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
            order = _order(new.slot_expert[layer, here], current.slot_expert[layer, here])
            taken = order >= 0
            slots[layer, here][taken] = new.slot_expert[layer, here][order[taken]]
            shares[layer, here][taken] = new.share[layer, here][order[taken]]
    return replace(new, slot_expert=slots, share=shares)


def _order(new: np.ndarray, current: np.ndarray) -> np.ndarray:
    """For each slot of a rank the place in `new` that comes here, or -1 for an empty slot."""
    place = {expert: at for at, expert in enumerate(new.tolist()) if expert != EMPTY}
    order = np.array([place.pop(expert, -1) for expert in current.tolist()])
    for slot, at in zip(np.flatnonzero(order < 0).tolist(), place.values(), strict=False):
        order[slot] = at
    return order


def num_moved(new: Placement, current: Placement) -> np.ndarray:
    """Count experts that come to a rank which has them not, layer by layer: [layers] int64."""
    _check_alike(new, current)
    return np.array(
        [(_presence(new, layer) & ~_presence(current, layer)).sum() for layer in range(new.num_layers)]
    )


def _presence(placement: Placement, layer: int) -> np.ndarray:
    """Whether a rank has an expert: [ranks, experts] bool."""
    presence = np.zeros((placement.num_ranks, placement.num_experts), dtype=bool)
    slots = np.flatnonzero(placement.slot_expert[layer] != EMPTY)
    presence[slots // placement.slots_per_rank, placement.slot_expert[layer, slots]] = True
    return presence


def transfers_between(current: Placement, new: Placement) -> list[Transfer]:
    """Return what has to move, in the order in which all ranks must go through it.

    `new` should be aligned, else experts move within their rank as well.
    """
    width = current.slots_per_rank
    busy: list[set[int]] = [set() for _ in range(current.num_ranks)]  # rounds in which a rank takes part
    timed = []
    for layer, slot in np.argwhere(_to_fill(current, new)).tolist():
        expert, here = int(new.slot_expert[layer, slot]), slot // width
        sources = np.flatnonzero(current.slot_expert[layer] == expert).tolist()
        assert sources, f"expert {expert} of layer {layer} is nowhere"
        source, round_ = next(((own, 0) for own in sources if own // width == here), (-1, -1))
        if source < 0:
            round_, _, source = min(_offers(sources, width, here, busy))
            busy[here].add(round_)
            busy[source // width].add(round_)
        timed.append((round_, Transfer(layer, expert, source, slot)))
    timed.sort(key=lambda entry: entry[0])
    return [transfer for _, transfer in timed]


def _to_fill(current: Placement, new: Placement) -> np.ndarray:
    """Which slots get another expert: [layers, slots] bool."""
    _check_alike(new, current)
    result: np.ndarray = (new.slot_expert != current.slot_expert) & (new.slot_expert != EMPTY)
    return result


def _offers(
    sources: list[int], width: int, here: int, busy: list[set[int]]
) -> Iterable[tuple[int, int, int]]:
    """For each source the first round in which both ranks are free, what its rank sends already, and the source."""
    for source in sources:
        taken, round_ = busy[source // width] | busy[here], 0
        while round_ in taken:
            round_ += 1
        yield round_, len(busy[source // width]), source


def stages(current: Placement, new: Placement, most_per_rank: int) -> list[Placement]:
    """Cut a change into placements that follow each other, each a whole one, by layers.

    Args:
        most_per_rank: experts that may come to one rank in a stage; at least those of every single layer.

    Returns:
        With the versions after current's; the last one is `new`. Empty if nothing differs.

    Raises:
        ValueError: a layer alone brings more to one rank, or the placements differ in their sizes.
    """
    incoming = current.by_rank(_to_fill(current, new)).sum(axis=2)  # [layers, ranks]
    if incoming.max(initial=0) > most_per_rank:
        raise ValueError(
            f"{incoming.max()} experts would come to one rank in one layer; {most_per_rank} spare slots are there"
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
            f"the placements differ: (layers, slots, experts, ranks) is {sizes[0]} now and {sizes[1]} in the new one"
        )
