"""OpenTelemetry: one span per request to ranks, with vLLM's name and attributes.

The caller's W3C trace context (traceparent, tracestate) is the span's parent. The packages are optional
(`wideep[otel]`) and are imported only with --otlp-traces-endpoint. Rejected: FastAPI's instrumentation, which also
creates spans for /health and for every sent chunk, and has no token counts.
"""

import os
import threading
from typing import TYPE_CHECKING, Any, Self

from server.front.generations import Generation
from server.front.timing import timing_of
from server.http.exchanges import HttpExchange
from server.options.checks import check_traces

if TYPE_CHECKING:  # optional
    from opentelemetry.sdk.trace import SpanProcessor

SPAN = "llm_request"
_END_S = 1.0  # to send the remaining spans at the end; the supervisor does not wait much longer


class Traces:
    """Creates spans of exchanges, if tracing is enabled."""

    def __init__(self, processor: "SpanProcessor | None" = None, *, service_version: str = "") -> None:
        """Args: processor receives the spans; None disables tracing."""
        self._provider: Any = None
        if processor is None:
            return
        from opentelemetry.sdk.resources import Resource  # noqa: PLC0415 - optional
        from opentelemetry.sdk.trace import TracerProvider  # noqa: PLC0415

        named = {
            "service.name": os.environ.get("OTEL_SERVICE_NAME", "wideep"),
            "service.version": service_version,
        }
        self._provider = TracerProvider(resource=Resource.create(named), shutdown_on_exit=False)
        self._provider.add_span_processor(processor)
        self._tracer = self._provider.get_tracer("wideep")

    @classmethod
    def to(cls, endpoint: str | None, *, service_version: str = "") -> Self:
        """Return an instance that sends spans to an OTLP endpoint in background batches. None disables tracing.

        Raises:
            OptionsError: A package is missing.
        """
        if endpoint is None:
            return cls()
        protocol = check_traces(os.environ)
        from opentelemetry.sdk.trace.export import BatchSpanProcessor  # noqa: PLC0415 - optional

        return cls(BatchSpanProcessor(_exporter(endpoint, protocol)), service_version=service_version)

    def note(self, exchange: HttpExchange) -> None:
        """Create the span of a finished exchange, if it submitted requests to ranks."""
        choices = [choice for answer in exchange.answers for choice in answer.generations]
        if self._provider is None or not choices:
            return
        from opentelemetry.trace import SpanKind, Status, StatusCode  # noqa: PLC0415 - optional

        span = self._tracer.start_span(
            SPAN,
            context=_parent(exchange.headers),
            kind=SpanKind.SERVER,
            start_time=exchange.begun_ns,
            attributes=_attributes(exchange, choices),
        )
        if exchange.failure:
            span.set_status(Status(StatusCode.ERROR, exchange.failure))
        span.end(exchange.begun_ns + int(exchange.duration_s * 1e9))

    def close(self) -> None:
        """Send the remaining spans, for a bounded time. Blocks.

        It runs in a thread, because an exporter without a collector retries for longer than any limit it is given.
        """
        if self._provider is not None:
            ending = threading.Thread(target=self._provider.shutdown, name="traces", daemon=True)
            ending.start()
            ending.join(_END_S)


def _exporter(endpoint: str, protocol: str) -> Any:
    if protocol == "grpc":
        from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import (  # noqa: PLC0415 - optional
            OTLPSpanExporter,
        )

        return OTLPSpanExporter(endpoint=endpoint, insecure=endpoint.startswith("http://"))
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import (  # noqa: PLC0415 - optional
        OTLPSpanExporter as HttpExporter,
    )

    return HttpExporter(endpoint=endpoint)


def _parent(headers: dict[bytes, bytes]) -> Any:
    from opentelemetry.trace.propagation.tracecontext import (  # noqa: PLC0415 - optional
        TraceContextTextMapPropagator,
    )

    carrier = {
        name: headers[name.encode()].decode("latin-1")
        for name in ("traceparent", "tracestate")
        if name.encode() in headers
    }
    return TraceContextTextMapPropagator().extract(carrier)


def _attributes(exchange: HttpExchange, choices: list[Generation]) -> dict[str, str | int | float]:
    """Return vLLM's attributes: latencies of the first choice, and tokens of all choices."""
    first = choices[0]
    params, timing = first.ask.request.params, timing_of(first, now_s=first.last_token_s)
    attributes: dict[str, str | int | float] = {
        "gen_ai.request.id": exchange.answers[0].request_id,
        "gen_ai.request.n": len(choices),
        "gen_ai.request.max_tokens": params.max_tokens,
        "gen_ai.request.temperature": params.temperature,
        "gen_ai.request.top_p": params.top_p,
        "gen_ai.usage.prompt_tokens": exchange.num_prompt_tokens,
        "gen_ai.usage.completion_tokens": exchange.num_output_tokens,
        "gen_ai.latency.e2e": exchange.duration_s,
        "http.route": exchange.handler,
        "http.response.status_code": exchange.status,
        "wideep.request_id": exchange.request_id,
        "wideep.rank": first.rank,
    }
    if timing.first_token_s is not None:
        attributes |= {
            "gen_ai.latency.time_to_first_token": timing.first_token_s,
            "gen_ai.latency.time_in_queue": timing.queue_s,
            "gen_ai.latency.time_in_model_prefill": timing.prefill_s,
            "gen_ai.latency.time_in_model_decode": timing.decode_s,
            "gen_ai.latency.time_in_model_inference": timing.inference_s,
        }
    return attributes
