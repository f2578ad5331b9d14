"""What /metrics says, under the names that vLLM's dashboards read.

Only what the front can fill truthfully: what it measures itself (latencies as a client sees them, up to the HTTP
layer) and what the ranks report after their steps. A rank's `engine` label is its number. Not there yet, because a
rank does not say when it began a request: queue, prefill and inference time.
"""

from collections.abc import Sequence
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.registry import Collector

from scheduler.request import FinishReason, RankStats
from server.wire import RankFacts

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_TTFT_S = (
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
_TOKEN_S = (
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
_REQUEST_S = (
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
_HTTP_S = (0.01, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120)
_TOKENS = tuple(digit * 10**power for power in range(6) for digit in (1, 2, 5))
_STEP_TOKENS = tuple(1 << power for power in range(15))
_PARAM_N = (1, 2, 5, 10, 20)


class Metrics:
    """The front's registry: observers to call, and the text that Prometheus scrapes."""

    def __init__(self, model_name: str, num_ranks: int) -> None:
        self._registry = CollectorRegistry()
        self._model_name = model_name
        self._last: dict[int, RankStats] = {}
        ranks = [str(rank) for rank in range(num_ranks)]
        self._num_running = self._gauge("num_requests_running", "Requests that ranks are running.", ranks)
        self._num_waiting = self._gauge("num_requests_waiting", "Requests that wait at their rank.", ranks)
        self._kv_usage = self._gauge("kv_cache_usage_perc", "Share of KV blocks in use; 1 is all.", ranks)
        self._prefix_queries = self._counter("prefix_cache_queries", "Prompt tokens looked up.", ranks)
        self._prefix_hits = self._counter("prefix_cache_hits", "Prompt tokens found cached.", ranks)
        self._preemptions = self._counter("num_preemptions", "Requests put back for want of blocks.", ranks)
        self._step_tokens = self._histogram("iteration_tokens_total", "Tokens per step.", _STEP_TOKENS, ranks)
        self._prompt_tokens = self._counter("prompt_tokens", "Prompt tokens accepted.", ranks)
        self._output_tokens = self._counter("generation_tokens", "Tokens generated.", ranks)
        self._ttft = self._histogram("time_to_first_token_seconds", "Arrival to first token.", _TTFT_S, ranks)
        self._itl = self._histogram("inter_token_latency_seconds", "Between tokens.", _TOKEN_S, ranks)
        self._tpot = self._histogram(
            "request_time_per_output_token_seconds", "Mean per token after the first.", _TOKEN_S, ranks
        )
        self._e2e = self._histogram("e2e_request_latency_seconds", "Arrival to end.", _REQUEST_S, ranks)
        self._decode = self._histogram(
            "request_decode_time_seconds", "First to last token.", _REQUEST_S, ranks
        )
        self._request_prompt = self._histogram("request_prompt_tokens", "Prompt tokens.", _TOKENS, ranks)
        self._request_output = self._histogram("request_generation_tokens", "Output tokens.", _TOKENS, ranks)
        self._most_output = self._histogram(
            "request_max_num_generation_tokens", "Output tokens of the longest of n choices.", _TOKENS, ["0"]
        )["0"]
        self._param_n = self._histogram("request_params_n", "n of requests.", _PARAM_N, ["0"])["0"]
        self._param_max_tokens = self._histogram("request_params_max_tokens", "max_tokens.", _TOKENS, ["0"])[
            "0"
        ]
        self._success = Counter(
            "vllm:request_success",
            "Requests by how they ended.",
            ("model_name", "engine", "finished_reason"),
            registry=self._registry,
        )
        for rank in ranks:
            for reason in FinishReason:
                self._success.labels(model_name, rank, reason.value)
        self._cache_config = Gauge(
            "vllm:cache_config_info",
            "KV cache of a rank.",
            ("model_name", "engine", "block_size", "num_gpu_blocks"),
            registry=self._registry,
        )
        self._http_requests = Counter(
            "http_requests", "HTTP requests.", ("method", "handler", "status"), registry=self._registry
        )
        self._http_duration = Histogram(
            "http_request_duration_seconds",
            "HTTP request to the end of its response.",
            ("method", "handler"),
            buckets=_HTTP_S,
            registry=self._registry,
        )

    def add(self, collector: Collector) -> None:
        """Export what a collector yields as well."""
        self._registry.register(collector)

    def text(self) -> bytes:
        """Return everything in Prometheus' text format."""
        return bytes(generate_latest(self._registry))

    def note_rank(self, facts: RankFacts) -> None:
        """Take an attached rank's facts."""
        labels = (self._model_name, str(facts.rank), str(facts.block_tokens), str(facts.num_blocks))
        self._cache_config.labels(*labels).set(1)

    def note_stats(self, stats: RankStats) -> None:
        """Take a rank's state after a step."""
        rank = str(stats.rank)
        last = self._last.get(stats.rank)
        self._num_running[rank].set(stats.num_running)
        self._num_waiting[rank].set(stats.num_waiting)
        self._kv_usage[rank].set(1 - stats.num_free_blocks / stats.num_blocks if stats.num_blocks else 0)
        if last is None or stats.step > last.step:
            self._step_tokens[rank].observe(stats.num_step_tokens)
        for counter, field in (
            (self._prefix_queries, "prefix_query_tokens"),
            (self._prefix_hits, "prefix_hit_tokens"),
            (self._preemptions, "num_preemptions"),
        ):
            grown = getattr(stats, field) - (getattr(last, field) if last else 0)
            counter[rank].inc(max(0, grown))  # a restarted engine counts from 0 again
        self._last[stats.rank] = stats

    def note_request(self, n: int, max_tokens: int) -> None:
        """Take a client's request with `n` choices in all."""
        self._param_n.observe(n)
        self._param_max_tokens.observe(max_tokens)

    def note_accepted(self, rank: int, num_prompt_tokens: int) -> None:
        """Take a request given to a rank."""
        self._prompt_tokens[str(rank)].inc(num_prompt_tokens)
        self._request_prompt[str(rank)].observe(num_prompt_tokens)

    def note_tokens(self, rank: int, num_tokens: int, gap_s: float, *, first: bool) -> None:
        """Take tokens that arrived `gap_s` after the request, or after the tokens before."""
        self._output_tokens[str(rank)].inc(num_tokens)
        if first:
            self._ttft[str(rank)].observe(gap_s)
        else:
            for _ in range(num_tokens):
                self._itl[str(rank)].observe(gap_s / num_tokens)

    def note_end(
        self, rank: int, reason: FinishReason, *, e2e_s: float, decode_s: float | None, num_tokens: int
    ) -> None:
        """Take a request's end; `decode_s` is None if no token came."""
        self._success.labels(self._model_name, str(rank), reason.value).inc()
        self._e2e[str(rank)].observe(e2e_s)
        self._request_output[str(rank)].observe(num_tokens)
        if decode_s is not None:
            self._decode[str(rank)].observe(decode_s)
            if num_tokens > 1:
                self._tpot[str(rank)].observe(decode_s / (num_tokens - 1))

    def note_longest(self, num_tokens: int) -> None:
        """Take the longest choice of a client's request."""
        self._most_output.observe(num_tokens)

    def note_http(self, method: str, handler: str, status: int, duration_s: float) -> None:
        """Take one HTTP exchange; `handler` is a route's pattern, never a raw path."""
        self._http_requests.labels(method, handler, f"{status // 100}xx").inc()
        self._http_duration.labels(method, handler).observe(duration_s)

    def _gauge(self, name: str, text: str, ranks: Sequence[str]) -> dict[str, Any]:
        return self._per_rank(
            Gauge(f"vllm:{name}", text, ("model_name", "engine"), registry=self._registry), ranks
        )

    def _counter(self, name: str, text: str, ranks: Sequence[str]) -> dict[str, Any]:
        return self._per_rank(
            Counter(f"vllm:{name}", text, ("model_name", "engine"), registry=self._registry), ranks
        )

    def _histogram(
        self, name: str, text: str, buckets: Sequence[float], ranks: Sequence[str]
    ) -> dict[str, Any]:
        labels = ("model_name", "engine")
        return self._per_rank(
            Histogram(f"vllm:{name}", text, labels, buckets=buckets, registry=self._registry), ranks
        )

    def _per_rank(self, metric: Any, ranks: Sequence[str]) -> dict[str, Any]:
        """Bind a metric to each rank once: looking labels up costs more than counting."""
        return {rank: metric.labels(self._model_name, rank) for rank in ranks}
