"""Windows of loads against a plain sum over the reports that are still in them; balancedness and its axis."""

import numpy as np
import pytest

from expert_placement.load import PARTS, PHASES, LoadWindow, measured_balancedness, no_figures

LAYERS, EXPERTS, RANKS = 2, 4, 3


def counts(seed: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 9, (LAYERS, len(PHASES), EXPERTS + RANKS))


def test_balancedness_is_mean_over_max_of_ranks_in_each_layer() -> None:
    # Each layer is as uneven as can be, with another full rank: a sum over layers first would say 1.0.
    rank_tokens = np.array([[30, 0, 0], [0, 30, 0], [0, 0, 30]])
    np.testing.assert_allclose(measured_balancedness(rank_tokens), [1 / 3] * 3)
    # Ranks are axis 1: two ranks, three layers.
    tall = np.array([[10, 10], [10, 30], [0, 20]])
    np.testing.assert_allclose(measured_balancedness(tall), [1.0, 2 / 3, 0.5])


def test_a_layer_without_tokens_has_no_balancedness() -> None:
    assert np.isnan(measured_balancedness(np.zeros((1, 3)))).all()


def test_phases_stay_apart_and_add_up() -> None:
    window, given = LoadWindow(LAYERS, EXPERTS, RANKS), counts(1)
    window.add(5, given, no_figures(RANKS))
    for index, phase in enumerate(PHASES):
        np.testing.assert_array_equal(window.expert_tokens(phase), given[:, index, :EXPERTS])
        np.testing.assert_array_equal(window.rank_tokens(phase), given[:, index, EXPERTS:])
    np.testing.assert_array_equal(window.expert_tokens(), given[:, :, :EXPERTS].sum(axis=1))


@pytest.mark.parametrize("length", [1, 7, 160, 1000])
def test_a_window_holds_the_last_parts_of_its_steps(length: int) -> None:
    rng, part = np.random.default_rng(length), -(-length // PARTS)
    window, told, step = LoadWindow(LAYERS, EXPERTS, RANKS, length), [], 0
    for index in range(120):
        step = max(0, step + int(rng.integers(-2 * part, 6 * part)))  # ranks are not told of in order
        given = counts(index)
        window.add(step, given, no_figures(RANKS))
        told.append((step // part, given))
        newest = max(number for number, _ in told)
        kept, seen = np.zeros_like(given), -PARTS
        for number, earlier in told:
            seen = max(seen, number)
            if number > seen - PARTS and number > newest - PARTS:
                kept += earlier
        np.testing.assert_array_equal(window.expert_tokens(), kept[:, :, :EXPERTS].sum(axis=1))


def test_figures_slide_too() -> None:
    window, figures = LoadWindow(LAYERS, EXPERTS, RANKS, 16), no_figures(RANKS)
    figures.steps[1], figures.dispatch_wait_s[1], figures.dispatch_bytes[1, 2] = 4, 0.3, 100
    window.add(3, counts(0), figures)
    window.add(4, counts(0), figures)
    assert window.figures.dispatch_bytes[1].tolist() == [0, 0, 200]
    assert window.figures.dispatch_wait_s[1] == pytest.approx(0.6)
    window.add(4000, np.zeros_like(counts(0)), no_figures(RANKS))
    assert window.figures.steps.tolist() == [0, 0, 0]
    assert not window.expert_tokens().any()


def test_what_is_handed_out_is_a_copy() -> None:
    window = LoadWindow(LAYERS, EXPERTS, RANKS)
    window.expert_tokens("decode")[:] = 7
    window.rank_tokens("decode")[:] = 7
    window.figures.steps[:] = 7
    assert not window.rank_tokens("decode").any()
    assert not window.expert_tokens("decode").any()
    assert not window.figures.steps.any()


def test_a_window_of_no_steps_is_refused() -> None:
    with pytest.raises(ValueError, match="window of 0 steps"):
        LoadWindow(LAYERS, EXPERTS, RANKS, 0)
