"""What one lock-step costs, to whoever asks: `roofline` computes it, a simulator of a service adds it up.

Ranks meet in every MoE layer, so that a step takes what its slowest rank takes, and the others wait. No torch.
"""

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import numpy as np


class RankRows(NamedTuple):
    """What one rank runs in one step."""

    prefill_tokens: int  # tokens of prompts
    decode_tokens: int  # rows of running requests, one each
    attended_tokens: int  # over all rows: tokens of context each reads (prefill included)
    prefill_attended_tokens: int | None = None  # of these, by tokens of prompts; None: every row as many


class StepCost(NamedTuple):
    """Seconds of one lock-step, and what the slowest rank made the others wait, by cause."""

    total_s: float
    attention_s: float  # of the slowest rank: with all else that a rank computes for its own rows
    experts_s: float  # of the rank with the most expert rows
    dispatch_s: float
    other_s: float  # output projection, sampling, launches
    waiting_s: tuple[float, ...]  # per rank, waited for slower ones


class StepTimes(Protocol):
    """Says what a step costs."""

    def step(self, ranks: Sequence[RankRows] | np.ndarray, balancedness: float) -> StepCost:
        """Return what one step of all ranks costs.

        Args:
            ranks: what each runs; a rank with nothing runs along. Of many ranks also as an array, [ranks, 4], with the
                fields of `RankRows`, all of them known.
            balancedness: of experts, mean over max of the ranks' expert rows: 1.0 is even.
        """
        ...
