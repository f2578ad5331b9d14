"""Expert metrics for /metrics: a bounded number of series, regardless of the model's size and of the time.

Names are those proposed for vLLM (`eplb_balancedness_*`, `eplb_rearrangements`, ...) if there is one; ours begin
with `wideep:`. The number of series grows with ranks, not with layers times experts: GET /experts/load has the full
matrices. The hottest experts are numbered by place, with layer and expert as values, because a label per expert would
eventually name them all. Computed at each scrape.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from expert_placement.load import BY_PEER, PHASES, WAIT_CAUSES, LoadFigures, LoadWindow, measured_balancedness
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


class _Known(NamedTuple):
    """A pool with known experts."""

    labels: tuple[str, ...]  # values of the labels that all metrics of pools have
    load: ExpertsLoad


class ExpertsMetrics(Collector):  # type: ignore[misc]
    """Exports the `ExpertsLoad` of each pool. Metrics of pools have the label `pool` if there are several."""

    def __init__(self, pools: Mapping[str, ExpertsLoad], model_name: str, *, are_named: bool = False) -> None:
        """Args: pools are the loads, by the pools' names; there may be more later. are_named adds the label also to a single one."""
        self._pools, self._model_name, self._are_named = pools, model_name, are_named

    @property
    def _labels(self) -> tuple[str, ...]:
        return ("model_name", "pool") if self._are_named or len(self._pools) > 1 else ("model_name",)

    def describe(self) -> list[Metric]:
        """Return no families: registering must not compute them."""
        return []

    def collect(self) -> Iterator[Metric]:
        """Yield the families. Pools with unknown experts are left out."""
        known = [
            _Known((self._model_name, name)[: len(self._labels)], load)
            for name, load in self._pools.items()
            if load.window is not None
        ]
        if not known:
            return
        yield from self._balancedness(known)
        yield from self._hottest(known)
        yield from self._ranks(known)
        yield from self._waits(known)
        yield from self._rebalances(known)

    def _balancedness(self, known: Sequence[_Known]) -> Iterator[Metric]:
        names = [*(name for name, _ in _BALANCEDNESS), "avg"]
        families = {
            name: GaugeMetricFamily(
                f"vllm:eplb_balancedness_{name}",
                f"Mean over max of the ranks' tokens by layer, {name} over layers, in the window.",
                labels=(*self._labels, "phase"),
            )
            for name in names
        }
        for labels, load in known:
            for phase in PHASES:
                even = measured_balancedness(_window(load).rank_tokens(phase))
                even = even[~np.isnan(even)]
                if not len(even):
                    continue
                values = {name: np.quantile(even, part) for name, part in _BALANCEDNESS} | {
                    "avg": even.mean()
                }
                for name, family in families.items():
                    family.add_metric((*labels, phase), float(values[name]))
        yield from families.values()

    def _hottest(self, known: Sequence[_Known]) -> Iterator[Metric]:
        names = (*self._labels, "phase", "place")
        ratio = GaugeMetricFamily(
            "wideep:hot_expert_ratio",
            "Tokens of a layer's hottest experts over the layer's mean.",
            labels=names,
        )
        layer = GaugeMetricFamily("wideep:hot_expert_layer", "Layer of the model.", labels=names)
        expert = GaugeMetricFamily("wideep:hot_expert_id", "Logical expert.", labels=names)
        for labels, load in known:
            assert load.experts is not None, "there is a window"
            for phase in PHASES:
                found = hottest(_window(load).expert_tokens(phase), HOTTEST)
                for place, (row, number, times) in enumerate(found, start=1):
                    values = (*labels, phase, str(place))
                    ratio.add_metric(values, times)
                    layer.add_metric(values, load.experts.layers[row])
                    expert.add_metric(values, number)
        yield from (ratio, layer, expert)

    def _ranks(self, known: Sequence[_Known]) -> Iterator[Metric]:
        tokens = CounterMetricFamily(
            "vllm:eplb_tokens_per_rank",
            "Tokens processed by the rank's experts, over all layers.",
            labels=("model_name", "engine", "phase"),
        )
        for _, load in known:
            assert load.total_rank_tokens is not None, "there is a window"
            for index, phase in enumerate(PHASES):
                for rank, count in zip(_totals(load), load.total_rank_tokens[index], strict=True):
                    tokens.add_metric((self._model_name, str(rank), phase), float(count))
        yield tokens
        for field, (name, text) in COUNTERS.items():
            family = CounterMetricFamily(f"wideep:{name}", text, labels=("model_name", "engine"))
            for _, load in known:
                for rank, figures in _totals(load).items():
                    value = getattr(figures, field)
                    total = value.sum() if field in BY_PEER else value
                    family.add_metric((self._model_name, str(rank)), float(total))
            yield family

    def _waits(self, known: Sequence[_Known]) -> Iterator[Metric]:
        seconds = CounterMetricFamily(
            "wideep:step_wait_seconds",
            "Time in steps that the rank waited for others, by the cause of the difference.",
            labels=("model_name", "engine", "cause"),
        )
        share = GaugeMetricFamily(
            "wideep:step_wait_share",
            "Share of all ranks' time in steps spent waiting for others, in the window.",
            labels=(*self._labels, "cause"),
        )
        for labels, load in known:
            figures = _window(load).figures
            step_s = max(sum(each.step_s for each in figures), 1e-9)
            for index, cause in enumerate(WAIT_CAUSES):
                waited_s = sum(each.wait_causes_s[index] for each in figures)
                share.add_metric((*labels, cause), waited_s / step_s)
                for rank, total in _totals(load).items():
                    seconds.add_metric(
                        (self._model_name, str(rank), cause), float(total.wait_causes_s[index])
                    )
        yield from (seconds, share)

    def _rebalances(self, known: Sequence[_Known]) -> Iterator[Metric]:
        for name, text, field in (
            ("vllm:eplb_rearrangements", "Rebalances that moved experts.", "rearrangements"),
            ("vllm:eplb_rearrangement_seconds", "Duration of rebalances.", "seconds"),
            ("wideep:eplb_moves", "Slots filled by rebalances.", "moves"),
            ("wideep:eplb_moved_bytes", "Bytes moved by rebalances.", "num_bytes"),
        ):
            family = CounterMetricFamily(name, text, labels=self._labels)
            for labels, load in known:
                family.add_metric(labels, float(getattr(load.changes, field)))
            yield family
        for name, text, label, values, field in (
            ("vllm:eplb_rebalance_events", "Applied changes.", "kind", KINDS, "by_kind"),
            ("wideep:eplb_failures", "Dropped changes.", "reason", CAUSES, "failures"),
            ("wideep:eplb_decisions", "Decisions made.", "decision", DECISIONS, "decisions"),
        ):
            family = CounterMetricFamily(name, text, labels=(*self._labels, label))
            for labels, load in known:
                for each in values:
                    family.add_metric((*labels, each), float(getattr(load.changes, field)[each]))
            yield family
        gauge = GaugeMetricFamily("vllm:eplb_rebalancing", "1 while experts move.", labels=self._labels)
        for labels, load in known:
            gauge.add_metric(labels, float(load.changes.is_under_way))
        yield gauge


def _window(load: ExpertsLoad) -> LoadWindow:
    assert load.window is not None, "the experts are known"
    return load.window


def _totals(load: ExpertsLoad) -> Mapping[int, LoadFigures]:
    assert load.totals is not None, "the experts are known"
    return load.totals


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
