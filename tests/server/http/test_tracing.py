"""Spans: one per request to ranks, under vLLM's names, as children of the caller's span."""

import importlib.util
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

import pytest

from dispatch.ports import free_port
from server.front.errors import ApiError
from server.http.observability.tracing import Traces
from server.options.checks import check_traces
from server.options.flag import OptionsError
from tests.support.requests.answers import ended_answer, ended_exchange

PARENT = {b"traceparent": b"00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01", b"tracestate": b"a=1"}


def spans_of(*exchanges: Any) -> list[Any]:
    pytest.importorskip("opentelemetry.sdk", reason="needs opentelemetry-sdk")
    from opentelemetry.sdk.trace.export import SimpleSpanProcessor  # noqa: PLC0415
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter  # noqa: PLC0415

    exporter = InMemorySpanExporter()
    traces = Traces(SimpleSpanProcessor(exporter), service_version="1")
    for exchange in exchanges:
        traces.note(exchange)
    traces.close()
    return list(exporter.get_finished_spans())


def test_a_request_is_one_span_with_vllm_s_attributes() -> None:
    answer = ended_answer("hello", "abcd", "ef", queued_s=0.25, temperature=0.5, top_p=0.9)
    exchange = ended_exchange(answer)
    (span,) = spans_of(exchange)
    assert (span.name, span.kind.name, span.status.status_code.name) == ("llm_request", "SERVER", "UNSET")
    assert span.end_time - span.start_time == 3_500_000_000 and span.start_time == exchange.begun_ns
    assert span.parent is None
    assert dict(span.attributes) == {
        "gen_ai.request.id": "chatcmpl-1",
        "gen_ai.request.n": 2,
        "gen_ai.request.max_tokens": 9,
        "gen_ai.request.temperature": 0.5,
        "gen_ai.request.top_p": 0.9,
        "gen_ai.usage.prompt_tokens": 10,
        "gen_ai.usage.completion_tokens": 6,
        "gen_ai.latency.e2e": 3.5,
        "gen_ai.latency.time_to_first_token": 1.0,
        "gen_ai.latency.time_in_queue": 0.25,
        "gen_ai.latency.time_in_model_prefill": 0.75,
        "gen_ai.latency.time_in_model_decode": 2.0,
        "gen_ai.latency.time_in_model_inference": 2.75,
        "http.route": "/v1/chat/completions",
        "http.response.status_code": 200,
        "wideep.request_id": "req-1",
        "wideep.rank": 1,
    }


def test_the_caller_s_trace_goes_on() -> None:
    (span,) = spans_of(ended_exchange(ended_answer("p", "a"), headers=PARENT))
    assert format(span.context.trace_id, "032x") == "0af7651916cd43dd8448eb211c80319c"
    assert format(span.parent.span_id, "016x") == "b7ad6b7169203331"
    assert span.context.trace_state["a"] == "1"


@pytest.mark.parametrize("header", [b"", b"nonsense", b"00-0-0-01", b"\xff\xfe"])
def test_a_broken_traceparent_begins_a_trace(header: bytes) -> None:
    (span,) = spans_of(ended_exchange(ended_answer("p", "a"), headers={b"traceparent": header}))
    assert span.parent is None


def test_a_failure_is_the_span_s_status_and_no_token_no_latency() -> None:
    (span,) = spans_of(ended_exchange(ended_answer("p", "", failure=ApiError(500, "lost"))))
    assert (span.status.status_code.name, span.status.description) == ("ERROR", "lost")
    assert "gen_ai.latency.time_to_first_token" not in span.attributes


def test_what_asked_nothing_of_ranks_is_no_span() -> None:
    assert spans_of(ended_exchange(path="/health")) == []


def test_without_an_endpoint_nothing_is_imported_or_made() -> None:
    traces = Traces.to(None)
    traces.note(ended_exchange(ended_answer("p", "a")))
    traces.close()


class Collector:
    """Accept and store posts, as an OpenTelemetry collector does."""

    def __init__(self) -> None:
        self.posted: list[tuple[str, bytes]] = []
        posted = self.posted

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                posted.append((self.path, self.rfile.read(int(self.headers["content-length"]))))
                self.send_response(200)
                self.end_headers()

            def log_message(self, *_: object) -> None:
                """Print nothing."""

        self.server = HTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server.server_port}/v1/traces"


def test_spans_reach_a_collector_over_http(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("opentelemetry.exporter.otlp.proto.http", reason="needs wideep[otel]")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "http/protobuf")
    monkeypatch.setattr("server.http.observability.tracing._END_S", 30.0)
    collector = Collector()
    traces = Traces.to(collector.url)
    traces.note(ended_exchange(ended_answer("p", "a")))
    traces.close()
    collector.server.shutdown()
    collector.server.server_close()
    [(path, body)] = collector.posted
    assert path == "/v1/traces" and b"llm_request" in body and b"wideep" in body


@pytest.mark.parametrize("protocol", ["grpc", "http/protobuf"])
def test_a_collector_that_is_gone_does_not_hold_the_end_up(
    monkeypatch: pytest.MonkeyPatch, protocol: str
) -> None:
    pytest.importorskip("opentelemetry.exporter.otlp.proto.grpc", reason="needs wideep[otel]")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", protocol)
    monkeypatch.setattr("server.http.observability.tracing._END_S", 0.1)
    traces = Traces.to(f"http://127.0.0.1:{free_port()}")
    traces.note(ended_exchange(ended_answer("p", "a")))
    ending = threading.Thread(target=traces.close)
    ending.start()
    ending.join(20)
    assert not ending.is_alive()


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    real = importlib.util.find_spec

    def without(name: str) -> Any:
        return (
            None if name.startswith("opentelemetry.exporter") else object() if "sdk" in name else real(name)
        )

    monkeypatch.setattr("server.options.checks.importlib.util.find_spec", without)
    with pytest.raises(OptionsError, match="opentelemetry-exporter-otlp-proto-grpc, which is not installed"):
        check_traces({})
    with pytest.raises(
        OptionsError, match=r"otlp-proto-http, which is not installed: pip install 'wideep\[otel\]'"
    ):
        check_traces({"OTEL_EXPORTER_OTLP_TRACES_PROTOCOL": "http/protobuf"})
    with pytest.raises(OptionsError, match="'carrier pigeon'; it must be one of grpc, http/protobuf"):
        check_traces({"OTEL_EXPORTER_OTLP_TRACES_PROTOCOL": "carrier pigeon"})
