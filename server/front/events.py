"""What happened to the service, for people who look later: lost ranks, returns, epochs. Bounded, in memory."""

import time
from collections import deque
from collections.abc import Callable
from typing import Any, NamedTuple

MOST_EVENTS = 200


class ServiceEvent(NamedTuple):
    """One event.

    Attributes:
        time: seconds since 1970.
        kind: rank_lost, rank_back, regrouped, waiting or stopped.
        text: a sentence with the cause.
        rank: None if it concerns all ranks.
        seconds: how long it took; None if it is a moment.
    """

    time: float
    kind: str
    text: str
    rank: int | None = None
    seconds: float | None = None


class EventLog:
    """Keeps the newest events."""

    def __init__(self, calendar: Callable[[], float] = time.time) -> None:
        self._calendar = calendar
        self._events: deque[ServiceEvent] = deque(maxlen=MOST_EVENTS)

    def note(self, kind: str, text: str, *, rank: int | None = None, seconds: float | None = None) -> None:
        """Keep an event that ends now."""
        rounded = None if seconds is None else round(seconds, 3)
        self._events.append(ServiceEvent(round(self._calendar(), 3), kind, text, rank, rounded))

    def to_json(self) -> list[dict[str, Any]]:
        """Return the events, oldest first."""
        return [event._asdict() for event in self._events]
