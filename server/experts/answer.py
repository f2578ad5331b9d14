"""Build the response of GET /experts/load from a snapshot, so that a thread can do it while the event loop runs."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from expert_placement.load import (
    BY_PEER,
    PHASES,
    WAIT_CAUSES,
    LoadFigures,
    explain,
    measured_balancedness,
    over_layers,
)
from scheduler.moves.reports import ExpertMap


class LoadSnapshot(NamedTuple):
    """The load at one moment. Nothing in it changes later."""

    model: str
    experts: ExpertMap
    members: Sequence[int]  # ranks, by place
    hosts: Mapping[int, str]
    expert_tokens: Mapping[str, np.ndarray]  # by phase: [layers, experts]
    rank_tokens: Mapping[str, np.ndarray]  # by phase: [layers, ranks]
    figures: Sequence[LoadFigures]  # by place
    totals: Mapping[int, LoadFigures]  # since the start, by rank
    history: list[dict[str, Any]]
    series: dict[str, object]


def answer(snapshot: LoadSnapshot) -> dict[str, Any]:
    """Return the response, with arrays instead of lists (see `json_parts`)."""
    experts, figures = snapshot.experts, snapshot.figures
    rank_tokens = sum(tokens.sum(axis=0) for tokens in snapshot.rank_tokens.values())
    why = explain(figures, rank_tokens, snapshot.members)
    return {
        "model": snapshot.model,
        "num_layers": len(experts.layers),
        "num_experts": experts.num_experts,
        "num_ranks": experts.num_ranks,
        "slots_per_rank": experts.slot_expert.shape[1] // experts.num_ranks,
        "placement_version": experts.version,
        "window": {
            "steps": max(each.steps for each in figures),
            "seconds": round(max(each.step_s for each in figures), 3),
        },
        "layers": list(experts.layers),
        "phases": {phase: _phase(snapshot, phase) for phase in PHASES},
        "rank_tokens": dict(snapshot.rank_tokens),
        "ranks": [
            {
                "rank": rank,
                "host": snapshot.hosts.get(rank),
                **{name: getattr(of_rank, name) for name in BY_PEER},
                **_figures(of_rank),
                "since_start": _figures(snapshot.totals[rank]),
            }
            for rank, of_rank in zip(snapshot.members, figures, strict=True)
        ],
        "why": why._asdict(),
        "placement": experts.slot_expert,
        "history": snapshot.history,
        "series": snapshot.series,
    }


def _phase(snapshot: LoadSnapshot, phase: str) -> dict[str, Any]:
    even = measured_balancedness(snapshot.rank_tokens[phase])
    per_layer = [None if np.isnan(value) else round(float(value), 6) for value in even]
    return {
        "tokens": snapshot.expert_tokens[phase],
        "balancedness": {"per_layer": per_layer, **over_layers(even)},
    }


def _figures(figures: LoadFigures) -> dict[str, Any]:
    waits_s = zip(WAIT_CAUSES, figures.wait_causes_s.tolist(), strict=True)
    numbers = {name: value for name, value in figures._asdict().items() if not isinstance(value, np.ndarray)}
    return {
        "tokens": figures.prefill_tokens + figures.decode_tokens,
        **{name: round(value, 6) for name, value in numbers.items()},
        "wait_causes_s": {cause: round(waited_s, 6) for cause, waited_s in waits_s},
    }
