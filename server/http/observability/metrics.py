"""The metrics at /metrics, with the names, labels and meanings that vLLM's dashboards use.

It has only metrics that the front can fill truthfully: its own measurements (latencies as seen by a client, up to the HTTP
layer) and the ranks' reports. Every series exists from the start, so that it reads 0 instead of "no data".
"""

import asyncio
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from itertools import zip_longest
from typing import Any, NamedTuple

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector, generate_latest
from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from scheduler.policy.request import DraftCounts, FinishReason, RankStats
from server.front.timing import Timing
from server.http.exchanges import HttpExchange
from server.http.observability.throughput import NO_TARGETS, LatencyTargets, Throughput
from server.http.observability.tiers import SOURCES, TierTotals, device_hits
from server.link.messages import RankFacts

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_COMPUTED, _CACHED, _TRANSFERRED = "local_compute", "local_cache_hit", "external_kv_transfer"
_DEVICE = "device"
_CAPACITY, _DEFERRED = "capacity", "deferred"
_SLEEP_STATES = ("awake", "weights_offloaded", "discard_all")  # by level of sleep


LABELS = ("model_name", "engine")  # a rank's engine is its number
_Bind = Callable[[str], Mapping[Any, Any]]  # returns the series of a rank
# vLLM's boundaries, so that the service-level targets of dashboards coincide with one.
TTFT_S = (
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80, 160, 640,
)  # fmt: skip
TOKEN_S = (
    0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 10, 40, 80,
)  # fmt: skip
REQUEST_S = (
    0.05, 0.1, 0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960, 1920, 7680,
)  # fmt: skip
TOKENS = tuple(digit * 10**power for power in range(6) for digit in (1, 2, 5))
STEP_TOKENS = tuple(1 << power for power in range(15))
PARAM_N = (1, 2, 5, 10, 20)


class StepHistogram(Histogram):  # type: ignore[misc]
    """A histogram that counts several equal values at once, because all streams of a step often waited equally long."""

    def observe_all(self, counts: Mapping[float, int]) -> None:
        """Observe each value as often as its count."""
        for value, count in counts.items():
            self._sum.inc(value * count)
            self._buckets[bisect_left(self._upper_bounds, value)].inc(count)


class Families:
    """Creates metric families for one model in a registry."""

    def __init__(self, registry: CollectorRegistry, model_name: str, num_ranks: int) -> None:
        self.registry, self.model_name = registry, model_name
        self._ranks: list[str] = []
        self._bound: list[
            tuple[dict[Any, Any], _Bind]
        ] = []  # the made families, and how they get the series of a rank
        self.grow(num_ranks)

    def grow(self, num_ranks: int) -> None:
        """Have series for this many ranks from now on."""
        for rank in map(str, range(len(self._ranks), num_ranks)):
            self._ranks.append(rank)
            for series, bind in self._bound:
                series.update(bind(rank))

    def gauge(self, name: str, text: str, prefix: str = "vllm") -> dict[str, Any]:
        """Return a gauge per rank."""
        return self._per_rank(Gauge(f"{prefix}:{name}", text, LABELS, registry=self.registry))

    def counter(self, name: str, text: str) -> dict[str, Any]:
        """Return a counter per rank; "_total" is appended to its name."""
        return self._per_rank(Counter(f"vllm:{name}", text, LABELS, registry=self.registry))

    def histogram(
        self, name: str, text: str, buckets: Sequence[float], prefix: str = "vllm"
    ) -> dict[str, Any]:
        """Return a histogram per rank."""
        return self._per_rank(
            StepHistogram(f"{prefix}:{name}", text, LABELS, buckets=buckets, registry=self.registry)
        )

    def histogram_of_requests(self, name: str, text: str, buckets: Sequence[float]) -> Any:
        """Return a histogram that belongs to no rank; its engine is 0."""
        family = Histogram(f"vllm:{name}", text, LABELS, buckets=buckets, registry=self.registry)
        return family.labels(self.model_name, "0")

    def labelled(
        self, kind: type[Counter] | type[Gauge], name: str, text: str, label: str, values: Sequence[str]
    ) -> dict[tuple[str, str], Any]:
        """Return a family with an additional label, by rank and label value. Every series exists from the start."""
        family = kind(f"vllm:{name}", text, (*LABELS, label), registry=self.registry)
        return self._series(
            lambda rank: {(rank, value): family.labels(self.model_name, rank, value) for value in values}
        )

    def _per_rank(self, family: Any) -> dict[str, Any]:
        """Bind a family to each rank once, because looking up labels costs more than counting."""
        return self._series(lambda rank: {rank: family.labels(self.model_name, rank)})

    def _series(self, bind: _Bind) -> dict[Any, Any]:
        series: dict[Any, Any] = {}
        self._bound.append((series, bind))
        for rank in self._ranks:
            series.update(bind(rank))
        return series


PROBES = frozenset({"/health", "/metrics", "/ping", "/version", "/load"})  # would outnumber clients' requests
_METHODS = frozenset({"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"})
_BUCKETS_S = (0.01, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120)


class HttpMetrics:
    """Counts and durations of HTTP requests, by method and route."""

    def __init__(self, registry: CollectorRegistry, throughput: Throughput) -> None:
        self._throughput = throughput
        self._requests = Counter(
            "http_requests", "HTTP requests.", ("method", "handler", "status"), registry=registry
        )
        self._duration = Histogram(
            "http_request_duration_seconds",
            "Time from an HTTP request to the end of its response.",
            ("method", "handler"),
            buckets=_BUCKETS_S,
            registry=registry,
        )

    def note(self, exchange: HttpExchange) -> None:
        """Record a finished exchange. Its handler is a route's pattern, because raw paths are unbounded."""
        if exchange.handler in PROBES:
            return
        self._throughput.note_status(exchange.status)
        method = exchange.method if exchange.method in _METHODS else "other"  # HTTP allows any word
        labels = (method, exchange.handler)
        self._requests.labels(*labels, f"{exchange.status // 100}xx").inc()
        self._duration.labels(*labels).observe(exchange.duration_s)


class _Found(NamedTuple):
    """Families that were collected already, in the form that `generate_latest` expects."""

    families: list[Metric]

    def collect(self) -> list[Metric]:
        return self.families


class Metrics:
    """The front's registry: methods that record events, and the text for Prometheus."""

    def __init__(
        self,
        model_name: str,
        num_ranks: int,
        num_drafts: int = 0,
        *,
        has_tiers: bool = False,
        targets: LatencyTargets = NO_TARGETS,
    ) -> None:
        """Create the families.

        Args:
            num_drafts: Maximum number of drafted tokens per step of a request; 0 omits the draft families.
            has_tiers: Whether the KV cache has tiers; False omits their families.
            targets: Times that requests should meet.
        """
        self._registry = CollectorRegistry()
        self._collectors: list[Collector] = []
        self._writing = asyncio.Lock()
        self._families = Families(self._registry, model_name, num_ranks)
        self._last: dict[int, RankStats] = {}
        self._cache_labels: dict[int, tuple[str, ...]] = {}
        self.throughput = Throughput(targets)
        self.tiers = TierTotals(model_name, num_ranks)
        if has_tiers:
            self.add(self.tiers)
        self.http = HttpMetrics(self._registry, self.throughput)
        ProcessCollector(registry=self._registry)  # the front's processor time, memory, descriptors
        self._make_rank_families(self._families)
        self._positions = [str(place) for place in range(num_drafts)]
        if num_drafts:
            self._make_draft_families(self._families)
        self._make_token_families(self._families)
        self._make_request_families(self._families)

    def _make_rank_families(self, make: Families) -> None:
        """Create families of the ranks' reports after steps."""
        self._num_running = make.gauge("num_requests_running", "Requests running on the rank.")
        self._num_waiting = make.gauge("num_requests_waiting", "Requests waiting at the rank.")
        self._waiting_by_reason = make.labelled(
            Gauge, "num_requests_waiting_by_reason", "Waiting requests.", "reason", (_CAPACITY, _DEFERRED)
        )
        self._kv_usage = make.gauge("kv_cache_usage_perc", "Share of KV blocks in use, 0 to 1.")
        self._memory = make.gauge("rank_resident_memory_bytes", "Memory of the rank's process.", "wideep")
        self._prefix_queries = make.counter("prefix_cache_queries", "Prompt tokens looked up in the cache.")
        self._prefix_hits = make.counter("prefix_cache_hits", "Prompt tokens found in the cache.")
        self._preemptions = make.counter("num_preemptions", "Requests preempted for lack of blocks.")
        self._step_tokens = make.histogram("iteration_tokens_total", "Tokens per step.", STEP_TOKENS)
        self._cache_config = Gauge(
            "vllm:cache_config_info",
            "KV cache configuration of a rank.",
            (*LABELS, "block_size", "cache_dtype", "num_gpu_blocks", "enable_prefix_caching"),
            registry=self._registry,
        )
        self._sleep_states = make.labelled(
            Gauge, "engine_sleep_state", "1 for the current state.", "sleep_state", _SLEEP_STATES
        )
        self.note_sleep(0)

    def _make_draft_families(self, make: Families) -> None:
        """Create families of speculative decoding."""
        self._drafts = make.counter("spec_decode_num_drafts", "Number of drafts.")
        self._draft_tokens = make.counter("spec_decode_num_draft_tokens", "Drafted tokens.")
        self._accepted_tokens = make.counter("spec_decode_num_accepted_tokens", "Accepted draft tokens.")
        self._accepted_at = make.labelled(
            Counter,
            "spec_decode_num_accepted_tokens_per_pos",
            "Accepted draft tokens, by position in the draft.",
            "position",
            self._positions,
        )

    def _make_token_families(self, make: Families) -> None:
        """Create families of tokens as they arrive."""
        self._prompt_tokens = make.counter("prompt_tokens", "Prompt tokens of requests with a first token.")
        self._prompt_cached = make.counter("prompt_tokens_cached", "Prompt tokens found in the cache.")
        self._prompt_by_source = make.labelled(
            Counter, "prompt_tokens_by_source", "Prompt tokens.", "source", (_COMPUTED, _CACHED, _TRANSFERRED)
        )
        self._cached_by_source = make.labelled(
            Counter,
            "prompt_tokens_cached_by_source",
            "Cached prompt tokens, by tier.",
            "source",
            (_DEVICE, *SOURCES.values()),
        )
        self._output_tokens = make.counter("generation_tokens", "Tokens generated.")
        self._ttft = make.histogram("time_to_first_token_seconds", "Arrival to first token.", TTFT_S)
        self._itl = make.histogram("inter_token_latency_seconds", "Time between tokens.", TOKEN_S)
        self._pause = make.histogram(
            "request_move_pause_seconds",
            "Time between the tokens before and after a move.",
            TOKEN_S,
            "wideep",
        )
        self._hand_over = make.histogram(
            "request_hand_over_seconds",
            "Time between the token of the rank that ran the prompt and the first one of the rank that decodes.",
            TOKEN_S,
            "wideep",
        )
        self._hand_over_tokens = make.histogram(
            "request_hand_over_computed_tokens",
            "Prompt tokens that the rank that decodes computed again.",
            TOKENS,
            "wideep",
        )

    def _make_request_families(self, make: Families) -> None:
        """Create families of finished and submitted requests."""
        self._tpot = make.histogram("request_time_per_output_token_seconds", "Mean time per token.", TOKEN_S)
        self._e2e = make.histogram("e2e_request_latency_seconds", "Arrival to end.", REQUEST_S)
        self._queue = make.histogram("request_queue_time_seconds", "Arrival to first run.", REQUEST_S)
        self._prefill = make.histogram("request_prefill_time_seconds", "First run to first token.", REQUEST_S)
        self._decode = make.histogram("request_decode_time_seconds", "First to last token.", REQUEST_S)
        self._inference = make.histogram(
            "request_inference_time_seconds", "First run to last token.", REQUEST_S
        )
        self._request_prompt = make.histogram("request_prompt_tokens", "Prompt tokens.", TOKENS)
        self._request_output = make.histogram("request_generation_tokens", "Output tokens.", TOKENS)
        self._computed = make.histogram(
            "request_prefill_kv_computed_tokens", "Prompt tokens that were not cached.", TOKENS
        )
        self._most_output = make.histogram_of_requests(
            "request_max_num_generation_tokens", "Output tokens of the longest of n choices.", TOKENS
        )
        self._param_n = make.histogram_of_requests("request_params_n", "n of requests.", PARAM_N)
        self._param_max_tokens = make.histogram_of_requests(
            "request_params_max_tokens", "max_tokens of requests.", TOKENS
        )
        self._success = make.labelled(
            Counter,
            "request_success",
            "Finished requests, by reason.",
            "finished_reason",
            [reason.value for reason in FinishReason],
        )

    def grow(self, num_ranks: int) -> None:
        """Have series for this many ranks from now on."""
        self._families.grow(num_ranks)
        self.tiers.grow(num_ranks)
        self.note_sleep(self._sleep_level)

    def add(self, collector: Collector) -> None:
        """Export a collector's families as well. It is called in the event loop, because it reads the loop's state."""
        self._collectors.append(collector)

    async def text(self) -> bytes:
        """Return everything in Prometheus' text format, written in a thread: it takes 0.2 s for 64 ranks."""
        async with self._writing:  # one at a time, because any client may scrape at any rate
            found = _Found([family for collector in self._collectors for family in collector.collect()])
            return await asyncio.to_thread(self._write, found)

    def _write(self, found: "_Found") -> bytes:
        return bytes(generate_latest(self._registry) + generate_latest(found))

    def note_rank(self, facts: RankFacts, *, cache_dtype: str, enable_prefix_caching: bool) -> None:
        """Record an attached rank's facts."""
        if facts.served is None:  # a new engine, which counts from 0
            self._last.pop(facts.rank, None)
            self.throughput.note_new_engine(facts.rank)
        self.throughput.note_rank(facts)
        self.tiers.note_rank(facts)
        labels = (
            *(self._families.model_name, str(facts.rank), str(facts.block_tokens), cache_dtype),
            *(str(facts.num_blocks), str(enable_prefix_caching)),
        )
        self._cache_labels[facts.rank] = labels
        self._cache_config.labels(*labels).set(1)

    def note_lost(self, rank: int) -> None:
        """Record the loss of a rank: it runs and holds nothing. The same engine may return."""
        self.throughput.note_lost(rank)
        self.tiers.note_lost(rank)
        name = str(rank)
        for gauge in (self._num_running, self._num_waiting, self._kv_usage, self._memory):
            gauge[name].set(0)
        self._waiting_by_reason[name, _CAPACITY].set(0)
        labels = self._cache_labels.pop(rank, None)
        if labels is not None:
            self._cache_config.remove(*labels)

    def note_sleep(self, level: int) -> None:
        """Record the level of sleep of all ranks; 0 if they are awake."""
        self._sleep_level = level
        for (_, state), series in self._sleep_states.items():
            series.set(state == _SLEEP_STATES[level])

    def note_memory(self, rank: int, resident_bytes: int) -> None:
        """Record the memory of a rank's process."""
        self._memory[str(rank)].set(resident_bytes)

    def note_stats(self, stats: RankStats) -> None:
        """Record a rank's state after a step."""
        found = self.tiers.note_stats(stats)
        self.throughput.note_stats(stats, found)
        rank = str(stats.rank)
        last = self._last.get(stats.rank)
        self._num_running[rank].set(stats.num_running)
        self._num_waiting[rank].set(stats.num_waiting)
        self._waiting_by_reason[rank, _CAPACITY].set(stats.num_waiting)  # for seats, blocks or their turn
        self._kv_usage[rank].set(1 - stats.num_free_blocks / stats.num_blocks if stats.num_blocks else 0)
        if last is None or stats.step > last.step:
            self._step_tokens[rank].observe(stats.num_step_tokens)
        for counter, field in (
            (self._prefix_queries, "prefix_query_tokens"),
            (self._prefix_hits, "prefix_hit_tokens"),
            (self._preemptions, "num_preemptions"),
        ):
            grown = getattr(stats, field) - (getattr(last, field) if last else 0)
            counter[rank].inc(max(0, grown))
        self._cached_by_source[rank, _DEVICE].inc(device_hits(stats, last, found))
        for source, label in SOURCES.items() if found else ():
            self._cached_by_source[rank, label].inc(getattr(found, f"{source}_hit_tokens"))
        if self._positions:
            self._note_drafts(rank, stats.drafts, last.drafts if last else DraftCounts())
        self._last[stats.rank] = stats

    def _note_drafts(self, rank: str, now: DraftCounts, last: DraftCounts) -> None:
        for counter, grown in (
            (self._drafts, now.num_drafts - last.num_drafts),
            (self._draft_tokens, now.num_draft_tokens - last.num_draft_tokens),
            (self._accepted_tokens, now.num_accepted_tokens - last.num_accepted_tokens),
        ):
            counter[rank].inc(max(0, grown))
        for position, count, before in zip_longest(
            self._positions, now.accepted_at, last.accepted_at, fillvalue=0
        ):
            self._accepted_at[rank, str(position)].inc(max(0, int(count) - int(before)))

    def note_request(self, n: int, max_tokens: int) -> None:
        self._param_n.observe(n)
        self._param_max_tokens.observe(max_tokens)

    def note_first_token(
        self,
        rank: int,
        ttft_s: float,
        *,
        num_prompt_tokens: int,
        num_cached_tokens: int,
        num_tier_tokens: int,
    ) -> None:
        self.throughput.note_first_token(ttft_s, num_prompt_tokens=num_prompt_tokens)
        name = str(rank)
        self._ttft[name].observe(ttft_s)
        self._prompt_tokens[name].inc(num_prompt_tokens)
        self._prompt_by_source[name, _COMPUTED].inc(num_prompt_tokens - num_cached_tokens)
        if num_cached_tokens:
            self._prompt_cached[name].inc(num_cached_tokens)
            self._prompt_by_source[name, _CACHED].inc(num_cached_tokens - num_tier_tokens)
            self._prompt_by_source[name, _TRANSFERRED].inc(num_tier_tokens)

    def note_tokens(self, rank: int, num_tokens: int, gaps_s: Mapping[float, int]) -> None:
        self.throughput.note_tokens(num_tokens, gaps_s)
        name = str(rank)
        self._output_tokens[name].inc(num_tokens)
        self._itl[name].observe_all(gaps_s)

    def note_pause(self, rank: int, seconds: float) -> None:
        self._pause[str(rank)].observe(seconds)

    def note_hand_over(self, rank: int, seconds: float, num_computed_tokens: int) -> None:
        self._hand_over[str(rank)].observe(seconds)
        self._hand_over_tokens[str(rank)].observe(num_computed_tokens)

    def note_end(
        self,
        rank: int,
        reason: FinishReason,
        timing: Timing,
        *,
        num_prompt_tokens: int,
        num_cached_tokens: int,
        num_tokens: int,
    ) -> None:
        name = str(rank)
        self._success[name, reason.value].inc()
        self._e2e[name].observe(timing.e2e_s)
        self.throughput.note_end(timing.e2e_s)
        self._request_prompt[name].observe(num_prompt_tokens)
        self._request_output[name].observe(num_tokens)
        if timing.first_token_s is None:
            return
        self._computed[name].observe(num_prompt_tokens - num_cached_tokens)
        self._queue[name].observe(timing.queue_s)
        self._prefill[name].observe(timing.prefill_s)
        self._decode[name].observe(timing.decode_s)
        self._inference[name].observe(timing.inference_s)
        # 0 for a single token, as in vLLM.
        self._tpot[name].observe(timing.decode_s / max(1, num_tokens - 1))

    def note_longest(self, num_tokens: int) -> None:
        self._most_output.observe(num_tokens)
