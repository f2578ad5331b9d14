"""What the front itself holds, for /metrics: all of it returns to where it was once nobody asks for anything.

These are the gauges to watch for a leak: open choices and tasks of the event loop, and by rank the tokens that the
router still counts on. So is membership: the epoch, its members, what was lost and what was replayed. All of it is
computed when Prometheus asks.
"""

import asyncio
from collections.abc import Callable, Iterator
from typing import Protocol

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from server.front.journal import Journal
from server.front.membership import Epochs, Phase


class OpenCount(Protocol):
    """What is read of `server.front.requests.Requests`."""

    @property
    def num_open(self) -> int:
        """Choices without an outcome."""

    @property
    def num_refused(self) -> int:
        """Choices that were too many, since the start."""


class Loads(Protocol):
    """What is read of `server.front.router.Router`."""

    @property
    def outstanding_tokens(self) -> tuple[int, ...]:
        """By rank."""


class FrontMetrics(Collector):  # type: ignore[misc]
    """Reads requests and router."""

    def __init__(self, requests: OpenCount, router: Loads, model_name: str) -> None:
        self._requests, self._router, self._model_name = requests, router, model_name

    def describe(self) -> list[Metric]:
        """Say nothing beforehand: registering must not compute."""
        return []

    def collect(self) -> Iterator[Metric]:
        """Yield the families."""
        yield GaugeMetricFamily(
            "wideep:front_open_choices", "Accepted choices without an outcome.", value=self._requests.num_open
        )
        yield CounterMetricFamily(
            "wideep:refused_choices",
            "Choices that were answered 429: too many were open.",
            value=self._requests.num_refused,
        )
        yield GaugeMetricFamily("wideep:front_tasks", "Tasks of the front's event loop.", value=_num_tasks())
        tokens = GaugeMetricFamily(
            "wideep:router_outstanding_tokens",
            "Tokens a rank still has to run, as the router counts.",
            labels=("model_name", "engine"),
        )
        for rank, count in enumerate(self._router.outstanding_tokens):
            tokens.add_metric((self._model_name, str(rank)), count)
        yield tokens


def _num_tasks() -> int:
    """Count the running loop's tasks; 0 where no loop runs."""
    try:
        return len(asyncio.all_tasks())
    except RuntimeError:
        return 0


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
        moved = CounterMetricFamily(
            "wideep:moved_requests", "Choices that waited and went to another rank.", labels=("model_name",)
        )
        moved.add_metric((self._model_name,), float(self._journal.num_moved))
        yield moved
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
