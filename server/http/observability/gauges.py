"""The front's own gauges for /metrics: requests, tasks, router load and membership.

To find a leak, watch the open choices, the tasks of the event loop, and each rank's outstanding tokens according to the router:
all of them fall back when there are no requests. Membership has the epoch, its members, lost ranks and replayed requests. All
values are computed at each scrape.
"""

import asyncio
from collections.abc import Callable, Iterator, Mapping
from typing import Protocol

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from server.front.journal import Journal
from server.front.members.membership import Epochs, Phase
from server.front.members.resize import Resize
from server.front.members.resize_operation import ResizePhase
from server.front.routing.loads import MoveCause
from server.http.observability.throughput import Throughput

_LABELS = ("model_name", "engine")


class ResizeMetrics(Collector):  # type: ignore[misc]
    """Exports the resizes: their outcomes, the phase of the newest one, and the requested and the effective number of ranks."""

    def __init__(self, resize: Resize, model_name: str) -> None:
        self._resize, self._model_name = resize, model_name

    def describe(self) -> list[Metric]:
        """Return no families: registering must not compute them."""
        return []

    def collect(self) -> Iterator[Metric]:
        state, own = self._resize.to_json(), (self._model_name,)
        effective = state["effective_data_parallel_size"]
        requested = state["requested_data_parallel_size"] if state["is_scaling_elastic_ep"] else effective
        for name, text, value in (
            ("wideep:requested_ranks", "Number of ranks that the running resize leads to.", requested),
            ("wideep:effective_ranks", "Number of ranks of the service, present or not.", effective),
        ):
            gauge = GaugeMetricFamily(name, text, labels=("model_name",))
            gauge.add_metric(own, float(value))
            yield gauge
        phases = GaugeMetricFamily(
            "wideep:resize_phase", "1 for the phase of the newest resize.", labels=("model_name", "phase")
        )
        ended = CounterMetricFamily(
            "wideep:resizes", "Resizes that have ended.", labels=("model_name", "outcome")
        )
        for phase in ResizePhase:
            phases.add_metric((*own, phase.value), float(state["phase"] == phase.value))
            if phase in (ResizePhase.COMPLETED, ResizePhase.FAILED):
                ended.add_metric((*own, phase.value), float(self._resize.num_ended[phase]))
        yield from (phases, ended)


class SpeedMetrics(Collector):  # type: ignore[misc]
    """Exports what an autoscaler needs of the service as a whole: the predicted wait, and shares of requests within the targets."""

    def __init__(self, throughput: Throughput, model_name: str) -> None:
        self._throughput, self._model_name = throughput, model_name

    def describe(self) -> list[Metric]:
        """Return no families: registering must not compute them."""
        return []

    def collect(self) -> Iterator[Metric]:
        speed = self._throughput.speed()
        wait = GaugeMetricFamily(
            "wideep:predicted_wait_seconds",
            "Time until all waiting requests have begun, at the pace of the last ten seconds.",
            labels=("model_name",),
        )
        wait.add_metric((self._model_name,), speed.predicted_wait_s)
        yield wait
        attained = GaugeMetricFamily(
            "wideep:slo_attainment",
            "Share of the last ten seconds' times within the target.",
            labels=("model_name", "slo"),
        )
        for slo, share in (("ttft", speed.ttft_attainment), ("itl", speed.itl_attainment)):
            if share is not None:
                attained.add_metric((self._model_name, slo), share)
        yield attained


class OpenCount(Protocol):
    """The part of `server.front.requests.Requests` that is exported."""

    @property
    def num_open(self) -> int:
        """Accepted choices without an outcome."""

    @property
    def num_refused(self) -> int:
        """Choices refused at the limit since the start."""


class Loads(Protocol):
    """The part of `server.front.routing.router.Router` that is exported."""

    @property
    def outstanding_tokens(self) -> tuple[int, ...]:
        """Outstanding tokens by rank."""


class FrontMetrics(Collector):  # type: ignore[misc]
    """Exports requests and router load."""

    def __init__(self, requests: OpenCount, router: Loads, model_name: str) -> None:
        self._requests, self._router, self._model_name = requests, router, model_name

    def describe(self) -> list[Metric]:
        """Return no families: registering must not compute them."""
        return []

    def collect(self) -> Iterator[Metric]:
        yield GaugeMetricFamily(
            "wideep:front_open_choices", "Accepted choices without an outcome.", value=self._requests.num_open
        )
        yield CounterMetricFamily(
            "wideep:refused_choices",
            "Choices refused with 429 because too many were open.",
            value=self._requests.num_refused,
        )
        yield GaugeMetricFamily("wideep:front_tasks", "Tasks of the front's event loop.", value=_num_tasks())
        tokens = GaugeMetricFamily(
            "wideep:router_outstanding_tokens",
            "Tokens that the rank still has to run, according to the router.",
            labels=("model_name", "engine"),
        )
        for rank, count in enumerate(self._router.outstanding_tokens):
            tokens.add_metric((self._model_name, str(rank)), count)
        yield tokens


def _num_tasks() -> int:
    """Return the number of the running loop's tasks, or 0 if no loop runs."""
    try:
        return len(asyncio.all_tasks())
    except RuntimeError:
        return 0


class MembershipMetrics(Collector):  # type: ignore[misc]
    """Exports the epochs of all pools, and the journal. Metrics of pools have the label `pool` if there are several."""

    def __init__(
        self,
        pools: Mapping[str, Epochs],
        journal: Journal,
        num_parked: Callable[[], int],
        model_name: str,
        *,
        are_named: bool = False,
    ) -> None:
        """Args: pools are the membership of each pool, by name; there may be more later. are_named adds the label also to a single
        one."""
        self._pools, self._journal, self._num_parked = pools, journal, num_parked
        self._model_name, self._are_named = model_name, are_named

    def describe(self) -> list[Metric]:
        """Return no families: registering must not compute them."""
        return []

    def collect(self) -> Iterator[Metric]:
        yield from self._of_pools()
        parked = GaugeMetricFamily(
            "wideep:parked_choices",
            "Accepted choices that wait for a rank to return.",
            labels=("model_name",),
        )
        parked.add_metric((self._model_name,), float(self._num_parked()))
        yield parked
        replayed = CounterMetricFamily(
            "wideep:replayed_requests", "Choices moved from lost ranks.", labels=("model_name",)
        )
        replayed.add_metric((self._model_name,), float(self._journal.num_replayed))
        yield replayed
        num_moved = self._journal.num_moved
        moved = CounterMetricFamily(
            "wideep:moved_requests", "Choices moved to another rank.", labels=("model_name",)
        )
        moved.add_metric((self._model_name,), float(num_moved.total()))
        yield moved
        moves = CounterMetricFamily(
            "wideep:request_moves",
            "Choices moved to another rank, by cause.",
            labels=("model_name", "cause"),
        )
        for cause in MoveCause:
            moves.add_metric((self._model_name, cause.value), float(num_moved[cause]))
        yield moves
        yield from self._ranks()

    def _of_pools(self) -> Iterator[Metric]:
        has_several = self._are_named or len(self._pools) > 1
        for name, text, value_of in (
            ("wideep:epoch", "Membership changes since the start.", lambda epochs: epochs.number),
            ("wideep:members", "Ranks in the current epoch.", lambda epochs: len(epochs.members)),
        ):
            labels = ("model_name", "pool") if has_several else ("model_name",)
            gauge = GaugeMetricFamily(name, text, labels=labels)
            for pool, epochs in self._pools.items():
                gauge.add_metric((self._model_name, pool)[: len(labels)], float(value_of(epochs)))
            yield gauge

    def _ranks(self) -> Iterator[Metric]:
        healthy = GaugeMetricFamily("vllm:engine_healthy", "1 while the rank serves.", labels=_LABELS)
        losses = CounterMetricFamily("wideep:rank_losses", "Number of losses of the rank.", labels=_LABELS)
        for epochs in self._pools.values():
            for rank, count in epochs.num_losses.items():
                labels = (self._model_name, str(rank))
                losses.add_metric(labels, float(count))
                if rank in epochs.ranks:  # a resize may have let it go
                    is_serving = epochs.phase is Phase.SERVING and rank in epochs.members
                    healthy.add_metric(labels, float(is_serving))
        yield from (healthy, losses)
