"""Starting, stopping, overload, hang-ups and deaths. Each test starts servers of its own."""

import asyncio
import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading

import pytest
from mock_engine import MockConfig
from mock_server import PATIENCE, gone, running

from octavo.serve.api import ApiServer, Parts
from octavo.serve.config import ServerConfig


def exit_code(server):
    return server.process.wait(PATIENCE)


def hang_up(*things):
    """Close a connection and its response: the socket closes with the last of them."""
    for thing in things:
        thing.close()


def start_stream(server, **fields):
    """A connection on which a stream of the mock has begun."""
    connection = server.connect()
    body = {"prompt": "a<|hold|>", "max_tokens": 2000, "temperature": 0, "stream": True, **fields}
    connection.request("POST", "/v1/completions", json.dumps(body))
    response = connection.getresponse()
    assert response.readline().startswith(b"data: ")
    return connection, response


def test_loading_draining_and_exit_without_heavy_modules():
    with running(wait=False, held=True) as server:
        server.wait(lambda: server.status() != "closed")
        assert server.get("/health")[0] == 503
        assert server.get("/health/live")[0] == 200
        status, headers, body = server.complete("a")
        assert status == 503
        assert headers["retry-after"]
        assert body["error"]["message"] == "the model is loading"
        server.release()
        server.wait(lambda: server.status() == "ready")
        with server.hold():
            connection, response = start_stream(server, max_tokens=60)
            server.signal()
            server.wait(lambda: server.status() == "draining")
            assert server.complete("a")[0] == 503
            assert server.get("/health/live")[0] == 200
        rest = response.read()
        connection.close()
        assert b'"finish_reason":"length"' in rest
        assert rest.endswith(b"data: [DONE]\n\n")
        assert exit_code(server) == 0
        assert "heavy modules: []" in server.log
        assert "SIGTERM: draining, requests that run have 30 s to end" in server.log
        assert "ended, exit code 0" in server.log
        assert int(server.log.rsplit("collections skip: ")[1].split()[0]) > 20_000


@contextlib.contextmanager
def hangups(handler):
    """What children inherit for SIGHUP, whatever this process does about it."""
    before = signal.signal(signal.SIGHUP, handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGHUP, before)


def test_a_hangup_of_its_terminal_drains_it_too():
    with hangups(signal.SIG_DFL), running() as server, server.hold():
        connection, response = start_stream(server, max_tokens=60)
        os.kill(server.core_pid(), signal.SIGHUP)  # none of the engine's business
        server.signal(signal.SIGHUP)
        server.wait(lambda: server.status() == "draining")
        server.release()
        rest = response.read()
        connection.close()
        assert b'"finish_reason":"length"' in rest
        assert exit_code(server) == 0
        assert "SIGHUP: draining" in server.log


def test_under_nohup_it_goes_on():
    with hangups(signal.SIG_IGN), running() as server:
        server.signal(signal.SIGHUP)
        server.good(server.complete("a"))
        assert server.status() == "ready"
        server.signal()
        assert exit_code(server) == 0
        assert "SIGHUP" not in server.log


def test_the_drain_has_a_deadline():
    with running(drain_seconds=0.3) as server, server.hold():
        core = server.core_pid()
        connection, response = start_stream(server)
        server.signal()
        rest = response.read()
        connection.close()
        assert b"shutting down" in rest
        assert exit_code(server) == 0
        assert "1 samples still ran at the drain's deadline" in server.log
        assert gone(core)


def test_a_second_interrupt_ends_at_once():
    with running() as server, server.hold():
        core = server.core_pid()
        stream = start_stream(server)
        server.signal(signal.SIGINT)
        server.wait(lambda: server.status() == "draining")
        server.signal(signal.SIGINT)
        assert exit_code(server) == 130
        assert "SIGINT again: ending at once" in server.log
        hang_up(*stream)
        assert gone(core)


def test_the_core_ends_when_its_parent_is_killed():
    with running() as server:
        core = server.core_pid()
        server.signal(signal.SIGKILL)
        exit_code(server)
        server.wait(lambda: gone(core))


def test_without_restarts_the_server_ends_with_its_core():
    with running(max_engine_restarts=0) as server, server.hold():
        connection, response = start_stream(server)
        os.kill(server.core_pid(), signal.SIGKILL)
        rest = response.read()
        connection.close()
        assert b'"error"' in rest
        assert b"engine process has ended" in rest
        assert server.get("/health")[0] == server.get("/health/live")[0] == 503
        status, _, body = server.complete("a")
        assert status == 503
        assert "engine is down" in body["error"]["message"]
        assert exit_code(server) == 1
        assert "octavo: the engine has ended: " in server.log
        assert "Traceback" not in server.log


def test_a_start_that_fails_says_why():
    with running(wait=False, engine={"fail_start": True}) as server:
        assert exit_code(server) == 1
        assert "no such weights" in server.log
    with running(wait=False, tokenizer="mock_server:bad_tokenizer") as server:
        assert exit_code(server) == 1
        assert "octavo: the tokenizer can't be loaded: no tokenizer here\n" in server.log


@pytest.mark.parametrize("processes", [1, 2])
def test_a_model_that_is_not_there_is_no_matter_of_its_tokenizer(processes):
    settings = {"tokenizer": "octavo.serve.api:tokenizer_of", "api_processes": processes}
    with running(wait=False, engine={"model": "/no/such"}, **settings) as server:
        assert exit_code(server) == 1
        assert "octavo: no model at '/no/such': that path does not exist\n" in server.log
        assert "tokenizer" not in server.log


def test_an_http_server_that_ends_by_itself_is_not_waited_for():
    async def deaf():
        with socket.create_server(("127.0.0.1", 0)) as listener:
            api = ApiServer(MockConfig(), ServerConfig(), Parts(), listener, b"api")
            api._server.serve = lambda sockets: asyncio.to_thread(raising, OSError("no handshake"))
            await asyncio.wait_for(api.run(), PATIENCE)

    def raising(error):
        raise error

    with pytest.raises(OSError, match="no handshake"):
        asyncio.run(deaf())


def test_a_folder_named_octavo_where_it_starts_is_not_taken_for_the_package(tmp_path):
    (tmp_path / "octavo").mkdir()
    code = (
        "import asyncio, sys\n"
        "from octavo.serve.child import spawn\n"
        "async def main():\n"
        "    process = await spawn('octavo.serve.launch', None)\n"
        "    return await process.wait()\n"
        "sys.exit(asyncio.run(main()))\n"
    )
    command = [sys.executable, "-P", "-c", code]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_a_taken_port_is_one_clear_line():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        code = (
            "from octavo.serve.config import EngineConfig, ServerConfig\n"
            "from octavo.serve.server import run\n"
            f"raise SystemExit(run(EngineConfig(), ServerConfig(port={port})))"
        )
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 1
    assert f"can't listen on 127.0.0.1:{port}: it is in use; choose another" in done.stderr
    assert "Traceback" not in done.stderr


def test_limits_keys_and_timeouts():
    limits = {"max_body_bytes": 2000, "api_key": "secret", "request_timeout": 0.3}
    key = {"Authorization": "Bearer secret"}
    with running(**limits) as server:
        for headers in ({}, {"Authorization": "Bearer no"}, {"Authorization": "Basic secret"}):
            status, _, body = server.post("/v1/completions", {"prompt": "a"}, **headers)
            assert (status, body["error"]["code"]) == (401, "invalid_api_key")
        assert server.get("/v1/models")[0] == 401
        assert server.get("/v1/models", **key)[0] == 200
        assert server.get("/health")[0] == server.get("/metrics")[0] == 200
        assert server.request("OPTIONS", "/v1/chat/completions")[0] == 405
        assert server.post("/v1/completions", {"prompt": "a" * 3000}, **key)[0] == 413
        assert _chunked(server, key)[0] == 413
        status, _, body = server.post("/v1/completions", {"prompt": "<|stall|>"}, **key)
        assert (status, body["error"]["type"]) == (408, "timeout_error")
        server.wait(server.idle)


def _chunked(server, headers):
    """A body without a declared length, over the limit."""
    with contextlib.closing(server.connect()) as connection:
        pieces = iter([b'{"prompt": "', *[b"a" * 1000] * 5, b'"}'])
        connection.request("POST", "/v1/completions", pieces, headers, encode_chunked=True)
        response = connection.getresponse()
        return response.status, response.read()


def test_without_a_tokenizer_ids_go_in_and_out():
    with running(tokenizer="mock_server:no_tokenizer") as server:
        body = server.good(server.complete([5, 6], max_tokens=3, return_token_ids=True))
        assert body["choices"][0]["token_ids"] == [5, 6, 5]
        assert body["choices"][0]["text"] == ""
        for refused in (
            server.complete([5, 6]),
            server.complete("text", return_token_ids=True),
            server.complete([5], return_token_ids=True, stop="x"),
            server.chat("hi"),
            server.post("/tokenize", {"prompt": "a"}),
        ):
            assert refused[0] == 400
            assert "tokenizer" in refused[2]["error"]["message"]


@pytest.fixture(scope="module")
def shared():
    """One server for the tests that leave it as they found it."""
    engine = {"max_waiting": 60, "generation": {"temperature": 0.7, "top_k": 3, "max_tokens": 40}}
    with running(engine=engine) as server:
        yield server
        server.wait(server.idle)


def test_hang_ups_abort_in_the_engine(shared):
    shared.wait(shared.idle)
    before = shared.metric("octavo:client_disconnects_total")
    with shared.hold():
        hang_up(*start_stream(shared))
        shared.wait(shared.idle)
        connection = shared.connect()
        body = {"prompt": "a<|hold|>", "max_tokens": 2000, "temperature": 0, "n": 3}
        connection.request("POST", "/v1/completions", json.dumps(body))
        shared.wait(lambda: not shared.idle())
        connection.close()
        shared.wait(shared.idle)
    shared.wait(lambda: shared.metric("octavo:client_disconnects_total") == before + 2)


def test_a_full_queue_is_429_with_retry_after(shared):
    shared.wait(shared.idle)
    with shared.hold():
        stream = start_stream(shared)
        status, headers, body = shared.complete("a", n=60, temperature=1)
        assert status == 429
        assert int(headers["retry-after"]) >= 1
        assert body["error"]["code"] == "rate_limit_exceeded"
        assert shared.complete("a", n=59, temperature=1)[0] == 200
        hang_up(*stream)
        shared.wait(shared.idle)


def test_the_models_own_sampling_defaults_apply(shared):
    def text(**fields):
        answer = shared.complete("abc", seed=1, max_tokens=3, **fields)
        return shared.good(answer)["choices"][0]["text"]

    assert text(temperature=None) == "bca"
    assert text(temperature=0) == "abc"
    for asked, count in ((None, 40), (50, 50)):  # it is a default, not a bound
        chat = shared.good(shared.chat("abc", max_tokens=asked))
        assert chat["usage"]["completion_tokens"] == count
    assert shared.good(shared.complete("a", max_tokens=None))["usage"]["completion_tokens"] == 16


def test_a_stalled_reader_and_many_streams(shared):
    """Answers never cross, whatever one client does."""
    stalled = socket.create_connection(("127.0.0.1", shared.port))
    body = json.dumps({"prompt": "z" * 100, "max_tokens": 1900, "stream": True, "temperature": 0})
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n"
    stalled.sendall((head + body).encode())
    words = [f"{i:03d}-" for i in range(48)]
    results: dict[str, str] = {}

    def one(word):
        body = {"prompt": word, "max_tokens": 40, "temperature": 0}
        events = shared.stream("/v1/completions", body)
        results[word] = "".join(e["choices"][0]["text"] for e in events[:-1])

    threads = [threading.Thread(target=one, args=(word,)) for word in words]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == {word: word * 10 for word in words}
    stalled.close()
    shared.wait(shared.idle)
