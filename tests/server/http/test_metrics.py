"""/metrics: the metrics of vLLM's and our dashboards exist, with the same names, types and labels."""

import asyncio
import json
import re
from collections import Counter
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from prometheus_client import CollectorRegistry, Histogram
from prometheus_client.parser import text_string_to_metric_families

from kvcache.tiers.figures import TierFigures
from scheduler.policy.request import DraftCounts, FinishReason, RankStats
from server.experts.load import ExpertsLoad
from server.experts.metrics import ExpertsMetrics
from server.front.journal import Journal
from server.front.members.membership import Epochs
from server.front.timing import Timing, timing_of
from server.http.observability.gauges import MembershipMetrics, ResizeMetrics, SpeedMetrics
from server.http.observability.metrics import TTFT_S, Metrics, StepHistogram
from server.http.observability.throughput import NO_TARGETS, LatencyTargets, Throughput
from server.link.messages import RankFacts
from tests.support.placement.load_reports import RANKS, counts, expert_map, report
from tests.support.requests.answers import ended_answer, ended_exchange

DOCS = Path(__file__).resolve().parents[3] / "docs"
DASHBOARD = DOCS / "grafana" / "wideep.json"
STATE = {
    "is_scaling_elastic_ep": False, "effective_data_parallel_size": 2, "requested_data_parallel_size": None, "phase": "idle",
}  # fmt: skip
ENGINE = frozenset({"model_name", "engine"})
# The metrics in vLLM's published dashboards (examples/observability: prometheus_grafana/grafana.json, and overview,
# instances, kv_cache, service_status, performance_ and query_statistics), without the rows of optional features that a vLLM
# service may lack, too: LoRA, sleep operations, FLOPs, KV transfer, speculation, multimodal caches. Those of KV offloading are those
# of its connector's code (kv_connector/v1/offloading/metrics.py).
READ_BY_VLLM_DASHBOARDS: dict[str, tuple[str, frozenset[str]]] = {
    "vllm:e2e_request_latency_seconds": ("histogram", ENGINE),
    "vllm:time_to_first_token_seconds": ("histogram", ENGINE),
    "vllm:inter_token_latency_seconds": ("histogram", ENGINE),
    "vllm:request_time_per_output_token_seconds": ("histogram", ENGINE),
    "vllm:request_queue_time_seconds": ("histogram", ENGINE),
    "vllm:request_prefill_time_seconds": ("histogram", ENGINE),
    "vllm:request_decode_time_seconds": ("histogram", ENGINE),
    "vllm:request_inference_time_seconds": ("histogram", ENGINE),
    "vllm:request_prompt_tokens": ("histogram", ENGINE),
    "vllm:request_generation_tokens": ("histogram", ENGINE),
    "vllm:request_max_num_generation_tokens": ("histogram", ENGINE),
    "vllm:request_prefill_kv_computed_tokens": ("histogram", ENGINE),
    "vllm:request_params_n": ("histogram", ENGINE),
    "vllm:request_params_max_tokens": ("histogram", ENGINE),
    "vllm:iteration_tokens_total": ("histogram", ENGINE),
    "vllm:prompt_tokens": ("counter", ENGINE),
    "vllm:prompt_tokens_cached": ("counter", ENGINE),
    "vllm:prompt_tokens_by_source": ("counter", ENGINE | {"source"}),
    "vllm:prompt_tokens_cached_by_source": ("counter", ENGINE | {"source"}),
    "vllm:external_prefix_cache_queries": ("counter", ENGINE),
    "vllm:external_prefix_cache_hits": ("counter", ENGINE),
    "vllm:kv_offload_load_bytes": ("counter", ENGINE),
    "vllm:kv_offload_load_time": ("counter", ENGINE),
    "vllm:kv_offload_store_bytes": ("counter", ENGINE),
    "vllm:kv_offload_store_time": ("counter", ENGINE),
    **{
        f"vllm:kv_offload_total_{what}": ("counter", ENGINE | {"transfer_type"}) for what in ("bytes", "time")
    },
    **{
        f"vllm:kv_offload_tiering_{way}_{what}": ("counter", ENGINE | {"tier"})
        for way in ("read", "write")
        for what in ("bytes", "time")
    },
    "vllm:generation_tokens": ("counter", ENGINE),
    "vllm:request_success": ("counter", ENGINE | {"finished_reason"}),
    "vllm:prefix_cache_queries": ("counter", ENGINE),
    "vllm:prefix_cache_hits": ("counter", ENGINE),
    "vllm:num_preemptions": ("counter", ENGINE),
    "vllm:num_requests_running": ("gauge", ENGINE),
    "vllm:num_requests_waiting": ("gauge", ENGINE),
    "vllm:num_requests_waiting_by_reason": ("gauge", ENGINE | {"reason"}),
    "vllm:kv_cache_usage_perc": ("gauge", ENGINE),
    "vllm:engine_sleep_state": ("gauge", ENGINE | {"sleep_state"}),
    "vllm:cache_config_info": (
        "gauge",
        ENGINE | {"num_gpu_blocks", "block_size", "cache_dtype", "enable_prefix_caching"},
    ),
    "http_requests": ("counter", frozenset({"method", "handler", "status"})),
    "http_request_duration_seconds": ("histogram", frozenset({"method", "handler"})),
    "process_cpu_seconds": ("counter", frozenset()),
    "process_resident_memory_bytes": ("gauge", frozenset()),
    "process_start_time_seconds": ("gauge", frozenset()),
    "process_open_fds": ("gauge", frozenset()),
    "process_max_fds": ("gauge", frozenset()),
}


def families_of(metrics: Metrics) -> dict[str, Any]:
    return {
        family.name: family for family in text_string_to_metric_families(asyncio.run(metrics.text()).decode())
    }


def value_of(metrics: Metrics, name: str, **labels: str) -> float:
    """Return the sum of a metric's samples with these labels."""
    return float(
        sum(
            sample.value
            for family in families_of(metrics).values()
            for sample in family.samples
            if sample.name == name and labels.items() <= sample.labels.items()
        )
    )


@pytest.fixture
def metrics() -> Metrics:
    """Metrics of two ranks. Rank 0 has attached, and one exchange has ended."""
    made = Metrics("m", 2, has_tiers=True)
    facts = RankFacts(
        rank=0, world_size=2, host="h", pid=1, max_model_len=9, num_blocks=8, block_tokens=16, max_num_seqs=4,
        max_num_batched_tokens=64, device="cpu",
    )  # fmt: skip
    made.note_rank(facts, cache_dtype="int8", enable_prefix_caching=True)
    made.note_stats(
        RankStats(
            rank=0, step=0, num_running=0, num_waiting=0, num_free_blocks=8, num_blocks=8, num_step_tokens=0, num_preemptions=0,
            prefix_query_tokens=0, prefix_hit_tokens=0, tiers=TierFigures(),
        )
    )  # fmt: skip
    made.http.note(ended_exchange())
    return made


def test_what_vllm_s_dashboards_read_is_there(metrics: Metrics) -> None:
    families = families_of(metrics)
    found = {
        name: (families[name].type, {frozenset(sample.labels) - {"le"} for sample in families[name].samples})
        for name in READ_BY_VLLM_DASHBOARDS
    }
    assert found == {name: (kind, {labels}) for name, (kind, labels) in READ_BY_VLLM_DASHBOARDS.items()}


def test_the_label_values_that_those_dashboards_select_by_are_there(metrics: Metrics) -> None:
    for name, label, values in (
        (
            "vllm:prompt_tokens_by_source",
            "source",
            {"local_compute", "local_cache_hit", "external_kv_transfer"},
        ),
        ("vllm:num_requests_waiting_by_reason", "reason", {"capacity", "deferred"}),
        ("vllm:request_success", "finished_reason", {"stop", "length", "abort", "error", "deadline"}),
    ):
        samples = families_of(metrics)[name].samples
        assert {sample.labels[label] for sample in samples} >= values
    assert value_of(metrics, "vllm:engine_sleep_state", engine="1", sleep_state="awake") == 1
    assert value_of(metrics, "vllm:engine_sleep_state", sleep_state="discard_all") == 0
    bounds = {
        sample.labels.get("le") for sample in families_of(metrics)["vllm:time_to_first_token_seconds"].samples
    }
    assert {"0.1", "0.25", "0.5", "0.75", "1.0", "2.5", "5.0", "10.0"} <= bounds, "common targets"


def test_a_request_s_time_is_divided_into_queue_prefill_and_decode(metrics: Metrics) -> None:
    generation = ended_answer("hello", "abc", queued_s=0.25).generations[0]
    timing = timing_of(generation, now_s=104.0)
    assert timing == Timing(e2e_s=4.0, first_token_s=1.0, queue_s=0.25, prefill_s=0.75, decode_s=2.0)
    metrics.note_end(1, FinishReason.STOP, timing, num_prompt_tokens=5, num_cached_tokens=2, num_tokens=3)
    for name, seconds in (("queue", 0.25), ("prefill", 0.75), ("decode", 2.0), ("inference", 2.75)):
        assert value_of(metrics, f"vllm:request_{name}_time_seconds_sum", engine="1") == seconds
    assert value_of(metrics, "vllm:request_time_per_output_token_seconds_sum") == 1.0
    assert value_of(metrics, "vllm:request_prefill_kv_computed_tokens_sum") == 3


def test_a_rank_that_claims_a_longer_wait_than_there_was_makes_no_negative_time() -> None:
    generation = ended_answer("hello", "abc", queued_s=7.0).generations[0]
    assert timing_of(generation, now_s=104.0).prefill_s == 0


def test_a_request_without_tokens_has_an_end_but_no_phases(metrics: Metrics) -> None:
    timing = timing_of(ended_answer("hello", "").generations[0], now_s=104.0)
    metrics.note_end(0, FinishReason.ABORT, timing, num_prompt_tokens=5, num_cached_tokens=0, num_tokens=0)
    assert value_of(metrics, "vllm:e2e_request_latency_seconds_count") == 1
    assert value_of(metrics, "vllm:request_queue_time_seconds_count") == 0
    assert value_of(metrics, "vllm:request_success_total", finished_reason="abort") == 1


def test_prompt_tokens_count_when_they_have_been_run_by_source(metrics: Metrics) -> None:
    metrics.note_first_token(0, 0.5, num_prompt_tokens=10, num_cached_tokens=4, num_tier_tokens=1)
    metrics.note_tokens(0, 1, {})
    metrics.note_tokens(0, 2, {0.25: 2})
    assert value_of(metrics, "vllm:prompt_tokens_total") == 10
    assert value_of(metrics, "vllm:prompt_tokens_by_source_total", source="local_compute") == 6
    assert value_of(metrics, "vllm:prompt_tokens_by_source_total", source="local_cache_hit") == 3
    assert value_of(metrics, "vllm:prompt_tokens_by_source_total", source="external_kv_transfer") == 1
    assert value_of(metrics, "vllm:prompt_tokens_cached_total") == 4
    assert value_of(metrics, "vllm:generation_tokens_total") == 3
    assert value_of(metrics, "vllm:inter_token_latency_seconds_count") == 2


def test_values_that_are_counted_at_once_count_as_one_by_one() -> None:
    registry, buckets = CollectorRegistry(), (0.1, 0.5, 1.0)
    at_once = StepHistogram("at_once", "", ("label",), buckets=buckets, registry=registry).labels("x")
    one_by_one = Histogram("one_by_one", "", ("label",), buckets=buckets, registry=registry).labels("x")
    counts = {0.0: 3, 0.1: 1, 0.1000001: 2, 0.5: 4, 0.75: 1, 1.0: 2, 7.0: 5}
    at_once.observe_all(counts)
    for value, count in counts.items():
        for _ in range(count):
            one_by_one.observe(value)
    sampled = [
        {
            (sample.name.removeprefix(family.name), sample.labels.get("le")): pytest.approx(sample.value)
            for sample in family.samples
            if not sample.name.endswith("_created")
        }
        for family in registry.collect()
    ]
    assert sampled[0] == sampled[1] and len(sampled[0]) == len(buckets) + 3


def test_a_restarted_rank_takes_nothing_back(metrics: Metrics) -> None:
    def stats(step: int, preemptions: int) -> RankStats:
        counters = {"num_preemptions": preemptions, "prefix_query_tokens": 0, "prefix_hit_tokens": 0}
        sizes = {
            "num_running": 1,
            "num_waiting": 2,
            "num_free_blocks": 2,
            "num_blocks": 8,
            "num_step_tokens": 5,
        }
        return RankStats(rank=0, step=step, **sizes, **counters)

    for step, preemptions in ((1, 3), (2, 5), (1, 1), (2, 2)):
        metrics.note_stats(stats(step, preemptions))
    assert value_of(metrics, "vllm:num_preemptions_total") == 6
    assert value_of(metrics, "vllm:num_requests_waiting_by_reason", reason="capacity") == 2
    assert value_of(metrics, "vllm:kv_cache_usage_perc", engine="0") == 0.75


def test_the_memory_of_a_rank_is_shown_until_it_is_lost(metrics: Metrics) -> None:
    metrics.note_memory(0, 1 << 40)
    assert value_of(metrics, "wideep:rank_resident_memory_bytes", engine="0") == 1 << 40
    metrics.note_lost(0)
    assert value_of(metrics, "wideep:rank_resident_memory_bytes", engine="0") == 0


def test_probes_and_odd_methods_make_no_series_of_their_own(metrics: Metrics) -> None:
    before = len(asyncio.run(metrics.text()).splitlines())
    for path in ("/health", "/metrics", "/ping", "/version", "/load"):
        metrics.http.note(ended_exchange(path=path, handler=path))
    assert len(asyncio.run(metrics.text()).splitlines()) == before
    for number in range(20):
        metrics.http.note(ended_exchange(method=f"M{number}", handler="none", status=405))
    assert value_of(metrics, "http_requests_total", method="other", status="4xx") == 20


def queries() -> list[tuple[str, str]]:
    """Return every query of our dashboard, with the panel's title."""
    board = json.loads(DASHBOARD.read_text())
    found = [
        (panel["title"], target["expr"]) for panel in board["panels"] for target in panel.get("targets", ())
    ]
    found += [(note["name"], note["expr"]) for note in board["annotations"]["list"]]
    return found + [
        (variable["name"], variable["query"]["query"])
        for variable in board["templating"]["list"]
        if variable["type"] == "query"
    ]


def test_every_metric_and_label_of_our_dashboard_exists(metrics: Metrics) -> None:
    load = ExpertsLoad("m", window_steps=10)
    load.take_experts(expert_map())
    for step in (10, 20):
        for rank in range(RANKS):
            load.take_load(report(rank, step, step * counts(rank)))
    metrics.add(ExpertsMetrics({"both": load}, "m"))
    epochs = Epochs(2, recovery_timeout_s=600.0)
    metrics.add(MembershipMetrics({"both": epochs}, Journal(), lambda: 0, "m"))
    assert len(queries()) > 50
    check_queries(metrics, queries())


def check_queries(metrics: Metrics, queries: list[tuple[str, str]]) -> None:
    """Check that the metrics and labels of queries, with their titles, exist."""
    labels: dict[str, set[str]] = {}
    for family in families_of(metrics).values():
        for sample in family.samples:
            labels.setdefault(sample.name, set()).update(sample.labels)
    for title, query in queries:
        names = re.findall(r"\b(?:vllm|wideep):\w+|\b(?:http|process)_\w+", query)
        assert names, f"{title}: {query} reads nothing of ours"
        for name in names:
            assert name in labels, f"{title} reads {name}, which /metrics does not have"
        used = {label for words in re.findall(r"by \(([^)]*)\)", query) for label in words.split(", ")}
        used |= set(re.findall(r"(\w+)[=!]~?\"", query))
        known = set().union(*(labels[name] for name in names), {"le", "job", "instance", "namespace"})
        assert used <= known, f"{title}: no {used - known} in {query}"


def queries_for_autoscalers() -> list[tuple[str, str]]:
    """Return every query of the page and of the recipes, with the file's name."""
    page = DOCS / "autoscaling.md"
    blocks = re.findall(r"^```text\n(.*?)^```", page.read_text(), re.MULTILINE | re.DOTALL)
    found = [(page.name, line) for block in blocks for line in block.splitlines()]
    for path in (DOCS / "recipes").rglob("*.yaml"):
        lines = re.findall(
            r"^\s*(?:- )?(?:query|metricsQuery|seriesQuery): (.*)$", path.read_text(), re.MULTILINE
        )
        found += [(path.name, line.replace("<<.LabelMatchers>>", "")) for line in lines]
    return found


def test_every_metric_and_label_that_autoscalers_read_exists(metrics: Metrics) -> None:
    metrics.add(SpeedMetrics(Throughput(LatencyTargets(ttft_ms=500.0)), "m"))
    resize = Mock(to_json=lambda: STATE, num_ended=Counter())
    metrics.add(ResizeMetrics(resize, "m"))
    found = queries_for_autoscalers()
    assert len(found) > 15 and {name for name, _ in found} == {
        *("autoscaling.md", "scaledobject.yaml", "adapter-values.yaml", "inferenceservice.yaml")
    }
    check_queries(metrics, found)
    limits = [limit for _, query in found for limit in re.findall(r'le="([^"]*)"', query)]
    assert limits and all(float(limit) in TTFT_S for limit in limits)


def test_targets_have_a_series_each_and_the_wait_is_always_there() -> None:
    for targets, slos in (
        (NO_TARGETS, set()),
        (LatencyTargets(500.0), {"ttft"}),
        (LatencyTargets(500.0, 50.0), {"ttft", "itl"}),
    ):
        made = Metrics("m", 1, targets=targets)
        made.add(SpeedMetrics(made.throughput, "m"))
        attained = {
            sample.labels["slo"]: sample.value
            for sample in families_of(made)["wideep:slo_attainment"].samples
        }
        assert attained == dict.fromkeys(slos, 1.0)
        assert value_of(made, "wideep:predicted_wait_seconds", model_name="m") == 0.0
    made.throughput.note_first_token(0.9, num_prompt_tokens=1)
    assert value_of(made, "wideep:slo_attainment", slo="ttft") == 0.0


def test_panels_of_our_dashboard_lie_beside_each_other_and_have_numbers() -> None:
    board = json.loads(DASHBOARD.read_text())
    cells: set[tuple[int, int]] = set()
    for panel in board["panels"]:
        place = panel["gridPos"]
        own = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert not own & cells and place["x"] + place["w"] <= 24, panel["title"]
        cells |= own
    numbers = [panel["id"] for panel in board["panels"]]
    assert len(set(numbers)) == len(numbers)
    titles = {panel["title"] for panel in board["panels"]}
    assert {"Balancedness, decode", "Tokens per rank / s", "Waits by rank"} <= titles


def test_writing_many_ranks_down_lets_the_event_loop_go_on() -> None:
    metrics = Metrics("m", 64)

    async def scenario() -> int:
        num_turns = 0
        writing = asyncio.create_task(metrics.text())
        while not writing.done():
            num_turns += 1
            await asyncio.sleep(0)
        assert writing.result().count(b'engine="63"') > 100
        return num_turns

    assert asyncio.run(scenario()) > 10, "written inside the loop, it would be three"


def test_drafts_have_vllm_s_families() -> None:
    made = Metrics("m", 1, num_drafts=2)
    for step, drafts in enumerate((DraftCounts(3, 6, (3, 1)), DraftCounts(5, 10, (4, 2)))):
        made.note_stats(
            RankStats(
                rank=0,
                step=step,
                num_running=1,
                num_waiting=0,
                num_free_blocks=2,
                num_blocks=8,
                num_step_tokens=5,
                num_preemptions=0,
                prefix_query_tokens=0,
                prefix_hit_tokens=0,
                drafts=drafts,
            )
        )
    text = asyncio.run(made.text()).decode()
    for line in (
        'vllm:spec_decode_num_drafts_total{engine="0",model_name="m"} 5.0',
        'vllm:spec_decode_num_draft_tokens_total{engine="0",model_name="m"} 10.0',
        'vllm:spec_decode_num_accepted_tokens_total{engine="0",model_name="m"} 6.0',
        'vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",model_name="m",position="0"} 4.0',
        'vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",model_name="m",position="1"} 2.0',
    ):
        assert line in text
    assert "spec_decode" not in asyncio.run(Metrics("m", 1).text()).decode()
