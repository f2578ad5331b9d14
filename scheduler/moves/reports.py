"""A rank's reports to the front about its experts: their load, their placement, and the progress of a change.

Shared by front and engine, as `scheduler.policy.request`. Does not use torch or a wire format. Counters of load start
with the epoch, so readers take differences.
"""

from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple

import numpy as np

from expert_placement.load import LoadFigures


class ExpertMap(NamedTuple):
    """The experts and their places."""

    version: int  # of the placement
    num_experts: int
    num_ranks: int  # members of the epoch; ranks here are places
    layers: tuple[int, ...]  # index in the model of each MoE layer
    num_hidden_layers: int  # of the model, including layers without experts
    slot_expert: np.ndarray  # [layers, ranks * slots_per_rank] expert of each physical slot; -1 if empty


@dataclass(frozen=True, kw_only=True, eq=False)
class LoadReport:
    """One rank's counters since the epoch's start. Arrays by rank are indexed by place.

    `counts` is [layers, 2, experts + ranks] uint32, modulo 2^32: by layer and phase (prefill, decode), how often this
    rank's tokens chose each expert, then how often a slot of each rank.
    """

    rank: int
    step: int  # of the lock-step, equal on all ranks at the same moment
    placement_version: int
    counts: np.ndarray
    figures: LoadFigures
    epoch: int = 0  # of these counters


class MoveState(Enum):
    """Progress of a rank with a placement."""

    VERIFIED = "verified"  # all experts of this rank are here and verified; it waits for the others
    SERVING = "serving"  # switched, at the same step as all ranks
    FAILED = "failed"  # something did not arrive as sent; nothing of it serves
    DROPPED = "dropped"  # dropped on request


class Cause(Enum):
    """Why a placement failed, for counters of failures."""

    NONE = ""
    REFUSED = "refused"  # does not fit the serving placement; nothing moved
    MANIFEST = "manifest"  # the tensors received are not those of the layer
    CHECK_SUM = "check_sum"  # bytes changed on the way
    ANSWER = "answer"  # the expert's outputs differ from those at its source
    CHANNEL = "channel"  # a rank or a connection is gone; nothing moves any more in this epoch
    EPOCH = "epoch"  # the ranks changed; nothing of it serves
    BUG = "bug"  # an unexpected error


@dataclass(frozen=True, kw_only=True)
class PlacementReport:
    """One rank's report on one placement."""

    rank: int
    version: int
    state: MoveState
    reason: str = ""
    cause: Cause = Cause.NONE  # only if FAILED, as is the reason
    digest: str = ""  # of the placement
    step: int = 0  # first step that it serves; only if SERVING
    num_moves: int = 0  # experts that moved to this rank
    num_bytes: int = 0
    seconds: float = 0.0
