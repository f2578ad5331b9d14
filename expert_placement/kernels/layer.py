"""The state of a layer's slots while it is planned, and the rules.

Rules: a rank never has two copies of an expert; a pinned expert keeps a copy on its home node; an expert's copies span
at least `min_nodes` nodes, or with `spread` as many as there are copies or nodes.

Legend: E experts, S slots of a layer, R ranks, N nodes.
"""

from typing import NamedTuple

import numpy as np

from expert_placement.kernels.compiled import inner
from expert_placement.kernels.fill import divide_as_before, divide_evenly, index_copies, pour

EMPTY = -1


class LayerRules(NamedTuple):
    """The rules of a layer, which do not depend on its slots."""

    node_R: np.ndarray  # [R] int64: the node of each rank
    num_nodes: int
    home_E: np.ndarray  # [E] int64: the node that keeps a copy, or -1
    min_nodes: int
    spread: bool
    even: bool  # copies share evenly; otherwise their loads are found by pouring


class LayerDraft(NamedTuple):
    """A plan in progress. All arrays are changed in place."""

    load_E: np.ndarray  # [E] float64
    slot_S: np.ndarray  # [S] int64: the expert of each slot
    x_S: np.ndarray  # [S] float64: the load of each slot
    level_R: np.ndarray  # [R] float64: the load of each rank
    copies_E: np.ndarray  # [E] int64
    on_RE: np.ndarray  # [R, E] int8: whether a rank has the expert
    on_NE: np.ndarray  # [N, E] int16: the number of copies on a node
    held_RE: np.ndarray  # [R, E] int8: whether a rank had the expert when the plan began
    slots_per_rank: int
    mean: float  # load per rank


def new_layer(load_E: np.ndarray, slot_RW: np.ndarray, x_RW: np.ndarray, rules: LayerRules) -> LayerDraft:
    """Return a draft with the present placement of a layer. Runs in Python.

    Args:
        load_E: [experts] float64, contiguous, not all 0.
        slot_RW: [ranks, slots per rank] int64, the experts. x_RW: Their loads; 0 for an empty slot.
    """
    num_ranks, slots_per_rank = slot_RW.shape
    num_experts = load_E.shape[0]
    rank, place = np.nonzero(slot_RW != EMPTY)
    expert = slot_RW[rank, place]
    on_RE = np.zeros((num_ranks, num_experts), np.int8)
    on_RE[rank, expert] = 1
    on_NE = np.zeros((rules.num_nodes, num_experts), np.int16)
    np.add.at(on_NE, (rules.node_R[rank], expert), 1)
    return LayerDraft(
        load_E,
        np.array(slot_RW.reshape(-1)),
        np.array(x_RW.reshape(-1)),
        np.zeros(num_ranks),
        np.bincount(expert, minlength=num_experts),
        on_RE,
        on_NE,
        on_RE.copy(),
        slots_per_rank,
        float(load_E.sum()) / num_ranks,
    )


@inner
def put(layer: LayerDraft, rules: LayerRules, slot: int, expert: int) -> None:
    """Put an expert, or nothing, into a slot. `refill` sets its load later."""
    rank = slot // layer.slots_per_rank
    node = rules.node_R[rank]
    before = layer.slot_S[slot]
    if before >= 0:
        layer.on_RE[rank, before] = 0
        layer.on_NE[node, before] -= 1
        layer.copies_E[before] -= 1
    layer.slot_S[slot] = expert
    if expert >= 0:
        layer.on_RE[rank, expert] = 1
        layer.on_NE[node, expert] += 1
        layer.copies_E[expert] += 1


@inner
def refill(layer: LayerDraft, rules: LayerRules, sweeps: int, tolerance: float) -> None:
    """Divide the loads between the copies again."""
    first_E, at_S = index_copies(layer.slot_S, layer.load_E.shape[0])
    if rules.even:
        divide_evenly(layer.load_E, first_E, at_S, layer.slots_per_rank, layer.x_S, layer.level_R)
    else:
        divide_as_before(layer.load_E, first_E, at_S, layer.slots_per_rank, layer.x_S, layer.level_R)
        pour(first_E, at_S, layer.slots_per_rank, layer.x_S, layer.level_R, sweeps, tolerance)


@inner
def may_leave(layer: LayerDraft, rules: LayerRules, expert: int, rank: int, to_rank: int) -> bool:
    """Whether the node rules allow a copy to move from `rank` to `to_rank`, or to be dropped (-1)."""
    node = rules.node_R[rank]
    to_node = rules.node_R[to_rank] if to_rank >= 0 else -1
    if node == to_node or layer.on_NE[node, expert] > 1:
        return True
    if rules.home_E[expert] == node:
        return False
    if rules.min_nodes <= 1 and not rules.spread:
        return True
    least = _least_span(rules, layer.copies_E[expert] - (to_rank < 0))
    return _span_after(layer, rules, expert, node, to_node) >= least


@inner
def _least_span(rules: LayerRules, copies: int) -> int:
    return max(rules.min_nodes, min(copies, rules.num_nodes)) if rules.spread else rules.min_nodes


@inner
def _span_after(layer: LayerDraft, rules: LayerRules, expert: int, left: int, entered: int) -> int:
    """Return the number of nodes with a copy after the last one on `left` moves to `entered` (-1: is dropped)."""
    span = 0
    for node in range(rules.num_nodes):
        span += (layer.on_NE[node, expert] > 0 and node != left) or node == entered
    return span


@inner
def may_enter(layer: LayerDraft, rules: LayerRules, expert: int, rank: int) -> bool:
    """Whether a rank may get one more copy."""
    if layer.on_RE[rank, expert]:
        return False
    node = rules.node_R[rank]
    if layer.on_NE[node, expert] == 0 or not rules.spread:
        return True
    least = min(int(layer.copies_E[expert]) + 1, rules.num_nodes)
    return _span_after(layer, rules, expert, -1, -1) >= least
