"""`octavo bench trace | trace_prefill`: what the device does, from a profiler's trace.

idle: share of the traced window in which nothing runs on the device. CUDA graphs are recorded as
wholes, which costs them next to nothing; a `while` inside one would hide its kernels otherwise.
kernels: microseconds and launches of a step, longest first, from a second trace that records single
kernels. That slows the step (`traced_ms`), so its times compare with one another only.
Prefills run without graphs, so one trace has both: a line for each length of --prompts.
"""

import tempfile
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

from octavo.bench.report import rounded

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    from octavo.bench.engine import EngineBench

WARM_DISPATCHES, TRACED_DISPATCHES, NAMED_DISPATCHES = 6, 12, 6
"""Untimed at first, then traced with graphs as wholes, then with single kernels."""

SPARE_DISPATCHES = 8
"""Dispatches' worth of tokens beyond: the first rows decode while the last prompts are computed."""

TRACED_PROMPTS = 3

MOST_KERNELS = 24

Event = tuple[int, int, str]
"""Start ns, end ns, name."""


def trace_prefill(bench: "EngineBench") -> None:
    """A line for each length of the prompt."""
    for tokens in map(int, bench.flag["prompts"]):
        for _ in range(2):
            bench.run(bench.prompts(1, tokens), 1)
        prompts = bench.prompts(TRACED_PROMPTS, tokens)
        with tempfile.TemporaryDirectory() as folder:
            with jax_trace(folder, graphs=False):
                for prompt in prompts:
                    bench.run([prompt], 1)
            events = device_events(Path(folder))
        busy = rounded(busy_ns(events) / TRACED_PROMPTS / 1e6, 4)
        line = kernels(events, TRACED_PROMPTS)
        bench.say(what="trace_prefill", prompt=tokens, busy_ms=busy, **line)


def trace(bench: "EngineBench") -> None:
    """A line for each number of rows."""
    for rows in map(int, bench.flag["trace_rows"]):
        ids = decoding(bench, rows)
        events, steps = traced(bench, rows, TRACED_DISPATCHES, graphs=True)
        whole = window_ns(events) / 1e6
        line: dict[str, Any] = {"step_ms": rounded(whole / steps, 4)}
        line["idle"] = rounded(1 - busy_ns(events) / 1e6 / whole, 4) if whole else None
        events, steps = traced(bench, rows, NAMED_DISPATCHES, graphs=False)
        line["traced_ms"] = rounded(window_ns(events) / steps / 1e6, 4)
        bench.say(what="trace", rows=rows, **line, **kernels(events, steps))
        bench.drop(ids)


def decoding(bench: "EngineBench", rows: int) -> list[str]:
    """Ids of so many requests that all decode, and have for a while."""
    engine, per_dispatch = bench.engine, bench.llm.config.max_decode_steps
    dispatches = WARM_DISPATCHES + TRACED_DISPATCHES + NAMED_DISPATCHES + SPARE_DISPATCHES
    ids = bench.submit(bench.prompts(rows, bench.flag["prompt"]), dispatches * per_dispatch)
    begun = set[str]()
    while len(begun) < rows:
        begun |= {event.request_id for event in engine.step() if event.token_ids}
    for _ in range(WARM_DISPATCHES):
        engine.step()
    return ids


def traced(
    bench: "EngineBench", rows: int, dispatches: int, *, graphs: bool
) -> tuple[list[Event], int]:
    """The device's events in so many steady dispatches of `rows` rows, and their decode steps."""
    with tempfile.TemporaryDirectory() as folder:
        with jax_trace(folder, graphs=graphs):
            steps = [bench.engine.step() for _ in range(dispatches)]
        events = device_events(Path(folder))
    made = sum(len(event.token_ids) for events_ in steps for event in events_)
    return events, max(made // rows, 1)


def jax_trace(folder: str, *, graphs: bool) -> "AbstractContextManager[Any]":
    """Nothing of the host, which would be slowed; CUDA graphs as wholes or by their kernels."""
    import jax

    options = jax.profiler.ProfileOptions()
    options.host_tracer_level = 0
    options.python_tracer_level = 0
    options.advanced_configuration = {"gpu_enable_cupti_activity_graph_trace": graphs}
    return jax.profiler.trace(folder, profiler_options=options)


def device_events(folder: Path) -> list[Event]:
    """Everything that ran on the first GPU, by start."""
    import jax

    events = []
    for path in folder.rglob("*.xplane.pb"):
        for plane in jax.profiler.ProfileData.from_file(str(path)).planes:
            if plane.name != "/device:GPU:0":
                continue
            for line in plane.lines:
                if line.name.startswith("Stream"):
                    for event in line.events:
                        start = int(event.start_ns)
                        events.append((start, start + int(event.duration_ns), event.name))
    return sorted(events)


def window_ns(events: list[Event]) -> int:
    """Nanoseconds from the first start to the last end."""
    return max((end for _, end, _ in events), default=0) - min((s for s, _, _ in events), default=0)


def busy_ns(events: list[Event]) -> int:
    """Nanoseconds covered by at least one event; events by start."""
    total, until = 0, 0
    for start, end, _ in events:
        total += max(0, end - max(start, until))
        until = max(until, end)
    return total


def kernels(events: list[Event], steps: int) -> dict[str, Any]:
    """Launches of a step, and of the kernels that take longest [microseconds, launches] a step."""
    times, counts = Counter[str](), Counter[str]()
    for start, end, name in events:
        times[name] += end - start
        counts[name] += 1
    return {
        "launches_a_step": rounded(len(events) / steps, 1),
        "kernels": {
            name: [rounded(ns / steps / 1e3, 2), rounded(counts[name] / steps, 1)]
            for name, ns in times.most_common(MOST_KERNELS)
        },
    }
