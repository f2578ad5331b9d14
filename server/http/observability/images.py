"""Metrics of images: how many were encoded or found again, and where their time went."""

from collections.abc import Callable, Iterator

from prometheus_client.core import CounterMetricFamily, Metric
from prometheus_client.registry import Collector

from server.front.images.encoder import EncoderCounts


class ImageMetrics(Collector):  # type: ignore[misc]
    """Exports the counters of the image encoder."""

    def __init__(self, counts: Callable[[], EncoderCounts]) -> None:
        self._counts = counts

    def describe(self) -> list[Metric]:
        """Return no families: registering must not compute them."""
        return []

    def collect(self) -> Iterator[Metric]:
        counts = self._counts()
        images = CounterMetricFamily(
            "wideep:images", "Images of requests, by what became of them.", labels=("outcome",)
        )
        images.add_metric(("encoded",), counts.num_encoded)
        images.add_metric(("repeated",), counts.num_repeated)
        images.add_metric(("refused",), counts.num_refused)
        yield images
        seconds = CounterMetricFamily(
            "wideep:image_seconds", "Time of images, by its part.", labels=("part",)
        )
        seconds.add_metric(("fetch",), counts.fetch_s)
        seconds.add_metric(("decode",), counts.decode_s)
        seconds.add_metric(("process",), counts.process_s)
        seconds.add_metric(("tower",), counts.tower_s)
        yield seconds
        yield CounterMetricFamily(
            "wideep:image_encoder_starts",
            "Starts of the process that encodes images.",
            value=counts.num_starts,
        )
