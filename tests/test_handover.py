"""What a core leaves to its successor."""

import msgspec
import zmq
from mock_engine import MockConfig, MockEngine

from octavo.serve.core import CoreLoop
from octavo.serve.handover import leave, left
from octavo.serve.wire import Control, Controlled, EngineState, Hello, ToApi


def test_the_first_core_finds_nothing_and_the_next_one_what_was_left_last(tmp_path):
    path = tmp_path / "weights"
    assert left(path) == EngineState()
    for state in (EngineState(False, 1, "other"), EngineState(True, 2, "")):
        leave(path, state)
        assert left(path) == state


def test_a_core_that_cannot_write_goes_on(tmp_path, caplog):
    leave(tmp_path / "absent" / "weights", EngineState(False, 1, "other"))
    assert "would not know of the present weights" in caplog.text


def test_it_is_left_before_anybody_is_told(tmp_path):
    """A core killed as soon as a reload was answered had told its supervisor nothing yet."""
    context, path = zmq.Context(), tmp_path / "weights"
    router, client = context.socket(zmq.ROUTER), context.socket(zmq.DEALER)
    try:
        router.bind("inproc://core")
        client.connect("inproc://core")
        loop = CoreLoop(MockEngine(MockConfig()), router, handover=path)
        broadcast, known = loop.broadcast, []

        def overheard(message):
            if isinstance(message, EngineState):
                known.append(left(path))
            broadcast(message)

        loop.broadcast = overheard
        for message in (Hello(), Control(1, "reload", "wait", model="other")):
            client.send(msgspec.msgpack.encode(message))
            loop.receive(1000)
        heard = []
        while not any(isinstance(message, Controlled) for message in heard):
            loop.control()
            while client.poll(20):
                heard.append(msgspec.msgpack.decode(client.recv(), type=ToApi))
        assert known == [EngineState(False, 1, "other")]
    finally:
        router.close(0)
        client.close(0)
        context.term()
