"""One layer at a time: construct and improve, repair, and divide, in terms of arrays. `planner` puts layers together.

Legend: E experts, R ranks, W slots of a rank, T steps.
"""

from typing import NamedTuple

import numpy as np

from expert_placement.kernels import layers as kernels
from expert_placement.kernels.layer import EMPTY, Layer, Rules, new_layer

NEVER = 1 << 40  # a budget of moved slots that nothing reaches
LARGE = 0.3  # of a rank's mean load: copies above it are copied again before others are doubled
GOOD = 1.0008  # a layer above it is planned in other ways as well, and the best is kept


class LayerPlan(NamedTuple):
    """What one layer came to."""

    slot_RW: np.ndarray  # [R, W] int64
    x_RW: np.ndarray  # [R, W] float64: the load of each slot
    moved_T: np.ndarray  # [steps + 1] int64: slots to fill after each step
    top_T: np.ndarray  # [steps + 1] float64: fullest rank over mean after each step

    @property
    def top(self) -> float:
        """Fullest rank over mean rank."""
        return float(self.top_T[-1])


def plan_layer(
    load_E: np.ndarray, slots_per_rank: int, rules: Rules, target: float, most_steps: int
) -> LayerPlan | None:
    """Plan from nothing; None when the rules cannot be kept."""
    load_E = _some_load(load_E)
    if rules.even:
        return _construct(load_E, slots_per_rank, rules, 0.0, False, target, most_steps)
    best = _construct(load_E, slots_per_rank, rules, LARGE, True, target, most_steps)
    if best is not None and best.top <= GOOD:
        return best
    by_size = _construct(load_E, slots_per_rank, rules, 0.0, False, target, most_steps)
    best = _better(best, by_size)
    evenly = _construct(load_E, slots_per_rank, rules._replace(even=True), 0.0, False, target, most_steps)
    if evenly is not None and (best is None or best.top > GOOD):
        best = _better(
            best, repair_layer(load_E, evenly.slot_RW, evenly.x_RW, rules, target, NEVER, most_steps)
        )
    return best


def _better(one: LayerPlan | None, other: LayerPlan | None) -> LayerPlan | None:
    if one is None or other is None:
        return one or other
    return other if other.top < one.top else one


def _construct(
    load_E: np.ndarray,
    slots_per_rank: int,
    rules: Rules,
    large: float,
    join: bool,
    target: float,
    most_steps: int,
) -> LayerPlan | None:
    num_ranks = len(rules.node_R)
    empty = np.full((num_ranks, slots_per_rank), EMPTY)
    layer = new_layer(load_E, empty, np.zeros(empty.shape), rules)
    wanted_E = kernels.count_copies(load_E, empty.size, rules.min_nodes, num_ranks, large * layer.mean)
    order = np.argsort(-load_E / wanted_E, kind="stable")
    if kernels.construct(layer, rules, wanted_E, order, join) >= 0:
        return None
    return _improve(layer, rules, target, NEVER, most_steps)


def repair_layer(
    load_E: np.ndarray,
    slot_RW: np.ndarray,
    x_RW: np.ndarray,
    rules: Rules,
    target: float,
    budget: int,
    most_steps: int,
) -> LayerPlan:
    """Improve what there is within a budget of moved slots and of steps."""
    return _improve(new_layer(_some_load(load_E), slot_RW, x_RW, rules), rules, target, budget, most_steps)


def _improve(layer: Layer, rules: Rules, target: float, budget: int, most_steps: int) -> LayerPlan:
    moved_T, top_T = np.zeros(most_steps + 1, np.int64), np.zeros(most_steps + 1)
    steps = kernels.improve(layer, rules, float(target), budget, most_steps, moved_T, top_T)
    shape = (len(rules.node_R), layer.slots_per_rank)
    return LayerPlan(
        layer.slot_S.reshape(shape), layer.x_S.reshape(shape), moved_T[: steps + 1], top_T[: steps + 1]
    )


def _some_load(load_E: np.ndarray) -> np.ndarray:
    """A layer without any load is planned as if all experts had the same."""
    return load_E if load_E.sum() > 0 else np.ones_like(load_E)


def fill_layers(
    load_LE: np.ndarray,
    slot_LS: np.ndarray,
    slots_per_rank: int,
    sweeps: int,
    tolerance: float,
    x_LS: np.ndarray,
) -> None:
    """Divide loads between copies so that the fullest rank is lowest, starting from the proportions in x_LS, in place.

    Args:
        load_LE: [layers, experts] float64. slot_LS: [layers, slots] int64, `EMPTY` where there is none.
        sweeps: at most. tolerance: of the mean rank's load.
        x_LS: [layers, slots] float64, 0 where a slot is empty; the loads of slots.
    """
    for load_E, slot_S, x_S in zip(load_LE, slot_LS, x_LS, strict=True):
        kernels.fill_layer(load_E, slot_S, slots_per_rank, sweeps, tolerance, x_S)
