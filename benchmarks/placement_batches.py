"""The part of `benchmarks.placement` that plays batches: ranks draw tokens, copies are chosen, the fullest rank counts.

A batch is 128 tokens of 8 choices on each of 32 ranks, drawn independently by the window's load, which is the least
that any batch varies by. Choices go through `ReplicaChoice`, the code that serves.
"""

from typing import Any, Protocol

import numpy as np

from expert_placement.choose import ReplicaChoice
from expert_placement.nodes import Cluster, Rules
from expert_placement.placement import Placement
from expert_placement.plan import fill_layers, plan
from tests.support import placement_peers as peers

RANKS, TOKENS, CHOICES = 32, 128, 8


class Rows(Protocol):
    """Where figures go."""

    def section(self, title: str) -> None: ...

    def row(self, section: str, name: str, **values: Any) -> None: ...

    def goal(self, name: str, value: float, most: float) -> None: ...


def measure_batches(report: Rows, windows: dict[str, np.ndarray], rounds: int) -> None:
    """Play `rounds` batches of every layer and window, with 288 and 320 slots."""
    report.section(f"batches of {TOKENS} tokens per rank on {RANKS} ranks, top {CHOICES}")
    rng = np.random.default_rng(7)
    for width in (9, 10):
        tried: dict[str, list[float]] = {}
        for load in windows.values():
            placement = plan(load, width, Rules(cluster=Cluster(num_ranks=RANKS))).placement
            choices = [ReplicaChoice(placement, rank) for rank in range(RANKS)]
            theirs = peers.eplb_global(load, RANKS * width, RANKS)
            for layer in range(len(load)):
                for _ in range(rounds):
                    counts = rng.multinomial(TOKENS * CHOICES, load[layer] / load[layer].sum(), size=RANKS)
                    _play(placement, choices, theirs[layer], layer, counts, rng, tried)
        section = f"batches 32x{width}"
        for name, values in tried.items():
            report.row(
                section,
                f"32x{width} {name}",
                mean=float(np.mean(values)),
                p95=float(np.quantile(values, 0.95)),
            )
        served = tried["shares of the window"]
        goals = (1.007, 1.04) if width == 9 else (1.002, 1.002)
        report.goal(f"batches 32x{width}, shares of the window, mean", float(np.mean(served)), goals[0])
        report.goal(
            f"batches 32x{width}, shares of the window, p95", float(np.quantile(served, 0.95)), goals[1]
        )


def _play(
    placement: Placement,
    choices: list[ReplicaChoice],
    theirs: np.ndarray,
    layer: int,
    counts: np.ndarray,
    rng: np.random.Generator,
    tried: dict[str, list[float]],
) -> None:
    """One batch: `counts` is [ranks, experts]."""
    total = counts.sum(axis=0)
    experts = [np.repeat(np.arange(len(total)), row) for row in counts]
    alone = [choice.choose(layer, own) for choice, own in zip(choices, experts, strict=True)]
    width = placement.slots_per_rank

    def note(name: str, loads: np.ndarray) -> None:
        ranks = loads.reshape(RANKS, -1).sum(axis=1)
        tried.setdefault(name, []).append(float(ranks.max() / ranks.mean()))

    slots = RANKS * width
    note("shares of the window", np.bincount(np.concatenate(alone), minlength=slots))
    x = np.zeros((1, slots))
    fill_layers(total[None].astype(float), placement.slot_expert[layer : layer + 1], width, 100, 1e-6, x)
    note("bound: shares for the batch, tokens divisible", x[0])
    note("EPLB, random copies", _random_copies(theirs, total, rng))
    num = np.bincount(theirs, minlength=len(total))
    note("EPLB, exactly even copies", (total / num)[theirs])
    x = np.zeros((1, slots))
    fill_layers(total[None].astype(float), theirs[None], width, 100, 1e-6, x)
    note("EPLB, shares for the batch", x[0])


def _random_copies(slots: np.ndarray, total: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Every token takes one of its expert's copies by chance: tokens of each slot."""
    carried = np.zeros(len(slots))
    for expert, tokens in enumerate(total):
        own = np.flatnonzero(slots == expert)
        carried[own] = rng.multinomial(tokens, np.full(len(own), 1 / len(own)))
    return carried
