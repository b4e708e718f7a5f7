"""What /metrics says, against what clients and the engine saw: each figure counted, and once."""

import time
from dataclasses import fields, replace
from functools import cached_property

import jax
import pytest
from mock_server import running
from prometheus_client.parser import text_string_to_metric_families
from scheduler_cases import loop_of, request
from test_engine import PLAIN, greedy
from tiny import run, tiny_engine

from octavo.serve.compile import ProgramKey, Programs
from octavo.serve.histogram import Histogram
from octavo.serve.metrics import ServerCollector, exposition
from octavo.serve.queue import QueueFull
from octavo.serve.types import EngineStats, Request

HISTOGRAM, COUNTER, GAUGE = "histogram", "counter", "gauge"
VLLM = {
    "num_requests_running": GAUGE,
    "num_requests_waiting": GAUGE,
    "kv_cache_usage_perc": GAUGE,
    "cache_config_info": GAUGE,
    "prefix_cache_queries": COUNTER,
    "prefix_cache_hits": COUNTER,
    "num_preemptions": COUNTER,
    "prompt_tokens": COUNTER,
    "generation_tokens": COUNTER,
    "request_success": COUNTER,
    "time_to_first_token_seconds": HISTOGRAM,
    "inter_token_latency_seconds": HISTOGRAM,
    "request_time_per_output_token_seconds": HISTOGRAM,
    "e2e_request_latency_seconds": HISTOGRAM,
    "request_queue_time_seconds": HISTOGRAM,
    "request_inference_time_seconds": HISTOGRAM,
    "request_prefill_time_seconds": HISTOGRAM,
    "request_decode_time_seconds": HISTOGRAM,
    "request_prompt_tokens": HISTOGRAM,
    "request_generation_tokens": HISTOGRAM,
    "request_prefill_kv_computed_tokens": HISTOGRAM,
    "request_params_n": HISTOGRAM,
    "request_params_max_tokens": HISTOGRAM,
    "iteration_tokens_total": HISTOGRAM,
}
"""vLLM's metrics of an engine without adapters, drafts, KV transfer and images, by type."""


def families(stats=None):
    collector = ServerCollector("m")
    collector.stats, collector.restarts = stats or EngineStats(), 0
    return {f.name: f for f in text_string_to_metric_families(exposition(collector).decode())}


def values(text):
    """Value of each sample, its labels but for the model's behind its name."""
    found = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            labels = [f"{k}={v}" for k, v in sorted(sample.labels.items()) if k != "model_name"]
            found[" ".join([sample.name, *labels])] = sample.value
    return found


def told(stats):
    """What /metrics says of an engine's report."""
    collector = ServerCollector("m")
    collector.stats = stats
    return values(exposition(collector).decode())


def total(found, name):
    """Sum of a metric's samples over their labels."""
    return sum(value for key, value in found.items() if key.split()[0] == name)


# Names -------------------------------------------------------------------------------------------


def test_vllms_names_have_its_types_and_labels():
    found = families()
    assert {name: found[f"vllm:{name}"].type for name in VLLM} == VLLM
    assert {name for name in found if name.startswith("vllm:")} == {f"vllm:{n}" for n in VLLM}
    for name, family in found.items():
        for sample in family.samples:
            assert name.startswith("process_") or sample.labels["model_name"] == "m"
    reasons = {s.labels["finished_reason"] for s in found["vllm:request_success"].samples}
    assert reasons == {"stop", "length", "abort", "error"}
    (info,) = found["vllm:cache_config_info"].samples
    assert info.labels.keys() >= {"block_size", "num_gpu_blocks"}


OF_A_REPORT = {
    "vllm:num_requests_running": "running",
    "vllm:num_requests_waiting": "waiting",
    "octavo:waiting_prompt_tokens": "waiting_tokens",
    "octavo:estimated_wait_seconds": "estimated_wait",
    "vllm:num_preemptions_total": "preemptions",
    "vllm:prompt_tokens_total": "prompt_tokens",
    "vllm:generation_tokens_total": "generated_tokens",
    "vllm:prefix_cache_queries_total": "looked_up_tokens",
    "vllm:prefix_cache_hits_total": "cached_tokens",
    "octavo:steps_total": "steps",
    "octavo:device_idle_seconds_total": "idle_seconds",
    "octavo:late_dispatches_total": "late_dispatches",
    "octavo:compiles_after_warmup_total": "compiles_after_warmup",
}


def test_no_figure_of_a_report_stands_under_anothers_name():
    numbers = [f.name for f in fields(EngineStats) if f.type in ("int", "float", int, float)]
    stats = EngineStats(**{name: 2**i for i, name in enumerate(numbers)})
    stats = replace(stats, refused={"count": 3, "tokens": 5, "wait": 7}, padding={"b": (11, 13)})
    stats.step_seconds, stats.step_tokens = Histogram((1.0,)), Histogram((1.0,))
    stats.step_seconds.observe(17.0)
    stats.step_tokens.observe(19.0)
    found = told(stats)
    assert {name: found[name] for name in OF_A_REPORT} == {
        name: getattr(stats, field) for name, field in OF_A_REPORT.items()
    }
    refused = [
        found[f"octavo:requests_refused_total bound={b}"] for b in ("count", "tokens", "wait")
    ]
    assert refused == [3, 5, 7]
    assert found["octavo:step_tokens_total bucket=b"] == 11
    assert found["octavo:padding_tokens_total bucket=b"] == 13
    assert found["octavo:step_time_seconds_sum"] == 17
    assert found["vllm:iteration_tokens_total_sum"] == 19
    assert found["vllm:kv_cache_usage_perc"] == stats.pages_used / stats.pages_total


def test_what_an_api_process_does_not_know_yet_it_does_not_call_zero():
    """A zero would be a counter that has started anew, and the next scrape a burst."""
    names = values(exposition(ServerCollector("m")).decode())
    counted = {key.split()[0] for key in names if key.split()[0].endswith("_total")}
    assert counted <= {
        "vllm:request_success_total",
        "octavo:client_disconnects_total",
        "process_cpu_seconds_total",
    }


# The engine --------------------------------------------------------------------------------------


class Ticks:
    """A clock that moves on by a second with each look."""

    def __init__(self):
        self.now = 0.0

    def __call__(self):
        self.now += 1.0
        return self.now


def of(lengths, max_tokens=6):
    start = iter(range(10, 100, 10))
    prompts = [tuple(4 + (next_ + i) % 150 for i in range(n)) for n, next_ in zip(lengths, start)]
    return [Request(f"r{i}", prompt, greedy(max_tokens)) for i, prompt in enumerate(prompts)]


def test_the_engines_counters_are_what_it_did():
    engine = tiny_engine(**PLAIN)
    engine._clock = Ticks()
    before = told(engine.stats())  # tests share the runner, which counts on
    for one in of((20, 7, 33, 5, 12)):
        engine.add(one)
    engine.step()  # 32 tokens: two prompts and a part of the third
    found = told(engine.stats())
    assert found["vllm:num_requests_running"] == 3
    assert found["vllm:num_requests_waiting"] == 2
    assert found["octavo:waiting_prompt_tokens"] == 17
    assert found["vllm:kv_cache_usage_perc"] == (2 + 1 + 3) / 32
    assert found["vllm:cache_config_info block_size=16 num_gpu_blocks=32"] == 1
    engine.step()  # the rest of the third, two of the fourth: 32 tokens have taken three ticks
    assert told(engine.stats())["octavo:estimated_wait_seconds"] == (3 + 12) * 3 / 32
    run(engine, [])
    found = told(engine.stats())
    assert total(found, "vllm:num_requests_running") == 0
    assert total(found, "vllm:num_requests_waiting") == 0
    assert found["octavo:waiting_prompt_tokens"] == 0
    assert found["vllm:kv_cache_usage_perc"] == 0
    assert found["vllm:prompt_tokens_total"] == found["vllm:prefix_cache_queries_total"] == 77
    assert found["vllm:prefix_cache_hits_total"] == 0
    assert found["vllm:generation_tokens_total"] == 5 * 6
    assert found["vllm:num_preemptions_total"] == 0
    computed, steps = 77 + 5 * (6 - 1), found["octavo:steps_total"]
    assert found["vllm:iteration_tokens_total_sum"] == computed
    assert found["vllm:iteration_tokens_total_count"] == steps
    assert found["octavo:step_time_seconds_count"] == steps
    assert found["octavo:step_time_seconds_sum"] == steps  # a tick from dispatch to answer
    assert found["octavo:device_idle_seconds_total"] == 2 * (
        steps - 1
    )  # answer, schedule, dispatch
    assert found["octavo:late_dispatches_total"] == 0
    grown = {key: value - before.get(key, 0) for key, value in found.items()}
    assert total(grown, "octavo:step_tokens_total") == computed
    assert total(grown, "octavo:padding_tokens_total") > 0
    dispatches = 0
    for key, real in grown.items():
        if key.startswith("octavo:step_tokens_total"):
            bucket = key.split()[1]
            places = real + grown[f"octavo:padding_tokens_total {bucket}"]
            dispatches += places / int(bucket.rsplit("-", 1)[1])
    assert dispatches == steps


def test_prefix_hits_are_the_pages_shared_and_queries_what_was_looked_up():
    engine = tiny_engine(**PLAIN)
    (one,) = of((33,))
    cached = 0
    for name in ("first", "second"):
        engine.add(replace(one, request_id=name))
        events = []
        while engine.has_work():
            events += engine.step()
        cached += max(event.cached_tokens for event in events)
    found = told(engine.stats())
    assert cached == found["vllm:prefix_cache_hits_total"] == 32
    assert found["vllm:prefix_cache_queries_total"] == found["vllm:prompt_tokens_total"] == 66
    for loop, asked in (
        (loop_of(prefix_caching=False), request("a")),
        (loop_of(), request("a", prompt_logprobs=0)),
    ):
        loop.add(asked)
        loop.drain()
        stats = loop.scheduler.stats()
        assert (stats.prompt_tokens, stats.looked_up_tokens) == (9, 0)


def test_preemptions_are_those_that_requests_had():
    engine = tiny_engine(num_pages=7, max_model_len=80)
    batch = of((10,) * 6, max_tokens=36)
    tokens, last = run(engine, batch)
    found = told(engine.stats())
    assert found["vllm:num_preemptions_total"] == sum(e.preemptions for e in last.values()) > 0
    assert found["vllm:generation_tokens_total"] == sum(map(len, tokens.values()))
    assert found["vllm:prompt_tokens_total"] == sum(len(r.prompt) for r in batch)


def test_a_dispatch_after_the_device_has_run_dry_is_late():
    engine = tiny_engine(overlap=True, max_decode_steps=1)
    engine.add(of((5,), max_tokens=20)[0])
    engine.step()
    assert told(engine.stats())["octavo:late_dispatches_total"] == 0
    jax.block_until_ready(engine._in_flight.report)
    engine.step()
    assert told(engine.stats())["octavo:late_dispatches_total"] == 1


def test_a_compile_behind_the_warm_up_is_counted():
    engine = tiny_engine()
    programs = Programs(engine.runner.builder.build, None, devices=jax.devices()[:1])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine.runner, "programs", programs)
        programs.get(ProgramKey("logits", size=2))
        programs.seal()
        assert told(engine.stats())["octavo:compiles_after_warmup_total"] == 0
        for _ in range(2):
            programs.get(ProgramKey("logits", size=3))
        assert told(engine.stats())["octavo:compiles_after_warmup_total"] == 1


@pytest.mark.parametrize(
    ("bound", "settings"), [("count", {"max_waiting": 2}), ("tokens", {"max_waiting_tokens": 40})]
)
def test_refusals_are_counted_by_the_bound_that_made_them(bound, settings):
    engine = tiny_engine(**settings)
    *fit, over = of((20, 20, 20))
    for one in fit:
        engine.add(one)
    with pytest.raises(QueueFull):
        engine.add(over)
    found = told(engine.stats())
    assert found[f"octavo:requests_refused_total bound={bound}"] == 1
    assert total(found, "octavo:requests_refused_total") == 1


# The server --------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def srv():
    with running(admin_endpoints=True) as server:
        yield server


def read(server):
    """All figures of now: before the core answers an operator, it reports."""
    server.good(server.post("/resume"))
    return values(server.get("/metrics")[2].decode())


class Growth:
    """What the figures of a server have grown by, until it is first asked."""

    def __init__(self, server):
        self._server, self._before = server, read(server)

    @cached_property
    def _after(self):
        return read(self._server)

    def __call__(self, name):
        return self._after.get(name, 0) - self._before.get(name, 0)

    def histogram(self, name):
        """Observations, and their sum."""
        return self(f"vllm:{name}_count"), self(f"vllm:{name}_sum")


def test_times_of_a_sample_fit_together_and_into_the_clients(srv):
    grown, begun = Growth(srv), time.monotonic()
    srv.good(srv.complete("ab<|slow|>", max_tokens=5))
    elapsed = time.monotonic() - begun
    seconds = {}
    for name, count in {
        "time_to_first_token": 1,
        "inter_token_latency": 4,
        "e2e_request_latency": 1,
        "request_queue_time": 1,
        "request_prefill_time": 1,
        "request_decode_time": 1,
        "request_inference_time": 1,
        "request_time_per_output_token": 1,
    }.items():
        observed, seconds[name] = grown.histogram(f"{name}_seconds")
        assert observed == count, name
    first, between, whole, queue, prefill, decode, inference, mean = seconds.values()
    assert between == pytest.approx(decode)
    assert mean == pytest.approx(decode / 4)
    assert inference == pytest.approx(prefill + decode)
    assert decode > 0
    assert 0.02 <= prefill <= queue + prefill <= first  # the mock takes 20 ms for each token
    assert 5 * 0.02 <= first + between <= whole <= elapsed


HELLO = [{"role": "user", "content": "hello"}]
CALLS = [
    pytest.param("/v1/completions", {"prompt": "abc", "max_tokens": 4}, [1], 4, id="completion"),
    pytest.param(
        "/v1/completions",
        {"prompt": ["abc", "de"], "max_tokens": 3, "n": 2, "temperature": 1},
        [2, 2],
        3,
        id="samples",
    ),
    pytest.param("/v1/completions", {"prompt": "abc", "max_tokens": 1}, [1], 1, id="one token"),
    pytest.param("/v1/chat/completions", {"messages": HELLO, "max_tokens": 4}, [1], 4, id="chat"),
    pytest.param("/v1/messages", {"messages": HELLO, "max_tokens": 4}, [1], 4, id="messages"),
    pytest.param("/v1/responses", {"input": HELLO, "max_output_tokens": 4}, [1], 4, id="responses"),
]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("path", "body", "samples", "tokens"), CALLS)
def test_every_sample_and_token_is_counted_once(srv, path, body, samples, tokens, stream):
    grown, count = Growth(srv), sum(samples)
    body = {"temperature": 0, "stream": stream, **body}
    assert srv.post(path, body)[0] == 200
    several = count if tokens > 1 else 0
    for name, observed in {
        "time_to_first_token_seconds": count,
        "inter_token_latency_seconds": count * (tokens - 1),
        "request_time_per_output_token_seconds": several,
        "e2e_request_latency_seconds": count,
        "request_queue_time_seconds": count,
        "request_prefill_time_seconds": count,
        "request_decode_time_seconds": count,
        "request_inference_time_seconds": count,
        "request_prompt_tokens": count,
        "request_prefill_kv_computed_tokens": count,
    }.items():
        assert grown.histogram(name)[0] == observed, name
    assert grown.histogram("request_generation_tokens") == (count, count * tokens)
    assert grown.histogram("request_params_max_tokens") == (count, count * tokens)
    assert grown.histogram("request_params_n") == (len(samples), sum(samples))
    assert grown("vllm:request_success_total finished_reason=length") == count
    for name in ("generation_tokens", "prompt_tokens"):  # the engine's own count of the same
        assert grown(f"vllm:{name}_total") == grown.histogram(f"request_{name}")[1] > 0


def test_prompts_are_counted_with_what_the_cache_had_of_them(srv):
    grown = Growth(srv)
    usage = srv.good(srv.complete("abcde", max_tokens=1))["usage"]
    assert grown.histogram("request_prompt_tokens") == (1, usage["prompt_tokens"]) == (1, 5)
    cached = usage["prompt_tokens_details"]["cached_tokens"]
    assert grown.histogram("request_prefill_kv_computed_tokens") == (1, 5 - cached) == (1, 3)


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/embeddings", {"input": ["abc", "de"]}),
        ("/v1/score", {"prompt": "ab", "continuations": ["c", "d"]}),
        ("/v1/completions", {"prompt": ["abc", "de"], "max_tokens": 0, "echo": True}),
    ],
)
def test_prompts_alone_are_samples_without_tokens(srv, path, body):
    grown = Growth(srv)
    assert srv.post(path, body)[0] == 200
    assert grown.histogram("e2e_request_latency_seconds")[0] == 2
    assert grown.histogram("request_generation_tokens") == (2, 0)
    assert grown("vllm:request_success_total finished_reason=length") == 2
    for name in ("time_to_first_token_seconds", "request_params_n", "request_params_max_tokens"):
        assert grown.histogram(name)[0] == 0


def test_each_error_answer_is_counted_under_its_status(srv):
    grown = Growth(srv)
    assert srv.complete("a", temperature=-1)[0] == 400
    assert srv.complete("a", model="other")[0] == 404
    assert srv.complete("a<|nan|>")[0] == 500
    assert srv.post("/v1/embeddings", {"input": ["a", "<|boom|>"]})[0] == 500
    counted = [grown(f"octavo:http_errors_total status={status}") for status in (400, 404, 500)]
    assert counted == [1, 1, 2]
    assert grown("vllm:request_success_total finished_reason=error") == 3
