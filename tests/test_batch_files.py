"""`octavo batch`: the file format, the endpoints behind it, and runs that are killed."""

import asyncio
import json
import os
import pty
import re
import subprocess
import sys
import tempfile
import termios
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from mock_engine import MockConfig
from mock_server import PATIENCE

from octavo.serve import batchfile, cli, offline
from octavo.serve.offline import run_batch
from octavo.serve.server import Parts

HERE = Path(__file__).parent
MOCK = Parts("mock_engine:make", "mock_engine:tokenizer")
COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"


@pytest.fixture(autouse=True)
def mock_in_the_core(monkeypatch):
    given = os.environ.get("PYTHONPATH", "")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, [str(HERE), given])))


def line(name, body, url=COMPLETIONS, **fields):
    return {"custom_id": name, "method": "POST", "url": url, "body": body, **fields}


def completion(name, prompt, **fields):
    body = {"prompt": prompt, "max_tokens": 3, "temperature": 0, **fields}
    return line(name, body)


def write(path, lines):
    text = "\n".join(one if isinstance(one, str) else json.dumps(one) for one in lines)
    path.write_text(text + "\n")
    return path


def records(path):
    return [json.loads(one) for one in path.read_text().splitlines()]


def run(source, target, **fields):
    return asyncio.run(run_batch(MockConfig(**fields), source, target, parts=MOCK, at_once=4))


def test_every_endpoint_and_every_failure_gets_its_record(tmp_path, monkeypatch):
    monkeypatch.setenv("OCTAVO_API_KEY", "a server's")
    messages = [{"role": "user", "content": "hi"}]
    source = write(
        tmp_path / "in.jsonl",
        [
            completion("text", "abc"),
            "",
            line("chat", {"messages": messages, "max_tokens": 3, "temperature": 0}, CHAT),
            line("response", {"input": "hi", "max_output_tokens": 3}, "/v1/responses"),
            line("vector", {"input": "ab"}, "/v1/embeddings"),
            line("score", {"prompt": "a", "continuations": "b"}, "/v1/score"),
            completion("range", "abc", temperature=-1),
            completion("model", "abc", model="other"),
            completion("nan", "ab<|nan|>", max_tokens=5),
            completion("stream", "abc", stream=True),
            completion("text", "again"),
            line("url", {}, "/metrics"),
            line("verb", {}, method="GET"),
            line("", {}),
            {"custom_id": "bare"},
            "not json",
            "[" * 5000,
        ],
    )
    report = run(source, tmp_path / "out.jsonl")
    assert (report.succeeded, report.failed, report.skipped) == (5, 11, 0)
    found = records(tmp_path / "out.jsonl")
    ok = {r["custom_id"]: r["response"]["body"] for r in found if r["error"] is None}
    assert ok["text"]["choices"][0]["text"] == "abc"
    assert ok["chat"]["choices"][0]["message"]["content"] == "use"
    assert ok["response"]["output"][0]["content"][0]["text"] == "use"
    assert len(ok["vector"]["data"][0]["embedding"]) == 3
    assert ok["score"]["data"][0]["score"] == pytest.approx(-0.1)
    assert report.completion_tokens == 9
    answered = {r["custom_id"]: r for r in found if r["error"] and r["response"]}
    codes = {name: r["response"]["status_code"] for name, r in answered.items()}
    assert codes == {"range": 400, "model": 404, "nan": 500}
    assert "temperature" in answered["range"]["error"]["message"]
    refused = {r["line"]: r["error"]["message"] for r in found if r["response"] is None}
    words = ("stream", "not unique", "/v1/score", "GET", "custom_id", "url", "batch", "batch")
    assert sorted(refused) == list(range(10, 18))
    for number, word in zip(sorted(refused), words, strict=True):
        assert word in refused[number]

    again = run(source, tmp_path / "out.jsonl")
    assert (again.succeeded, again.failed, again.skipped, again.skipped_failed) == (0, 0, 16, 11)
    assert records(tmp_path / "out.jsonl") == found


RUN = """
import asyncio, sys
from pathlib import Path
from test_batch_files import MOCK
from mock_engine import MockConfig
from octavo.serve.offline import run_batch
config = MockConfig(step_seconds=0.05)
asyncio.run(run_batch(config, Path(sys.argv[1]), Path(sys.argv[2]), parts=MOCK, at_once=3))
"""


def test_a_killed_run_goes_on_without_losing_or_repeating_a_line(tmp_path):
    names = [f"r{i}" for i in range(60)]
    source = write(tmp_path / "in.jsonl", [completion(n, n, max_tokens=20) for n in names])
    target = tmp_path / "out.jsonl"
    process = subprocess.Popen(
        [sys.executable, "-c", RUN, source, target], stderr=subprocess.DEVNULL
    )
    end = time.monotonic() + PATIENCE
    while not target.exists() or target.read_bytes().count(b"\n") < 4:
        assert process.poll() is None
        assert time.monotonic() < end
        time.sleep(0.01)
    process.kill()
    process.wait()
    before = target.read_bytes().count(b"\n")
    assert before < len(names)
    with target.open("ab") as file:  # as if it had been killed while it wrote
        file.write(b'{"id":"batch_req_1","custom_id":"r59","resp')
    report = run(source, target)
    assert (report.skipped, report.succeeded) == (before, len(names) - before)
    found = records(target)
    assert sorted(r["custom_id"] for r in found) == sorted(names)
    texts = {r["custom_id"]: r["response"]["body"]["choices"][0]["text"] for r in found}
    assert texts == {name: (name * 20)[:20] for name in names}


def test_the_engines_end_stops_the_run_and_leaves_its_lines_to_the_next(tmp_path):
    source = write(tmp_path / "in.jsonl", [completion("a", "abc"), completion("x", "<|exit|>")])
    with pytest.raises(ValueError, match="run again"):
        run(source, tmp_path / "out.jsonl")
    assert "x" not in [r["custom_id"] for r in records(tmp_path / "out.jsonl")]


def test_a_full_queue_is_waited_for(tmp_path):
    source = write(tmp_path / "in.jsonl", [completion(str(i), "ab") for i in range(8)])
    report = run(source, tmp_path / "out.jsonl", max_waiting=1, step_seconds=0.01)
    assert (report.succeeded, report.failed) == (8, 0)


@given(st.lists(st.text(min_size=1, max_size=5), unique=True, max_size=6), st.integers(0, 10_000))
def test_a_file_cut_anywhere_resumes_at_its_last_whole_line(names, cut):
    lines = [batchfile.Line(i, name) for i, name in enumerate(names, 1)]
    whole = [batchfile.result(one, "batch_req_1", 200, b'{"text":"\\n"}') for one in lines]
    data = b"".join(whole)
    data = data[: cut % (len(data) + 1)]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "out.jsonl"
        path.write_bytes(data)
        kept = data.count(b"\n")
        assert batchfile.resume(path) == dict.fromkeys(names[:kept], False)
        assert path.read_bytes() == b"".join(whole[:kept])


ASKED = '{"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": {}}'
OTHER = [f"{ASKED}\n", f'{{"id": "cmpl-1", {ASKED[1:]}\n']
OTHER += ["hello\n{", "[]\n{", '{"custom_id": 5}\n{', "one line", '{"custom_id": "a"}']


@pytest.mark.parametrize("text", OTHER)
def test_a_file_of_something_else_is_not_touched(tmp_path, text):
    path = tmp_path / "out.jsonl"
    path.write_text(text)
    with pytest.raises(ValueError, match="line 1 is no batch result"):
        batchfile.resume(path)
    assert path.read_text() == text


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["in.jsonl", "out.jsonl", "--model=/no/such/model"], "/no/such/model"),
        (["in.jsonl", "in.jsonl"], "in.jsonl, line 1 is no batch result"),
        (["in.jsonl", "/dev/zero"], "/dev/zero is no file"),
    ],
)
def test_failures_are_one_line(tmp_path, monkeypatch, capsys, args, words):
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "in.jsonl", [completion("a", "b")])
    assert cli.main(["batch", *args]) == 1
    last = capsys.readouterr().err.splitlines()[-1]
    assert last.startswith("octavo batch: ")
    assert words in last


# What a run says of itself


@pytest.fixture
def batch(tmp_path, monkeypatch, capsys):
    """`octavo batch` on the mock: its exit code and the summary line."""
    monkeypatch.chdir(tmp_path)

    async def on_the_mock(config, source, target, **settings):
        return await run_batch(MockConfig(), source, target, parts=MOCK, **settings)

    monkeypatch.setattr(offline, "run_batch", on_the_mock)

    def started(code=0):
        assert cli.main(["batch", "in.jsonl", "out.jsonl"]) == code
        (summary,) = capsys.readouterr().out.splitlines()
        return json.loads(summary)

    return started


def test_the_summary_line_has_what_this_run_did(tmp_path, batch):
    lines = [completion(f"r{i}", "abcd", max_tokens=5) for i in range(4)]
    source = write(tmp_path / "in.jsonl", [*lines[:3], completion("bad", "a", temperature=-1)])
    first = batch(code=3)
    assert first.keys() == {
        *("succeeded", "failed", "skipped", "skipped_failed"),
        *("prompt_tokens", "completion_tokens"),
        *("seconds", "output_tok_s"),
    }
    counts = ("succeeded", "failed", "skipped", "prompt_tokens", "completion_tokens")
    assert [first[name] for name in counts] == [3, 1, 0, 12, 15]
    assert first["seconds"] > 0
    assert first["output_tok_s"] == pytest.approx(15 / first["seconds"], rel=0.1)
    write(source, lines)
    second, third = batch(), batch()
    assert [second[name] for name in counts] == [1, 0, 3, 4, 5]
    assert [third[name] for name in counts] == [0, 0, 4, 0, 0]


@pytest.mark.parametrize("good", [0, 1])
def test_the_exit_code_says_whether_a_line_failed_in_this_run_or_before(tmp_path, batch, good):
    bad = completion("refused", "a", temperature=-1)
    lines = [bad, "not json", *(completion(f"r{i}", "ab") for i in range(good))]
    source = write(tmp_path / "in.jsonl", lines)
    assert batch(code=3)["failed"] == 2
    again = batch(code=3)
    assert (again["failed"], again["skipped"], again["skipped_failed"]) == (0, 2 + good, 2)
    write(source, lines[2:])  # what failed is no line of this file any more
    assert batch(code=0)["skipped_failed"] == 0


def last_words(raw):
    """What stands behind the last carriage return: the bar as it was left."""
    return raw.replace("\r\n", "\n").rstrip("\n").rsplit("\r", 1)[-1]


@pytest.fixture
def bars(monkeypatch):
    """How the bars were made."""
    made, real = [], offline.tqdm
    monkeypatch.setattr(offline, "tqdm", lambda **how: made.append(how) or real(**how))
    return made


def check_bar(text):
    assert text.startswith("out.jsonl: 100%")
    assert " 5/5 " in text
    assert re.search(r"request/s|s/request", text)  # as it writes less than one a second
    assert float(re.search(r"([0-9.]+) tok/s", text)[1]) > 0


def test_the_bar_ends_full_with_tokens_a_second(tmp_path, batch, bars, monkeypatch):
    write(tmp_path / "in.jsonl", [completion(f"r{i}", "ab") for i in range(5)])
    main, end = pty.openpty()
    termios.tcsetwinsize(end, (24, 100))
    with os.fdopen(end, "w") as terminal, os.fdopen(main, "rb", buffering=0) as screen:
        monkeypatch.setattr(sys, "stderr", terminal)
        batch()
        terminal.flush()
        os.set_blocking(main, False)
        check_bar(last_words("".join(iter(lambda: (screen.read(4096) or b"").decode(), ""))))
        monkeypatch.setattr(sys, "stderr", sys.__stderr__)
    assert bars[0]["mininterval"] < 1


def test_a_bar_that_goes_to_a_file_moves_seldom(tmp_path, batch, bars, monkeypatch):
    write(tmp_path / "in.jsonl", [completion(f"r{i}", "ab") for i in range(5)])
    report = tmp_path / "stderr"
    with report.open("w") as file:
        monkeypatch.setattr(sys, "stderr", file)
        batch()
    check_bar(last_words(report.read_bytes().decode()))
    assert bars[0]["mininterval"] >= 10
