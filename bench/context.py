"""`octavo bench context`: one very long prompt, decode steps on it, and the memory they took.

A line each time as much again has been computed says how long it took; the last one has the time
of the whole prompt and of a decode step behind it, with their floors.
"""

import json
import statistics
import tempfile
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

from absl import flags

from octavo.bench.engine import EngineBench, settings, steady_gaps
from octavo.bench.report import flag_values, rounded
from octavo.model.checkpoint.json_file import read_json
from octavo.model.checkpoint.resolve import resolve_model
from octavo.serve.configfile import LoadedConfig
from octavo.serve.flags import UsageError

FIRST_LINE = 65536
"""Tokens after which the first line comes; the next at twice as many."""


def run(config: LoadedConfig, values: flags.FlagValues, rest: list[str]) -> int:
    """A model with as many positions as the prompt needs."""
    if rest:
        raise UsageError(f"bench context takes no arguments besides flags, got {rest}")
    flag = flag_values(values)
    needed = flag["tokens"] + flag["generated"]
    engine = replace(settings(config, values), max_num_seqs=1, max_model_len=needed)
    with ExitStack() as stack:
        if engine.load_format == "dummy":
            folder = stack.enter_context(tempfile.TemporaryDirectory())
            engine = replace(engine, model=stretched(engine.model, needed, Path(folder)))
        bench = EngineBench(engine, values, ("context",))
        context(bench)
        bench.finish()
    return 0


def context(bench: EngineBench) -> None:
    """One long prompt: its prefill, decode steps on it, and memory."""
    tokens, made = bench.flag["tokens"], bench.flag["generated"]
    times = bench.run(bench.prompts(1, tokens), made, Progress(bench).look)
    seconds = next(moment for moment, new in times if new) - times[0][0]
    gap = statistics.median(steady_gaps(times, 1)) * 1e3
    line: dict[str, Any] = {"prefill_s": rounded(seconds), "decode_ms": rounded(gap)}
    if bench.device is not None:
        prefill = bench.cost.prefill_floor(bench.device, tokens)
        decode = bench.cost.decode_floor(bench.device, 1, tokens + made / 2) * 1e3
        line |= {
            "prefill_floor_s": rounded(prefill),
            "prefill_share": rounded(prefill / seconds),
            "decode_floor_ms": rounded(decode),
            "decode_share": rounded(decode / gap),
        }
    bench.say(what="context", prompt=tokens, generated=made, **line, **memory(bench, tokens + made))


def memory(bench: EngineBench, tokens: int) -> dict[str, float | None]:
    """The most that the device held, and the least that it had to: weights and keys of `tokens`."""
    import jax

    stats = jax.devices()[0].memory_stats() or {}
    cache, weights = tokens * bench.cost.token_bytes, bench.engine.runner.weight_bytes
    return {
        "peak_gb": rounded(stats.get("peak_bytes_in_use", 0) / 1e9, 2) or None,
        "floor_gb": rounded((cache + weights) / 1e9, 2),
        "cache_gb": rounded(cache / 1e9, 2),
        "weights_gb": rounded(weights / 1e9, 2),
    }


class Progress:
    """Says how much of the prompt is computed, each time that it has doubled."""

    def __init__(self, bench: EngineBench) -> None:
        self._bench, self._next = bench, FIRST_LINE
        self._chunk = bench.engine.scheduler.config.max_batch_tokens

    def look(self, times: list[tuple[float, int]]) -> None:
        """After a step: it has dispatched a chunk, and read the answer to the one before."""
        computed = (len(times) - 2) * self._chunk
        if computed >= self._next and not times[-1][1]:
            self._next *= 2
            seconds = rounded(times[-1][0] - times[0][0])
            self._bench.say(what="context_part", computed=computed, seconds=seconds)


def stretched(model: str, positions: int, folder: Path) -> str:
    """A copy of a shape with at least so many positions; its path."""
    source = resolve_model(model)
    shape = read_json(source / "config.json")
    shape["max_position_embeddings"] = max(positions, shape.get("max_position_embeddings", 0))
    target = folder / source.name
    target.mkdir()
    (target / "config.json").write_text(json.dumps(shape), encoding="utf-8")
    return str(target)
