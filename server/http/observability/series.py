"""Points over time, the finer the newer, in bounded memory however old the service is.

Kept are the last five minutes, half hour and six hours at a fixed pace each, and all the time since the start at a pace that
halves whenever the points become many. What is shown of a time range then has enough points in it, whichever range it is.
Rejected: thinning all points alike, after which the last five minutes of a day's series are two points.
"""

from collections import deque
from typing import Generic, NamedTuple, TypeVar

EVERY_S = 2.0  # between the newest points
MOST = 180  # points of each pace

Value = TypeVar("Value")
_SLACK = (
    0.95  # of a pace: clocks and timers are not exact, and a point that comes a moment early is no second one
)
_PACES_S = (300 / 150, 1800 / 150, 21_600 / 150)  # of the last five minutes, half hour, six hours


class Point(NamedTuple, Generic[Value]):
    """A value and its time, seconds since 1970."""

    time_s: float
    value: Value


class Series(Generic[Value]):
    """Take points with `note`; hand them out, oldest first, with `points`."""

    def __init__(self) -> None:
        self._whole: list[Point[Value]] = []  # since the start
        self._whole_pace_s = EVERY_S
        self._recent: list[deque[Point[Value]]] = [deque(maxlen=MOST) for _ in _PACES_S]

    def is_due(self, now_s: float) -> bool:
        """Whether `note` would take a point now."""
        newest = self._recent[0]
        return not newest or now_s - newest[-1].time_s >= EVERY_S * _SLACK

    def note(self, now_s: float, value: Value) -> None:
        """Take a point; one that comes too soon after the last is left out."""
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
        """Return what is kept, oldest first: of each time the finest that is known of it."""
        found = self._whole
        for kept in reversed(self._recent):
            if kept:
                found = [point for point in found if point.time_s < kept[0].time_s] + list(kept)
        return found
