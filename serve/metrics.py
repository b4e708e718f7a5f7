"""Prometheus metrics: vLLM's names where the meaning is the same, ours beside them."""

import time
from collections import Counter
from collections.abc import Iterable, Iterator

from prometheus_client import CollectorRegistry, ProcessCollector
from prometheus_client.exposition import generate_latest
from prometheus_client.metrics_core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

from octavo.serve.auth import KeyRing
from octavo.serve.histogram import Histogram
from octavo.serve.queue import BOUNDS
from octavo.serve.step_clock import STEP_BOUNDS
from octavo.serve.step_clock import TOKEN_BOUNDS as STEP_TOKEN_BOUNDS
from octavo.serve.timing import SampleTimes, Visit
from octavo.serve.types import EngineStats

TTFT_BUCKETS = tuple(0.01 * 2**i for i in range(-3, 14))
ITL_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.2, 0.4, 0.8, 1.6, 5)
E2E_BUCKETS = (0.05, 0.1, 0.3, 0.5, 1, 2, 4, 8, 15, 30, 60, 120, 300, 600)
N_BUCKETS = (1, 2, 5, 10, 20)
TOKEN_BUCKETS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000, 20000, 50000, 100000)


class Recorder:
    """What the API process measures of its requests."""

    def __init__(self) -> None:
        self.time_to_first_token = Histogram(TTFT_BUCKETS)
        self.inter_token = Histogram(ITL_BUCKETS)
        self.latency = Histogram(E2E_BUCKETS)
        self.queue = Histogram(TTFT_BUCKETS)
        self.prefill = Histogram(TTFT_BUCKETS)
        self.decode = Histogram(E2E_BUCKETS)
        self.inference = Histogram(E2E_BUCKETS)
        self.per_token = Histogram(ITL_BUCKETS)
        self.prompt_lengths = Histogram(TOKEN_BUCKETS)
        self.computed_lengths = Histogram(TOKEN_BUCKETS)
        self.completion_lengths = Histogram(TOKEN_BUCKETS)
        self.asked_lengths = Histogram(TOKEN_BUCKETS)
        self.asked_samples = Histogram(N_BUCKETS)
        self.finished: Counter[str] = Counter()
        self.responses: Counter[int] = Counter()
        self.key_requests: Counter[str] = Counter()
        self.key_refusals: Counter[str] = Counter()
        self.key_running: Counter[str] = Counter()
        self.disconnects = 0

    def ended(self, visit: Visit, sample: SampleTimes) -> None:
        """A sample ended; its numbers and finish reason are known."""
        assert sample.finish_reason is not None
        self.finished[sample.finish_reason] += 1
        self.latency.observe(time.monotonic() - visit.arrived)
        self.prompt_lengths.observe(sample.prompt_tokens)
        self.completion_lengths.observe(sample.completion_tokens)
        if sample.max_tokens:
            self.asked_lengths.observe(sample.max_tokens)
            if sample.n:
                self.asked_samples.observe(sample.n)
        if sample.first:
            self.computed_lengths.observe(sample.prompt_tokens - sample.cached_tokens)
            self.queue.observe(sample.queue)
            self.prefill.observe(sample.prefill)
            self.decode.observe(sample.decode)
            self.inference.observe(sample.prefill + sample.decode)
        if sample.completion_tokens > 1:
            self.per_token.observe(sample.decode / (sample.completion_tokens - 1))

    def note_keys(self, keys: KeyRing) -> None:
        """Take over what the holders of API keys use now."""
        uses = dict(keys.uses())
        self.key_requests = Counter({name: use.requests for name, use in uses.items()})
        self.key_running = Counter({name: use.running for name, use in uses.items()})
        self.key_refusals = Counter(keys.refused)


def add_up(recorders: Iterable[Recorder]) -> Recorder:
    """The sum of what several API processes measured."""
    total = Recorder()
    for recorder in recorders:
        for name, value in vars(recorder).items():
            mine = getattr(total, name)
            if isinstance(value, Histogram):
                mine.merge(value)
            elif isinstance(value, Counter):
                mine.update(value)
            else:
                setattr(total, name, mine + value)
    return total


_HISTOGRAMS = (
    ("vllm:time_to_first_token_seconds", "Arrival to first token.", "time_to_first_token"),
    ("vllm:inter_token_latency_seconds", "Between two tokens of a sample.", "inter_token"),
    ("vllm:e2e_request_latency_seconds", "Arrival to the end of a sample.", "latency"),
    ("vllm:request_queue_time_seconds", "Wait of a sample for admission.", "queue"),
    ("vllm:request_prefill_time_seconds", "Admission to first token.", "prefill"),
    ("vllm:request_decode_time_seconds", "First token to last.", "decode"),
    ("vllm:request_inference_time_seconds", "Admission to last token.", "inference"),
    (
        "vllm:request_time_per_output_token_seconds",
        "Mean time between the tokens of a sample of two or more.",
        "per_token",
    ),
    ("vllm:request_prompt_tokens", "Prompt tokens of a sample.", "prompt_lengths"),
    (
        "vllm:request_prefill_kv_computed_tokens",
        "Prompt tokens of a sample that the prefix cache did not have.",
        "computed_lengths",
    ),
    ("vllm:request_generation_tokens", "Generated tokens of a sample.", "completion_lengths"),
    ("vllm:request_params_max_tokens", "Tokens that a sample may generate.", "asked_lengths"),
    ("vllm:request_params_n", "Samples of a prompt.", "asked_samples"),
)
_STEP_HISTOGRAMS = (
    ("octavo:step_time_seconds", "Time of an engine step.", "step_seconds", STEP_BOUNDS),
    ("vllm:iteration_tokens_total", "Tokens of an engine step.", "step_tokens", STEP_TOKEN_BOUNDS),
)
_GAUGES = (
    ("vllm:num_requests_running", "Samples that hold a row.", "running"),
    ("vllm:num_requests_waiting", "Samples that wait for admission.", "waiting"),
    ("octavo:waiting_prompt_tokens", "Prompt tokens that wait.", "waiting_tokens"),
    (
        "octavo:estimated_wait_seconds",
        "Time until all that wait are admitted, at the rate of late.",
        "estimated_wait",
    ),
)
_COUNTERS = (
    ("vllm:num_preemptions", "Samples preempted and recomputed.", "preemptions"),
    ("vllm:prompt_tokens", "Prompt tokens processed.", "prompt_tokens"),
    ("vllm:generation_tokens", "Tokens generated.", "generated_tokens"),
    (
        "vllm:prefix_cache_queries",
        "Prompt tokens looked up in the prefix cache.",
        "looked_up_tokens",
    ),
    ("vllm:prefix_cache_hits", "Prompt tokens found in the prefix cache.", "cached_tokens"),
    ("octavo:steps", "Engine dispatches.", "steps"),
    (
        "octavo:device_idle_seconds",
        "Time with live requests and certainly nothing on the device: a lower bound.",
        "idle_seconds",
    ),
    (
        "octavo:late_dispatches",
        "Dispatches made after the device had run dry.",
        "late_dispatches",
    ),
    (
        "octavo:compiles_after_warmup",
        "Programs compiled after warm-up; should stay 0.",
        "compiles_after_warmup",
    ),
)


class ServerCollector(Collector):
    """Turns what was measured and the engine's last report into metric families.

    What is not known yet is left out: a zero from an API process that has just begun would read as
    a counter that has started anew.

    Attributes:
        recorder: what the API processes measured.
        stats: the engine's last report, None before the first; its counters start anew with a
            restarted engine.
        up: the engine serves.
        restarts: times the engine was restarted; None while that is not known.
        process: name of this API process, where there are several.
    """

    def __init__(self, model: str, process: str = "") -> None:
        self.recorder = Recorder()
        self.stats: EngineStats | None = None
        self.up = False
        self.restarts: int | None = None
        self.process = process
        self._labels, self._values = ["model_name"], [model]

    def collect(self) -> Iterator[Metric]:
        """All families."""
        recorder = self.recorder
        yield self._gauge("octavo:engine_up", "1 while the engine serves.", int(self.up))
        if self.restarts is not None:
            text = "Times the engine was restarted."
            yield self._counter("octavo:engine_restarts", text, self.restarts)
        if self.stats is not None:
            yield from self._of_the_engine(self.stats)
        for name, text, field in _HISTOGRAMS:
            yield self._histogram(name, text, getattr(recorder, field))
        reasons = {"stop", "length", "abort", "error", *recorder.finished}
        ended = {reason: recorder.finished[reason] for reason in reasons}
        yield self._split("vllm:request_success", "Samples ended.", "finished_reason", ended)
        statuses = {str(status): count for status, count in recorder.responses.items()}
        yield self._split("octavo:http_errors", "Error answers.", "status", statuses)
        yield from self._by_key()
        text = "Clients that hung up."
        yield self._counter("octavo:client_disconnects", text, recorder.disconnects)

    def _of_the_engine(self, stats: EngineStats) -> Iterator[Metric]:
        for name, text, field in _GAUGES:
            yield self._gauge(name, text, getattr(stats, field))
        used = stats.pages_used / max(1, stats.pages_total)
        yield self._gauge("vllm:kv_cache_usage_perc", "KV pages in use, 0 to 1.", used)
        sizes = {"block_size": stats.page_size, "num_gpu_blocks": stats.pages_total}
        info = GaugeMetricFamily(
            "vllm:cache_config_info", "Always 1; the cache's sizes.", labels=[*self._labels, *sizes]
        )
        info.add_metric([*self._values, *map(str, sizes.values())], 1)
        yield info
        for name, text, field in _COUNTERS:
            yield self._counter(name, text, getattr(stats, field))
        for name, text, field, bounds in _STEP_HISTOGRAMS:
            yield self._histogram(name, text, getattr(stats, field) or Histogram(bounds))
        real = {bucket: tokens for bucket, (tokens, _) in stats.padding.items()}
        padded = {bucket: tokens for bucket, (_, tokens) in stats.padding.items()}
        text = "Token places computed that held a token."
        yield self._split("octavo:step_tokens", text, "bucket", real)
        text = "Token places computed that were padding."
        yield self._split("octavo:padding_tokens", text, "bucket", padded)
        refused: dict[str, int] = dict.fromkeys(BOUNDS, 0) | stats.refused
        text = "Samples refused because the queue was at a bound."
        yield self._split("octavo:requests_refused", text, "bound", refused)

    def _by_key(self) -> Iterator[Metric]:
        """What the holders of API keys use, by the key's name."""
        recorder = self.recorder
        requests, refusals = recorder.key_requests, recorder.key_refusals
        yield self._split("octavo:key_requests", "Requests let in.", "key", requests)
        text = "Requests refused by the key's own limits."
        yield self._split("octavo:key_refusals", text, "key", refusals)
        running = GaugeMetricFamily(
            "octavo:key_running", "Requests in progress.", labels=[*self._labels, "key"]
        )
        for name, count in sorted(recorder.key_running.items()):
            running.add_metric([*self._values, name], count)
        yield running

    def _gauge(self, name: str, text: str, value: float) -> Metric:
        gauge = GaugeMetricFamily(name, text, labels=self._labels)
        gauge.add_metric(self._values, value)
        return gauge

    def _counter(self, name: str, text: str, value: float) -> Metric:
        counter = CounterMetricFamily(name, text, labels=self._labels)
        counter.add_metric(self._values, value)
        return counter

    def _histogram(self, name: str, text: str, histogram: Histogram) -> Metric:
        family = HistogramMetricFamily(name, text, labels=self._labels)
        family.add_metric(self._values, histogram.cumulative(), histogram.total)
        return family

    def _split(self, name: str, text: str, label: str, counts: dict[str, int]) -> Metric:
        counter = CounterMetricFamily(name, text, labels=[*self._labels, label])
        for value, count in sorted(counts.items()):
            counter.add_metric([*self._values, value], count)
        return counter


class _Process(Collector):
    """Memory, CPU time and files of this process, by its name where there are several.

    Each answers some of the scrapes: without the name one's CPU time would seem to be another's.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._plain = ProcessCollector(registry=None)

    def collect(self) -> Iterator[Metric]:
        """All families."""
        for family in self._plain.collect():
            if self._name:
                named = {"process": self._name}
                family.samples = [one._replace(labels=one.labels | named) for one in family.samples]
            yield family


def exposition(collector: ServerCollector) -> bytes:
    """The text format of all metrics, with those of the process."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(collector)
    registry.register(_Process(collector.process))
    return generate_latest(registry)
