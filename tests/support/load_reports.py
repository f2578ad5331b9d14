"""Load reports for tests: seeded counters that grow, of ranks that a test names."""

import json
from typing import Any

import numpy as np

from scheduler.moves.reports import ExpertMap, LoadReport
from server.experts.answer import answer
from server.experts.load import ExpertsLoad
from server.http.json_parts import encode

LAYERS, EXPERTS, RANKS, SLOTS = 3, 6, 2, 3


def expert_map(version: int = 0) -> ExpertMap:
    """Experts in order on two ranks; layers 2, 3 and 5 of a model of seven."""
    slot_expert = np.tile(np.arange(EXPERTS), (LAYERS, 1))
    return ExpertMap(version, EXPERTS, RANKS, (2, 3, 5), 7, slot_expert)


def counts(seed: int, high: int = 50) -> np.ndarray:
    """[layers, 2, experts + ranks] whose ranks' part follows from the experts'."""
    experts = np.random.default_rng(seed).integers(0, high, (LAYERS, 2, EXPERTS))
    ranks = experts.reshape(LAYERS, 2, RANKS, SLOTS).sum(axis=3)
    return np.concatenate((experts, ranks), axis=2)


def report(rank: int, step: int, total: np.ndarray, **changes: object) -> LoadReport:
    """A rank's counters at a step, with some figures that grow with it."""
    fields: dict[str, object] = {
        "rank": rank,
        "step": step,
        "num_steps": step,
        "prefill_tokens": 2 * step,
        "decode_tokens": 3 * step,
        "placement_version": 0,
        "counts": total.astype(np.uint32),
        "dispatch_bytes": tuple(10 * step if to != rank else 0 for to in range(RANKS)),
        "combine_bytes": tuple(20 * step if to != rank else 0 for to in range(RANKS)),
        "dispatch_wait_s": 0.01 * step,
        "combine_wait_s": 0.02 * step,
        "wire_s": 0.005 * step,
        "experts_s": 0.03 * step,
        "step_s": 0.1 * step,
    }
    return LoadReport(**(fields | changes))  # type: ignore[arg-type]


def told(load: ExpertsLoad) -> dict[str, Any]:
    """What GET /experts/load answers."""
    content: dict[str, Any] = json.loads(encode(answer(load.snapshot())))
    return content
