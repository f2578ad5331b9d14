"""Waits of a step are counted by cause, without wire time. Time between two steps is counted, without sleep."""

from types import SimpleNamespace
from typing import Any

import pytest

from dispatch.dispatched import Waits
from expert_placement.load import WAIT_CAUSES
from scheduler.step.runner import Runner

BEFORE = Waits(1000, 2000, 300)


@pytest.mark.parametrize(
    ("dispatch_ns", "combine_ns", "wire_ns", "cause", "expected"),
    [
        (70, 0, 0, "prefill", {"prefill": 70}),
        (0, 40, 0, "prefill", {"experts": 40}),  # waits of combines, whatever dispatches do
        (70, 40, 20, "contexts", {"contexts": 60, "experts": 30}),  # each has half of the wire time
        (5, 40, 20, "decodes", {"experts": 30}),  # never negative
        (70, 5, 20, "other", {"other": 60}),
        (0, 0, 0, "other", {}),
    ],
)
def test_dispatches_wait_for_the_cause_and_combines_for_experts(
    dispatch_ns: int, combine_ns: int, wire_ns: int, cause: str, expected: dict[str, int]
) -> None:
    steps = (dispatch_ns, combine_ns, wire_ns)
    once, twice = (
        Waits(*(was + times * more for was, more in zip(BEFORE, steps, strict=True))) for times in (1, 2)
    )
    runner = _runner_of(once)
    runner._note_waits(BEFORE, cause)
    assert _told(runner) == expected
    runner.dispatcher = _runner_of(twice).dispatcher
    runner._note_waits(once, cause)
    assert _told(runner) == {name: 2 * value for name, value in expected.items()}, "it must be a counter"


def test_time_between_two_steps_is_counted_and_sleep_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    times = iter([100, 130, 137, 150, 9000, 9002, 9003, 9004])  # start and end of four
    monkeypatch.setattr("scheduler.step.runner.perf_counter_ns", lambda: next(times))
    parts: Any = SimpleNamespace(run=lambda *_: None, check=lambda: None, waits=Waits(0, 0, 0))
    runner = Runner(parts, parts, parts, parts, parts, parts)
    for sleeps in (False, True, False, False):
        runner.make_drafts(parts, 0, 0, wait_cause="other")
        if sleeps:
            runner.rest()
    assert (runner.busy_ns, runner.between_ns) == (30 + 13 + 2 + 1, 7 + 1)


def _runner_of(waits: Waits) -> Runner:
    parts: Any = SimpleNamespace(waits=waits)
    return Runner(parts, parts, parts, parts, parts)


def _told(runner: Runner) -> dict[str, int]:
    return {cause: waited for cause, waited in zip(WAIT_CAUSES, runner.waited_ns, strict=True) if waited}
