"""Prometheus metrics: vLLM's names where the meaning is the same, ours beside them.

Histograms are plain lists here: prometheus_client's own take a lock and a linear search for each
observation, which a token rate of 12,000/s can feel.
"""

import time
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterator, Sequence

from prometheus_client import CollectorRegistry
from prometheus_client.exposition import generate_latest
from prometheus_client.metrics_core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

from octavo.serve.types import EngineStats

TTFT_BUCKETS = (
    0.001,
    0.005,
    0.01,
    0.02,
    0.04,
    0.08,
    0.16,
    0.32,
    0.64,
    1.28,
    2.56,
    5,
    10,
    20,
    40,
    80,
)
ITL_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.2, 0.4, 0.8, 1.6, 5)
E2E_BUCKETS = (0.05, 0.1, 0.3, 0.5, 1, 2, 4, 8, 15, 30, 60, 120, 300, 600)
TOKEN_BUCKETS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000, 20000, 50000, 100000)


class Histogram:
    """Counts by bucket. Observing costs one binary search."""

    def __init__(self, bounds: Sequence[float]) -> None:
        self._bounds = tuple(bounds)
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0.0

    def observe(self, value: float) -> None:
        """Add one observation."""
        self._counts[bisect_left(self._bounds, value)] += 1
        self._sum += value

    def add_to(self, family: HistogramMetricFamily, labels: list[str]) -> None:
        """Write cumulative buckets into a family."""
        total = 0
        buckets: list[tuple[str, float]] = []
        for bound, count in zip((*self._bounds, float("inf")), self._counts):
            total += count
            buckets.append(("+Inf" if bound == float("inf") else str(float(bound)), total))
        family.add_metric(labels, buckets, self._sum)


class Recorder:
    """What the API process measures of its requests."""

    def __init__(self) -> None:
        self.time_to_first_token = Histogram(TTFT_BUCKETS)
        self.inter_token = Histogram(ITL_BUCKETS)
        self.latency = Histogram(E2E_BUCKETS)
        self.prompt_lengths = Histogram(TOKEN_BUCKETS)
        self.completion_lengths = Histogram(TOKEN_BUCKETS)
        self.finished: Counter[str] = Counter()
        self.responses: Counter[int] = Counter()
        self.disconnects = 0

    def ended(
        self, reason: str, started: float, prompt_tokens: int, completion_tokens: int
    ) -> None:
        """A sample ended; `started` is the monotonic time its request arrived."""
        self.finished[reason] += 1
        self.latency.observe(time.monotonic() - started)
        self.prompt_lengths.observe(prompt_tokens)
        self.completion_lengths.observe(completion_tokens)


_HISTOGRAMS = (
    ("vllm:time_to_first_token_seconds", "Arrival to first token.", "time_to_first_token"),
    ("vllm:inter_token_latency_seconds", "Between two tokens of a sample.", "inter_token"),
    ("vllm:e2e_request_latency_seconds", "Arrival to the end of a sample.", "latency"),
    ("vllm:request_prompt_tokens", "Prompt tokens of a sample.", "prompt_lengths"),
    ("vllm:request_generation_tokens", "Generated tokens of a sample.", "completion_lengths"),
)
_GAUGES = (
    ("vllm:num_requests_running", "Samples that hold a row.", "running"),
    ("vllm:num_requests_waiting", "Samples that wait for admission.", "waiting"),
)
_COUNTERS = (
    ("vllm:num_preemptions", "Samples preempted and recomputed.", "preemptions"),
    ("vllm:prompt_tokens", "Prompt tokens processed.", "prompt_tokens"),
    ("vllm:generation_tokens", "Tokens generated.", "generated_tokens"),
    ("vllm:prefix_cache_queries", "Prompt tokens looked up in the prefix cache.", "prompt_tokens"),
    ("vllm:prefix_cache_hits", "Prompt tokens found in the prefix cache.", "cached_tokens"),
    ("octavo:steps", "Engine steps.", "steps"),
    ("octavo:step_tokens", "Token places computed that held a token.", "real_tokens"),
    ("octavo:padding_tokens", "Token places computed that were padding.", "padded_tokens"),
    (
        "octavo:compiles_after_warmup",
        "Programs compiled after warm-up; should stay 0.",
        "compiles_after_warmup",
    ),
)


class ServerCollector(Collector):
    """Turns a recorder and the engine's last report into metric families."""

    def __init__(self, recorder: Recorder, model: str) -> None:
        self.stats = EngineStats()
        self.up = False
        self._recorder = recorder
        self._model = model

    def collect(self) -> Iterator[Metric]:
        """All families."""
        labels, values = ["model_name"], [self._model]
        for name, text, field in _GAUGES:
            gauge = GaugeMetricFamily(name, text, labels=labels)
            gauge.add_metric(values, getattr(self.stats, field))
            yield gauge
        for name, text, field in _COUNTERS:
            counter = CounterMetricFamily(name, text, labels=labels)
            counter.add_metric(values, getattr(self.stats, field))
            yield counter
        for name, text, field in _HISTOGRAMS:
            family = HistogramMetricFamily(name, text, labels=labels)
            getattr(self._recorder, field).add_to(family, values)
            yield family
        yield from self._others(labels, values)

    def _others(self, labels: list[str], values: list[str]) -> Iterator[Metric]:
        used = self.stats.pages_used / max(1, self.stats.pages_total)
        usage = GaugeMetricFamily(
            "vllm:kv_cache_usage_perc", "KV pages in use, 0 to 1.", labels=labels
        )
        usage.add_metric(values, used)
        yield usage
        up = GaugeMetricFamily("octavo:engine_up", "1 while the engine serves.", labels=labels)
        up.add_metric(values, int(self.up))
        yield up
        ended = CounterMetricFamily(
            "vllm:request_success", "Samples ended.", labels=[*labels, "finished_reason"]
        )
        for reason in sorted({"stop", "length", "abort", "error", *self._recorder.finished}):
            ended.add_metric([*values, reason], self._recorder.finished[reason])
        yield ended
        responses = CounterMetricFamily("octavo:http_errors", "Error answers.", labels=["status"])
        for status, count in sorted(self._recorder.responses.items()):
            responses.add_metric([str(status)], count)
        yield responses
        gone = CounterMetricFamily("octavo:client_disconnects", "Clients that hung up.")
        gone.add_metric([], self._recorder.disconnects)
        yield gone


def exposition(collector: ServerCollector) -> bytes:
    """The text format of all metrics."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(collector)
    return generate_latest(registry)
