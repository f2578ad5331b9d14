"""Local search on one layer: lower the fullest ranks by swapping two slots or by giving a slot another copy.

Ranks that can pour load into each other have one level. Such a *pool* rises and falls as a whole. A step takes the
fullest pool and predicts, for every slot elsewhere, the effect of swapping it with a slot of the pool (two slots move),
or of replacing a spare copy in it by a copy of one of the pool's experts (one slot moves). The most promising per moved
slot are tried by dividing the loads again. The best is kept if it lowers both the fullest rank and the sum of the
excesses to the fourth power. So no step makes the layer worse, and the search can stop at any time. Swaps on the
hottest card with a bounded number of moves are vllm-ascend's idea; predictions by pools and trials by pouring make it
converge.

Legend: S slots of a layer, R ranks, C candidates.
"""

import numpy as np

from expert_placement.kernels.compiled import entry, inner
from expert_placement.kernels.construct import root
from expert_placement.kernels.fill import (
    copy_into,
    divide_as_before,
    divide_evenly,
    highest,
    index_copies,
    pour,
)
from expert_placement.kernels.layer import EMPTY, LayerDraft, LayerRules, may_enter, may_leave, put, refill

SWEEPS, TRIAL_SWEEPS = 120, 40
TOLERANCE, TRIAL_TOLERANCE = 1e-5, 1e-4  # of the mean
LINKED = 1e-4  # of the mean: a copy with less load does not link its rank to a pool
FEW = 6  # steps tried, the most promising first; more only until one helps
LEAST_COST = 0.25  # moved slots; returning to the original slot moves nothing, but its value must be finite
SWAP, COPY = 0, 1


@inner
def excess(layer: LayerDraft, level_R: np.ndarray) -> float:
    """Return the sum of the fourth powers of the ranks' excess over the mean."""
    total = 0.0
    for rank in range(level_R.shape[0]):
        over = max(level_R[rank] / layer.mean - 1.0, 0.0)
        total += over * over * over * over
    return total


@inner
def _find_pools(layer: LayerDraft, rules: LayerRules) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return `(pool_R, size_R, height_R)`: each rank's pool, and by pool the number of ranks and the mean level."""
    num_ranks = layer.level_R.shape[0]
    parent_R = np.empty(num_ranks, np.int64)
    for rank in range(num_ranks):
        parent_R[rank] = rank
    if not rules.even:
        first_E, at_S = index_copies(layer.slot_S, layer.load_E.shape[0])
        for expert in range(layer.load_E.shape[0]):
            linked = -1
            for place in range(first_E[expert], first_E[expert + 1]):
                if layer.x_S[at_S[place]] > LINKED * layer.mean:
                    rank = at_S[place] // layer.slots_per_rank
                    if linked >= 0:
                        parent_R[root(parent_R, rank)] = root(parent_R, linked)
                    linked = rank
    pool_R = np.empty(num_ranks, np.int64)
    size_R, height_R = np.zeros(num_ranks), np.zeros(num_ranks)
    for rank in range(num_ranks):
        pool_R[rank] = root(parent_R, rank)
        size_R[pool_R[rank]] += 1.0
        height_R[pool_R[rank]] += layer.level_R[rank]
    for rank in range(num_ranks):
        if size_R[rank] > 0:
            height_R[rank] /= size_R[rank]
    return pool_R, size_R, height_R


@inner
def _cost(layer: LayerDraft, expert: int, replaced: int, rank: int) -> int:
    """Return the moved slots that a change of a rank's slot adds. -1 if the rank gets back what it had."""
    added = 0 if layer.held_RE[rank, expert] else 1
    return added if replaced < 0 or layer.held_RE[rank, replaced] else added - 1


@inner
def _swap_gain(high: float, high_size: float, low: float, low_size: float, moved: float) -> float:
    """Return how far the fullest of two pools falls when `moved` goes from one to the other."""
    return high - max(high - moved / high_size, low + moved / low_size)


@inner
def _copy_gain(
    layer: LayerDraft,
    rules: LayerRules,
    pools: tuple[np.ndarray, np.ndarray, np.ndarray],
    at: tuple[np.ndarray, np.ndarray],
    here: int,
    there: int,
    capacity: float,
) -> float:
    """Return how far the fullest pool falls when slot `there` gets a copy of the expert in slot `here`."""
    pool_R, size_R, height_R = pools
    first_E, at_S = at
    expert, spare = layer.slot_S[here], layer.slot_S[there]
    a = pool_R[here // layer.slots_per_rank]
    b = pool_R[there // layer.slots_per_rank]
    high, low, top = height_R[a], height_R[b], 0.0
    if spare >= 0:
        low -= layer.x_S[there] / size_R[b]
        others = layer.copies_E[spare] - 1
        for place in range(first_E[spare], first_E[spare + 1]):
            slot = at_S[place]
            if slot == there:
                continue
            pool = pool_R[slot // layer.slots_per_rank]
            inflow = layer.x_S[there] / others / size_R[pool]
            if pool == b:
                low += inflow
            elif pool == a:
                high += inflow
            else:
                top = max(top, height_R[pool] + inflow)
    if rules.even:
        copies = layer.copies_E[expert]
        each = layer.load_E[expert] / (copies + 1)
        top = max(top, high - layer.load_E[expert] / copies + each, low + each)
        return float(height_R[a] - top)
    flow = min(capacity, (high - low) / (1.0 / size_R[a] + 1.0 / size_R[b]))
    return float(height_R[a] - max(top, high - flow / size_R[a], low + flow / size_R[b]))


@inner
def _keep_best(
    found_C: np.ndarray,
    score_C: np.ndarray,
    score: float,
    kind: int,
    rank: int,
    to_rank: int,
    here: int,
    there: int,
    cost: int,
) -> None:
    """Keep the best candidate of each kind for each rank that gives and for each that takes.

    The most promising candidate may not relieve the rank that limits the layer.
    """
    for index in (4 * rank + kind, 4 * to_rank + 2 + kind):
        if score > score_C[index]:
            score_C[index] = score
            found_C[index, 0], found_C[index, 1], found_C[index, 2] = kind, here, there
            found_C[index, 3] = cost


@inner
def _propose(layer: LayerDraft, rules: LayerRules) -> tuple[np.ndarray, np.ndarray]:
    """Return the most promising steps `[kind, here, there, cost]` and their scores (0: no step)."""
    pools = _find_pools(layer, rules)
    pool_R, size_R, height_R = pools
    at = index_copies(layer.slot_S, layer.load_E.shape[0])
    found_C, score_C = (
        np.zeros((4 * layer.level_R.shape[0], 4), np.int64),
        np.zeros(4 * layer.level_R.shape[0]),
    )
    full = pool_R[highest(layer.level_R)]
    in_pool_E = np.zeros(layer.load_E.shape[0])
    num_slots, per = layer.slot_S.shape[0], layer.slots_per_rank
    for slot in range(num_slots):
        if layer.slot_S[slot] >= 0 and pool_R[slot // per] == full:
            in_pool_E[layer.slot_S[slot]] += layer.x_S[slot]
    for here in range(num_slots):
        rank, expert = here // per, layer.slot_S[here]
        if pool_R[rank] != full or expert == EMPTY or layer.x_S[here] <= 0.0:
            continue
        for there in range(num_slots):
            to_rank, other = there // per, layer.slot_S[there]
            if pool_R[to_rank] == full or layer.on_RE[to_rank, expert]:
                continue
            low = pool_R[to_rank]
            moved = layer.x_S[here] - layer.x_S[there]
            if moved > 0.0 and (other == EMPTY or not layer.on_RE[rank, other]):
                cost = _cost(layer, expert, other, to_rank)
                cost += _cost(layer, other, expert, rank) if other >= 0 else 0
                gain = _swap_gain(height_R[full], size_R[full], height_R[low], size_R[low], moved)
                score = gain / max(float(cost), LEAST_COST)
                if (
                    (score > score_C[4 * rank + SWAP] or score > score_C[4 * to_rank + 2 + SWAP])
                    and may_leave(layer, rules, expert, rank, to_rank)
                    and (other == EMPTY or may_leave(layer, rules, other, to_rank, rank))
                ):
                    _keep_best(found_C, score_C, score, SWAP, rank, to_rank, here, there, cost)
            if other == EMPTY or layer.copies_E[other] > 1:
                cost = _cost(layer, expert, other, to_rank)
                gain = _copy_gain(layer, rules, pools, at, here, there, in_pool_E[expert])
                score = gain / max(float(cost), LEAST_COST)
                if (
                    (score > score_C[4 * rank + COPY] or score > score_C[4 * to_rank + 2 + COPY])
                    and may_enter(layer, rules, expert, to_rank)
                    and (other == EMPTY or may_leave(layer, rules, other, to_rank, -1))
                ):
                    _keep_best(found_C, score_C, score, COPY, rank, to_rank, here, there, cost)
    return found_C, score_C


@inner
def _try(
    layer: LayerDraft, rules: LayerRules, step: np.ndarray, x_S: np.ndarray, level_R: np.ndarray
) -> None:
    """Write the loads of slots and ranks after a step into x_S and level_R. The layer stays unchanged."""
    here, there = step[1], step[2]
    expert, other = layer.slot_S[here], layer.slot_S[there]
    copy_into(layer.x_S, x_S)
    layer.slot_S[there] = expert
    if step[0] == SWAP:
        layer.slot_S[here] = other
        x_S[there], x_S[here] = layer.x_S[here], layer.x_S[there]
    else:
        x_S[there] = 0.0
    first_E, at_S = index_copies(layer.slot_S, layer.load_E.shape[0])
    layer.slot_S[here], layer.slot_S[there] = expert, other
    if rules.even:
        divide_evenly(layer.load_E, first_E, at_S, layer.slots_per_rank, x_S, level_R)
    else:
        divide_as_before(layer.load_E, first_E, at_S, layer.slots_per_rank, x_S, level_R)
        pour(first_E, at_S, layer.slots_per_rank, x_S, level_R, TRIAL_SWEEPS, TRIAL_TOLERANCE)


@inner
def _best_step(
    layer: LayerDraft, rules: LayerRules, best_x_S: np.ndarray, best_level_R: np.ndarray
) -> tuple[int, int, int, int]:
    """Return `(kind, here, there, cost)` of the best step that helps. The kind is -1 if no step helps."""
    found_C, score_C = _propose(layer, rules)
    x_S, level_R = np.empty(layer.x_S.shape[0]), np.empty(layer.level_R.shape[0])
    before, top = excess(layer, layer.level_R), layer.level_R[highest(layer.level_R)]
    best, best_score = -1, 0.0
    for tried in range(score_C.shape[0]):
        index = highest(score_C)
        if score_C[index] <= 0.0 or (best >= 0 and tried >= FEW):
            break
        score_C[index] = 0.0
        _try(layer, rules, found_C[index], x_S, level_R)
        after = excess(layer, level_R)
        if level_R[highest(level_R)] > top or after >= before * (1.0 - 1e-6):
            continue
        score = (before**0.25 - after**0.25) / max(float(found_C[index, 3]), LEAST_COST)
        if score > best_score:
            best, best_score = index, score
            copy_into(x_S, best_x_S)
            copy_into(level_R, best_level_R)
    if best < 0:
        return -1, 0, 0, 0
    return found_C[best, 0], found_C[best, 1], found_C[best, 2], found_C[best, 3]


@entry
def improve(
    layer: LayerDraft,
    rules: LayerRules,
    target: float,
    most_steps: int,
    moved_T: np.ndarray,
    top_T: np.ndarray,
) -> int:
    """Divide the loads, then take steps until the fullest rank is at `target` x mean or no step helps.

    Args:
        layer: A filled layer; changed in place.
        most_steps: Most steps to take.
        moved_T, top_T: [most_steps + 1], written: moved slots, and the fullest rank's load / mean, after each step.

    Returns:
        The number of steps taken.
    """
    refill(layer, rules, SWEEPS, TOLERANCE)
    best_x_S, best_level_R = np.empty(layer.x_S.shape[0]), np.empty(layer.level_R.shape[0])
    moved_T[0], top_T[0] = 0, layer.level_R[highest(layer.level_R)] / layer.mean
    for step in range(most_steps):
        if top_T[step] <= target:
            return step
        kind, here, there, cost = _best_step(layer, rules, best_x_S, best_level_R)
        if kind < 0:
            return step
        expert, other = layer.slot_S[here], layer.slot_S[there]
        put(layer, rules, there, EMPTY)
        if kind == SWAP:
            put(layer, rules, here, other)
        put(layer, rules, there, expert)
        copy_into(best_x_S, layer.x_S)
        copy_into(best_level_R, layer.level_R)
        refill(layer, rules, SWEEPS, TOLERANCE)
        moved_T[step + 1] = moved_T[step] + cost
        top_T[step + 1] = layer.level_R[highest(layer.level_R)] / layer.mean
    return most_steps
