"""The tiers of the KV cache on /metrics and in the status: counters per rank, sizes once per node, restarts of engines."""

import asyncio
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from kvcache.tiers.figures import TierFigures
from scheduler.policy.request import RankStats
from server.http.observability.metrics import Metrics
from server.http.observability.tiers import TierTotals
from server.link.messages import RankFacts, Served

GIB = 1 << 30
SIZES = {
    "host_bytes": 3 * GIB,
    "host_capacity_bytes": 4 * GIB,
    "disk_bytes": GIB,
    "disk_capacity_bytes": 9 * GIB,
}


def facts_of(rank: int, host: str = "node-0", *, served: Served | None = None) -> RankFacts:
    return RankFacts(
        rank=rank, world_size=3, host=host, pid=1, max_model_len=9, num_blocks=8, block_tokens=16, max_num_seqs=4,
        max_num_batched_tokens=64, device="cpu", served=served, node=f"torchrun of {host}",
    )  # fmt: skip


def stats_of(rank: int, step: int, *, queried: int = 0, hits: int = 0, **tiers: float) -> RankStats:
    figures = TierFigures(**{**SIZES, **tiers}) if tiers else None
    return RankStats(
        rank=rank, step=step, num_running=0, num_waiting=0, num_free_blocks=1, num_blocks=8, num_step_tokens=0,
        num_preemptions=0, prefix_query_tokens=queried, prefix_hit_tokens=hits, tiers=figures,
    )  # fmt: skip


@pytest.fixture
def metrics() -> Metrics:
    """Metrics of three ranks with tiers: 0 and 1 on one node, 2 on another."""
    made = Metrics("m", 3, has_tiers=True)
    for rank, host in enumerate(("node-0", "node-0", "node-1")):
        made.note_rank(facts_of(rank, host), cache_dtype="auto", enable_prefix_caching=True)
    return made


def values_of(metrics: Metrics, name: str, label: str = "engine") -> dict[Any, float]:
    """Return a metric's values by one label, or by several separated by blanks."""
    text = asyncio.run(metrics.text()).decode()
    return {
        tuple(sample.labels[each] for each in label.split())
        if " " in label
        else sample.labels[label]: sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if sample.name == name
    }


def test_counters_have_vllm_s_names_and_exist_from_the_start(metrics: Metrics) -> None:
    zeros = {"0": 0.0, "1": 0.0, "2": 0.0}
    for name in (
        *(f"vllm:kv_offload_{way}_{what}_total" for way in ("load", "store") for what in ("bytes", "time")),
        *(f"vllm:external_prefix_cache_{what}_total" for what in ("queries", "hits")),
        *(f"wideep:kv_tier_{what}_total" for what in ("lookups", "faults", "dropped")),
        *(f"wideep:kv_peer_{what}_total" for what in ("received_bytes", "sent_bytes", "fetch_time")),
    ):
        assert values_of(metrics, name) == zeros, name
    metrics.note_stats(
        stats_of(
            1, 1, host_load_bytes=5, disk_load_bytes=7, load_s=0.5, host_store_bytes=11, disk_store_bytes=13, store_s=1.5,
            num_faults=2, num_dropped=3, num_lookups=4, peer_fetch_bytes=8, peer_serve_bytes=9, peer_fetch_s=0.25,
            num_fetches_whole=1, num_fetches_failed=6, disk_load_s=0.125, disk_store_s=0.75,
        )
    )  # fmt: skip
    for name, value in (
        ("vllm:kv_offload_load_bytes", 12), ("vllm:kv_offload_load_time", 0.5), ("vllm:kv_offload_store_bytes", 24),
        ("vllm:kv_offload_store_time", 1.5), ("wideep:kv_tier_faults", 2), ("wideep:kv_tier_dropped", 3),
        ("wideep:kv_tier_lookups", 4), ("wideep:kv_peer_received_bytes", 8), ("wideep:kv_peer_sent_bytes", 9),
        ("wideep:kv_peer_fetch_time", 0.25),
    ):  # fmt: skip
        assert values_of(metrics, f"{name}_total") == {**zeros, "1": value}, name
    loads = values_of(metrics, "wideep:kv_tier_load_bytes_total", "engine tier")
    assert (loads["1", "host"], loads["1", "disk"], loads["0", "disk"]) == (5, 7, 0)
    assert values_of(metrics, "wideep:kv_tier_store_bytes_total", "engine tier")["1", "disk"] == 13
    for name, by_tier in (
        ("read_bytes", {"disk": 7, "p2p": 8}), ("read_time", {"disk": 0.125, "p2p": 0.25}),
        ("write_bytes", {"disk": 13}), ("write_time", {"disk": 0.75}),
    ):  # fmt: skip
        found = values_of(metrics, f"vllm:kv_offload_tiering_{name}_total", "engine tier")
        assert {tier: value for (rank, tier), value in found.items() if rank == "1"} == by_tier, name
    for name, by_way in (
        ("bytes", {"CPU_to_GPU": 12, "GPU_to_CPU": 24}),
        ("time", {"CPU_to_GPU": 0.5, "GPU_to_CPU": 1.5}),
    ):
        found = values_of(metrics, f"vllm:kv_offload_total_{name}_total", "engine transfer_type")
        assert {way: value for (rank, way), value in found.items() if rank == "1"} == by_way, name
    fetches = values_of(metrics, "wideep:kv_peer_fetches_total", "engine outcome")
    assert {outcome: count for (rank, outcome), count in fetches.items() if rank == "1"} == {
        "whole": 1, "empty": 0, "declined": 0, "failed": 6,
    }  # fmt: skip


def test_cached_tokens_are_counted_by_tier_and_the_device_has_the_rest(metrics: Metrics) -> None:
    metrics.note_stats(stats_of(0, 1, queried=100, hits=60, host_hit_tokens=30, disk_hit_tokens=10))
    metrics.note_stats(
        stats_of(0, 2, queried=150, hits=96, host_hit_tokens=35, disk_hit_tokens=10, peer_hit_tokens=6)
    )
    by_source = values_of(metrics, "vllm:prompt_tokens_cached_by_source_total", "engine source")
    assert [by_source["0", source] for source in ("device", "host", "disk", "p2p")] == [45, 35, 10, 6]
    assert values_of(metrics, "vllm:external_prefix_cache_hits_total")["0"] == 51
    assert values_of(metrics, "vllm:external_prefix_cache_queries_total")["0"] == 150 - 45, (
        "not on the device"
    )


def test_a_restarted_engine_takes_nothing_back_and_one_that_returns_counts_once(metrics: Metrics) -> None:
    metrics.note_stats(stats_of(0, 5, hits=8, host_hit_tokens=8, num_faults=1))
    metrics.note_lost(0)
    returned = facts_of(0, served=Served(1, 0, None, 0, None))  # type: ignore[arg-type]
    metrics.note_rank(returned, cache_dtype="auto", enable_prefix_caching=True)
    metrics.note_stats(stats_of(0, 6, hits=9, host_hit_tokens=9, num_faults=1))
    assert values_of(metrics, "vllm:external_prefix_cache_hits_total")["0"] == 9
    metrics.note_lost(0)
    metrics.note_rank(facts_of(0), cache_dtype="auto", enable_prefix_caching=True)
    metrics.note_stats(stats_of(0, 1, hits=4, host_hit_tokens=4, num_faults=0))
    assert values_of(metrics, "vllm:external_prefix_cache_hits_total")["0"] == 13
    assert values_of(metrics, "wideep:kv_tier_faults_total")["0"] == 1


def test_sizes_are_those_of_nodes_not_of_ranks(metrics: Metrics) -> None:
    for rank in range(3):
        metrics.note_stats(stats_of(rank, 1, host_bytes=(rank + 1) * GIB))
    sizes = values_of(metrics, "wideep:kv_tier_bytes", "node tier")
    assert sizes == {
        ("node-0", "host"): 2 * GIB, ("node-0", "disk"): GIB, ("node-1", "host"): 3 * GIB, ("node-1", "disk"): GIB,
    }, "the newest report of a node"  # fmt: skip
    rooms = values_of(metrics, "wideep:kv_tier_capacity_bytes", "node tier")
    assert (rooms["node-0", "host"], rooms["node-1", "disk"]) == (4 * GIB, 9 * GIB)
    metrics.note_lost(2)
    assert set(values_of(metrics, "wideep:kv_tier_bytes", "node")) == {"node-0"}, "a lost node has no tiers"


def test_a_disk_that_one_rank_left_out_is_shown_as_disabled(metrics: Metrics) -> None:
    metrics.note_stats(stats_of(0, 1, is_disk_off=True))
    metrics.note_stats(stats_of(1, 1, is_disk_off=False))
    metrics.note_stats(stats_of(2, 1, is_disk_off=False))
    assert values_of(metrics, "wideep:kv_tier_disk_disabled", "node") == {"node-0": 1, "node-1": 0}
    assert [node["is_disk_off"] for node in metrics.tiers.to_json()] == [True, False]


def test_the_status_has_a_node_s_sizes_and_the_sums_of_its_ranks(metrics: Metrics) -> None:
    assert metrics.tiers.to_json() == []
    metrics.note_stats(stats_of(0, 1, host_hit_tokens=5, num_faults=1))
    metrics.note_stats(stats_of(1, 1, host_hit_tokens=6, disk_hit_tokens=7, peer_hit_tokens=3, num_dropped=2))
    assert metrics.tiers.to_json() == [
        {
            "host": "node-0", "ranks": [0, 1], **SIZES, "is_disk_off": False, "host_hit_tokens": 11, "disk_hit_tokens": 7,
            "peer_hit_tokens": 3, "faults": 1, "dropped": 2,
        }
    ]  # fmt: skip


def test_a_service_without_tiers_has_no_families_of_tiers() -> None:
    made = Metrics("m", 1)
    made.note_stats(stats_of(0, 1, queried=20, hits=10))
    text = asyncio.run(made.text()).decode()
    assert "kv_offload" not in text and "kv_tier" not in text and "external_prefix" not in text
    assert values_of(made, "vllm:prompt_tokens_cached_by_source_total", "source") == {
        "device": 10,
        "host": 0,
        "disk": 0,
        "p2p": 0,
    }
    assert made.tiers.to_json() == [] and TierTotals("m", 1).note_stats(stats_of(0, 1)) is None
