"""What-if simulation of policies, redundancy and widths on a recorded load, with the planner of the service.

A placement is made from what is known when a window ends and judged on the next one, as in service. It is also judged
on its own window ("known"), to distinguish a bad plan from a changed load. If prefill and decode were recorded
separately, the placement, made for their sum, is judged on each as well.
"""

import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from expert_placement.moves import num_moved
from expert_placement.nodes import Rules, group_homes
from expert_placement.placement import EMPTY, Placement, imbalance, linear_placement, slot_load
from expert_placement.plan import plan, refresh, repair


@dataclass(frozen=True, kw_only=True)
class SimulationSetting:
    """The input of all policies in a simulation.

    Attributes:
        rules: Rules to keep; the policies set `home` and `even`.
        slots_per_rank: Slots of a layer on a rank.
        target: Fullest rank over mean at which `repair` leaves a layer alone.
        max_moved: Part of all slots that `repair` may fill at once.
        num_groups: Number of expert groups, for the policy `pinned`.
    """

    rules: Rules
    slots_per_rank: int
    target: float = 1.02
    max_moved: float = 0.1
    num_groups: int = 1


@dataclass(frozen=True, kw_only=True)
class PlacementFigures:
    """Fullest rank over mean rank, over layers and windows. None if no window had any load."""

    known_mean: float | None  # for the window for which a placement was made
    known_worst: float | None
    next_mean: float | None  # for the window after it
    next_worst: float | None


@dataclass(frozen=True, kw_only=True)
class PolicyResult(PlacementFigures):
    """The result of a policy on a trace."""

    policy: str
    ranks: int
    slots: int  # of a layer, all ranks together
    phases: dict[str, PlacementFigures]  # by phase, if the trace has phases
    moved: float  # part of the slots filled per update; 0 for a trace with one window
    away: float  # part of the load served outside of the experts' home nodes
    plan_ms: float  # per update, all layers

    def to_json(self) -> dict[str, Any]:
        """Return JSON values."""
        return asdict(self)


class _Policy(NamedTuple):
    start: Callable[[np.ndarray, SimulationSetting], Placement]
    update: Callable[[np.ndarray, Placement, SimulationSetting], Placement]


def _plan(
    load: np.ndarray, setting: SimulationSetting, even: bool = False, pinned: bool = False
) -> Placement:
    return plan(load, setting.slots_per_rank, _rules(setting, load, even, pinned)).placement


def _rules(setting: SimulationSetting, load: np.ndarray, even: bool, pinned: bool) -> Rules:
    home = group_homes(load, setting.num_groups, setting.rules.cluster.num_nodes) if pinned else None
    return replace(setting.rules, home=home, even=even)


def _linear(load: np.ndarray, setting: SimulationSetting) -> Placement:
    layers, experts = load.shape
    return linear_placement(layers, experts, setting.rules.cluster.num_ranks)


def _keep(_load: np.ndarray, current: Placement, _setting: SimulationSetting) -> Placement:
    return current


def _refresh(load: np.ndarray, current: Placement, _setting: SimulationSetting) -> Placement:
    return refresh(load, current)


def _repair(load: np.ndarray, current: Placement, setting: SimulationSetting) -> Placement:
    budget = int(setting.max_moved * current.slot_expert.size)
    rules = _rules(setting, load, even=False, pinned=False)
    return repair(load, current, rules, target=setting.target, max_moves=budget).placement


def _anew(
    make: Callable[[np.ndarray, SimulationSetting], Placement],
) -> Callable[[np.ndarray, Placement, SimulationSetting], Placement]:
    return lambda load, _current, setting: make(load, setting)


_even, _pinned = partial(_plan, even=True), partial(_plan, pinned=True)
POLICIES = {
    "linear": _Policy(_linear, _keep),
    "even": _Policy(_even, _anew(_even)),
    "plan": _Policy(_plan, _anew(_plan)),
    "pinned": _Policy(_pinned, _anew(_pinned)),
    "shares": _Policy(_plan, _refresh),
    "repair": _Policy(_plan, _repair),
}


class _Judge:
    """Judges placements on the windows of one load."""

    def __init__(self, load: np.ndarray) -> None:
        self._load = load
        self._known: list[np.ndarray] = []
        self._later: list[np.ndarray] = []

    def judge(self, placement: Placement, window: int) -> None:
        """Judge the placement made for a window on this window and the next one."""
        for judged, at in ((self._known, window), (self._later, window + 1)):
            if at < len(self._load) and self._load[at].any():
                judged.append(imbalance(placement, self._load[at]))

    def figures(self) -> dict[str, float | None]:
        """Return the fields of `PlacementFigures`."""
        values: dict[str, float | None] = {}
        for name, judged in (("known", self._known), ("next", self._later)):
            values[f"{name}_mean"] = float(np.mean(judged)) if judged else None
            values[f"{name}_worst"] = float(np.max(judged)) if judged else None
        return values


def simulate(
    policy: str, load: np.ndarray, setting: SimulationSetting, phases: Mapping[str, np.ndarray] | None = None
) -> PolicyResult:
    """Run one policy over a trace. Windows without any load are left out.

    Args:
        policy: One of `POLICIES`.
        load: [windows, layers, experts].
        setting: Input of the policy.
        phases: Parts of the load, of the same shape, on which placements are judged too.

    Raises:
        ValueError: The policy is unknown, or the planner failed.
    """
    if policy not in POLICIES:
        raise ValueError(f"policy is {policy!r}; it must be one of {', '.join(POLICIES)}")
    start, update = POLICIES[policy]
    busy = load.any(axis=(1, 2))
    load = load[busy]
    judge, by_phase = _Judge(load), {name: _Judge(part[busy]) for name, part in (phases or {}).items()}
    moved, seconds = [], []
    current: Placement | None = None
    for window, now in enumerate(load):
        begin = time.perf_counter()
        made = start(now, setting) if current is None else update(now, current, setting)
        seconds.append(time.perf_counter() - begin)
        if current is not None:
            moved.append(num_moved(made, current).sum() / max((made.slot_expert >= 0).sum(), 1))
        current = made
        for each in (judge, *by_phase.values()):
            each.judge(current, window)
    assert current is not None, "a trace has a window"
    return PolicyResult(
        policy=policy,
        ranks=current.num_ranks,
        slots=current.slot_expert.shape[1],
        phases={name: PlacementFigures(**each.figures()) for name, each in by_phase.items()},
        **judge.figures(),
        moved=float(np.mean(moved)) if moved else 0.0,
        away=_away(current, load[-1], setting),
        plan_ms=1000 * float(np.mean(seconds)),
    )


def _away(placement: Placement, load: np.ndarray, setting: SimulationSetting) -> float:
    cluster = setting.rules.cluster
    if setting.num_groups % cluster.num_nodes or cluster.num_nodes == 1:
        return 0.0
    home = group_homes(load, setting.num_groups, cluster.num_nodes)
    return float(away_share(placement, load, home, cluster.node_of_rank).mean())


def away_share(
    placement: Placement, load: np.ndarray, home: np.ndarray, node_of_rank: np.ndarray
) -> np.ndarray:
    """Return the part of the load served outside of its expert's home node: [layers] float64.

    Args:
        home: [layers, experts] the home node, or -1.
        node_of_rank: [ranks].
    """
    carried = slot_load(placement, load)
    node = np.repeat(node_of_rank, placement.slots_per_rank)
    expert = np.where(placement.slot_expert == EMPTY, 0, placement.slot_expert)
    homes = np.take_along_axis(home, expert, axis=1)
    away = np.where((homes >= 0) & (homes != node), carried, 0.0).sum(axis=1)
    total = carried.sum(axis=1)
    result: np.ndarray = np.divide(away, total, out=np.zeros_like(total), where=total > 0)
    return result
