"""Several API processes before one engine: shared port, summed metrics, deaths, drain."""

import os
import signal
import socket
import threading

import pytest
from mock_server import gone, running
from test_server_life import exit_code, hang_up, start_stream

from octavo.serve.metrics import Recorder, add_up
from octavo.serve.server import listen

WORKER = "octavo.serve.worker"


@pytest.fixture(scope="module")
def fleet():
    """Two API processes that are as they were after each test."""
    with running(api_processes=2, engine={"max_waiting": 40}) as server:
        server.wait(lambda: all_ready(server))
        yield server
        server.wait(server.idle)
        assert "never retrieved" not in server.log


def all_ready(server):
    """Whether every one of many connections, which the kernel spreads, finds a ready process."""
    return all(server.status() == "ready" for _ in range(12))


def owner(server, connection):
    """The API process that holds the server's end of a connection."""
    port = connection.sock.getsockname()[1]
    for pid in server.children(WORKER):
        inodes = {
            os.readlink(f"/proc/{pid}/fd/{fd}").removeprefix("socket:[").removesuffix("]")
            for fd in os.listdir(f"/proc/{pid}/fd")
            if os.path.exists(f"/proc/{pid}/fd/{fd}")
        }
        with open("/proc/net/tcp") as table:
            rows = [line.split() for line in list(table)[1:]]
        if any(row[9] in inodes and row[2].endswith(f":{port:04X}") for row in rows):
            return pid
    raise AssertionError("no process holds the connection")


def two_streams(server):
    """Streams on different API processes, with their connections and owners."""
    streams = [start_stream(server, prompt=f"a{i}<|slow|>", max_tokens=50) for i in range(12)]
    owners = [owner(server, connection) for connection, _ in streams]
    assert set(owners) == set(server.children(WORKER))
    other = owners.index(next(pid for pid in owners if pid != owners[0]))
    for i, stream in enumerate(streams):
        if i not in (0, other):
            hang_up(*stream)
    return [(*streams[i], owners[i]) for i in (0, other)]


def test_answers_do_not_cross_and_metrics_are_the_sum(fleet):
    before = fleet.metric("vllm:request_generation_tokens_count")
    answers = {}

    def one(word):
        answers[word] = fleet.good(fleet.complete(word, max_tokens=8))["choices"][0]["text"]

    threads = [threading.Thread(target=one, args=(f"{i:03d}-",)) for i in range(24)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert answers == {f"{i:03d}-": f"{i:03d}-" * 2 for i in range(24)}
    fleet.wait(
        lambda: (
            {fleet.metric("vllm:request_generation_tokens_count") for _ in range(8)}
            == {before + 24}
        )
    )


def test_admission_is_one_bound_for_all(fleet):
    streams = two_streams(fleet)
    fleet.wait(lambda: fleet.metric("vllm:num_requests_running") == 2)
    assert {fleet.complete("a", n=39, max_tokens=1, temperature=1)[0] for _ in range(6)} == {429}
    assert {fleet.complete("a", n=38, max_tokens=1, temperature=1)[0] for _ in range(4)} == {200}
    for connection, response, _ in streams:
        hang_up(connection, response)


def test_a_killed_api_process_is_replaced_and_its_requests_stop(fleet):
    (lost, _, victim), (kept, response, _) = two_streams(fleet)
    before = fleet.metric("vllm:request_generation_tokens_count")
    os.kill(victim, signal.SIGKILL)
    assert lost.sock.recv(1 << 20) is not None
    hang_up(lost)
    fleet.wait(lambda: fleet.metric("vllm:num_requests_running") <= 1)
    rest = response.read()
    assert rest.endswith(b"data: [DONE]\n\n")
    assert b'"finish_reason":"length"' in rest
    kept.close()
    fleet.wait(lambda: len(fleet.children(WORKER)) == 2)
    assert victim not in fleet.children(WORKER)
    fleet.wait(lambda: all_ready(fleet))
    assert fleet.metric("vllm:request_generation_tokens_count") >= before


def test_a_connection_that_waits_on_a_dead_process_is_answered_by_its_successor(fleet):
    for pid in fleet.children(WORKER):
        os.kill(pid, signal.SIGKILL)
    assert fleet.complete("ab", max_tokens=2)[0] in (200, 503)
    fleet.wait(lambda: len(fleet.children(WORKER)) == 2 and all_ready(fleet))
    assert fleet.good(fleet.complete("ab", max_tokens=2))["choices"][0]["text"] == "ab"


def test_a_restarted_engine_serves_every_process(fleet):
    before = fleet.metric("octavo:engine_restarts_total")
    streams = two_streams(fleet)
    os.kill(fleet.core_pid(), signal.SIGKILL)
    for connection, response, _ in streams:
        assert b"engine process has ended" in response.read()
        connection.close()
    fleet.wait(lambda: all_ready(fleet))
    assert {fleet.metric("octavo:engine_restarts_total") for _ in range(8)} == {before + 1}


def test_the_drain_lets_every_process_finish():
    with running(api_processes=2) as server:
        server.wait(lambda: all_ready(server))
        streams = two_streams(server)
        core, workers = server.core_pid(), server.children(WORKER)
        for pid in workers:  # what a process group's SIGTERM does; the parent's alone counts
            os.kill(pid, signal.SIGTERM)
        server.signal()
        for connection, response, _ in streams:
            assert response.read().endswith(b"data: [DONE]\n\n")
            connection.close()
        assert exit_code(server) == 0
        assert all(gone(pid) for pid in [core, *workers])


def test_everything_ends_with_the_parent():
    with running(api_processes=2) as server:
        pids = [server.core_pid(), *server.children(WORKER)]
        server.signal(signal.SIGKILL)
        exit_code(server)
        server.wait(lambda: all(gone(pid) for pid in pids))


def test_a_tokenizer_that_cannot_load_ends_the_fleet():
    settings = {"tokenizer": "mock_server:bad_tokenizer", "api_processes": 2}
    with running(wait=False, **settings) as server:
        assert exit_code(server) == 1
        assert "no tokenizer here" in server.log


def test_a_shared_port_is_still_refused_when_taken():
    with (
        socket.create_server(("127.0.0.1", 0), reuse_port=True) as taken,
        pytest.raises(OSError, match="in use"),
    ):
        listen("127.0.0.1", taken.getsockname()[1], 2)


def test_recorders_add_up():
    parts = [Recorder(), Recorder()]
    for i, recorder in enumerate(parts):
        recorder.inter_token.observe(0.01 * (i + 1))
        recorder.finished["stop"] += 1
        recorder.responses[404] += 1
        recorder.disconnects += 2
    total = add_up(parts)
    assert (total.disconnects, total.responses[404], total.finished["stop"]) == (4, 2, 2)
    assert sum(total.inter_token.counts) == 2
    assert total.inter_token.total == pytest.approx(0.03)
