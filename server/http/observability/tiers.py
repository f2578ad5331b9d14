"""The tiers of the KV cache: totals of the ranks' counters for /metrics, and each node's tiers for the status.

Metrics have vLLM's names (those of its OffloadingConnector and its external prefix cache) if it measures the same, and
otherwise begin with `wideep:`. Counters belong to ranks and survive a restart of an engine, which counts from 0. Sizes belong
to nodes, because the ranks of a node share its tiers and all report the same ones: per rank, a sum would count them repeatedly.
"""

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from kvcache.tiers.figures import TierFigures
from scheduler.policy.request import RankStats
from server.link.messages import RankFacts

TIERS = ("host", "disk")
SOURCES = {
    "host": "host",
    "disk": "disk",
    "peer": "p2p",
}  # of cached tokens besides the device -> vLLM's label
_OUTCOMES = ("whole", "empty", "declined", "failed")  # of fetches from other nodes
_NO_FIGURES = TierFigures()
# Fields of `TierFigures` that are gauges of a node; all others are counters of a rank.
_GAUGES = ("host_bytes", "host_capacity_bytes", "disk_bytes", "disk_capacity_bytes", "is_disk_off")
_COUNTERS = tuple(name for name in TierFigures._fields if name not in _GAUGES)
_LABELS = ("model_name", "engine")
_DIRECTIONS = {"CPU_to_GPU": "load", "GPU_to_CPU": "store"}  # vLLM's label -> our word
# Counters with one more label: name, meaning, label, and by the label's value the counters that are added up.
_LABELLED: Sequence[tuple[str, str, str, Mapping[str, Sequence[str]]]] = (
    (
        "vllm:kv_offload_total_bytes",
        "Bytes loaded from and stored in tiers.",
        "transfer_type",
        {value: [f"{tier}_{way}_bytes" for tier in TIERS] for value, way in _DIRECTIONS.items()},
    ),
    (
        "vllm:kv_offload_total_time",
        "Seconds spent loading from and storing in tiers.",
        "transfer_type",
        {value: [f"{way}_s"] for value, way in _DIRECTIONS.items()},
    ),
    (
        "vllm:kv_offload_tiering_read_bytes",
        "Bytes read from the disk, and from other nodes.",
        "tier",
        {"disk": ["disk_load_bytes"], "p2p": ["peer_fetch_bytes"]},
    ),
    (
        "vllm:kv_offload_tiering_read_time",
        "Seconds spent reading from the disk, and from other nodes.",
        "tier",
        {"disk": ["disk_load_s"], "p2p": ["peer_fetch_s"]},
    ),
    (
        "vllm:kv_offload_tiering_write_bytes",
        "Bytes written to the disk.",
        "tier",
        {"disk": ["disk_store_bytes"]},
    ),
    (
        "vllm:kv_offload_tiering_write_time",
        "Seconds spent writing to the disk.",
        "tier",
        {"disk": ["disk_store_s"]},
    ),
    *(
        (
            f"wideep:kv_tier_{way}_bytes",
            f"Bytes of tiers, {way}.",
            "tier",
            {tier: [f"{tier}_{way}_bytes"] for tier in TIERS},
        )
        for way in ("load", "store")
    ),
    (
        "wideep:kv_peer_fetches",
        "Fetches from other nodes.",
        "outcome",
        {outcome: [f"num_fetches_{outcome}"] for outcome in _OUTCOMES},
    ),
)


class TierTotals(Collector):  # type: ignore[misc]
    """Adds up what ranks report about their tiers."""

    def __init__(self, model_name: str, num_ranks: int) -> None:
        self._model_name = model_name
        # By rank and counter, and "query_tokens": prompt tokens that were not on the device.
        self._totals: list[dict[str, float]] = [defaultdict(float) for _ in range(num_ranks)]
        self._last: dict[int, RankStats] = {}  # by engine, including one that may return
        self._serving: dict[int, RankFacts] = {}

    def grow(self, num_ranks: int) -> None:
        """Count for this many ranks from now on."""
        self._totals += [defaultdict(float) for _ in range(num_ranks - len(self._totals))]

    def note_rank(self, facts: RankFacts) -> None:
        """Record an attached rank."""
        if facts.served is None:  # a new engine, which counts from 0
            self._last.pop(facts.rank, None)
        self._serving[facts.rank] = facts

    def note_lost(self, rank: int) -> None:
        """Record the loss of a rank. The same engine may return."""
        self._serving.pop(rank, None)

    def note_stats(self, stats: RankStats) -> TierFigures | None:
        """Record a rank's state after a step.

        Returns:
            The growth of its counters since the last one, without the gauges; None without tiers.
        """
        if stats.tiers is None:
            return None
        last = self._last.pop(stats.rank, None)
        self._last[stats.rank] = stats  # the newest is the last entry
        before = last.tiers if last and last.tiers else _NO_FIGURES
        grown = TierFigures(
            **{name: max(0, getattr(stats.tiers, name) - getattr(before, name)) for name in _COUNTERS}
        )
        totals = self._totals[stats.rank]
        for name in _COUNTERS:
            totals[name] += getattr(grown, name)
        num_queried = stats.prefix_query_tokens - (last.prefix_query_tokens if last else 0)
        totals["query_tokens"] += max(0, num_queried - device_hits(stats, last, grown))
        return grown

    def to_json(self) -> list[dict[str, Any]]:
        """Return the tiers of each node with a serving rank that has reported any, by host."""
        nodes: dict[tuple[str, str], list[int]] = {}
        for rank, facts in sorted(self._serving.items()):
            if rank in self._last:
                nodes.setdefault((facts.host, facts.node), []).append(rank)
        return [self._node(host, ranks) for (host, _), ranks in nodes.items()]

    def _node(self, host: str, ranks: list[int]) -> dict[str, Any]:
        reports = [stats.tiers for rank, stats in self._last.items() if rank in ranks and stats.tiers]
        newest = reports[-1]
        sums = {
            name: int(sum(self._totals[rank][field] for rank in ranks))
            for name, field in (
                *((f"{source}_hit_tokens", f"{source}_hit_tokens") for source in SOURCES),
                *(("faults", "num_faults"), ("dropped", "num_dropped")),
            )
        }
        sizes = {name: getattr(newest, name) for name in _GAUGES}
        is_off = any(each.is_disk_off for each in reports)
        return {"host": host, "ranks": ranks, **sizes, "is_disk_off": is_off, **sums}

    def describe(self) -> list[Metric]:
        """Return no families: registering must not compute them."""
        return []

    def collect(self) -> Iterator[Metric]:
        yield from self._of_ranks()
        yield from self._of_nodes()

    def _of_ranks(self) -> Iterator[Metric]:
        totals = self._totals
        for name, text, values in (
            ("vllm:kv_offload_load_bytes", "Bytes loaded from tiers.", _sums(totals, "load_bytes")),
            ("vllm:kv_offload_load_time", "Seconds spent loading from tiers.", _all(totals, "load_s")),
            ("vllm:kv_offload_store_bytes", "Bytes stored in tiers.", _sums(totals, "store_bytes")),
            ("vllm:kv_offload_store_time", "Seconds spent storing in tiers.", _all(totals, "store_s")),
            (
                "vllm:external_prefix_cache_queries",
                "Prompt tokens looked up in tiers.",
                _all(totals, "query_tokens"),
            ),
            (
                "vllm:external_prefix_cache_hits",
                "Prompt tokens found in tiers.",
                _sums(totals, "hit_tokens", SOURCES),
            ),
            ("wideep:kv_tier_lookups", "Requests looked up in tiers.", _all(totals, "num_lookups")),
            ("wideep:kv_tier_faults", "Records with a wrong checksum.", _all(totals, "num_faults")),
            ("wideep:kv_tier_dropped", "Blocks that were not stored.", _all(totals, "num_dropped")),
            (
                "wideep:kv_peer_received_bytes",
                "Bytes fetched from other nodes.",
                _all(totals, "peer_fetch_bytes"),
            ),
            ("wideep:kv_peer_nixl_bytes", "Bytes of these read with NIXL.", _all(totals, "peer_read_bytes")),
            ("wideep:kv_peer_sent_bytes", "Bytes sent to other nodes.", _all(totals, "peer_serve_bytes")),
            (
                "wideep:kv_peer_fetch_time",
                "Seconds spent fetching from other nodes.",
                _all(totals, "peer_fetch_s"),
            ),
        ):
            family = CounterMetricFamily(name, text, labels=_LABELS)
            for rank, value in enumerate(values):
                family.add_metric((self._model_name, str(rank)), value)
            yield family
        for name, text, label, fields in _LABELLED:
            family = CounterMetricFamily(name, text, labels=(*_LABELS, label))
            for rank, total in enumerate(totals):
                for labelled, names in fields.items():
                    added = sum(total[field] for field in names)
                    family.add_metric((self._model_name, str(rank), labelled), added)
            yield family

    def _of_nodes(self) -> Iterator[Metric]:
        sizes: Counter[tuple[str, str]] = Counter()  # by host and field; a host may have several nodes
        for node in self.to_json():
            sizes.update({(node["host"], name): int(node[name]) for name in _GAUGES})
        hosts = list(dict.fromkeys(host for host, _ in sizes))
        for name, text, ending in (
            ("wideep:kv_tier_bytes", "Bytes of the records in the tier.", "bytes"),
            ("wideep:kv_tier_capacity_bytes", "Bytes for records in the tier.", "capacity_bytes"),
        ):
            family = GaugeMetricFamily(name, text, labels=("model_name", "node", "tier"))
            for host in hosts:
                for tier in TIERS:
                    family.add_metric((self._model_name, host, tier), float(sizes[host, f"{tier}_{ending}"]))
            yield family
        family = GaugeMetricFamily(
            "wideep:kv_tier_disk_disabled",
            "1 after the tier on disk has disabled itself.",
            labels=("model_name", "node"),
        )
        for host in hosts:
            family.add_metric((self._model_name, host), float(sizes[host, "is_disk_off"] > 0))
        yield family


def device_hits(stats: RankStats, last: RankStats | None, grown: TierFigures | None) -> int:
    """Return the prompt tokens that were found on the device since the last report.

    Args:
        grown: Growth of the tiers' counters since then; None without tiers.
    """
    num_found = stats.prefix_hit_tokens - (last.prefix_hit_tokens if last else 0)
    of_tiers = sum(getattr(grown, f"{source}_hit_tokens") for source in SOURCES) if grown else 0
    return max(0, num_found - of_tiers)


def _all(totals: Sequence[Mapping[str, float]], field: str) -> list[float]:
    return [total[field] for total in totals]


def _sums(totals: Sequence[Mapping[str, float]], ending: str, tiers: Iterable[str] = TIERS) -> list[float]:
    """Return sums over the tiers, by rank."""
    return [sum(total[f"{tier}_{ending}"] for tier in tiers) for total in totals]
