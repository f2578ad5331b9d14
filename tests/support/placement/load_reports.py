"""Load reports for tests: seeded counters that grow, for ranks that a test names, and answers of GET /experts/load."""

import json
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from expert_placement.load import LoadFigures
from expert_placement.placement import linear_placement, rank_load
from scheduler.moves.reports import ExpertMap, LoadReport
from server.experts.answer import answer
from server.experts.load import VIEWS, ExpertsLoad
from server.http.json_writer import long_json_bytes

LAYERS, EXPERTS, RANKS, SLOTS = 3, 6, 2, 3
SIGMA = 0.7  # of log(load) over the experts of a layer: DeepSeek-V3 has 0.56 to 0.86
TIME_S = 1_790_000_000.0  # time of the first entry of a history


def expert_map(version: int = 0) -> ExpertMap:
    """Return experts in order on two ranks, for layers 2, 3 and 5 of a seven-layer model."""
    slot_expert = np.tile(np.arange(EXPERTS), (LAYERS, 1))
    return ExpertMap(version, EXPERTS, RANKS, (2, 3, 5), 7, slot_expert)


def counts(seed: int, high: int = 50) -> np.ndarray:
    """Return counters [layers, 2, experts + ranks]. The part of the ranks follows from that of the experts."""
    experts = np.random.default_rng(seed).integers(0, high, (LAYERS, 2, EXPERTS))
    ranks = experts.reshape(LAYERS, 2, RANKS, SLOTS).sum(axis=3)
    return np.concatenate((experts, ranks), axis=2)


def report(rank: int, step: int, total: np.ndarray, **changes: Any) -> LoadReport:
    """A rank's counters at a step, with some figures that grow with it. `changes` are of the report or its figures."""
    elsewhere = step * (np.arange(RANKS) != rank)
    figures = LoadFigures(
        steps=step,
        prefill_tokens=2 * step,
        decode_tokens=3 * step,
        exchanges=8 * step,
        dispatch_wait_s=0.01 * step,
        combine_wait_s=0.02 * step,
        wire_s=0.005 * step,
        experts_s=0.03 * step,
        wait_causes_s=step * np.array([0.004, 0.0, 0.001, 0.015, 0.005]),
        step_s=0.1 * step,
        between_steps_s=0.01 * step,
        dispatch_bytes=10 * elsewhere,
        combine_bytes=20 * elsewhere,
    )
    made = LoadReport(
        rank=rank, step=step, placement_version=0, counts=total.astype(np.uint32), figures=figures
    )
    of_figures = {name: changes.pop(name) for name in LoadFigures._fields if name in changes}
    return replace(made, figures=figures._replace(**of_figures), **changes)


def told(load: ExpertsLoad) -> dict[str, Any]:
    """Return the answer of GET /experts/load."""
    content: dict[str, Any] = json.loads(long_json_bytes(answer(load.snapshot())))
    return content


def load_answer(
    num_layers: int,
    num_experts: int,
    num_ranks: int,
    *,
    tokens_per_layer: int = 1_000_000,
    history: Sequence[dict[str, Any]] = (),
    first_layer: int = 0,
    seed: int = 0,
) -> dict[str, Any]:
    """Return the answer of GET /experts/load for lognormal experts in order, or without tokens if `tokens_per_layer` is 0."""
    load, placement = ExpertsLoad("made-up"), linear_placement(num_layers, num_experts, num_ranks)
    layers = tuple(range(first_layer, first_layer + num_layers))
    load.take_experts(ExpertMap(0, num_experts, num_ranks, layers, layers[-1] + 1, placement.slot_expert))
    weight = np.exp(np.random.default_rng(seed).normal(0.0, SIGMA, (num_layers, 2, num_experts)))
    experts = np.rint(tokens_per_layer * weight / weight.sum(axis=2, keepdims=True))
    ranks = np.stack([rank_load(placement, experts[:, phase]) for phase in (0, 1)], axis=1)
    total, none = np.concatenate((experts, ranks), axis=2), np.zeros(num_ranks, dtype=np.int64)
    for rank in range(num_ranks):
        load.note_rank(rank, f"node-{rank // 8}")
    if tokens_per_layer:  # rank 0 has counted all tokens
        load.take_load(report(0, 500, total, dispatch_bytes=none, combine_bytes=none))
    return {**told(load), "history": list(history)}


def series(mean: Sequence[float], begin_s: float = TIME_S) -> dict[str, Any]:
    """Return a series with a point every two seconds. The worst layer is a fifth below the mean."""
    every_s, values = 2.0, list(mean)
    view = {"mean": values, "median": values, "worst": [0.8 * value for value in values]}
    times = [begin_s + every_s * index for index in range(len(values))]
    return {"time": times, "views": dict.fromkeys(VIEWS, view)}


def change(after_s: float, version: int, kind: str, moves: int, reason: str) -> dict[str, Any]:
    """Return an entry of the history, some seconds after the first."""
    return {
        "time": TIME_S + after_s,
        "version": version,
        "kind": kind,
        "reason": reason,
        "predicted_gain": 0.08 if moves else 0.004,
        "measured_gain": 0.074 if moves else None,
        "moves": moves,
        "bytes": moves * 44_000_000,
        "seconds": 4.2 if moves else 0.0,
    }
