"""`octavo bench pace`: what running requests and newcomers wait for one another.

newcomer: --rows requests decode; prompts of NEWCOMER tokens arrive at random moments. Their time to
the first token with the steps a dispatch that the engine chooses, and with one step a dispatch:
`added_ms` is the difference of the medians, what multi-step decode makes a newcomer wait.
limit: --rows requests decode while prompts of --long tokens arrive. The gaps between a running
request's tokens, and the newcomers' time to first token, with max_step_ms and without.

Arrivals are Poisson from a seed. A request is queued when the step ends in which it arrived, as the
engine core does, and its times count from its arrival.
"""

import random
import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from octavo.bench.report import percentile, rounded, spread
from octavo.serve.pace import SERVING_DECODE_WAIT, DecodePace

if TYPE_CHECKING:
    from octavo.bench.engine import EngineBench

NEWCOMER, NEWCOMERS = 120, 40
LONG_PROMPTS = 8
NEWCOMER_EVERY, LONG_EVERY = 0.05, 0.5
"""Seconds between arrivals, on average."""

RUNNING_TOKENS = 2000
"""Tokens a running request may generate; the measurement aborts it when the newcomers are done."""


def pace(bench: "EngineBench") -> None:
    """Two lines of newcomers and two of long prompts for each number of rows."""
    for rows in map(int, bench.flag["rows"]):
        newcomers(bench, rows)
        long_prompts(bench, rows)


def newcomers(bench: "EngineBench", rows: int) -> None:
    """Time to first token beside multi-step and beside single-step decode."""
    engine = bench.engine
    most = engine.scheduler.config.max_decode_steps
    medians = {}
    for steps in (1, most):
        with replaced(engine, pace=DecodePace(SERVING_DECODE_WAIT, steps)):
            crowd = Crowd(bench, rows)
            crowd.meet([NEWCOMER] * 3, NEWCOMER_EVERY)  # compiles, and learns the pace
            crowd.gaps.clear()
            first = crowd.meet([NEWCOMER] * NEWCOMERS, NEWCOMER_EVERY)
            step = statistics.median(crowd.step_seconds)
            crowd.end()
        medians[steps] = statistics.median(first)
        bench.say(
            what="newcomer",
            rows=rows,
            max_decode_steps=steps,
            step_ms=rounded(step * 1e3),
            **spread("ttft_ms", [seconds * 1e3 for seconds in first]),
            added_ms=rounded((medians[steps] - medians[1]) * 1e3),
            bound_ms=rounded(max(step, SERVING_DECODE_WAIT) * 1e3),
            replaced=crowd.replaced,
        )


def long_prompts(bench: "EngineBench", rows: int) -> None:
    """Gaps between running requests' tokens while long prompts arrive, with a limit and without."""
    engine, limit = bench.engine, bench.llm.config.max_step_ms
    most = engine.scheduler.config.max_decode_steps
    if engine.budget is None:
        raise ValueError("bench pace needs max_step_ms: the limit whose keeping is measured")
    for seconds in (limit / 1e3, float("inf")):
        gap = None if seconds == float("inf") else seconds
        with replaced(engine, pace=DecodePace(SERVING_DECODE_WAIT, most, gap)):
            engine.budget.limit = seconds
            crowd = Crowd(bench, rows)
            crowd.meet([bench.flag["long"]] * 3, LONG_EVERY)  # the budget learns what a class costs
            crowd.gaps.clear()
            first = crowd.meet([bench.flag["long"]] * LONG_PROMPTS, LONG_EVERY)
            crowd.end()
            engine.budget.limit = limit / 1e3
        gaps = [seconds * 1e3 for seconds in crowd.gaps]
        bench.say(
            what="limit",
            rows=rows,
            max_step_ms=limit if gap else None,
            **spread("gap_ms", gaps),
            gap_ms_max=rounded(max(gaps)),
            kept=gap and (percentile(gaps, 99) or 0) <= limit * 1.1,
            **spread("ttft_ms", [seconds * 1e3 for seconds in first]),
            replaced=crowd.replaced,
        )


@contextmanager
def replaced(engine: Any, pace: DecodePace) -> Iterator[None]:
    """The engine with another pace."""
    engine.pace, before = pace, engine.pace
    try:
        yield
    finally:
        engine.pace = before


class Crowd:
    """Rows that decode, and newcomers that join them. A row that ends is replaced.

    Attributes:
        gaps: seconds between two answers of a running row.
        step_seconds: seconds a decode step, of every dispatch that gave just the rows tokens.
        replaced: rows that ended.
    """

    def __init__(self, bench: "EngineBench", rows: int) -> None:
        self._bench, self._engine = bench, bench.engine
        self.gaps: list[float] = []
        self.step_seconds: list[float] = []
        self.replaced = 0
        room = self._engine.max_model_len - bench.flag["prompt"]
        self._tokens = min(RUNNING_TOKENS, room)
        self._rows = set[str]()
        self._last: dict[str, float] = {}
        self._started = 0.0
        self._random = random.Random(bench.flag["seed_prompts"])
        self._join(rows)
        while len(self._last) < rows:
            self._step()

    def meet(self, lengths: list[int], every: float) -> list[float]:
        """Seconds to the first token of newcomers with so many prompt tokens.

        They arrive `every` so many seconds on average, and generate one token.
        """
        moment = time.perf_counter()
        due = []
        for length in lengths:
            moment += self._random.expovariate(1 / every)
            due.append((moment, self._bench.prompts(1, length)))
        arrived: dict[str, float] = {}
        first: dict[str, float] = {}
        while len(first) < len(lengths):
            while due and self._arrives(due[0][0]):
                moment, prompt = due.pop(0)
                arrived[self._bench.submit(prompt, 1)[0]] = moment
            for request_id, now in self._step():
                if request_id in arrived:
                    first.setdefault(request_id, now - arrived[request_id])
        return list(first.values())

    def _arrives(self, moment: float) -> bool:
        """Whether `moment` has come before the next step must go, which waits as in a server."""
        while (early := moment - time.perf_counter()) > 0:
            if not (slack := self._engine.slack()):
                return False
            time.sleep(min(early, slack))
        return True

    def end(self) -> None:
        """Abort the running rows."""
        self._bench.drop(self._rows)

    def _join(self, rows: int) -> None:
        prompts = self._bench.prompts(rows, self._bench.flag["prompt"])
        self._rows |= set(self._bench.submit(prompts, self._tokens))

    def _step(self) -> list[tuple[str, float]]:
        """One engine step; (id, moment) of each request that it gave tokens."""
        events = [event for event in self._engine.step() if event.token_ids]
        now = time.perf_counter()
        ours = [event for event in events if event.request_id in self._rows]
        if len(ours) == len(self._rows) == len(events):
            self.step_seconds.append((now - self._started) / len(ours[0].token_ids))
        self._started = now if events else self._started
        for event in ours:
            before, self._last[event.request_id] = self._last.get(event.request_id), now
            if before is not None:
                self.gaps.append(now - before)
            if event.finish_reason is not None:
                self._rows.discard(event.request_id)
                del self._last[event.request_id]
                self._join(1)
                self.replaced += 1
        return [(event.request_id, now) for event in events]
