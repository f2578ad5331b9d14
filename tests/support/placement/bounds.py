"""Lower bounds on the imbalance of any placement and any shares, to compare the planner with."""

import numpy as np

from expert_placement.placement import EMPTY, Placement, rank_load


def least_imbalance(load: np.ndarray, num_ranks: int, slots_per_rank: int) -> np.ndarray:
    """Return a lower bound on the imbalance of every placement with any shares: [layers] float64.

    With r copies of an expert, at least one copy carries 1 / r or more of its load. The fullest rank therefore carries at
    least the smallest t for which ceil(load / t) copies of every expert fit into the slots. The bound is 1 with many slots.
    """
    bound = np.ones(len(load))
    for layer, row in enumerate(load):
        mean = row.sum() / num_ranks
        if mean <= 0:
            continue
        low, high = 0.0, float(row.max())
        for _ in range(50):  # bisection, to 2^-50 of the hottest expert
            middle = 0.5 * (low + high)
            fits = np.maximum(np.ceil(row / middle), 1).sum() <= num_ranks * slots_per_rank
            low, high = (low, middle) if fits else (middle, high)
        bound[layer] = max(1.0, high / mean, row.max() / num_ranks / mean)
    return bound


def least_by_shares(placement: Placement, load: np.ndarray) -> np.ndarray:
    """Return a lower bound over all shares for fixed slots: [layers] float64, fullest rank over mean rank.

    Load of experts with all copies in a set of ranks must be served there, so the mean of the set is at most its
    fullest rank (max-flow, min-cut). The sets are the fullest one, two, three ... ranks under the placement's own shares.
    Under the best shares, one of these sets gives the tightest bound, so `plan.refresh` reaches its own bound.
    """
    ranks = rank_load(placement, load)
    place_LR = np.argsort(np.argsort(-ranks, axis=1, kind="stable"), axis=1)  # 0: the fullest rank
    whole_LE = np.zeros(load.shape, dtype=np.int64)  # the smallest set that holds all copies of an expert
    layer, slot = np.nonzero(placement.slot_expert != EMPTY)
    place = place_LR[layer, slot // placement.slots_per_rank]
    np.maximum.at(whole_LE, (layer, placement.slot_expert[layer, slot]), place)
    served_LR = np.zeros(ranks.shape)
    np.add.at(served_LR, (np.arange(len(load))[:, None], whole_LE), load)
    means = np.cumsum(served_LR, axis=1) / np.arange(1, placement.num_ranks + 1)
    mean = ranks.mean(axis=1)
    result: np.ndarray = np.divide(means.max(axis=1), mean, out=np.ones_like(mean), where=mean > 0)
    return result
