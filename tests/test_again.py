"""Whole answers that an engine had begun when it died: the next one makes them anew, unseen."""

import asyncio
import os
import signal
from concurrent.futures import ThreadPoolExecutor

import msgspec
import numpy as np
import pytest
from mock_server import running
from test_server_life import start_stream
from test_streams import Wire

from octavo.sampling.params import SamplingParams
from octavo.serve import client as client_module
from octavo.serve.client import EngineClient
from octavo.serve.errors import ApiError
from octavo.serve.types import Request, TokenEvent
from octavo.serve.wire import (
    Abort,
    Add,
    EngineNews,
    EngineState,
    Ready,
    Rejected,
    ToCore,
    requests_of,
)


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    flag = tmp_path_factory.mktemp("flags") / "once"
    settings = {"max_engine_restarts": 100, "engine_restart_window": 1.0, "request_timeout": 120.0}
    with running(engine={"flag_file": str(flag)}, **settings) as it:
        it.flag = flag
        yield it
        it.wait(it.idle)
        assert "Traceback" not in it.log


PROMPT = "<|half|>" + "abcdefgh" * 5
"""An engine kills itself when it has made three tokens, if it is the first one."""

TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
SAY = [{"role": "user", "content": PROMPT}]
WHOLE = {
    "greedy": ("/v1/completions", {"prompt": PROMPT, "temperature": 0, "max_tokens": 30}),
    "samples": (
        "/v1/completions",
        {"prompt": PROMPT, "n": 3, "seed": 5, "temperature": 1, "max_tokens": 30, "logprobs": 2},
    ),
    "ids and echo": (
        "/v1/completions",
        {"prompt": [PROMPT, "xy"], "temperature": 0, "max_tokens": 30, "echo": True}
        | {"return_token_ids": True, "prompt_logprobs": 1},
    ),
    "stops": (
        "/v1/completions",
        {"prompt": PROMPT, "n": 2, "temperature": 0, "max_tokens": 60, "stop": ["hab", "x"]},
    ),
    "chat": (
        "/v1/chat/completions",
        {"messages": SAY, "temperature": 0, "max_tokens": 30, "logprobs": True},
    ),
    "tools": (
        "/v1/chat/completions",
        {"messages": SAY, "temperature": 0, "max_tokens": 30, "tools": [TOOL]},
    ),
    "a schema": (
        "/v1/chat/completions",
        {"messages": SAY, "temperature": 0, "max_tokens": 90}
        | {"response_format": {"type": "json_object"}},
    ),
    "messages": ("/v1/messages", {"messages": SAY, "temperature": 0, "max_tokens": 30}),
    "responses": (
        "/v1/responses",
        {"input": SAY, "temperature": 0, "max_output_tokens": 30, "top_logprobs": 2}
        | {"include": ["message.output_text.logprobs"]},
    ),
}
VARYING = ("id", "created", "created_at", "completed_at", "call_id")


def essence(value):
    """An answer without its ids and times."""
    if isinstance(value, dict):
        return {name: essence(one) for name, one in value.items() if name not in VARYING}
    return [essence(one) for one in value] if isinstance(value, list) else value


def kill(server):
    """Kill the engine and wait for its successor."""
    before = server.metric("octavo:engine_restarts_total")
    os.kill(server.core_pid(), signal.SIGKILL)
    server.wait(lambda: server.metric("octavo:engine_restarts_total") == before + 1)
    server.wait(lambda: server.status() == "ready")


@pytest.mark.parametrize("name", WHOLE)
def test_a_whole_answer_outlives_the_engine_that_began_it(server, name):
    path, body = WHOLE[name]
    server.flag.touch()
    start = measured(server)
    undisturbed = server.good(server.post(path, body))
    server.flag.unlink()
    before, middle = server.metric("octavo:engine_restarts_total"), measured(server)
    assert essence(server.good(server.post(path, body))) == essence(undisturbed)
    assert server.metric("octavo:engine_restarts_total") == before + 1
    assert (measured(server) - middle == middle - start).all()  # no token's time is counted again


def measured(server):
    """Tokens, samples and times of them in the metrics."""
    names = ("time_to_first_token_seconds", "inter_token_latency_seconds")
    names += ("e2e_request_latency_seconds", "request_generation_tokens")
    return np.array([server.metric(f"vllm:{name}_count") for name in names])


def test_a_stream_does_not(server):
    with server.hold():
        connection, response = start_stream(server)
        os.kill(server.core_pid(), signal.SIGKILL)
    assert b"engine process has ended" in response.read()
    connection.close()
    server.wait(lambda: server.status() == "ready")


LONG = {"prompt": "ab<|slow|>", "max_tokens": 1900}


def test_it_is_begun_anew_once(server):
    with ThreadPoolExecutor(1) as pool:
        future = pool.submit(server.post, "/v1/completions", LONG)
        server.wait(lambda: not server.idle())
        kill(server)
        server.wait(lambda: not server.idle())
        kill(server)
    status, _, body = future.result()
    assert (status, body["error"]["type"]) == (500, "server_error")


def test_a_client_that_leaves_meanwhile_is_not_served_anew(server):
    connection = server.connect()
    connection.request("POST", "/v1/completions", msgspec.json.encode(LONG))
    server.wait(lambda: not server.idle())
    gone = server.metric("octavo:client_disconnects_total")
    kill(server)
    server.wait(lambda: not server.idle())
    connection.close()
    server.wait(lambda: server.metric("octavo:client_disconnects_total") == gone + 1)
    server.wait(server.idle)


# The client alone, with engines that a test speaks for


class Engines:
    """The lives of an engine, as one API process sees them."""

    def __init__(self, monkeypatch):
        self.wires = []
        monkeypatch.setattr(client_module, "connect", self._connect)
        self.client = EngineClient(b"api")

    def _connect(self, address, identity):
        wire = Wire()
        wire.close = lambda: None
        self.wires.append(wire)
        return wire

    async def live(self, epoch=0):
        self.client.on_news(EngineNews("ready", address="a"))
        for message in (EngineState(weights_epoch=epoch), Ready(100, 300, (2,))):
            self.wires[-1].messages.put_nowait(msgspec.msgpack.encode(message))
        await self.settle()

    async def die(self, phase="restarting"):
        self.client.on_news(EngineNews(phase, reason="it has ended"))
        await self.settle()

    async def say(self, *events):
        self.wires[-1].put(*events)
        await self.settle()

    async def settle(self):
        for _ in range(5):
            await asyncio.sleep(0)

    def told(self, kind):
        """Ids of the requests in messages of a kind to the present engine."""
        sent = [msgspec.msgpack.decode(one, type=ToCore) for one in self.wires[-1].sent]
        told = [one for one in sent if isinstance(one, kind)]
        if kind is Add:
            return [(r.request_id, r.readmitted) for one in told for r in requests_of(one)]
        return [i for one in told for i in one.request_ids]


def two():
    return [Request(i, (97,), SamplingParams(), sample_index=n) for n, i in enumerate(("r0", "r1"))]


def end(request_id):
    return TokenEvent(request_id, (98,), finish_reason="length")


def played(monkeypatch, play):
    """Run `play(engines)` to its end."""

    async def run():
        engines = Engines(monkeypatch)
        await engines.live()
        assert await asyncio.wait_for(play(engines), 20) is None
        engines.client.disconnect()

    asyncio.run(run())


def test_samples_that_have_ended_stay(monkeypatch):
    async def play(engines):
        over = []
        call = engines.client.submit(two(), over.extend)
        await engines.say(TokenEvent("r0", (97,)), TokenEvent("r1", (97,)), end("r0"))
        await engines.die()
        assert over == ["r1"]
        await engines.live()
        assert engines.told(Add) == [("r1", True)]
        assert [event.request_id for event in await call.next()] == ["r0", "r0"]
        await engines.say(end("r1"))
        assert await call.next() == [end("r1")]
        assert engines.client.in_flight == 0

    played(monkeypatch, play)


def test_they_stay_for_samples_of_the_same_weights_alone(monkeypatch):
    async def play(engines):
        call = engines.client.submit(two(), lambda ids: None)
        await engines.say(end("r0"), TokenEvent("r1", (97,)))
        await engines.die()
        await engines.live(epoch=1)
        await engines.say(TokenEvent("r1", (97,)))
        with pytest.raises(ApiError, match="weights were replaced"):
            await call.next()
        assert engines.told(Abort) == ["r1"]

    played(monkeypatch, play)


def test_an_answer_names_the_weights_of_the_engine_that_made_it(monkeypatch):
    async def play(engines):
        call = engines.client.submit(two(), lambda ids: None)
        await engines.say(TokenEvent("r0", (97,)))
        await engines.die()
        await engines.live(epoch=3)
        await engines.say(end("r0"), end("r1"))
        assert len(await call.next()) == 2
        assert call.epoch == 3

    played(monkeypatch, play)


@pytest.mark.parametrize("how", ["a stream", "a second time", "no engine any more"])
def test_what_is_not_begun_anew_fails(monkeypatch, how):
    async def play(engines):
        call = engines.client.submit(two(), None if how == "a stream" else lambda ids: None)
        await engines.say(TokenEvent("r0", (97,)))
        if how == "a second time":
            await engines.die()
            await engines.live()
        await engines.die("failed" if how == "no engine any more" else "restarting")
        with pytest.raises(ApiError, match="it has ended"):
            await call.next()
        await engines.live()
        assert engines.told(Add) == []

    played(monkeypatch, play)


@pytest.mark.parametrize("moment", ["before", "after"])
def test_what_is_over_meanwhile_is_not_sent_again(monkeypatch, moment):
    """A time-out or a hang-up, while there is no engine."""

    async def play(engines):
        call = engines.client.submit(two(), lambda ids: None)
        await engines.say(TokenEvent("r0", (97,)))
        if moment == "before":
            call.finish("r0")
        await engines.die()
        if moment == "after":
            call.fail(ApiError(408, "too long"))
        await engines.live()
        assert engines.told(Add) == ([("r1", True)] if moment == "before" else [])
        assert engines.client.in_flight == (moment == "before")

    played(monkeypatch, play)


def test_a_new_engine_may_refuse_it(monkeypatch):
    async def play(engines):
        call = engines.client.submit(two(), lambda ids: None)
        await engines.say(TokenEvent("r0", (97,)))
        await engines.die()
        await engines.live()
        refusal = Rejected(["r0", "r1"], "invalid", "not with these weights")
        engines.wires[-1].messages.put_nowait(msgspec.msgpack.encode(refusal))
        await engines.settle()
        with pytest.raises(ApiError, match="not with these weights"):
            await call.next()

    played(monkeypatch, play)
