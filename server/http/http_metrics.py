"""HTTP exchanges counted and timed, under the names that prometheus-fastapi-instrumentator gave vLLM's dashboards."""

from prometheus_client import CollectorRegistry, Counter, Histogram

from server.http.exchanges import Exchange

PROBES = frozenset({"/health", "/metrics", "/ping", "/version", "/load"})  # would drown what clients ask
_METHODS = frozenset({"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"})
_BUCKETS_S = (0.01, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120)


class HttpMetrics:
    """Two families, by method and route."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._requests = Counter(
            "http_requests", "HTTP requests.", ("method", "handler", "status"), registry=registry
        )
        self._duration = Histogram(
            "http_request_duration_seconds",
            "HTTP request to the end of its response.",
            ("method", "handler"),
            buckets=_BUCKETS_S,
            registry=registry,
        )

    def note(self, exchange: Exchange) -> None:
        """Take an exchange that has ended. Its handler is a route's pattern: raw paths are without bound."""
        if exchange.handler in PROBES:
            return
        method = exchange.method if exchange.method in _METHODS else "other"  # any word is a method to HTTP
        labels = (method, exchange.handler)
        self._requests.labels(*labels, f"{exchange.status // 100}xx").inc()
        self._duration.labels(*labels).observe(exchange.duration_s)
