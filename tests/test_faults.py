"""Faults on the API side: bugs in a stage, bad peers, full disks, wall clocks. The server stays."""

import ast
import asyncio
import json
import logging
import os
import socket
import sys
from pathlib import Path

import pytest
from mock_engine import UNSPEAKABLE
from mock_server import PATIENCE, running
from test_server_life import exit_code, start_stream

from octavo.serve import call as call_module
from octavo.serve import logs
from octavo.serve.call import TAKE_EVENTS
from octavo.serve.client import EngineClient
from octavo.serve.errors import ApiError
from octavo.serve.types import Request, TokenEvent

SERVE = Path(__file__).parent.parent / "serve"


@pytest.fixture(scope="module")
def server():
    with running() as it:
        yield it
        it.wait(it.idle)
        assert it.good(it.complete("ab", max_tokens=2))["choices"][0]["text"] == "ab"
        assert "never retrieved" not in it.log


# A bug in a stage


def in_stage(server, stage, **fields):
    """The answer to a request in whose `stage` there is a bug."""
    if stage == "tokenise":
        return server.complete("fault:tokenise", **fields)
    if stage == "template":
        return server.chat("hi", chat_template="bug", **fields)
    return server.complete([97, 98, UNSPEAKABLE], **fields)


@pytest.mark.parametrize("stage", ["tokenise", "template", "detokenise"])
def test_a_bug_in_a_stage_fails_its_request_alone(server, stage):
    with server.hold():
        connection, response = start_stream(server, max_tokens=15)
        status, _, body = in_stage(server, stage)
    assert (status, body["error"]["type"]) == (500, "server_error")
    assert "RuntimeError" in body["error"]["message"]
    assert b'"finish_reason":"length"' in response.read()
    connection.close()
    server.wait(server.idle)


def test_a_bug_while_streaming_is_an_error_event(server):
    body = {"prompt": [97, 98, UNSPEAKABLE], "temperature": 0}
    *_, error, done = server.stream("/v1/completions", body)
    assert (error["error"]["type"], done) == ("server_error", "[DONE]")
    server.wait(server.idle)


# Clients that stand still


def test_a_client_that_stops_reading_is_cut_off_and_its_request_ends():
    body = {"prompt": "z" * 50, "max_tokens": 1900, "stream": True, "temperature": 1, "n": 30}
    data = json.dumps(body).encode()
    head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % len(data)
    with running(send_seconds=1.0) as server, socket.socket() as stalled:
        stalled.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        stalled.connect(("127.0.0.1", server.port))
        stalled.sendall(head + data)
        server.wait(lambda: server.metric("octavo:client_disconnects_total") == 1)
        server.wait(server.idle)


def test_a_backlog_is_answered_in_bites_between_which_others_have_their_turn():
    engine = EngineClient(b"api")
    engine.up = True
    call = engine.submit([Request("a", (1,), None)])
    sent = [TokenEvent("a", (i,)) for i in range(3 * TAKE_EVENTS + 1)]
    for event in sent:
        call.put(event)
    turns = []

    async def others():
        while True:
            turns.append(len(got))
            await asyncio.sleep(0)

    got = []

    async def read():
        other = asyncio.create_task(others())
        while len(got) < len(sent):
            got.extend(await call.next())
        other.cancel()

    asyncio.run(read())
    assert got == sent
    assert turns == [0, TAKE_EVENTS, 2 * TAKE_EVENTS]


def test_an_unread_answer_is_bounded(monkeypatch):
    monkeypatch.setattr(call_module, "MAX_UNREAD_TOKENS", 10)
    aborted = []
    engine = EngineClient(b"api")
    engine.up = True
    monkeypatch.setattr(engine, "abort", aborted.extend)
    call = engine.submit([Request("a", (1,), None), Request("b", (1,), None)])
    while not aborted:
        call.put(TokenEvent("a", (5,)))
        assert len(call._events) <= 20
    assert sorted(aborted) == ["a", "b"]
    with pytest.raises(ApiError, match="was not read") as refusal:
        call.next().send(None)
    assert refusal.value.status == 408


# Logs that can't be written


def test_a_full_disk_takes_no_server_down():
    with open("/dev/full", "w") as full, running(stderr=full, log_level="debug") as server:
        assert server.complete("<|boom|>")[0] == 500  # logs a traceback in the core
        assert in_stage(server, "detokenise")[0] == 500  # and one here
        assert server.complete("a")[0] == 200
        server.signal()
        assert exit_code(server) == 0


@pytest.mark.parametrize("closed", [True, False], ids=["closed", "never read"])
def test_a_log_pipe_without_a_reader_takes_no_server_down(closed):
    reader, writer = os.pipe()
    if closed:
        os.close(reader)
    with running(stderr=writer, log_level="debug") as server:
        os.close(writer)
        for _ in range(60):
            assert in_stage(server, "detokenise")[0] == 500
        assert server.complete("a")[0] == 200
        server.signal()
        assert exit_code(server) == 0
    if not closed:
        os.close(reader)


def test_lost_lines_are_counted_and_order_is_kept(monkeypatch):
    monkeypatch.setattr(logs, "QUEUE_LINES", 10)
    reader, writer = os.pipe()
    os.set_blocking(writer, True)
    handler = logs.LossyHandler(writer)
    record = logging.LogRecord("x", logging.INFO, "", 0, "%s", ("l" * 5000,), None)
    for _ in range(100):
        handler.emit(record)
    assert handler.lost >= 100 - 10 - 65536 // 5001 - 2
    handler.emit(logging.LogRecord("x", logging.INFO, "", 0, "%d", ("no number",), None))
    os.close(reader)
    handler.close()
    os.close(writer)
    assert handler.lost > 90


def test_no_request_writes_a_line_of_its_own_to_the_log():
    """Before its key is looked at: a path's line breaks and escape codes came through."""
    with running(api_key="secret") as server:
        assert server.get("/v1/models%0aERROR%20octavo.core:%20fake%0d%1b[31m%c2%85")[0] == 401
        spelled = (
            r"INFO octavo.server: GET /v1/models\nERROR octavo.core: fake\r\x1b[31m\x85: a valid"
        )
        server.wait(lambda: spelled in server.log)
        assert not any(line.startswith("ERROR") for line in server.log.splitlines())


def test_a_traceback_has_lines_of_its_own():
    try:
        raise ValueError("no")
    except ValueError:
        record = logging.LogRecord("x", logging.ERROR, "", 0, "a\nb\tc", (), sys.exc_info())
    lines = logs.OneLine("%(levelname)s %(name)s: %(message)s").format(record).split("\n")
    assert lines[0] == r"ERROR x: a\nb\tc"
    assert (lines[1], lines[-1]) == ("Traceback (most recent call last):", "ValueError: no")


# Clocks


def test_a_wall_clock_that_jumps_changes_nothing():
    with running(jumping_clock=True, request_timeout=PATIENCE, drain_seconds=PATIENCE) as server:
        with server.hold():
            connection, response = start_stream(server, max_tokens=20)
            assert server.good(server.complete("ab", max_tokens=4))["choices"][0]["text"] == "abab"
            assert server.status() == "ready"
            server.signal()
            server.wait(lambda: server.status() == "draining")
        assert response.read().endswith(b"data: [DONE]\n\n")
        connection.close()
        assert exit_code(server) == 0


def test_the_wall_clock_only_stamps():
    """time.time() only ever becomes a whole number of seconds: nothing is measured with it."""
    wall = {"time.time", "datetime.now", "datetime.utcnow"}
    for path in SERVE.glob("*.py"):
        tree = ast.parse(path.read_text())
        stamps = {
            id(node.args[0])
            for node in ast.walk(tree)
            if isinstance(node, ast.Call) and ast.unparse(node.func) == "int" and node.args
        }
        for node in ast.walk(tree):
            if isinstance(node, ast.Call) and ast.unparse(node.func) in wall:
                assert id(node) in stamps, f"{path.name}:{node.lineno} measures with the wall clock"
