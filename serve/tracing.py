"""OpenTelemetry traces, joined to the caller's by W3C traceparent; without them, no SDK is loaded.

Spans are made when a request has ended, from times that are taken anyway: nothing is added to a
token's way. One span a request (the caller's child), under it queue, prefill and decode of each
sample.
"""

import threading
import time
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from octavo.serve.timing import SampleTimes, Visit

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import TracerProvider

TRACES_PATH = "/v1/traces"
CLOSE_SECONDS = 5.0


class Tracing:
    """Writes a finished request's spans to a provider."""

    def __init__(self, provider: "TracerProvider") -> None:
        from opentelemetry import trace
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        self._trace = trace
        self._provider = provider
        self._tracer = provider.get_tracer("octavo")
        self._propagator = TraceContextTextMapPropagator()

    def record(self, scope: Any, visit: Visit, status: int, model: str) -> None:
        """Spans of one request that has just ended; `scope` is its ASGI scope."""
        end, now = time.time_ns(), time.monotonic()

        def wall(moment: float) -> int:
            return end - int((now - moment) * 1e9)

        carrier = {
            name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]
        }
        parent = self._propagator.extract(carrier)
        attributes: dict[str, Any] = {
            "http.request.method": scope["method"],
            "url.path": scope["path"],
            "http.response.status_code": status,
            "octavo.request_id": visit.request_id,
            "gen_ai.request.model": model,
            "gen_ai.usage.input_tokens": sum(s.prompt_tokens for s in visit.samples),
            "gen_ai.usage.output_tokens": sum(s.completion_tokens for s in visit.samples),
            "gen_ai.response.finish_reasons": [s.finish_reason or "abort" for s in visit.samples],
        }
        if visit.key:
            attributes["octavo.api_key"] = visit.key
        span = self._tracer.start_span(
            "octavo.request",
            parent,
            self._trace.SpanKind.SERVER,
            attributes,
            start_time=wall(visit.arrived),
        )
        if status >= 500:
            span.set_status(self._trace.StatusCode.ERROR)
        inside = self._trace.set_span_in_context(span)
        for index, sample in enumerate(visit.samples):
            for name, start, stop in _phases(sample):
                child = self._tracer.start_span(
                    f"octavo.{name}",
                    inside,
                    attributes={"octavo.sample": index},
                    start_time=wall(start),
                )
                child.end(wall(stop))
        span.end(end)

    def close(self) -> None:
        """Send what is left, for CLOSE_SECONDS at most: a dead collector holds up no exit."""
        sending = threading.Thread(target=self._provider.shutdown, name="last-spans", daemon=True)
        sending.start()
        sending.join(CLOSE_SECONDS)


def _phases(sample: SampleTimes) -> list[tuple[str, float, float]]:
    """(name, start, end) in monotonic seconds; none of a sample that got no news."""
    if not sample.first:
        return []
    prefill = sample.first - sample.prefill
    return [
        ("queue", prefill - sample.queue, prefill),
        ("prefill", prefill, sample.first),
        ("decode", sample.first, sample.last),
    ]


def tracing_to(endpoint: str) -> Tracing:
    """Traces sent to an OTLP/HTTP collector such as http://127.0.0.1:4318.

    ValueError without the extra `tracing`. Sampling and headers follow OpenTelemetry's own
    environment variables.
    """
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
    except ModuleNotFoundError as error:
        message = f"otlp_endpoint: {error}; pip install 'octavo[tracing]'"
        raise ValueError(message) from None
    if urlsplit(endpoint).path in ("", "/"):
        endpoint = endpoint.rstrip("/") + TRACES_PATH
    resource = Resource.create({"service.name": "octavo"})
    provider = TracerProvider(resource=resource, shutdown_on_exit=False)  # `close` does it
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(endpoint=endpoint)))
    return Tracing(provider)
