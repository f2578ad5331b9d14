"""Membership for /metrics: the epoch, its members, what was lost and what was replayed. Computed when asked for."""

from collections.abc import Callable, Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from server.front.journal import Journal
from server.front.membership import Epochs, Phase

_LABELS = ("model_name", "engine")


class MembershipMetrics(Collector):  # type: ignore[misc]
    """Reads epochs and journal."""

    def __init__(
        self, epochs: Epochs, journal: Journal, num_parked: Callable[[], int], model_name: str
    ) -> None:
        self._epochs, self._journal, self._num_parked = epochs, journal, num_parked
        self._model_name = model_name

    def describe(self) -> list[Metric]:
        """Say nothing beforehand: registering must not compute."""
        return []

    def collect(self) -> Iterator[Metric]:
        """Yield the families."""
        for name, text, value in (
            ("wideep:epoch", "Changes of membership since the start.", self._epochs.number),
            ("wideep:members", "Ranks of the present epoch.", len(self._epochs.members)),
            (
                "wideep:parked_choices",
                "Accepted choices that wait for a rank to come back.",
                self._num_parked(),
            ),
        ):
            gauge = GaugeMetricFamily(name, text, labels=("model_name",))
            gauge.add_metric((self._model_name,), float(value))
            yield gauge
        replayed = CounterMetricFamily(
            "wideep:replayed_requests", "Choices taken over from lost ranks.", labels=("model_name",)
        )
        replayed.add_metric((self._model_name,), float(self._journal.num_replayed))
        yield replayed
        yield from self._ranks()

    def _ranks(self) -> Iterator[Metric]:
        epochs = self._epochs
        healthy = GaugeMetricFamily("vllm:engine_healthy", "1 while the rank serves.", labels=_LABELS)
        losses = CounterMetricFamily("wideep:rank_losses", "How often the rank was lost.", labels=_LABELS)
        for rank, count in enumerate(epochs.num_losses):
            labels = (self._model_name, str(rank))
            healthy.add_metric(labels, float(epochs.phase is Phase.SERVING and rank in epochs.members))
            losses.add_metric(labels, float(count))
        yield from (healthy, losses)
