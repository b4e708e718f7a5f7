"""Streams written as tokens arrive: the same bytes as through the long way, and nothing lost."""

import asyncio
import json
import socket
from types import SimpleNamespace

import msgspec
import pytest
import zmq
from hypothesis import given, settings
from hypothesis import strategies as st
from mock_engine import UNSPEAKABLE, ByteTokenizer
from mock_server import PATIENCE, running

from octavo.sampling.params import SamplingParams
from octavo.serve import client as client_module
from octavo.serve import objects
from octavo.serve.answering import EventStream, Guard
from octavo.serve.choice import Wanted
from octavo.serve.client import EngineClient
from octavo.serve.config import ServerConfig
from octavo.serve.detokenize import TokenTable
from octavo.serve.errors import ApiError
from octavo.serve.generation import Generation
from octavo.serve.metrics import Recorder
from octavo.serve.objects import Identity
from octavo.serve.prompts import Prompt
from octavo.serve.types import Request, TokenEvent
from octavo.serve.wire import Abort, Events, ToCore

IDS = ("r0", "r1")


class Wire:
    """The engine's end of the connection: hands messages out, keeps what it is sent."""

    def __init__(self):
        self.messages, self.sent = asyncio.Queue(), []

    async def recv(self, flags=0):
        if flags & zmq.NOBLOCK and self.messages.empty():
            raise zmq.Again
        return await self.messages.get()

    def send(self, payload, flags):
        self.sent.append(payload)

    def put(self, *events):
        self.messages.put_nowait(msgspec.msgpack.encode(Events(list(events))))


class Writer:
    """Ready as it is told, in turns."""

    def __init__(self, out, ready):
        self.out, self.turns, self.used = out, list(ready), False

    @property
    def ready(self):
        return self.turns.pop(0) if self.turns else True

    def write(self, body):
        assert body
        self.used = True
        self.out.append(body)


def job_on(client, **fields):
    """Two greedy samples."""
    table = TokenTable(ByteTokenizer())
    made = Generation(client, Recorder(), table, Identity("x", 1, "mock", "fp"), Wanted())
    for i in IDS:
        made.add(Prompt((97,)), Request(i, (97,), SamplingParams(max_tokens=99, **fields)))
    return made


async def streamed(groups, ready=None, **fields):
    """What a client gets of messages that arrive in turn, how it ended, and what was aborted."""
    client, wire, out = EngineClient(b"api"), Wire(), []
    client.up, client._socket = True, wire
    reader = asyncio.create_task(client._read(wire))
    job = job_on(client, **fields)
    job.start()

    async def follow():
        writer = None if ready is None else Writer(out, ready)
        async for body in job.stream(await job.first_events(), writer):
            out.append(body)
            await asyncio.sleep(0)
        assert ready != () or writer.used

    following = asyncio.create_task(follow())
    for group in groups:
        wire.put(*group)
        for _ in range(4):
            await asyncio.sleep(0)
    (ended,) = await asyncio.gather(asyncio.wait_for(following, PATIENCE), return_exceptions=True)
    reader.cancel()
    sent = [msgspec.msgpack.decode(one, type=ToCore) for one in wire.sent]
    aborted = [i for message in sent if isinstance(message, Abort) for i in message.request_ids]
    return b"".join(out), repr(ended), aborted


def plain(text):
    """The events of a text as both samples' tokens, one at a time."""
    return [TokenEvent(i, (byte,)) for byte in text.encode() for i in IDS]


def last(text):
    return [TokenEvent(i, (ord(text),), finish_reason="length") for i in IDS]


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_the_bytes_are_the_same_however_they_go_out(data):
    events = [*plain(data.draw(st.text(max_size=12))), *last("z")]
    cuts = sorted(data.draw(st.sets(st.integers(1, len(events)), max_size=8)) | {len(events)})
    groups = [events[a:b] for a, b in zip([0, *cuts], cuts)]
    ready = data.draw(st.lists(st.booleans(), max_size=20))
    stop = data.draw(st.sampled_from([(), ("\u00e9",), ("ab", "z")]))
    long_way = asyncio.run(streamed(groups, stop=stop))
    assert asyncio.run(streamed(groups, ready, stop=stop)) == long_way
    assert long_way[0].endswith(b"data: [DONE]\n\n")


def test_events_are_ascii():
    """httpx, for one, ends a line at U+2028: log-probabilities and errors had it as it is."""
    text = "a\u2028\x85é"
    writer = objects.ChunkWriter(Identity(text, 0, text, text), 0, chat=True, with_usage=False)
    logprobs = {"content": [{"token": text, "bytes": [1]}]}
    events = [
        writer.role({"x": text}),
        writer.text(text),
        writer.full(text, logprobs=logprobs, finish_reason="stop", stop_reason=text),
        writer.delta({"content": text}, logprobs=logprobs),
        objects.sse({"error": {"message": text}}),
        objects.event(text.encode("ascii", "ignore").decode(), {"delta": text}),
    ]
    for event in events:
        assert event.isascii()
        assert len(event.decode().splitlines()) == event.count(b"\n")
    full = json.loads(events[2].removeprefix(b"data: "))
    assert full["choices"][0]["logprobs"] == logprobs
    assert full["choices"][0]["stop_reason"] == full["model"] == text


def test_a_stop_string_ends_its_sample_without_news_of_its_end():
    groups = [plain("ab"), plain("cd"), [TokenEvent("r0", (ord("e"),))]]
    body, ended, aborted = asyncio.run(streamed(groups, ready=(), stop=("cd",)))
    assert (ended, sorted(aborted)) == ("None", ["r0", "r1"])
    assert body.count(b'"finish_reason":"stop"') == 2
    assert b'"text":"b"' in body
    assert b'"text":"c"' not in body


def test_a_bug_while_a_token_is_written_fails_its_request_alone():
    groups = [plain("ab"), [TokenEvent("r0", (UNSPEAKABLE,))], plain("c")]
    body, ended, aborted = asyncio.run(streamed(groups, ready=()))
    assert "detokenise fault" in ended
    assert sorted(aborted) == ["r0", "r1"]
    assert b'"text":"c"' not in body


@pytest.mark.parametrize("stage", ["_opening", "_closing", "send"])
def test_a_failure_outside_the_tokens_leaves_nothing_running(monkeypatch, stage):
    """Also where the generator of the stream has not begun, or is not asked to go on."""

    async def answered():
        client, wire = EngineClient(b"api"), Wire()
        client.up, client._socket = True, wire
        job = job_on(client)
        job.start()
        if stage == "_closing":
            job._running.clear()
        context = SimpleNamespace(config=ServerConfig(), recorder=Recorder())
        request = SimpleNamespace(receive=asyncio.Event().wait)
        stream = EventStream(job.stream([]), job, Guard(request, job.call, context))
        sent = []

        async def send(message):
            sent.append(message)
            if stage == "send":
                raise OSError

        if stage != "send":
            monkeypatch.setattr(job, stage, lambda: 1 / 0)
        try:
            await stream({}, None, send)
        except OSError:
            assert stage == "send"
        return sent, [msgspec.msgpack.decode(one, type=ToCore) for one in wire.sent]

    sent, told = asyncio.run(answered())
    assert [sorted(m.request_ids) for m in told if isinstance(m, Abort)] == [sorted(IDS)]
    assert stage == "send" or b"ZeroDivisionError" in sent[-2]["body"]


def test_an_engine_that_never_stops_talking_leaves_time_for_the_rest(monkeypatch):
    monkeypatch.setattr(client_module, "EVENTS_A_TURN", 10)

    async def flood():
        client, wire = EngineClient(b"api"), Wire()
        for _ in range(100):
            wire.put(*plain("ab"))
        reader = asyncio.create_task(client._read(wire))
        turns = 0
        while not wire.messages.empty():
            await asyncio.sleep(0)
            turns += 1
        reader.cancel()
        return turns

    assert asyncio.run(flood()) >= 100 // 3


def test_a_bug_in_handing_news_out_fails_what_is_open_and_nothing_later(monkeypatch):
    deliver, raised = EngineClient._deliver, []

    def fail_once(*args):
        if not raised:
            raised.append(1)
            raise ZeroDivisionError
        deliver(*args)

    monkeypatch.setattr(EngineClient, "_deliver", fail_once)

    async def news():
        client, wire = EngineClient(b"api"), Wire()
        client.up, client._socket = True, wire
        reader = asyncio.create_task(client._read(wire))
        broken = client.submit([Request("r0", (97,), SamplingParams())])
        wire.put(TokenEvent("r0", (98,)))
        with pytest.raises(ApiError, match="ZeroDivisionError"):
            await asyncio.wait_for(broken.next(), PATIENCE)
        whole = client.submit([Request("r1", (97,), SamplingParams())])
        wire.put(TokenEvent("r1", (98,)))
        events = await asyncio.wait_for(whole.next(), PATIENCE)
        reader.cancel()
        return events

    assert [event.token_ids for event in asyncio.run(news())] == [(98,)]


# Over a socket


@pytest.fixture(scope="module")
def server():
    with running() as it:
        yield it


def post(**fields):
    body = json.dumps({"prompt": "ab", "max_tokens": 40, "temperature": 0, "stream": True} | fields)
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n"
    return (head + body).encode()


def chunks(data):
    """The body of the first chunked answer in `data`, each chunk checked, and what follows it."""
    head, _, rest = data.partition(b"\r\n\r\n")
    assert b"transfer-encoding: chunked" in head
    out = []
    while True:
        size, _, rest = rest.partition(b"\r\n")
        piece, end, rest = rest[: int(size, 16)], *rest[int(size, 16) :].partition(b"\r\n")[1:]
        assert end == b"\r\n"
        if not piece:
            return b"".join(out), rest
        assert piece.endswith(b"\n\n")
        out.append(piece)


def test_pipelined_streams_come_whole_and_in_order(server):
    sent = post(prompt="ab") + post(prompt="cd<|slow|>") + post(prompt="ef")
    with socket.create_connection(("127.0.0.1", server.port), timeout=PATIENCE) as raw:
        raw.sendall(sent)
        data = b""
        while data.count(b"data: [DONE]\n\n\r\n0\r\n\r\n") < 3:
            piece = raw.recv(1 << 16)
            assert piece, data
            data += piece
    for letters in ("ab", "cd", "ef"):
        body, data = chunks(data)
        events = [json.loads(e[6:]) for e in body.split(b"\n\n")[:-2]]
        text = "".join(choice["text"] for event in events for choice in event["choices"])
        assert text.startswith(letters * 5)
    assert not data


def test_one_event_a_token(server):
    events = server.stream("/v1/completions", {"prompt": "ab", "max_tokens": 40, "temperature": 0})
    assert [e["choices"][0]["text"] for e in events[:-1]] == list("ab" * 20)


HELD = [{"role": "user", "content": "a<|hold|>"}]
LONG = {
    "/v1/completions": {"prompt": "a<|hold|>", "max_tokens": 1900},
    "/v1/chat/completions": {"messages": HELD, "max_tokens": 1900},
    "/v1/messages": {"messages": HELD, "max_tokens": 1900},
    "/v1/responses": {"input": HELD, "max_output_tokens": 1900},
}


@pytest.mark.parametrize("moment", ["before a byte", "in the middle", "half closed"])
@pytest.mark.parametrize("path", LONG)
def test_a_client_that_leaves_takes_its_samples_with_it(server, path, moment):
    server.wait(server.idle)
    before = server.metric("octavo:client_disconnects_total")
    body = json.dumps({**LONG[path], "stream": True}).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n".encode()
    with server.hold():
        with socket.create_connection(("127.0.0.1", server.port), timeout=PATIENCE) as raw:
            raw.sendall(head + body)
            server.wait(lambda: not server.idle())
            if moment != "before a byte":
                assert raw.recv(1 << 16).startswith(b"HTTP/1.1 200 ")
            if moment == "half closed":
                raw.shutdown(socket.SHUT_WR)
                server.wait(server.idle)
        server.wait(lambda: server.metric("octavo:client_disconnects_total") == before + 1)
        server.wait(server.idle)
    assert server.metric("vllm:num_requests_waiting") == 0
