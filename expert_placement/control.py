"""Decide whether experts should move: what a plan saves over a horizon against what moving costs, in seconds.

A decision is a pure function of numbers, and says them, also when nothing is done. The cheapest way that pays is
taken: other shares, which move nothing, then a repair with few moves. Against restlessness: the window must hold only
steps under the placement that serves, and a plan must save, within the horizon, what it costs (every step that runs
beside the moves taken to be a tenth longer) and a least number of seconds more (`min_gain` of the horizon).

One placement serves steps with prompts and decode-only steps. Planned are the blend of their loads and each by itself;
every layer takes what makes the average step shortest, in the roofline's seconds and by each kind's share of the steps.
What serves takes part where it may stay, so that no layer is changed for the worse.
"""

from dataclasses import dataclass

import numpy as np

from expert_placement.candidates import cheapest, cheapest_within
from expert_placement.config import EplbConfig
from expert_placement.moves import align
from expert_placement.node_rules import rules_for_plan, rules_for_repair
from expert_placement.placement import Placement
from expert_placement.plan import plan, refresh, repair
from expert_placement.proposal import Proposal, Situation, describe, weigh

REPAIR_TARGET = (
    1.02  # fullest rank over mean; closer costs many more moves (research: 5 % of slots against 11 %)
)


@dataclass(frozen=True, kw_only=True)
class Decision:
    """What to do, and why, in words with numbers."""

    proposal: Proposal | None  # None: nothing
    reason: str


def decide(situation: Situation, config: EplbConfig) -> Decision:
    """Decide by what was seen; deterministic."""
    if situation.num_steps < config.window_size:
        return Decision(
            proposal=None,
            reason=f"only {situation.num_steps} steps of the {config.window_size} of a window ran under placement "
            f"{situation.current.version}",
        )
    if not situation.experts_s:
        return Decision(proposal=None, reason="no token was served in the window")
    shares = propose("shares", situation, config)
    found = [shares] if config.policy == "shares" else [shares, propose("repair", situation, config)]
    paying = [each for each in found if _pays(each, situation, config)]
    if not paying:
        return Decision(proposal=None, reason=_why_nothing(found, situation, config))
    best = max(paying, key=lambda each: (each.horizon_saved_s(config) - each.cost_s, -each.moves))
    return Decision(proposal=best, reason=f"{describe(best)}; {_balance(best, config)}")


def propose(kind: str, situation: Situation, config: EplbConfig) -> Proposal:
    """Make a placement of a kind and say what it promises.

    Args:
        kind: shares, repair, or plan (from nothing).

    Raises:
        ValueError: there are too few slots for what is wished of a plan from nothing.
    """
    current, forecast = situation.current, situation.forecast
    loads, budget = forecast.loads(current), int(config.max_moved * current.slot_expert.size)
    planned = [align(_planned(kind, load, situation, config, budget), current) for load in loads]
    if kind == "plan":  # what serves may break the rules
        target = cheapest(planned, forecast.layer_seconds)
    else:
        target = cheapest_within([current, *planned], forecast.layer_seconds, current, budget)
    return weigh(kind, target, situation, loads[0], config)


def _planned(kind: str, load: np.ndarray, situation: Situation, config: EplbConfig, budget: int) -> Placement:
    """The placement of a kind for one load."""
    current = situation.current
    if kind == "shares":
        return refresh(load, current)
    if kind == "plan":
        rules = rules_for_plan(config, situation.hosts, load, current.slot_expert.shape[1]).rules
        return plan(load, current.slots_per_rank, rules).placement
    rules = rules_for_repair(config, situation.hosts, current).rules
    return repair(load, current, rules, target=REPAIR_TARGET, max_moves=budget).placement


def _pays(proposal: Proposal, situation: Situation, config: EplbConfig) -> bool:
    changes = not np.array_equal(proposal.target.share, situation.current.share) or proposal.moves > 0
    return changes and proposal.horizon_saved_s(config) > proposal.cost_s + proposal.least_s(config)


def _balance(proposal: Proposal, config: EplbConfig) -> str:
    return (
        f"{proposal.horizon_saved_s(config):.2f} s saved in {config.horizon_s:g} s against {proposal.cost_s:.2f} s of "
        f"slower steps and the {proposal.least_s(config):.2f} s that it takes at least"
    )


def _why_nothing(found: list[Proposal], situation: Situation, config: EplbConfig) -> str:
    best = max(found, key=lambda each: each.gain)
    part = situation.experts_s / situation.step_s if situation.step_s > 0 else 0.0
    return f"{describe(best)}; {_balance(best, config)}; experts are {part:.1%} of a step"
