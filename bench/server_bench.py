"""`octavo bench load`: what the server costs when the engine costs nothing.

The processes are those of `octavo serve`, with an engine core that computes nothing
(`clock_engine.py`). Text is detokenised, one event is sent a token, and this process is the client.
All of them share the machine's cores.

throughput  tokens a second of --streams streams at once, the engine emitting as fast as it can,
            from the first request sent to the last answer's end
latency     at --rate tokens a second, how old a token is when its event arrives, while all
            streams run
memory      resident memory of the engine core and of what answers HTTP over --requests short
            requests, every second one streamed: least-squares slope of the last quarter, and
            while it is above the bar of a quarter more, three at most
"""

import asyncio
import importlib.metadata
import json
import os
import platform
import re
import time
from collections.abc import Coroutine, Iterator
from typing import Any, cast

from absl import flags

from octavo.bench.clock_engine import ages_of
from octavo.bench.clock_server import running
from octavo.bench.growth import MIB_PER_1000, watched
from octavo.bench.report import Results, flag_values, percentile, rounded
from octavo.bench.server_tree import ServerTree
from octavo.serve.event_loop import loop_factory
from octavo.serve.flags import UsageError

STAGES = ("throughput", "latency", "memory")
COLUMNS = ("what", "streams", "tok_s", "age_ms_p50", "age_ms_p99", "mib_per_1000", "bar")
BARS = {"throughput": 12_000.0, "latency": 20.0, "memory": MIB_PER_1000}
"""Tokens a second at least, milliseconds of the 99th percentile at most, MiB per 1,000 at most."""

PACKAGES = ("fastapi", "starlette", "uvicorn", "uvloop", "httptools", "pyzmq", "msgspec")
RAMP_SECONDS = 2.0
"""Time over which the streams of the latency stage begin."""

MEMORY_LANES, MEMORY_TOKENS = 64, 8

GOOD = b"HTTP/1.1 200 "
END_OF_EVENT = b"\n\n"
WORD = re.compile(rb'"text":" ([a-z]+)"')
HELP = """[--flags]

  --stages=throughput,latency,memory
  --streams=256 --tokens=1000   streams at once, and tokens of each
  --rounds=3                    of the throughput stage
  --rate=6000 --seconds=20      of the latency stage: tokens a second of all streams
  --requests=20000              of the memory stage
  --api_processes=1             of the server
  --out=FILE --label=TEXT --date"""


def define(values: flags.FlagValues) -> None:
    """The command's flags."""
    number, text = flags.DEFINE_integer, flags.DEFINE_string
    flags.DEFINE_list("stages", list(STAGES), "what to measure", flag_values=values)
    number("streams", 256, "at once", lower_bound=1, upper_bound=4096, flag_values=values)
    number("tokens", 1000, "a stream", lower_bound=2, upper_bound=8000, flag_values=values)
    number("rounds", 3, "of throughput", lower_bound=1, flag_values=values)
    number("rate", 6000, "tokens a second", lower_bound=1, flag_values=values)
    number("seconds", 20, "of latency", lower_bound=1, upper_bound=600, flag_values=values)
    number("requests", 20_000, "of memory", lower_bound=400, flag_values=values)
    number("api_processes", 1, "of the server", lower_bound=1, upper_bound=64, flag_values=values)
    text("out", "", "file to append to", flag_values=values)
    text("label", "", "of the server", flag_values=values)
    text("date", "", "written into the lines", flag_values=values)


def run(config: Any, values: flags.FlagValues, rest: list[str]) -> int:
    """Measure; exit code 1 when a bar is missed."""
    flag = flag_values(values)
    if rest or not set(flag["stages"]) <= set(STAGES):
        raise UsageError(f"stages must be of {', '.join(STAGES)}, not {rest or flag['stages']}")
    results = Results(
        flag["out"],
        flag["date"],
        label=flag["label"],
        packages={name: importlib.metadata.version(name) for name in PACKAGES},
        python=platform.python_version(),
        api_processes=flag["api_processes"],
        client="this machine's cores are shared by server, engine core and client",
    )
    todo = {"throughput": throughput, "latency": latency, "memory": memory}
    for stage in STAGES:
        if stage in flag["stages"]:
            before = round(os.getloadavg()[0], 2)
            for fields in todo[stage](flag):
                results.say(what=stage, bar=BARS[stage], load_before=before, **fields)
    results.table(COLUMNS)
    return 0 if all(row["met"] for row in results.rows) else 1


def throughput(flag: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """A line a round."""
    streams, tokens = flag["streams"], flag["tokens"]
    with running(api_processes=flag["api_processes"]) as server:
        _together(_crowd(server, streams, 50))
        for _ in range(flag["rounds"]):
            used = _Usage(server)
            begun = time.monotonic()
            found = _together(_crowd(server, streams, tokens))
            seconds = max(one.ended for one in found) - begun
            speed = streams * tokens / seconds
            yield {
                "streams": streams,
                "tokens": tokens,
                "seconds": rounded(seconds),
                "tok_s": rounded(speed, 1),
                "reads": sum(one.reads for one in found),
                **used.per_token(streams * tokens),
                "met": speed >= BARS["throughput"],
            }


def latency(flag: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """One line: the ages of tokens that came while every stream ran."""
    streams, rate = flag["streams"], flag["rate"]
    period = streams / rate
    tokens = int((flag["seconds"] + RAMP_SECONDS) / period)
    with running(period, flag["api_processes"]) as server:
        _together(_crowd(server, streams, 5))
        used = _Usage(server)
        found = _together(_crowd(server, streams, tokens, ramp=RAMP_SECONDS, timed=True))
        usage = used.per_token(streams * tokens)
    since = max(one.came[0][0] for one in found)
    until = min(one.ended for one in found)
    ages = [age for one in found for age in one.ages(since, until)]
    together = max(0.0, until - since)  # of a client that was held up there may be no such time
    ms = {f"age_ms_p{q}": rounded((percentile(ages, q) or 0.0) * 1e3, 2) for q in (50, 90, 99, 100)}
    yield {
        "streams": streams,
        "rate": rate,
        "period_ms": rounded(period * 1e3),
        "tok_s": rounded(len(ages) / together, 1) if together else None,
        "tokens": len(ages),
        **ms,
        **usage,
        "met": (ms["age_ms_p99"] or 0.0) <= BARS["latency"],
    }


def memory(flag: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """One line."""
    count = flag["requests"]
    with running(api_processes=flag["api_processes"]) as server:
        lanes = _Lanes(server)
        begun = time.monotonic()
        found = _together(watched(server, count, lambda: lanes.done, lanes.run))
        seconds = time.monotonic() - begun
    yield {
        "requests": lanes.done,
        "tokens": MEMORY_TOKENS,
        "seconds": rounded(seconds, 1),
        "req_s": rounded(lanes.done / seconds, 1),
        **found,
        "met": found["mib_per_1000"][-1] <= BARS["memory"],
    }


class _Usage:
    """Processor time from now on, of the server and of this process."""

    def __init__(self, server: ServerTree) -> None:
        self._server = server
        self._before = self._now()

    def _now(self) -> dict[str, float]:
        return {**self._server.cpu_seconds(), "client": time.process_time()}

    def per_token(self, tokens: int) -> dict[str, float | None]:
        """Microseconds a token of each kind of process."""
        now = self._now()
        return {
            f"{name}_us_a_token": rounded((now[name] - before) / tokens * 1e6, 2)
            for name, before in self._before.items()
        }


class Stream(asyncio.Protocol):
    """One connection with one answer of `tokens` tokens.

    Attributes:
        came: with `timed`, when each portion came, and it; nothing is read in it until the end, so
            that the client is quick.
        reads: portions in which the answer came.
        ended: when it had come whole.
        done: resolved at the end, with RuntimeError when the answer is not what was asked.
    """

    def __init__(self, payload: bytes, tokens: int, *, streamed: bool, timed: bool) -> None:
        self._payload = payload
        self._left = tokens + 1 if streamed else 0  # [DONE] is an event too
        self._end = b"\r\n0\r\n\r\n" if streamed else b"}"
        self._timed = timed
        self._rest = self._head = b""
        self.came: list[tuple[float, bytes]] = []
        self.reads = 0
        self.ended = 0.0
        self.done = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Ask."""
        cast(asyncio.Transport, transport).write(self._payload)

    def data_received(self, data: bytes) -> None:
        """Count the events that have come whole."""
        now = time.monotonic()
        if len(self._head) < len(GOOD):
            self._head += data
        self.reads += 1
        whole, end, self._rest = (self._rest + data).rpartition(END_OF_EVENT)
        if not end:
            return
        self._left -= whole.count(END_OF_EVENT) + 1
        if self._timed:
            self.came.append((now, whole))

    def ages(self, since: float, until: float) -> list[float]:
        """Seconds from a token's making to its coming, of those that came since .. until."""
        came = [(now, whole) for now, whole in self.came if since <= now < until]
        return [age for now, whole in came for age in ages_of(WORD.findall(whole), now)]

    def connection_lost(self, exc: Exception | None) -> None:
        """The server closes the connection behind its answer."""
        self.ended = time.monotonic()
        if self._left or not self._rest.endswith(self._end) or not self._head.startswith(GOOD):
            text = f"an answer is not whole: {self._left} events missing, {self._head[:300]!r}"
            self.done.set_exception(RuntimeError(text))
        else:
            self.done.set_result(None)


def _payload(port: int, tokens: int, streamed: bool) -> bytes:
    body = {"prompt": "the server under load", "max_tokens": tokens, "temperature": 0.0}
    data = json.dumps({**body, "ignore_eos": True, "stream": streamed}).encode()
    head = (
        f"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\nConnection: close\r\n"
        f"Content-Type: application/json\r\nContent-Length: {len(data)}\r\n\r\n"
    )
    return head.encode() + data


async def _ask(
    server: ServerTree, tokens: int, *, streamed: bool = True, timed: bool = False
) -> Stream:
    """One whole answer; RuntimeError when it isn't."""
    payload = _payload(server.port, tokens, streamed)

    def begin() -> Stream:
        return Stream(payload, tokens, streamed=streamed, timed=timed)

    loop = asyncio.get_running_loop()
    _, stream = await loop.create_connection(begin, "127.0.0.1", server.port)
    await stream.done
    return stream


async def _crowd(
    server: ServerTree, streams: int, tokens: int, *, ramp: float = 0.0, timed: bool = False
) -> list[Stream]:
    """`streams` answers at once, begun evenly over `ramp` seconds."""

    async def one(i: int) -> Stream:
        await asyncio.sleep(ramp * i / streams)
        return await _ask(server, tokens, timed=timed)

    return await asyncio.gather(*map(one, range(streams)))


class _Lanes:
    """Short requests, MEMORY_LANES at a time; `done` have been answered."""

    def __init__(self, server: ServerTree) -> None:
        self._server = server
        self.done = 0

    async def run(self, count: int) -> None:
        """`count` more."""
        todo = iter(range(count))
        await asyncio.gather(*[self._lane(todo) for _ in range(MEMORY_LANES)])

    async def _lane(self, todo: Iterator[int]) -> None:
        for i in todo:
            await _ask(self._server, MEMORY_TOKENS, streamed=i % 2 == 0)
            self.done += 1


def _together[Found](work: Coroutine[Any, Any, Found]) -> Found:
    return asyncio.run(work, loop_factory=loop_factory())
