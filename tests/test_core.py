"""The core's loop in this process, on an inproc socket, against the mock engine."""

import msgspec
import pytest
import zmq
from mock_engine import BADADD, BOOM, NAN, MockConfig, MockEngine

from octavo.sampling.params import SamplingParams
from octavo.serve import core
from octavo.serve.types import Request
from octavo.serve.wire import (
    Abort,
    Compiling,
    EngineState,
    Events,
    Fatal,
    Gone,
    Hello,
    Ready,
    Rejected,
    Shutdown,
    ToApi,
    add,
)


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

    def client(self, identity=None):
        socket = self.context.socket(zmq.DEALER)
        if identity:
            socket.set(zmq.ROUTING_ID, identity)
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
    state, ready = harness.received(client)
    assert ready == Ready(2048, 300, (257,), {"top_k": 5})
    assert state == EngineState(paused=False, weights_epoch=0, model="")


def test_one_message_a_step_for_all_events_of_a_client(make):
    harness = make()
    one, two = harness.client(), harness.client()
    harness.send(one, add([ask("a", max_tokens=2), ask("b", max_tokens=1)]))
    harness.send(two, add([ask("c", max_tokens=1)]))
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
    harness.send(client, add([ask("a", max_tokens=9)]))
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
    harness.send(client, add([ask("good"), bad]))
    (rejected,) = harness.received(client)
    assert isinstance(rejected, Rejected)
    assert (rejected.request_ids, rejected.reason) == (["good", "bad"], reason)
    assert not harness.engine.has_work()


def test_a_full_queue_is_told(make):
    harness = make(max_waiting=1)
    client = harness.client()
    harness.send(client, add([ask("a")]))
    harness.send(client, add([ask("b")]))
    (rejected,) = harness.received(client)
    assert (rejected.request_ids, rejected.reason) == (["b"], "full")


def test_a_step_that_raises_fails_what_is_in_flight_and_the_next_works(make):
    harness = make()
    client = harness.client()
    harness.send(client, add([ask("a"), ask("b", [BOOM])]))
    assert harness.loop.step()
    (news,) = harness.received(client)
    assert {(e.request_id, e.finish_reason) for e in news.events} == {
        ("a", "error"),
        ("b", "error"),
    }
    assert "boom" in news.events[0].error
    harness.send(client, add([ask("c", max_tokens=1)]))
    assert harness.loop.step()
    assert harness.received(client)[0].events[0].finish_reason == "length"


def test_steps_that_keep_failing_end_the_core(make):
    harness = make()
    client = harness.client()
    harness.send(client, Hello())
    for attempt in range(core.MAX_STEP_FAILURES):
        harness.send(client, add([ask(f"b{attempt}", [BOOM])]))
        alive = harness.loop.step()
        assert alive == (attempt < core.MAX_STEP_FAILURES - 1)
    assert isinstance(harness.received(client)[-1], Fatal)


def test_a_failed_recovery_ends_the_core_and_says_so(make):
    harness = make()
    client = harness.client()
    harness.send(client, Hello())
    harness.send(client, add([ask("b", [BOOM])]))
    harness.engine.recover = lambda reason: 1 / 0
    assert not harness.loop.step()
    assert isinstance(harness.received(client)[-1], Fatal)


def test_the_requests_of_a_process_that_is_gone_stop(make):
    harness = make()
    one, two, supervisor = harness.client(b"one"), harness.client(b"two"), harness.client()
    harness.send(one, add([ask("a", max_tokens=9), ask("b", max_tokens=9)]))
    harness.send(two, add([ask("c", max_tokens=9)]))
    harness.send(supervisor, Gone(b"one"))
    assert list(harness.engine.rows) == ["c"]
    assert harness.loop.step()
    assert harness.received(one) == []
    assert [e.request_id for m in harness.received(two) for e in m.events] == ["c"]


def test_what_a_process_said_counts_no_more_once_it_is_known_to_be_gone(make):
    harness = make()
    one, supervisor = harness.client(b"one"), harness.client()
    harness.send(supervisor, Gone(b"one"))
    harness.send(one, Hello())
    harness.send(one, add([ask("a", max_tokens=9)]))
    assert not harness.engine.rows
    assert not harness.loop._clients


def test_samples_of_a_prompt_send_it_once_and_share_it_in_the_core(make):
    harness = make()
    client = harness.client()
    prompt = tuple(range(100)) * 10
    requests = [Request(f"r{i}", prompt, SamplingParams(max_tokens=1)) for i in range(20)]
    message = add([*requests, ask("other", max_tokens=1)])
    assert [len(sent) for sent in message.prompts] == [1000, 2]
    assert not any(sent.prompt for sent in message.requests)
    harness.send(client, message)
    held = [row.request.prompt for row in harness.engine.rows.values()]
    assert held == [prompt] * 20 + [(97, 98)]
    assert len({id(p) for p in held}) == 2


def test_a_compile_is_announced_before_the_core_falls_silent(make):
    harness = make()
    client = harness.client()
    harness.send(client, Hello())
    harness.received(client)
    harness.engine.announce_compile()
    assert harness.received(client) == [Compiling()]


def test_an_error_in_one_row_leaves_the_others(make):
    harness = make()
    client = harness.client()
    harness.send(client, add([ask("a", max_tokens=4), ask("n", [NAN, 97], max_tokens=4)]))
    for _ in range(4):
        assert harness.loop.step()
    events = [e for message in harness.received(client) for e in message.events]
    ends = {e.request_id: e.finish_reason for e in events if e.finish_reason}
    assert ends == {"a": "length", "n": "error"}


GARBAGE = [
    [b"\xc1 not msgpack"],
    [b""],
    [b"two", b"frames"],
    [msgspec.msgpack.encode({"type": "add", "requests": [], "prompts": 1, "places": []})],
]


@pytest.mark.parametrize("frames", GARBAGE)
def test_what_cannot_be_read_is_refused_and_the_core_goes_on(make, frames):
    harness = make()
    client = harness.client()
    client.send_multipart(frames)
    harness.loop.receive(1000)
    (refused,) = harness.received(client)
    assert (refused.request_ids, refused.reason) == ([], "error")
    harness.send(client, add([ask("a", max_tokens=1)]))
    assert harness.loop.step()
    assert harness.received(client)[0].events[0].finish_reason == "length"


@pytest.mark.parametrize("places", [[], [1], [-1]])
def test_an_add_without_its_prompt_is_refused(make, places):
    harness = make()
    client = harness.client()
    message = add([ask("a")])
    message.places = places
    harness.send(client, message)
    (refused,) = harness.received(client)
    assert (refused.request_ids, refused.reason) == (["a"], "error")


def test_shutdown_ends_the_loop(make):
    harness = make()
    client = harness.client()
    harness.send(client, Hello())
    harness.send(client, Shutdown())
    assert harness.loop.run() == 0
    assert isinstance(harness.received(client)[1], Ready)


def test_resolve_names():
    assert core.resolve("octavo.serve.core:CoreLoop.run") is core.CoreLoop.run


def test_figures_follow_what_came_and_went_in_one_turn(make):
    """Before the next report is due, so that whoever looks behind an answer sees it counted."""
    harness = make()
    harness.now = -1.0
    client = harness.client()
    for message in (Hello(), add([ask("a", max_tokens=1)]), Shutdown()):
        client.send(msgspec.msgpack.encode(message))
    assert harness.loop.run() == 0
    messages = []
    while client.poll(200):
        messages.append(msgspec.msgpack.decode(client.recv(), type=ToApi))
    assert messages[-1].stats.generated_tokens == 1
    assert messages[-1].stats.running == 0


def test_who_arrives_while_the_device_is_busy_goes_with_the_next_dispatch(make, monkeypatch):
    harness = make()
    client = harness.client(b"api")
    harness.send(client, Hello())
    order, left = [], [0.5, 0.0004, 0.00005]
    added, step = harness.engine.add, harness.engine.step
    monkeypatch.setattr(harness.engine, "slack", lambda: left.pop(0) if left else 0.0)
    monkeypatch.setattr(harness.engine, "add", lambda r: (order.append("add"), added(r)))
    monkeypatch.setattr(harness.engine, "step", lambda: (order.append("step"), step())[1])
    client.send(msgspec.msgpack.encode(add([ask("late", max_tokens=1)])))
    harness.loop.await_newcomers()
    assert (order, left) == (["add"], [])
    harness.loop.step()
    assert order == ["add", "step"]
