"""Makes Prometheus' families under vLLM's names, bound to this model and, where they are per rank, to each rank."""

from collections.abc import Sequence
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

LABELS = ("model_name", "engine")  # a rank's engine is its number
# Boundaries are vLLM's, so that dashboards' service-level targets fall on one.
TTFT_S = (
    0.001,
    0.005,
    0.01,
    0.02,
    0.04,
    0.06,
    0.08,
    0.1,
    0.25,
    0.5,
    0.75,
    1,
    2.5,
    5,
    7.5,
    10,
    20,
    40,
    80,
    160,
    640,
)
TOKEN_S = (
    0.001,
    0.0025,
    0.005,
    0.01,
    0.025,
    0.05,
    0.075,
    0.1,
    0.15,
    0.2,
    0.3,
    0.4,
    0.5,
    0.75,
    1,
    2.5,
    5,
    10,
    40,
    80,
)
REQUEST_S = (
    0.05,
    0.1,
    0.3,
    0.5,
    0.8,
    1,
    1.5,
    2,
    2.5,
    5,
    10,
    15,
    20,
    30,
    40,
    50,
    60,
    120,
    240,
    480,
    960,
    1920,
    7680,
)
TOKENS = tuple(digit * 10**power for power in range(6) for digit in (1, 2, 5))
STEP_TOKENS = tuple(1 << power for power in range(15))
PARAM_N = (1, 2, 5, 10, 20)


class Families:
    """A registry's families for one model."""

    def __init__(self, registry: CollectorRegistry, model_name: str, num_ranks: int) -> None:
        self.registry, self.model_name = registry, model_name
        self.ranks = [str(rank) for rank in range(num_ranks)]

    def gauge(self, name: str, text: str) -> dict[str, Any]:
        """Return a gauge per rank."""
        return self._per_rank(Gauge(f"vllm:{name}", text, LABELS, registry=self.registry))

    def counter(self, name: str, text: str) -> dict[str, Any]:
        """Return a counter per rank; its name gets _total."""
        return self._per_rank(Counter(f"vllm:{name}", text, LABELS, registry=self.registry))

    def histogram(self, name: str, text: str, buckets: Sequence[float]) -> dict[str, Any]:
        """Return a histogram per rank."""
        return self._per_rank(
            Histogram(f"vllm:{name}", text, LABELS, buckets=buckets, registry=self.registry)
        )

    def histogram_of_requests(self, name: str, text: str, buckets: Sequence[float]) -> Any:
        """Return a histogram of what belongs to no rank; its engine is 0."""
        family = Histogram(f"vllm:{name}", text, LABELS, buckets=buckets, registry=self.registry)
        return family.labels(self.model_name, "0")

    def labelled(
        self, kind: type[Counter] | type[Gauge], name: str, text: str, label: str, values: Sequence[str]
    ) -> dict[tuple[str, str], Any]:
        """Return a family with one more label, by rank and the label's value, every series there from the start."""
        family = kind(f"vllm:{name}", text, (*LABELS, label), registry=self.registry)
        return {
            (rank, value): family.labels(self.model_name, rank, value)
            for rank in self.ranks
            for value in values
        }

    def _per_rank(self, family: Any) -> dict[str, Any]:
        """Bind a family to each rank once: looking labels up costs more than counting."""
        return {rank: family.labels(self.model_name, rank) for rank in self.ranks}
