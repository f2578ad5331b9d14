"""Bounds that no placement and no shares beat, to compare the planner with."""

import numpy as np

from expert_placement.placement import EMPTY, Placement, rank_load


def least_imbalance(load: np.ndarray, num_ranks: int, slots_per_rank: int) -> np.ndarray:
    """A bound that no placement beats, whatever its shares: [layers] float64.

    One copy of an expert with r copies carries at least 1 / r of its load, so the fullest rank carries at least the
    smallest t for which ceil(load / t) copies of every expert find slots. 1 where slots are many.
    """
    bound = np.ones(len(load))
    for layer, row in enumerate(load):
        mean = row.sum() / num_ranks
        if mean <= 0:
            continue
        low, high = 0.0, float(row.max())
        for _ in range(50):  # bisection: to 2^-50 of the hottest expert
            middle = 0.5 * (low + high)
            fits = np.maximum(np.ceil(row / middle), 1).sum() <= num_ranks * slots_per_rank
            low, high = (low, middle) if fits else (middle, high)
        bound[layer] = max(1.0, high / mean, row.max() / num_ranks / mean)
    return bound


def least_by_shares(placement: Placement, load: np.ndarray) -> np.ndarray:
    """A bound that no shares beat where the slots stay as they are: [layers] float64, fullest rank over mean rank.

    What only a set of ranks has copies of, they must serve: the mean of such a set is below its fullest rank (max-flow,
    min-cut). The sets looked at are the fullest one, two, three ... ranks under the placement's own shares. Under the
    best shares one of these sets is the worst there is, so that `plan.refresh` meets its own bound.
    """
    ranks = rank_load(placement, load)
    place_LR = np.argsort(np.argsort(-ranks, axis=1, kind="stable"), axis=1)  # 0: the fullest rank
    whole_LE = np.zeros(load.shape, dtype=np.int64)  # the smallest set that has all copies of an expert
    layer, slot = np.nonzero(placement.slot_expert != EMPTY)
    place = place_LR[layer, slot // placement.slots_per_rank]
    np.maximum.at(whole_LE, (layer, placement.slot_expert[layer, slot]), place)
    served_LR = np.zeros(ranks.shape)
    np.add.at(served_LR, (np.arange(len(load))[:, None], whole_LE), load)
    means = np.cumsum(served_LR, axis=1) / np.arange(1, placement.num_ranks + 1)
    mean = ranks.mean(axis=1)
    result: np.ndarray = np.divide(means.max(axis=1), mean, out=np.ones_like(mean), where=mean > 0)
    return result
