"""Which programs a measurement will run: the engine's loop before a device that computes nothing.

Offline an engine's schedule follows from its requests' lengths alone, so what such a run asks for
is what the measurement will. Compiling just that, all at once, takes a GPU half the time that every
size of batch would, and nothing is compiled while the clock runs.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from octavo.bench.workload import load
from octavo.serve.compile import ProgramKey
from octavo.serve.config import AUTO
from octavo.serve.inflight import InFlight
from octavo.serve.programs import COMMON_FLAGS
from octavo.serve.runner import Runner
from octavo.serve.types import RowResult, ScheduledBatch


def keys_for(bench: Any, measures: Iterable[str]) -> list[ProgramKey]:
    """Programs of an EngineBench's measurements, in the order in which they are best compiled."""
    builder = bench.engine.runner.builder
    plain = builder.plain_keys(COMMON_FLAGS[:1])
    names, engine = set(measures), bench.engine
    config = bench.llm.config
    if "pace" in names or engine.budget or config.decode_wait_ms != AUTO or config.prefix_caching:
        return plain  # arrivals are random, or the schedule depends on measured times, or on ids
    found = set[ProgramKey]()
    for prompts, generated in runs(bench.flag, names):
        found |= planned(bench, prompts, generated)
    return [key for key in plain if key in found]


def runs(flag: dict[str, Any], names: set[str]) -> list[tuple[list[int], list[int]]]:
    """Lengths of the prompts and of the answers that come at once, run by run."""
    found: list[tuple[list[int], list[int]]] = []
    rows = set(flag["rows"] if "decode" in names else ())
    rows |= set(flag["trace_rows"] if "trace" in names else ())
    for count in map(int, rows):
        found.append(([flag["prompt"]] * count, [flag["generated"]] * count))
    if names & {"prefill", "trace_prefill"}:
        found += [([tokens], [1]) for tokens in map(int, flag["prompts"])]
    if "throughput" in names:
        mix = load(flag["workload"])
        asked = mix.requests(len(mix), vocab=16, text=False)
        lengths = [len(one.source["prompt"]) for one in asked]
        found.append((lengths, [one.max_tokens for one in asked]))
    if "context" in names:
        found.append(([flag["tokens"]], [flag["generated"]]))
    return found


def planned(bench: Any, prompts: list[int], generated: list[int]) -> set[ProgramKey]:
    """What the engine would run for such requests, all submitted at once."""
    engine, real = bench.engine, bench.engine.runner
    planner = engine.runner = Planner(real)
    try:
        for tokens, most in zip(prompts, generated, strict=True):
            bench.submit([[0] * tokens], most)
        while engine.has_work():
            engine.step()
        return planner.keys
    finally:
        engine.runner = real


@dataclass
class Planner:
    """A runner that notes which programs it would run."""

    runner: Runner
    keys: set[ProgramKey] = field(default_factory=set)

    def kind(self, batch: ScheduledBatch) -> Any:
        """The runner's own."""
        return self.runner.kind(batch)

    def dispatch(self, batch: ScheduledBatch) -> InFlight:
        """Nothing is dispatched."""
        self.keys |= set(self.runner.keys(batch))
        return Unmade(batch, COMMON_FLAGS[0], None)

    def forward(self, batch: ScheduledBatch, *, grammar: bool = False) -> InFlight:
        """Nor is its first part; there is no second."""
        return self.dispatch(batch)


class Unmade(InFlight):
    """An answer of zeros."""

    def read(self) -> list[RowResult]:
        """Each row's tokens."""
        return [RowResult((0,) * row.draws if row.samples else ()) for row in self.batch.rows]
