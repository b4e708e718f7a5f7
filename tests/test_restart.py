"""The engine core dies or hangs under a running server: what clients, probes and metrics see."""

import asyncio
import json
import os
import signal
import threading
import time
from pathlib import Path

import pytest
from mock_engine import MockConfig
from mock_server import HERE, PATIENCE, gone, running
from test_server_life import exit_code, start_stream

from octavo.serve.client import MAX_RETRY_SECONDS
from octavo.serve.config import ServerConfig
from octavo.serve.supervisor import CoreSupervisor
from octavo.serve.wire import Control, EngineState


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    """A server that survives everything below."""
    flag = str(tmp_path_factory.mktemp("flags") / "once")
    settings = {"max_engine_restarts": 100, "engine_restart_window": 1.0}
    with running(engine={"flag_file": flag}, **settings) as it:
        it.flag = flag
        yield it
        it.wait(it.idle)
        assert "ASGI" not in it.log
        assert "never retrieved" not in it.log


def in_background(server, **body):
    """A request in a thread of its own; call the result to wait for its answer."""
    out = []
    thread = threading.Thread(target=lambda: out.append(server.complete(**body)))
    thread.start()

    def answer():
        thread.join(PATIENCE)
        return out[0]

    return answer


def restarts(server):
    return server.metric("octavo:engine_restarts_total")


def test_a_killed_core_is_replaced_and_only_begun_streams_fail(server):
    before, old = restarts(server), server.core_pid()
    with server.hold():
        connection, response = start_stream(server)
        os.kill(old, signal.SIGKILL)
    rest = response.read()
    connection.close()
    error = json.loads(rest.split(b"data: ")[-2])["error"]
    assert (error["type"], "engine process has ended" in error["message"]) == ("server_error", True)
    assert rest.endswith(b"data: [DONE]\n\n")
    server.wait(lambda: server.status() == "ready")
    assert gone(old)
    assert server.core_pid() != old
    assert restarts(server) == before + 1
    assert server.good(server.complete("ab", max_tokens=4))["choices"][0]["text"] == "abab"
    server.wait(server.idle)


def test_while_it_restarts_the_server_answers_503_and_stays_alive(server):
    Path(server.flag + ".fail").touch()
    os.kill(server.core_pid(), signal.SIGKILL)
    server.wait(lambda: server.status() == "restarting")
    status, headers, body = server.complete("a")
    assert (status, body["error"]["message"]) == (503, "the engine is restarting")
    assert int(headers["retry-after"]) >= 1
    assert server.get("/health")[0] == server.get("/health/ready")[0] == 503
    assert server.get("/health/live")[0] == 200
    assert server.metric("octavo:engine_up") == 0
    Path(server.flag + ".fail").unlink()
    server.wait(lambda: server.status() == "ready")
    assert server.metric("octavo:engine_up") == 1


def test_a_request_of_which_nothing_was_sent_runs_again_unseen(server):
    """Its first engine ends before it says a word."""
    before = restarts(server)
    answer = server.good(server.complete("<|once|>ab", max_tokens=4, n=3, temperature=1))
    assert answer["usage"]["completion_tokens"] == 12
    assert restarts(server) == before + 1


def test_a_request_that_ends_every_engine_fails_after_its_second(server):
    before = restarts(server)
    status, _, body = server.complete("<|exit|>")
    assert (status, body["error"]["type"]) == (500, "server_error")
    assert "exit code 9" in body["error"]["message"]
    server.wait(lambda: server.status() == "ready")
    assert restarts(server) == before + 2


@pytest.fixture(scope="module")
def watched():
    """A server that takes two seconds' silence for a hang, and one for a reason to say so."""
    with running(max_engine_restarts=100, watchdog_seconds=1.0) as it:
        yield it


def test_a_hung_engine_is_restarted(watched):
    before = restarts(watched)
    status, _, body = watched.complete("<|hang|>")
    assert status == 500
    assert "hangs" in body["error"]["message"]
    watched.wait(lambda: watched.status() == "ready")
    assert restarts(watched) == before + 2  # it was sent again once


def test_a_hang_is_reported_first():
    """Whoever would end it stands still here, so that it lasts."""
    with running(api_processes=2, watchdog_seconds=1.0) as server:
        server.wait(lambda: server.everywhere(server.status) == {"ready"})
        core = server.core_pid()
        server.signal(signal.SIGSTOP)
        os.kill(core, signal.SIGSTOP)
        server.wait(lambda: server.everywhere(server.status) == {"stuck"})
        assert server.get("/health")[0] == 503
        assert "does not answer" in server.complete("a")[2]["error"]["message"]
        os.kill(core, signal.SIGCONT)
        server.wait(lambda: server.everywhere(server.status) == {"ready"})
        server.signal(signal.SIGCONT)


def test_a_server_that_stood_still_itself_blames_no_engine(watched):
    """A machine that is suspended, or a clock that jumps ahead: both sides fall silent."""
    watched.wait(lambda: watched.status() == "ready")
    before, old = restarts(watched), watched.core_pid()
    with watched.hold():
        answer = in_background(watched, prompt="ab<|hold|>", max_tokens=40)
        watched.wait(lambda: not watched.idle())
        for pid in (watched.process.pid, old):
            os.kill(pid, signal.SIGSTOP)
        time.sleep(2.5)  # a hang is two seconds' silence
        for pid in (old, watched.process.pid):  # the watch begins anew with the last
            os.kill(pid, signal.SIGCONT)
    assert watched.good(answer())["usage"]["completion_tokens"] == 40
    assert (restarts(watched), watched.core_pid()) == (before, old)


def test_a_compile_longer_than_the_watchdog_is_no_hang(watched):
    watched.wait(lambda: watched.status() == "ready")
    before = restarts(watched)
    with watched.hold():
        answer = in_background(watched, prompt="<|compile|>", max_tokens=1)
        watched.wait(lambda: "compiling" in watched.log)
        time.sleep(2.5)
        assert watched.status() == "ready"
    assert watched.good(answer())["usage"]["completion_tokens"] == 1
    assert restarts(watched) == before


def test_a_step_that_keeps_failing_brings_a_new_engine(server):
    before = restarts(server)
    for _ in range(3):
        assert server.complete("<|boom|>")[0] == 500
    server.wait(lambda: restarts(server) > before and server.status() == "ready")
    assert server.complete("a")[0] == 200


def test_the_core_ignores_signals_meant_for_the_service(server):
    for number in (signal.SIGTERM, signal.SIGINT):
        os.kill(server.core_pid(), number)
    before = restarts(server)
    assert server.complete("a")[0] == 200
    assert restarts(server) == before


def test_a_core_that_cant_be_described_is_a_failed_start():
    async def start():
        news = []
        unpicklable = lambda: None  # noqa: E731
        supervisor = CoreSupervisor("x:y", unpicklable, ServerConfig(), news.append)
        supervisor.start()
        loaded = await asyncio.wait_for(supervisor.started(), PATIENCE)
        await supervisor.stop()
        return loaded, news

    loaded, news = asyncio.run(start())
    assert (loaded, news[-1].phase) == (False, "failed")
    assert "can't be started" in news[-1].reason


def test_the_breaker_opens_and_the_server_stays():
    with running(max_engine_restarts=1, engine_restart_window=3000.0) as server:
        for wanted in ("ready", "failed"):
            os.kill(server.core_pid(), signal.SIGKILL)
            server.wait(lambda: restarts(server) == 1)
            server.wait(lambda wanted=wanted: server.status() == wanted)
        assert server.get("/health/live")[0] == 503
        status, headers, body = server.complete("a")
        assert status == 503
        assert "engine is down" in body["error"]["message"]
        assert int(headers["retry-after"]) == MAX_RETRY_SECONDS
        server.signal()
        assert exit_code(server) == 0


class Spent:
    """A budget that is spent once, for a moment."""

    def __init__(self):
        self.left = [False, True]

    def spent(self):
        return self.left.pop()

    def delay(self):
        return 0.01

    def note(self):
        pass


def test_the_breaker_closes(monkeypatch):
    """After its pause the engine is started again."""
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(map(str, (HERE, HERE.parent))))

    async def life():
        phases, up = [], asyncio.Event()

        def hear(news):
            phases.append(news.phase)
            if news.phase == "ready":
                up.set()

        supervisor = CoreSupervisor("mock_engine:make", MockConfig(), ServerConfig(), hear)
        supervisor._budget = Spent()
        supervisor.start()
        for _ in range(3):
            await asyncio.wait_for(up.wait(), PATIENCE)
            up.clear()
            if len(phases) < 8:
                supervisor._kill_process()
        await supervisor.stop()
        return phases

    begun = ["starting", "ready"]
    assert asyncio.run(life()) == [*begun, "failed", *begun, "restarting", *begun]


def test_what_a_core_left_may_be_lost_or_unreadable(monkeypatch):
    """Its supervisor has heard the same; the next core says what it begins with."""
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(map(str, (HERE, HERE.parent))))

    async def life(spoil):
        up = asyncio.Event()
        hear = lambda news: up.set() if news.phase == "ready" else up.clear()  # noqa: E731
        supervisor = CoreSupervisor("mock_engine:make", MockConfig(), ServerConfig(), hear)
        supervisor.start()
        await asyncio.wait_for(up.wait(), PATIENCE)
        supervisor._send(Control(1, "reload", "wait", model="other"))
        while supervisor._heard.weights_epoch == 0:
            await asyncio.sleep(0.01)
        heard = supervisor._heard
        spoil(Path(supervisor._folder, "weights"))
        up.clear()
        supervisor._kill_process()
        await asyncio.wait_for(up.wait(), PATIENCE)
        assert supervisor._heard is not heard
        assert supervisor._heard == heard == EngineState(False, 1, "other")
        await supervisor.stop()

    for spoil in (Path.unlink, lambda path: path.write_bytes(b"\xc1")):
        asyncio.run(life(spoil))
