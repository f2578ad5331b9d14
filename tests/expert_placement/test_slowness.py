"""What ranks wait for, told from made-up steps in which one cause is put in: each is named, with its rank and size."""

import numpy as np
import pytest

from expert_placement.load import no_figures
from expert_placement.slowness import Slowness, explain

RANKS, US_PER_TOKEN = 4, 10e-6
EVEN = np.full(RANKS, 10_000)


def steps(
    tokens: np.ndarray,
    *,
    attention_s: list[float],
    slow_experts: list[float] | None = None,
    wire_s: float = 0.0,
    jitter_s: float = 0.0,
    names: list[int] | None = None,
) -> Slowness:
    """Walk one dispatch and one combine: everybody waits for the last, and for the wire."""
    figures = no_figures(RANKS)
    attention = np.array(attention_s)
    figures.experts_s[:] = tokens * US_PER_TOKEN * np.array(slow_experts or [1.0] * RANKS)
    figures.dispatch_wait_s[:] = attention.max() - attention + wire_s
    figures.combine_wait_s[:] = figures.experts_s.max() - figures.experts_s + wire_s
    figures.step_s[:] = attention.max() + figures.experts_s.max() + 2 * wire_s
    figures.wire_s[:] = 2 * wire_s
    figures.dispatch_wait_s[:] += jitter_s
    figures.step_s[:] += jitter_s
    figures.dispatch_bytes[2, 1] = 7
    return explain(figures, tokens, names)


def test_even_ranks_wait_for_nothing() -> None:
    assert steps(EVEN, attention_s=[0.2] * RANKS).kind == "none"


def test_a_hot_expert_is_told_from_its_ranks_tokens() -> None:
    found = steps(np.array([10_000, 30_000, 10_000, 10_000]), attention_s=[0.2] * RANKS)
    assert (found.kind, found.rank) == ("hot expert", 1)
    assert found.share == pytest.approx(0.15 / 0.5)  # 0.3 s against 0.15 s on average, of 0.5 s
    assert "2.00 times the mean" in found.sentence


def test_a_rank_that_is_slow_outside_its_experts_is_named() -> None:
    found = steps(EVEN, attention_s=[0.2, 0.2, 0.2, 0.4])
    assert (found.kind, found.rank) == ("slow rank", 3)


def test_ranks_keep_their_names_while_others_are_away() -> None:
    found = steps(EVEN, attention_s=[0.2, 0.2, 0.2, 0.4], names=[0, 2, 3, 5])
    assert found.rank == 5 and "rank 5" in found.sentence
    found = steps(EVEN, attention_s=[0.2] * RANKS, wire_s=0.1, names=[0, 2, 3, 5])
    assert "from rank 3 to rank 2" in found.sentence


def test_a_rank_whose_experts_are_slow_is_no_hot_expert() -> None:
    found = steps(EVEN, attention_s=[0.2] * RANKS, slow_experts=[1, 1, 3, 1])
    assert (found.kind, found.rank) == ("slow rank", 2)


def test_a_slow_link_makes_everybody_wait() -> None:
    found = steps(EVEN, attention_s=[0.2] * RANKS, wire_s=0.1)
    assert (found.kind, found.rank) == ("slow link", None)
    assert found.share == pytest.approx(0.2 / 0.5)
    assert "from rank 2 to rank 1" in found.sentence


def test_ranks_that_are_late_in_turn_are_no_slow_link() -> None:
    found = steps(EVEN, attention_s=[0.2] * RANKS, wire_s=0.005, jitter_s=0.2)
    assert (found.kind, found.rank) == ("uneven ranks", None)


def test_one_rank_waits_for_nobody_and_no_step_says_nothing() -> None:
    alone = no_figures(1)
    assert explain(alone, np.zeros(1)).sentence == "no step has run yet"
    alone.step_s[:] = 1
    assert explain(alone, np.ones(1)).kind == "none"
