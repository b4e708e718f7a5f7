"""`octavo bench serve`: the HTTP client under any chunking, and figures against known servers."""

import asyncio
import contextlib
import json
import threading
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st
from mock_server import PATIENCE, running

from octavo.bench import report, workload
from octavo.bench.load import Outcome, Target, run_load
from octavo.bench.serve import summary
from octavo.bench.sse_client import EventSplitter, Exchange, ProtocolError, ResponseParser
from octavo.serve import cli

HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n"


def cut(data, places):
    edges = sorted({0, len(data), *(place % (len(data) + 1) for place in places)})
    return [data[a:b] for a, b in pairwise(edges)]


def chunked(body, places):
    parts = [b"%x\r\n%s\r\n" % (len(part), part) for part in cut(body, places)]
    return HEAD + b"Transfer-Encoding: chunked\r\n\r\n" + b"".join(parts) + b"0\r\n\r\n"


def event(text, **fields):
    choice = {"index": 0, "text": text, "finish_reason": None}
    return b"data: " + json.dumps({"choices": [choice], **fields}).encode() + b"\n\n"


def usage(tokens, prompt=3):
    fields = {"choices": [], "usage": {"prompt_tokens": prompt, "completion_tokens": tokens}}
    return b"data: " + json.dumps(fields).encode() + b"\n\n"


DONE = b"data: [DONE]\n\n"
places = st.lists(st.integers(0, 10_000), max_size=30)


@given(st.binary(max_size=300), places, places, st.booleans())
def test_a_body_is_the_same_however_it_is_cut(body, chunks, cuts, with_length):
    length = HEAD + b"Content-Length: %d\r\n\r\n%s" % (len(body), body)
    answer = length if with_length or not body else chunked(body, chunks)
    parser = ResponseParser()
    for _ in range(2):
        got = b"".join(part for piece in cut(answer, cuts) for part in parser.feed(piece))
        assert (got, parser.done, parser.status, parser.keep_alive) == (body, True, 200, True)
        parser.reset()


@given(places, st.sampled_from([b"\n", b"\r\n"]))
def test_events_are_the_same_however_they_are_cut(cuts, newline):
    text = b": comment\n\ndata: one\n\nevent: x\ndata:two\n\ndata: [DONE]\n\n".replace(
        b"\n", newline
    )
    splitter = EventSplitter()
    found = [e for piece in cut(text, cuts) for e in splitter.feed(piece)]
    assert found == [b"one", b"two", b"[DONE]"]


def test_what_is_not_http_is_an_error_and_an_open_end_waits_for_the_close():
    with pytest.raises(ProtocolError, match="SSH"):
        list(ResponseParser().feed(b"SSH-2.0-x\r\n\r\n"))
    parser = ResponseParser()
    assert b"".join(parser.feed(HEAD + b"\r\nabc")) == b"abc"
    assert parser.until_close
    assert not parser.done


def test_an_exchange_counts_events_with_tokens_and_shares_time_over_tokens():
    exchange = Exchange(0, 5, due=10.0)
    role = b'{"choices":[{"delta":{"role":"assistant","content":""}}]}'
    pieces = [role, event("ab")[6:-2], event("c")[6:-2], event("d")[6:-2], usage(5)[6:-2]]
    for moment, data in zip((10.5, 11.0, 11.5, 13.0, 14.0), pieces):
        exchange.take(data, moment)
    exchange.take(b"[DONE]", 14.0)
    assert exchange.ok
    assert exchange.ttft == 1.0
    assert exchange.gaps == [0.5, 1.5]
    assert (exchange.events, exchange.tokens, exchange.prompt_tokens) == (3, 5, 3)
    assert exchange.tpot == pytest.approx(2.0 / 4)


def test_the_summary_counts_goodput_failures_and_short_answers():
    def done(ttft, tpot, tokens=11):
        end = ttft + tpot * 10
        gaps = [tpot] * 10
        return Exchange(
            0, 11, 100, 100, 100 + ttft, 100 + end, 100 + end, gaps, tokens, 7, 11, True
        )

    lost = Exchange(3, 11, due=100.0, sent=100.0, error="HTTP 429: busy")
    outcome = Outcome(100.0, [done(0.1, 0.02), done(0.3, 0.02), done(0.1, 0.09, 5), lost], 2, 4)
    found = summary(outcome, ttft_limit_ms=200.0, tpot_limit_ms=50.0)
    assert (found["requests"], found["failed"], found["short"]) == (4, 1, 1)
    assert found["errors"] == {"HTTP 429: busy": 1}
    assert found["goodput_share"] == 0.25
    assert found["ttft_ms_p50"] == 100.0
    assert found["wall_s"] == 1.0
    assert found["out_tok_s"] == 27.0
    assert found["total_tok_s"] == 48.0
    assert found["itl_ms_p99"] == 90.0


def test_percentiles_and_tables():
    assert report.percentile([4.0, 1.0, 2.0, 3.0], 50) == 2.5
    assert report.percentile([], 99) is None
    text = report.table([{"a": 1, "b": 2.5}, {"a": 10}], ["a", "b", "c"])
    assert text.splitlines() == [" a    b", " 1  2.5", "10     "]


# The workload ------------------------------------------------------------------------------------


def test_the_packaged_mix_is_the_one_that_was_measured():
    mix = workload.load()
    assert (len(mix), mix.seed) == (1000, 20261201)
    assert (sum(mix.prompt_lens), sum(mix.output_lens)) == (332306, 214272)
    ids = mix.requests(2, vocab=128256, text=False)[1].source["prompt"]
    assert len(ids) == mix.prompt_lens[1]
    assert ids[:2] == [1000 + 1000003 % 120000, 1000 + (1000003 + 7919 + 31) % 120000]
    assert mix.arrivals(3, 2.0)[2] == pytest.approx(sum(mix.gaps[:3]) / 2)
    assert workload.load(seed=5).gaps != mix.gaps
    assert workload.load(seed=mix.seed).gaps == mix.gaps


@given(st.integers(0, 999), st.integers(0, 8191), st.sampled_from([16, 300, 49152, 128256]))
def test_tokens_lie_in_the_vocabulary(i, j, vocab):
    assert 0 < workload.token(i, j, vocab) < vocab


def test_text_prompts_have_the_asked_number_of_words_and_differ_at_once():
    mix = workload.load()
    first, second = (a.source["prompt"].split() for a in mix.requests(2, vocab=300, text=True))
    assert (len(first), len(second)) == tuple(mix.prompt_lens[:2])
    assert first[0] != second[0]


@pytest.mark.parametrize(
    ("line", "words"),
    [("{}", "prompt or messages"), ('{"prompt": "a"}', "max_tokens"), ("x", "line 1")],
)
def test_a_workload_of_written_requests(tmp_path, line, words):
    good = tmp_path / "good.jsonl"
    good.write_text('{"prompt": [5, 6], "max_tokens": 4}\n{"messages": [], "max_tokens": 2}\n')
    asked = workload.load(good).requests(9, vocab=300, text=False)
    assert [(a.max_tokens, a.prompt_tokens) for a in asked] == [(4, 2), (2, None)]
    bad = tmp_path / "bad.jsonl"
    bad.write_text(line)
    with pytest.raises(ValueError, match=words):
        workload.load(bad)


# Servers -----------------------------------------------------------------------------------------


@contextlib.contextmanager
def scripted(*answers):
    """A server whose nth request gets answers[n]: bytes, then the connection closes on None."""
    todo, heads = list(answers), []
    loop = asyncio.new_event_loop()

    async def serve(reader, writer):
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            while todo:
                head = await reader.readuntil(b"\r\n\r\n")
                length = int(head.lower().split(b"content-length:")[1].split(b"\r\n")[0])
                heads.append((head, json.loads(await reader.readexactly(length))))
                answer, close = todo.pop(0)
                writer.write(answer)
                await writer.drain()
                if close:
                    break
        writer.close()

    server = loop.run_until_complete(asyncio.start_server(serve, "127.0.0.1", 0))
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}", heads
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        server.close()
        for task in asyncio.all_tasks(loop):
            task.cancel()
        loop.run_until_complete(asyncio.sleep(0))
        loop.close()


def test_every_way_to_fail_is_counted_and_stops_nothing():
    good = chunked(event("a") + event("b") + usage(2) + DONE, [])
    refusal = b'{"error": {"message": "busy"}}'
    head = b"HTTP/1.1 429 Too Many Requests\r\nContent-Length: %d\r\n\r\n"
    broken = event("a") + b'data: {"error": {"message": "NaN"}}\n\n' + DONE
    answers = [
        (good, False),
        (head % len(refusal) + refusal, False),
        (chunked(event("a"), []), False),
        (chunked(broken, []), False),
        (good[:60], True),
        (good, True),
        (good, False),
    ]
    asked = workload.load().requests(7, vocab=300, text=False)
    with scripted(*answers) as (url, heads):
        target = Target(url, model="m", api_key="k", extra={"top_k": 1}, timeout=PATIENCE)
        outcome = run_load(target, asked, due=None, at_once=1, processes=1)
    errors = [exchange.error for exchange in outcome.exchanges]
    assert [exchange.ok for exchange in outcome.exchanges] == [True] + [False] * 4 + [True] * 2
    for error, words in zip(errors[1:5], ("HTTP 429", "[DONE]", "NaN", "connection lost")):
        assert words in error
    head, body = heads[0]
    assert head.startswith(b"POST /v1/completions HTTP/1.1")
    assert b"Authorization: Bearer k" in head
    assert (body["model"], body["top_k"], body["ignore_eos"], body["stream"]) == (
        "m",
        1,
        True,
        True,
    )
    assert body["prompt"] == asked[0].source["prompt"]


def test_a_server_that_is_not_there_fails_each_request():
    asked = workload.load().requests(2, vocab=300, text=False)
    outcome = run_load(Target("http://127.0.0.1:9"), asked, due=None, at_once=2, processes=1)
    assert ["can't connect" in exchange.error for exchange in outcome.exchanges] == [True, True]


def test_open_and_closed_loop_against_a_server(tmp_path, capsys):
    out = tmp_path / "out.jsonl"
    mix = {"seed": 1, "prompt_lens": [4] * 12, "output_lens": [6] * 12, "gaps": [1.0] * 12}
    path = tmp_path / "mix.json"
    path.write_text(json.dumps(mix))
    with running(engine={"step_seconds": 0.002}) as server:
        code = cli.main(
            [
                *("bench", "serve", f"--url=http://127.0.0.1:{server.port}", "--model=mock"),
                *(
                    "--rates=100",
                    "--concurrency=3",
                    "--rounds=4",
                    f"--workload={path}",
                    "--vocab=250",
                ),
                *("--processes=2", "--warmup=2", f"--out={out}", "--label=mock"),
            ]
        )
        assert code == 0
        assert server.metric("vllm:generation_tokens_total") == 26 * 6
    open_loop, closed = (json.loads(line) for line in out.read_text().splitlines())
    assert (open_loop["rate"], closed["rate"], closed["concurrency"]) == (100, "inf", 3)
    for line in (open_loop, closed):
        assert (line["requests"], line["failed"], line["out_tokens"]) == (12, 0, 72)
        assert line["device"]
        assert line["versions"]["jax"]
        assert line["server"]["model"]
        assert 0 < line["tpot_ms_p50"] <= line["e2e_s_p50"] * 1e3
    assert open_loop["wall_s"] >= 0.12
    assert "tpot_ms_p50" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("args", "words"),
    [
        ([], "--rates or --concurrency"),
        (["--rates=x"], "rates"),
        (["--concurrency=1.5"], "concurrency"),
        (["--rates=1", "--url=https://x"], "http://host:port"),
        (["--rates=1", "--url=http://127.0.0.1:9"], "not ready"),
        (["--rates=1", "--extra=[]"], "JSON object"),
        (["--rates=1", "--workload=/no/such"], "/no/such"),
    ],
)
def test_bad_flags_are_one_line(args, words, capsys):
    at_run_time = words in ("not ready", "/no/such")
    assert cli.main(["bench", "serve", *args]) == (1 if at_run_time else 2)
    line = capsys.readouterr().err.splitlines()[-1]
    assert line.startswith("octavo bench serve: ")
    assert words in line


def test_help_names_every_benchmark(capsys):
    from octavo.bench.commands import COMMANDS

    assert cli.main(["bench"]) == 2
    text = capsys.readouterr().out
    assert all(f"\n  {name} " in text for name in COMMANDS)
    for name in COMMANDS:
        assert cli.main(["bench", name, "--help"]) == 0
        assert capsys.readouterr().out.startswith(f"usage: octavo bench {name}")
    assert cli.main(["bench", "serv"]) == 2
