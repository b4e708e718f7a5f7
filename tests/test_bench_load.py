"""`octavo bench load`: ages read from tokens, answers that are not whole, and a small run."""

import asyncio
import json
import math
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from octavo.bench.clock_engine import STAMPS, UNIT_SECONDS, ages_of, stamp
from octavo.bench.plain_tokenizer import word
from octavo.bench.server_bench import Stream
from octavo.serve import cli

HEAD = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n"


@given(
    st.floats(0, 1e6),
    st.floats(0, (STAMPS - 2) * UNIT_SECONDS),
)
def test_the_age_of_a_token_is_known_to_the_clocks_unit(made, age):
    (found,) = ages_of([word(stamp(made)).encode()], made + age)
    assert -1e-6 <= found - age <= UNIT_SECONDS + 1e-6


def chunk(data):
    return b"%x\r\n%s\r\n" % (len(data), data)


def answer(made):
    """A stream whose tokens were made at these moments."""
    event = b'data: {"choices":[{"index":0,"text":" %s","finish_reason":null}]}\n\n'
    events = [event % word(stamp(moment)).encode() for moment in made] + [b"data: [DONE]\n\n"]
    return HEAD + b"".join(map(chunk, events)) + b"0\r\n\r\n"


async def fed(data, tokens, places=(), *, streamed=True):
    stream = Stream(b"", tokens, streamed=streamed, timed=True)
    edges = sorted({0, len(data), *(place % (len(data) + 1) for place in places)})
    for a, b in pairwise(edges):
        stream.data_received(data[a:b])
    stream.connection_lost(None)
    await stream.done
    return stream


@given(st.lists(st.integers(0, 2000), max_size=20))
def test_every_token_counts_once_however_the_answer_is_cut(places):
    stream = asyncio.run(fed(answer([1.0, 2.0, 3.0]), 3, places))
    assert len(stream.ages(0.0, math.inf)) == 3


@pytest.mark.parametrize(
    "data",
    [
        answer([1.0, 2.0]),
        answer([1.0, 2.0, 3.0, 4.0]),
        answer([1.0, 2.0, 3.0])[:-5],
        HEAD.replace(b"200 OK", b"500 Oh") + answer([1.0, 2.0, 3.0])[len(HEAD) :],
        b"",
    ],
)
def test_an_answer_that_is_not_what_was_asked_is_an_error(data):
    with pytest.raises(RuntimeError, match="not whole"):
        asyncio.run(fed(data, 3))


def test_an_answer_in_one_piece_must_be_whole():
    data = b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n{}"
    asyncio.run(fed(data, 3, streamed=False))
    with pytest.raises(RuntimeError, match="not whole"):
        asyncio.run(fed(data[:-1], 3, streamed=False))


def test_a_small_run_gives_every_figure(tmp_path):
    out = tmp_path / "lines.jsonl"
    small = ["--streams=4", "--tokens=30", "--rounds=1", "--rate=400", "--seconds=1"]
    cli.main(["bench", "load", *small, "--requests=400", f"--out={out}"])
    throughput, latency, memory = map(json.loads, out.read_text().splitlines())
    assert (throughput["what"], throughput["streams"], throughput["bar"]) == (
        "throughput",
        4,
        12000,
    )
    assert throughput["met"] == (throughput["tok_s"] >= 12000)
    assert throughput["core_us_a_token"] >= 0
    assert latency["tokens"] <= 4 * 300  # of each of four streams, in three seconds at that rate
    assert latency["tok_s"] is None or latency["tok_s"] >= 0
    assert 0 <= latency["age_ms_p50"] <= latency["age_ms_p99"]
    windows = memory["mib_per_1000"]
    assert memory["requests"] == 400 + 100 * (len(windows) - 1)
    assert memory["met"] == (windows[-1] <= 1)
    assert memory["met"] or len(windows) == 4
    assert memory["core_mib"][0] > 20
    assert memory["api_mib"][0] > 20
    slopes = memory["core_mib_per_1000"] + memory["api_mib_per_1000"]
    assert windows[0] == pytest.approx(slopes, abs=0.01)
    assert {"fastapi", "pyzmq"} <= set(memory["packages"])
