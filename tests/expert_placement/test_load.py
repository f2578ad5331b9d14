"""Windows of loads against a plain sum over the reports within them; balancedness and its axis."""

import numpy as np
import pytest

from expert_placement.load import (
    PARTS,
    PHASES,
    LoadFigures,
    LoadWindow,
    Slowness,
    explain,
    measured_balancedness,
)

LAYERS, EXPERTS, RANKS = 2, 4, 3
NUM_RANKS, US_PER_TOKEN = 4, 10e-6  # of the synthetic steps that are explained


def counts(seed: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 9, (LAYERS, len(PHASES), EXPERTS + RANKS))


def test_balancedness_is_mean_over_max_of_ranks_in_each_layer() -> None:
    # Each layer is maximally uneven, with another full rank. A sum over layers first would return 1.0.
    rank_tokens = np.array([[30, 0, 0], [0, 30, 0], [0, 0, 30]])
    np.testing.assert_allclose(measured_balancedness(rank_tokens), [1 / 3] * 3)
    # Ranks are axis 1: two ranks, three layers.
    tall = np.array([[10, 10], [10, 30], [0, 20]])
    np.testing.assert_allclose(measured_balancedness(tall), [1.0, 2 / 3, 0.5])


def test_a_layer_without_tokens_has_no_balancedness() -> None:
    assert np.isnan(measured_balancedness(np.zeros((1, 3)))).all()


def test_phases_stay_apart_and_add_up() -> None:
    window, given = LoadWindow(LAYERS, EXPERTS, RANKS), counts(1)
    window.add(5, given, {})
    for index, phase in enumerate(PHASES):
        np.testing.assert_array_equal(window.expert_tokens(phase), given[:, index, :EXPERTS])
        np.testing.assert_array_equal(window.rank_tokens(phase), given[:, index, EXPERTS:])
    np.testing.assert_array_equal(window.expert_tokens(), given[:, :, :EXPERTS].sum(axis=1))


@pytest.mark.parametrize("length", [1, 7, 160, 1000])
def test_a_window_holds_the_last_parts_of_its_steps(length: int) -> None:
    rng, part = np.random.default_rng(length), -(-length // PARTS)
    window, told, step = LoadWindow(LAYERS, EXPERTS, RANKS, length), [], 0
    for index in range(120):
        step = max(0, step + int(rng.integers(-2 * part, 6 * part)))  # reports of ranks arrive out of order
        given = counts(index)
        window.add(step, given, {})
        told.append((step // part, given))
        newest = max(number for number, _ in told)
        kept, seen = np.zeros_like(given), -PARTS
        for number, earlier in told:
            seen = max(seen, number)
            if number > seen - PARTS and number > newest - PARTS:
                kept += earlier
        np.testing.assert_array_equal(window.expert_tokens(), kept[:, :, :EXPERTS].sum(axis=1))


def test_figures_slide_too() -> None:
    window = LoadWindow(LAYERS, EXPERTS, RANKS, 16)
    figures = LoadFigures(steps=4, dispatch_wait_s=0.3, dispatch_bytes=np.array([0, 0, 100]))
    window.add(3, counts(0), {1: figures})
    before = window.figures
    window.add(4, counts(0), {1: figures})
    assert window.figures[1].dispatch_bytes.tolist() == [0, 0, 200]
    assert window.figures[1].dispatch_wait_s == pytest.approx(0.6)
    assert before[1].dispatch_bytes.tolist() == [0, 0, 100], "what was read stays"
    window.add(4000, np.zeros_like(counts(0)), {})
    assert window.figures[1].steps == window.figures[1].dispatch_wait_s == 0
    assert not window.expert_tokens().any()


def test_a_window_of_no_steps_is_refused() -> None:
    with pytest.raises(ValueError, match="window has 0 steps"):
        LoadWindow(LAYERS, EXPERTS, RANKS, 0)


EVEN = np.full(NUM_RANKS, 10_000)


def steps(
    tokens: np.ndarray,
    *,
    attention_s: list[float],
    slow_experts: list[float] | None = None,
    wire_s: float = 0.0,
    jitter_s: float = 0.0,
    names: list[int] | None = None,
) -> Slowness:
    """Simulate one dispatch and one combine: all ranks wait for the last one, and for the wire."""
    experts_s = tokens * US_PER_TOKEN * np.array(slow_experts or [1.0] * NUM_RANKS)
    sent = np.zeros((NUM_RANKS, NUM_RANKS))
    sent[2, 1] = 7
    figures = [
        LoadFigures(
            dispatch_wait_s=max(attention_s) - attention_s[rank] + wire_s + jitter_s,
            combine_wait_s=experts_s.max() - experts_s[rank] + wire_s,
            wire_s=2 * wire_s,
            experts_s=experts_s[rank],
            step_s=max(attention_s) + experts_s.max() + 2 * wire_s + jitter_s,
            dispatch_bytes=sent[rank],
        )
        for rank in range(NUM_RANKS)
    ]
    return explain(figures, tokens, names)


def test_even_ranks_wait_for_nothing() -> None:
    assert steps(EVEN, attention_s=[0.2] * NUM_RANKS).kind == "none"


def test_a_hot_expert_is_told_from_its_ranks_tokens() -> None:
    found = steps(np.array([10_000, 30_000, 10_000, 10_000]), attention_s=[0.2] * NUM_RANKS)
    assert (found.kind, found.rank) == ("hot expert", 1)
    assert found.share == pytest.approx(0.15 / 0.5)  # 0.3 s against 0.15 s on average, of 0.5 s
    assert "2.00 times the mean" in found.sentence


def test_a_rank_that_is_slow_outside_its_experts_is_named() -> None:
    found = steps(EVEN, attention_s=[0.2, 0.2, 0.2, 0.4])
    assert (found.kind, found.rank) == ("slow rank", 3)


def test_ranks_keep_their_names_while_others_are_away() -> None:
    found = steps(EVEN, attention_s=[0.2, 0.2, 0.2, 0.4], names=[0, 2, 3, 5])
    assert found.rank == 5 and "rank 5" in found.sentence
    found = steps(EVEN, attention_s=[0.2] * NUM_RANKS, wire_s=0.1, names=[0, 2, 3, 5])
    assert "from rank 3 to rank 2" in found.sentence


def test_a_rank_whose_experts_are_slow_is_no_hot_expert() -> None:
    found = steps(EVEN, attention_s=[0.2] * NUM_RANKS, slow_experts=[1, 1, 3, 1])
    assert (found.kind, found.rank) == ("slow rank", 2)


def test_a_slow_link_makes_everybody_wait() -> None:
    found = steps(EVEN, attention_s=[0.2] * NUM_RANKS, wire_s=0.1)
    assert (found.kind, found.rank) == ("slow link", None)
    assert found.share == pytest.approx(0.2 / 0.5)
    assert "from rank 2 to rank 1" in found.sentence


def test_ranks_that_are_late_in_turn_are_no_slow_link() -> None:
    found = steps(EVEN, attention_s=[0.2] * NUM_RANKS, wire_s=0.005, jitter_s=0.2)
    assert (found.kind, found.rank) == ("uneven ranks", None)


def test_one_rank_waits_for_nobody_and_no_step_says_nothing() -> None:
    assert explain([LoadFigures()], np.zeros(1)).sentence == "no step has run yet"
    assert explain([LoadFigures(step_s=1.0)], np.ones(1)).kind == "none"
