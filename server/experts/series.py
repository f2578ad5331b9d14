"""Balancedness over time, from the service's start: a bounded number of points, whatever its age.

When the points are many, every second one is dropped and they come half as often: the line always begins at the start
and is never coarser than 1 / MOST of its length, twice. A point is the sliding window at its time.
"""

import numpy as np

from expert_placement.load import PHASES, LoadWindow, measured_balancedness

MOST = 360  # points
EVERY_S = 2.0  # at first
VIEWS = ("all", *PHASES)
VALUES = ("mean", "median", "worst")


class LoadSeries:
    """Points of the past."""

    def __init__(self) -> None:
        self.every_s = EVERY_S
        self._times: list[float] = []
        self._points: list[list[list[float | None]]] = []  # by view and value

    def note(self, now_s: float, window: LoadWindow) -> None:
        """Take a point if one is due; nothing without tokens."""
        if self._times and now_s - self._times[-1] < self.every_s:
            return
        point = [_values(window.rank_tokens(None if view == "all" else view)) for view in VIEWS]
        if point[0][0] is None:
            return
        self._times.append(round(now_s, 3))
        self._points.append(point)
        if len(self._times) > MOST:
            del self._times[1::2], self._points[1::2]
            self.every_s *= 2

    def to_json(self) -> dict[str, object]:
        """Columns: "time", and by view ("all", "prefill", "decode") mean, median and worst over layers."""
        return {
            "every_s": self.every_s,
            "time": list(self._times),
            "views": {
                view: {
                    value: [point[index][column] for point in self._points]
                    for column, value in enumerate(VALUES)
                }
                for index, view in enumerate(VIEWS)
            },
        }


def _values(rank_tokens: np.ndarray) -> list[float | None]:
    """Mean, median and worst over the layers that have tokens; None where none has."""
    even = measured_balancedness(rank_tokens)
    known = even[~np.isnan(even)]
    if not len(known):
        return [None] * len(VALUES)
    return [round(float(value), 4) for value in (known.mean(), np.median(known), known.min())]
