"""A rank's load reports: their totals over real steps on two ranks, when they are due, and their cost."""

from typing import Any

import numpy as np
import pytest

from dispatch.dispatched import Exchanges, Waits
from expert_placement.load import LoadFigures
from expert_placement.placement import linear_placement
from moe.load_counts import LoadCounts
from scheduler.moves.telemetry import FRONT_BYTES_PER_S, REPORT_EVERY_S, Telemetry, expert_map


class FakeDispatcher:
    """Has sent something."""

    def __init__(self, world_size: int) -> None:
        self.world_size, self.waits = world_size, Waits(2_000_000_000, 500_000_000, 100_000_000)
        self.exchanges = Exchanges(begun=13, ended=12)

    def sent_to_ranks(self) -> tuple[list[int], list[int]]:
        """Return bytes by dispatches and combines."""
        return [0, 7], [0, 9]


class FakeRunner:
    """Counts steps."""

    def __init__(self, dispatcher: FakeDispatcher) -> None:
        self.dispatcher = dispatcher

    figures = LoadFigures(prefill_tokens=3, wait_causes_s=np.array([1.0, 0.0, 0.0, 0.5, 0.0]), step_s=4.0)

    def run(self, num_steps: int) -> None:
        self.figures = self.figures.plus(LoadFigures(steps=num_steps))


def telemetry(
    world_size: int = 2, layers: int = 2, experts: int = 4
) -> tuple[Telemetry, FakeRunner, LoadCounts]:
    counts = LoadCounts(layers, num_experts=experts, num_ranks=world_size, slots_per_rank=2)
    runner = FakeRunner(FakeDispatcher(world_size))
    made: Any = Telemetry
    return made(1, counts, runner), runner, counts


def test_a_report_is_due_after_a_while_or_before_a_sleep_and_only_if_steps_ran() -> None:
    reporter, runner, _ = telemetry()
    assert reporter.is_due(5.0)
    reporter.report(1, 0, 5.0)
    assert not reporter.is_due(99.0), "no step ran since the last report"
    assert reporter.is_due(5.0, is_sleeping=True), "a rank must report before it sleeps"
    runner.run(1)
    assert not reporter.is_due(5.0 + 0.9 * REPORT_EVERY_S)
    assert reporter.is_due(5.0 + 0.1, is_sleeping=True)
    assert reporter.is_due(5.0 + REPORT_EVERY_S)


def test_a_report_says_what_was_counted() -> None:
    reporter, runner, counts = telemetry()
    runner.run(6)
    counts.table[1, 0, 3] = (1 << 32) + 5
    counts.layers[0].experts_ns = 250_000_000
    report = reporter.report(17, 3, 0.0)
    assert (report.rank, report.step, report.placement_version) == (1, 17, 3)
    measured: dict[str, Any] = {"dispatch_bytes": [0, 7], "combine_bytes": [0, 9]}
    measured |= {
        "dispatch_wait_s": 2.0,
        "combine_wait_s": 0.5,
        "wire_s": 0.1,
        "experts_s": 0.25,
        "exchanges": 12,
    }
    for name, value in report.figures._asdict().items():
        expected = measured.get(name, getattr(runner.figures, name))
        np.testing.assert_allclose(value, expected, err_msg=name)
    assert (report.figures.steps, report.figures.prefill_tokens, report.figures.step_s) == (6, 3, 4.0)
    assert report.counts[1, 0, 3] == 5, "counters wrap at 2^32"
    counts.table += 1
    assert report.counts[0, 0, 0] == 0, "a report must be a copy"


def test_all_ranks_together_send_a_bounded_number_of_bytes_a_second() -> None:
    small, _, _ = telemetry()
    assert small.every_s == REPORT_EVERY_S
    large, _, counts = telemetry(world_size=320, layers=58, experts=256)
    assert 320 * 4 * counts.table.size / large.every_s == pytest.approx(FRONT_BYTES_PER_S)


def test_the_map_names_the_models_own_layers() -> None:
    placement = linear_placement(2, 6, 2)
    made = expert_map(placement, ["model.layers.3.mlp.experts", "model.layers.11.mlp.experts"], 12)
    assert made.layers == (3, 11)
    assert (made.num_experts, made.num_ranks, made.num_hidden_layers) == (6, 2, 12)
    np.testing.assert_array_equal(made.slot_expert, placement.slot_expert)


def test_second_experts_of_a_layer_are_numbered_after_all_layers() -> None:
    names = [
        f"model.language_model.layers.{layer}.mlp.{kind}_moe.experts"
        for layer in (1, 2)
        for kind in ("text", "vision")
    ]
    made = expert_map(linear_placement(4, 6, 2), names, 3)
    assert made.layers == (1, 4, 2, 5) and made.num_hidden_layers == 6
