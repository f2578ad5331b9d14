"""Decide whether experts should move: what a plan saves over a horizon against what moving costs.

A decision is a pure function of numbers, and says them, also when nothing is done. The cheapest way that pays is
taken: other shares, which move nothing, then a repair with few moves. Against restlessness: a plan must save a least
part of a step (`min_gain`), the window must hold only steps under the placement that serves, and it must pay for
itself within the horizon even if every step that runs beside the moves took a tenth longer.
"""

from dataclasses import dataclass

import numpy as np

from expert_placement.cluster import Cluster
from expert_placement.eplb_config import EplbConfig
from expert_placement.measure import imbalance, rank_load
from expert_placement.moves import align
from expert_placement.placement import Placement
from expert_placement.planner import Rules, refresh, repair
from expert_placement.transfers import transfers_between

SLOWER_BESIDE_MOVES = 0.1  # of a step, the bound that the service is measured against
REPAIR_TARGET = (
    1.02  # fullest rank over mean; closer costs many more moves (research: 5 % of slots against 11 %)
)


@dataclass(frozen=True, kw_only=True)
class Situation:
    """What is known when a decision is due."""

    load: np.ndarray  # [layers, experts] tokens in the window
    current: Placement
    num_steps: int  # in the window, all under `current`
    step_s: float  # mean of a step
    experts_part: float  # of a step, spent in the experts of the slowest rank, 0 to 1
    expert_bytes: int


@dataclass(frozen=True, kw_only=True)
class Proposal:
    """A placement and what it promises."""

    target: Placement
    kind: str  # "shares" or "repair"
    imbalance_before: float  # fullest rank over mean, layers weighted by their load
    imbalance_after: float
    gain: float  # part of a step's time
    moves: int
    num_bytes: int  # to all ranks together
    seconds: float  # that moving takes


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
    if not situation.load.sum():
        return Decision(proposal=None, reason="no token was served in the window")
    shares = propose("shares", situation, config)
    found = [shares] if config.policy == "shares" else [shares, propose("repair", situation, config)]
    paying = [each for each in found if _pays(each, situation, config)]
    if not paying:
        return Decision(proposal=None, reason=_why_nothing(found, situation, config))
    best = max(paying, key=lambda each: (_saved_s(each, config) - _cost_s(each), -each.moves))
    return Decision(proposal=best, reason=f"{describe(best)}; {_balance(best, config)}")


def propose(kind: str, situation: Situation, config: EplbConfig) -> Proposal:
    """Make a placement of a kind and say what it promises."""
    load, current = situation.load, situation.current
    if kind == "shares":
        target = refresh(load, current)
    else:
        rules = Rules(cluster=Cluster(num_ranks=current.num_ranks))
        budget = int(config.max_moved * current.slot_expert.size)
        target = repair(load, current, rules, target=REPAIR_TARGET, max_moves=budget).placement
    return weigh(kind, align(target, current), situation, config)


def weigh(kind: str, target: Placement, situation: Situation, config: EplbConfig) -> Proposal:
    """Say what a placement promises over the one that serves."""
    load, current = situation.load, situation.current
    before, after = _fullest(current, load), _fullest(target, load)
    transfers = transfers_between(current, target)
    senders = np.bincount([t.source // current.slots_per_rank for t in transfers] or [0])
    per_step = max(1, config.max_bytes_per_step)
    return Proposal(
        target=target,
        kind=kind,
        imbalance_before=before,
        imbalance_after=after,
        gain=situation.experts_part * (1.0 - after / before) if before else 0.0,
        moves=len(transfers),
        num_bytes=len(transfers) * situation.expert_bytes,
        seconds=int(senders.max()) * situation.expert_bytes / per_step * situation.step_s
        if transfers
        else 0.0,
    )


def describe(proposal: Proposal) -> str:
    """A proposal in one line."""
    return (
        f"{proposal.kind}: fullest rank / mean {proposal.imbalance_before:.4f} -> {proposal.imbalance_after:.4f}, "
        f"predicted to save {proposal.gain:.2%} of a step; {proposal.moves} moves, {proposal.num_bytes / 1e6:.1f} MB, "
        f"{proposal.seconds:.1f} s"
    )


def _fullest(placement: Placement, load: np.ndarray) -> float:
    """Fullest rank over mean rank, a layer counting by its load: layers are waited for one after the other."""
    imbalance(placement, load)  # checks the shapes
    ranks = rank_load(placement, load)
    return float(ranks.max(axis=1).sum() / max(ranks.mean(axis=1).sum(), 1e-300))


def _saved_s(proposal: Proposal, config: EplbConfig) -> float:
    return proposal.gain * config.horizon_s


def _cost_s(proposal: Proposal) -> float:
    return proposal.seconds * SLOWER_BESIDE_MOVES


def _pays(proposal: Proposal, situation: Situation, config: EplbConfig) -> bool:
    # Shares cost nothing, so that half of the least gain is enough for them.
    least = config.min_gain if proposal.moves else config.min_gain / 2
    changes = not np.array_equal(proposal.target.share, situation.current.share) or proposal.moves > 0
    return changes and proposal.gain >= least and _saved_s(proposal, config) > _cost_s(proposal)


def _balance(proposal: Proposal, config: EplbConfig) -> str:
    return (
        f"{_saved_s(proposal, config):.1f} s saved in {config.horizon_s:g} s against {_cost_s(proposal):.1f} s of "
        f"slower steps"
    )


def _why_nothing(found: list[Proposal], situation: Situation, config: EplbConfig) -> str:
    best = max(found, key=lambda each: each.gain)
    return (
        f"{describe(best)}; {_balance(best, config)}; it takes at least {config.min_gain:.2%} of a step "
        f"({config.min_gain / 2:.2%} where nothing moves), and experts are {situation.experts_part:.1%} of one"
    )
