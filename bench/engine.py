"""`octavo bench decode | prefill | throughput | trace | trace_prefill | pace | context`: an engine.

Random weights unless --model and --load_format say otherwise; prompts are random ids, sampling is
greedy, end-of-sequence is ignored, the prefix cache is off.

decode: B prompts of --prompt tokens, --generated from each; the time of a step is the steady time
between dispatches while all B rows decode, over the steps of a dispatch.
prefill: one request's time to its first token, median of --repeats.
throughput: --workload, all submitted at once.
trace: what the device does in steady decode, and how long nothing (bench/trace.py).
trace_prefill: what it does in prefills of --prompts tokens.
pace: what running requests and newcomers wait for one another (bench/pace.py).
context: one very long prompt (bench/context.py).
"""

import dataclasses
import os
import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

from absl import flags

from octavo.bench.floors import CEILINGS, Ceilings, ModelCost
from octavo.bench.pace import pace
from octavo.bench.report import Results, flag_values, percentile, rounded
from octavo.bench.shapes import shape
from octavo.bench.trace import trace, trace_prefill
from octavo.bench.workload import DEFAULT, Workload, load, random_prompts
from octavo.serve.config import AUTO, EngineConfig
from octavo.serve.configfile import LoadedConfig
from octavo.serve.flags import UsageError

DEFAULTS: dict[str, Any] = {
    "model": shape("llama3_8b"),
    "load_format": "dummy",
    "dtype": "bfloat16",
    "max_num_seqs": 256,
    "max_model_len": 8320,
    "prefix_caching": False,
}
"""Settings of the measured engine where no flag and no config file says otherwise."""

COLUMNS = (
    *("what", "rows", "prompt", "ms", "p10_ms", "p99_ms", "floor_ms", "share"),
    *("prefill_s", "decode_ms", "peak_gb", "output_tok_s", "total_tok_s", "warm"),
)
HELP = """[MORE ...] [--flags]   MORE: others of them on the same engine

  --rows=1,8,32,64,128,256  decode, pace: rows of a batch
  --trace_rows=1,8,64,256   trace
  --prompt=1024 --generated=144
  --prompts=128,1024,8192   prefill, trace_prefill: lengths of the prompt
  --repeats=5               prefill: timed requests; throughput: 3 timed runs by default
  --workload=FILE           throughput: lengths of prompts and outputs
  --long=8192               pace: prompts that arrive beside running requests
  --tokens=1000000          context: length of the prompt
  --seed_prompts=0 --out=FILE --label=TEXT --date"""


def define(values: flags.FlagValues) -> None:
    """The commands' flags, beside the engine's settings."""
    text, number = flags.DEFINE_string, flags.DEFINE_integer
    whole = ["1", "8", "32", "64", "128", "256"]
    flags.DEFINE_list("rows", whole, "decode batches", flag_values=values)
    flags.DEFINE_list("trace_rows", ["1", "8", "64", "256"], "traced", flag_values=values)
    number("prompt", 1024, "prompt tokens", lower_bound=1, flag_values=values)
    number("generated", 144, "tokens to generate", lower_bound=8, flag_values=values)
    flags.DEFINE_list("prompts", ["128", "1024", "8192"], "prompt lengths", flag_values=values)
    number("repeats", None, "timed runs", lower_bound=1, flag_values=values)
    text("workload", str(DEFAULT), "lengths", flag_values=values)
    number("long", 8192, "prompt of pace", lower_bound=1, flag_values=values)
    number("tokens", 1_000_000, "prompt of context", lower_bound=1, flag_values=values)
    number("seed_prompts", 0, "seed of the prompts", flag_values=values)
    text("out", "", "file to append to", flag_values=values)
    text("label", "", "what is measured", flag_values=values)
    text("date", "", "written into the lines", flag_values=values)


def command(what: str) -> Callable[[LoadedConfig, flags.FlagValues, list[str]], int]:
    """The function of `octavo bench {what}`."""

    def run(config: LoadedConfig, values: flags.FlagValues, more: list[str]) -> int:
        unknown = sorted(set(more) - set(MEASURES))
        if unknown:
            raise UsageError(f"{unknown[0]!r} is none of {', '.join(MEASURES)}")
        bench = EngineBench(settings(config, values), values, (what, *more))
        for name in (what, *more):
            MEASURES[name](bench)
        bench.finish()
        return 0

    return run


def settings(config: LoadedConfig, values: flags.FlagValues) -> EngineConfig:
    """The engine's settings: flags, then a config file, then DEFAULTS."""
    if values["config"].value is not None:
        return config.engine
    given = {n for n in DEFAULTS if values[n].present or values[f"config.{n}"].present}
    missing = {name: value for name, value in DEFAULTS.items() if name not in given}
    return replace(config.engine, **missing)


def _nobody(times: list[tuple[float, int]]) -> None:
    """Nobody watches."""


class EngineBench:
    """An engine and its measurements, of which `measures` are to come."""

    def __init__(
        self, config: EngineConfig, values: flags.FlagValues, measures: Sequence[str]
    ) -> None:
        start = time.perf_counter()
        from octavo.llm import LLM
        from octavo.sampling.params import SamplingParams
        from octavo.serve import devices
        from octavo.serve.types import Request

        self._request, self._params = Request, SamplingParams
        self.flag = flag_values(values)
        self._mix = load(self.flag["workload"]) if "throughput" in measures else Workload("", 0)
        if any("prompt" not in one.source for one in self._mix.written or ()):
            raise ValueError(f"workload {self.flag['workload']}: throughput reads prompts alone")
        self.llm = LLM(config=config)
        self.engine = self.llm.engine
        self.device: Ceilings | None = CEILINGS.get(devices.kinds()[0])
        self.cost = model_cost(self.engine)
        self._serial = self._submitted = 0
        self._results = Results(
            self.flag["out"],
            self.flag["date"],
            label=self.flag["label"],
            model=Path(config.model).name,
            attention=config.attention,
            settings=changed(config),
            seed=self.flag["seed_prompts"],
        )
        self.say(what="start", seconds=rounded(time.perf_counter() - start, 2))
        if config.warmup == AUTO and devices.on_gpu():
            self._warm(measures)

    def _warm(self, measures: Sequence[str]) -> None:
        """Compile what they need, at once: one by one it would take most of the time."""
        from octavo.bench.plan import keys_for
        from octavo.serve.lowering_pool import lowering

        start, programs = time.perf_counter(), self.engine.runner.programs
        programs.warm(
            keys_for(self, measures),
            workers=os.cpu_count() or 1,
            progress=True,
            lowering=partial(lowering, self.engine.runner.builder),
        )
        self.say(what="warm", seconds=rounded(time.perf_counter() - start, 2), **self._made())

    def say(self, **fields: Any) -> None:
        """One measurement."""
        self._results.say(**fields)

    def finish(self) -> None:
        """How the programs came to be, and the table."""
        self.say(what="programs", **self._made())
        self._results.table(COLUMNS)

    def _made(self) -> dict[str, Any]:
        stats = self.engine.runner.programs.stats
        return {
            "compiled": stats.compiled,
            "loaded": stats.loaded,
            "lower_seconds": rounded(stats.lower_seconds, 1),
            "compile_seconds": rounded(stats.compile_seconds, 1),
            "load_seconds": rounded(stats.load_seconds, 1),
        }

    def with_floor(self, ms: float, floor: Callable[..., float], *args: float) -> dict[str, Any]:
        """`ms` with floor(device, *args) and its share, if the device's ceilings are known."""
        if self.device is None:
            return {"ms": rounded(ms, 4)}
        least = floor(self.device, *args) * 1e3
        return {"ms": rounded(ms, 4), "floor_ms": rounded(least, 4), "share": rounded(least / ms)}

    def prompts(self, count: int, tokens: int) -> list[list[int]]:
        """Random prompts, new ones on each call."""
        self._serial += 1
        seed = self.flag["seed_prompts"] * 1_000_003 + self._serial
        return list(random_prompts(count, tokens, self.engine.model_config.vocab_size, seed))

    def run(
        self,
        prompts: list[list[int]],
        max_tokens: int,
        watch: Callable[[list[tuple[float, int]]], None] = _nobody,
    ) -> list[tuple[float, int]]:
        """Generate; (seconds, tokens) of each engine step, the moment before it all first.

        `watch` is told of what there is after each.
        """
        times = [(time.perf_counter(), 0)]
        self.submit(prompts, max_tokens)
        while self.engine.has_work():
            tokens = sum(len(event.token_ids) for event in self.engine.step())
            times.append((time.perf_counter(), tokens))
            watch(times)
        return times

    def submit(self, prompts: list[list[int]], max_tokens: int) -> list[str]:
        """Queue a greedy request for each prompt that generates max_tokens; their ids."""
        params = self._params(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
        self._submitted += len(prompts)
        ids = [f"{self._submitted}-{number}" for number in range(len(prompts))]
        for request_id, prompt in zip(ids, prompts):
            self.engine.add(self._request(request_id, tuple(prompt), params))
        return ids

    def drop(self, ids: Iterable[str]) -> None:
        """Abort requests and wait for the device."""
        for request_id in ids:
            self.engine.abort(request_id)
        while self.engine.has_work():
            self.engine.step()

    # Measurements -------------------------------------------------------------------------------

    def decode(self) -> None:
        """A line for each number of rows."""
        for rows in map(int, self.flag["rows"]):
            if rows > self.engine.scheduler.config.max_num_seqs:
                raise ValueError(f"rows={rows} exceeds max_num_seqs")
            gaps: list[float] = []
            for _ in range(4):  # a pace that has to be learnt, or a program to be compiled
                if gaps := self._decode_gaps(rows):
                    break
            if not gaps:
                raise ValueError(f"no steady decode steps at rows={rows}: raise --generated")
            context = self.flag["prompt"] + self.flag["generated"] / 2
            self.say(
                what="decode",
                rows=rows,
                prompt=self.flag["prompt"],
                generated=self.flag["generated"],
                **self.with_floor(
                    statistics.median(gaps) * 1e3, self.cost.decode_floor, rows, context
                ),
                **{f"p{q}_ms": rounded((percentile(gaps, q) or 0) * 1e3, 4) for q in (10, 90, 99)},
            )

    def _decode_gaps(self, rows: int) -> list[float]:
        """Seconds a decode step took, of each dispatch in which all rows decoded."""
        times = self.run(self.prompts(rows, self.flag["prompt"]), self.flag["generated"])
        return steady_gaps(times, rows)

    def prefill(self) -> None:
        """A line for each length of the prompt."""
        for tokens in map(int, self.flag["prompts"]):
            found = []
            for _ in range(2 + (self.flag["repeats"] or 5)):
                times = self.run(self.prompts(1, tokens), 1)
                first = next(moment for moment, new in times if new)
                found.append((first - times[0][0]) * 1e3)
            found = found[2:]
            self.say(
                what="prefill",
                prompt=tokens,
                **self.with_floor(statistics.median(found), self.cost.prefill_floor, tokens),
                **{f"p{q}_ms": rounded(percentile(found, q), 3) for q in (10, 90, 99)},
            )

    def throughput(self) -> None:
        """One unreported and --repeats reported runs of the workload through `LLM.generate`."""
        vocab = self.engine.model_config.vocab_size
        asked = self._mix.requests(len(self._mix), vocab=vocab, text=False)
        prompts = [one.source["prompt"] for one in asked]
        params = [
            self._params(temperature=0.0, max_tokens=one.max_tokens, ignore_eos=True)
            for one in asked
        ]
        rates = []
        for attempt in range(1 + (self.flag["repeats"] or 3)):
            start = time.perf_counter()
            outputs = self.llm.generate(prompts, params)
            seconds = time.perf_counter() - start
            made = sum(len(output.outputs[0].token_ids) for output in outputs)
            rates.append(made / seconds)
            self.say(
                what="throughput",
                warm=attempt > 0,
                requests=len(asked),
                seconds=rounded(seconds, 2),
                out_tokens=made,
                output_tok_s=rounded(made / seconds, 1),
                total_tok_s=rounded((made + sum(map(len, prompts))) / seconds, 1),
            )
        self.say(what="throughput_median", output_tok_s=rounded(statistics.median(rates[1:]), 1))


MEASURES: dict[str, Callable[[Any], None]] = {
    "decode": EngineBench.decode,
    "prefill": EngineBench.prefill,
    "throughput": EngineBench.throughput,
    "trace": trace,
    "trace_prefill": trace_prefill,
    "pace": pace,
}


def changed(config: EngineConfig) -> dict[str, Any]:
    """The settings that are not at their defaults, the model and where programs are kept apart."""
    fields = {f.name: f.default for f in dataclasses.fields(config)}
    found = {name: getattr(config, name) for name in fields}
    return {
        name: value
        for name, value in found.items()
        if value != fields[name] and name not in ("model", "artefact_dir")
    }


def steady_gaps(times: list[tuple[float, int]], rows: int) -> list[float]:
    """Seconds a decode step, of the dispatches in which all of `rows` rows decoded.

    The first two are left out: one follows a prefill, one the turn to several steps a dispatch.
    """
    gaps = [
        (after - before) / (tokens // rows)
        for (before, _), (after, tokens) in pairwise(times)
        if tokens and tokens % rows == 0
    ]
    return gaps[2:]


def model_cost(engine: Any) -> ModelCost:
    """The cost of an engine's model, from its parameters' specifications and cache layout."""
    runner = engine.runner
    config = engine.model_config
    itemsize = {"float32": 4}.get(config.dtype, 2)
    head = config.vocab_size * config.hidden_size
    return ModelCost(
        config,
        runner.weight_bytes_streamed,
        runner.weight_bytes_streamed // itemsize - head,
        head,
        runner.layout.page_bytes // runner.layout.page_size,
    )
