"""A placement and what it promises, in seconds: what a step's experts take now and would take, and what moving costs."""

from dataclasses import dataclass

import numpy as np

from expert_placement.config import EplbConfig
from expert_placement.forecast import Forecast, KindSeconds
from expert_placement.measure import imbalance, rank_load
from expert_placement.placement import Placement
from expert_placement.transfers import BUSY_PART, Transfer, transfers_between

WORK_S_PER_BYTE = 1.5e-9  # sending or taking in: copies, check sum, trial; one Zen 3 core
SLOWER_BESIDE_MOVES = 0.1  # of a step, the bound that the service is measured against


@dataclass(frozen=True, kw_only=True)
class Situation:
    """What is known when a decision is due."""

    forecast: Forecast  # made of the window
    current: Placement
    num_steps: int  # in the window, all under `current`
    step_s: float  # mean of a step
    expert_bytes: int
    hosts: tuple[str, ...]  # of the ranks

    @property
    def experts_s(self) -> float:
        """Seconds of the average step's experts, now."""
        return self.forecast.step_s(self.current)


@dataclass(frozen=True, kw_only=True)
class Proposal:
    """A placement and what it promises."""

    target: Placement
    kind: str  # "shares", "repair" or "plan"
    imbalance_before: float  # fullest rank over mean, layers weighted by their load
    imbalance_after: float
    before: tuple[KindSeconds, ...]  # a step of each kind under the placement that serves
    after: tuple[KindSeconds, ...]
    step_s: float  # mean of a step now
    moves: int
    num_bytes: int  # to all ranks together
    seconds: float  # that moving takes

    @property
    def saved_s(self) -> float:
        """Seconds of the average step that are saved."""
        return sum(b.share * (b.seconds - a.seconds) for b, a in zip(self.before, self.after, strict=True))

    @property
    def gain(self) -> float:
        """Part of a step's time that is saved."""
        return min(1.0, self.saved_s / self.step_s) if self.step_s > 0 else 0.0

    @property
    def cost_s(self) -> float:
        """Seconds by which steps beside the moves are slower, all together."""
        return self.seconds * SLOWER_BESIDE_MOVES

    def least_s(self, config: EplbConfig) -> float:
        """Seconds that it must save within the horizon beyond its cost; half where nothing moves."""
        return config.min_gain * config.horizon_s * (1.0 if self.moves else 0.5)

    def horizon_saved_s(self, config: EplbConfig) -> float:
        """Seconds that it saves within the horizon, if the service is as busy as in the window."""
        return self.gain * config.horizon_s


def weigh(
    kind: str, target: Placement, situation: Situation, load: np.ndarray, config: EplbConfig
) -> Proposal:
    """Say what a placement promises over the one that serves.

    Args:
        load: [layers, experts] that it was planned by.
    """
    current, forecast = situation.current, situation.forecast
    transfers = transfers_between(current, target)
    return Proposal(
        target=target,
        kind=kind,
        imbalance_before=_fullest(current, load),
        imbalance_after=_fullest(target, load),
        before=forecast.seconds(current),
        after=forecast.seconds(target),
        step_s=situation.step_s,
        moves=len(transfers),
        num_bytes=len(transfers) * situation.expert_bytes,
        seconds=_move_seconds(transfers, situation, config),
    )


def _move_seconds(transfers: list[Transfer], situation: Situation, config: EplbConfig) -> float:
    """How long moving takes: bytes that may go beside a step, or work that may be done, whichever is slower.

    A rank takes part in one transfer at a time, so that what it sends and what it takes in add up.
    """
    if not transfers:
        return 0.0
    width = situation.current.slots_per_rank
    handled = np.bincount([slot // width for t in transfers for slot in (t.source, t.target)])
    num_bytes = int(handled.max()) * situation.expert_bytes
    steps = num_bytes / max(1, config.max_bytes_per_step)
    return max(steps * situation.step_s, num_bytes * WORK_S_PER_BYTE / BUSY_PART)


def describe(proposal: Proposal) -> str:
    """A proposal in one line."""
    kinds = ", ".join(
        f"{now.name} {1e3 * now.seconds:.2f} -> {1e3 * then.seconds:.2f} ms in {now.share:.0%} of steps"
        for now, then in zip(proposal.before, proposal.after, strict=True)
    )
    return (
        f"{proposal.kind}: fullest rank / mean {proposal.imbalance_before:.4f} -> {proposal.imbalance_after:.4f}, "
        f"experts' time {kinds}, predicted to save {1e3 * proposal.saved_s:.3f} ms of a step's "
        f"{1e3 * proposal.step_s:.2f} ({proposal.gain:.2%}); {proposal.moves} moves, "
        f"{proposal.num_bytes / 1e6:.1f} MB, {proposal.seconds:.1f} s"
    )


def _fullest(placement: Placement, load: np.ndarray) -> float:
    """Fullest rank over mean rank, a layer counting by its load: layers are waited for one after the other."""
    imbalance(placement, load)  # checks the shapes
    ranks = rank_load(placement, load)
    return float(ranks.max(axis=1).sum() / max(ranks.mean(axis=1).sum(), 1e-300))
