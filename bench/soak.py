"""`octavo bench soak`: `octavo serve` under mixed traffic, judged answer by answer.

The server is real, of whatever model the flags name; a tiny one makes the traffic dense.

Each case is asked alone first. Then --requests requests drawn from the cases, --at_once at a time:
streamed or whole, read or read slowly, some refused, some cut off by their client before or in the
middle of the answer. While memory grows too much over the last quarter, a quarter more is sent,
three at most. Afterwards nothing may run or hold a page, and each case is asked alone again.
"""

import asyncio
import importlib.metadata
import platform
import sys
import time
import urllib.request
from collections.abc import Coroutine, Sequence
from typing import Any

from absl import flags

from octavo.bench.growth import MIB_PER_1000, watched
from octavo.bench.report import Results, flag_values, rounded
from octavo.bench.server_tree import ServerTree, started
from octavo.bench.soak_cases import Case, bad_cases, good_cases
from octavo.bench.soak_client import Soak, answer_of
from octavo.bench.soak_judge import same
from octavo.serve.command import command_of
from octavo.serve.event_loop import loop_factory

NAME = "soak"
START_SECONDS, REST_SECONDS = 300.0, 30.0
FAULTS_SHOWN = 20
GAUGES = ("vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:kv_cache_usage_perc")
COLUMNS = ("requests", "at_once", "req_s", "faults", "at_rest", "mib_per_1000", "met")
HELP = """[--flags] [-- flags of octavo serve]

  --requests=2000 --at_once=64
  --copies=3 --seed=0    cases of each kind; what the traffic is drawn from
  --out=FILE --label=TEXT --date"""


def define(values: flags.FlagValues) -> None:
    """The command's flags."""
    number, text = flags.DEFINE_integer, flags.DEFINE_string
    number("requests", 2000, "in all", lower_bound=8, flag_values=values)
    number("at_once", 64, "in flight", lower_bound=1, upper_bound=1024, flag_values=values)
    number("copies", 3, "cases a kind", lower_bound=1, upper_bound=100, flag_values=values)
    number("seed", 0, "of cases and traffic", flag_values=values)
    text("out", "", "file to append to", flag_values=values)
    text("label", "", "of the server", flag_values=values)
    text("date", "", "written into the line", flag_values=values)


def run(config: Any, values: flags.FlagValues, rest: list[str]) -> int:
    """Soak a server; exit code 1 unless everything held."""
    flag = flag_values(values)
    results = Results(
        flag["out"],
        flag["date"],
        label=flag["label"],
        python=platform.python_version(),
        llguidance=importlib.metadata.version("llguidance"),
        client="this machine's cores are shared by server, engine and client",
        serve=rest,
    )
    with serving(rest) as server:
        found = soak(server, flag["requests"], flag["at_once"], flag["copies"], flag["seed"])
    for fault in found.pop("examples"):
        print(fault, file=sys.stderr)
    results.say(what="soak", bar=MIB_PER_1000, **found)
    results.table(COLUMNS)
    return 0 if found["met"] else 1


def serving(arguments: Sequence[str]) -> Any:
    """Context manager: `octavo serve` with these flags, on a free port."""
    command = [*command_of("octavo.serve.cli"), "serve", "--port=0"]
    command += [f"--served_model_name={NAME}", "--log_level=warning", *arguments]
    return started(command, START_SECONDS)


def soak(server: ServerTree, count: int, at_once: int, copies: int, seed: int) -> dict[str, Any]:
    """Everything that is reported; `examples` are the first faults."""
    good, bad = good_cases(seed, copies), bad_cases()
    expected = asyncio.run(_alone(server, [*good, *bad]), loop_factory=loop_factory())
    traffic = Soak(server.port, good, bad, expected)
    begun = time.monotonic()

    def work(more: int) -> Coroutine[Any, Any, None]:
        return traffic.run(more, at_once, seed)

    grown = asyncio.run(
        watched(server, count, lambda: traffic.done, work), loop_factory=loop_factory()
    )
    seconds = time.monotonic() - begun
    at_rest = rests(server.port)
    again = asyncio.run(_alone(server, [*good, *bad]), loop_factory=loop_factory())
    faults = traffic.tally.faults
    faults += [
        f"{name}: different afterwards"
        for name in expected
        if not same(again[name], expected[name])
    ]
    whole = sum(traffic.tally.ends.values()) == traffic.done >= count
    return {
        "requests": traffic.done,
        "at_once": at_once,
        "cases": len(expected),
        "seconds": rounded(seconds, 1),
        "req_s": rounded(traffic.done / seconds, 1),
        "ends": dict(traffic.tally.ends),
        "faults": len(faults),
        "at_rest": at_rest,
        **grown,
        "met": whole and not faults and at_rest and grown["mib_per_1000"][-1] <= MIB_PER_1000,
        "examples": faults[:FAULTS_SHOWN],
    }


async def _alone(server: ServerTree, cases: Sequence[Case]) -> dict[str, Any]:
    """The answers of cases asked one after another."""
    return {case.name: await answer_of(case, server.port) for case in cases}


def rests(port: int) -> bool:
    """Whether, within REST_SECONDS, nothing runs or waits and every page is free."""
    end = time.monotonic() + REST_SECONDS
    while any(_gauges(port)):
        if time.monotonic() > end:
            return False
        time.sleep(0.2)
    return True


def _gauges(port: int) -> list[float]:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as answer:
        lines = answer.read().decode().splitlines()
    found = [line for line in lines if line.startswith(GAUGES)]
    if len(found) != len(GAUGES):
        raise ValueError(f"/metrics has {len(found)} of {GAUGES}")
    return [float(line.rsplit(" ", 1)[1]) for line in found]
