"""How many slots each layer gets, under one cap on a rank's memory.

Layers differ in how much a copy helps: one whose hottest expert is a third of a rank's load needs none, another needs
many (CRAFT, 2603.28768). Every layer is planned at every width; then slots go where the fullest ranks fall most.
"""

import numpy as np

from expert_placement.plan import Rules, check_load, plan


def share_slots(
    load: np.ndarray, total_slots_per_rank: int, rules: Rules, most: int | None = None
) -> np.ndarray:
    """Divide a rank's slots between the layers.

    Args:
        load: [layers, experts].
        total_slots_per_rank: slots of all layers together that fit in a rank's memory.
        rules: that the placement will keep to.
        most: slots of one layer; by default twice what equal parts would be.

    Returns:
        [layers] int64, slots per rank of each layer; their sum is at most the total.

    Raises:
        ValueError: the total does not hold every expert once.
    """
    load = check_load(load)
    layers, experts = load.shape
    least = -(-experts * rules.min_nodes // rules.cluster.num_ranks)
    if total_slots_per_rank < least * layers:
        raise ValueError(
            f"{total_slots_per_rank} slots per rank do not hold {layers} layers of {experts} experts on "
            f"{rules.cluster.num_ranks} ranks; at least {least * layers} are needed"
        )
    most = min(experts, max(least, most or 2 * -(-total_slots_per_rank // layers)))
    mean = load.sum(axis=1) / rules.cluster.num_ranks
    widths = range(least, most + 1)
    fullest = np.stack([plan(load, width, rules).imbalance * mean for width in widths], axis=1)
    fullest = np.minimum.accumulate(fullest, axis=1)  # more slots are never worse: one can stay empty
    widths_L: np.ndarray = least + _spend(fullest, total_slots_per_rank - least * layers)
    return widths_L


def _spend(fullest: np.ndarray, budget: int) -> np.ndarray:
    """Choose a column for each row so that the columns add up to at most the budget and the values are small.

    The steepest descent next, over any number of columns at once, since one more slot alone may not help.
    """
    column = np.zeros(len(fullest), dtype=np.int64)
    while budget > 0:
        best, best_rate, best_step = -1, 0.0, 0
        for row, values in enumerate(fullest):
            steps = np.arange(1, min(budget, len(values) - 1 - column[row]) + 1)
            rates = (values[column[row]] - values[column[row] + steps]) / steps
            if len(rates) and rates.max() > best_rate:
                best, best_rate, best_step = row, float(rates.max()), int(steps[rates.argmax()])
        if best < 0:
            break
        column[best] += best_step
        budget -= best_step
    return column
