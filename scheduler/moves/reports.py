"""What a rank tells the front about its experts: their load, where they are, and how far a change of placement is.

Part of the vocabulary that front and engine share, like `scheduler.policy.request`: knows no torch and no wire format.
Counters of load run from the epoch's start, so that a reader takes differences.
"""

from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple

import numpy as np

from expert_placement.load import WAIT_CAUSES


class ExpertMap(NamedTuple):
    """Which experts there are and where they live."""

    version: int  # of the placement
    num_experts: int
    num_ranks: int  # places, of the epoch's members
    layers: tuple[int, ...]  # index in the model of each MoE layer
    num_hidden_layers: int  # of the model, those without experts included
    slot_expert: np.ndarray  # [layers, ranks * slots_per_rank] expert of each physical slot, -1 where empty


@dataclass(frozen=True, kw_only=True, eq=False)
class LoadReport:
    """One rank's counters. All of them run from the epoch's start, and what is by rank in them is by place.

    `counts` is [layers, 2, experts + ranks] uint32, modulo 2^32: by layer and phase (prefill, decode) how often this
    rank's tokens chose each expert, then how often a slot of each rank.
    """

    rank: int
    step: int  # of the lock-step, equal on all ranks at the same moment
    num_steps: int  # that ran the model
    prefill_tokens: int
    decode_tokens: int  # drafts included
    placement_version: int
    counts: np.ndarray
    dispatch_bytes: tuple[int, ...]  # sent to each rank, by dispatches
    combine_bytes: tuple[int, ...]  # likewise, by combines
    dispatch_wait_s: (
        float  # in the exchange of a dispatch: for ranks that are still at the layer before, and for wires
    )
    combine_wait_s: (
        float  # in the exchange of a combine: for ranks whose experts still compute, and for wires
    )
    wire_s: float  # of both, at least so much for wires; 0 where that is not known
    experts_s: float  # computing this rank's experts
    step_s: float  # in steps, waits included
    between_steps_s: float = 0.0  # from one step to the next: headers, planning, delivery; not sleep
    prefill_steps: int = 0  # of num_steps, those with parts of prompts on some rank; others are decode-only
    prefill_experts_s: float = 0.0  # of experts_s, in those
    prefill_step_s: float = 0.0  # of step_s, in those
    epoch: int = 0  # that they were counted in
    draft_tokens: int = 0  # of decode_tokens, those that were tried
    wait_causes_s: tuple[float, ...] = (0.0,) * len(WAIT_CAUSES)  # of the waits for ranks, by cause


class MoveState(Enum):
    """How far a rank is with a placement."""

    VERIFIED = "verified"  # all experts that come to this rank are here and checked; it waits for the others
    SERVING = "serving"  # switched, at the same step as all ranks
    FAILED = "failed"  # something did not come as it was sent; nothing of it serves
    DROPPED = "dropped"  # given up, as asked


class Cause(Enum):
    """Why a placement failed, for whoever counts failures."""

    NONE = ""
    REFUSED = "refused"  # it does not fit what serves; nothing moved
    MANIFEST = "manifest"  # other tensors came than the layer has
    CHECK_SUM = "check_sum"  # bytes changed on the way
    ANSWER = "answer"  # the expert does not answer as it does where it came from
    CHANNEL = "channel"  # a rank or a connection is gone; nothing moves any more in this epoch
    EPOCH = "epoch"  # ranks came or went; nothing of it serves
    BUG = "bug"  # an error that nobody thought of


@dataclass(frozen=True, kw_only=True)
class PlacementReport:
    """One rank's word on one placement."""

    rank: int
    version: int
    state: MoveState
    reason: str = ""
    cause: Cause = Cause.NONE  # FAILED only, as is the reason
    digest: str = ""  # of the placement
    step: int = 0  # first step that it serves; SERVING only
    num_moves: int = 0  # experts that came to this rank
    num_bytes: int = 0
    seconds: float = 0.0
