"""What a scheduling policy is worth, without a GPU: the scheduler and the step times of an H200.

    python bench/simulate.py [--mixed_tokens=640] [--longest_first=false]

The mix of workload.json offline, at 256 requests at once and at 32, 16 and 4 a second; one JSON
line each. The scheduler is the engine's own. The device is a table of what steps of Llama 3 8B's
shape were measured to take (bench/results), with decode rows' keys read at the measured rates, and
all of it SLOWER, as a server's were. With the MIXED_READ of that day, 2.95e12, the runs of
2026-12-03 are met to 4 %, but for times to first token, which lack what HTTP and the host add,
about 4 ms. Not modelled: the engine's host, and clocks that fall under load: offline the device
took 8 % longer.
"""

import heapq
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial

import numpy as np
from absl import app, flags

from octavo.bench.report import spread
from octavo.bench.workload import load
from octavo.sampling.params import SamplingParams
from octavo.serve.buckets import Buckets, make_buckets
from octavo.serve.mixed_steps import MixedSteps
from octavo.serve.pace import SERVING_DECODE_WAIT, DecodePace
from octavo.serve.scheduler import Scheduler, SchedulerConfig
from octavo.serve.types import Request, RowResult, ScheduledBatch

_TOKENS = flags.DEFINE_integer("mixed_tokens", 640, "As the engine's setting; 8192: no bound.")
_LONGEST_FIRST = flags.DEFINE_bool("longest_first", True, "Offline, as `LLM.generate` does.")
_REQUESTS = flags.DEFINE_integer("requests", 1000, "The first so many of the mix.")

DECODE_MS = {
    8: 4.4,
    16: 4.45,
    32: 4.55,
    64: 5.1,
    128: 5.4,
    256: 8,
    384: 10.2,
    512: 12.7,
    768: 17.8,
    1024: 22.2,
}
"""A decode step without reading the cache, by class of rows."""

MIXED_MS = {
    32: 5.6,
    128: 6.3,
    256: 8.2,
    384: 10.4,
    512: 12.8,
    640: 15.1,
    768: 17.8,
    896: 20,
    1024: 21.9,
    2048: 43.2,
    4096: 85.2,
    8192: 169.2,
}
"""A mixed step without attention, by tokens; interpolated."""

TOKEN_BYTES = 131_072
DECODE_READ, MIXED_READ = 4.1e12, 3.56e12
"""Bytes/s at which keys and values of rows that decode are read, by the kernel that does."""

ATTENTION = 480e12
"""FLOP/s of prompts' attention."""

OPERATIONS = 4 * 4096 * 32
"""Attention's FLOP a query and key."""

SLOWER = 1.03
CLIENT_MS = 1.0
"""From the client to the scheduler, and back."""

LEAD_MS, HOST_MS = 1.5, 0.7
"""Before a step ends the next is scheduled; from there to the device."""


@dataclass
class Outcome:
    """Milliseconds at which each request came, got its first token and ended."""

    came: dict[int, float] = field(default_factory=dict)
    first: dict[int, float] = field(default_factory=dict)
    ended: dict[int, float] = field(default_factory=dict)

    def figures(self, outputs: Sequence[int]) -> dict:
        """Tokens a second, and percentiles of first tokens and of the time of each further one."""
        first = [self.first[i] - self.came[i] + CLIENT_MS for i in self.first]
        later = [
            (self.ended[i] - self.first[i]) / (outputs[i] - 1) for i in self.ended if outputs[i] > 1
        ]
        made = sum(outputs[i] for i in self.ended)
        return {
            "out_tok_s": round(made / max(self.ended.values()) * 1e3, 1),
            **spread("ttft_ms", first, 1),
            **spread("tpot_ms", later, 2),
        }


def step_ms(batch: ScheduledBatch, buckets: Buckets) -> float:
    """What a dispatch keeps the device for."""
    rows, steps = batch.rows, batch.num_steps
    pages = max(len(row.block_table) for row in rows)
    decoding = [row.start + 1 for row in rows if row.query_len == 1]
    if batch.is_decode:
        read = sum(decoding) + len(rows) * (steps - 1) / 2
        one = DECODE_MS[buckets.decode(len(rows), pages).rows]
        return SLOWER * steps * (one + read * TOKEN_BYTES / DECODE_READ * 1e3)
    tokens = buckets.mixed(batch.num_tokens, len(rows), pages).tokens
    prompts = (row for row in rows if row.query_len > 1)
    pairs = sum(row.query_len * (row.start + row.query_len / 2) for row in prompts)
    products = float(np.interp(tokens, list(MIXED_MS), list(MIXED_MS.values())))
    read = sum(decoding) * TOKEN_BYTES / MIXED_READ
    return SLOWER * (products + 1e3 * (read + pairs * OPERATIONS / ATTENTION))


class Simulation:
    """The engine's loop with overlap: one dispatch runs while the next is made."""

    def __init__(self, rows: int, mixed_tokens: int, *, serving: bool) -> None:
        self.serving = serving
        self.buckets = make_buckets(rows, 8192, 130, fine=True, short=24)
        steps = MixedSteps(mixed_tokens, self.buckets.mixed_tokens, serving=serving)
        settings = SchedulerConfig(
            max_num_seqs=rows,
            max_batch_tokens=8192,
            num_pages=1 << 16,
            page_size=64,
            max_model_len=8320,
            max_decode_steps=8,
            overlap=True,
            multi_step_when_waiting=not serving,
            prefix_caching=False,
        )
        self.scheduler = Scheduler(settings, steps.prefill_tokens, self.buckets.worthwhile)
        self.pace = DecodePace(SERVING_DECODE_WAIT if serving else None, 8)
        self.outcome = Outcome()
        self._flights: list[tuple[ScheduledBatch, float]] = []

    def run(
        self,
        asked: Sequence[tuple[int, int]],
        due: Sequence[float],
        at_once: int | None = None,
    ) -> Outcome:
        """Requests of (prompt, output) tokens, due at so many ms, or the next as one of
        `at_once` ends.
        """
        coming = [(at, i) for i, at in enumerate(due)]
        after = len(coming)
        now = 0.0
        while coming or self.scheduler.has_work():
            if not self.scheduler.has_work():
                now = max(now, coming[0][0] + CLIENT_MS)
            while coming and coming[0][0] + CLIENT_MS <= now:
                at, i = heapq.heappop(coming)
                self._add(i, asked[i], at, now)
            begun = self._dispatch(now)
            if len(self._flights) == 2 or (self._flights and not begun):
                now, ended = self._commit(now)
                for _ in range(ended if at_once else 0):
                    if after < len(asked):
                        heapq.heappush(coming, (now + CLIENT_MS, after))
                        after += 1
            if self.serving and self._flights:
                now = max(now, self._flights[-1][1] - LEAD_MS)
        return self.outcome

    def _add(self, index: int, asked: tuple[int, int], came: float, now: float) -> None:
        prompt, most = asked
        params = SamplingParams(max_tokens=most, ignore_eos=True)
        self.outcome.came[index] = came
        self.scheduler.add(Request(str(index), (7,) * prompt, params), now / 1e3)

    def _dispatch(self, now: float) -> bool:
        batch = self.scheduler.schedule(now / 1e3, self.pace.steps())
        if batch is None:
            return False
        free = self._flights[-1][1] if self._flights else now
        took = step_ms(batch, self.buckets)
        self._flights.append((batch, max(now + HOST_MS, free) + took))
        if batch.is_decode:
            self.pace.note(took / 1e3, batch.num_steps)
        return True

    def _commit(self, now: float) -> tuple[float, int]:
        """Take the oldest dispatch's tokens; the time then, and how many requests ended."""
        batch, at = self._flights.pop(0)
        results = [
            RowResult((9,) * row.draws) if row.samples else RowResult() for row in batch.rows
        ]
        ended = 0
        for event in self.scheduler.commit(batch, results, at / 1e3):
            index = int(event.request_id)
            self.outcome.first.setdefault(index, at)
            if event.finish_reason is not None:
                self.outcome.ended[index] = at
                ended += 1
        return max(now, at), ended


def main(_: list[str]) -> None:
    """One line a way of asking."""
    mix = load()
    count = min(_REQUESTS.value, len(mix))
    asked = list(zip(mix.prompt_lens[:count], mix.output_lens))
    say = partial(_say, {"mixed_tokens": _TOKENS.value, "requests": count})
    ordered = sorted(asked, key=lambda one: -one[1]) if _LONGEST_FIRST.value else asked
    offline = Simulation(1024, _TOKENS.value, serving=False).run(ordered, [0.0] * count)
    say(offline, ordered, how="offline", longest_first=_LONGEST_FIRST.value)
    crowd = Simulation(256, _TOKENS.value, serving=True).run(asked, [0.0] * min(256, count), 256)
    say(crowd, asked, how="256 at once")
    for rate in (32, 16, 4):
        due = [1e3 * at for at in mix.arrivals(min(count, 60 * rate), rate)]
        some = asked[: len(due)]
        say(Simulation(256, _TOKENS.value, serving=True).run(some, due), some, how=f"{rate}/s")


def _say(line: dict, outcome: Outcome, asked: Sequence[tuple[int, int]], **more: object) -> None:
    print(json.dumps(line | more | outcome.figures([output for _, output in asked])), flush=True)


if __name__ == "__main__":
    app.run(main)
