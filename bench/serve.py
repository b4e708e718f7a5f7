"""`octavo bench serve`: latency and throughput of any OpenAI server that streams.

Open loop (--rates): requests go out at Poisson times, whatever the server does; latencies count
from the moment a request was due, so that neither a slow client nor a slow server hides queueing.
Closed loop (--concurrency): so many are in flight all the time; latencies count from the sending.

ttft is to the first event with a token, itl the gap between events, tpot a request's time from
first to last event over its tokens less one. Tokens are those of the server's usage report.
"""

import json
import time
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import Callable
from typing import Any

from absl import flags

from octavo.bench.load import Outcome, Target, run_load
from octavo.bench.report import Results, flag_values, rounded, spread
from octavo.bench.sse_client import Exchange
from octavo.bench.workload import DEFAULT, Workload, load
from octavo.serve.flags import UsageError

COLUMNS = (
    *("rate", "concurrency", "requests", "failed", "out_tok_s", "goodput_req_s"),
    *("ttft_ms_p50", "ttft_ms_p99", "tpot_ms_p50", "tpot_ms_p99", "itl_ms_p50", "itl_ms_p99"),
)
HELP = """--url=http://127.0.0.1:8000 [--flags]

  --rates=4,16,32         requests a second, Poisson; one run each
  --concurrency=256       requests in flight; one run each
  --workload=FILE         .json of lengths, or .jsonl of requests; default: the packaged mix
  --text                  prompts of words, not token ids
  --n=1000                requests of a run; a rate sends at most --max_seconds=60 of them,
                          a crowd at most --rounds times its size (0: no limit)
  --vocab=128256          token ids are drawn below this
  --ttft_limit_ms, --tpot_limit_ms  what a request must meet to count as goodput
  --model --api_key --extra='{"top_k": 1}' --path --timeout
  --processes=8 --warmup=32 --seed --wait=0 (seconds for the server to come up)
  --out=FILE --label=TEXT --date"""


def define(values: flags.FlagValues) -> None:
    """The command's flags."""
    text, number, real = flags.DEFINE_string, flags.DEFINE_integer, flags.DEFINE_float
    text("url", "http://127.0.0.1:8000", "server", flag_values=values)
    text("path", "/v1/completions", "endpoint", flag_values=values)
    text("model", "", "model field; empty: none", flag_values=values)
    text("api_key", "", "bearer token", flag_values=values)
    text("extra", "{}", "further body fields as JSON", flag_values=values)
    text("workload", str(DEFAULT), "what to send", flag_values=values)
    flags.DEFINE_bool("text", False, "words, not ids", flag_values=values)
    flags.DEFINE_list("rates", [], "requests a second", flag_values=values)
    flags.DEFINE_list("concurrency", [], "in flight", flag_values=values)
    number("n", 1000, "requests a run", lower_bound=1, flag_values=values)
    number("rounds", 0, "of a crowd; 0: n", lower_bound=0, flag_values=values)
    real("max_seconds", 60.0, "a rate sends rate x this at most", flag_values=values)
    number("vocab", 128256, "ids are below", lower_bound=16, flag_values=values)
    real("ttft_limit_ms", 200.0, "goodput", flag_values=values)
    real("tpot_limit_ms", 50.0, "goodput", flag_values=values)
    number("processes", 8, "of the client", lower_bound=1, flag_values=values)
    number("warmup", 32, "unreported requests", lower_bound=0, flag_values=values)
    number("seed", None, "of the arrivals", flag_values=values)
    real("timeout", 300.0, "seconds a request", flag_values=values)
    real("wait", 0.0, "seconds to wait for the server", flag_values=values)
    text("out", "", "file to append to", flag_values=values)
    text("label", "", "of the server", flag_values=values)
    text("date", "", "written into the lines", flag_values=values)


def run(config: Any, values: flags.FlagValues, rest: list[str]) -> int:
    """Measure; exit code 1 when a run had no answer at all."""
    if rest:
        raise UsageError(f"bench serve takes no arguments besides flags, got {rest}")
    flag = flag_values(values)
    target = Target(
        flag["url"],
        flag["model"],
        flag["path"],
        flag["api_key"],
        _object(flag["extra"]),
        flag["timeout"],
    )
    rates = [_positive("rates", item) for item in flag["rates"]]
    crowds = [int(_positive("concurrency", item)) for item in flag["concurrency"]]
    if not rates and not crowds:
        raise UsageError("bench serve needs --rates or --concurrency")
    workload = load(flag["workload"], flag["seed"])
    server = reach(target, flag["wait"])
    results = Results(flag["out"], flag["date"], label=flag["label"], server=server)
    bench = ServeBench(target, workload, flag, results)
    if flag["warmup"] and not bench.warm():
        return 1
    answered = [bench.open_loop(rate) for rate in rates]
    answered += [bench.closed_loop(crowd) for crowd in crowds]
    results.table(COLUMNS)
    return 0 if all(answered) else 1


def _object(text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except ValueError:
        value = None
    if not isinstance(value, dict):
        raise UsageError(f"extra must be a JSON object, not {text!r}")
    return value


def _positive(name: str, text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < 1e6 or (name == "concurrency" and value != int(value)):
        raise UsageError(f"{name} must be positive numbers, not {text!r}")
    return value


def reach(
    target: Target, seconds: float, alive: Callable[[], bool] = lambda: True
) -> dict[str, Any]:
    """Wait until the server is ready; what it says about itself at /version, if anything.

    Raises ValueError if it is not up in time or its process is no longer `alive`.
    """
    base = "http://{}:{}".format(*target.address)
    end = time.monotonic() + seconds
    while True:
        try:
            with urllib.request.urlopen(f"{base}/health", timeout=5):
                break
        except urllib.error.HTTPError as error:
            if error.code == 404:
                break
            problem = str(error)
        except OSError as error:
            problem = str(error)
        if time.monotonic() >= end or not alive():
            raise ValueError(f"{base} is not ready: {problem}")
        time.sleep(0.2)
    try:
        with urllib.request.urlopen(f"{base}/version", timeout=5) as answer:
            found = json.load(answer)
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


class ServeBench:
    """Runs of one workload against one target."""

    def __init__(
        self, target: Target, workload: Workload, flag: dict[str, Any], results: Results
    ) -> None:
        self._target, self._workload, self._flag = target, workload, flag
        self._results = results

    def warm(self) -> bool:
        """The unreported requests that ready connections, caches and programs."""
        outcome = self._run(self._flag["warmup"], at_once=self._flag["warmup"])
        good = any(exchange.ok for exchange in outcome.exchanges)
        if not good:
            self._results.say(what="serve", warmup=True, **failures(outcome.exchanges))
        return good

    def open_loop(self, rate: float) -> bool:
        """Poisson arrivals at `rate` a second; whether anything was answered."""
        count = max(1, min(self._flag["n"], int(rate * self._flag["max_seconds"])))
        return self._report(self._run(count, rate=rate), rate=rate)

    def closed_loop(self, crowd: int) -> bool:
        """`crowd` requests in flight; whether anything was answered."""
        rounds = self._flag["rounds"]
        count = min(self._flag["n"], rounds * crowd) if rounds else self._flag["n"]
        return self._report(self._run(count, at_once=crowd), rate="inf")

    def _run(self, count: int, *, rate: float = 0.0, at_once: int = 0) -> Outcome:
        asked = self._workload.requests(count, vocab=self._flag["vocab"], text=self._flag["text"])
        due = self._workload.arrivals(len(asked), rate) if rate else None
        return run_load(
            self._target, asked, due=due, at_once=at_once, processes=self._flag["processes"]
        )

    def _report(self, outcome: Outcome, **fields: Any) -> bool:
        limits = {name: self._flag[name] for name in ("ttft_limit_ms", "tpot_limit_ms")}
        self._results.say(
            what="serve",
            **fields,
            concurrency=outcome.at_once or None,
            processes=outcome.processes,
            workload=self._workload.name,
            seed=self._workload.seed,
            prompts="text" if self._flag["text"] else "ids",
            **summary(outcome, **limits),
        )
        return any(exchange.ok for exchange in outcome.exchanges)


def summary(outcome: Outcome, *, ttft_limit_ms: float, tpot_limit_ms: float) -> dict[str, Any]:
    """The figures of a run; throughput is over the time from its start to the last answer."""
    good = [exchange for exchange in outcome.exchanges if exchange.ok]
    wall = max((exchange.end for exchange in good), default=outcome.start) - outcome.start
    tokens = sum(exchange.tokens for exchange in good)
    met = [
        exchange
        for exchange in good
        if exchange.ttft * 1e3 <= ttft_limit_ms and (exchange.tpot or 0.0) * 1e3 <= tpot_limit_ms
    ]
    prompt = sum(exchange.prompt_tokens for exchange in good)

    def per_second(amount: int) -> float | None:
        return rounded(amount / wall, 2) if wall > 0 else None

    return {
        **failures(outcome.exchanges),
        "wall_s": rounded(wall),
        "out_tokens": tokens,
        "short": sum(exchange.tokens != exchange.asked for exchange in good),
        "out_tok_s": per_second(tokens),
        "total_tok_s": per_second(tokens + prompt),
        "req_s": per_second(len(good)),
        "goodput_req_s": per_second(len(met)),
        "goodput_share": rounded(len(met) / len(outcome.exchanges)),
        "ttft_limit_ms": ttft_limit_ms,
        "tpot_limit_ms": tpot_limit_ms,
        **spread("ttft_ms", [exchange.ttft * 1e3 for exchange in good], 2),
        **spread("tpot_ms", [x.tpot * 1e3 for x in good if x.tpot is not None]),
        **spread("itl_ms", [gap * 1e3 for exchange in good for gap in exchange.gaps]),
        **spread("e2e_s", [exchange.end - exchange.due for exchange in good]),
        "events": sum(exchange.events for exchange in good),
        "late_ms_max": rounded(max(x.sent - x.due for x in outcome.exchanges) * 1e3, 2),
    }


def failures(exchanges: list[Exchange]) -> dict[str, Any]:
    """How many requests there were, how many failed, and the commonest reasons."""
    errors = Counter(exchange.error for exchange in exchanges if not exchange.ok)
    return {
        "requests": len(exchanges),
        "failed": errors.total(),
        "errors": dict(errors.most_common(3)),
    }
