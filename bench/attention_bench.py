"""Times the attention kernels against bytes or operations; one JSON line a measurement.

    python bench/attention_bench.py                      # the settings in use
    python bench/attention_bench.py --sweep              # every tuning that fits
    python bench/attention_bench.py --only=b64_2k        # one scenario

A program runs many steps of 16 launches, on several caches in turn: what the layers of a model
share is computed once a step, host dispatch is not counted, and no cache survives in the L2 from
one use to the next.
"""

import json
import math
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from absl import app, flags
from jax import lax

from octavo.attention.contract import AttentionMeta, AttentionSpec
from octavo.attention.decode_tuning import DecodeTuning, default_tuning
from octavo.attention.mosaic_decode import decode_mosaic
from octavo.attention.mosaic_prefill import (
    PrefillTuning,
    default_prefill_tuning,
    prefill_mosaic,
)
from octavo.bench.timing import median_seconds
from octavo.cache.layout import LayerCache

_SWEEP = flags.DEFINE_bool("sweep", False, "Try every tuning of the sweep, not only the default.")
_ONLY = flags.DEFINE_list("only", [], "Names of the scenarios to run; all by default.")
_DATE = flags.DEFINE_string("date", time.strftime("%Y-%m-%d"), "Date written into the results.")

READ_CEILING = 4.48e12
"""Bytes/s: the most that one H200 was measured to read from its memory."""


MATRIX_CEILING = 812e12
"""FLOP/s: an 8192-cubed product in bfloat16 on one H200."""

LAYERS = 16
"""Launches a step: what the layers of a model share is computed once a step."""

PROGRAM_SECONDS = 0.04
"""About how long a program runs, so that its dispatch (0.3 ms) doesn't count."""


@dataclass(frozen=True)
class Scenario:
    """A step of rows of equal contexts, or lognormal ones of that mean.

    `bar` is to be reached: a share of READ_CEILING for decode, TFLOP/s for prefill.
    """

    name: str
    rows: int
    context: int
    bar: float
    ragged: bool = False
    heads: int = 32
    kv_heads: int = 8
    head_dim: int = 128
    page: int = 64
    queries: int = 1

    def kv_lens(self) -> np.ndarray:
        if not self.ragged:
            return np.full(self.rows, self.context, np.int32)
        sigma = 0.8
        draws = np.random.default_rng(1).lognormal(
            math.log(self.context) - sigma**2 / 2, sigma, self.rows
        )
        return np.clip(draws, 1, 4 * self.context).astype(np.int32)

    def floor_bytes(self) -> int:
        """Keys and values read once; queries and results are under 1 % of it."""
        return int(self.kv_lens().sum()) * self.kv_heads * self.head_dim * 2 * 2

    def operations(self) -> int:
        """Of both products over the keys that each query sees."""
        seen = self.queries * (2 * self.context - self.queries + 1) // 2
        return 4 * self.rows * seen * self.heads * self.head_dim

    def floor_seconds(self) -> float:
        if self.queries == 1:
            return self.floor_bytes() / READ_CEILING
        return self.operations() / MATRIX_CEILING


SCENARIOS = (
    Scenario("b32_16k", 32, 16384, 0.93),
    Scenario("b256_2k", 256, 2048, 0.90),
    Scenario("b64_2k", 64, 2048, 0.85),
    Scenario("b8_4k", 8, 4096, 0.70),
    Scenario("b1_32k", 1, 32768, 0.70),
    Scenario("b128_ragged_2k", 128, 2048, 0.82, ragged=True),
)

PREFILL = (
    Scenario("prefill_8k", 1, 8192, 550, queries=8192),
    Scenario("prefill_4x2k", 4, 2048, 500, queries=2048),
    Scenario("prefill_2k_on_30k", 1, 32768, 450, queries=2048),
    Scenario("prefill_8k_d256", 1, 8192, 450, heads=16, head_dim=256, queries=8192),
    Scenario("prefill_8k_d64", 1, 8192, 350, head_dim=64, queries=8192),
)

EXTRA = (
    Scenario("b64_2k_page16", 64, 2048, 0.85, page=16),
    Scenario("b64_2k_d64", 64, 2048, 0.85, head_dim=64),
    Scenario("b64_2k_d256", 64, 2048, 0.85, head_dim=256),
    Scenario("b1_1k", 1, 1100, 0.70),
)


def inputs(
    case: Scenario, most_caches: int = 8
) -> tuple[jax.Array, list[LayerCache], AttentionMeta]:
    """Queries, as many caches as leave none of them in the L2, and the rows on shuffled pages."""
    lengths = case.kv_lens()
    needed = -(-lengths // case.page)
    width = int(needed.max())
    num_pages = int(needed.sum()) + 1
    caches = max(1, min(most_caches, round(1.2e9 / case.floor_bytes())))
    pages = np.random.default_rng(0).permutation(np.arange(1, num_pages))
    tables = np.zeros((case.rows, width), np.int32)
    for row, end in enumerate(np.cumsum(needed)):
        tables[row, : needed[row]] = pages[end - needed[row] : end]
    last = np.take_along_axis(tables, (lengths - 1)[:, None] // case.page, axis=1)[:, 0]
    slots = last * case.page + (lengths - 1) % case.page
    keys = jax.random.split(jax.random.key(0), 2 * caches + 1)
    shape = (num_pages, case.page, case.kv_heads, case.head_dim)
    draw = jax.jit(lambda key: jax.random.normal(key, shape, jnp.bfloat16))
    layers = [LayerCache(draw(keys[2 * i]), draw(keys[2 * i + 1])) for i in range(caches)]
    q = jax.random.normal(
        keys[-1], (case.rows * case.queries, case.heads, case.head_dim), jnp.bfloat16
    )
    meta = AttentionMeta(
        block_tables=jnp.asarray(tables),
        kv_lens=jnp.asarray(lengths),
        query_starts=jnp.arange(case.rows + 1, dtype=jnp.int32) * case.queries,
        slots=jnp.asarray(np.repeat(slots, case.queries)),
        num_rows=jnp.int32(case.rows),
        max_query_len=case.queries,
    )
    return q, layers, meta


def _program(case: Scenario, attend: partial, caches: int) -> tuple[Callable, int]:
    """A function of many steps of LAYERS launches, on each cache in turn; and its launches."""
    rounds = max(2, round(PROGRAM_SECONDS / case.floor_seconds() / LAYERS))
    spec = AttentionSpec(scale=case.head_dim**-0.5)

    def run(q: jax.Array, layers: list[LayerCache], meta: AttentionMeta) -> jax.Array:
        def one_round(_: jax.Array, q: jax.Array) -> jax.Array:
            for index in range(LAYERS):
                out = attend(q, layers[index % caches], meta, spec)
                # One launch waits for the other, at no cost that grows with the step.
                q = q.at[0, 0, 0].add(out[0, 0, 0])
            return q

        return lax.fori_loop(0, rounds, one_round, q)

    return run, rounds * LAYERS


def _tunings(case: Scenario) -> Iterator[DecodeTuning | PrefillTuning]:
    if case.queries > 1:
        tuning = default_prefill_tuning(case.head_dim)
        yield tuning
        if _SWEEP.value:
            yield replace(tuning, block=192 - tuning.block)
            yield replace(tuning, key_stages=1, value_stages=1)
        return
    best = default_tuning(case.head_dim)
    yield best
    if not _SWEEP.value:
        return
    yield replace(best, chunk=2 * best.chunk)
    yield replace(best, stages=2)


def _measure(case: Scenario) -> Iterator[dict]:
    arguments = inputs(case)
    tunings = list(_tunings(case))

    def compile_one(tuning: DecodeTuning | PrefillTuning) -> tuple[jax.stages.Compiled, int] | str:
        kernel = decode_mosaic if case.queries == 1 else prefill_mosaic
        attend = partial(kernel, tuning=tuning)
        program, launches = _program(case, attend, len(arguments[1]))
        try:
            return jax.jit(program).lower(*arguments).compile(), launches
        except Exception as error:
            return repr(error)[:300]

    if case.queries > 1 and case.queries == int(case.kv_lens().max()):
        line = {"what": "prefill_dense_cudnn", "scenario": case.name}
        try:
            yield line | _figures(case, _dense(case))
        except Exception as error:
            yield line | {"error": repr(error)[:300]}
    with ThreadPoolExecutor(8) as pool:
        compiled = list(pool.map(compile_one, tunings))
    for tuning, outcome in zip(tunings, compiled):
        what = "decode" if case.queries == 1 else "prefill"
        line = {"what": what, "scenario": case.name, "tuning": asdict(tuning), "bar": case.bar}
        if isinstance(outcome, str):
            yield line | {"error": outcome}
            continue
        seconds = median_seconds(outcome[0], arguments) / outcome[1]
        yield line | _figures(case, seconds)


def _dense(case: Scenario) -> float:
    """Seconds of cuDNN's attention over the same queries and keys, causal and in one piece."""
    shape = (case.rows, case.queries, case.heads, case.head_dim)
    kv_shape = (case.rows, case.queries, case.kv_heads, case.head_dim)
    keys = jax.random.split(jax.random.key(1), 3)
    q, k, v = (
        jax.random.normal(key, size, jnp.bfloat16)
        for key, size in zip(keys, (shape, kv_shape, kv_shape))
    )
    launches = max(2, round(PROGRAM_SECONDS / case.floor_seconds()))

    def run(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        def one(_: jax.Array, q: jax.Array) -> jax.Array:
            attend = jax.nn.dot_product_attention
            out = attend(q, k, v, is_causal=True, implementation="cudnn")
            return q.at[0, 0, 0, 0].add(out[0, 0, 0, 0])

        return lax.fori_loop(0, launches, one, q)

    return median_seconds(jax.jit(run).lower(q, k, v).compile(), (q, k, v)) / launches


def _figures(case: Scenario, seconds: float) -> dict:
    floor = case.floor_seconds()
    figures = {
        "us": round(seconds * 1e6, 2),
        "floor_us": round(floor * 1e6, 2),
        "share": round(floor / seconds, 3),
    }
    if case.queries == 1:
        figures["floor_bytes"] = case.floor_bytes()
        figures["TBps"] = round(case.floor_bytes() / seconds / 1e12, 3)
    else:
        figures["operations"] = case.operations()
        figures["TFLOPs"] = round(case.operations() / seconds / 1e12, 1)
    return figures


def main(_: list[str]) -> None:
    """Prints the device's line, then one line a scenario and tuning."""
    device = jax.devices()[0]
    stamp = {"date": _DATE.value, "device": device.device_kind, "jax": jax.__version__}
    for case in (*SCENARIOS, *PREFILL, *EXTRA):
        if _ONLY.value and case.name not in _ONLY.value:
            continue
        for line in _measure(case):
            print(json.dumps(stamp | line), flush=True)


if __name__ == "__main__":
    app.run(main)
