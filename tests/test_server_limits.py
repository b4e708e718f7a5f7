"""Requests that a server can't or won't take, or end: what it says, on every endpoint."""

import contextlib
import json
from concurrent.futures import ThreadPoolExecutor

import pytest
from mock_server import running
from test_operations import ROUTERS

from octavo.serve import routes_admin

SAID = [{"role": "user", "content": "a"}]
BODIES = {
    "/v1/completions": {"prompt": "a"},
    "/v1/chat/completions": {"messages": SAID},
    "/v1/responses": {"input": "a"},
    "/v1/messages": {"messages": SAID, "max_tokens": 5},
    "/v1/messages/count_tokens": {"messages": SAID},
    "/v1/embeddings": {"input": "a"},
    "/v1/score": {"prompt": "a", "continuations": "b"},
    "/tokenize": {"prompt": "a"},
    "/detokenize": {"tokens": [97]},
}
"""Every endpoint that takes a body, but for the operators'."""


def error_of(path, body):
    """Kind and message of an error, whose shape is that of the path's API."""
    error = body["error"]
    if path.startswith("/v1/messages"):
        assert body.keys() == {"type", "error"}
        assert body["type"] == "error"
        assert error.keys() == {"type", "message"}
    else:
        assert body.keys() == {"error"}
        assert error.keys() == {"message", "type", "param", "code"}
    return error["type"], error["message"]


def test_no_endpoint_is_left_out():
    routes = [r for m in ROUTERS if m is not routes_admin for r in m.router.routes]
    assert {route.path for route in routes if "POST" in route.methods} == BODIES.keys()


# 503 ---------------------------------------------------------------------------------------------


def check_unavailable(server, message):
    """Every endpoint refuses, says why, and when to come again."""
    answers = {path: server.post(path, body) for path, body in BODIES.items()}
    for path, (status, headers, body) in answers.items():
        assert status == 503, path
        assert 1 <= int(headers["retry-after"]) <= 60
        kind, text = error_of(path, body)
        anthropic = path.startswith("/v1/messages")
        assert kind == ("overloaded_error" if anthropic else "service_unavailable_error")
        assert text == message
    for path in ("/v1/models", "/v1/models/mock"):
        status, headers, body = server.get(path)
        assert (status, body["error"]["code"]) == (503, "service_unavailable")
        assert int(headers["retry-after"]) >= 1


def test_while_the_model_loads():
    with running(wait=False, held=True) as server:
        server.wait(lambda: server.status() == "loading")
        check_unavailable(server, "the model is loading")
        for path in ("/health", "/health/ready"):
            assert server.get(path)[::2] == (503, {"status": "loading"})
        assert server.get("/health/live")[0] == server.get("/metrics")[0] == 200


def test_while_the_server_drains():
    engine = {"step_seconds": 0.02}
    with (
        running(drain_seconds=600, engine=engine) as server,
        contextlib.closing(server.connect()) as connection,
    ):
        body = {"prompt": "a<|stall|>", "max_tokens": 5}
        connection.request("POST", "/v1/completions", json.dumps(body))
        server.wait(lambda: not server.idle())
        server.signal()
        server.wait(lambda: server.status() == "draining")
        check_unavailable(server, "the server is shutting down")


# 408 ---------------------------------------------------------------------------------------------

TIMEOUT = 6.0
"""So long that a stream has begun by then, also where the machine stands still for a while."""
SLOW = [{"role": "user", "content": "a<|slow|>"}]
STUCK = [{"role": "user", "content": "a<|stall|>"}]
STREAMS = {
    "/v1/completions": {"prompt": "a<|slow|>", "max_tokens": 1900, "n": 2, "temperature": 1},
    "/v1/chat/completions": {"messages": SLOW, "max_tokens": 1900},
    "/v1/messages": {"messages": SLOW, "max_tokens": 1900},
    "/v1/responses": {"input": SLOW, "max_output_tokens": 1900},
}
"""The mock takes 38 s for each."""
WHOLE = {
    "/v1/completions": {"prompt": ["a<|stall|>", "b<|stall|>"]},
    "/v1/chat/completions": {"messages": STUCK},
    "/v1/messages": {"messages": STUCK, "max_tokens": 5},
    "/v1/responses": {"input": STUCK},
    "/v1/embeddings": {"input": ["a<|stall|>", "b<|stall|>"]},
    "/v1/score": {"prompt": "a", "continuations": ["<|stall|>", "<|stall|>"]},
}
SAMPLES = 2 + 3 + 2 + 3 + 2 + 2


@pytest.fixture(scope="module")
def overdue():
    """Answers to requests that all run over their time, by path, and the server after them."""
    with running(request_timeout=TIMEOUT) as server, ThreadPoolExecutor(16) as threads:

        def ask(path, body, stream):
            return threads.submit(server.post, path, {"stream": True, **body} if stream else body)

        streams = {path: ask(path, body, True) for path, body in STREAMS.items()}
        whole = {path: ask(path, body, False) for path, body in WHOLE.items()}
        streams = {path: answer.result() for path, answer in streams.items()}
        yield server, {path: answer.result() for path, answer in whole.items()}, streams


def test_an_answer_over_its_time_is_a_408_in_the_apis_words(overdue):
    for path, (status, headers, body) in overdue[1].items():
        assert (status, headers["connection"]) == (408, "close")
        kind, message = error_of(path, body)
        assert (kind, message) == ("timeout_error", "the request took longer than 6 s")


def events_of(answer):
    """Data of each event of a stream that had begun."""
    status, headers, raw = answer
    assert status == 200
    assert headers["content-type"].startswith("text/event-stream")
    lines = [event.split(b"data: ", 1)[1] for event in raw.split(b"\n\n") if event]
    return [line.decode() if line == b"[DONE]" else json.loads(line) for line in lines]


def test_a_stream_over_its_time_ends_with_the_error_as_an_event(overdue):
    message = "the request took longer than 6 s"
    for path in ("/v1/completions", "/v1/chat/completions"):
        *tokens, error, done = events_of(overdue[2][path])
        assert tokens
        assert done == "[DONE]"
        assert error_of(path, error) == ("timeout_error", message)
        assert not any(c["finish_reason"] for event in tokens for c in event["choices"])
    *tokens, error = events_of(overdue[2]["/v1/messages"])
    assert tokens[-1]["type"] == "content_block_delta"
    assert error_of("/v1/messages", error) == ("timeout_error", message)
    *_, last = events_of(overdue[2]["/v1/responses"])
    assert (last["type"], last["response"]["status"]) == ("response.failed", "failed")
    assert last["response"]["error"] == {"code": "server_error", "message": message}
    assert last["response"]["output"][0]["content"][0]["text"]


def test_of_what_ran_over_its_time_the_engine_holds_nothing(overdue):
    server = overdue[0]
    server.wait(server.idle)
    assert server.metric('vllm:request_success_total{finished_reason="abort"') == SAMPLES
    assert server.metric('octavo:http_errors_total{model_name="mock",status="408"}') == len(WHOLE)
    assert server.complete("ab", max_tokens=2)[0] == 200


# 429 ---------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def full():
    """One request runs for long, one with a prompt of 15 tokens waits behind it."""
    scheduler = {"max_num_seqs": 1, "max_model_len": 4096, "num_pages": 4000, "overlap": True}
    scheduler |= {"max_waiting_tokens": 100, "max_estimated_wait": 1.0}
    engine = {"scheduler": scheduler, "step_seconds": 0.02}
    with running(engine=engine) as server, contextlib.ExitStack() as stack:
        for prompt in ("runs", "b" * 15):
            connection = stack.enter_context(contextlib.closing(server.connect()))
            body = {"prompt": prompt, "max_tokens": 4000, "stream": True}
            connection.request("POST", "/v1/completions", json.dumps(body))
            server.wait(lambda: not server.idle())
        server.wait(lambda: server.metric("vllm:num_requests_waiting") == 1)
        yield server


OVER = {"tokens": "a" * 90, "wait": "aa"}
WORDS = {"tokens": "15 prompt tokens are waiting", "wait": "the wait would be about"}


@pytest.mark.parametrize("bound", OVER)
def test_a_queue_at_a_bound_is_a_429_that_says_when_to_come_again(full, bound):
    full.wait(lambda: full.metric("octavo:estimated_wait_seconds") > 2)
    text = OVER[bound]
    said = [{"role": "user", "content": text}]
    bodies = {
        "/v1/completions": {"prompt": text},
        "/v1/chat/completions": {"messages": said, "max_tokens": 5},
        "/v1/responses": {"input": said, "max_output_tokens": 5},
        "/v1/messages": {"messages": said, "max_tokens": 5},
        "/v1/embeddings": {"input": text},
        "/v1/score": {"prompt": "a", "continuations": text},
    }

    def refused():
        return full.metric(f'octavo:requests_refused_total{{bound="{bound}"')

    before = refused()
    for path, body in bodies.items():
        for fields in ({}, {"stream": True}):
            if fields and path in ("/v1/embeddings", "/v1/score"):
                continue
            status, headers, answer = full.post(path, body | fields)
            assert status == 429, path
            assert 1 <= int(headers["retry-after"]) <= 60
            kind, message = error_of(path, answer)
            assert kind == "rate_limit_error"
            assert WORDS[bound] in message
    full.wait(lambda: refused() == before + 10)


# Order -------------------------------------------------------------------------------------------


def test_an_urgent_request_overtakes_those_that_wait():
    """There is one row. Who comes last gets it next, and while it is held nobody else ends."""
    scheduler = {"max_num_seqs": 1, "max_model_len": 4096, "num_pages": 4000}
    engine = {"scheduler": scheduler, "step_seconds": 0.02}
    long = {"prompt": "ab", "max_tokens": 4000, "stream": True}
    with running(engine=engine) as server, ThreadPoolExecutor(2) as threads:

        def waiting(count):
            server.wait(lambda: server.metric("vllm:num_requests_waiting") == count)

        def ask(**fields):
            connection = server.connect()
            connection.request("POST", "/v1/completions", json.dumps(long | fields))
            return contextlib.closing(connection)

        with ask(priority=5):
            server.wait(lambda: not server.idle())
            patient = [threads.submit(server.complete, "c", priority=p) for p in (0, 4)]
            waiting(2)
            urgent = ask(priority=-100)
            waiting(3)
        with urgent as connection:
            assert connection.getresponse().readline().startswith(b"data: ")
            waiting(2)
            assert not any(answer.done() for answer in patient)
        assert [answer.result()[0] for answer in patient] == [200, 200]
