"""Several API processes before one engine: shared port, summed metrics, deaths, drain."""

import asyncio
import json
import os
import shutil
import signal
import socket
import tempfile
import threading
import time
from collections import Counter
from types import SimpleNamespace

import msgspec
import pytest
from mock_server import PATIENCE, gone, running
from test_server_life import exit_code, hang_up, start_stream

from octavo.serve import fleet as fleet_module
from octavo.serve import worker as worker_module
from octavo.serve.api import Parts
from octavo.serve.config import ServerConfig
from octavo.serve.errors import ApiError
from octavo.serve.fleet import Fleet, Member
from octavo.serve.key_limits import KeyLimits
from octavo.serve.metrics import Recorder, add_up
from octavo.serve.server import listen
from octavo.serve.supervisor import Standstill
from octavo.serve.worker import BEAT_SECONDS, Beat, Loaded, ToWorker, Worker

WORKER = "octavo.serve.worker"
encode = msgspec.msgpack.encode


@pytest.fixture(scope="module")
def fleet():
    """Two API processes that are as they were after each test."""
    with running(api_processes=2, engine={"max_waiting": 40}) as server:
        server.wait(lambda: all_ready(server))
        yield server
        server.wait(server.idle)
        assert "never retrieved" not in server.log


def all_ready(server):
    """Whether both processes are there and ready."""
    return len(server.children(WORKER)) == 2 and server.everywhere(server.status) == {"ready"}


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
    """Streams that are held on different API processes, with their connections and owners."""
    server.wait(server.idle)
    first, *others = [held_stream(server)]
    while not others or others[-1][2] == first[2]:
        others.append(held_stream(server))
    *same, other = others
    for connection, response, _ in same:
        hang_up(connection, response)
    assert {first[2], other[2]} == set(server.children(WORKER))
    return [first, other]


def held_stream(server):
    connection, response = start_stream(server, max_tokens=50)
    return connection, response, owner(server, connection)


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


def test_a_process_says_of_itself_what_is_not_of_all(fleet):
    """Two scrapes' CPU times are of one process only if their names are the same."""
    names = set()

    def both():
        text = fleet.get("/metrics")[2].decode()
        (line,) = [one for one in text.splitlines() if one.startswith("process_cpu_seconds_total")]
        names.add(line.partition('process="')[2].partition('"')[0])
        assert text.count('process="') == text.count("\nprocess_")
        return len(names) == 2

    fleet.wait(both)
    assert all(name.startswith("api-") for name in names)


def test_admission_is_one_bound_for_all(fleet):
    with fleet.hold():
        streams = two_streams(fleet)
        fleet.wait(lambda: fleet.metric("vllm:num_requests_running") == 2)
        full = {fleet.complete("a", n=39, max_tokens=1, temperature=1)[0] for _ in range(6)}
        last = {fleet.complete("a", n=38, max_tokens=1, temperature=1)[0] for _ in range(4)}
        for connection, response, _ in streams:
            hang_up(connection, response)
    assert (full, last) == ({429}, {200})


def test_a_killed_api_process_is_replaced_and_its_requests_stop(fleet):
    with fleet.hold():
        (lost, unread, victim), (kept, response, _) = two_streams(fleet)
        before = fleet.metric("vllm:request_generation_tokens_count")
        os.kill(victim, signal.SIGKILL)
        fleet.wait(lambda: fleet.metric("vllm:num_requests_running") == 1)
    hang_up(lost, unread)
    rest = response.read()
    assert rest.endswith(b"data: [DONE]\n\n")
    assert b'"finish_reason":"length"' in rest
    kept.close()
    fleet.wait(lambda: all_ready(fleet))
    assert victim not in fleet.children(WORKER)
    assert fleet.metric("vllm:request_generation_tokens_count") >= before


def test_a_connection_that_waits_on_a_dead_process_is_answered_by_its_successor(fleet):
    killed = fleet.children(WORKER)
    for pid in killed:
        os.kill(pid, signal.SIGKILL)
    fleet.wait(lambda: all(map(gone, killed)))
    assert fleet.complete("ab", max_tokens=2)[0] in (200, 503)
    fleet.wait(lambda: all_ready(fleet))
    assert fleet.good(fleet.complete("ab", max_tokens=2))["choices"][0]["text"] == "ab"


def test_a_restarted_engine_serves_every_process(fleet):
    before = fleet.metric("octavo:engine_restarts_total")
    with fleet.hold():
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
        with server.hold():
            streams = two_streams(server)
            core, workers = server.core_pid(), server.children(WORKER)
            for pid in workers:  # what a process group's SIGTERM does; the parent's alone counts
                os.kill(pid, signal.SIGTERM)
            server.signal()
            server.wait(lambda: server.everywhere(server.status) == {"draining"})
        for connection, response, _ in streams:
            assert response.read().endswith(b"data: [DONE]\n\n")
            connection.close()
        assert exit_code(server) == 0
        assert all(gone(pid) for pid in [core, *workers])


def test_a_process_that_has_drained_first_leaves_no_connection_waiting():
    """They go to the one that still drains, which answers them."""
    with running(api_processes=2) as server:
        server.wait(lambda: all_ready(server))
        with server.hold():
            stream = start_stream(server)
            server.signal()
            server.wait(lambda: len(server.children(WORKER)) == 1)
            server.wait(lambda: server.everywhere(server.status) == {"draining"})
            hang_up(*stream)
        assert exit_code(server) == 0


def test_everything_ends_with_the_parent(monkeypatch):
    """The folders of its sockets too, which it had no time to remove."""
    with tempfile.TemporaryDirectory() as folder:
        monkeypatch.setenv("TMPDIR", folder)
        with running(api_processes=2) as server:
            server.wait(lambda: all_ready(server))
            assert len(os.listdir(folder)) == 2
            pids = [server.core_pid(), *server.children(WORKER)]
            server.signal(signal.SIGKILL)
            exit_code(server)
            server.wait(lambda: all(gone(pid) for pid in pids))
        assert os.listdir(folder) == []


def test_a_tokenizer_that_cannot_load_ends_the_fleet():
    settings = {"tokenizer": "mock_server:bad_tokenizer", "api_processes": 2}
    with running(wait=False, **settings) as server:
        assert exit_code(server) == 1
        assert "no tokenizer here" in server.log


class Process:
    """A process that runs until it is killed."""

    returncode = None

    def kill(self):
        self.returncode = -9


@pytest.fixture
def by_hand():
    """Runs a test's body with a fleet of one member, whose process is not real."""

    def run(body):
        async def inside():
            fleet = Fleet(None, ServerConfig(watchdog_seconds=10), Parts(), [], print)
            member = fleet._members[b"a"] = Member(b"a", Process(), KeyLimits())
            member.joined, member.heard_at = True, 100.0
            try:
                await body(fleet, member)
            finally:
                fleet._socket.close()
                shutil.rmtree(fleet._folder)

        asyncio.run(inside())

    return run


def test_a_silent_process_is_killed_but_not_for_its_parents_standstill(by_hand):
    async def body(fleet, member):
        fleet._look(109.0, stood_still=False)
        fleet._look(900.0, stood_still=True)
        fleet._look(909.0, stood_still=False)
        assert member.process.returncode is None
        fleet._look(911.0, stood_still=False)
        assert member.process.returncode is not None

    by_hand(body)


def test_a_process_may_miss_a_beat_however_short_the_watchdog_is():
    async def patience():
        fleet = Fleet(None, ServerConfig(watchdog_seconds=0.5), Parts(), [], print)
        fleet._socket.close()
        shutil.rmtree(fleet._folder)
        return fleet._patience

    assert asyncio.run(patience()) > 2 * BEAT_SECONDS


def test_a_sum_that_does_not_come_is_asked_for_anew(monkeypatch):
    monkeypatch.setattr(worker_module, "ANSWER_SECONDS", 0.01)
    worker, asked = Worker.__new__(Worker), []
    worker._asked = None
    worker._report = lambda **fields: asked.append(fields)
    for _ in range(2):
        with pytest.raises(ApiError, match="can't be had"):
            asyncio.run(worker.total())
    assert asked == [{"ask": True}] * 2


def test_a_process_that_cant_take_its_news_ends_for_another():
    worker, ended = Worker.__new__(Worker), []
    worker._decode = msgspec.msgpack.Decoder(ToWorker).decode
    worker._socket = SimpleNamespace(recv=lambda: asyncio.sleep(0, b"junk"))
    worker._api = SimpleNamespace(end=lambda: ended.append(True))
    asyncio.run(asyncio.wait_for(worker._read(), PATIENCE))
    assert ended == [True]


def test_a_standstill_is_noticed_once():
    times = iter([0.0, 1.0, 2.5, 6.6, 7.6])
    standstill = Standstill(1.0, lambda: next(times))
    assert [standstill.noticed() for _ in range(4)] == [False, False, True, False]


def test_a_message_that_cant_be_taken_ends_no_reader(by_hand):
    async def body(fleet, member):
        said = [(b"a", b"junk"), (b"a", encode(Beat(b"no pickle"))), (b"a", encode(Loaded()))]

        async def next_message():
            return said.pop(0) if said else await asyncio.Event().wait()

        real, fleet._socket = fleet._socket, SimpleNamespace(recv_multipart=next_message)
        reader = asyncio.create_task(fleet._read())
        while not member.loaded:
            await asyncio.sleep(0)
            assert not reader.done()
        reader.cancel()
        fleet._socket = real

    by_hand(body)


def test_a_process_that_cant_be_started_anew_is_tried_again(by_hand, monkeypatch):
    monkeypatch.setattr(fleet_module, "PAUSE_SECONDS", 0)
    outcomes = [OSError("no more processes"), OSError("still none"), None]

    async def body(fleet, member):
        async def spawn(index, identity):
            outcome = outcomes.pop(0)
            if outcome is not None:
                raise outcome
            fleet._stopping = True
            fleet._members[identity] = started = Member(identity, Process(), KeyLimits())
            started.process.wait = asyncio.Event().wait
            return started

        fleet._spawn = spawn
        with pytest.raises(OSError, match="no more"):
            await fleet._keep(0)
        fleet._all_loaded.set_result(None)
        keeping = asyncio.create_task(fleet._keep(0))
        while outcomes:
            await asyncio.sleep(0)
            assert not keeping.done()
        keeping.cancel()

    by_hand(body)


def test_a_shared_port_is_still_refused_when_taken():
    with (
        socket.create_server(("127.0.0.1", 0), reuse_port=True) as taken,
        pytest.raises(OSError, match="in use"),
    ):
        listen("127.0.0.1", taken.getsockname()[1], 2)


# Limits of API keys


@pytest.fixture(scope="module")
def guarded(tmp_path_factory):
    """Two API processes, and keys: bob has 3 requests a minute, carol 3 at once."""
    keys = tmp_path_factory.mktemp("keys") / "keys"
    keys.write_text("alice:sk-alice\nbob:sk-bob:3\ncarol:sk-carol::3\n")
    with running(api_processes=2, api_key_file=str(keys)) as server:
        server.wait(lambda: all_ready(server))
        yield server


def asked(server, who, **fields):
    """Connection and response of a request that is being answered."""
    connection = server.connect()
    body = {"prompt": "a<|slow|>", "max_tokens": 1, "temperature": 0, **fields}
    headers = {"Authorization": f"Bearer sk-{who}"}
    connection.request("POST", "/v1/completions", json.dumps(body), headers)
    return connection, connection.getresponse()


def statuses(server, who, count):
    """Of requests one after another, each on a connection of its own."""
    found = Counter()
    for _ in range(count):
        connection, response = asked(server, who)
        found[response.status] += 1
        hang_up(connection, response)
    return found


HELD = {"prompt": "a<|hold|>", "stream": True, "max_tokens": 50}


def fill(server):
    """Streams of carol's that are held, up to her limit, as (connection, response, owner)."""
    streams = [asked(server, "carol", **HELD) for _ in range(3)]
    assert [response.status for _, response in streams] == [200] * 3
    return [(*stream, owner(server, stream[0])) for stream in streams]


def test_a_keys_limits_hold_over_all_processes(guarded):
    begun = time.monotonic()
    found = statuses(guarded, "bob", 20)
    refilled = int((time.monotonic() - begun) / 20)
    assert 3 <= found[200] <= 3 + refilled
    assert found[429] == 20 - found[200]
    with guarded.hold():
        streams = fill(guarded)
        assert statuses(guarded, "carol", 20) == {429: 20}
        assert statuses(guarded, "alice", 4) == {200: 4}
        hang_up(*streams[0][:2])
        guarded.wait(lambda: statuses(guarded, "carol", 1) == {200: 1})
        for connection, response, _ in streams:
            hang_up(connection, response)
    guarded.wait(lambda: running_of(guarded, "carol") == 0)


def running_of(server, who):
    return server.metric(f'octavo:key_running{{key="{who}"')


def test_what_a_killed_process_held_of_a_key_is_given_back(guarded):
    with guarded.hold():
        streams = fill(guarded)
        victim = streams[0][2]
        lost = [stream for stream in streams if stream[2] == victim]
        assert statuses(guarded, "carol", 8) == {429: 8}
        os.kill(victim, signal.SIGKILL)
        guarded.wait(lambda: gone(victim) and all_ready(guarded))
        again = [asked(guarded, "carol", **HELD) for _ in lost]
        assert [response.status for _, response in again] == [200] * len(lost)
        assert statuses(guarded, "carol", 8) == {429: 8}
        guarded.wait(lambda: running_of(guarded, "carol") == 3)
        for connection, response, *_ in streams + again:
            hang_up(connection, response)
    guarded.wait(lambda: running_of(guarded, "carol") == 0)


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
