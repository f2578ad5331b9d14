"""In what order experts move: who sends what to whom, and how a large change is cut into small ones.

All ranks derive the same order from the same two placements, so that nobody has to be told. A rank takes part in one
transfer at a time and all go through theirs in one common order: pairs that share no rank move at the same time, and
nobody can wait in a circle. Where an expert has copies, the one whose rank is free first sends.
"""

from dataclasses import replace
from typing import NamedTuple

import numpy as np

from expert_placement.moves import Move, moves_between, num_moved
from expert_placement.placement import Placement

BUSY_PART = 0.04  # of a step that a rank may work on transfers beside it, for p99 within 1.1 times


class Transfer(NamedTuple):
    """One expert from slot to slot, both counted over all ranks."""

    layer: int
    expert: int
    source: int
    target: int


def transfers_between(current: Placement, new: Placement) -> list[Transfer]:
    """Return what has to move, in the order in which all ranks must go through it."""
    width = current.slots_per_rank
    busy: list[set[int]] = [set() for _ in range(current.num_ranks)]  # rounds in which a rank takes part
    timed = []
    for move in moves_between(current, new):
        here = move.slot // width
        local = [slot for slot in move.sources if slot // width == here]
        source, round_ = (local[0], 0) if local else _earliest(move, width, busy)
        if not local:
            busy[here].add(round_)
            busy[source // width].add(round_)
        timed.append((round_, Transfer(move.layer, move.expert, source, move.slot)))
    timed.sort(key=lambda entry: entry[0])
    return [transfer for _, transfer in timed]


def _earliest(move: Move, width: int, busy: list[set[int]]) -> tuple[int, int]:
    """The source that can send first, and its round."""
    best: tuple[int, int, int] | None = None
    for source in move.sources:
        taken, round_ = busy[source // width] | busy[move.slot // width], 0
        while round_ in taken:
            round_ += 1
        candidate = (round_, len(busy[source // width]), source)
        best = min(best, candidate) if best else candidate
    assert best is not None, f"expert {move.expert} of layer {move.layer} is nowhere"
    return best[2], best[0]


def stages(current: Placement, new: Placement, most_per_rank: int) -> list[Placement]:
    """Cut a change into placements that follow each other, each a whole one, by layers.

    Args:
        most_per_rank: experts that may come to one rank in a stage; at least those of every single layer.

    Returns:
        With the versions after current's; the last one is `new`. Empty if nothing differs.

    Raises:
        ValueError: a layer alone brings more to one rank.
    """
    incoming = _incoming(current, new)
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
    made, done = [], np.zeros(current.num_layers, dtype=bool)
    for index, layers in enumerate(groups):
        done[layers] = True
        made.append(_mixed(current, new, done.copy(), current.version + 1 + index))
    return made


def _incoming(current: Placement, new: Placement) -> np.ndarray:
    """Slots to fill: [layers, ranks] int64."""
    num_moved(new, current)  # checks that they are alike
    differs = (new.slot_expert != current.slot_expert) & (new.slot_expert >= 0)
    shape = (current.num_layers, current.num_ranks, current.slots_per_rank)
    counts: np.ndarray = differs.reshape(shape).sum(axis=2)
    return counts


def _mixed(current: Placement, new: Placement, done: np.ndarray, version: int) -> Placement:
    mark = done[:, None]
    return replace(
        new,
        slot_expert=np.where(mark, new.slot_expert, current.slot_expert),
        share=np.where(mark, new.share, current.share),
        layer_slots=np.where(done, new.layer_slots, current.layer_slots),
        version=version,
    )
