"""A step counts its waits by cause without wires, its tokens and times by kind, and the time between steps without sleep."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from dispatch.dispatched import Waits, no_errors
from expert_placement.load import WAIT_CAUSES
from kvcache.progress import Progress
from kvcache.step import Inputs
from scheduler.policy.batch import StepBatch
from scheduler.sampling.sampler import Sampled
from scheduler.step.runner import Runner

BEFORE = Waits(1000, 2000, 300)
NO_BATCH = StepBatch([], 0, 0)


@pytest.mark.parametrize(
    ("dispatch_ns", "combine_ns", "wire_ns", "cause", "expected"),
    [
        (70, 0, 0, "prefill", {"prefill": 70}),
        (0, 40, 0, "prefill", {"experts": 40}),  # waits of combines, for any dispatches
        (70, 40, 20, "contexts", {"contexts": 60, "experts": 30}),  # each has half of the wire time
        (5, 40, 20, "decodes", {"experts": 30}),  # never negative
        (70, 5, 20, "other", {"other": 60}),
        (0, 0, 0, "other", {}),
    ],
)
def test_dispatches_wait_for_the_cause_and_combines_for_experts(
    dispatch_ns: int, combine_ns: int, wire_ns: int, cause: str, expected: dict[str, int]
) -> None:
    dispatcher: Any = SimpleNamespace(waits=BEFORE, begin_check=lambda: no_errors)

    def wait(*_: object) -> None:
        more = (dispatch_ns, combine_ns, wire_ns)
        dispatcher.waits = Waits(
            *(was + more_ns for was, more_ns in zip(dispatcher.waits, more, strict=True))
        )

    runner = _runner_of(dispatcher, passes=SimpleNamespace(run=wait))
    for times in (1, 2):
        runner.make_drafts(NO_BATCH, [], 0, 0, wait_cause=cause)
        waits_s = dict(zip(WAIT_CAUSES, runner.figures.wait_causes_s.tolist(), strict=True))
        waited = {name: wait_s * 1e9 for name, wait_s in waits_s.items() if wait_s}
        assert waited == pytest.approx({name: times * ns for name, ns in expected.items()}), (
            "it must be a counter"
        )


def test_time_between_two_steps_is_counted_and_sleep_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    times = iter([100, 130, 137, 150, 9000, 9002, 9003, 9004])  # start and end of four
    monkeypatch.setattr("scheduler.step.runner.perf_counter_ns", lambda: next(times))
    parts: Any = SimpleNamespace(run=lambda *_: None, begin_check=lambda: no_errors, waits=Waits(0, 0, 0))
    runner = _runner_of(parts, passes=parts)
    for sleeps in (False, True, False, False):
        runner.make_drafts(NO_BATCH, [], 0, 0, wait_cause="other")
        if sleeps:
            runner.rest()
    figures = runner.figures
    assert (figures.step_s, figures.between_steps_s) == pytest.approx(
        (46e-9, 8e-9)
    )  # 30 + 13 + 2 + 1, and 7 + 1


def test_a_step_behind_another_is_counted_from_that_one_s_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """No time is counted twice, or as time between steps, as long as the device is busy."""
    times = iter([100, 130, 150, 170, 200, 210, 260, 275])
    monkeypatch.setattr("scheduler.step.runner.perf_counter_ns", lambda: next(times))
    step = SimpleNamespace(
        fill=lambda *_, **__: None, inputs=lambda *_: Inputs(torch.zeros(5), torch.zeros(0))
    )
    dispatcher = SimpleNamespace(waits=Waits(0, 0, 0))

    def check() -> None:
        dispatcher.waits = Waits(dispatcher.waits.dispatch_ns + 3, 0)

    dispatcher.begin_check = lambda: check
    runner = _runner_of(
        dispatcher, model=SimpleNamespace(step=step), forward=lambda *_, **__: torch.zeros(0, 9)
    )
    first = runner.launch(NO_BATCH)  # at 100
    runner.sample(first)
    second = runner.launch(NO_BATCH, before=first)  # at 130, while the first one runs
    runner.read(first)  # until 150
    runner.sample(second)
    third = runner.launch(NO_BATCH, before=second)  # at 170
    runner.read(second)  # until 200
    runner.sample(third)
    runner.read(third)  # until 210
    runner.run(NO_BATCH)  # from 260 to 275
    assert [each.seconds * 1e9 for each in (first, second, third)] == pytest.approx([50, 50, 10])
    assert runner.figures.step_s * 1e9 == pytest.approx(50 + 50 + 10 + 15)
    assert runner.figures.between_steps_s * 1e9 == pytest.approx(50) and runner.figures.steps == 4
    assert runner.figures.wait_causes_s.sum() * 1e9 == pytest.approx(4 * 3), (
        "a check brings the waits of its step"
    )


def test_a_step_with_prompts_is_counted_twice() -> None:
    counts = SimpleNamespace(experts_s=7.0)  # of earlier epochs

    def forward(*_: object, **__: object) -> torch.Tensor:
        counts.experts_s += 0.25
        return torch.zeros(0, 9)

    dispatcher = SimpleNamespace(waits=Waits(0, 0, 0), begin_check=lambda: no_errors)
    step = SimpleNamespace(
        fill=lambda *_, **__: None, inputs=lambda *_: Inputs(torch.zeros(5), torch.zeros(0))
    )
    runner = _runner_of(dispatcher, model=SimpleNamespace(load_counts=counts, step=step), forward=forward)
    runner.run(NO_BATCH._replace(num_tokens=5, num_prefill_tokens=3), has_prefill=True)
    first = runner.figures
    runner.run(NO_BATCH._replace(num_tokens=4), has_prefill=False)
    both = runner.figures
    assert (first.steps, first.prefill_steps, first.prefill_tokens, first.decode_tokens) == (1, 1, 3, 2)
    assert first.prefill_experts_s == 0.25 and first.prefill_step_s == first.step_s > 0
    assert (both.steps, both.prefill_steps, both.prefill_tokens, both.decode_tokens) == (2, 1, 3, 6)
    assert both.prefill_experts_s == 0.25 and both.prefill_step_s == first.step_s < both.step_s


def _runner_of(dispatcher: Any, *, passes: Any = None, model: Any = None, forward: Any = None) -> Runner:
    cache: Any = SimpleNamespace(progress=Progress())
    drawing = SimpleNamespace(read=lambda: Sampled([], []), is_settled=True)
    sampler: Any = SimpleNamespace(begin=lambda *_: drawing)
    return Runner(model, cache, dispatcher, forward, sampler, passes)
