"""Times the Triton products of few rows: each with every cut, then layers of the best ones.

    python bench/few_rows_bench.py                           # the cuts in use, and XLA's graph
    python bench/few_rows_bench.py --sweep                   # each product's other cuts before that
    python bench/few_rows_bench.py --sweep --cases=llama3_8b:8

One JSON line a measurement. A program goes many times over several layers' weights, more than the
L2 holds; a round of its loop costs about 10 us beside the kernels. What a product computes is held
against plain XLA before it counts. With --sweep, a layer of each product's quickest cut is timed
beside the one in use.
"""

import json
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from absl import app, flags
from jax import lax

from octavo.attention.hopper import MULTIPROCESSORS
from octavo.bench.block_cases import (
    IN_USE,
    LARGEST_ERROR,
    MATRICES,
    READ_CEILING,
    Case,
    draw_inputs,
    figures,
    graph_program,
    layers_program,
    load_case,
    relative_errors,
    seconds_per_layer,
)
from octavo.bench.timing import median_seconds
from octavo.model import decoder
from octavo.model.decode_block import between_reference
from octavo.model.params import init_params
from octavo.model.triton_block import between_attentions
from octavo.model.triton_plan import LayerTiles, Tiles, choose, row_tile, sizes
from octavo.model.triton_products import (
    Scaled,
    added_product,
    gated_product,
    no_counts,
    normed_product,
)
from octavo.serve.devices import configure_xla

_SWEEP = flags.DEFINE_bool("sweep", False, "Time each product with other cuts too.")
_CASES = flags.DEFINE_list(
    "cases",
    [f"{name}:{rows}" for name in ("llama3_8b", "llama32_1b") for rows in (8, 64, 1, 16, 32)],
    "Shapes by their folder's name and rows of a step, in order.",
)
_GRAPH = flags.DEFINE_bool("graph", True, "Time XLA's graph too, whose products it tunes first.")
_DATE = flags.DEFINE_string("date", time.strftime("%Y-%m-%d"), "Date written into the results.")

SHARED_BYTES = 220_000
"""Of a multiprocessor, for its blocks' stages."""

LEAST_BLOCKS = 60
"""Below this memory idles."""

NARROW = (
    *((32, 128, 1, 4), (32, 128, 2, 4), (32, 256, 2, 4), (64, 128, 1, 4), (64, 64, 2, 4)),
    *((64, 128, 2, 4), (64, 256, 2, 4), (64, 128, 4, 4), (128, 64, 2, 4), (128, 64, 4, 4)),
    *((128, 128, 4, 4), (128, 64, 4, 8), (128, 64, 8, 4)),
)
TRIED = {
    "out": NARROW,
    "down": (*NARROW, (128, 64, 7, 4)),
    "qkv": (*NARROW, (64, 64, 1, 4), (32, 64, 1, 4)),
    "gate_up": (
        *((128, 32, 1, 4), (128, 32, 1, 8), (128, 64, 1, 4), (128, 64, 1, 8), (64, 64, 1, 4)),
        *((64, 128, 1, 4), (64, 32, 1, 4), (256, 32, 1, 8), (32, 64, 1, 4)),
    ),
}
"""Columns, step, splits and warps of what is tried."""

PRODUCT_SECONDS = 0.008
"""About how long a product's program runs."""


def cuts(case: Case, product: str) -> Iterator[Tiles]:
    """What is tried: all blocks at once on the chip, as many stages as their memory holds, 8 at
    most, and half as many."""
    depth, width = sizes(case.config)[product]
    rows, gated = row_tile(case.rows), product == "gate_up"
    for columns, step, splits, warps in TRIED[product]:
        blocks = width // columns * splits
        stage = step * (columns * (1 + gated) + rows) * 2
        most = min(8, SHARED_BYTES // -(-blocks // MULTIPROCESSORS) // stage)
        if blocks < LEAST_BLOCKS or depth % (step * splits) or width % columns:
            continue
        for stages in (most, most // 2 + 1):
            if stages >= 3 and (stages == most or gated):
                yield Tiles(columns, step, splits, stages, warps)


def product_of(
    case: Case, name: str, weights: Any, given: tuple, counts: jax.Array, tiles: Tiles
) -> tuple[jax.Array, jax.Array]:
    """One product's result and the counts; `given` is x, mixed, gated and the norm's squares."""
    x, mixed, gated, squares = given
    embed, eps = case.config.hidden_size, case.config.norm_eps
    rows = {"out": mixed.reshape(case.rows, -1), "down": gated}.get(name)
    if rows is not None:
        matrix = weights[name].reshape(-1, embed)
        done = added_product(rows, matrix, x, weights["mlp_norm"], tiles, counts)
        return done.y, done.counts
    matrix, scaled = weights[name].reshape(embed, -1), Scaled(x, squares)
    if name == "gate_up":
        return gated_product(scaled, eps, matrix, tiles), counts
    return normed_product(scaled, eps, matrix, tiles, counts)


def product_program(case: Case, name: str, tiles: Tiles, rounds: int) -> Callable:
    """One product over all layers, many times: all results, or XLA would leave some out."""

    def run(layers: list, given: tuple) -> tuple:
        def one_round(_: jax.Array, carry: tuple) -> tuple:
            done, counts = [], carry[1]
            for weights, before in zip(layers, carry[0]):
                held, _ = lax.optimization_barrier((given, before))  # not to be hoisted
                result, counts = product_of(case, name, weights, held, counts, tiles)
                done.append(result)
            return done, counts

        none = [jnp.zeros((case.rows, sizes(case.config)[name][1]), jnp.bfloat16) for _ in layers]
        return tuple(lax.fori_loop(0, rounds, one_round, (none, no_counts()))[0])

    return run


def product_reference(case: Case, name: str, layers: list, given: tuple) -> tuple:
    """What `product_program` should find, in float32, but for the operands' type."""
    x, mixed, gated, squares = given
    wide = lambda array: array.astype(jnp.float32)  # noqa: E731
    mean = squares.sum(0)[: case.rows, None] / x.shape[-1]
    inverse = lax.rsqrt(mean + case.config.norm_eps)

    def one(weights: Any) -> jax.Array:
        rows = {"out": mixed.reshape(case.rows, -1), "down": gated}.get(name)
        normed = rows is None
        rows = x if rows is None else rows
        matrix = weights[name].reshape(rows.shape[1], -1)
        product = jnp.dot(rows, matrix, preferred_element_type=jnp.float32)
        product = product * inverse if normed else product
        if name == "gate_up":
            gate, up = jnp.split(product, 2, axis=1)
            return jax.nn.silu(gate) * up
        return product if name == "qkv" else wide(x) + product

    return tuple(one(weights) for weights in layers)


class Swept(NamedTuple):
    """A product's program with one cut, or why there is none."""

    name: str
    tiles: Tiles
    rounds: int
    program: jax.stages.Compiled | str


def given_for(case: Case, x: jax.Array, mixed: jax.Array) -> tuple:
    """What `product_of` is given: x's own squares in one part."""
    gated = jax.random.normal(
        jax.random.key(9), (case.rows, case.config.intermediate_size), jnp.bfloat16
    )
    squares = jnp.zeros((1, row_tile(case.rows)), jnp.float32)
    wide = x.astype(jnp.float32)
    return x, mixed, gated, squares.at[0, : case.rows].set((wide * wide).sum(1))


def compiled(job: tuple, layers: list, given: tuple) -> Swept:
    """A product's loop, compiled."""
    case, name, tiles = job
    depth, width = sizes(case.config)[name]
    size = depth * width * (4 if name == "gate_up" else 2)
    rounds = max(2, round(PRODUCT_SECONDS * READ_CEILING / size / len(layers)))
    try:
        program = jax.jit(product_program(case, name, tiles, rounds))
        return Swept(name, tiles, rounds, program.lower(layers, given).compile())
    except Exception as error:
        return Swept(name, tiles, rounds, repr(error)[:200])


def sweep(case: Case, arguments: tuple, best: dict) -> Iterator[dict]:
    """A line a product and cut; `best` gets each product's quickest."""
    layers, _, x, mixed = arguments
    given = given_for(case, x, mixed)
    jobs = [(case, name, tiles) for name in MATRICES for tiles in cuts(case, name)]
    with ThreadPoolExecutor(14) as pool:
        done = list(pool.map(partial(compiled, layers=layers, given=given), jobs))
    times: dict[str, float] = {}
    for name in MATRICES:
        expected = jax.jit(partial(product_reference, case, name))(layers, given)
        depth, width = sizes(case.config)[name]
        floor = depth * width * (4 if name == "gate_up" else 2) / READ_CEILING
        for one in (one for one in done if one.name == name):
            line = {"what": name, "impl": "triton", "tiles": shown(one.tiles)}
            if isinstance(one.program, str):
                yield line | {"failed": one.program}
                continue
            error = max(relative_errors(one.program(layers, given), expected))
            seconds = median_seconds(one.program, (layers, given)) / one.rounds / len(layers)
            us, least = round(seconds * 1e6, 2), round(floor * 1e6, 2)
            line |= {"us": us, "floor_us": least, "share": round(floor / seconds, 3)}
            yield line | {"error": round(error, 5)}
            if error <= LARGEST_ERROR and seconds < times.get(name, np.inf):
                times[name], best[name] = seconds, one.tiles


def shown(tiles: Tiles) -> str:
    """A cut in a line."""
    of = f"{tiles.columns} columns x {tiles.step}"
    return f"{of}, {tiles.splits} splits, {tiles.stages} stages, {tiles.warps} warps"


def layers_of(case: Case, arguments: tuple, kinds: dict[str, LayerTiles]) -> Iterator[dict]:
    """Whole layers: XLA's graph, and ours by each of `kinds`."""
    line = {"what": "block", "shape": case.name, "rows": case.rows}
    if _GRAPH.value:
        graph = jax.jit(graph_program(case)).lower(*arguments).compile()
        yield line | {"impl": "xla"} | figures(case, seconds_per_layer(case, graph, arguments))
    (first, second, *_), norm, x, mixed = arguments
    plain = jax.jit(partial(between_reference, config=case.config))
    expected = plain(first, second, norm, x=x, mixed=mixed)
    for kind, tiles in kinds.items():
        one = jax.jit(partial(between_attentions, config=case.config, tiles=tiles))
        found = one(first, second, norm, x=x, mixed=mixed, counts=no_counts())
        error = round(max(relative_errors(found[:2], expected)), 5)
        between = partial(between_attentions, tiles=tiles)
        program = jax.jit(layers_program(case, between, no_counts))
        loop = program.lower(*arguments).compile()
        timed = figures(case, seconds_per_layer(case, loop, arguments))
        line |= {"impl": "triton", "variant": kind, "error": error}
        parts = {name: shown(getattr(tiles, name)) for name in MATRICES}
        yield line | timed | ({"tiles": parts} if kind != IN_USE else {})


def main(_: list[str]) -> int:
    """1 if what is in use differs from the graph."""
    configure_xla()
    stamp = {"date": _DATE.value, "device": jax.devices()[0].device_kind, "jax": jax.__version__}
    wrong = False
    drawn: dict[str, Any] = {}
    for name, rows in (text.split(":") for text in _CASES.value):
        case = load_case(name, int(rows))
        if name not in drawn:
            specs = decoder.abstract_params(case.config)
            drawn[name] = jax.jit(partial(init_params, specs))(jax.random.key(0))
        arguments, tiles = draw_inputs(case, drawn[name]), choose(case.config, case.rows)
        kinds, best = {IN_USE: tiles}, {}
        if _SWEEP.value:
            for line in sweep(case, arguments, best):
                place = {"shape": case.name, "rows": case.rows}
                print(json.dumps(stamp | place | line), flush=True)
            kinds["quickest"] = replace(tiles, **best)
        for line in layers_of(case, arguments, kinds):
            print(json.dumps(stamp | line), flush=True)
            wrong |= line.get("error", 0.0) > LARGEST_ERROR and line["variant"] == IN_USE
    return int(wrong)


if __name__ == "__main__":
    app.run(main)
