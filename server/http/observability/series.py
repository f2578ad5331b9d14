"""Points over time, denser for recent times, in bounded memory regardless of the service's age.

The last five minutes, half hour and six hours are kept at a fixed interval each. All points since the start are kept at an
interval that doubles when they become too many. So each of these time ranges has enough points for a chart.
Rejected: thinning all points equally, after which the last five minutes of a day's series have two points.
"""

from collections import deque
from typing import Generic, NamedTuple, TypeVar

EVERY_S = 2.0  # between the newest points
MOST = 180  # points per interval

Value = TypeVar("Value")
# Share of an interval: clocks and timers are not exact, so a point may come slightly early.
_SLACK = 0.95
_PACES_S = (300 / 150, 1800 / 150, 21_600 / 150)  # for the last five minutes, half hour, six hours


class Point(NamedTuple, Generic[Value]):
    """A value and its time, in seconds since 1970."""

    time_s: float
    value: Value


class Series(Generic[Value]):
    """A series of points at several intervals."""

    def __init__(self) -> None:
        self._whole: list[Point[Value]] = []  # since the start
        self._whole_pace_s = EVERY_S
        self._recent: list[deque[Point[Value]]] = [deque(maxlen=MOST) for _ in _PACES_S]

    def is_due(self, now_s: float) -> bool:
        """Return whether `note` would keep a point now."""
        newest = self._recent[0]
        return not newest or now_s - newest[-1].time_s >= EVERY_S * _SLACK

    def note(self, now_s: float, value: Value) -> None:
        """Add a point. At each interval it is skipped if it comes too soon after the last."""
        point = Point(round(now_s, 3), value)
        for pace_s, kept in zip(_PACES_S, self._recent, strict=True):
            if not kept or now_s - kept[-1].time_s >= pace_s * _SLACK:
                kept.append(point)
        if not self._whole or now_s - self._whole[-1].time_s >= self._whole_pace_s * _SLACK:
            self._whole.append(point)
        if len(self._whole) > MOST:
            del self._whole[1::2]
            self._whole_pace_s *= 2

    def points(self) -> list[Point[Value]]:
        """Return the points, oldest first, at the densest interval that each time still has."""
        found = self._whole
        for kept in reversed(self._recent):
            if kept:
                found = [point for point in found if point.time_s < kept[0].time_s] + list(kept)
        return found
