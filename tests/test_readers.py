"""Clients that stop reading, or leave when all but the end has come, on every endpoint."""

import contextlib
import errno
import json
import socket
import struct
from concurrent.futures import ThreadPoolExecutor
from http.client import HTTPResponse

import pytest
from mock_server import PATIENCE, running
from test_server_life import exit_code
from test_streams import LONG

from octavo.serve.call import MAX_UNREAD_TOKENS

MORE = 200_000
"""Tokens whose events no socket's buffers hold."""


@pytest.fixture(scope="module")
def server():
    with running(engine={"max_model_len": 2 * MORE}, send_seconds=1.0) as it:
        yield it
        it.wait(it.idle)
        assert it.good(it.complete("ab", max_tokens=2))["choices"][0]["text"] == "ab"
        assert "Traceback" not in it.log


def fields_of(path, tokens, **more):
    """An endpoint's body, for so many tokens."""
    limit = next(name for name in LONG[path] if name.startswith("max_"))
    return {**LONG[path], limit: tokens, **more}


@contextlib.contextmanager
def sent(server, path, body, *, small=False):
    """A connection on which a request was sent; a small one takes little at a time."""
    data = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(data)}\r\n\r\n"
    with socket.socket() as raw:
        raw.settimeout(PATIENCE)
        if small:
            raw.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        raw.connect(("127.0.0.1", server.port))
        raw.sendall(head.encode() + data)
        yield raw


def was_reset(raw):
    return raw.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR) == errno.ECONNRESET


def others_are_served(server):
    return server.good(server.complete("ab"))["choices"][0]["text"] == "abababab"


@pytest.mark.parametrize("path", LONG)
def test_who_stops_reading_a_stream_is_cut_off_and_its_sample_ends(server, path):
    body = fields_of(path, MORE, stream=True)
    before = server.metric("octavo:client_disconnects_total")
    with sent(server, path, body, small=True) as raw:
        server.wait(lambda: others_are_served(server) and was_reset(raw), 4 * PATIENCE)
        server.wait(server.idle)
    ended = server.metric("octavo:client_disconnects_total") - before
    assert ended <= 1  # none if too much waited for it first


def test_who_stops_reading_a_whole_answer_is_cut_off(server):
    body = {"prompt": "ab", "n": 12, "max_tokens": 1500, "logprobs": 20, "temperature": 1}
    with sent(server, "/v1/completions", body, small=True) as raw:
        server.wait(lambda: others_are_served(server) and was_reset(raw), 4 * PATIENCE)
    server.wait(server.idle)


def test_a_large_whole_answer_comes_whole_to_who_reads_slowly():
    """Slower than send_seconds in all, but never still for so long."""
    body = {"prompt": "ab", "n": 4, "max_tokens": 1500, "logprobs": 20, "seed": 1}
    with running() as server, sent(server, "/v1/completions", body, small=True) as raw:
        data = b""
        while b"\r\n\r\n" not in data:
            data += raw.recv(1 << 12)
        head, _, data = data.partition(b"\r\n\r\n")
        (line,) = (line for line in head.split(b"\r\n") if line.startswith(b"content-length"))
        while len(data) < int(line.split(b": ")[1]):
            piece = raw.recv(1 << 16)
            assert piece
            data += piece
    choices = json.loads(data)["choices"]
    assert [len(choice["logprobs"]["tokens"]) for choice in choices] == [1500] * 4


@pytest.mark.parametrize("path", LONG)
def test_who_leaves_a_whole_answer_takes_its_samples_with_it(server, path):
    server.wait(server.idle)
    before = server.metric("octavo:client_disconnects_total")
    with server.hold():
        with sent(server, path, fields_of(path, 1900)):
            server.wait(lambda: not server.idle())
        server.wait(lambda: server.metric("octavo:client_disconnects_total") == before + 1)
        server.wait(server.idle)


LAST = {
    "/v1/completions": b'"length"',
    "/v1/chat/completions": b'"length"',
    "/v1/messages": b'"max_tokens"',
    "/v1/responses": b"response.incomplete",
}
"""What is said at a sample's end."""


@pytest.mark.parametrize("whole", [True, False])
@pytest.mark.parametrize("path", LONG)
def test_who_leaves_at_the_last_event_harms_nobody(server, path, whole):
    """By a reset, as soon as the sample's end is seen."""
    body = fields_of(path, 3, stream=not whole)
    end = b"HTTP/1.1 200" if whole else LAST[path]
    with sent(server, path, body) as raw:
        data = b""
        while end not in data:
            piece = raw.recv(1)
            assert piece
            data += piece
        raw.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    server.wait(server.idle)
    assert others_are_served(server)


def test_a_request_that_takes_too_long_ends_on_each_endpoint():
    """All at once, streamed and whole: the held answers get no further than their first tokens."""
    asked = [(path, stream) for path in LONG for stream in (True, False)]

    def outcome(path, stream):
        status, _, body = server.post(path, fields_of(path, 1900, stream=stream))
        return status, body if stream else json.dumps(body).encode()

    with running(request_timeout=5.0) as server, ThreadPoolExecutor(len(asked)) as pool:
        with server.hold():
            outcomes = list(pool.map(outcome, *zip(*asked)))
        for (path, stream), (status, body) in zip(asked, outcomes):
            assert (path, stream, status) == (path, stream, 200 if stream else 408)
            assert b"took longer than 5 s" in body
            assert not stream or body.count(b"event") or body.endswith(b"data: [DONE]\n\n")
        server.wait(server.idle)


def test_a_server_that_ends_says_so_to_who_still_sends_and_waits_for_no_reader():
    """Not before the drain's deadline, and not with the words of a fault."""
    with (
        running(engine={"max_model_len": 2 * MORE}, drain_seconds=0.3) as server,
        contextlib.ExitStack() as connections,
    ):
        stream = fields_of("/v1/completions", MORE, stream=True, n=16, temperature=1)
        connections.enter_context(sent(server, "/v1/completions", stream, small=True))
        enough = 16 * MAX_UNREAD_TOKENS  # more than the kernel takes
        server.wait(lambda: server.metric("vllm:generation_tokens_total") > enough)
        halves = {path: connections.enter_context(half_sent(server, path)) for path in LONG}
        server.signal()
        for path, raw in halves.items():
            answer = HTTPResponse(raw)
            answer.begin()
            error = json.loads(answer.read())["error"]
            assert (answer.status, error["message"]) == (503, "the server is shutting down"), path
            assert ("code" in error) == (path != "/v1/messages")
        assert exit_code(server) == 0
        assert "ASGI" not in server.log  # what uvicorn says of faults


@contextlib.contextmanager
def half_sent(server, path):
    """A connection on which the server waits for a body: it has asked for it."""
    with socket.create_connection(("127.0.0.1", server.port), PATIENCE) as raw:
        head = (
            f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Length: 9\r\nExpect: 100-continue\r\n\r\n"
        )
        raw.sendall(head.encode())
        asked = b"HTTP/1.1 100 Continue\r\n\r\n"
        assert raw.recv(len(asked), socket.MSG_WAITALL) == asked
        yield raw
