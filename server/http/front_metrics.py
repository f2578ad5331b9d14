"""What the front itself holds, for /metrics: all of it returns to where it was once nobody asks for anything.

These are the gauges to watch for a leak: open choices and tasks of the event loop, and by rank the tokens that the
router still counts on. Computed when Prometheus asks.
"""

import asyncio
from collections.abc import Iterator
from typing import Protocol

from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector


class OpenRequests(Protocol):
    """What is read of `server.front.requests.Requests`."""

    @property
    def num_open(self) -> int:
        """Choices without an outcome."""


class Loads(Protocol):
    """What is read of `server.front.router.Router`."""

    @property
    def outstanding_tokens(self) -> tuple[int, ...]:
        """By rank."""


class FrontMetrics(Collector):  # type: ignore[misc]
    """Reads requests and router."""

    def __init__(self, requests: OpenRequests, router: Loads, model_name: str) -> None:
        self._requests, self._router, self._model_name = requests, router, model_name

    def describe(self) -> list[Metric]:
        """Say nothing beforehand: registering must not compute."""
        return []

    def collect(self) -> Iterator[Metric]:
        """Yield the families."""
        yield GaugeMetricFamily(
            "wideep:front_open_choices", "Accepted choices without an outcome.", value=self._requests.num_open
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
