"""Periodic reports of a rank's counters.

The counters are kept by `moe.load_counts`, `Dispatcher` and `Runner`. This module decides when a report is due and
builds it. A report copies the whole table, so bytes bound its rate: all ranks together send the front less than
FRONT_BYTES_PER_S, for any number of ranks and any model.
"""

import re
from collections.abc import Sequence

import numpy as np

from expert_placement.placement import Placement
from moe.load_counts import LoadCounts
from scheduler.moves.reports import ExpertMap, LoadReport
from scheduler.step.runner import Runner

REPORT_EVERY_S = 1.0
FRONT_BYTES_PER_S = 8 << 20
_LAYER = re.compile(r"\.layers\.(\d+)\.")


class Telemetry:
    """The reports of one rank. Called by the thread that runs steps."""

    def __init__(self, rank: int, counts: LoadCounts, runner: Runner) -> None:
        self._rank, self._runner = rank, runner
        self._due_s = 0.0
        self.begin_epoch(0, counts)

    def begin_epoch(self, epoch: int, counts: LoadCounts) -> None:
        """Read the counters of another epoch from now on. The runner has already reset its own."""
        self._epoch, self._counts = epoch, counts
        self._reported_steps = -1
        bytes_of_all = 4 * counts.table.size * self._runner.dispatcher.world_size
        self.every_s = max(REPORT_EVERY_S, bytes_of_all / FRONT_BYTES_PER_S)

    def is_due(self, now_s: float, *, is_sleeping: bool = False) -> bool:
        """Whether to report now: enough time has passed and steps ran since the last report, or the ranks fall asleep.

        Args:
            now_s: Time on any monotonic clock.
        """
        if is_sleeping:
            return True
        return now_s >= self._due_s and self._runner.figures.steps != self._reported_steps

    def report(self, step: int, placement_version: int, now_s: float) -> LoadReport:
        """Copy the counters into a report."""
        self._due_s = now_s + self.every_s
        self._reported_steps = self._runner.figures.steps
        dispatcher = self._runner.dispatcher
        dispatched, combined = dispatcher.sent_to_ranks()
        waits = dispatcher.waits
        return LoadReport(
            rank=self._rank,
            step=step,
            placement_version=placement_version,
            counts=self._counts.table.astype(np.uint32),
            figures=self._runner.figures._replace(
                exchanges=dispatcher.exchanges.ended,
                dispatch_bytes=np.array(dispatched),
                combine_bytes=np.array(combined),
                dispatch_wait_s=waits.dispatch_ns * 1e-9,
                combine_wait_s=waits.combine_ns * 1e-9,
                wire_s=waits.wire_ns * 1e-9,
                experts_s=self._counts.experts_s,
            ),
            epoch=self._epoch,
        )


def expert_map(placement: Placement, module_names: Sequence[str], num_hidden_layers: int) -> ExpertMap:
    """Describe a model's experts and their placement.

    Args:
        module_names: Names of the experts modules, in the placement's order of layers. If a layer has two, its second one
            (experts for images) is numbered after all layers.
        num_hidden_layers: Of the model; 0 if unknown.
    """
    found = [_LAYER.search(f".{name}.") for name in module_names]
    numbers = [int(match.group(1)) if match else index for index, match in enumerate(found)]
    end = max(num_hidden_layers, max(numbers) + 1)
    layers = tuple(number + end * numbers[:index].count(number) for index, number in enumerate(numbers))
    return ExpertMap(
        version=placement.version,
        num_experts=placement.num_experts,
        num_ranks=placement.num_ranks,
        layers=layers,
        num_hidden_layers=max(num_hidden_layers, max(layers) + 1),
        slot_expert=placement.slot_expert,
    )
