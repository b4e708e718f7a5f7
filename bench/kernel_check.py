"""`octavo bench kernel check`: whether each kernel computes on this GPU what plain XLA does.

Each kernel is tried in a process of its own, all at once, for --limit seconds at most: one that
crashes or hangs ends alone. Llama 3 8B's shape, random inputs. A result must be close to plain
XLA's, and the same bits in every one of RUNS runs: what moves is a race. One line a kernel; the
exit code is 1 unless all are good.
"""

import json
import os
import subprocess
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from absl import app, flags

from octavo.bench.report import Results, source_digest
from octavo.serve.command import command_of

_KERNELS = flags.DEFINE_list("kernels", [], "Kernels to try; all by default.")
_LIMIT = flags.DEFINE_float("limit", 150, "Seconds that a kernel's process may take.")
_ALONE = flags.DEFINE_string("alone", "", "Try this kernel in this process.")

RUNS = 20
CLOSE = 0.02
"""Largest root mean square of the differences, in that of the results: roundings of bfloat16."""

CASES = {"decode": (64, 1100, 1), "prefill": (4, 1500, 700), "raw": (64, 1100, 1)}
"""Rows, context and queries a row."""

Outcome = tuple[str, float, bool]
"""What was tried, its error, and whether every run gave the same bits."""


def relative(ours: Any, theirs: Any) -> float:
    """Root mean square of the differences, in that of `theirs`; NaN if anything is."""
    ours, theirs = (np.asarray(x.astype(jnp.float32)) for x in (ours, theirs))
    return float(np.sqrt(((ours - theirs) ** 2).mean() / (theirs**2).mean()))


def compared(label: str, kernel: Callable, plain: Callable, *inputs: Any) -> Outcome:
    """Both compiled and run on the same inputs; their results are trees of arrays."""
    kernel = jax.jit(kernel)
    first, expected = kernel(*inputs), jax.jit(plain)(*inputs)
    pairs = zip(jax.tree.leaves(first), jax.tree.leaves(expected), strict=True)
    error = max(relative(ours, theirs) for ours, theirs in pairs)
    steady = True
    for _ in range(RUNS - 1):
        again = zip(jax.tree.leaves(first), jax.tree.leaves(kernel(*inputs)))
        steady &= all(bool((a == b).all()) for a, b in again)
    return label, error, steady


def attention(name: str) -> Iterator[Outcome]:
    """Decode or prefill, on rows of lengths around the case's."""
    from octavo.attention.api import attend
    from octavo.attention.contract import AttentionSpec
    from octavo.bench.attention_bench import Scenario, inputs

    rows, context, queries = CASES[name]
    case = Scenario(name, rows, context, 0.0, ragged=queries == 1, queries=queries)
    q, layers, meta = inputs(case, most_caches=1)
    run = partial(attend, spec=AttentionSpec(scale=case.head_dim**-0.5))
    ours, plain = partial(run, impl="mosaic"), partial(run, impl="xla")
    yield compared(f"{rows} rows", ours, plain, q, layers[0], meta)


def raw() -> Iterator[Outcome]:
    """A decode step from raw projections, against its parts one by one: results and pages."""
    from octavo.attention.api import attend, write
    from octavo.attention.contract import AttentionSpec
    from octavo.attention.front import Front, front_reference
    from octavo.attention.mosaic_raw import decode_raw_mosaic
    from octavo.bench.attention_bench import Scenario, inputs

    rows, context, _ = CASES["raw"]
    case = Scenario("raw", rows, context, 0.0, ragged=True)
    _, layers, meta = inputs(case, most_caches=1)
    keys, spec = jax.random.split(jax.random.key(3), 4), AttentionSpec(scale=case.head_dim**-0.5)
    shape = (rows, case.kv_heads, case.heads // case.kv_heads + 2, case.head_dim)
    qkv = jax.random.normal(keys[0], shape, jnp.bfloat16)
    angles = jax.random.normal(keys[1], (rows, case.head_dim // 2))
    q_norm, k_norm = (
        1 + jax.random.normal(key, (case.head_dim,), jnp.bfloat16) / 4 for key in keys[2:]
    )

    def one_by_one(qkv: Any, front: Any, layer: Any, meta: Any) -> Any:
        q, k, v = front_reference(qkv, front)
        layer = write(layer, k, v, meta, spec, impl="xla")
        q = q.reshape(rows, case.heads, case.head_dim)
        return attend(q, layer, meta, spec, impl="xla"), layer

    kernel = partial(decode_raw_mosaic, spec=spec)
    plain = Front(jnp.cos(angles), jnp.sin(angles))
    normed = replace(plain, q_norm=q_norm, k_norm=k_norm)
    for label, front in (("plain heads", plain), ("normalised heads", normed)):
        yield compared(label, kernel, one_by_one, qkv, front, layers[0], meta)


def writing() -> Iterator[Outcome]:
    """Keys and values of a prefill into their pages."""
    from octavo.attention.mosaic import write_by_kernel
    from octavo.cache.layout import LayerCache

    keys, shape = jax.random.split(jax.random.key(5), 4), (40, 64, 8, 128)
    pages = [jax.random.normal(key, shape, jnp.bfloat16) for key in keys[:2]]
    new = [jax.random.normal(key, (1030, 8, 128), jnp.bfloat16) for key in keys[2:]]
    slots = 64 + jax.random.permutation(keys[0], 39 * 64)[:1030].astype(jnp.int32)

    def scatter(layer: Any, k: Any, v: Any, slots: Any) -> Any:
        place = lambda p, x: p.reshape(-1, 8, 128).at[slots].set(x).reshape(p.shape)  # noqa: E731
        return LayerCache(place(layer.k, k), place(layer.v, v))

    yield compared("1030 tokens", write_by_kernel, scatter, LayerCache(*pages), *new, slots)


def block(name: str, steps: tuple[int, ...]) -> Iterator[Outcome]:
    """What lies between two attentions, by rows of the step."""
    from octavo.bench.block_cases import draw_inputs, load_case
    from octavo.model import decoder
    from octavo.model.blocks import BLOCKS
    from octavo.model.decode_block import between_reference
    from octavo.model.params import init_params

    specs = decoder.abstract_params(load_case("llama3_8b", 1).config)
    params = jax.jit(partial(init_params, specs))(jax.random.key(0))
    _, pad, begin, between, _ = BLOCKS[name]
    for rows in steps:
        case = load_case("llama3_8b", rows)
        (first, second, *_), norm, x, mixed = draw_inputs(case, params)

        def kernel(w: Any, f: Any, n: Any, x: Any, m: Any, case: Any = case) -> Any:
            found = between(w, f, n, case.config, pad(x), m, begin())
            return found[0][: case.rows], found[1]

        plain = partial(between_reference, config=case.config)
        graph = lambda w, f, n, x, m, plain=plain: plain(w, f, n, x=x, mixed=m)  # noqa: E731
        yield compared(f"{rows} rows", kernel, graph, first, second, norm, x, mixed)


def products() -> Iterator[Outcome]:
    """Products of many rows, whole tiles and not."""
    from octavo.bench.matmul_bench import case_of, draw, graph
    from octavo.model.mosaic_matmul import matmul

    def kernel(x: Any, weight: Any, residual: Any) -> Any:
        there = residual if residual.size else None
        return matmul(x, weight.reshape(len(weight), -1), there, gated=weight.ndim == 3)

    for name in ("gate_up", "down", "out", "qkv"):
        for rows in (256, 1100):
            (x, *_), (weight, *_), residual = draw(case_of(name, rows))
            yield compared(f"{name}, {rows} rows", kernel, graph, x, weight, residual)


KERNELS: dict[str, Callable[[], Iterator[Outcome]]] = {
    "decode": partial(attention, "decode"),
    "prefill": partial(attention, "prefill"),
    "write": writing,
    "raw": raw,
    "block": partial(block, "mosaic", (8, 1, 64, 100)),
    "few_rows": partial(block, "triton", (8, 1, 17, 64)),
    "matmul": products,
}


def alone(name: str) -> None:
    """Tries one kernel here: a line of JSON for each thing tried."""
    for label, error, steady in KERNELS[name]():
        print(json.dumps({"tried": label, "error": round(error, 5), "steady": steady}), flush=True)


def judged(command: list[str], limit: float) -> dict[str, Any]:
    """What a process that tries one kernel found, and whether it is good."""
    # Several processes share the GPU: none may take its memory at once.
    shared = os.environ | {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=limit, check=False, env=shared
        )
        text, problem = done.stdout, done.stderr.strip()[-400:] if done.returncode else ""
    except subprocess.TimeoutExpired as error:
        said: Any = error.stdout or b""
        text, problem = said.decode(), f"no end within {limit:g} s"
    tried = [json.loads(line) for line in text.splitlines() if line.startswith("{")]
    wrong = [one for one in tried if not (one["error"] <= CLOSE and one["steady"])]
    if not tried and not problem:
        problem = "nothing was tried"
    if wrong and not problem:
        problem = f"{wrong[0]['tried']}: error {wrong[0]['error']}, steady {wrong[0]['steady']}"
    return {"ok": not problem, "problem": problem or None, "tried": tried}


def main(_: list[str]) -> int:
    """One line a kernel; 1 unless all are good."""
    if _ALONE.value:
        alone(_ALONE.value)
        return 0
    names = _KERNELS.value or list(KERNELS)
    unknown = sorted(set(names) - set(KERNELS))
    if unknown:
        raise app.UsageError(f"--kernels: {unknown[0]!r} is none of {', '.join(KERNELS)}")
    results = Results("", source=source_digest())
    command = command_of("octavo.bench.kernel_check")

    def judge(name: str) -> bool:
        found = judged([*command, f"--alone={name}"], _LIMIT.value)
        results.say(what="check", kernel=name, **found)
        return found["ok"]

    with ThreadPoolExecutor(len(names)) as pool:
        return int(not all(list(pool.map(judge, names))))


if __name__ == "__main__":
    app.run(main)
