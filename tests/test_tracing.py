"""Traces: spans and their times, the caller's trace continued, and what reaches a collector."""

import asyncio
import contextlib
import gzip
import signal
import threading
import time
from http.server import BaseHTTPRequestHandler, HTTPServer
from types import SimpleNamespace

import pytest
from mock_server import PATIENCE, running
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from octavo.sampling.params import SamplingParams
from octavo.serve import tracing
from octavo.serve.auth import KeyRing
from octavo.serve.config import ServerConfig
from octavo.serve.gate import Gate
from octavo.serve.tracing import Tracing
from octavo.serve.types import Request

TRACE, PARENT = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
TRACEPARENT = f"00-{TRACE}-{PARENT}-01"


class Bug(Exception):
    """A failure of the application's."""


def finished(app, headers=(), path="/v1/completions"):
    """Spans by name of one request through the gate, with the application given."""
    exporter = InMemorySpanExporter()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    keys = KeyRing(ServerConfig(), {})
    context = SimpleNamespace(keys=keys, tracing=Tracing(provider), names=("mock",))
    scope = {"type": "http", "method": "POST", "path": path, "headers": list(headers)}

    async def send(message):
        pass

    async def call():
        await Gate(app, context)(scope, None, send)

    with contextlib.suppress(Bug):
        asyncio.run(call())
    spans = exporter.get_finished_spans()
    provider.shutdown()
    return spans


async def two_samples(scope, receive, send):
    visit = scope["state"]["visit"]
    for first in (3.0, 4.0):
        sample = visit.sample(Request("r", (1, 2, 3, 4, 5), SamplingParams()))
        sample.first, sample.last = visit.arrived + first, visit.arrived + first + 4
        sample.queue, sample.prefill = 0.5, 2.0
        sample.completion_tokens, sample.finish_reason = 7, "length"
    await send({"type": "http.response.start", "status": 200, "headers": []})


def test_spans_of_a_request_and_its_samples():
    spans = finished(two_samples, [(b"x-request-id", b"mine")])
    names = [span.name for span in spans]
    phases = ["octavo.queue", "octavo.prefill", "octavo.decode"]
    assert names == [*phases, *phases, "octavo.request"]
    request = spans[-1]
    assert request.kind.name == "SERVER"
    assert request.parent is None
    for span in spans[:-1]:
        assert span.parent.span_id == request.context.span_id
        assert span.context.trace_id == request.context.trace_id
    offsets = [
        (
            round((s.start_time - request.start_time) / 1e9, 3),
            round((s.end_time - s.start_time) / 1e9, 3),
        )
        for s in spans[:3]
    ]
    assert offsets == [(0.5, 0.5), (1.0, 2.0), (3.0, 4.0)]
    want = {
        "http.response.status_code": 200,
        "octavo.request_id": "mine",
        "gen_ai.request.model": "mock",
        "gen_ai.usage.input_tokens": 10,
        "gen_ai.usage.output_tokens": 14,
        "gen_ai.response.finish_reasons": ("length", "length"),
    }
    assert want.items() <= dict(request.attributes).items()
    assert abs(time.time_ns() - request.end_time) < 60e9


def test_the_callers_trace_goes_on():
    (*_, request) = finished(two_samples, [(b"traceparent", TRACEPARENT.encode())])
    assert f"{request.context.trace_id:032x}" == TRACE
    assert f"{request.parent.span_id:016x}" == PARENT


@pytest.mark.parametrize(
    "header", [b"", b"nonsense", b"00-" + b"0" * 32 + b"-00f067aa0ba902b7-01", b"\xff" * 55]
)
def test_a_broken_traceparent_starts_a_trace_of_its_own(header):
    (*_, request) = finished(two_samples, [(b"traceparent", header)])
    assert request.parent is None


def test_a_caller_that_does_not_sample_is_followed():
    header = TRACEPARENT[:-2] + "00"
    assert finished(two_samples, [(b"traceparent", header.encode())]) == ()


def test_failures_are_marked_and_probes_are_not_traced():
    async def broken(scope, receive, send):
        raise Bug

    (request,) = finished(broken)
    assert request.status.status_code.name == "ERROR"
    assert request.attributes["http.response.status_code"] == 500
    assert finished(two_samples, path="/health") == ()


def test_a_collector_that_never_answers_does_not_hold_up_the_end(monkeypatch):
    monkeypatch.setattr(tracing, "CLOSE_SECONDS", 0.01)
    answered = threading.Event()
    provider = SimpleNamespace(get_tracer=str, shutdown=answered.wait)
    Tracing(provider).close()
    answered.set()


def test_spans_reach_a_collector_before_the_server_ends(monkeypatch):
    bodies = []

    class Collector(BaseHTTPRequestHandler):
        def do_POST(self):
            body = self.rfile.read(int(self.headers["content-length"]))
            packed = self.headers.get("content-encoding") == "gzip"
            bodies.append((self.path, gzip.decompress(body) if packed else body))
            self.send_response(200)
            self.end_headers()

        def log_message(self, *args):
            pass

    collector = HTTPServer(("127.0.0.1", 0), Collector)
    thread = threading.Thread(target=collector.serve_forever, daemon=True)
    thread.start()
    endpoint = f"http://127.0.0.1:{collector.server_port}"
    with running(otlp_endpoint=endpoint) as server:
        body = {"prompt": "abc", "temperature": 0, "max_tokens": 3}
        assert server.post("/v1/completions", body, traceparent=TRACEPARENT)[0] == 200
        server.signal(signal.SIGTERM)
        assert server.process.wait(PATIENCE) == 0
    collector.shutdown()
    collector.server_close()
    thread.join()
    message = ExportTraceServiceRequest()
    assert bodies[0][0] == "/v1/traces"
    message.ParseFromString(bodies[0][1])
    (resource,) = message.resource_spans
    spans = [span for scope in resource.scope_spans for span in scope.spans]
    assert {span.name for span in spans} == {
        "octavo.request",
        "octavo.queue",
        "octavo.prefill",
        "octavo.decode",
    }
    assert {span.trace_id.hex() for span in spans} == {TRACE}
