"""Where experts go, from how much each is asked for: plan from nothing, repair what there is, refresh the shares.

Layers are planned by themselves. Everything is deterministic: the same load gives the same placement on every machine
of a kind. A plan made here is never worse, by the load it was made for, than the placement that it repairs.
The algorithms are those of the kernels: `construct` (doubled hot experts that join ranks), `fill` (shares), `search`
(bounded steps). What was rejected, with figures: research/placement; in short, planning anew after every drift (moves
96 % of the slots), even shares where shares may be chosen, pinning all copies of a group to one node.
"""

from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from expert_placement.kernels.layer import Rules as LayerRules
from expert_placement.layer_plan import NEVER, LayerPlan, fill_layers, plan_layer, repair_layer
from expert_placement.measure import imbalance, slot_load
from expert_placement.moves import align, num_moved
from expert_placement.nodes import Cluster
from expert_placement.placement import EMPTY, Placement

TARGET = 1.0002  # fullest rank over mean, where a plan from nothing stops searching
MOST_STEPS = 400
SWEEPS, TOLERANCE = 300, 1e-6  # of the final shares


@dataclass(frozen=True, kw_only=True)
class Rules:
    """What every placement must keep to.

    Attributes:
        cluster: ranks and nodes.
        home: [layers, experts] the node that keeps a copy of the expert, -1 for none; see `cluster.group_homes`.
        min_nodes: every expert has copies on at least so many nodes, so that it survives one less than that.
        spread: copies go to different nodes as long as there are nodes without one.
        even: copies share evenly, as programs without shares assume.
    """

    cluster: Cluster
    home: np.ndarray | None = None
    min_nodes: int = 1
    spread: bool = False
    even: bool = False

    def __post_init__(self) -> None:
        """Check what can be checked without a load.

        Raises:
            ValueError: more nodes asked for than there are.
        """
        if not 1 <= self.min_nodes <= self.cluster.num_nodes:
            raise ValueError(
                f"min_nodes is {self.min_nodes}; it must be 1 to the {self.cluster.num_nodes} nodes there are"
            )


class Plan(NamedTuple):
    """A placement and what it promises."""

    placement: Placement
    imbalance: np.ndarray  # [layers] float64: fullest rank over mean rank, for the load it was made for
    moved: np.ndarray  # [layers] int64: slots to fill; for a plan from nothing all that are in use


def plan(load: np.ndarray, slots_per_rank: int | np.ndarray, rules: Rules) -> Plan:
    """Plan from nothing.

    Args:
        load: [layers, experts], tokens or seconds, at least 0.
        slots_per_rank: one number, or [layers]; see `budget.share_slots`.
        rules: to keep to.

    Raises:
        ValueError: the load is no load, or the slots do not suffice for the rules.
    """
    load = check_load(load)
    layers, experts = load.shape
    slots = np.broadcast_to(np.asarray(slots_per_rank, dtype=np.int64), (layers,)).copy()
    _check_slots(slots, experts, rules)
    num_ranks, width = rules.cluster.num_ranks, int(slots.max(initial=1))
    slot_LRW = np.full((layers, num_ranks, width), EMPTY, dtype=np.int64)
    x_LRW = np.zeros(slot_LRW.shape)
    for layer, layer_rules in enumerate(_layer_rules(load, rules)):
        made = plan_layer(load[layer], int(slots[layer]), layer_rules, TARGET, MOST_STEPS)
        if made is None:
            raise ValueError(
                f"layer {layer}: {slots[layer]} slots per rank on {num_ranks} ranks do not suffice for all experts' "
                f"homes and {rules.min_nodes} nodes for each; give more slots"
            )
        slot_LRW[layer, :, : slots[layer]], x_LRW[layer, :, : slots[layer]] = made.slot_RW, made.x_RW
    slot_LS, x_LS = slot_LRW.reshape(layers, -1), x_LRW.reshape(layers, -1)
    placement = Placement(slot_LS, experts, num_ranks, layer_slots=slots)
    if not rules.even:
        placement = _with_loads(placement, load, x_LS)
    return Plan(placement, imbalance(placement, load), (slot_LS != EMPTY).sum(axis=1))


def refresh(load: np.ndarray, current: Placement) -> Placement:
    """Choose the shares anew for a load; nothing moves. Microseconds per layer.

    Args:
        load: [layers, experts].
        current: slots to keep; its shares are where the search for new ones starts.
    """
    load = check_load(load)
    return _with_loads(current, load, slot_load(current, load))


def repair(
    load: np.ndarray,
    current: Placement,
    rules: Rules,
    *,
    target: float = TARGET,
    max_moves: int | None = None,
    max_moves_per_layer: int | None = None,
) -> Plan:
    """Improve a placement with few moves; the shares are refreshed first, which moves nothing.

    Args:
        load: [layers, experts].
        current: must have as many ranks as the rules' cluster.
        rules: kept by every step; what `current` breaks already is not mended.
        target: fullest rank over mean at which a layer is left alone.
        max_moves: slots to fill, over all layers; they are spent where each lowers a layer most.
        max_moves_per_layer: slots to fill in one layer.
    """
    load = check_load(load)
    _check_fits(load, current, rules)
    start = current if rules.even else refresh(load, current)
    per_layer = NEVER if max_moves_per_layer is None else max_moves_per_layer
    steps = np.full(current.num_layers, MOST_STEPS, dtype=np.int64)
    found = _repaired(load, start, rules, target, per_layer, steps)
    if max_moves is not None and found.num_moved > max_moves:
        steps = _affordable_steps(found.layers, load, max_moves)
        found = _repaired(load, start, rules, target, per_layer, steps)
    placement = align(found.placement, current)
    reached, before = imbalance(placement, load), imbalance(current, load)
    worse = reached > before  # by rounding only: shares that were exact already
    if worse.any():
        placement, reached = _keep_layers(placement, current, worse), np.where(worse, before, reached)
    return Plan(placement, reached, num_moved(placement, current))


class _Repaired(NamedTuple):
    placement: Placement
    layers: list[LayerPlan]

    @property
    def num_moved(self) -> int:
        return sum(int(layer.moved_T[-1]) for layer in self.layers)


def _repaired(
    load: np.ndarray, start: Placement, rules: Rules, target: float, budget: int, most_steps: np.ndarray
) -> _Repaired:
    shape = (start.num_layers, start.num_ranks, start.slots_per_rank)
    slot_LRW, x_LRW = start.slot_expert.reshape(shape).copy(), slot_load(start, load).reshape(shape).copy()
    layers = []
    for layer, layer_rules in enumerate(_layer_rules(load, rules)):
        used = np.s_[layer, :, : start.layer_slots[layer]]
        made = repair_layer(
            load[layer], slot_LRW[used], x_LRW[used], layer_rules, target, budget, int(most_steps[layer])
        )
        slot_LRW[used], x_LRW[used] = made.slot_RW, made.x_RW
        layers.append(made)
    slot_LS = slot_LRW.reshape(start.slot_expert.shape)
    placement = replace(start, slot_expert=slot_LS, share=None)  # type: ignore[arg-type]  # even
    if not rules.even:
        placement = _with_loads(placement, load, x_LRW.reshape(slot_LS.shape))
    return _Repaired(placement, layers)


def _affordable_steps(found: list[LayerPlan], load: np.ndarray, max_moves: int) -> np.ndarray:
    """How many of each layer's steps to take: those first that lower the fullest ranks most per moved slot."""
    weight = load.sum(axis=1) / max(load.sum(), 1e-300)  # a busy layer's imbalance costs more
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


def _keep_layers(new: Placement, current: Placement, kept: np.ndarray) -> Placement:
    """Take the layers marked in `kept` from `current`."""
    mark = kept[:, None]
    return replace(
        new,
        slot_expert=np.where(mark, current.slot_expert, new.slot_expert),
        share=np.where(mark, current.share, new.share),
    )


def _with_loads(placement: Placement, load: np.ndarray, x: np.ndarray) -> Placement:
    """Give a placement the shares that level its ranks, searched from the slots' loads x."""
    x = np.where(placement.slot_expert == EMPTY, 0.0, x)
    fill_layers(load, placement.slot_expert, placement.slots_per_rank, SWEEPS, TOLERANCE, x)
    expert = np.where(placement.slot_expert == EMPTY, 0, placement.slot_expert)
    total = np.stack([np.bincount(e, row, minlength=load.shape[1]) for e, row in zip(expert, x, strict=True)])
    total = np.take_along_axis(total, expert, axis=1)
    even = replace(placement, share=None)  # type: ignore[arg-type]
    # An expert without load keeps even shares: should it get some after all, its copies take turns.
    return replace(placement, share=np.where(total > 0, x / np.where(total > 0, total, 1.0), even.share))


def check_load(load: np.ndarray) -> np.ndarray:
    """Return a load as float64, contiguous.

    Raises:
        ValueError: it is not [layers, experts], or has values below 0 or not finite.
    """
    load = np.ascontiguousarray(load, dtype=np.float64)
    if load.ndim != 2 or 0 in load.shape:
        raise ValueError(f"the load has shape {load.shape}; it must be [layers, experts], neither of them 0")
    bad = ~np.isfinite(load) | (load < 0)
    if bad.any():
        layer, expert = np.argwhere(bad)[0].tolist()
        raise ValueError(
            f"layer {layer}: expert {expert} has the load {load[layer, expert]}; loads are numbers from 0 up"
        )
    return load


def _check_slots(slots: np.ndarray, experts: int, rules: Rules) -> None:
    num_ranks = rules.cluster.num_ranks
    needed = -(-experts * rules.min_nodes // num_ranks)
    if slots.min() < needed or slots.max() > experts:
        raise ValueError(
            f"slots per rank are {slots.min()} to {slots.max()}; {experts} experts on {num_ranks} ranks"
            f"{f' and {rules.min_nodes} nodes each' if rules.min_nodes > 1 else ''} need {needed} to {experts}"
        )


def _check_fits(load: np.ndarray, current: Placement, rules: Rules) -> None:
    if current.num_ranks != rules.cluster.num_ranks:
        raise ValueError(
            f"the placement is for {current.num_ranks} ranks and the rules for {rules.cluster.num_ranks}"
        )
    imbalance(current, load)  # checks that the shapes fit


def _layer_rules(load: np.ndarray, rules: Rules) -> list[LayerRules]:
    home = np.full(load.shape, -1) if rules.home is None else rules.home
    home = np.ascontiguousarray(home, dtype=np.int64)
    if home.shape != load.shape or home.max() >= rules.cluster.num_nodes:
        raise ValueError(
            f"home has shape {home.shape} and nodes up to {home.max()}; it must have the load's shape {load.shape} "
            f"and nodes below {rules.cluster.num_nodes}"
        )
    cluster = rules.cluster
    node_R = cluster.node_of_rank
    return [
        LayerRules(node_R, cluster.num_nodes, home_E, rules.min_nodes, rules.spread, rules.even)
        for home_E in home
    ]
