"""Requests that nobody would send on purpose: nothing is a 500, and nothing hangs."""

import contextlib
import json
import socket

import pytest
import requests
import schemathesis
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.errors import Unsatisfiable
from mock_server import PATIENCE, running
from schemathesis.generation import GenerationMode

BOUNDED = settings(
    max_examples=25,
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=list(HealthCheck),
)


@pytest.fixture(scope="module")
def tame():
    """A server whose engine has no token that makes it misbehave."""
    engine = {"tame": True, "max_model_len": 256}
    with running(engine=engine, max_body_bytes=100_000) as server:
        yield server
        server.wait(server.idle)
        assert server.status() == "ready"
        assert "Traceback" not in server.log


@pytest.mark.parametrize("mode", list(GenerationMode), ids=lambda mode: mode.value)
def test_whatever_the_openapi_document_allows_and_forbids(tame, mode):
    document = schemathesis.openapi.from_url(f"http://127.0.0.1:{tame.port}/openapi.json")
    session = requests.Session()
    tried = set()
    for found in document.get_all_operations():
        operation = found.ok()

        @BOUNDED
        @given(operation.as_strategy(generation_mode=mode))
        def check(case):
            answer = case.call(session=session, timeout=PATIENCE)
            assert answer.status_code < 500, (case.body, answer.text)
            tried.add(case.operation.path)

        with contextlib.suppress(Unsatisfiable):  # nothing is wrong for a path without parameters
            check()
    session.close()
    paths = tame.get("/openapi.json")[2]["paths"]
    bodies = {path for path, methods in paths.items() if "requestBody" in methods.get("post", {})}
    assert tried >= (set(paths) if mode is GenerationMode.POSITIVE else bodies)


# Fields that exist with values that are wrong in every way JSON can be.
VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**70), 2**70)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=20),
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4)
    ),
    max_leaves=6,
)


@pytest.fixture
def connection(tame):
    with contextlib.closing(tame.connect()) as kept:
        yield kept


ENDS = {"/v1/responses": b"}}\n\n", "/v1/messages": b'{"type":"message_stop"}\n\n'}
"""How streams end that don't end as OpenAI's older ones."""


@pytest.mark.parametrize(
    ("path", "good"),
    [
        ("/v1/completions", {"prompt": "ab", "max_tokens": 2}),
        (
            "/v1/chat/completions",
            {"messages": [{"role": "user", "content": "ab"}], "max_tokens": 2},
        ),
        ("/v1/responses", {"input": "ab", "max_output_tokens": 2}),
        ("/v1/messages", {"messages": [{"role": "user", "content": "ab"}], "max_tokens": 2}),
        ("/v1/embeddings", {"input": "ab"}),
        ("/v1/score", {"prompt": "ab", "continuations": ["c"]}),
        ("/tokenize", {"prompt": "ab"}),
        ("/detokenize", {"tokens": [97]}),
    ],
)
def test_any_field_with_any_value(tame, connection, path, good):
    properties = _properties(tame, path)

    @settings(BOUNDED, max_examples=150)
    @given(st.dictionaries(st.sampled_from(properties), VALUES, min_size=1, max_size=3))
    def check(fields):
        connection.request("POST", path, json.dumps(good | fields))
        response = connection.getresponse()
        body = response.read()
        assert response.status < 500, (fields, body)
        if response.status == 400:
            assert json.loads(body)["error"]["message"]
        elif b"event-stream" in response.headers["content-type"].encode():
            assert b'"error":{' not in body
            assert body.endswith(ENDS.get(path, b"data: [DONE]\n\n"))

    check()


# What Python's json can't write, or writes otherwise; and shapes that no field expects.
RAW = [
    *("NaN", "-Infinity", "1e999", "9" * 400, "18446744073709551615", "-9223372036854775808"),
    *('"\\ud800"', '"\\u0000"', '{"a":1,"a":[]}', '{"type":[]}', '{"type":{}}', "[[]]", "[{}]"),
    *("[" * 600 + "]" * 600, "[" * 20_000 + "]" * 20_000, '{"a":' * 600 + "1" + "}" * 600),
    *("null", "true", "-1", '""', "[]", "{}"),
]
FUNCTION = {"name": "f", "strict": True, "parameters": {"properties": {"a": {"type": "string"}}}}
ASK = {"role": "user", "content": [{"type": "text", "text": "ab"}]}
CALL = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
USE = {"type": "tool_use", "id": "c", "name": "f", "input": {"a": 1}}
SHAPE = {"name": "n", "schema": {"properties": {"a": {"type": "string"}}}}
NESTED = [
    (
        "/v1/chat/completions",
        {
            "messages": [ASK, {"role": "assistant", "tool_calls": [CALL]}],
            "tools": [{"type": "function", "function": FUNCTION}],
            "tool_choice": {"type": "function", "function": {"name": "f"}},
            "stream_options": {"include_usage": True},
            "stream": True,
        },
    ),
    (
        "/v1/completions",
        {
            "prompt": ["ab", [97]],
            "logit_bias": {"97": 1},
            "response_format": {"type": "json_schema", "json_schema": SHAPE},
        },
    ),
    (
        "/v1/messages",
        {
            "messages": [ASK, {"role": "assistant", "content": [USE]}],
            "tools": [{"name": "f", "input_schema": FUNCTION["parameters"]}],
            "tool_choice": {"type": "tool", "name": "f", "disable_parallel_tool_use": True},
            "thinking": {"type": "disabled"},
            "max_tokens": 2,
        },
    ),
    (
        "/v1/responses",
        {
            "input": [{"role": "user", "content": [{"type": "input_text", "text": "ab"}]}],
            "tools": [{"type": "function", **FUNCTION}],
            "text": {"format": {"type": "text"}},
            "reasoning": {"effort": None},
            "metadata": {"a": "b"},
        },
    ),
    ("/v1/embeddings", {"input": ["ab", [97]]}),
    ("/v1/score", {"prompt": "ab", "continuations": ["c", [97]]}),
    ("/tokenize", {"messages": [ASK], "chat_template_kwargs": {"a": 1}}),
    ("/detokenize", {"tokens": [97]}),
]


@pytest.mark.parametrize(("path", "good"), NESTED)
def test_any_place_with_any_json(tame, connection, path, good):
    for marked in _with_a_mark(good):
        before, after = json.dumps(marked).split(json.dumps(MARK))
        for raw in RAW:
            connection.request("POST", path, f"{before}{raw}{after}")
            response = connection.getresponse()
            body = response.read()
            assert response.status < 500, (marked, raw[:50], body)
            assert b"internal_error" not in body
            assert b"api_error" not in body


@pytest.mark.parametrize(("path", "good"), NESTED)
def test_of_a_field_that_comes_twice_the_last_counts(tame, path, good):
    """As with every JSON parser in use: what is checked is what is served."""
    first = dict.fromkeys(good, 5)
    doubled = f"{json.dumps(first)[:-1]},{json.dumps(good)[1:]}".encode()
    assert tame.post(path, doubled)[0] == tame.post(path, good)[0]
    assert tame.post(path, f"{json.dumps(good)[:-1]},{json.dumps(first)[1:]}".encode())[0] == 400


MARK = "here"


def _with_a_mark(value):
    """Copies of a JSON value, each with another place replaced by MARK."""
    yield MARK
    if isinstance(value, dict | list):
        places = value if isinstance(value, dict) else range(len(value))
        for place in places:
            for marked in _with_a_mark(value[place]):
                copy = value.copy()
                copy[place] = marked
                yield copy


def _properties(server, path):
    operation = server.get("/openapi.json")[2]["paths"][path]["post"]
    return sorted(operation["requestBody"]["content"]["application/json"]["schema"]["properties"])


HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\n"
MALFORMED = {
    "nonsense": b"\x00\x01\x02 nonsense\r\n\r\n",
    "tls": b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
    "no version": b"GET /health\r\n\r\n",
    "unknown method": b"BREW /health HTTP/1.1\r\nHost: x\r\n\r\n",
    "bad version": b"GET /health HTTP/9.9\r\nHost: x\r\n\r\n",
    "space in the path": b"GET /he alth HTTP/1.1\r\nHost: x\r\n\r\n",
    "bytes in the path": b"GET /\xff\xfe%00%ff HTTP/1.1\r\nHost: x\r\n\r\n",
    "broken escape": b"GET /v1/models/%zz%f HTTP/1.1\r\nHost: x\r\n\r\n",
    "dots": b"GET /../../etc/passwd HTTP/1.1\r\nHost: x\r\n\r\n",
    "absolute": b"GET http://other/health HTTP/1.1\r\nHost: x\r\n\r\n",
    "connect": b"CONNECT x:443 HTTP/1.1\r\nHost: x\r\n\r\n",
    "websocket": b"GET /v1/completions HTTP/1.1\r\nHost: x\r\nUpgrade: websocket\r\n"
    b"Connection: Upgrade\r\nSec-WebSocket-Key: eA==\r\nSec-WebSocket-Version: 13\r\n\r\n",
    "no host": b"GET /health HTTP/1.1\r\n\r\n",
    "header without colon": b"GET /health HTTP/1.1\r\nHost x\r\n\r\n",
    "binary header": b"GET /health HTTP/1.1\r\nHost: x\r\nX: \x00\x01\r\n\r\n",
    "huge header": b"GET /health HTTP/1.1\r\nHost: x\r\nX: " + b"a" * 600_000 + b"\r\n\r\n",
    "huge path": b"GET /" + b"a" * 600_000 + b" HTTP/1.1\r\nHost: x\r\n\r\n",
    "many headers": b"GET /health HTTP/1.1\r\nHost: x\r\n" + b"X: 1\r\n" * 5000 + b"\r\n",
    "negative length": HEAD + b"Content-Length: -5\r\n\r\n{}",
    "length in words": HEAD + b"Content-Length: many\r\n\r\n{}",
    "unicode digits": HEAD + "Content-Length: \u0663\r\n\r\n{}".encode(),
    "two lengths": HEAD + b"Content-Length: 2\r\nContent-Length: 5\r\n\r\n{}",
    "length and chunks": HEAD + b"Content-Length: 2\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
    "bad chunk": HEAD + b"Transfer-Encoding: chunked\r\n\r\nzz\r\n{}\r\n0\r\n\r\n",
    "unknown encoding": HEAD + b"Transfer-Encoding: brotli\r\n\r\n{}",
    "huge length": HEAD + b"Content-Length: 99999999999999999999999\r\n\r\n{}",
    "compressed": HEAD + b"Content-Encoding: gzip\r\nContent-Length: 4\r\n\r\n\x1f\x8b\x08\x00",
    "not utf-8": HEAD + b'Content-Length: 15\r\n\r\n{"prompt":"\xff\xfe"}',
    "surrogates": HEAD + b'Content-Length: 23\r\n\r\n{"prompt":"\\ud800\\udfff"}',
    "other type": HEAD + b"Content-Type: text/xml\r\nContent-Length: 4\r\n\r\n<a/>",
    "zeros before the length": HEAD + b"Content-Length: " + b"0" * 5000 + b"2\r\n\r\n{}",
    "expects": HEAD + b"Expect: 100-continue\r\nContent-Length: 2\r\n\r\n{}",
}


OUTCOMES = {
    "no version": 200,  # HTTP/0.9
    "absolute": 200,
    "many headers": 200,
    "huge header": 431,
    "huge path": 431,
    "broken escape": 404,
    "dots": 404,
    "websocket": 405,
    "compressed": 415,
    "expects": 100,
}
"""Statuses other than 400."""


def answered(server, raw):
    """The status that `raw` gets, in good time and never a 5xx; None if the server just closes."""
    answer = b""
    connection = socket.create_connection(("127.0.0.1", server.port), timeout=PATIENCE)
    with connection, contextlib.suppress(ConnectionError):
        connection.sendall(raw)
        answer = connection.recv(65536)
    status = int(answer.split(b" ", 2)[1]) if answer.startswith(b"HTTP/") else None
    assert status is None or status < 500, answer[:500]
    return status


@pytest.mark.parametrize("name", MALFORMED)
def test_malformed_http_is_answered(tame, name):
    status = answered(tame, MALFORMED[name])
    cut_off = status is None and name.startswith("huge")  # the answer is lost with what was unread
    assert cut_off or status == OUTCOMES.get(name, 400)


def test_a_head_without_end_is_cut_off_by_size(tame):
    with socket.create_connection(("127.0.0.1", tame.port), timeout=PATIENCE) as plain:
        plain.sendall(b"GET /health HTTP/1.1\r\nHost: x\r\nX: ")
        sent = 0
        with contextlib.suppress(ConnectionError):
            while sent < 4 << 20:
                plain.sendall(b"a" * 16384)
                sent += 16384
        assert sent < 4 << 20  # no more than the limit and what sockets buffer is taken


@pytest.fixture(scope="module")
def impatient():
    """What is never finished is soon cut off, and may be on a slow machine when it is finished."""
    with running(engine={"tame": True}, receive_seconds=1.0) as server:
        yield server
        server.wait(server.idle)


@settings(BOUNDED, max_examples=25)
@given(data=st.data())
def test_damaged_requests(impatient, data):
    """A good request with bytes changed, cut and repeated."""
    body = b'{"prompt": "ab", "max_tokens": 2, "stream": true}'
    raw = bytearray(HEAD + b"Content-Length: %d\r\n\r\n" % len(body) + body)
    for _ in range(data.draw(st.integers(1, 3))):
        at = data.draw(st.integers(0, len(raw) - 1))
        raw[at : at + data.draw(st.integers(0, 3))] = data.draw(st.binary(max_size=3))
    answered(impatient, bytes(raw))
