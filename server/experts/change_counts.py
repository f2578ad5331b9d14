"""Counters of what became of placements since the front's start, for Prometheus. Labels have a fixed set of values."""

from collections import Counter
from typing import Any

from scheduler.moves.reports import Cause

KINDS = ("shares", "repair", "plan", "apply", "rollback")
DECISIONS = ("nothing", "shares", "repair")
CAUSES = tuple(cause.value for cause in Cause if cause is not Cause.NONE)


class ChangeCounts:
    """Counts changes that serve, what they moved, those that were dropped, and decisions."""

    def __init__(self) -> None:
        self.is_under_way = False
        self.rearrangements = self.moves = self.num_bytes = 0
        self.seconds = 0.0
        self.by_kind: Counter[str] = Counter()
        self.failures: Counter[str] = Counter()  # by cause
        self.decisions: Counter[str] = Counter()

    def add(self, entry: dict[str, Any]) -> None:
        """Take the history's entry about a change that has ended."""
        self.moves += entry["moves"]
        self.num_bytes += entry["bytes"]
        self.seconds += entry["seconds"]
        self.rearrangements += entry["moves"] > 0
        if entry["failed"] is None:
            self.by_kind[entry["kind"]] += 1
        else:
            self.failures[entry["cause"]] += 1
