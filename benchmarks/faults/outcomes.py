"""Faults that were injected, and their figures by kind."""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from server.http.several.forwarding import KEPT_CONNECTIONS
from server.tools.bench.figures import percentile


@dataclass(kw_only=True)
class FaultOutcome:
    """One fault: when it was detected, how long streams paused, when all ranks served again."""

    kind: str
    detected_s: float | None  # None if no rank was missed, which is right for a short pause
    whole_s: float
    pauses_s: list[float]  # of streams that were not cut off
    cut_off_s: list[float]  # of streams that were requested again: from the last piece to the next one
    first_tokens_s: list[float]  # of streams that waited for their first token meanwhile: the whole wait
    load: float  # of the machine: running and waiting threads, mean of the last minute


def summarise(outcomes: Sequence[FaultOutcome]) -> dict[str, dict[str, Any]]:
    """Return the distribution of each time by kind."""
    by_kind = defaultdict(list)
    for outcome in outcomes:
        by_kind[outcome.kind].append(outcome)
    return {
        kind: {
            "faults": len(group),
            "detected_s": spread([each.detected_s for each in group if each.detected_s is not None]),
            "pauses_s": spread([pause for each in group for pause in each.pauses_s]),
            "cut_off_s": spread([pause for each in group for pause in each.cut_off_s]),
            "first_token_s": spread([wait for each in group for wait in each.first_tokens_s]),
            "whole_s": spread([each.whole_s for each in group]),
        }
        for kind, group in by_kind.items()
    }


def spread(times_s: Sequence[float]) -> dict[str, float]:
    """Return percentiles of times, or nothing without any."""
    if not times_s:
        return {}
    percentiles = {f"p{percent}": round(percentile(times_s, percent), 3) for percent in (50, 90, 99)}
    return {"num": len(times_s), **percentiles, "max": round(max(times_s), 3)}


def left_behind(
    before: dict[str, float], after: dict[str, float], *, num_fronts: int = 1
) -> dict[str, list[float]]:
    """Return the figures that did not return to their initial values; memory may grow by a quarter over time."""
    room = {name: before[name] * 0.25 for name in ("front_mb", "engines_mb")}
    room |= {"front_descriptors": 8, "engine_descriptors": 8}  # connections that close a moment later
    # Idle connections to other fronts and from them.
    room["front_descriptors"] += 2 * KEPT_CONNECTIONS * (num_fronts - 1)
    return {
        name: [before[name], after[name]] for name in before if after[name] > before[name] + room.get(name, 0)
    }


def line_of(outcome: FaultOutcome) -> str:
    """Return a fault in one line."""
    seen = "no rank missed" if outcome.detected_s is None else f"seen after {outcome.detected_s:.2f} s"
    waits = f"longest pause {max(outcome.pauses_s):.2f} s" if outcome.pauses_s else "no stream was open"
    if outcome.cut_off_s:
        waits += f", {len(outcome.cut_off_s)} streams cut off for {max(outcome.cut_off_s):.2f} s at most"
    if outcome.first_tokens_s:
        waits += f", first token after {max(outcome.first_tokens_s):.2f} s at most"
    return f"{outcome.kind}: {seen}, {waits}, whole after {outcome.whole_s:.1f} s, load {outcome.load:.1f}"
