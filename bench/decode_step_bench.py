"""Times what a decode step does between two products: norm, rope, write, attention, combine.

    python bench/decode_step_bench.py               # the 8B shape at a context of 1,100
    python bench/decode_step_bench.py --qk_norm     # with norms of queries and keys, as in Qwen 3
    python bench/decode_step_bench.py --rows=1,64

For each number of rows the separate path (XLA's fusions and scatters around the decode kernel) and
the kernel that takes raw projections, each with chunks as they are and of half the length. One JSON
line a measurement, in us a layer. Programs are those of `attention_bench.py`: many steps of 16
layers, each layer's cache updated in place.
"""

import json
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
from absl import app, flags
from jax import lax

from octavo.attention.api import write
from octavo.attention.contract import AttentionMeta, AttentionSpec
from octavo.attention.decode_tuning import DecodeTuning, default_tuning
from octavo.attention.front import Front
from octavo.attention.mosaic_decode import decode_mosaic
from octavo.attention.mosaic_raw import decode_raw_mosaic
from octavo.bench.attention_bench import LAYERS, PROGRAM_SECONDS, Scenario, inputs
from octavo.bench.timing import median_seconds
from octavo.cache.layout import LayerCache
from octavo.model.layers import rms_norm
from octavo.model.rope import apply_rope

_ROWS = flags.DEFINE_list("rows", ["1", "8", "32", "64", "128", "256"], "Rows of the steps.")
_CONTEXT = flags.DEFINE_integer("context", 1100, "Keys of each row.")
_QK_NORM = flags.DEFINE_bool("qk_norm", False, "Normalise queries and keys.")

Layer = Callable[..., tuple[jax.Array, LayerCache]]


def separate(
    qkv: jax.Array,
    front: Front,
    layer: LayerCache,
    meta: AttentionMeta,
    spec: AttentionSpec,
    tuning: DecodeTuning,
) -> tuple[jax.Array, LayerCache]:
    """What the decoder does without the raw path, one operation after the other."""
    rows, head_dim = qkv.shape[0], qkv.shape[3]
    q, k, v = qkv[:, :, :-2].reshape(rows, -1, head_dim), qkv[:, :, -2], qkv[:, :, -1]
    if front.q_norm is not None and front.k_norm is not None:
        q = rms_norm(q, front.q_norm, front.eps, front.offset)
        k = rms_norm(k, front.k_norm, front.eps, front.offset)
    rope = (front.cos, front.sin)
    q, k = apply_rope(q, rope), apply_rope(k, rope)
    layer = write(layer, k, v, meta, spec)
    return decode_mosaic(q, layer, meta, spec, tuning=tuning), layer


def raw(
    qkv: jax.Array,
    front: Front,
    layer: LayerCache,
    meta: AttentionMeta,
    spec: AttentionSpec,
    tuning: DecodeTuning,
) -> tuple[jax.Array, LayerCache]:
    """The one kernel, and the combine."""
    return decode_raw_mosaic(qkv, front, layer, meta, spec, tuning=tuning)


def program(case: Scenario, layer_step: Layer) -> tuple[Callable, int]:
    """A function of many steps of LAYERS layers on the caches in turn; and its layers."""
    rounds = max(2, round(PROGRAM_SECONDS / max(case.floor_seconds(), 1e-5) / LAYERS))
    spec = AttentionSpec(scale=case.head_dim**-0.5)

    def run(
        qkv: jax.Array, layers: list[LayerCache], front: Front, meta: AttentionMeta
    ) -> tuple[jax.Array, list[LayerCache]]:
        def one_round(_: jax.Array, carry: tuple) -> tuple:
            qkv, layers = carry
            layers = list(layers)
            for index in range(LAYERS):
                at = index % len(layers)
                out, layers[at] = layer_step(qkv, front, layers[at], meta, spec)
                # One layer waits for the other, at no cost that grows with the step.
                qkv = qkv.at[0, 0, 0, 0].add(out[0, 0, 0])
            return qkv, layers

        return lax.fori_loop(0, rounds, one_round, (qkv, layers))

    return run, rounds * LAYERS


def variants(head_dim: int) -> dict[str, Layer]:
    """The paths and tunings that are compared, by name."""
    default = default_tuning(head_dim)
    tunings = {
        "": default,
        "_half": replace(default, chunk=default.chunk // 2),
    }
    return {
        name + suffix: partial(path, tuning=tuning)
        for suffix, tuning in tunings.items()
        for name, path in (("separate", separate), ("raw", raw))
    }


def measure(case: Scenario, stamp: dict) -> None:
    """Prints a line for each variant. The caches are donated from one run to the next."""
    _, layers, meta = inputs(case, most_caches=LAYERS)
    width = case.heads // case.kv_heads + 2
    shape = (case.rows, case.kv_heads, width, case.head_dim)
    qkv = jax.random.normal(jax.random.key(3), shape, jnp.bfloat16)
    angles = jax.random.normal(jax.random.key(4), (case.rows, case.head_dim // 2))
    norm = jnp.ones(case.head_dim, jnp.bfloat16) if _QK_NORM.value else None
    front = Front(jnp.cos(angles), jnp.sin(angles), norm, norm)

    def compile_one(layer_step: Layer) -> tuple[jax.stages.Compiled, int] | str:
        run, launches = program(case, layer_step)
        try:
            jitted = jax.jit(run, donate_argnums=1)
            return jitted.lower(qkv, layers, front, meta).compile(), launches
        except Exception as error:
            return repr(error)[:300]

    named = variants(case.head_dim)
    with ThreadPoolExecutor(6) as pool:
        compiled = dict(zip(named, pool.map(compile_one, named.values())))
    for name, outcome in compiled.items():
        line = stamp | {"what": "decode_step", "rows": case.rows, "context": case.context}
        line |= {"path": name, "qk_norm": _QK_NORM.value}
        if isinstance(outcome, str):
            print(json.dumps(line | {"error": outcome}), flush=True)
            continue
        held = [layers]

        def again(_: jax.Array, held: list = held, run: Callable = outcome[0]) -> jax.Array:
            out, held[0] = run(qkv, held[0], front, meta)
            return out

        seconds = median_seconds(again, (qkv,)) / outcome[1]
        layers = held[0]
        figures = {"us": round(seconds * 1e6, 2), "floor_us": round(case.floor_seconds() * 1e6, 2)}
        print(json.dumps(line | figures), flush=True)


def main(_: list[str]) -> None:
    """One line a number of rows, path and tuning."""
    device = jax.devices()[0]
    stamp = {"date": time.strftime("%Y-%m-%d"), "device": device.device_kind}
    stamp["jax"] = jax.__version__
    for rows in map(int, _ROWS.value):
        measure(Scenario(f"step_b{rows}", rows, _CONTEXT.value, 0.0), stamp)


if __name__ == "__main__":
    app.run(main)
