"""Planning where experts go for a load: plan from nothing, repair an existing placement, or refresh its shares.

The cycle of rebalancing, with the file of each step:

    load.py -> forecast.py -> plan.py, chosen by control.py -> moves.py -> scheduler/moves/relocation.py (switch)
       ^                                                                                  |
       +----------------- the new placement serves and its load is counted ---------------+

Layers are planned separately. Everything is deterministic: the same load gives the same placement on every machine of a
kind. A repair is never worse for its load than the placement that it repairs. The kernels implement the algorithms:
`construct` (doubled hot experts that join ranks), `fill` (shares), `search` (bounded steps). Rejected, with figures in
research/placement: a new plan after every drift (moves 96 % of the slots), even shares, pinning copies to a group's node.

Legend: L layers, E experts, R ranks, W slots of a rank, S slots of a layer, T steps of a search."""

from typing import NamedTuple

import numpy as np

from expert_placement.kernels.construct import construct, count_copies
from expert_placement.kernels.fill import fill_layer
from expert_placement.kernels.layer import LayerDraft, LayerRules, new_layer
from expert_placement.kernels.search import improve
from expert_placement.moves import align, num_moved
from expert_placement.nodes import Rules
from expert_placement.placement import EMPTY, Placement, imbalance, slot_load

TARGET = 1.0002  # fullest rank over mean at which a plan from nothing stops searching
MOST_STEPS = 400
SWEEPS, TOLERANCE = 300, 1e-6  # for the final shares
LARGE = 0.3  # of a rank's mean load: larger copies are copied again before others are doubled
GOOD = 1.0008  # if a layer is worse, other ways are tried too and the best is kept


class Plan(NamedTuple):
    """A placement and its predicted effect."""

    placement: Placement
    imbalance: np.ndarray  # [L] float64: fullest rank over mean rank, for the planned load
    moved: np.ndarray  # [L] int64: slots to fill; all used ones for a plan from nothing


class LayerPlan(NamedTuple):
    """The result for one layer."""

    slot_RW: np.ndarray  # int64
    x_RW: np.ndarray  # float64: the load of each slot
    moved_T: np.ndarray  # [steps + 1] int64: slots to fill after each step
    top_T: np.ndarray  # [steps + 1] float64: fullest rank over mean after each step


def plan(load: np.ndarray, slots_per_rank: int, rules: Rules) -> Plan:
    """Plan from nothing.

    Args:
        load: [layers, experts], tokens or seconds, at least 0.
        slots_per_rank: Slots of every layer.
        rules: Rules to keep.

    Raises:
        ValueError: The load is invalid, or there are too few slots for the rules.
    """
    load = _checked(load)
    layers, experts = load.shape
    num_ranks = rules.cluster.num_ranks
    _check_slots(slots_per_rank, experts, rules)
    slot_LS = np.empty((layers, num_ranks * slots_per_rank), dtype=np.int64)
    x_LS = np.empty(slot_LS.shape)
    for layer, layer_rules in enumerate(_layer_rules(load, rules)):
        made = _plan_layer(_some_load(load[layer]), slots_per_rank, layer_rules)
        if made is None:
            raise ValueError(
                f"layer {layer}: {slots_per_rank} slots per rank on {num_ranks} ranks are too few for all experts' "
                f"homes and {rules.min_nodes} nodes each; give more slots"
            )
        slot_LS[layer], x_LS[layer] = made.slot_RW.reshape(-1), made.x_RW.reshape(-1)
    placement = Placement(slot_LS, experts, num_ranks)
    if not rules.even:
        placement = _with_loads(placement, load, x_LS)
    return Plan(placement, imbalance(placement, load), (slot_LS != EMPTY).sum(axis=1))


def refresh(load: np.ndarray, current: Placement) -> Placement:
    """Choose new shares for a load. Nothing moves. Takes microseconds per layer.

    Args:
        load: [layers, experts].
        current: Placement with the slots to keep. The search starts from its shares.
    """
    load = _checked(load)
    return _with_loads(current, load, slot_load(current, load))


def repair(
    load: np.ndarray,
    current: Placement,
    rules: Rules,
    *,
    target: float = TARGET,
    max_moves: int | None = None,
) -> Plan:
    """Improve a placement with few moves. First refreshes the shares, which moves nothing.

    Args:
        load: [layers, experts].
        current: Placement to repair, with the number of ranks of the rules' cluster.
        rules: Kept by every step. Existing violations are not repaired.
        target: Fullest rank over mean at which a layer is left alone.
        max_moves: Most slots to fill, over all layers. They are spent where they improve a layer most.
    """
    load = _checked(load)
    if current.num_ranks != rules.cluster.num_ranks:
        raise ValueError(
            f"the placement is for {current.num_ranks} ranks and the rules for {rules.cluster.num_ranks}"
        )
    before = imbalance(current, load)
    start = current if rules.even else refresh(load, current)
    steps = np.full(current.num_layers, MOST_STEPS, dtype=np.int64)
    placement, layers = _repaired(load, start, rules, target, steps)
    if max_moves is not None and sum(int(layer.moved_T[-1]) for layer in layers) > max_moves:
        steps = _affordable_steps(layers, load, max_moves)
        placement, _ = _repaired(load, start, rules, target, steps)
    placement = align(placement, current)
    reached = imbalance(placement, load)
    worse = reached > before  # only by rounding, if shares were already exact
    if worse.any():
        placement, reached = placement.with_layers(current, worse), np.where(worse, before, reached)
    return Plan(placement, reached, num_moved(placement, current))


def _repaired(
    load: np.ndarray, start: Placement, rules: Rules, target: float, most_steps: np.ndarray
) -> tuple[Placement, list[LayerPlan]]:
    slot_LRW = start.by_rank(start.slot_expert).copy()
    x_LRW = start.by_rank(slot_load(start, load)).copy()
    layers = []
    for layer, layer_rules in enumerate(_layer_rules(load, rules)):
        begun = new_layer(_some_load(load[layer]), slot_LRW[layer], x_LRW[layer], layer_rules)
        made = _improve(begun, layer_rules, target, int(most_steps[layer]))
        slot_LRW[layer], x_LRW[layer] = made.slot_RW, made.x_RW
        layers.append(made)
    slot_LS, x_LS = (part.reshape(start.slot_expert.shape) for part in (slot_LRW, x_LRW))
    placement = Placement(slot_LS, start.num_experts, start.num_ranks, version=start.version)
    return placement if rules.even else _with_loads(placement, load, x_LS), layers


def _affordable_steps(found: list[LayerPlan], load: np.ndarray, max_moves: int) -> np.ndarray:
    """Choose how many of each layer's steps to take, by the reduction of the fullest ranks per moved slot."""
    weight = load.sum(axis=1) / max(load.sum(), 1e-300)  # imbalance costs more in a busy layer
    taken = np.zeros(len(weight), dtype=np.int64)
    left = max_moves
    while True:
        best, best_rate, best_until = -1, 0.0, 0
        for layer in range(len(weight)):
            now, moved, top = taken[layer], found[layer].moved_T, found[layer].top_T
            cost = moved[now + 1 :] - moved[now]
            gain = (top[now] - top[now + 1 :]) * weight[layer]
            rate = np.where(cost <= left, gain / np.maximum(cost, 0.25), 0.0)
            if len(rate) and rate.max() > best_rate:
                best, best_rate, best_until = layer, float(rate.max()), int(now + 1 + rate.argmax())
        if best < 0:
            return taken
        left -= int(found[best].moved_T[best_until] - found[best].moved_T[taken[best]])
        taken[best] = best_until


def _plan_layer(load_E: np.ndarray, slots_per_rank: int, rules: LayerRules) -> LayerPlan | None:
    if rules.even:
        return _construct(load_E, slots_per_rank, rules)
    joined = _construct(load_E, slots_per_rank, rules, large=LARGE, join=True)
    if joined is not None and joined.top_T[-1] <= GOOD:
        return joined
    best = _better(joined, _construct(load_E, slots_per_rank, rules))
    if best is not None and best.top_T[-1] <= GOOD:
        return best
    evenly = _construct(load_E, slots_per_rank, rules._replace(even=True))
    if evenly is None:
        return best
    begun = new_layer(load_E, evenly.slot_RW, evenly.x_RW, rules)
    return _better(best, _improve(begun, rules, TARGET, MOST_STEPS))


def _better(one: LayerPlan | None, other: LayerPlan | None) -> LayerPlan | None:
    if one is None or other is None:
        return one or other
    return other if other.top_T[-1] < one.top_T[-1] else one


def _construct(
    load_E: np.ndarray, slots_per_rank: int, rules: LayerRules, large: float = 0.0, join: bool = False
) -> LayerPlan | None:
    num_ranks = len(rules.node_R)
    empty = np.full((num_ranks, slots_per_rank), EMPTY)
    layer = new_layer(load_E, empty, np.zeros(empty.shape), rules)
    wanted_E = count_copies(load_E, empty.size, rules.min_nodes, num_ranks, large * layer.mean)
    order = np.argsort(-load_E / wanted_E, kind="stable")
    if construct(layer, rules, wanted_E, order, join) >= 0:
        return None
    return _improve(layer, rules, TARGET, MOST_STEPS)


def _improve(layer: LayerDraft, rules: LayerRules, target: float, most_steps: int) -> LayerPlan:
    moved_T, top_T = np.zeros(most_steps + 1, np.int64), np.zeros(most_steps + 1)
    steps = improve(layer, rules, float(target), most_steps, moved_T, top_T)
    shape = (len(rules.node_R), layer.slots_per_rank)
    return LayerPlan(
        layer.slot_S.reshape(shape), layer.x_S.reshape(shape), moved_T[: steps + 1], top_T[: steps + 1]
    )


def _some_load(load_E: np.ndarray) -> np.ndarray:
    """Return the load, or an even one if the layer has none."""
    return load_E if load_E.sum() > 0 else np.ones_like(load_E)


def fill_layers(
    load_LE: np.ndarray,
    slot_LS: np.ndarray,
    slots_per_rank: int,
    sweeps: int,
    tolerance: float,
    x_LS: np.ndarray,
) -> None:
    """Divide loads between copies to minimise the fullest rank, in place. Starts from the proportions in x_LS.

    Args:
        load_LE: float64. slot_LS: int64, `EMPTY` for an empty slot.
        sweeps: Most sweeps. tolerance: Part of the mean rank's load.
        x_LS: float64, the loads of slots; 0 for an empty slot.
    """
    for load_E, slot_S, x_S in zip(load_LE, slot_LS, x_LS, strict=True):
        fill_layer(load_E, slot_S, slots_per_rank, sweeps, tolerance, x_S)


def _with_loads(placement: Placement, load: np.ndarray, x_LS: np.ndarray) -> Placement:
    is_empty = placement.slot_expert == EMPTY
    x_LS = np.where(is_empty, 0.0, x_LS)
    fill_layers(load, placement.slot_expert, placement.slots_per_rank, SWEEPS, TOLERANCE, x_LS)
    expert = np.where(is_empty, 0, placement.slot_expert)
    total = np.stack([np.bincount(e, x, minlength=load.shape[1]) for e, x in zip(expert, x_LS, strict=True)])
    total = np.take_along_axis(total, expert, axis=1)
    # An expert without load keeps even shares, so that its copies take turns if it gets some.
    even = placement.with_even_shares().share
    share = np.where(total > 0, x_LS / np.where(total > 0, total, 1.0), even)
    return Placement(
        placement.slot_expert, placement.num_experts, placement.num_ranks, share, placement.version
    )


def _checked(load: np.ndarray) -> np.ndarray:
    """Return a load as contiguous float64.

    Raises:
        ValueError: It is not [layers, experts], or has negative or non-finite values.
    """
    load = np.ascontiguousarray(load, dtype=np.float64)
    if load.ndim != 2 or 0 in load.shape:
        raise ValueError(f"the load has shape {load.shape}; it must be [layers, experts], both above 0")
    bad = ~np.isfinite(load) | (load < 0)
    if bad.any():
        layer, expert = np.argwhere(bad)[0].tolist()
        raise ValueError(
            f"layer {layer}: expert {expert} has the load {load[layer, expert]}; loads must be finite and 0 or more"
        )
    return load


def _check_slots(slots_per_rank: int, experts: int, rules: Rules) -> None:
    num_ranks = rules.cluster.num_ranks
    needed = -(-experts * rules.min_nodes // num_ranks)
    if not needed <= slots_per_rank <= experts:
        raise ValueError(
            f"there are {slots_per_rank} slots per rank; {experts} experts on {num_ranks} ranks"
            f"{f' and {rules.min_nodes} nodes each' if rules.min_nodes > 1 else ''} need {needed} to {experts}"
        )


def _layer_rules(load: np.ndarray, rules: Rules) -> list[LayerRules]:
    home = np.full(load.shape, -1) if rules.home is None else rules.home
    home = np.ascontiguousarray(home, dtype=np.int64)
    cluster = rules.cluster
    if home.shape != load.shape or home.max() >= cluster.num_nodes:
        raise ValueError(
            f"home has shape {home.shape} and nodes up to {home.max()}; it must have the load's shape {load.shape} "
            f"and nodes below {cluster.num_nodes}"
        )
    return [
        LayerRules(cluster.node_of_rank, cluster.num_nodes, home_E, rules.min_nodes, rules.spread, rules.even)
        for home_E in home
    ]
