"""Versions of a service's base weights, and the messages about them between front and ranks.

A version is a list of folders with tensors under the checkpoint's names. A later folder hides equal names of earlier ones, and
all of them hide the checkpoint's. So a rank that starts later reads the same weights as the others received.

Shared by front and engine, as `scheduler.policy.request`. Does not use torch or a wire format.
"""

from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple

import numpy as np


class FileFacts(NamedTuple):
    """A file as it was when the front read its header. A rank refuses a file that has changed since."""

    name: str
    num_bytes: int
    mtime_ns: int


class WeightFolder(NamedTuple):
    """A folder with safetensors."""

    path: str
    files: tuple[FileFacts, ...]


class WeightVersion(NamedTuple):
    """The base weights of a service."""

    number: int  # grows with every update, also over restarts of the front; 0 is the checkpoint
    label: str = ""  # chosen by the client; "" if it chose none
    folders: tuple[WeightFolder, ...] = ()  # newest last
    hides_checkpoint: bool = False  # the folders have all tensors
    # Of all weights, as hexadecimal digits; "" for the checkpoint and before ranks have read them.
    digest: str = ""


CHECKPOINT = WeightVersion(0)


class WeightDigests(NamedTuple):
    """Check sums of weights in memory, of one rank or of all ranks together. Equal weights have equal ones, on any rank."""

    plain: str  # of all weights except experts, as hexadecimal digits
    experts_LE: np.ndarray  # [layers, experts] uint64; 0 for experts that the rank does not hold


class WeightAction(Enum):
    """What ranks do with a version."""

    STAGE = "stage"  # load it next to the serving one
    SERVE = "serve"  # switch to it, with all ranks; load it first if it is not there
    DROP = "drop"  # free it, if it was only staged
    CHECK = "check"  # compute the check sums of the serving one again


@dataclass(frozen=True, kw_only=True)
class WeightOrder:
    """An order of the front about a version."""

    action: WeightAction
    version: WeightVersion
    # Of all ranks together, if the action is SERVE. A rank that loads the version later compares its own.
    digests: WeightDigests | None = None


class WeightState(Enum):
    """Progress of a rank with a version."""

    STAGED = "staged"  # loaded, and checked against the files' facts
    SERVING = "serving"
    REFUSED = "refused"  # the tensors do not fit the model
    NO_ROOM = "no_room"  # there is too little memory for a second copy
    FAILED = "failed"
    CHECKED = "checked"


@dataclass(frozen=True, kw_only=True)
class WeightReport:
    """One rank's report on one version."""

    rank: int
    number: int
    state: WeightState
    reason: str = ""  # unless it is STAGED, SERVING or CHECKED
    digests: WeightDigests | None = None  # if it is STAGED or CHECKED
    num_bytes: int = 0  # read from files
    seconds: float = 0.0  # of loading
    step: int = 0  # first step with these weights, if it is SERVING
