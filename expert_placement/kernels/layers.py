"""The entry points: one layer at a time, as plain arrays in a `Layer` that Python makes.

Few and small on purpose: numba compiles every entry point with all that it calls (the searches take half a minute on
one core, once per machine and version).
"""

import numpy as np

from expert_placement.kernels.compiled import entry
from expert_placement.kernels.construct import complete, missing, place_all
from expert_placement.kernels.construct import count_copies as _count_copies
from expert_placement.kernels.fill import divide_as_before, index_copies, pour
from expert_placement.kernels.layer import Layer, Rules, refill
from expert_placement.kernels.search import SWEEPS, TOLERANCE
from expert_placement.kernels.search import improve as _improve


@entry
def count_copies(load_E: np.ndarray, num_slots: int, least: int, most: int, large: float) -> np.ndarray:
    """See `construct.count_copies`."""
    return _count_copies(load_E, num_slots, least, most, large)


@entry
def construct(layer: Layer, rules: Rules, wanted_E: np.ndarray, order: np.ndarray, join: bool) -> int:
    """Fill an empty layer, see `construct.place_all`; returns -1, or an expert for which the rules cannot be kept."""
    place_all(layer, rules, wanted_E, order, join)
    complete(layer, rules)
    return missing(layer, rules)


@entry
def improve(
    layer: Layer,
    rules: Rules,
    target: float,
    budget: int,
    most_steps: int,
    moved_T: np.ndarray,
    top_T: np.ndarray,
) -> int:
    """Divide the loads anew, then search, see `search.improve`; returns the steps taken."""
    refill(layer, rules, SWEEPS, TOLERANCE)
    return _improve(layer, rules, target, budget, most_steps, moved_T, top_T)


@entry
def fill_layer(
    load_E: np.ndarray,
    slot_S: np.ndarray,
    slots_per_rank: int,
    sweeps: int,
    tolerance: float,
    x_S: np.ndarray,
) -> None:
    """Divide the loads between the copies anew, starting from the proportions in x_S, in place."""
    level_R = np.zeros(slot_S.shape[0] // slots_per_rank)
    first_E, at_S = index_copies(slot_S, load_E.shape[0])
    divide_as_before(load_E, first_E, at_S, slots_per_rank, x_S, level_R)
    pour(first_E, at_S, slots_per_rank, x_S, level_R, sweeps, tolerance)
