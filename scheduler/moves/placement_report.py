"""What a rank says about a change of placement. Part of the vocabulary of front and engine: no torch, no wire format."""

from dataclasses import dataclass
from enum import Enum


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
