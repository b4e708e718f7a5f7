"""Times what lies between two attentions of a decode step; one JSON line a measurement.

    python bench/block_bench.py                          # the kernel in use, and XLA's graph
    python bench/block_bench.py --sweep                  # other rings, grids and cuts too
    python bench/block_bench.py --only=llama3_8b --rows=8,64

A program goes many times over several layers' weights, more than the L2 holds, so that each launch
reads its weights from memory and dispatch is not counted. Floor: the weights once. Before it is
timed, the kernel is held against the graph, and is not timed if it differs. A shape's programs are
all compiled before the first is timed: kernels at once, and one by one XLA's graphs, for which it
times products.
"""

import json
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import jax
from absl import app, flags
from jax import lax

from octavo.attention.hopper import MULTIPROCESSORS
from octavo.bench.block_cases import (
    IN_USE,
    LARGEST_ERROR,
    MATRICES,
    Case,
    draw_inputs,
    figures,
    graph_program,
    load_case,
    relative_errors,
    seconds_per_layer,
)
from octavo.bench.shapes import FOLDER
from octavo.model import decoder
from octavo.model.block_plan import BlockPlan, BlockTuning, Product
from octavo.model.decode_block import (
    MAX_ROWS,
    between_attentions,
    between_reference,
    launch_block,
    pad_rows,
    plan_for,
    tuning_for,
)
from octavo.model.mosaic_block import no_arrivals
from octavo.model.params import init_params
from octavo.serve.devices import configure_xla

_SWEEP = flags.DEFINE_bool("sweep", False, "Try other tunings and cuts, at 8 and 64 rows.")
_ONLY = flags.DEFINE_list("only", ["llama3_8b", "llama32_1b"], "Shapes, by their folder's name.")
_ROWS = flags.DEFINE_list("rows", ["8", "64", "1", "32", "128"], "Rows of the steps, in order.")
_DATE = flags.DEFINE_string("date", time.strftime("%Y-%m-%d"), "Date written into the results.")

SWEPT_ROWS = (8, 64)


def kernel_program(case: Case, tuning: BlockTuning, plan: BlockPlan) -> Callable:
    """The kernel's, without the sum of qkv's splits, which in a model is part of rope's fusion."""

    def run(layers: list, norm: jax.Array, x: jax.Array, mixed: jax.Array) -> jax.Array:
        def one_round(_: jax.Array, carry: tuple) -> tuple:
            x, arrivals = carry
            for index, weights in enumerate(layers):
                following = layers[(index + 1) % len(layers)]
                done = launch_block(
                    weights, following, norm, case.config, x, mixed, arrivals, tuning, plan
                )
                x, arrivals = done.x, done.no_arrivals
            return x, arrivals

        return lax.fori_loop(0, case.rounds, one_round, (pad_rows(x), no_arrivals()))[0]

    return run


def relative_error(case: Case, kernel: Callable, arguments: tuple) -> float:
    """Of x and qkv after one layer, against the graph's: root mean squares."""
    (first, second, *_), norm, x, mixed = arguments
    found = kernel(first, second, norm, x=pad_rows(x), mixed=mixed, arrivals=no_arrivals())
    graph = jax.jit(partial(between_reference, config=case.config))
    expected = graph(first, second, norm, x=x, mixed=mixed)
    return max(relative_errors((found[0][: case.rows], found[1]), expected))


def variants(case: Case) -> Iterator[tuple[str, BlockTuning, BlockPlan]]:
    """Name, tuning and cuts of what is timed: what is in use first."""
    plan, tuning = plan_for(case.config, last=False), tuning_for(case.rows)
    yield IN_USE, tuning, plan
    if not _SWEEP.value or case.rows not in SWEPT_ROWS:
        return
    yield f"{MULTIPROCESSORS} blocks", replace(tuning, num_blocks=MULTIPROCESSORS), plan
    for ring, rows in ((21, 3), (18, 6), (16, 8), (12, 4), (8, 4)):
        yield f"rings {ring}, {rows}", replace(tuning, ring=ring, activation_ring=rows), plan
    for name in MATRICES:
        for tiles, splits in ((1, 1), (1, 2), (2, 1), (2, 2), (2, 4), (3, 4), (4, 2), (4, 4)):
            product: Product = getattr(plan, name)
            try:
                other = replace(product, tiles=tiles, splits=splits)
            except ValueError:
                continue
            if other != product and 96 <= other.items <= MULTIPROCESSORS:
                yield f"{name} {tiles} x {splits}", tuning, replace(plan, **{name: other})


class Prepared(NamedTuple):
    """A case's inputs and compiled programs: the graph, and of each variant the layer and the loop.

    A variant that did not compile has its error in place of both.
    """

    case: Case
    arguments: tuple
    graph: jax.stages.Compiled
    kernels: dict[str, tuple[jax.stages.Compiled, jax.stages.Compiled] | str]


def prepare(cases: list[Case], params: Any) -> list[Prepared]:
    """Everything compiled."""
    inputs = [draw_inputs(case, params) for case in cases]
    graphs = [
        jax.jit(graph_program(case)).lower(*arguments).compile()
        for case, arguments in zip(cases, inputs)
    ]

    def compile_one(job: tuple) -> tuple[jax.stages.Compiled, jax.stages.Compiled] | str:
        case, arguments, (_, tuning, plan) = job
        (first, second, *_), norm, x, mixed = arguments
        layer = jax.jit(partial(between_attentions, config=case.config, tuning=tuning, plan=plan))
        given = {"x": pad_rows(x), "mixed": mixed, "arrivals": no_arrivals()}
        loop = jax.jit(kernel_program(case, tuning, plan))
        try:
            one = layer.lower(first, second, norm, **given).compile()
            return one, loop.lower(*arguments).compile()
        except Exception as error:
            return repr(error)[:300]

    jobs = [
        (case, arguments, variant)
        for case, arguments in zip(cases, inputs)
        for variant in (variants(case) if case.rows <= MAX_ROWS else ())
    ]
    with ThreadPoolExecutor(12) as pool:
        done = list(pool.map(compile_one, jobs))
    return [
        Prepared(
            case,
            arguments,
            graph,
            {job[2][0]: found for job, found in zip(jobs, done) if job[0] is case},
        )
        for case, arguments, graph in zip(cases, inputs, graphs)
    ]


def measure(prepared: Prepared) -> Iterator[dict]:
    """XLA's graph, then the kernel in every variant."""
    case, arguments, graph, kernels = prepared
    line = {"what": "block", "shape": case.name, "rows": case.rows}
    yield line | {"impl": "xla"} | figures(case, seconds_per_layer(case, graph, arguments))
    line["impl"] = "mosaic"
    for name, programs in kernels.items():
        line["variant"] = name
        if isinstance(programs, str):
            yield line | {"failed": programs}
            continue
        layer, loop = programs
        error = round(relative_error(case, layer, arguments), 5)
        if not error <= LARGEST_ERROR:
            yield line | {"error": error, "failed": "differs from the graph"}
            continue
        timed = figures(case, seconds_per_layer(case, loop, arguments))
        yield line | {"error": error} | timed


def main(_: list[str]) -> int:
    """One line a shape, number of rows and implementation; 1 if the kernel in use failed."""
    configure_xla()
    if unknown := [name for name in _ONLY.value if not (FOLDER / name / "config.json").exists()]:
        raise app.UsageError(f"--only: {unknown[0]!r} is no folder of configs/shapes")
    device = jax.devices()[0]
    stamp = {"date": _DATE.value, "device": device.device_kind, "jax": jax.__version__}
    failed = False
    for name in _ONLY.value:
        specs = decoder.abstract_params(load_case(name, 1).config)
        params = jax.jit(partial(init_params, specs))(jax.random.key(0))
        cases = [load_case(name, rows) for rows in map(int, _ROWS.value)]
        for prepared in prepare(cases, params):
            for line in measure(prepared):
                print(json.dumps(stamp | line), flush=True)
                failed |= "failed" in line and line["variant"] == IN_USE
    return int(failed)


if __name__ == "__main__":
    app.run(main)
