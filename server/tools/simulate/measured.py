"""Step times from the measurements of a running service, for a simulated one.

A rank's step takes a fixed time, and additional time for its decode rows, its prompt tokens and the tokens they attend to:
a linear function, fitted to the service's reports about its steps. Ranks wait for the slowest.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from server.tools.size.costs.step_times import RankRows, StepCost


@dataclass(frozen=True, kw_only=True)
class MeasuredTimes:
    """`StepTimes` from a linear function."""

    step_s: float
    prefill_token_s: float
    decode_row_s: float
    attended_token_s: float = 0.0

    def describe(self) -> str:
        """Return a line with the times."""
        return (
            f"measured: {1e3 * self.step_s:.2f} ms per step, {1e6 * self.decode_row_s:.1f} us per decode row, "
            f"{1e6 * self.prefill_token_s:.1f} us per prompt token"
        )

    def step(self, ranks: Sequence[RankRows] | np.ndarray, balancedness: float) -> StepCost:
        # The time of experts is part of the time of rows, so balancedness has no effect.
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
