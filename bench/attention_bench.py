"""Times the attention kernels against the bytes they must read; one JSON line a measurement.

    python bench/attention_bench.py                      # the settings in use
    python bench/attention_bench.py --sweep              # every tuning that fits
    python bench/attention_bench.py --only=b64_2k        # one scenario

A program runs many steps of 32 launches, on several caches in turn: what the layers of a model
share is computed once a step, host dispatch is not counted, and no cache survives in the L2 from
one use to the next.
"""

import json
import math
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from absl import app, flags
from jax import lax

from octavo.attention.contract import AttentionMeta, AttentionSpec
from octavo.attention.mosaic_decode import DecodeTuning, decode_mosaic, default_tuning
from octavo.cache.layout import LayerCache

_SWEEP = flags.DEFINE_bool("sweep", False, "Try every tuning of the sweep, not only the default.")
_ONLY = flags.DEFINE_list("only", [], "Names of the scenarios to run; all by default.")
_DATE = flags.DEFINE_string("date", time.strftime("%Y-%m-%d"), "Date written into the results.")

READ_CEILING = 4.48e12
"""Bytes/s: the most that one H200 was measured to read from its memory."""


LAYERS = 32
"""Launches a step: what the layers of a model share is computed once a step."""

PROGRAM_SECONDS = 0.04
"""About how long a program runs, so that its dispatch (0.3 ms) doesn't count."""


@dataclass(frozen=True)
class Scenario:
    """A decode step of equal contexts, or lognormal ones of that mean, and the share to reach."""

    name: str
    rows: int
    context: int
    bar: float
    ragged: bool = False
    heads: int = 32
    kv_heads: int = 8
    head_dim: int = 128
    page: int = 64

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


SCENARIOS = (
    Scenario("b32_16k", 32, 16384, 0.93),
    Scenario("b256_2k", 256, 2048, 0.90),
    Scenario("b64_2k", 64, 2048, 0.85),
    Scenario("b8_4k", 8, 4096, 0.70),
    Scenario("b1_32k", 1, 32768, 0.70),
    Scenario("b128_ragged_2k", 128, 2048, 0.82, ragged=True),
)

EXTRA = (
    Scenario("b64_2k_page16", 64, 2048, 0.85, page=16),
    Scenario("b64_2k_d64", 64, 2048, 0.85, head_dim=64),
    Scenario("b64_2k_d256", 64, 2048, 0.85, head_dim=256),
    Scenario("b1_1k", 1, 1100, 0.70),
)


def _inputs(case: Scenario) -> tuple[jax.Array, list[LayerCache], AttentionMeta]:
    lengths = case.kv_lens()
    needed = -(-lengths // case.page)
    width = int(needed.max())
    num_pages = int(needed.sum()) + 1
    caches = max(1, min(8, round(1.2e9 / case.floor_bytes())))
    pages = np.random.default_rng(0).permutation(np.arange(1, num_pages))
    tables = np.zeros((case.rows, width), np.int32)
    for row, end in enumerate(np.cumsum(needed)):
        tables[row, : needed[row]] = pages[end - needed[row] : end]
    keys = jax.random.split(jax.random.key(0), 2 * caches + 1)
    shape = (num_pages, case.page, case.kv_heads, case.head_dim)
    draw = jax.jit(lambda key: jax.random.normal(key, shape, jnp.bfloat16))
    layers = [LayerCache(draw(keys[2 * i]), draw(keys[2 * i + 1])) for i in range(caches)]
    q = jax.random.normal(keys[-1], (case.rows, case.heads, case.head_dim), jnp.bfloat16)
    meta = AttentionMeta(
        block_tables=jnp.asarray(tables),
        kv_lens=jnp.asarray(lengths),
        query_starts=jnp.arange(case.rows + 1, dtype=jnp.int32),
        slots=jnp.zeros(case.rows, jnp.int32),
        num_rows=jnp.int32(case.rows),
    )
    return q, layers, meta


def _program(case: Scenario, attend: partial, caches: int) -> tuple[partial, int]:
    """A function of many steps of LAYERS launches, on each cache in turn; and its launches."""
    floor = case.floor_bytes() / READ_CEILING
    rounds = max(2, round(PROGRAM_SECONDS / floor / LAYERS))
    spec = AttentionSpec(scale=case.head_dim**-0.5)

    def run(q: jax.Array, layers: list[LayerCache], meta: AttentionMeta) -> jax.Array:
        def one_round(_: jax.Array, q: jax.Array) -> jax.Array:
            for index in range(LAYERS):
                q = q + attend(q, layers[index % caches], meta, spec)
            return q

        return lax.fori_loop(0, rounds, one_round, q)

    return partial(run), rounds * LAYERS


def _seconds(compiled: jax.stages.Compiled, arguments: tuple, launches: int) -> float:
    """Median of three runs of the program, a launch."""
    jax.block_until_ready(compiled(*arguments))
    times = []
    for _ in range(3):
        begin = time.perf_counter()
        jax.block_until_ready(compiled(*arguments))
        times.append(time.perf_counter() - begin)
    return sorted(times)[1] / launches


def _tunings(case: Scenario) -> Iterator[DecodeTuning]:
    best = default_tuning(case.head_dim)
    yield best
    if not _SWEEP.value:
        return
    yield replace(best, chunk=2 * best.chunk)
    yield replace(best, stages=2)


def _measure(case: Scenario) -> Iterator[dict]:
    arguments = _inputs(case)
    tunings = list(_tunings(case))

    def compile_one(tuning: DecodeTuning) -> tuple[jax.stages.Compiled, int] | str:
        attend = partial(decode_mosaic, tuning=tuning)
        program, launches = _program(case, attend, len(arguments[1]))
        try:
            return jax.jit(program).lower(*arguments).compile(), launches
        except Exception as error:
            return repr(error)[:300]

    with ThreadPoolExecutor(8) as pool:
        compiled = list(pool.map(compile_one, tunings))
    for tuning, outcome in zip(tunings, compiled):
        line = {"what": "decode", "scenario": case.name, "tuning": asdict(tuning)}
        if isinstance(outcome, str):
            yield line | {"error": outcome}
            continue
        seconds = _seconds(outcome[0], arguments, outcome[1])
        rate = case.floor_bytes() / seconds
        yield line | {
            "us": round(seconds * 1e6, 2),
            "floor_us": round(case.floor_bytes() / READ_CEILING * 1e6, 2),
            "floor_bytes": case.floor_bytes(),
            "TBps": round(rate / 1e12, 3),
            "share": round(rate / READ_CEILING, 3),
            "bar": case.bar,
        }


def main(_: list[str]) -> None:
    """Prints the device's line, then one line a scenario and tuning."""
    device = jax.devices()[0]
    stamp = {"date": _DATE.value, "device": device.device_kind, "jax": jax.__version__}
    for case in (*SCENARIOS, *EXTRA):
        if _ONLY.value and case.name not in _ONLY.value:
            continue
        for line in _measure(case):
            print(json.dumps(stamp | line), flush=True)


if __name__ == "__main__":
    app.run(main)
