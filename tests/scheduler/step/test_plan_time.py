"""A plan waits until shortly before the running step ends, and never if the end is unknown."""

import pytest

from scheduler.step.plan_time import MARGIN_S, PlanTime
from tests.support.clock import Clock


def run_steps(
    time: PlanTime,
    clock: Clock,
    count: int,
    *,
    step_s: float,
    host_s: float,
    decodes: int,
    prefill: bool = False,
) -> None:
    """Run steps on a device that is never idle, with a host that plans as late as it may."""
    for _ in range(count):
        ends_s = clock.now_s + step_s
        time.wait()
        time.begin_plan()
        clock.now_s += host_s
        assert clock.now_s < ends_s, "the device became idle"
        time.end_launch(num_decodes=decodes, has_prefill=prefill)
        clock.now_s = ends_s
        time.end_step(step_s, num_decodes=decodes, has_prefill=prefill)


def test_a_plan_waits_until_the_running_step_is_about_to_end() -> None:
    clock = Clock()
    time = PlanTime(clock=clock, sleep=clock.sleep)
    run_steps(time, clock, 8, step_s=0.020, host_s=0.002, decodes=64)
    assert clock.slept_s == [], "nothing is known yet"
    run_steps(time, clock, 30, step_s=0.020, host_s=0.002, decodes=64)
    assert clock.slept_s == [pytest.approx(0.020 - 1.25 * 0.002 - MARGIN_S)] * 30


@pytest.mark.parametrize(("decodes", "share"), [(64, 1.0), (80, 1.0), (16, 0.25)])
def test_other_numbers_of_sequences_are_predicted_rather_too_short(decodes: int, share: float) -> None:
    clock = Clock()
    time = PlanTime(clock=clock, sleep=clock.sleep)
    run_steps(time, clock, 8, step_s=0.020, host_s=0.0, decodes=64)
    time.begin_plan()
    time.end_launch(num_decodes=decodes, has_prefill=False)
    time.wait()
    assert clock.slept_s == [pytest.approx(share * 0.020 - MARGIN_S)]


def test_one_slow_step_does_not_delay_later_plans() -> None:
    clock = Clock()
    time = PlanTime(clock=clock, sleep=clock.sleep)
    run_steps(time, clock, 9, step_s=0.010, host_s=0.001, decodes=8)
    run_steps(time, clock, 1, step_s=0.500, host_s=0.001, decodes=8)
    run_steps(time, clock, 5, step_s=0.010, host_s=0.001, decodes=8)
    assert max(clock.slept_s) < 0.010


def test_a_slow_host_is_remembered_for_some_steps() -> None:
    clock = Clock()
    time = PlanTime(clock=clock, sleep=clock.sleep)
    run_steps(time, clock, 20, step_s=0.020, host_s=0.001, decodes=8)
    run_steps(time, clock, 1, step_s=0.020, host_s=0.002, decodes=8)
    clock.slept_s.clear()
    run_steps(time, clock, 60, step_s=0.020, host_s=0.001, decodes=8)
    assert clock.slept_s[0] == pytest.approx(0.020 - 1.25 * 0.002 - MARGIN_S)
    assert clock.slept_s == sorted(clock.slept_s) and clock.slept_s[-1] == pytest.approx(
        0.02 - 0.00125 - MARGIN_S
    )


def test_nothing_waits_for_a_step_with_prompts_or_shorter_than_the_margin() -> None:
    clock = Clock()
    time = PlanTime(clock=clock, sleep=clock.sleep)
    run_steps(time, clock, 20, step_s=MARGIN_S, host_s=0.0001, decodes=8)
    run_steps(time, clock, 20, step_s=0.050, host_s=0.010, decodes=8, prefill=True)
    assert clock.slept_s == []
