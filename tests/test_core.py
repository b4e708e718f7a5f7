"""The core's loop in this process, on an inproc socket, against the mock engine."""

import msgspec
import pytest
import zmq
from mock_engine import BADADD, BOOM, NAN, MockConfig, MockEngine

from octavo.sampling.params import SamplingParams
from octavo.serve import core
from octavo.serve.types import Request
from octavo.serve.wire import Abort, Add, Events, Fatal, Hello, Ready, Rejected, Shutdown, ToApi


class Harness:
    """A core loop driven by hand and any number of clients."""

    def __init__(self, **config):
        self.context = zmq.Context()
        self.router = self.context.socket(zmq.ROUTER)
        self.router.bind("inproc://core")
        self.now = 0.0
        self.engine = MockEngine(MockConfig(**config))
        self.loop = core.CoreLoop(self.engine, self.router, clock=lambda: self.now)
        self.sockets = []

    def client(self):
        socket = self.context.socket(zmq.DEALER)
        socket.connect("inproc://core")
        self.sockets.append(socket)
        return socket

    def send(self, socket, message):
        socket.send(msgspec.msgpack.encode(message))
        self.loop.receive(1000)

    def received(self, socket):
        """Messages that have arrived, statistics left out."""
        out = []
        while socket.poll(20):
            message = msgspec.msgpack.decode(socket.recv(), type=ToApi)
            if not (isinstance(message, Events) and message.stats is not None):
                out.append(message)
        return out

    def close(self):
        for socket in (*self.sockets, self.router):
            socket.close(0)
        self.context.term()


@pytest.fixture
def make():
    made = []

    def build(**config):
        made.append(Harness(**config))
        return made[-1]

    yield build
    for harness in made:
        harness.close()


def ask(name, prompt=(97, 98), **params):
    return Request(name, tuple(prompt), SamplingParams(temperature=0, **params))


def test_hello_is_answered_with_the_model(make):
    harness = make(generation={"top_k": 5})
    client = harness.client()
    harness.send(client, Hello())
    (ready,) = harness.received(client)
    assert ready == Ready(2048, 300, (257,), {"top_k": 5})


def test_one_message_a_step_for_all_events_of_a_client(make):
    harness = make()
    one, two = harness.client(), harness.client()
    harness.send(one, Add([ask("a", max_tokens=2), ask("b", max_tokens=1)]))
    harness.send(two, Add([ask("c", max_tokens=1)]))
    assert harness.loop.step()
    (news,) = harness.received(one)
    assert [(e.request_id, e.token_ids, e.finish_reason) for e in news.events] == [
        ("a", (97,), None),
        ("b", (97,), "length"),
    ]
    (other,) = harness.received(two)
    assert [e.request_id for e in other.events] == ["c"]
    assert harness.loop.step()
    assert [e.token_ids for e in harness.received(one)[0].events] == [(98,)]
    assert not harness.engine.has_work()


def test_abort_stops_at_once_and_unknown_ids_are_ignored(make):
    harness = make()
    client = harness.client()
    harness.send(client, Add([ask("a", max_tokens=9)]))
    harness.send(client, Abort(["a", "never-was"]))
    assert not harness.engine.has_work()
    assert harness.loop.step()
    assert harness.received(client) == []


@pytest.mark.parametrize(
    ("bad", "reason"),
    [
        (ask("bad", [BADADD]), "error"),
        (ask("bad", [97] * 3000), "invalid"),
    ],
)
def test_an_add_is_all_or_nothing(make, bad, reason):
    harness = make()
    client = harness.client()
    harness.send(client, Add([ask("good"), bad]))
    (rejected,) = harness.received(client)
    assert isinstance(rejected, Rejected)
    assert (rejected.request_ids, rejected.reason) == (["good", "bad"], reason)
    assert not harness.engine.has_work()


def test_a_full_queue_is_told(make):
    harness = make(max_waiting=1)
    client = harness.client()
    harness.send(client, Add([ask("a")]))
    harness.send(client, Add([ask("b")]))
    (rejected,) = harness.received(client)
    assert (rejected.request_ids, rejected.reason) == (["b"], "full")


def test_a_step_that_raises_fails_what_is_in_flight_and_the_next_works(make):
    harness = make()
    client = harness.client()
    harness.send(client, Add([ask("a"), ask("b", [BOOM])]))
    assert harness.loop.step()
    (news,) = harness.received(client)
    assert {(e.request_id, e.finish_reason) for e in news.events} == {
        ("a", "error"),
        ("b", "error"),
    }
    assert "boom" in news.events[0].error
    harness.send(client, Add([ask("c", max_tokens=1)]))
    assert harness.loop.step()
    assert harness.received(client)[0].events[0].finish_reason == "length"


def test_steps_that_keep_failing_end_the_core(make):
    harness = make()
    client = harness.client()
    harness.send(client, Hello())
    for attempt in range(core.MAX_STEP_FAILURES):
        harness.send(client, Add([ask(f"b{attempt}", [BOOM])]))
        alive = harness.loop.step()
        assert alive == (attempt < core.MAX_STEP_FAILURES - 1)
    assert isinstance(harness.received(client)[-1], Fatal)


def test_a_failed_recovery_ends_the_core_and_still_answers(make):
    harness = make()
    client = harness.client()
    harness.send(client, Add([ask("b", [BOOM])]))
    harness.engine.recover = lambda reason: 1 / 0
    assert not harness.loop.step()
    assert harness.received(client)[0].events[0].finish_reason == "error"


def test_an_error_in_one_row_leaves_the_others(make):
    harness = make()
    client = harness.client()
    harness.send(client, Add([ask("a", max_tokens=4), ask("n", [NAN, 97], max_tokens=4)]))
    for _ in range(4):
        assert harness.loop.step()
    events = [e for message in harness.received(client) for e in message.events]
    ends = {e.request_id: e.finish_reason for e in events if e.finish_reason}
    assert ends == {"a": "length", "n": "error"}


def test_garbage_is_dropped_and_shutdown_ends_the_loop(make):
    harness = make()
    client = harness.client()
    client.send(b"\xc1 not msgpack")
    harness.send(client, Hello())
    harness.send(client, Shutdown())
    assert harness.loop.run() == 0
    assert isinstance(harness.received(client)[0], Ready)


def test_resolve_names():
    assert core.resolve("octavo.serve.core:CoreLoop.run") is core.CoreLoop.run
