"""Expert metrics for /metrics: a bounded number of series, regardless of the model's size and of the time.

Names are those proposed for vLLM (`eplb_balancedness_*`, `eplb_rearrangements`, ...) if there is one; ours begin
with `wideep:`. The number of series grows with ranks, not with layers times experts: GET /experts/load has the full
matrices. The hottest experts are numbered by place, with layer and expert as values, because a label per expert would
eventually name them all. Computed at each scrape.
"""

from collections.abc import Iterator

import numpy as np
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from expert_placement.load import BY_PEER, PHASES, WAIT_CAUSES, LoadWindow, measured_balancedness
from server.experts.load import CAUSES, DECISIONS, KINDS, ExpertsLoad

HOTTEST = 8
# Load figures with a counter by rank: its name and help. Those by peer are added up. `wait_causes_s` has labels.
COUNTERS = {
    "dispatch_bytes": ("dispatch_bytes", "Bytes sent to other ranks by dispatches."),
    "combine_bytes": ("combine_bytes", "Bytes sent to other ranks by combines."),
    "exchanges": ("exchanges", "Dispatches and combines. 0 on GPUs."),
    "dispatch_wait_s": ("dispatch_wait_seconds", "Time in the exchanges of dispatches."),
    "combine_wait_s": ("combine_wait_seconds", "Time in the exchanges of combines."),
    "experts_s": ("experts_seconds", "Computation time of the rank's experts."),
    "steps": ("steps", "Steps."),
    "step_s": ("step_seconds", "Time in steps, including waits."),
    "between_steps_s": ("between_steps_seconds", "Time between steps, excluding sleep."),
}
_BALANCEDNESS = (("min", 0.0), ("p50", 0.5), ("p90", 0.9))  # quantiles over layers


class ExpertsMetrics(Collector):  # type: ignore[misc]
    """Exports an `ExpertsLoad`."""

    def __init__(self, load: ExpertsLoad, model_name: str) -> None:
        self._load, self._model_name = load, model_name

    def describe(self) -> list[Metric]:
        """Return no families: registering must not compute them."""
        return []

    def collect(self) -> Iterator[Metric]:
        """Yield the families, or none before the experts are known."""
        window = self._load.window
        if window is None:
            return
        yield from self._balancedness(window)
        yield from self._hottest(window)
        yield from self._ranks()
        yield from self._waits(window)
        yield from self._rebalances()

    def _balancedness(self, window: LoadWindow) -> Iterator[Metric]:
        names = [*(name for name, _ in _BALANCEDNESS), "avg"]
        families = {
            name: GaugeMetricFamily(
                f"vllm:eplb_balancedness_{name}",
                f"Mean over max of the ranks' tokens by layer, {name} over layers, in the window.",
                labels=("model_name", "phase"),
            )
            for name in names
        }
        for phase in PHASES:
            even = measured_balancedness(window.rank_tokens(phase))
            even = even[~np.isnan(even)]
            if not len(even):
                continue
            values = {name: np.quantile(even, part) for name, part in _BALANCEDNESS} | {"avg": even.mean()}
            for name, family in families.items():
                family.add_metric((self._model_name, phase), float(values[name]))
        yield from families.values()

    def _hottest(self, window: LoadWindow) -> Iterator[Metric]:
        labels = ("model_name", "phase", "place")
        ratio = GaugeMetricFamily(
            "wideep:hot_expert_ratio",
            "Tokens of a layer's hottest experts over the layer's mean.",
            labels=labels,
        )
        layer = GaugeMetricFamily("wideep:hot_expert_layer", "Layer of the model.", labels=labels)
        expert = GaugeMetricFamily("wideep:hot_expert_id", "Logical expert.", labels=labels)
        assert self._load.experts is not None, "there is a window"
        for phase in PHASES:
            for place, found in enumerate(hottest(window.expert_tokens(phase), HOTTEST), start=1):
                values = (self._model_name, phase, str(place))
                ratio.add_metric(values, found[2])
                layer.add_metric(values, self._load.experts.layers[found[0]])
                expert.add_metric(values, found[1])
        yield from (ratio, layer, expert)

    def _ranks(self) -> Iterator[Metric]:
        totals, rank_tokens = self._load.totals, self._load.total_rank_tokens
        assert totals is not None and rank_tokens is not None, "there is a window"
        tokens = CounterMetricFamily(
            "vllm:eplb_tokens_per_rank",
            "Tokens processed by the rank's experts, over all layers.",
            labels=("model_name", "engine", "phase"),
        )
        for index, phase in enumerate(PHASES):
            for rank, count in enumerate(rank_tokens[index]):
                tokens.add_metric((self._model_name, str(rank), phase), float(count))
        yield tokens
        for field, (name, text) in COUNTERS.items():
            family = CounterMetricFamily(f"wideep:{name}", text, labels=("model_name", "engine"))
            for rank, figures in enumerate(totals):
                value = getattr(figures, field)
                total = value.sum() if field in BY_PEER else value
                family.add_metric((self._model_name, str(rank)), float(total))
            yield family

    def _waits(self, window: LoadWindow) -> Iterator[Metric]:
        totals = self._load.totals
        assert totals is not None, "there is a window"
        seconds = CounterMetricFamily(
            "wideep:step_wait_seconds",
            "Time in steps that the rank waited for others, by the cause of the difference.",
            labels=("model_name", "engine", "cause"),
        )
        share = GaugeMetricFamily(
            "wideep:step_wait_share",
            "Share of all ranks' time in steps spent waiting for others, in the window.",
            labels=("model_name", "cause"),
        )
        figures = window.figures
        step_s = max(sum(each.step_s for each in figures), 1e-9)
        for index, cause in enumerate(WAIT_CAUSES):
            waited_s = sum(each.wait_causes_s[index] for each in figures)
            share.add_metric((self._model_name, cause), waited_s / step_s)
            for rank, total in enumerate(totals):
                seconds.add_metric((self._model_name, str(rank), cause), float(total.wait_causes_s[index]))
        yield from (seconds, share)

    def _rebalances(self) -> Iterator[Metric]:
        changes = self._load.changes
        for name, text, value in (
            ("vllm:eplb_rearrangements", "Rebalances that moved experts.", changes.rearrangements),
            ("vllm:eplb_rearrangement_seconds", "Duration of rebalances.", changes.seconds),
            ("wideep:eplb_moves", "Slots filled by rebalances.", changes.moves),
            ("wideep:eplb_moved_bytes", "Bytes moved by rebalances.", changes.num_bytes),
        ):
            family = CounterMetricFamily(name, text, labels=("model_name",))
            family.add_metric((self._model_name,), float(value))
            yield family
        for name, text, label, values, counter in (
            ("vllm:eplb_rebalance_events", "Applied changes.", "kind", KINDS, changes.by_kind),
            ("wideep:eplb_failures", "Dropped changes.", "reason", CAUSES, changes.failures),
            ("wideep:eplb_decisions", "Decisions made.", "decision", DECISIONS, changes.decisions),
        ):
            family = CounterMetricFamily(name, text, labels=("model_name", label))
            for each in values:
                family.add_metric((self._model_name, each), float(counter[each]))
            yield family
        gauge = GaugeMetricFamily("vllm:eplb_rebalancing", "1 while experts move.", labels=("model_name",))
        gauge.add_metric((self._model_name,), float(changes.is_under_way))
        yield gauge


def hottest(tokens: np.ndarray, count: int) -> list[tuple[int, int, float]]:
    """Return the experts furthest above their layer's mean.

    Args:
        tokens: [layers, experts].
        count: Maximum length of the result.

    Returns:
        (row, expert, tokens over the row's mean), hottest first, without layers that got no tokens.
    """
    mean = tokens.mean(axis=1, keepdims=True)
    ratio = np.divide(tokens, mean, out=np.zeros(tokens.shape), where=mean > 0)
    order = np.argsort(-ratio, axis=None, kind="stable")[:count]
    found = [divmod(int(index), tokens.shape[1]) for index in order]
    return [(row, expert, float(ratio[row, expert])) for row, expert in found if ratio[row, expert] > 0]
