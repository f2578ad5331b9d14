"""Decides whether experts should move: a plan's savings over a horizon against the cost of moving, in seconds.

A decision is a pure function of numbers and reports them, even if nothing is done. The cheapest change that pays is
taken: new shares, which move nothing, or a repair with few moves. To avoid frequent changes, the window may only hold
steps under the serving placement. Within the horizon, a plan must save its cost (every step during the moves is assumed
to take a tenth longer) plus a minimum (`min_gain` of the horizon).

One placement serves both steps with prompts and decode-only steps. Placements are planned for the blend of their loads
and for each load. Ranks wait for each other in every layer, so the layers' seconds add up and each layer can be chosen
separately: it takes the candidate that makes the average step shortest by the roofline, weighted by each kind's share
of the steps. Except for a plan from nothing, the serving placement is a candidate, so no layer gets worse.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from expert_placement.config import EplbConfig
from expert_placement.forecast import Forecast, KindSeconds
from expert_placement.moves import BUSY_PART, Transfer, align, num_moved, transfers_between
from expert_placement.nodes import rules_for_plan, rules_for_repair
from expert_placement.placement import Placement, rank_load
from expert_placement.plan import plan, refresh, repair

# Fullest rank over mean. Closer targets cost many more moves (research: 5 % of slots against 11 %).
REPAIR_TARGET = 1.02
WORK_S_PER_BYTE = 1.5e-9  # sending or receiving: copies, checksum, trial run; one Zen 3 core
SLOWER_BESIDE_MOVES = 0.1  # part of a step; the bound that the service is tested against

LayerSeconds = Callable[[Placement], np.ndarray]  # [layers], the cost of a placement


@dataclass(frozen=True, kw_only=True)
class Situation:
    """The input of a decision."""

    forecast: Forecast  # from the window
    current: Placement
    num_steps: int  # in the window, all under `current`
    step_s: float  # mean duration of a step
    expert_bytes: int
    hosts: tuple[str, ...]  # of the ranks

    @property
    def experts_s(self) -> float:
        """Seconds of the average step's experts under the serving placement."""
        return self.forecast.step_s(self.current)


@dataclass(frozen=True, kw_only=True)
class Proposal:
    """A placement and its predicted effect."""

    target: Placement
    kind: str  # "shares", "repair" or "plan"
    imbalance_before: float  # fullest rank over mean, layers weighted by their load
    imbalance_after: float
    before: tuple[KindSeconds, ...]  # a step of each kind under the serving placement
    after: tuple[KindSeconds, ...]
    step_s: float  # present mean duration of a step
    moves: int
    num_bytes: int  # to all ranks together
    seconds: float  # duration of the moves

    @property
    def saved_s(self) -> float:
        """Seconds saved per average step."""
        return sum(b.share * (b.seconds - a.seconds) for b, a in zip(self.before, self.after, strict=True))

    @property
    def gain(self) -> float:
        """Part of a step's time that is saved."""
        return min(1.0, self.saved_s / self.step_s) if self.step_s > 0 else 0.0

    @property
    def cost_s(self) -> float:
        """Seconds by which the moves slow down steps, in total."""
        return self.seconds * SLOWER_BESIDE_MOVES

    def least_s(self, config: EplbConfig) -> float:
        """Minimum savings within the horizon beyond the cost, in seconds. Halved if nothing moves."""
        return config.min_gain * config.horizon_s * (1.0 if self.moves else 0.5)

    def horizon_saved_s(self, config: EplbConfig) -> float:
        """Seconds saved within the horizon, if the service stays as busy as in the window."""
        return self.gain * config.horizon_s

    def describe(self) -> str:
        """Describe the proposal in one line."""
        kinds = ", ".join(
            f"{now.name} {1e3 * now.seconds:.2f} -> {1e3 * then.seconds:.2f} ms in {now.share:.0%} of steps"
            for now, then in zip(self.before, self.after, strict=True)
        )
        return (
            f"{self.kind}: fullest rank / mean {self.imbalance_before:.4f} -> {self.imbalance_after:.4f}, "
            f"experts' time {kinds}, predicted to save {1e3 * self.saved_s:.3f} ms of a step's "
            f"{1e3 * self.step_s:.2f} ({self.gain:.2%}); {self.moves} moves, {self.num_bytes / 1e6:.1f} MB, "
            f"{self.seconds:.1f} s"
        )


@dataclass(frozen=True, kw_only=True)
class PlacementDecision:
    """What to do, and the reason with numbers."""

    proposal: Proposal | None  # None: change nothing
    reason: str


def decide(situation: Situation, config: EplbConfig) -> PlacementDecision:
    """Decide whether to change the placement. Deterministic."""
    if situation.num_steps < config.window_size:
        return PlacementDecision(
            proposal=None,
            reason=f"only {situation.num_steps} of the window's {config.window_size} steps ran under placement "
            f"{situation.current.version}",
        )
    if not situation.experts_s:
        return PlacementDecision(proposal=None, reason="no token was served in the window")
    found = [propose("shares", situation, config)]
    if config.policy != "shares":
        found.append(propose("repair", situation, config))
    paying = [each for each in found if _pays(each, situation, config)]
    if not paying:
        return PlacementDecision(proposal=None, reason=_nothing_pays(found, situation, config))
    best = max(paying, key=lambda each: (each.horizon_saved_s(config) - each.cost_s, -each.moves))
    return PlacementDecision(proposal=best, reason=f"{best.describe()}; {_balance(best, config)}")


def propose(kind: str, situation: Situation, config: EplbConfig) -> Proposal:
    """Plan a placement of a kind and predict its effect.

    Args:
        kind: "shares", "repair" or "plan" (from nothing).

    Raises:
        ValueError: A plan from nothing has too few slots for its rules.
    """
    current, forecast = situation.current, situation.forecast
    loads, budget = forecast.loads(current), int(config.max_moved * current.slot_expert.size)
    planned = [align(_planned(kind, load, situation, config, budget), current) for load in loads]
    if kind == "plan":  # the serving placement may break the rules, so it is not a candidate
        target = cheapest(planned, forecast.layer_seconds)
    else:
        target = cheapest_within([current, *planned], forecast.layer_seconds, current, budget)
    transfers = transfers_between(current, target)
    return Proposal(
        target=target,
        kind=kind,
        imbalance_before=_fullest(current, loads[0]),
        imbalance_after=_fullest(target, loads[0]),
        before=forecast.seconds(current),
        after=forecast.seconds(target),
        step_s=situation.step_s,
        moves=len(transfers),
        num_bytes=len(transfers) * situation.expert_bytes,
        seconds=move_seconds(transfers, situation, config),
    )


def _planned(kind: str, load: np.ndarray, situation: Situation, config: EplbConfig, budget: int) -> Placement:
    current = situation.current
    if kind == "shares":
        return refresh(load, current)
    if kind == "plan":
        rules = rules_for_plan(config, situation.hosts, load, current.slot_expert.shape[1]).rules
        return plan(load, current.slots_per_rank, rules).placement
    rules = rules_for_repair(config, situation.hosts, current).rules
    return repair(load, current, rules, target=REPAIR_TARGET, max_moves=budget).placement


def cheapest(candidates: Sequence[Placement], seconds: LayerSeconds) -> Placement:
    """Combine placements: take each layer from the candidate with the lowest cost, the first among equals.

    Args:
        candidates: Placements with the same layers, experts, ranks and slots.
    """
    chosen = np.stack([seconds(placement) for placement in candidates]).argmin(axis=0)
    mixed = candidates[0]
    for index, candidate in enumerate(candidates[1:], 1):
        mixed = mixed.with_layers(candidate, chosen == index)
    return mixed


def cheapest_within(
    candidates: Sequence[Placement], seconds: LayerSeconds, current: Placement, most_moves: int
) -> Placement:
    """As `cheapest`, within a budget of moves. If the combination exceeds it, return the cheapest single candidate.

    Args:
        candidates: Each within the budget.
        current: The serving placement.
        most_moves: Most slots to fill, over all layers.
    """
    mixed = cheapest(candidates, seconds)
    if num_moved(mixed, current).sum() <= most_moves:
        return mixed
    return min(candidates, key=lambda placement: float(seconds(placement).sum()))


def move_seconds(transfers: list[Transfer], situation: Situation, config: EplbConfig) -> float:
    """Return how long moves take. The limit is the bytes or the work allowed per step, whichever is slower.

    A rank takes part in one transfer at a time, so what it sends and what it receives add up.
    """
    if not transfers:
        return 0.0
    width = situation.current.slots_per_rank
    handled = np.bincount([slot // width for t in transfers for slot in (t.source, t.target)])
    num_bytes = int(handled.max()) * situation.expert_bytes
    steps = num_bytes / max(1, config.max_bytes_per_step)
    return max(steps * situation.step_s, num_bytes * WORK_S_PER_BYTE / BUSY_PART)


def _fullest(placement: Placement, load: np.ndarray) -> float:
    """Return fullest rank over mean rank, with layers weighted by load, because ranks wait in every layer."""
    ranks = rank_load(placement, load)
    return float(ranks.max(axis=1).sum() / max(ranks.mean(axis=1).sum(), 1e-300))


def _pays(proposal: Proposal, situation: Situation, config: EplbConfig) -> bool:
    changes = not np.array_equal(proposal.target.share, situation.current.share) or proposal.moves > 0
    return changes and proposal.horizon_saved_s(config) > proposal.cost_s + proposal.least_s(config)


def _balance(proposal: Proposal, config: EplbConfig) -> str:
    return (
        f"{proposal.horizon_saved_s(config):.2f} s saved in {config.horizon_s:g} s against {proposal.cost_s:.2f} s of "
        f"slower steps and the required minimum of {proposal.least_s(config):.2f} s"
    )


def _nothing_pays(found: list[Proposal], situation: Situation, config: EplbConfig) -> str:
    best = max(found, key=lambda each: each.gain)
    part = situation.experts_s / situation.step_s if situation.step_s > 0 else 0.0
    return f"{best.describe()}; {_balance(best, config)}; experts are {part:.1%} of a step"
