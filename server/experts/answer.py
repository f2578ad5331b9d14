"""Build the response of GET /experts/load from a snapshot, so that a thread can do it while the event loop runs."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from expert_placement.load import (
    PHASES,
    WAIT_CAUSES,
    RankFigures,
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
    figures: RankFigures
    totals: RankFigures  # since the start, of all ranks
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
        "window": {"steps": int(figures.steps.max()), "seconds": round(float(figures.step_s.max()), 3)},
        "layers": list(experts.layers),
        "phases": {phase: _phase(snapshot, phase) for phase in PHASES},
        "rank_tokens": dict(snapshot.rank_tokens),
        "ranks": [
            {
                "rank": rank,
                "host": snapshot.hosts.get(rank),
                "dispatch_bytes": figures.dispatch_bytes[place].astype(np.int64),
                "combine_bytes": figures.combine_bytes[place].astype(np.int64),
                **_figures(figures, place),
                "since_start": _figures(snapshot.totals, rank),
            }
            for place, rank in enumerate(snapshot.members)
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


def _figures(figures: RankFigures, place: int) -> dict[str, Any]:
    tokens = figures.tokens[place]
    return {
        "steps": int(figures.steps[place]),
        "prefill_steps": int(figures.prefill_steps[place]),
        "tokens": int(tokens.sum()),
        "prefill_tokens": int(tokens[0]),
        "decode_tokens": int(tokens[1]),
        "draft_tokens": int(figures.draft_tokens[place]),  # of decode_tokens
        "dispatch_wait_s": round(float(figures.dispatch_wait_s[place]), 6),
        "combine_wait_s": round(float(figures.combine_wait_s[place]), 6),
        "wire_s": round(float(figures.wire_s[place]), 6),
        "experts_s": round(float(figures.experts_s[place]), 6),
        "prefill_experts_s": round(float(figures.prefill_experts_s[place]), 6),
        "wait_causes_s": {
            cause: round(float(waited_s), 6)
            for cause, waited_s in zip(WAIT_CAUSES, figures.wait_causes_s[place], strict=True)
        },
        "step_s": round(float(figures.step_s[place]), 6),
        "between_steps_s": round(float(figures.between_steps_s[place]), 6),
        "prefill_step_s": round(float(figures.prefill_step_s[place]), 6),
    }
