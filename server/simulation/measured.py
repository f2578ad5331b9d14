"""Step times of a running service, read from what it measures, and used for one that is simulated.

A step of a rank takes a fixed time, and more by its decode rows, its prompts' tokens and the tokens they attend to: a plane,
fitted to what the service says of its steps. Ranks wait for the slowest.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from server.sizing.step_times import RankRows, StepCost


@dataclass(frozen=True, kw_only=True)
class MeasuredTimes:
    """`StepTimes` by a plane."""

    step_s: float
    prefill_token_s: float
    decode_row_s: float
    attended_token_s: float = 0.0

    def describe(self) -> str:
        """Say it in one line."""
        return (
            f"measured: {1e3 * self.step_s:.2f} ms a step, {1e6 * self.decode_row_s:.1f} us per decode row, "
            f"{1e6 * self.prefill_token_s:.1f} us per token of a prompt"
        )

    def step(self, ranks: Sequence[RankRows] | np.ndarray, balancedness: float) -> StepCost:
        """See `StepTimes`; what experts take is part of what rows take, so that balancedness changes nothing."""
        rows = ranks if isinstance(ranks, np.ndarray) else np.array([each[:3] for each in ranks])
        own = rows[:, :3] @ np.array([self.prefill_token_s, self.decode_row_s, self.attended_token_s])
        slowest = float(own.max())
        return StepCost(
            total_s=self.step_s + slowest,
            attention_s=slowest,
            experts_s=0.0,
            dispatch_s=0.0,
            other_s=self.step_s,
            waiting_s=tuple((slowest - own).tolist()),
        )
