"""The interface for the cost of one lock-step: `roofline` computes it, a simulator of a service sums it.

Ranks exchange tokens in every MoE layer, so a step takes as long as its slowest rank, and the others wait. No torch.
"""

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import numpy as np


class RankRows(NamedTuple):
    """The rows of one rank in one step."""

    prefill_tokens: int  # prompt tokens
    decode_tokens: int  # rows of running requests, one each
    attended_tokens: int  # context tokens read, summed over all rows (including prefill)
    prefill_attended_tokens: int | None = None  # read by prompt tokens; None is the same for every row


class StepCost(NamedTuple):
    """Seconds of one lock-step, by cause, and each rank's waiting time."""

    total_s: float
    attention_s: float  # of the slowest rank, with all other work for its own rows
    experts_s: float  # of the rank with the most expert rows
    dispatch_s: float
    other_s: float  # output projection, sampling, launches
    waiting_s: tuple[float, ...]  # per rank, time spent waiting for slower ones


class StepTimes(Protocol):
    """A model of step times."""

    def step(self, ranks: Sequence[RankRows] | np.ndarray, balancedness: float) -> StepCost:
        """Return the cost of one step of all ranks.

        Args:
            ranks: Rows of each rank; an idle rank takes part in the step too. For many ranks, an array [ranks, 4] with
                the fields of `RankRows`, without None.
            balancedness: Mean over max of the ranks' expert rows; 1.0 is even.
        """
