"""Times the sampling programs and their parts; one JSON line a variant.

    python bench/sampling_bench.py [--rows 1,64,256] [--vocab 128256] [--only greedy,filters]

Each program runs `--repeat` times inside one executable (a fori_loop whose every turn depends on
the last turn's tokens), so host dispatch is left out. `floor_us` is one read of the float32 logits
at the H200's measured 4.48 TB/s, `passes` the time in such reads. `logits` says what was sampled
from: normal numbers of deviation 5 ("peaked": 84 tokens of 128k hold 0.9 of the mass at
temperature 1) or 1 ("flat": 78,300 do).
"""

import argparse
import json
from collections.abc import Callable, Iterator
from dataclasses import replace

import jax
import jax.numpy as jnp
from jax import Array

from octavo.bench.timing import median_seconds
from octavo.sampling.batch import SamplingBatch
from octavo.sampling.blocks import block_masses, block_peaks, to_blocks
from octavo.sampling.flags import SamplingFlags
from octavo.sampling.logprobs import logprobs_of
from octavo.sampling.pack import pack_matrix
from octavo.sampling.params import SamplingParams
from octavo.sampling.sampler import sample
from octavo.sampling.state import RowState, init_row_state
from octavo.sampling.threshold import top_k_floor

READ_BYTES_PER_US = 4.48e6
Step = Callable[[Array, SamplingBatch, RowState | None], Array]
"""(logits, batch, state) -> something of shape [S] that depends on the work to be timed."""

PARAMS = {
    "greedy": SamplingParams(temperature=0.0),
    "temperature": SamplingParams(temperature=0.8),
    "filters": SamplingParams(temperature=0.8, top_k=50, top_p=0.9, min_p=0.05),
    "top_k": SamplingParams(top_k=50),
    "top_k_500": SamplingParams(top_k=500),
    "top_p": SamplingParams(top_p=0.9),
    "min_p": SamplingParams(min_p=0.05),
    "penalties": SamplingParams(temperature=0.0, repetition_penalty=1.1, presence_penalty=0.5),
    "bias": SamplingParams(temperature=0.0, logit_bias={5: 1.0}, bad_token_ids=(7,)),
}
BARS_US = {"greedy": 60.0, "filters": 300.0}
MORE_BARS_US = {"greedy+logprobs5": 200.0}
"""Of what it takes more than without log-probabilities."""


def sampling_step(flags: SamplingFlags) -> Step:
    return lambda logits, batch, state: sample(logits, batch, state, flags)


def with_logprobs(flags: SamplingFlags, top_n: int) -> Step:
    def step(logits: Array, batch: SamplingBatch, state: RowState | None) -> Array:
        token = sample(logits, batch, state, flags)
        found = logprobs_of(logits, token, top_n)
        # Keep every output alive without letting it change the token.
        used = found.logprob + jnp.sum(found.top_logprobs, axis=1)
        kept = found.rank + jnp.sum(found.top_ids, axis=1)
        return jnp.where(jnp.isnan(used) & (kept < 0), 0, token)

    return step


def part_steps() -> dict[str, Step]:
    """The passes that programs are made of, each on its own."""

    def peaks(logits: Array, batch: SamplingBatch, state: RowState | None) -> Array:
        return jnp.max(block_peaks(to_blocks(logits)), axis=1)

    def masses(logits: Array, batch: SamplingBatch, state: RowState | None) -> Array:
        blocks, nowhere = to_blocks(logits), jnp.full(logits.shape[0], -jnp.inf)
        fixed = jnp.zeros(blocks.shape[:2])
        return jnp.max(block_masses(blocks, fixed, batch.temperature, nowhere, nowhere), axis=1)

    def floor(logits: Array, batch: SamplingBatch, state: RowState | None) -> Array:
        blocks = to_blocks(logits)
        return top_k_floor(
            blocks, block_peaks(blocks), batch.top_k, batch.top_p, batch.temperature
        )[0]

    def argmax(logits: Array, batch: SamplingBatch, state: RowState | None) -> Array:
        return jnp.argmax(logits, axis=1)

    return {
        "part:block_peaks": peaks,
        "part:block_masses": masses,
        "part:top_k_floor": floor,
        "plain jnp.argmax": argmax,
    }


def repeated(step: Step, repeat: int) -> Callable[..., Array]:
    """`step` as a chain of `repeat` turns that XLA can neither merge nor hoist."""

    def run(logits: Array, batch: SamplingBatch, state: RowState | None) -> Array:
        def turn(i: Array, last: Array) -> Array:
            here, last = jax.lax.optimization_barrier((logits, last))
            position = batch.position + jnp.asarray(last != 0, jnp.int32) + i
            return step(here, replace(batch, position=position), state).astype(jnp.float32)

        return jax.lax.fori_loop(0, repeat, turn, jnp.zeros(logits.shape[0], jnp.float32))

    return jax.jit(run)


def variants() -> Iterator[tuple[str, SamplingParams, Step]]:
    for name, params in PARAMS.items():
        yield name, params, sampling_step(SamplingFlags.for_params([params]))
    greedy = PARAMS["greedy"]
    for top_n in (0, 5, 20):
        step = with_logprobs(SamplingFlags.for_params([greedy]), top_n)
        yield f"greedy+logprobs{top_n}", greedy, step
    for name, step in part_steps().items():
        yield name, PARAMS["filters"], step


def measure(
    name: str, params: SamplingParams, program: Callable[..., Array], logits: Array, repeat: int
) -> dict:
    rows, vocab = logits.shape
    packed = pack_matrix([(params, 1, i, 9, i, 3, (2,)) for i in range(rows)], rows)
    batch = SamplingBatch.from_matrix(jnp.asarray(packed))
    state = init_row_state(rows, vocab) if params.needs_state else None
    seconds = median_seconds(program, (logits, batch, state), runs=5)
    time_us = seconds / repeat * 1e6
    floor_us = logits.size * 4 / READ_BYTES_PER_US
    return {
        "variant": name,
        "rows": rows,
        "vocab": vocab,
        "us": round(time_us, 1),
        "floor_us": round(floor_us, 1),
        "passes": round(time_us / floor_us, 2),
        "bar_us": BARS_US.get(name) if rows == 256 else None,
        "more_bar_us": MORE_BARS_US.get(name) if rows == 256 else None,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", default="1,64,256")
    parser.add_argument("--vocab", type=int, default=128_256)
    parser.add_argument("--only", default="", help="variants whose name starts with one of these")
    parser.add_argument("--logits", default="peaked,flat")
    parser.add_argument("--repeat", type=int, default=50)
    options = parser.parse_args()
    wanted = tuple(options.only.split(",")) if options.only else ("",)
    where = {"device": jax.devices()[0].device_kind, "jax": jax.__version__}
    for rows in map(int, options.rows.split(",")):
        noise = jax.random.normal(jax.random.key(0), (rows, options.vocab), jnp.float32)
        plain: dict[str, float] = {}
        for name, params, step in variants():
            if not name.startswith(wanted):
                continue
            program = repeated(step, options.repeat)  # compiled once for both kinds of logits
            for spread in options.logits.split(","):
                scale = {"peaked": 5.0, "flat": 1.0}[spread]
                line = measure(name, params, program, noise * scale, options.repeat)
                if name == "greedy":
                    plain[spread] = line["us"]
                elif name.startswith("greedy") and spread in plain:
                    line["more_us"] = round(line["us"] - plain[spread], 1)
                print(json.dumps(line | {"logits": spread} | where), flush=True)


if __name__ == "__main__":
    main()
