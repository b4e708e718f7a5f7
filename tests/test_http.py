"""HTTP as it comes: old, odd, cut, slow, pipelined and malformed requests, on raw connections."""

import contextlib
import io
import json
import socket
import threading
from http.client import HTTPResponse

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mock_server import PATIENCE, running
from test_streams import LONG

BODY_LIMIT = 1 << 20
BIG = b"x" * (3 * BODY_LIMIT)


@pytest.fixture(scope="module")
def server():
    with running(max_body_bytes=BODY_LIMIT) as it:
        yield it
        it.wait(it.idle)
        assert it.good(it.complete("ab", max_tokens=2))["choices"][0]["text"] == "ab"
        assert "ASGI" not in it.log
        assert "Traceback" not in it.log


class Buffer(io.BufferedReader):
    """A connection's input, which outlives the answers read from it."""

    def close(self):
        pass


class Raw:
    """A raw connection and the answers that come over it."""

    def __init__(self, server):
        self.socket = socket.create_connection(("127.0.0.1", server.port), timeout=PATIENCE)
        self._input = Buffer(socket.SocketIO(self.socket, "r"))

    def makefile(self, mode):
        return self._input

    def send(self, data):
        with contextlib.suppress(ConnectionError):  # the answer says why
            self.socket.sendall(data)

    def answer(self, method="GET"):
        """Status, headers and body of the next answer."""
        response = HTTPResponse(self, method=method)
        response.begin()
        return response.status, response.headers, response.read()

    def rest(self):
        """What comes until the server closes the connection."""
        try:
            return self._input.read()
        except ConnectionResetError:
            return b""

    def stays_open(self):
        """Whether a next request on it is answered."""
        self.send(b"GET /version HTTP/1.1\r\nHost: x\r\n\r\n")
        return b"system_fingerprint" in self.answer()[2]


@contextlib.contextmanager
def connected(server, *sent):
    raw = Raw(server)
    with raw.socket:
        for part in sent:
            raw.send(part)
        yield raw


def call(path, version=b"1.1", head=b"", **fields):
    """A request of which `head` is one more line, or more."""
    body = json.dumps(fields).encode()
    start = b"POST %b HTTP/%b\r\nHost: x\r\nContent-Length: %d\r\n" % (
        path.encode(),
        version,
        len(body),
    )
    return start + head + b"\r\n" + body


def post(version=b"1.1", head=b"", path="/v1/completions", **fields):
    fields = {"prompt": "ab", "max_tokens": 4, "temperature": 0, **fields}
    return call(path, version, head, **fields)


def get(path=b"/health", head=b"", method=b"GET", host=b"Host: x\r\n"):
    return b"%b %b HTTP/1.1\r\n%b%b\r\n" % (method, path, host, head)


def chunked(body, *, path=b"/v1/completions", size=1 << 16):
    cut = [body[i : i + size] for i in range(0, len(body), size)]
    pieces = b"".join(b"%x\r\n%b\r\n" % (len(piece), piece) for piece in cut)
    head = b"POST %b HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n"
    return head % path + pieces + b"0\r\n\r\n"


def announced(body, path=b"/v1/completions", head=b""):
    start = b"POST %b HTTP/1.1\r\nHost: x\r\n%bContent-Length: %d\r\n\r\n"
    return start % (path, head, len(body)) + body


GOOD = b'{"prompt": "ab", "max_tokens": 4, "temperature": 0}'
H2C = b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAMAAABk\r\n"
WS = b"Connection: Upgrade\r\nUpgrade: websocket\r\nSec-WebSocket-Version: 13\r\n"
BAD_BODY = get(b"/v1/completions", b"Transfer-Encoding: chunked\r\n", b"POST") + b"zz\r\n"
CLOSE = b"Connection: close\r\n"

STAYS = {
    "chunked body": (chunked(GOOD), 200),
    "chunked byte by byte": (chunked(GOOD, size=1), 200),
    "leading blank lines": (b"\r\n\r\n" + get(), 200),
    "absolute form": (get(b"http://x:99/health"), 200),
    "absolute form of a POST": (post(path="http://x/v1/completions"), 200),
    "fragment": (get(b"/health#part"), 200),
    "query": (get(b"/health?a=b&c"), 200),
    "HEAD": (get(method=b"HEAD"), 200),
    "HEAD of what is posted": (get(b"/v1/completions", method=b"HEAD"), 405),
    "OPTIONS": (get(b"/v1/completions", method=b"OPTIONS"), 405),
    "OPTIONS of all": (get(b"*", method=b"OPTIONS"), 404),
    "DELETE": (get(b"/v1/completions", method=b"DELETE"), 405),
    "TRACE": (get(method=b"TRACE"), 405),
    "GET of what is posted": (get(b"/v1/completions"), 405),
    "POST of what is got": (announced(b"", b"/health"), 405),
    "GET with a body": (get(head=b"Content-Length: 5\r\n") + b"hello", 200),
    "many headers": (get(head=b"A: b\r\n" * 9000), 200),
    "a long header": (get(head=b"A: " + b"b" * 60_000 + b"\r\n"), 200),
    "a long path": (get(b"/" + b"a" * 60_000), 404),
    "a path with NUL": (get(b"/%00"), 404),
    "a path that is no UTF-8": (get(b"/%ff%zz"), 404),
    "an offer of HTTP/2": (post(head=H2C), 200),
    "an offer of HTTP/2 on GET": (get(head=H2C), 200),
    "an offer of WebSocket": (get(head=WS), 200),
    "no such expectation": (post(head=b"Expect: 200-maybe\r\n"), 200),
    "identity": (post(head=b"Content-Encoding: identity\r\n"), 200),
    "gzip": (post(head=b"Content-Encoding: gzip\r\n"), 415),
    "gzip of a message": (post(head=b"Content-Encoding: gzip\r\n", path="/v1/messages"), 415),
    "bad field": (post(max_tokens="x"), 400),
    "no JSON": (announced(b"{"), 400),
    "no body": (announced(b""), 400),
    "no model": (post(model="other"), 404),
    "an unread body": (announced(BIG, b"/nope"), 404),
    "an unread chunked body": (chunked(BIG, path=b"/nope"), 404),
}
CLOSES = {
    "HTTP/1.0": (post(b"1.0"), 200),
    "HTTP/1.0 to keep alive": (post(b"1.0", b"Connection: keep-alive\r\n"), 200),
    "HTTP/0.9": (b"GET /health\r\n\r\n", 200),
    "close": (post(head=CLOSE), 200),
    "close of an offer": (post(head=H2C.replace(b"Upgrade,", b"Upgrade, close,")), 200),
    "close, and one more": (get(head=CLOSE) + get(), 200),
    "close of an error": (post(head=CLOSE, max_tokens="x"), 400),
    "close of an unread body": (announced(BIG, b"/nope", CLOSE), 404),
    "a body over the limit": (announced(BIG), 413),
    "a body over the limit in chunks": (chunked(BIG), 413),
    "a body over the limit, and one more": (announced(BIG) + get(), 413),
    "TLS": (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03", 400),
    "HTTP/2": (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", 400),
    "HTTP/9.9": (b"GET / HTTP/9.9\r\n\r\n", 400),
    "half a line": (b"GET\r\n\r\n", 400),
    "no Host": (get(host=b""), 400),
    "no Host, and one more": (get(host=b"") + get(), 400),
    "no Host of a POST": (post().replace(b"Host: x\r\n", b""), 400),
    "no Host of an offer": (post(head=H2C).replace(b"Host: x\r\n", b""), 400),
    "two Hosts": (get(head=b"host: y\r\n"), 400),
    "two Hosts that agree": (get(head=b"Host: x\r\n"), 400),
    "two Hosts in HTTP/1.0": (post(b"1.0", b"Host: x\r\n"), 400),
    "no Host in HTTP/1.0": (post(b"1.0").replace(b"Host: x\r\n", b""), 200),
    "no such method": (get(method=b"BREW"), 400),
    "CONNECT": (get(b"x:80", method=b"CONNECT"), 400),
    "a negative length": (post().replace(b"Length: ", b"Length: -"), 400),
    "a signed length": (post().replace(b"Length: ", b"Length: +"), 400),
    "a huge length": (post().replace(b"Length: ", b"Length: " + b"9" * 30), 400),
    "two lengths": (post(head=b"Content-Length: 6\r\n"), 400),
    "length and chunks": (post(head=b"Transfer-Encoding: chunked\r\n"), 400),
    "another coding": (get(head=b"Transfer-Encoding: gzip\r\n", method=b"POST"), 400),
    "no chunk": (BAD_BODY, 400),
    "a bad URL": (get(b"http://[::1"), 400),
    "no path": (get(b"http://x"), 400),
    "a raw path": (get(b"/\xff\xfe"), 400),
    "a NUL": (get(head=b"Bad Header\x00: x\r\n"), 400),
    "a folded header": (get(head=b"A: b\r\n c\r\n"), 400),
    "bare newlines": (b"GET /health HTTP/1.1\nHost: x\n\n", 400),
    "an endless header": (b"GET / HTTP/1.1\r\nX: " + b"a" * 400_000, 431),
    "endless headers": (b"GET / HTTP/1.1\r\n" + b"X: a\r\n" * 60_000, 431),
    "endless blank lines": (b"\r\n" * 300_000, 431),
}  # fmt: skip


@pytest.mark.parametrize("name", [*STAYS, *CLOSES])
def test_what_a_request_gets_and_whether_its_connection_stays(server, name):
    sent, wanted = STAYS.get(name) or CLOSES[name]
    with connected(server, sent) as raw:
        status, headers, body = raw.answer("HEAD" if sent.startswith(b"HEAD") else "GET")
        assert status == wanted, body
        if status >= 400 and not name.startswith("HEAD"):
            error = json.loads(body)["error"]
            assert len(error["message"]) < 300
            assert error["type"] == "not_found_error" if status == 404 else "invalid_request_error"
        if name in STAYS:
            assert raw.stays_open()
            return
        assert (headers["connection"], raw.rest()) == ("close", b"")


@pytest.mark.parametrize("path", LONG)
def test_a_stream_over_http_1_0_is_not_chunked(server, path):
    """Its bytes are the events alone, and the connection ends behind them."""
    fields = {**LONG[path], "stream": True}
    fields |= {name: 4 for name in fields if name.startswith("max_")}
    with connected(server, call(path, b"1.0", b"Connection: keep-alive\r\n", **fields)) as raw:
        status, headers, body = raw.answer()
    assert (status, headers["transfer-encoding"], headers["connection"]) == (200, None, "close")
    with connected(server, call(path, **fields)) as raw:
        _, headers, same = raw.answer()
        assert headers["transfer-encoding"] == "chunked"
        assert raw.stays_open()
    assert body.endswith(b"\n\n")
    assert [line[:12] for line in body.split(b"\n")] == [line[:12] for line in same.split(b"\n")]


def texts(body):
    events = [json.loads(event[6:]) for event in body.split(b"\n\n")[:-2]]
    return "".join(choice["text"] for event in events for choice in event["choices"])


BEHIND = {"junk": b"JUNK\r\n\r\n", "a bad body": BAD_BODY, "no Host": get(host=b"")}


@pytest.mark.parametrize("behind", BEHIND.values(), ids=BEHIND)
@pytest.mark.parametrize("at_once", [True, False])
def test_what_came_before_junk_is_answered_first(server, behind, at_once):
    held, fast = {"prompt": "cd<|hold|>", "max_tokens": 40}, {"prompt": "ef"}
    good = post(stream=True, **held) + post(**fast)
    with server.hold(), connected(server, good + behind if at_once else good) as raw:
        if not at_once:
            server.wait(lambda: not server.idle())
            raw.send(behind)
        server.release()
        status, _, body = raw.answer()
        assert (status, texts(body)[:2], body[-14:]) == (200, "cd", b"data: [DONE]\n\n")
        status, _, body = raw.answer()
        assert json.loads(body)["choices"][0]["text"] == "efef"
        status, headers, body = raw.answer()
        assert (status, headers["connection"], raw.rest()) == (400, "close", b"")
        assert "malformed HTTP" in json.loads(body)["error"]["message"]


def test_an_endless_head_behind_a_request_is_refused_in_its_turn(server):
    slow = post(prompt="cd<|slow|>", max_tokens=40, stream=True)
    with connected(server, slow, b"GET / HTTP/1.1\r\nX: ", b"a" * 600_000) as raw:
        assert texts(raw.answer()[2]).startswith("cd")
        assert raw.answer()[0] == 431
        assert raw.rest() == b""


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_pipelines_and_leaves_takes_all_its_samples_with_it(server, stream):
    server.wait(server.idle)
    before = server.metric("octavo:client_disconnects_total")
    long = post(prompt="ab<|hold|>", max_tokens=1900, stream=stream)
    with server.hold():
        with connected(server, long * 3):
            server.wait(lambda: not server.idle())
        server.wait(server.idle)
    server.wait(lambda: server.metric("octavo:client_disconnects_total") == before + 1)


def test_more_than_the_server_reads_ahead_is_answered_too(server):
    with connected(server, post() * 50) as raw:
        for _ in range(50):
            assert json.loads(raw.answer()[2])["choices"][0]["text"] == "abab"
        assert raw.stays_open()


def test_the_body_is_asked_for_when_it_is_expected_to_be(server):
    head, _, body = post(head=b"Expect: 100-continue\r\n").partition(b"\r\n\r\n")
    with connected(server, head + b"\r\n\r\n") as raw:
        assert raw.socket.recv(25) == b"HTTP/1.1 100 Continue\r\n\r\n"
        raw.send(body)
        assert raw.answer()[0] == 200
        assert raw.stays_open()


@pytest.mark.parametrize(
    ("path", "length", "status"), [("/nope", 9, 404), ("/v1/completions", 9**9, 413)]
)
def test_a_refusal_instead_of_100_ends_the_connection(server, path, length, status):
    """Nobody could tell the body, which may come or not, from a next request."""
    head = b"POST %b HTTP/1.1\r\nHost: x\r\nExpect: 100-continue\r\nContent-Length: %d\r\n\r\n"
    with connected(server, head % (path.encode(), length)) as raw:
        answer, headers, _ = raw.answer()
        assert (answer, headers["connection"]) == (status, "close")


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_no_bytes_bring_a_5xx_or_a_hang(server, data):
    good = b'POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 15\r\n\r\n{"prompt": "a"}'
    cut = data.draw(st.integers(0, len(good)))
    junk = data.draw(st.binary(max_size=20))
    sent = good[:cut] + junk + good[data.draw(st.integers(cut, len(good))) :]
    with connected(server, sent) as raw:
        raw.socket.shutdown(socket.SHUT_WR)
        out = raw.rest()
    statuses = {line[9:12] for line in out.split(b"\n") if line.startswith(b"HTTP/1.1 ")}
    assert not any(status.startswith(b"5") for status in statuses), (sent, out)


# Clients that are slow to send

STALLED = {
    "nothing": (b"", None),
    "half a line": (b"POST /v1/completions HTT", 408),
    "half a head": (b"POST /v1/completions HTTP/1.1\r\nHost: x\r\n", 408),
    "half a body": (announced(GOOD)[:-5], 408),
    "half a chunked body": (chunked(GOOD, size=20)[:-15], 408),
    "no last chunk": (chunked(GOOD)[:-5], 408),
    "half of a body that is not read": (announced(GOOD, b"/nope")[:-5], 404),
    "nothing of a body over the limit": (announced(BIG)[: -len(BIG)], 413),
}
TRICKLES = {
    "a head": (b"GET /health HTTP/1.1\r\nX: ", b"a", 408),
    "headers": (b"GET /health HTTP/1.1\r\n", b"X: a\r\n", 408),
    "a body": (announced(GOOD + b" " * 999)[:-999], b" ", 408),
    "a chunked body": (chunked(GOOD)[:-5], b"1\r\n \r\n", 408),
    "a body that is not read": (announced(BIG, b"/nope")[: -len(BIG)], b"x", 404),
}


def test_who_sends_too_slowly_is_cut_off_but_not_who_rests():
    """All at once, with seconds to spare for a busy machine."""
    ended = threading.Event()

    def trickle(raw, piece):
        while not ended.wait(0.2):
            raw.send(piece)

    with (
        running(receive_seconds=5.0, max_body_bytes=BODY_LIMIT) as server,
        contextlib.ExitStack() as stack,
    ):
        rests = stack.enter_context(connected(server))
        assert rests.stays_open()
        open_ = {}
        for name, (sent, *piece, status) in {**STALLED, **TRICKLES}.items():
            raw = stack.enter_context(connected(server, sent))
            open_[name] = raw, status
            for one in piece:
                threading.Thread(target=trickle, args=(raw, one), daemon=True).start()
        try:
            for name, (raw, status) in open_.items():
                if status is not None:
                    said, _, body = raw.answer()
                    assert (name, said) == (name, status)
                    if said == 408:
                        assert json.loads(body)["error"]["type"] == "timeout_error"
                assert raw.rest() == b""
        finally:
            ended.set()
        assert rests.stays_open()
        assert server.status() == "ready"
