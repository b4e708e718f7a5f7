"""What a core leaves to its successor."""

import msgspec
import pytest
import zmq
from mock_engine import MockConfig, MockEngine

from octavo.serve.core import CoreLoop
from octavo.serve.handover import leave, left
from octavo.serve.wire import Control, Controlled, EngineState, Hello, ToApi

FIRST = EngineState()


def test_the_first_core_finds_nothing_and_the_next_one_what_was_left_last(tmp_path):
    path = tmp_path / "weights"
    assert left(path, FIRST) == FIRST
    for state in (EngineState(False, 1, "other"), EngineState(True, 2, "")):
        leave(path, state)
        assert left(path, FIRST) == state


def test_the_later_counts_of_what_was_left_and_what_was_heard(tmp_path):
    path = tmp_path / "weights"
    one, two = EngineState(False, 1, "other"), EngineState(False, 2, "third")
    leave(path, one)
    assert left(path, two) == two
    leave(path, two)
    assert left(path, one) == two


@pytest.mark.parametrize(
    "content",
    [b"", msgspec.msgpack.encode(EngineState(False, 1, "other"))[:-1], b"\xa3abc", b"\xc1", None],
    ids=["empty", "truncated", "foreign", "no_message", "folder"],
)
def test_what_cannot_be_read_stops_no_restart(content, tmp_path, caplog):
    path, heard = tmp_path / "weights", EngineState(False, 1, "other")
    path.mkdir() if content is None else path.write_bytes(content)
    assert left(path, heard) == heard
    assert "can't be read" in caplog.text


def test_a_core_that_cannot_write_goes_on(tmp_path, caplog):
    leave(tmp_path / "absent" / "weights", EngineState(False, 1, "other"))
    assert "can't be written" in caplog.text


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
                known.append(left(path, FIRST))
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
