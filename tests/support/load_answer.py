"""Answers of GET /experts/load, made up: lognormal experts as fitted to real ones, a planned placement, its ranks."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from expert_placement.placement import Placement, imbalance, linear_placement, rank_load

PHASES = ("prefill", "decode")
SIGMA = 0.7  # of log(load) over the experts of a layer: DeepSeek-V3 has 0.56 to 0.86
LINK_BYTES = 7168 * 2  # of one dispatched row
TIME_S = 1_790_000_000.0  # when the first entry of the history was made


def load_answer(
    num_layers: int,
    num_experts: int,
    num_ranks: int,
    *,
    placement: Placement | None = None,
    tokens_per_layer: int = 1_000_000,
    history: Sequence[dict[str, Any]] = (),
    first_layer: int = 0,
    seed: int = 0,
) -> dict[str, Any]:
    """Return a whole answer; no tokens at all where `tokens_per_layer` is 0."""
    random = np.random.default_rng(seed)
    placement = placement or linear_placement(num_layers, num_experts, num_ranks)
    tokens = {phase: _tokens(random, num_layers, num_experts, tokens_per_layer) for phase in PHASES}
    carried = {phase: np.rint(rank_load(placement, tokens[phase])).astype(int) for phase in PHASES}
    steps = 500 if tokens_per_layer else 0
    served = sum(carried.values()).sum(axis=0)  # type: ignore[union-attr]
    return {
        "model": "made-up",
        "num_layers": num_layers,
        "num_experts": num_experts,
        "num_ranks": num_ranks,
        "slots_per_rank": placement.slots_per_rank,
        "placement_version": placement.version,
        "window": {"steps": steps, "seconds": steps * 0.05},
        "layers": list(range(first_layer, first_layer + num_layers)),
        "phases": {
            phase: {"tokens": tokens[phase].tolist(), "balancedness": _balancedness(placement, tokens[phase])}
            for phase in PHASES
        },
        "rank_tokens": {phase: carried[phase].tolist() for phase in PHASES},
        "ranks": [
            _rank(random, rank, num_ranks, steps, int(served[rank]), int(served.max()))
            for rank in range(num_ranks)
        ],
        "placement": placement.slot_expert.tolist(),
        "history": list(history),
        "series": series(()),
    }


def series(mean: Sequence[float], begin_s: float = TIME_S) -> dict[str, Any]:
    """Return a series of a point every two seconds; the worst layer is a fifth below the mean."""
    every_s, values = 2.0, list(mean)
    view = {"mean": values, "median": values, "worst": [0.8 * value for value in values]}
    times = [begin_s + every_s * index for index in range(len(values))]
    return {"every_s": every_s, "time": times, "views": dict.fromkeys(("all", *PHASES), view)}


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


def _tokens(random: np.random.Generator, num_layers: int, num_experts: int, total: int) -> np.ndarray:
    weight = np.exp(random.normal(0.0, SIGMA, (num_layers, num_experts)))
    tokens: np.ndarray = np.rint(total * weight / weight.sum(axis=1, keepdims=True)).astype(int)
    return tokens


def _balancedness(placement: Placement, tokens: np.ndarray) -> dict[str, Any]:
    per_layer = 1.0 / imbalance(placement, tokens)
    return {
        "per_layer": per_layer.tolist(),
        "mean": float(per_layer.mean()),
        "median": float(np.median(per_layer)),
        "worst": float(per_layer.min()),
    }


def _rank(
    random: np.random.Generator, rank: int, num_ranks: int, steps: int, served: int, most_served: int
) -> dict[str, Any]:
    """One rank's numbers: experts take 2 us a token, and whoever has fewer waits for the fullest."""
    wait_s = (most_served - served) * 2e-6
    return {
        "rank": rank,
        "host": f"node-{rank // 8}",
        "steps": steps,
        "tokens": int(random.integers(900, 1100)) * steps,
        "dispatch_bytes": [
            0 if to == rank else int(random.integers(80, 120)) * LINK_BYTES * steps for to in range(num_ranks)
        ],
        "dispatch_wait_s": 0.3 * wait_s + 1e-4 * steps,
        "combine_wait_s": 0.7 * wait_s + 1e-4 * steps,
        "experts_s": served * 2e-6,
    }
