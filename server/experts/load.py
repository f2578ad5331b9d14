"""The front's view of a pool's expert load: the ranks' reports in a sliding window, as JSON and for the recorder.

It uses differences between a rank's counters, so lost or merged reports change nothing. The window covers the current
epoch and has a place for each member. Counts since the start (totals, the recorder) have one for each rank of the
pool. Runs in the front's event loop, independently of HTTP.
"""

import asyncio
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from expert_placement.load import (
    BY_PEER,
    PHASES,
    LoadFigures,
    LoadWindow,
    measured_balancedness,
    no_figures,
    over_layers,
)
from scheduler.epochs.orders import Order
from scheduler.moves.reports import Cause, ExpertMap, LoadReport
from server.experts.answer import LoadSnapshot
from server.experts.recorder import LoadRecorder
from server.http.observability.series import Series

WINDOW_STEPS = 1000  # vLLM's default
HISTORY = 200  # rebalances that are kept
KINDS = ("shares", "repair", "plan", "apply", "rollback")
DECISIONS = ("nothing", "shares", "repair")
CAUSES = tuple(cause.value for cause in Cause if cause is not Cause.NONE)
VIEWS = ("all", *PHASES)


class ChangeCounts:
    """Counts changes of the placement since the front's start for Prometheus. Labels have a fixed set of values."""

    def __init__(self) -> None:
        self.is_under_way = False
        self.rearrangements = self.moves = self.num_bytes = 0
        self.seconds = 0.0
        self.by_kind: Counter[str] = Counter()
        self.failures: Counter[str] = Counter()  # by cause
        self.decisions: Counter[str] = Counter()

    def add(self, entry: dict[str, Any]) -> None:
        """Count a finished change, given its history entry."""
        self.moves += entry["moves"]
        self.num_bytes += entry["bytes"]
        self.seconds += entry["seconds"]
        self.rearrangements += entry["moves"] > 0
        if entry["failed"] is None:
            self.by_kind[entry["kind"]] += 1
        else:
            self.failures[entry["cause"]] += 1


class LoadSeries:
    """Balancedness over time since the service's start. A point covers the sliding window at its time."""

    def __init__(self) -> None:
        self._series: Series[list[list[float | None]]] = Series()  # by view and value

    def note(self, now_s: float, window: LoadWindow) -> None:
        """Add a point if it is time and there were tokens. Skip a single rank, which is always equal to the mean."""
        if not self._series.is_due(now_s) or window.rank_tokens(None).shape[1] == 1:
            return
        point = [_values(window.rank_tokens(None if view == "all" else view)) for view in VIEWS]
        if point[0][0] is not None:
            self._series.note(now_s, point)

    def to_json(self) -> dict[str, object]:
        """Return columns: "time", and by view ("all", "prefill", "decode") mean, median and worst over layers."""
        points = self._series.points()
        return {
            "time": [point.time_s for point in points],
            "views": {
                view: {
                    value: [point.value[index][column] for point in points]
                    for column, value in enumerate(("mean", "median", "worst"))
                }
                for index, view in enumerate(VIEWS)
            },
        }


class ExpertsLoad:
    """The experts and their load."""

    def __init__(
        self,
        model: str,
        *,
        first_rank: int = 0,
        window_steps: int = WINDOW_STEPS,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """Args: first_rank is the number of the pool's first rank in the service; its ranks are consecutive.

        window_steps is the length of the window; clock returns seconds since 1970.
        """
        self.model, self.first_rank = model, first_rank
        self.experts: ExpertMap | None = None  # once rank 0 has reported them
        self.window: LoadWindow | None = None  # from then on
        self.recorder = LoadRecorder()
        self.hosts: dict[int, str] = {}
        self.history: deque[dict[str, Any]] = deque(maxlen=HISTORY)  # rebalances, newest last
        self.changes = ChangeCounts()
        self.series = LoadSeries()
        self.revision = 0  # grows with every change of the response
        self.totals: dict[int, LoadFigures] | None = None  # by rank since the start, for Prometheus' counters
        self.total_rank_tokens: np.ndarray | None = None  # [phases, ranks of the pool] since the start
        self._window_steps, self._clock = window_steps, clock
        self.members: tuple[int, ...] = ()  # ranks, by place
        self._epoch = 0
        self._num_ranks = 0  # of the pool
        self._last: dict[int, LoadReport] = {}
        self._early: list[LoadReport] = []  # received before the experts are known
        self._changed = asyncio.Event()

    def note_rank(self, rank: int, host: str) -> None:
        """Record an attached rank. Its counters start at 0."""
        self.revision += 1
        self.hosts[rank] = host
        self._last.pop(rank, None)

    def take_experts(self, experts: ExpertMap) -> None:
        """Record the experts and their placement, at the start and after a switch. Outdated versions are ignored."""
        if self.experts is not None and experts.version <= self.experts.version:
            return
        self.experts = experts
        self.revision += 1
        if self.window is None:
            self._num_ranks = experts.num_ranks
            self.members = tuple(range(self.first_rank, self.first_rank + experts.num_ranks))
            self.totals = dict.fromkeys(self.members, no_figures(experts.num_ranks))
            self.total_rank_tokens = np.zeros((len(PHASES), experts.num_ranks), dtype=np.int64)
            self._open_window(experts)
        early, self._early = self._early, []
        for report in early:
            self.take_load(report)

    def regroup(self, order: Order) -> None:
        """Record the start of an epoch. Its members count from 0, in a new window."""
        self._grow(order.num_ranks)
        self._epoch, self.members = order.epoch, order.members
        self._last.clear()
        self._early.clear()
        self.revision += 1
        if self.experts is not None:
            slots, num_places = order.placement.slot_expert, len(order.members)
            self.experts = self.experts._replace(
                version=order.placement.version, num_ranks=num_places, slot_expert=slots
            )
            self._open_window(self.experts)

    def _grow(self, num_ranks: int) -> None:
        """Make room for the figures of more ranks."""
        more = num_ranks - self._num_ranks
        if self.totals is None or self.total_rank_tokens is None or more <= 0:
            return
        self._num_ranks = num_ranks
        for rank, figures in self.totals.items():
            wider: Any = {name: np.pad(getattr(figures, name), (0, more)) for name in BY_PEER}
            self.totals[rank] = figures._replace(**wider)
        for rank in range(self.first_rank, self.first_rank + num_ranks):
            self.totals.setdefault(rank, no_figures(num_ranks))
        self.total_rank_tokens = np.pad(self.total_rank_tokens, ((0, 0), (0, more)))
        self.recorder.widen(more)

    def _open_window(self, experts: ExpertMap) -> None:
        sizes = len(experts.layers), experts.num_experts, experts.num_ranks
        self.window = LoadWindow(*sizes, self._window_steps)

    def take_load(self, report: LoadReport) -> None:
        """Record a rank's counters. Those of earlier epochs are ignored."""
        if report.epoch != self._epoch:
            return
        if self.window is None or self.totals is None or self.experts is None:
            self._early.append(report)
            return
        last = self._last.get(report.rank)
        # The difference is modulo 2^32, like the counters.
        counts = report.counts if last is None else report.counts - last.counts
        counts = counts.astype(np.int64)
        figures = report.figures if last is None else report.figures.minus(last.figures)
        self._last[report.rank] = report
        self.window.add(report.step, counts, {self.members.index(report.rank): figures})
        self.series.note(self._clock(), self.window)
        self.revision += 1
        places = [rank - self.first_rank for rank in self.members]  # among all ranks of the pool
        counts = _by_rank(counts, places, self._num_ranks)
        self.recorder.add(self._clock(), report.step, report.placement_version, counts)
        self.total_rank_tokens += counts[:, :, self.experts.num_experts :].sum(axis=0)
        by_peer = {name: _spread(getattr(figures, name), places, self._num_ranks) for name in BY_PEER}
        self.totals[report.rank] = self.totals[report.rank].plus(figures._replace(**by_peer))
        self._changed.set()

    def note_change(self, entry: dict[str, Any]) -> None:
        """Record a finished change, given its history entry."""
        self.history.append(entry)
        self.changes.add(entry)
        self.revision += 1

    async def settle(self, steps: Mapping[int, int], timeout_s: float) -> None:
        """Wait until every rank has reported up to a step, or for `timeout_s`.

        Args:
            steps: The last known step of each rank.
        """

        async def wait() -> None:
            while any(rank not in self._last or self._last[rank].step < step for rank, step in steps.items()):
                self._changed.clear()
                await self._changed.wait()

        try:
            await asyncio.wait_for(wait(), timeout_s)
        except TimeoutError:
            return

    def snapshot(self) -> LoadSnapshot:
        """Copy the data for GET /experts/load. The experts must be known."""
        experts, window, totals = self.experts, self.window, self.totals
        assert experts and window and totals is not None, "called before rank 0 attached"
        return LoadSnapshot(
            model=self.model,
            experts=experts,
            members=self.members,
            hosts=dict(self.hosts),
            expert_tokens={phase: window.expert_tokens(phase) for phase in PHASES},
            rank_tokens={phase: window.rank_tokens(phase) for phase in PHASES},
            figures=window.figures,
            totals=dict(totals),
            history=[dict(entry) for entry in self.history],
            series=self.series.to_json(),
        )


def _by_rank(counts: np.ndarray, places: Sequence[int], num_ranks: int) -> np.ndarray:
    """Spread counts of experts and members over experts and all ranks: [layers, phases, experts + ranks].

    Args:
        places: The members' places among all ranks.
    """
    of_experts, of_members = np.split(counts, [counts.shape[2] - len(places)], axis=2)
    return np.concatenate((of_experts, _spread(of_members, places, num_ranks)), axis=2)


def _spread(of_members: np.ndarray, places: Sequence[int], num_ranks: int) -> Any:
    """Spread the last axis from members over all ranks, with zeros for the others."""
    made = np.zeros((*of_members.shape[:-1], num_ranks), dtype=of_members.dtype)
    made[..., list(places)] = of_members
    return made


def _values(rank_tokens: np.ndarray) -> list[float | None]:
    values = over_layers(measured_balancedness(rank_tokens)).values()
    return [None if value is None else round(value, 4) for value in values]
