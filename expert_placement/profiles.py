"""Prefill and decode in one placement: one set of slots, shares for each phase.

The phases ask for different experts (their loads correlate by about 0.66, and a placement for one carries the other
1.8 times as unevenly): ranks that only prefill or only decode should be planned by their own phase's load. Where the
same ranks do both, weights can be in one place only, but shares cost nothing to switch: every phase has its own.
"""

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from expert_placement.candidates import assembled
from expert_placement.measure import imbalance
from expert_placement.placement import Placement
from expert_placement.plan import Rules, check_load, plan, refresh

_TILTS = (0.5, 0.35, 0.65, 0.2, 0.8)  # how much of the blend is the first phase's, beside their weights


class Profile(NamedTuple):
    """What one phase asks for."""

    load: np.ndarray  # [layers, experts]
    weight: float  # how much its imbalance costs beside the others', such as its part of the time


class PhasePlan(NamedTuple):
    """One placement, and by phase the shares to use and what they promise."""

    placements: dict[str, Placement]  # the same slots, each phase's shares
    imbalance: dict[str, np.ndarray]  # [layers] fullest rank over mean rank


def plan_phases(profiles: Mapping[str, Profile], slots_per_rank: int | np.ndarray, rules: Rules) -> PhasePlan:
    """Plan one placement for several phases.

    Several blends of the loads are planned; each layer takes the one with the least weighted imbalance.

    Args:
        profiles: by the phase's name, such as "prefill" and "decode".
        slots_per_rank: as for `plan`.
        rules: to keep to.

    Raises:
        ValueError: no profile, weights that are not above 0, or what `plan` raises.
    """
    if not profiles or any(profile.weight <= 0 for profile in profiles.values()):
        raise ValueError("plan_phases needs at least one profile, and weights above 0")
    loads = {name: _normalised(profile.load) for name, profile in profiles.items()}
    weights = np.array([profile.weight for profile in profiles.values()])
    candidates = [
        _scored(loads, plan(blend, slots_per_rank, rules).placement, rules)
        for blend in _blends(np.stack(list(loads.values())), weights / weights.sum())
    ]
    score = np.stack([np.tensordot(weights, np.stack(list(c.imbalance.values())), 1) for c in candidates])
    chosen = score.argmin(axis=0)
    return PhasePlan(
        {name: assembled([c.placements[name] for c in candidates], chosen) for name in loads},
        {name: np.choose(chosen, [c.imbalance[name] for c in candidates]) for name in loads},
    )


def _normalised(load: np.ndarray) -> np.ndarray:
    """Every layer's load adds up to 1: phases and layers count by their weight, not by their tokens."""
    load = check_load(load)
    total = load.sum(axis=1, keepdims=True)
    result: np.ndarray = np.divide(load, total, out=np.full_like(load, 1.0 / load.shape[1]), where=total > 0)
    return result


def _blends(loads: np.ndarray, weights: np.ndarray) -> list[np.ndarray]:
    """Loads to plan for: [phases, layers, experts] blended by weight, by tilts, and the larger of them."""
    if len(loads) == 1:
        return [loads[0]]
    rest = loads[1:].mean(axis=0)
    blends = [np.tensordot(weights, loads, 1), loads.max(axis=0)]
    return blends + [tilt * loads[0] + (1 - tilt) * rest for tilt in _TILTS]


def _scored(loads: dict[str, np.ndarray], placement: Placement, rules: Rules) -> PhasePlan:
    placements = {
        name: placement.with_shares(None) if rules.even else refresh(load, placement)  # type: ignore[arg-type]
        for name, load in loads.items()
    }
    return PhasePlan(placements, {name: imbalance(placements[name], load) for name, load in loads.items()})
