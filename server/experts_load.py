"""The front's picture of its experts' load: what ranks report, in a sliding window, as JSON and for the recorder.

It takes differences between a rank's counters, so a report that was lost or merged changes nothing. Lives in the
front's event loop; knows no HTTP.
"""

import asyncio
import time
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from expert_placement.load import PHASES, LoadWindow, RankFigures, measured_balancedness, no_figures
from expert_placement.slowness import explain
from scheduler.load_report import ExpertMap, LoadReport
from server.load_recorder import LoadRecorder

WINDOW_STEPS = 1000  # vLLM's default
_ADDED = (
    "dispatch_wait_s", "combine_wait_s", "wire_s", "experts_s", "step_s", "prefill_steps", "prefill_experts_s",
    "prefill_step_s", "dispatch_bytes", "combine_bytes",
)  # fmt: skip


class ExpertsLoad:
    """What is known of experts and their load."""

    def __init__(
        self, model: str, *, window_steps: int = WINDOW_STEPS, clock: Callable[[], float] = time.time
    ) -> None:
        """Args: window_steps: length of the window. clock: seconds since 1970."""
        self.model = model
        self.experts: ExpertMap | None = None  # once rank 0 has said it
        self.window: LoadWindow | None = None  # likewise
        self.recorder = LoadRecorder()
        self.hosts: dict[int, str] = {}
        self.history: list[dict[str, Any]] = []  # rebalances, newest last
        self.totals: RankFigures | None = None  # since the start, for Prometheus' counters
        self.total_rank_tokens: np.ndarray | None = None  # [phases, ranks], likewise
        self._window_steps, self._clock = window_steps, clock
        self._last: dict[int, LoadReport] = {}
        self._early: list[LoadReport] = []  # came before the experts
        self._changed = asyncio.Event()

    def note_rank(self, rank: int, host: str) -> None:
        """Take an attached rank, whose counters start at 0."""
        self.hosts[rank] = host
        self._last.pop(rank, None)

    def take_experts(self, experts: ExpertMap) -> None:
        """Take which experts there are and where, at the start and after a switch of placement."""
        self.experts = experts
        if self.window is None:
            sizes = len(experts.layers), experts.num_experts, experts.num_ranks
            self.window = LoadWindow(*sizes, self._window_steps)
            self.totals = no_figures(experts.num_ranks)
            self.total_rank_tokens = np.zeros((len(PHASES), experts.num_ranks), dtype=np.int64)
        early, self._early = self._early, []
        for report in early:
            self.take_load(report)

    def take_load(self, report: LoadReport) -> None:
        """Take a rank's counters."""
        if self.window is None or self.totals is None or self.experts is None:
            self._early.append(report)
            return
        last = self._last.get(report.rank)
        counts = (
            report.counts if last is None else report.counts - last.counts
        )  # modulo 2^32, as the counters
        counts = counts.astype(np.int64)
        figures = _difference(report, last, self.experts.num_ranks)
        self._last[report.rank] = report
        self.window.add(report.step, counts, figures)
        self.recorder.add(self._clock(), report.step, report.placement_version, counts)
        self.total_rank_tokens += counts[:, :, self.experts.num_experts :].sum(axis=0)
        for total, field in zip(self.totals, figures, strict=True):
            total += field
        self._changed.set()

    async def settle(self, steps: Mapping[int, int], timeout_s: float) -> None:
        """Wait until every rank has reported up to a step, or for `timeout_s`.

        Args:
            steps: by rank, the last step that it is known to have reached.
        """

        async def wait() -> None:
            while any(rank not in self._last or self._last[rank].step < step for rank, step in steps.items()):
                self._changed.clear()
                await self._changed.wait()

        try:
            await asyncio.wait_for(wait(), timeout_s)
        except TimeoutError:
            return

    def to_json(self) -> dict[str, Any]:
        """What GET /experts/load answers; the experts must be known."""
        experts, window = self.experts, self.window
        assert experts is not None and window is not None, "asked before rank 0 attached"
        figures = window.figures
        why = explain(figures, window.rank_tokens().sum(axis=0))
        return {
            "model": self.model,
            "num_layers": len(experts.layers),
            "num_experts": experts.num_experts,
            "num_ranks": experts.num_ranks,
            "slots_per_rank": experts.slot_expert.shape[1] // experts.num_ranks,
            "placement_version": experts.version,
            "epoch": 0,
            "window": {"steps": int(figures.steps.max()), "seconds": round(float(figures.step_s.max()), 3)},
            "layers": list(experts.layers),
            "phases": {phase: _phase(window, phase) for phase in PHASES},
            "rank_tokens": {phase: window.rank_tokens(phase).tolist() for phase in PHASES},
            "ranks": [self._rank(rank, figures) for rank in range(experts.num_ranks)],
            "why": why._asdict(),
            "placement": experts.slot_expert.tolist(),
            "history": self.history,
        }

    def _rank(self, rank: int, figures: RankFigures) -> dict[str, Any]:
        tokens = figures.tokens[rank]
        return {
            "rank": rank,
            "host": self.hosts.get(rank),
            "steps": int(figures.steps[rank]),
            "tokens": int(tokens.sum()),
            "prefill_tokens": int(tokens[0]),
            "decode_tokens": int(tokens[1]),
            "dispatch_bytes": [int(count) for count in figures.dispatch_bytes[rank]],
            "combine_bytes": [int(count) for count in figures.combine_bytes[rank]],
            "dispatch_wait_s": round(float(figures.dispatch_wait_s[rank]), 6),
            "combine_wait_s": round(float(figures.combine_wait_s[rank]), 6),
            "wire_s": round(float(figures.wire_s[rank]), 6),
            "experts_s": round(float(figures.experts_s[rank]), 6),
            "step_s": round(float(figures.step_s[rank]), 6),
        }


def _difference(report: LoadReport, last: LoadReport | None, num_ranks: int) -> RankFigures:
    """One rank's figures since its last report, among zeros for the others."""

    def since(name: str) -> Any:
        value = np.asarray(getattr(report, name))
        return value if last is None else value - np.asarray(getattr(last, name))

    made, rank = no_figures(num_ranks), report.rank
    made.steps[rank] = since("num_steps")
    made.tokens[rank] = since("prefill_tokens"), since("decode_tokens")
    for name in _ADDED:
        getattr(made, name)[rank] = since(name)
    return made


def _phase(window: LoadWindow, phase: str) -> dict[str, Any]:
    even = measured_balancedness(window.rank_tokens(phase))
    return {"tokens": window.expert_tokens(phase).tolist(), "balancedness": balancedness_json(even)}


def balancedness_json(even: np.ndarray) -> dict[str, Any]:
    """Balancedness of layers [L], and aggregated over the layers that have tokens; None where none has."""
    known = even[~np.isnan(even)]
    none = len(known) == 0
    return {
        "per_layer": [None if np.isnan(value) else round(float(value), 6) for value in even],
        "mean": None if none else float(known.mean()),
        "median": None if none else float(np.median(known)),
        "worst": None if none else float(known.min()),
    }
