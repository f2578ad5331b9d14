"""Seconds of a step's experts: kinds of steps are kept apart, and measurements set the scale."""

import numpy as np
import pytest

from expert_placement.forecast import (
    DECODE,
    ENOUGH_STEPS,
    FLOPS_PER_S,
    MEMORY_BYTES_PER_S,
    PREFILL,
    StepKind,
    calibrated,
    step_kinds,
)
from expert_placement.load import LoadFigures, LoadWindow
from expert_placement.placement import Placement, linear_placement

MIB = 1 << 20
EVEN = linear_placement(1, 4, 2)


def window_of(steps: int, prefill_steps: int, *, prefill: int, decode: int) -> LoadWindow:
    """Return a window of two ranks and one layer of four experts. All choices are expert 0."""
    window = LoadWindow(1, 4, 2, 10_000)
    counts = np.zeros((1, 2, 6), dtype=np.int64)
    counts[0, :, 0] = counts[0, :, 4] = prefill, decode
    figures = LoadFigures(steps=steps, prefill_steps=prefill_steps, experts_s=9.0, prefill_experts_s=5.0)
    window.add(1, counts, {0: figures, 1: figures._replace(experts_s=3.0, prefill_experts_s=1.0)})
    return window


def test_steps_with_prompts_carry_the_decodes_of_their_part_as_well() -> None:
    prefill, decode = step_kinds(window_of(100, 20, prefill=4000, decode=500))
    assert (prefill.name, prefill.share, prefill.load_LE[0, 0]) == (PREFILL, 0.2, 200 + 5)
    assert (decode.name, decode.share, decode.load_LE[0, 0]) == (DECODE, 0.8, 5)
    assert (prefill.experts_s, decode.experts_s) == pytest.approx((3.0 / 20, 3.0 / 80))


def test_a_kind_without_steps_is_left_out() -> None:
    assert step_kinds(LoadWindow(1, 4, 2)) == ()
    assert [kind.name for kind in step_kinds(window_of(100, 0, prefill=0, decode=5))] == [DECODE]
    assert [kind.name for kind in step_kinds(window_of(100, 100, prefill=7, decode=5))] == [PREFILL]


def test_too_few_steps_measure_nothing() -> None:
    prefill, decode = step_kinds(window_of(100, ENOUGH_STEPS - 1, prefill=4000, decode=500))
    assert prefill.experts_s == 0 < decode.experts_s


def kind(name: str, load: list[float], experts_s: float) -> StepKind:
    return StepKind(name, np.array([load]), 0.5, experts_s)


def test_the_slowest_rank_is_predicted_in_the_seconds_that_were_measured() -> None:
    seen = kind(PREFILL, [3000, 3000, 1000, 1000], 0.010)  # rank 0 takes three times as long as rank 1
    forecast = calibrated((seen,), EVEN, MIB)
    assert forecast.seconds(EVEN)[0].seconds == pytest.approx(0.015)
    better = Placement(np.array([[0, 2, 1, 3]]), 4, 2)
    assert forecast.seconds(better)[0].seconds == pytest.approx(0.010)
    assert forecast.step_s(better) == pytest.approx(0.005), "half of the steps are of this kind"


def test_a_kind_that_was_not_measured_borrows_the_others_factor_and_none_takes_the_default_rates() -> None:
    many, few = kind(PREFILL, [4000] * 4, 0.02), kind(DECODE, [1000] * 4, 0.0)
    assert calibrated((many, few), EVEN, MIB).factors[0] == calibrated((many, few), EVEN, MIB).factors[1]
    plain = calibrated((few,), EVEN, MIB)
    assert plain.factors == (1.0,)
    assert plain.seconds(EVEN)[0].seconds == pytest.approx(2000 * MIB / 2 / FLOPS_PER_S)


def test_few_tokens_cost_the_weights_that_they_touch() -> None:
    touched = calibrated((kind(DECODE, [8, 8, 0, 0], 0.0),), EVEN, MIB).seconds(EVEN)[0].seconds
    assert touched == pytest.approx(2 * MIB / MEMORY_BYTES_PER_S, rel=1e-3)


def test_the_load_to_plan_by_counts_kinds_by_their_seconds() -> None:
    hot_in_prefill, hot_in_decode = [4000.0, 0, 0, 0], [0.0, 0, 0, 40]
    even = calibrated((kind(PREFILL, hot_in_prefill, 0.03), kind(DECODE, hot_in_decode, 0.01)), EVEN, MIB)
    load = even.loads(EVEN)[0][0]
    assert load[0] / load[3] == pytest.approx(3.0)
    assert load[1] == load[2] == 0


def test_the_average_steps_layers_add_up_to_it_and_each_kind_is_planned_by_itself_too() -> None:
    kinds = (kind(PREFILL, [4000.0, 0, 9, 0], 0.03), kind(DECODE, [0.0, 0, 0, 40], 0.01))
    forecast = calibrated(kinds, EVEN, MIB)
    assert forecast.layer_seconds(EVEN).sum() == pytest.approx(forecast.step_s(EVEN))
    blend, prefill, decode = forecast.loads(EVEN)
    assert blend.sum() == pytest.approx(prefill.sum()) == pytest.approx(decode.sum())
    assert decode[0, 3] == decode.sum() and prefill[0, 0] / prefill[0, 2] == pytest.approx(4000 / 9)
    assert len(calibrated(kinds[:1], EVEN, MIB).loads(EVEN)) == 1


def test_no_expert_bytes_and_no_steps_predict_nothing() -> None:
    assert calibrated((), EVEN, MIB).step_s(EVEN) == 0
    assert calibrated((kind(DECODE, [1.0] * 4, 1.0),), EVEN, 0).step_s(EVEN) == 0
