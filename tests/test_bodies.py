"""Large request bodies: bounded in time and memory, and read where they hold up nobody."""

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mock_server import running
from pydantic import BaseModel

from octavo.serve import bodies
from octavo.serve.errors import ApiError

SIZE = (16 << 20) - 4096
HEAD = '{"model": "mock", "max_tokens": 1, '
ONE = '"messages": [{"role": "user", "content": "a"}], '
TURN = '{"role": "user", "content": "a"}'
MEBIBYTE = 1 << 20


@pytest.fixture(scope="module")
def srv():
    with running() as server:
        yield server


def filled(start, item, end, size=SIZE):
    """A JSON object with as many of `item` as `size` bytes hold."""
    head, count = HEAD + start, (size - len(start)) // (len(item) + 2)
    return f"{head}{', '.join([item] * count)}{end}}}".encode()


def numbered(start, value):
    count = SIZE // (len(value) + 13)
    return (HEAD + start + ", ".join(f'"{i:07}": {value}' for i in range(count)) + "}}").encode()


LARGE = {
    "ids": ("/v1/completions", filled('"prompt": [', "97", "]")),
    "lists of ids": ("/v1/completions", filled('"prompt": [', "[97]", "]")),
    "no prompts": ("/v1/completions", filled('"prompt": [[', "[]", "]]")),
    "stop ids": ("/v1/completions", filled('"prompt": "a", "stop_token_ids": [', "1", "]")),
    "wrong stop ids": ("/v1/completions", filled('"prompt": "a", "stop_token_ids": [', "{}", "]")),
    "wrong stops": ("/v1/completions", filled('"prompt": "a", "stop": [', "1", "]")),
    "wrong allowed": (
        "/v1/completions",
        filled('"prompt": "a", "allowed_token_ids": [', "1.5", "]"),
    ),
    "wrong bias": ("/v1/completions", numbered('"prompt": "a", "logit_bias": {', '""')),
    "bias": ("/v1/completions", numbered('"prompt": "a", "logit_bias": {', "1")),
    "fields": ("/v1/completions", numbered('"a": {}, ', "null")[:-1]),
    "messages": ("/v1/chat/completions", filled('"messages": [', TURN, "]")),
    "schema": ("/v1/chat/completions", filled(ONE + '"guided_json": {"enum": [', "1", "]}")),
    "tools": ("/v1/chat/completions", filled(ONE + '"tools": [{"x": [', "1", "]}]")),
    "metadata": ("/v1/responses", numbered('"input": "a", "metadata": {', "1")),
    "include": ("/v1/responses", filled('"input": "a", "include": [', "1", "]")),
    "stop sequences": ("/v1/messages", filled(ONE + '"stop_sequences": [', "1", "]")),
    "continuations": ("/v1/score", filled('"prompt": "a", "continuations": [', "97", "]")),
    "inputs": ("/v1/embeddings", filled('"input": [', '"a"', "]")),
    "wrong tokens": ("/detokenize", filled('"tokens": [', "1.5", "]")),
    "unclosed": ("/v1/completions", b"[" * SIZE),
}


@pytest.mark.parametrize("name", LARGE)
def test_a_large_body_is_refused_without_much_memory_while_others_are_answered(srv, name):
    """Some took 25 seconds and 8 GB, all on the event loop."""
    path, body = LARGE[name]
    Path(f"/proc/{srv.process.pid}/clear_refs").write_text("5")  # forget the peak
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(srv.post, path, body)
        turns = 0
        while not answer.done():
            assert srv.get("/health/live")[0] == 200
            turns += 1
    status, _, refusal = answer.result()
    assert status == 400, refusal
    assert len(json.dumps(refusal)) < 1000
    assert turns > 2
    assert peak_memory(srv.process.pid) < 700 * MEBIBYTE


def peak_memory(pid):
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith("VmHWM"))


def test_a_small_request_does_not_wait_for_slow_templates(srv, tmp_path):
    go_on = tmp_path / "go on"
    with ThreadPoolExecutor(4) as pool:
        slow = [pool.submit(srv.chat, "x", chat_template=f"wait for {go_on}") for _ in range(4)]
        srv.good(srv.chat("abc"))
        assert not any(one.done() for one in slow)
        go_on.touch()
    assert all(one.result()[0] == 200 for one in slow)


def test_texts_full_of_punctuation_are_texts():
    text = "[{,\"'\\" * 400_000
    assert bodies.parse_body(Anything, msgspec.json.encode({"prompt": text})).prompt == text


class Anything(BaseModel):
    prompt: object = None


VALUES = st.recursive(
    st.none() | st.integers(-9, 9) | st.text(st.sampled_from('a"\\[]{},:\n\u2028é')),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(st.sampled_from('a"\\,[')), inner),
)


@settings(max_examples=200, deadline=None)
@given(VALUES)
def test_what_stands_in_texts_is_not_counted(value):
    raw = json.dumps(value).encode()
    outside, texts = bodies._outside_texts(raw)
    lists, objects, strings, commas = counted(value)
    counts = [np.count_nonzero(outside == ord(char)) for char in "[{,"]
    assert (counts, texts) == ([lists, objects, commas], strings)


def counted(value):
    """Lists, objects, strings and commas of JSON."""
    if isinstance(value, str):
        return 0, 0, 1, 0
    if not isinstance(value, list | dict):
        return 0, 0, 0, 0
    inner = [counted(item) for item in (value.values() if isinstance(value, dict) else value)]
    lists, objects, strings, commas = (sum(column) for column in zip((0, 0, 0, 0), *inner))
    commas += max(len(value) - 1, 0)
    if isinstance(value, dict):
        return lists, objects + 1, strings + len(value), commas
    return lists + 1, objects, strings, commas


@pytest.mark.parametrize(
    ("item", "most"),
    [
        (b"1", bodies.MAX_VALUES - 1),  # the list and the object count too
        (b"[]", bodies.MAX_CONTAINERS - 2),
        (b'""', bodies.MAX_TEXTS - 1),  # so does the field's name
    ],
)
def test_the_bounds_are_exact(item, most):
    bodies.check_json_size(b'{"a":[' + b",".join([item] * most) + b"]}")
    with pytest.raises(ApiError, match="holds too much"):
        bodies.check_json_size(b'{"a":[' + b",".join([item] * (most + 1)) + b"]}")
