"""Initial placement of one layer: the number of copies of each expert, and their ranks.

Copies first go to experts that are too large for two ranks. Then every further slot doubles the hottest expert with a
single copy. A doubled hot expert lets two ranks level their loads later, batch by batch and after a drift, without
moving a weight. The doubled experts join the ranks into rings and trees (as in LPLB and FineMoE, which fix the graph;
here it follows the load). Then the others are placed, the largest first, each on the emptiest rank. With `large` at 0
and without joining, this is DeepSeek EPLB's global policy, except that a rank never has two copies of an expert.

Legend: E experts, R ranks, S slots of a layer.
"""

import numpy as np

from expert_placement.kernels.compiled import entry, inner
from expert_placement.kernels.fill import copy_into, highest
from expert_placement.kernels.layer import EMPTY, LayerDraft, LayerRules, may_enter, put


@entry
def count_copies(load_E: np.ndarray, num_slots: int, least: int, most: int, large: float) -> np.ndarray:
    """Return the number of copies of each expert.

    Args:
        load_E: float64. num_slots: Available slots. least, most: Limits of the copies of one expert.
        large: Load of a copy. Experts with larger copies are copied first, then the hottest are doubled.
    """
    num_experts = load_E.shape[0]
    copies_E = np.empty(num_experts, np.int64)
    for expert in range(num_experts):
        copies_E[expert] = least
    for _ in range(num_slots - num_experts * least):
        best, best_kind, best_value = -1, -1, -1.0
        for expert in range(num_experts):
            if copies_E[expert] >= most:
                continue
            value = load_E[expert] / copies_E[expert]
            kind = 2 if value > large else 0
            if kind == 0 and copies_E[expert] == least:
                kind, value = 1, load_E[expert]
            if kind > best_kind or (kind == best_kind and value > best_value):
                best, best_kind, best_value = expert, kind, value
        if best < 0:
            break
        copies_E[best] += 1
    return copies_E


@inner
def root(parent_R: np.ndarray, rank: int) -> int:
    while parent_R[rank] != rank:
        parent_R[rank] = parent_R[parent_R[rank]]
        rank = parent_R[rank]
    return rank


@inner
def _place(layer: LayerDraft, rules: LayerRules, expert: int, rank: int, each: float) -> None:
    begin = rank * layer.slots_per_rank
    for slot in range(begin, begin + layer.slots_per_rank):
        if layer.slot_S[slot] == EMPTY:
            put(layer, rules, slot, expert)
            layer.level_R[rank] += each
            return


@inner
def _emptiest(layer: LayerDraft, rules: LayerRules, expert: int, free_R: np.ndarray, node: int) -> int:
    """Return the least loaded rank on a node (-1: any) with room for the expert, or -1 if there is none."""
    best = -1
    for rank in range(free_R.shape[0]):
        if free_R[rank] <= 0 or (node >= 0 and rules.node_R[rank] != node):
            continue
        if (best < 0 or layer.level_R[rank] < layer.level_R[best]) and may_enter(layer, rules, expert, rank):
            best = rank
    return best


@inner
def _roomiest_node(layer: LayerDraft, rules: LayerRules, expert: int, free_R: np.ndarray) -> int:
    """Return the node without the expert that has the most free slots; among equals, the least loaded."""
    free_N = np.zeros(rules.num_nodes, np.int64)
    level_N = np.zeros(rules.num_nodes)
    for rank in range(free_R.shape[0]):
        free_N[rules.node_R[rank]] += free_R[rank]
        level_N[rules.node_R[rank]] += layer.level_R[rank]
    best = -1
    for node in range(rules.num_nodes):
        if free_N[node] == 0 or layer.on_NE[node, expert] > 0:
            continue
        if (
            best < 0
            or free_N[node] > free_N[best]
            or (free_N[node] == free_N[best] and level_N[node] < level_N[best])
        ):
            best = node
    return best


@inner
def _place_required(
    layer: LayerDraft, rules: LayerRules, wanted_E: np.ndarray, order: np.ndarray, free_R: np.ndarray
) -> None:
    """Place the copies with a fixed or restricted node: one at home, and `min_nodes` on different nodes."""
    num_ranks = free_R.shape[0]
    # Keep room on each rank for copies of other experts: at first, open only as many slots as required copies need.
    needed_N = np.zeros(rules.num_nodes, np.int64)
    size_N = np.zeros(rules.num_nodes, np.int64)
    for rank in range(num_ranks):
        size_N[rules.node_R[rank]] += 1
    for expert in range(order.shape[0]):
        if rules.home_E[expert] >= 0:
            needed_N[rules.home_E[expert]] += 1
    open_R = np.empty(num_ranks, np.int64)
    copy_into(free_R, open_R)
    if rules.min_nodes <= 1:
        for rank in range(num_ranks):
            node = rules.node_R[rank]
            open_R[rank] = min(free_R[rank], (needed_N[node] + size_N[node] - 1) // size_N[node])
    for k in range(order.shape[0]):
        expert = order[k]
        each = layer.load_E[expert] / wanted_E[expert]
        home = rules.home_E[expert]
        for copy in range(rules.min_nodes):
            node = home if copy == 0 and home >= 0 else _roomiest_node(layer, rules, expert, open_R)
            rank = _emptiest(layer, rules, expert, open_R, node) if node >= 0 else -1
            if rank >= 0:
                _place(layer, rules, expert, rank, each)
                open_R[rank] -= 1
                free_R[rank] -= 1


@inner
def _joining_rank(
    layer: LayerDraft,
    rules: LayerRules,
    expert: int,
    free_R: np.ndarray,
    shared_R: np.ndarray,
    parent_R: np.ndarray,
    joined: int,
) -> int:
    """Return a rank for one more copy: few shared experts, not joined with the others' ranks yet, little load."""
    best, best_shared, best_joined = -1, 0, False
    for rank in range(free_R.shape[0]):
        if free_R[rank] <= 0 or not may_enter(layer, rules, expert, rank):
            continue
        is_joined = joined >= 0 and root(parent_R, rank) == root(parent_R, joined)
        better = best < 0 or shared_R[rank] < best_shared
        if not better and shared_R[rank] == best_shared:
            better = best_joined and not is_joined
            if is_joined == best_joined:
                better = layer.level_R[rank] < layer.level_R[best]
        if better:
            best, best_shared, best_joined = rank, shared_R[rank], is_joined
    return best


@inner
def _place_all(
    layer: LayerDraft, rules: LayerRules, wanted_E: np.ndarray, order: np.ndarray, join: bool
) -> None:
    """Fill the empty layer with `wanted_E` copies of each expert. Copies without a possible place are left out.

    Args:
        order: Experts by falling load per copy.
        join: Place shared experts first, so that they join ranks. Otherwise strictly by size.
    """
    num_experts, num_ranks = layer.load_E.shape[0], layer.level_R.shape[0]
    free_R, shared_R = np.empty(num_ranks, np.int64), np.zeros(num_ranks, np.int64)
    parent_R = np.empty(num_ranks, np.int64)
    for rank in range(num_ranks):
        free_R[rank], parent_R[rank] = layer.slots_per_rank, rank
    if rules.min_nodes > 1 or rules.home_E[highest(rules.home_E)] >= 0:
        _place_required(layer, rules, wanted_E, order, free_R)
    for singles in range(2 if join else 1):
        for k in range(num_experts):
            expert = order[k]
            if join and (wanted_E[expert] == 1) != (singles == 1):
                continue
            each = layer.load_E[expert] / wanted_E[expert]
            joined = -1
            if join and wanted_E[expert] > 1:
                for rank in range(num_ranks):
                    if layer.on_RE[rank, expert]:
                        joined = rank
                        shared_R[rank] += 1
            for _ in range(wanted_E[expert] - layer.copies_E[expert]):
                if join and wanted_E[expert] > 1:
                    rank = _joining_rank(layer, rules, expert, free_R, shared_R, parent_R, joined)
                else:
                    rank = _emptiest(layer, rules, expert, free_R, -1)
                if rank < 0:
                    break
                _place(layer, rules, expert, rank, each)
                free_R[rank] -= 1
                shared_R[rank] += wanted_E[expert] > 1
                if joined >= 0:
                    parent_R[root(parent_R, rank)] = root(parent_R, joined)
                joined = rank


@inner
def _complete(layer: LayerDraft, rules: LayerRules) -> None:
    """Fill the remaining empty slots with further copies, the largest share first."""
    for slot in range(layer.slot_S.shape[0]):
        if layer.slot_S[slot] != EMPTY:
            continue
        rank = slot // layer.slots_per_rank
        best = -1
        for expert in range(layer.load_E.shape[0]):
            if (
                best >= 0
                and layer.load_E[expert] * layer.copies_E[best] <= layer.load_E[best] * layer.copies_E[expert]
            ):
                continue
            if may_enter(layer, rules, expert, rank):
                best = expert
        if best >= 0:
            put(layer, rules, slot, best)


@inner
def _missing(layer: LayerDraft, rules: LayerRules) -> int:
    """Return the first expert with too few copies for the rules, or -1."""
    for expert in range(layer.load_E.shape[0]):
        span = 0
        for node in range(rules.num_nodes):
            span += layer.on_NE[node, expert] > 0
        home = rules.home_E[expert]
        if span < rules.min_nodes or (home >= 0 and layer.on_NE[home, expert] == 0):
            return expert
    return -1


@entry
def construct(
    layer: LayerDraft, rules: LayerRules, wanted_E: np.ndarray, order: np.ndarray, join: bool
) -> int:
    """Fill an empty layer, as `_place_all`. Returns -1, or an expert for which the rules cannot be kept."""
    _place_all(layer, rules, wanted_E, order, join)
    _complete(layer, rules)
    return _missing(layer, rules)
