"""Pause, resume and other weights over HTTP. The mock's answer begins an epoch's tokens later."""

import json
import os
import signal
from concurrent.futures import ThreadPoolExecutor

import pytest
from mock_engine import HELD_TOKENS, ByteTokenizer, expected
from mock_server import PATIENCE, running

LONG = "<|hold|>" + "abcdefgh" * 5
"""A prompt whose answer doesn't end while the mock is held."""


@pytest.fixture(scope="module")
def shared():
    with running(admin_endpoints=True) as server:
        yield server
        assert "Traceback" not in server.log


@pytest.fixture
def srv(shared):
    """The shared one, which every test leaves unpaused and idle, whatever its weights are."""
    yield shared
    left = shared.status()
    if left == "paused":  # by a test that failed: the next one shall not
        shared.good(shared.post("/resume"))
    assert left == "ready"
    shared.wait(shared.idle)


@pytest.fixture(scope="module")
def pool():
    with ThreadPoolExecutor(4) as made:
        yield made


def text(answer):
    return answer[2]["choices"][0]["text"]


def now(server):
    """The present weights epoch."""
    return server.good(server.get("/version"))["weights_epoch"]


def said(prompt, count, weights):
    """What the mock answers to a prompt, specials left out."""
    ids = ByteTokenizer().encode(prompt)
    answer = [expected(ids, i, weights) for i in range(count)]
    return ByteTokenizer().decode(answer)


def epoch(body):
    return int(body["system_fingerprint"].rsplit("-w", 1)[1])


def started(server, pool, tokens=30):
    """A held completion that runs in the background, once it has its first tokens."""
    server.wait(server.idle)
    server.good(server.post("/resume"))  # an order is answered behind the figures
    before = made(server)
    future = pool.submit(server.complete, LONG, max_tokens=tokens)
    server.wait(lambda: made(server) == before + HELD_TOKENS)
    return future


def made(server):
    """Tokens made so far, by the engine's last report."""
    return server.metric("vllm:generation_tokens_total")


def test_nobody_is_an_operator_unless_the_settings_say_so():
    with running() as server:
        for answer in (
            server.post("/pause"),
            server.post("/resume"),
            server.get("/is_paused"),
            server.post("/reset_prefix_cache"),
            server.post("/reload_weights", {}),
        ):
            status, _, body = answer
            assert (status, body["error"]["type"]) == (403, "permission_error")
            assert "admin_endpoints" in body["error"]["message"]


def test_keep_freezes_what_runs(srv, pool):
    with srv.hold():
        run = started(srv, pool)
        frozen = made(srv)
        assert srv.good(srv.post("/pause?mode=keep")) == {"status": "paused", "mode": "keep"}
    late = pool.submit(srv.complete, "abc")
    assert (srv.status(), srv.get("/health/ready")[0]) == ("paused", 503)
    assert srv.get("/health/live")[0] == 200
    assert srv.good(srv.get("/is_paused")) == {"is_paused": True}
    srv.wait(lambda: srv.metric("vllm:num_requests_running") == 2)  # the mock queues nothing
    assert not run.done()
    assert made(srv) == frozen
    refused = srv.post("/reload_weights", {"path": "other"})
    assert (refused[0], "frozen" in refused[2]["error"]["message"]) == (409, True)
    assert srv.good(srv.post("/resume")) == {"status": "resumed"}
    assert text(run.result(PATIENCE)) == said(LONG, 30, now(srv))
    assert text(late.result(PATIENCE)) == said("abc", 8, now(srv))
    assert (srv.status(), srv.good(srv.get("/is_paused"))) == ("ready", {"is_paused": False})


def test_wait_lets_end_what_runs(srv, pool):
    with srv.hold():
        run = started(srv, pool)
        pausing = pool.submit(srv.post, "/pause?mode=wait&clear_cache=false")
        srv.wait(lambda: srv.status() == "paused")
        assert not pausing.done()
    assert pausing.result(PATIENCE)[0] == 200
    assert run.done() or srv.idle()
    late = pool.submit(srv.complete, "abc")
    assert text(run.result(PATIENCE)) == said(LONG, 30, now(srv))
    srv.wait(lambda: not srv.idle())
    assert not late.done()
    srv.good(srv.post("/resume"))
    assert text(late.result(PATIENCE)) == said("abc", 8, now(srv))


@pytest.mark.parametrize(
    ("order", "paused"),
    [("/resume", False), ("/pause?mode=keep", True), ("/pause?mode=abort", True)],
)
def test_a_pause_that_waits_gives_way(srv, pool, order, paused):
    """It waited for what may never end, and nothing else was taken until then."""
    with srv.hold():
        run = started(srv, pool)
        pausing = pool.submit(srv.post, "/pause?mode=wait")
        srv.wait(lambda: srv.status() == "paused")
        srv.good(srv.post(order))
        status, _, body = pausing.result(PATIENCE)
        words = f"a {order[1:].split('?')[0]} came before the pause had taken effect"
        assert (status, body["error"]["message"]) == (409, words)
        assert srv.good(srv.get("/is_paused")) == {"is_paused": paused}
    srv.good(srv.post("/resume"))
    count = HELD_TOKENS if "abort" in order else 30
    assert text(run.result(PATIENCE)) == said(LONG, count, now(srv))


def cached(server, prompt):
    usage = server.good(server.complete(prompt, max_tokens=1))["usage"]
    return usage["prompt_tokens_details"]["cached_tokens"]


@pytest.mark.parametrize(
    ("order", "forgets"),
    [
        ("/pause?clear_cache=true", True),
        ("/pause?clear_cache=false", False),
        ("/reset_prefix_cache", True),
    ],
)
def test_shared_prefixes_are_forgotten_on_demand(srv, order, forgets):
    cached(srv, "ab" * 8)
    assert cached(srv, "ab" * 8) == 8
    srv.good(srv.post(order))
    srv.good(srv.post("/resume"))
    assert cached(srv, "ab" * 8) == (0 if forgets else 8)
    assert cached(srv, "ab" * 8) == 8


def test_a_reset_of_the_cache_disturbs_nobody(srv, pool):
    with srv.hold():
        run = started(srv, pool)
        assert srv.good(srv.post("/reset_prefix_cache")) == {"status": "reset"}
        assert not run.done()
    assert text(run.result(PATIENCE)) == said(LONG, 30, now(srv))


def test_abort_is_the_default_and_ends_everything(srv, pool):
    with srv.hold():
        run = started(srv, pool, tokens=2000)
        assert srv.good(srv.post("/pause"))["mode"] == "abort"
    status, _, body = run.result(PATIENCE)
    assert (status, body["choices"][0]["finish_reason"]) == (200, "abort")
    assert body["usage"]["completion_tokens"] == HELD_TOKENS
    srv.good(srv.post("/pause?mode=keep"))  # another mode may follow
    srv.good(srv.post("/resume"))
    assert text(srv.complete("abc")) == said("abc", 8, now(srv))


CONVERSATION = {"messages": [{"role": "user", "content": LONG}], "max_tokens": 500}
WORDLESS = {
    "/v1/messages": {"model": "mock", **CONVERSATION},
    "/v1/responses": {"input": LONG, "max_output_tokens": 500},
    "/v1/embeddings": {"input": ["a", "b"]},
    "/v1/score": {"prompt": "a", "continuations": ["b"]},
}
"""Requests whose answers have no word for an abort."""


@pytest.mark.parametrize("path", WORDLESS)
def test_what_an_order_ends_is_no_whole_answer(srv, pool, path):
    srv.good(srv.post("/pause?mode=keep"))
    asked = pool.submit(srv.post, path, WORDLESS[path])
    srv.wait(lambda: not srv.idle())
    srv.good(srv.post("/pause?mode=abort"))
    status, headers, body = asked.result(PATIENCE)
    assert (status, "operator" in body["error"]["message"]) == (503, True)
    assert headers["retry-after"]
    srv.good(srv.post("/resume"))


@pytest.mark.parametrize(
    ("path", "kind"), [("/v1/messages", "error"), ("/v1/responses", "response.failed")]
)
def test_what_an_order_ends_is_no_whole_stream(srv, pool, path, kind):
    srv.wait(srv.idle)
    before = made(srv)
    with srv.hold():
        asked = pool.submit(srv.post, path, {**WORDLESS[path], "stream": True})
        srv.wait(lambda: made(srv) == before + HELD_TOKENS)
        srv.good(srv.post("/pause?mode=abort"))
    status, _, data = asked.result(PATIENCE)
    last = json.loads(data.split(b"data: ")[-1])
    assert (status, last["type"]) == (200, kind)
    assert "operator" in last.get("response", last)["error"]["message"]
    srv.good(srv.post("/resume"))


def test_a_pause_can_be_ended_while_a_drain_waits_for_what_it_holds_back(pool):
    with running(admin_endpoints=True, drain_seconds=PATIENCE) as server:
        server.good(server.post("/pause?mode=wait"))
        late = pool.submit(server.complete, "abc")
        server.wait(lambda: not server.idle())
        server.signal()
        server.wait(lambda: server.status() == "draining")
        assert server.post("/pause")[0] == 503
        server.good(server.post("/resume"))
        assert text(late.result(PATIENCE)) == said("abc", 8, 0)
        assert server.process.wait(PATIENCE) == 0


def test_other_weights_are_named_by_every_answer(srv):
    old = now(srv)
    assert epoch(srv.good(srv.complete("abc"))) == old
    done = srv.good(srv.post("/reload_weights", {"path": "other"}))
    new = old + 1
    assert (done["status"], done["weights_epoch"], epoch(done)) == ("reloaded", new, new)
    body = srv.good(srv.complete("abc"))
    assert (body["choices"][0]["text"], epoch(body)) == (said("abc", 8, new), new)
    chunks = srv.stream("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}]})
    assert {epoch(chunk) for chunk in chunks[:-1]} == {new}
    assert epoch(srv.good(srv.post("/v1/responses", {"input": "x"}))) == new
    assert epoch(srv.good(srv.post("/v1/embeddings", {"input": "x"}))) == new
    asked = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 4}
    assert epoch(srv.good(srv.post("/v1/messages", asked))) == new
    scored = {"prompt": "x", "continuations": ["y"]}
    assert epoch(srv.good(srv.post("/v1/score", scored))) == new
    version = srv.good(srv.get("/version"))
    assert (version["model"], epoch(version)) == ("other", new)
    assert srv.good(srv.post("/reload_weights"))["weights_epoch"] == new + 1
    assert srv.good(srv.get("/version"))["model"] == "other"


@pytest.mark.parametrize("mode", ["wait", "abort"])
def test_what_runs_ends_on_the_old_weights(srv, pool, mode):
    old, begun = now(srv), srv.log.count(f"reload {mode}")
    with srv.hold():
        run = started(srv, pool, tokens=40)
        change = pool.submit(srv.post, "/reload_weights", {"path": "other", "mode": mode})
        srv.wait(lambda: srv.log.count(f"reload {mode}") > begun)
        srv.wait(lambda: run.done() == (mode == "abort"))
    status, _, body = run.result(PATIENCE)
    assert (status, epoch(body)) == (200, old)
    got = body["choices"][0]
    assert said(LONG, 40, old).startswith(got["text"])
    assert got["finish_reason"] == ("length" if mode == "wait" else "abort")
    assert change.result(PATIENCE)[2]["weights_epoch"] == old + 1
    late = srv.good(srv.complete("abc"))
    assert (late["choices"][0]["text"], epoch(late)) == (said("abc", 8, old + 1), old + 1)


def test_steps_go_on_while_weights_are_read_and_one_thing_is_done_at_a_time(srv, pool):
    old = now(srv)
    begun = srv.log.count("reload wait")
    with srv.hold():
        change = pool.submit(srv.post, "/reload_weights", {"path": "slow"})
        srv.wait(lambda: srv.log.count("reload wait") > begun)
        assert epoch(srv.good(srv.complete("ab"))) == old
        busy = srv.post("/pause")
    assert (busy[0], busy[2]["error"]["message"]) == (409, "reload is under way")
    assert change.result(PATIENCE)[2]["weights_epoch"] == old + 1


def test_what_does_not_fit_is_refused(srv):
    old = now(srv)
    status, _, body = srv.post("/reload_weights", {"path": "bad"})
    assert (status, "width is 3, here 2" in body["error"]["message"]) == (400, True)
    assert epoch(srv.good(srv.complete("abc"))) == old
    for path, fields, name in (
        ("/reload_weights", {"mode": "keep"}, "mode"),
        ("/reload_weights", {"path": 3}, "path"),
        ("/reload_weights", {"model": "x"}, "model"),
        ("/pause?mode=sleep", None, "mode"),
        ("/pause?clear_cache=maybe", None, "clear_cache"),
        ("/pause?tags=x", None, "tags"),
        ("/reset_prefix_cache?reset_external=true", None, "reset_external"),
        ("/resume?now=1", None, "now"),
        ("/reload_weights?mode=abort", {}, "mode"),
    ):
        status, _, body = srv.post(path, fields)
        assert (status, body["error"]["param"]) == (400, name)
    assert srv.get("/is_paused?x=1")[0] == 400
    assert srv.status() == "ready"


@pytest.mark.parametrize("order", ["/pause", "/resume", "/reset_prefix_cache"])
def test_an_order_that_takes_no_body_does_not_overlook_one(srv, order):
    """A pause whose mode came in a body ended what it was to keep."""
    status, _, body = srv.post(order, {"mode": "keep"})
    assert (status, "takes no body" in body["error"]["message"]) == (400, True)
    assert srv.status() == "ready"
    srv.good(srv.post(order, {}))
    srv.good(srv.post("/resume"))


def test_restarts_load_what_was_loaded_last():
    """By a kill, and because weights were lost half way."""
    with running(admin_endpoints=True) as server:
        server.good(server.post("/reload_weights", {"path": "other"}))
        os.kill(server.core_pid(), signal.SIGKILL)
        server.wait(lambda: server.metric("octavo:engine_restarts_total") == 1)
        server.wait(server.settled)
        version = server.good(server.get("/version"))
        assert (version["weights_epoch"], version["model"]) == (1, "other")
        assert text(server.complete("abc")) == said("abc", 8, 1)
        status, _, body = server.post("/reload_weights", {"path": "fatal"})
        assert (status, "the device is full" in body["error"]["message"]) == (500, True)
        server.wait(server.settled)
        body = server.good(server.complete("abc"))
        assert (body["choices"][0]["text"], epoch(body)) == (said("abc", 8, 1), 1)


def test_every_api_process_knows():
    with running(admin_endpoints=True, api_processes=2) as server:
        server.wait(lambda: server.everywhere(server.status) == {"ready"})
        server.good(server.post("/reload_weights", {"path": "other"}))
        server.good(server.post("/pause"))
        server.wait(lambda: server.everywhere(server.status) == {"paused"})
        server.wait(lambda: server.everywhere(lambda: now(server)) == {1})
