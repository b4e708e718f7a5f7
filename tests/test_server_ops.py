"""Keys, CORS, HTTPS, timing, metrics and admission through the real server with the mock engine."""

import asyncio
import contextlib
import http.client
import json
import ssl
from collections import Counter
from concurrent.futures import ThreadPoolExecutor

import pytest
import trustme
from mock_engine import BOS, ByteTokenizer
from mock_server import PATIENCE, running

from octavo.serve.config import ServerConfig
from octavo.serve.prompts import PromptEncoder
from octavo.serve.protocol import CompletionBody
from octavo.serve.tls import tls_options

KEYS = "alice:sk-alice\nbob:sk-bob:2\ncarol:sk-carol::1\n"
ORIGIN = {"Origin": "https://app.example"}


def bearer(key):
    return {"Authorization": f"Bearer {key}"}


@pytest.fixture(scope="module")
def guarded(tmp_path_factory):
    path = tmp_path_factory.mktemp("keys") / "keys"
    path.write_text(KEYS)
    engine = {"max_waiting": 3}
    with running(api_key_file=str(path), cors_origins=("https://app.example",), engine=engine) as s:
        yield s


def complete(server, key, prompt="abc", **fields):
    body = {"prompt": prompt, "temperature": 0, "max_tokens": 3, **fields}
    return server.post("/v1/completions", body, **bearer(key))


def test_every_path_wants_a_key_unless_it_is_open(guarded):
    paths = guarded.good(guarded.get("/openapi.json"))["paths"]
    open_paths = {"/", "/health", "/health/live", "/health/ready", "/version", "/metrics"}
    for path, methods in paths.items():
        for method in methods:
            status = guarded.request(method.upper(), path, b"{}")[0]
            assert (status != 401) == (path in open_paths), path
    assert guarded.get("/v1/nothing")[0] == 401
    assert guarded.get("/v1/nothing", **bearer("sk-alice"))[0] == 404
    status, headers, body = complete(guarded, "sk-wrong")
    assert (status, headers["www-authenticate"]) == (401, "Bearer")
    assert body["error"]["type"] == "authentication_error"


def test_a_key_may_come_as_anthropics_clients_send_it(guarded):
    status, _, _ = guarded.post("/tokenize", {"prompt": "a"}, **{"x-api-key": "sk-alice"})
    assert status == 200


def test_a_rate_limit_is_429_by_name_and_the_key_is_never_shown(guarded):
    answers = [complete(guarded, "sk-bob") for _ in range(3)]
    assert [status for status, _, _ in answers] == [200, 200, 429]
    assert 1 <= int(answers[2][1]["retry-after"]) <= 30
    assert "API key 'bob'" in answers[2][2]["error"]["message"]
    assert complete(guarded, "sk-alice")[0] == 200
    metrics = guarded.get("/metrics")[2].decode()
    assert 'octavo:key_requests_total{key="bob",model_name="mock"} 2.0' in metrics
    assert 'octavo:key_refusals_total{key="bob",model_name="mock"} 1.0' in metrics
    guarded.wait(lambda: "API key 'bob'" in guarded.log)
    assert "sk-" not in metrics + guarded.log


def test_concurrency_lasts_until_the_stream_ends(guarded):
    with guarded.hold(), contextlib.closing(guarded.connect()) as connection:
        body = {"prompt": "a<|hold|>", "max_tokens": 2000, "stream": True, "temperature": 0}
        connection.request("POST", "/v1/completions", json.dumps(body), bearer("sk-carol"))
        response = connection.getresponse()
        assert response.readline().startswith(b"data: ")
        status, headers, answer = complete(guarded, "sk-carol")
        assert (status, headers["retry-after"]) == (429, "1")
        assert "'carol' has 1 requests running" in answer["error"]["message"]
        assert 'octavo:key_running{key="carol",model_name="mock"} 1.0' in (
            guarded.get("/metrics")[2].decode()
        )
        response.close()
        connection.close()
        guarded.wait(lambda: complete(guarded, "sk-carol")[0] == 200)


def test_pages_of_named_origins_may_call_and_no_others(guarded):
    ask = {"Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "x-any"}
    status, headers, _ = guarded.request("OPTIONS", "/v1/completions", None, {**ORIGIN, **ask})
    assert (status, headers["access-control-allow-origin"]) == (200, "https://app.example")
    status, headers, _ = guarded.get("/v1/models", **ORIGIN)
    assert (status, headers["access-control-allow-origin"]) == (401, "https://app.example")
    _, headers, _ = guarded.get("/v1/models", Origin="https://evil.example", **bearer("sk-alice"))
    assert "access-control-allow-origin" not in headers


def test_aborts_errors_and_refusals_are_counted_as_what_they_are(guarded):
    def ended(reason):
        return guarded.metric(f'vllm:request_success_total{{finished_reason="{reason}"')

    before = {reason: ended(reason) for reason in ("stop", "length", "abort", "error")}
    assert complete(guarded, "sk-alice", stop="c")[0] == 200
    assert complete(guarded, "sk-alice")[0] == 200
    assert complete(guarded, "sk-alice", "x<|nan|>")[0] == 500
    assert complete(guarded, "sk-alice", n=9, temperature=1)[0] == 429
    for refused in ({"n": 1}, {"n": 2, "temperature": 1}, {"stream": True}):
        assert complete(guarded, "sk-alice", guided_regex="REFUSED", **refused)[0] == 400
    guarded.wait(guarded.idle)
    with guarded.hold(), contextlib.closing(guarded.connect()) as connection:
        body = {"prompt": "a<|hold|>", "max_tokens": 2000, "n": 2, "temperature": 1}
        connection.request("POST", "/v1/completions", json.dumps(body), bearer("sk-alice"))
        guarded.wait(lambda: not guarded.idle())
        connection.close()
        guarded.wait(lambda: ended("abort") == before["abort"] + 2)
    after = {reason: ended(reason) - before[reason] for reason in before}
    assert after == {"stop": 1, "length": 1, "abort": 2, "error": 1}


# Timing ------------------------------------------------------------------------------------------


def check_timing(timing, cached):
    assert timing["cached_tokens"] == cached > 0
    assert timing["preemptions"] == 0
    phases = [timing[f"{name}_ms"] for name in ("queue", "prefill", "decode", "host")]
    assert min(phases) >= 0
    assert 58 <= sum(phases) < 20_000  # three of the mock's slow steps, 20 ms each
    assert timing["prefill_ms"] >= 15
    return timing


SLOW = [{"role": "user", "content": "b<|slow|>"}]
TIMED = {
    "/v1/completions": {"prompt": "ab<|slow|>", "max_tokens": 3, "temperature": 0},
    "/v1/chat/completions": {"messages": SLOW, "max_tokens": 3},
    "/v1/messages": {"messages": SLOW, "max_tokens": 3},
    "/v1/responses": {"input": SLOW, "max_output_tokens": 3},
}


def last_usage(events):
    """The usage that a stream of any endpoint ends with."""
    for event in reversed(events):
        data = event.split(b"data: ", 1)[-1]
        fields = json.loads(data) if data.startswith(b"{") else {}
        usage = fields.get("response", fields).get("usage")
        if usage:
            return usage
    raise AssertionError(events)


@pytest.mark.parametrize("path", TIMED)
def test_timing_comes_on_demand(guarded, path):
    key = bearer("sk-alice")
    plain = guarded.good(guarded.post(path, TIMED[path], **key))["usage"]
    assert "timing" not in plain
    asked = {**TIMED[path], "return_timing": True}
    whole = guarded.good(guarded.post(path, asked, **key))["usage"]
    raw = guarded.good(guarded.post(path, {**asked, "stream": True}, **key))
    for usage in (whole, last_usage(raw.split(b"\n\n"))):
        timing = usage.pop("timing")
        assert usage.keys() == plain.keys()
        check_timing(timing, cached_of(usage))


def cached_of(usage):
    """Cached tokens in the words of an endpoint."""
    for name in ("prompt_tokens_details", "input_tokens_details"):
        if name in usage:
            return usage[name]["cached_tokens"]
    return usage["cache_read_input_tokens"]


def test_decode_time_is_what_a_stream_took_behind_its_first_token(guarded):
    events = streamed_in_two(guarded, max_tokens=5, return_timing=True)
    usage = json.loads(events[-3].removeprefix(b"data: "))["usage"]
    assert check_timing(usage["timing"], cached_of(usage))["decode_ms"] > 0


def streamed_in_two(server, **fields):
    """Events of a stream whose last news come after its first have been read."""
    with server.hold(), contextlib.closing(server.connect()) as connection:
        body = {"prompt": "ab<|slow|><|hold|>", "stream": True, "temperature": 0, **fields}
        connection.request("POST", "/v1/completions", json.dumps(body), bearer("sk-alice"))
        response = connection.getresponse()
        first = response.readline()
        server.release()
        return (first + response.read()).split(b"\n\n")


def test_phases_add_up_to_the_latency(guarded):
    def sums():
        names = ("queue_time", "prefill_time", "decode_time", "inference_time")
        values = [guarded.metric(f"vllm:request_{name}_seconds_sum") for name in names]
        return [*values, guarded.metric("vllm:e2e_request_latency_seconds_sum")]

    before = sums()
    streamed_in_two(guarded, max_tokens=5)
    queue, prefill, decode, inference, whole = (b - a for a, b in zip(before, sums()))
    assert inference == pytest.approx(prefill + decode)
    assert prefill >= 0.015
    assert decode > 0
    assert queue + inference <= whole + 1e-6
    assert whole >= 0.058


# HTTPS -------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def certificate(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tls")
    authority = trustme.CA()
    issued = authority.issue_cert("127.0.0.1")
    authority.cert_pem.write_to_path(folder / "ca.pem")
    issued.private_key_pem.write_to_path(folder / "key.pem")
    for i, blob in enumerate(issued.cert_chain_pems):
        blob.write_to_path(folder / "cert.pem", append=i > 0)
    return folder


def test_https_with_a_certificate_of_ones_own(certificate):
    files = {"tls_cert": str(certificate / "cert.pem"), "tls_key": str(certificate / "key.pem")}
    trust = ssl.create_default_context(cafile=str(certificate / "ca.pem"))
    with running(wait=False, **files) as server:

        def ask(method, path, body=None):
            connection = http.client.HTTPSConnection(
                "127.0.0.1", server.port, context=trust, timeout=PATIENCE
            )
            with contextlib.closing(connection):
                connection.request(method, path, body)
                response = connection.getresponse()
                return response.status, response.read()

        server.wait(lambda: "serving" in server.log)
        assert f"https://127.0.0.1:{server.port}" in server.log
        server.wait(lambda: ask("GET", "/health")[0] == 200)
        body = {"prompt": "abc", "max_tokens": 3, "stream": True, "temperature": 0}
        _, data = ask("POST", "/v1/completions", json.dumps(body))
        assert data.endswith(b"data: [DONE]\n\n")
        with pytest.raises((OSError, http.client.HTTPException)):
            server.get("/health")


def test_certificates_that_do_not_work_are_refused_by_name(certificate, tmp_path):
    with pytest.raises(ValueError, match="tls_cert and tls_key must be given together"):
        tls_options(ServerConfig(tls_cert="x"))
    (tmp_path / "bad.pem").write_text("nothing")
    for cert, key in (
        (tmp_path / "absent.pem", certificate / "key.pem"),
        (certificate / "cert.pem", tmp_path / "bad.pem"),
        (certificate / "ca.pem", certificate / "key.pem"),
    ):
        config = ServerConfig(tls_cert=str(cert), tls_key=str(key))
        with pytest.raises(ValueError, match=rf"tls_cert {cert}, tls_key {key}"):
            tls_options(config)


def test_the_default_address_is_this_machine_alone():
    assert ServerConfig().host == "127.0.0.1"


def test_a_burst_over_the_bound_is_refused_and_the_rest_is_served(guarded):
    asked = guarded, "sk-alice", "a<|hold|>"
    guarded.wait(guarded.idle)
    with ThreadPoolExecutor(12) as pool:
        with guarded.hold():
            answers = [pool.submit(complete, *asked, max_tokens=9) for _ in range(12)]
            guarded.wait(lambda: sum(answer.done() for answer in answers) == 9)
        statuses = Counter(answer.result()[0] for answer in answers)
    assert statuses == {200: 3, 429: 9}


# Fields whose effect no other test of the server shows -------------------------------------------


def test_max_completion_tokens_goes_before_max_tokens(guarded):
    body = {"messages": [{"role": "user", "content": "hi"}], "temperature": 0}
    for limits, count in (
        ({"max_completion_tokens": 2}, 2),
        ({"max_tokens": 3}, 3),
        ({"max_completion_tokens": 2, "max_tokens": 3}, 2),
    ):
        _, _, answer = guarded.post("/v1/chat/completions", body | limits, **bearer("sk-alice"))
        assert answer["usage"]["completion_tokens"] == count


@pytest.mark.parametrize(("asked", "added"), [(None, True), (True, True), (False, False)])
def test_add_special_tokens_reaches_the_tokenizer(asked, added):
    class Recording(ByteTokenizer):
        def encode(self, text, add_special_tokens=True):
            return [BOS] * add_special_tokens + super().encode(text)

    with ThreadPoolExecutor(1) as threads:
        encoder = PromptEncoder(Recording(), lambda size: threads)
        body = CompletionBody(prompt="a", add_special_tokens=asked)
        (prompt,) = asyncio.run(encoder.completion(body))
    assert prompt.ids == ((BOS, 97) if added else (97,))
