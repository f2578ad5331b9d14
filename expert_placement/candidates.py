"""One placement of several: every layer from where it costs least, in seconds.

Ranks wait for one another in every layer, so that layers' seconds add up and can be chosen one by one. What is put
together so costs no more than any of the candidates.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np

from expert_placement.moves import num_moved
from expert_placement.placement import Placement

LayerSeconds = Callable[[Placement], np.ndarray]  # [layers], what a placement costs


def assembled(candidates: Sequence[Placement], chosen: np.ndarray) -> Placement:
    """Take each layer from the candidate chosen for it.

    Args:
        candidates: alike in layers, experts, ranks and slots.
        chosen: [layers] int64, indices into them.
    """
    layer = np.arange(len(chosen))
    return replace(
        candidates[0],
        slot_expert=np.stack([placement.slot_expert for placement in candidates])[chosen, layer],
        share=np.stack([placement.share for placement in candidates])[chosen, layer],
        layer_slots=np.stack([placement.layer_slots for placement in candidates])[chosen, layer],
    )


def cheapest(candidates: Sequence[Placement], seconds: LayerSeconds) -> Placement:
    """Take each layer from the candidate under which it costs least, the first of equals."""
    return assembled(candidates, np.stack([seconds(placement) for placement in candidates]).argmin(axis=0))


def cheapest_within(
    candidates: Sequence[Placement], seconds: LayerSeconds, current: Placement, most_moves: int
) -> Placement:
    """As `cheapest`, but no more slots are filled than may be: else the cheapest candidate as it is.

    Args:
        candidates: each within the budget.
        current: what serves.
        most_moves: slots to fill, over all layers.
    """
    mixed = cheapest(candidates, seconds)
    if num_moved(mixed, current).sum() <= most_moves:
        return mixed
    return min(candidates, key=lambda placement: float(seconds(placement).sum()))
