"""A bounded in-memory log of service events: lost ranks, returned ranks, epochs."""

import time
from collections import deque
from collections.abc import Callable
from typing import Any, NamedTuple

MOST_EVENTS = 200


class ServiceEvent(NamedTuple):
    """One event.

    Attributes:
        time: Seconds since 1970.
        kind: rank_lost, rank_back, regrouped, waiting, stopped, pool_joined, pool_lost, draining, drained, undrained, role,
            asleep, awake, weights, adapter_loaded, adapter_unloaded, adapter_refused, resizing, resized, resize_failed,
            standby_follows, standby_lost, took_over, front_back, fronts_lost or fronts_back.
        text: A sentence with the cause.
        rank: The rank concerned, or None for all ranks.
        seconds: Duration, or None for a momentary event.
    """

    time: float
    kind: str
    text: str
    rank: int | None = None
    seconds: float | None = None


class EventLog:
    """Keeps the newest MOST_EVENTS events."""

    def __init__(self, calendar: Callable[[], float] = time.time) -> None:
        self._calendar = calendar
        self._events: deque[ServiceEvent] = deque(maxlen=MOST_EVENTS)

    def note(self, kind: str, text: str, *, rank: int | None = None, seconds: float | None = None) -> None:
        """Add an event that ends now."""
        rounded = None if seconds is None else round(seconds, 3)
        self._events.append(ServiceEvent(round(self._calendar(), 3), kind, text, rank, rounded))

    def to_json(self) -> list[dict[str, Any]]:
        """Return the events, oldest first."""
        return [event._asdict() for event in self._events]
