"""Times the products of many rows; one JSON line a measurement.

    octavo bench kernel matmul                           # XLA's graph, and the kernel
    octavo bench kernel matmul -- --only=gate_up,down --rows=256,640

Each matrix of Llama-3-8B with what follows it: silu(gate) * up after gate and up, the residual
after out and down, nothing after qkv. A program multiplies one after the other by several copies of
the weights, more than the L2 holds, and is queued many times, so that weights come from memory and
dispatch is not counted. Floor: the larger of the bytes over what memory gives and the operations
over what the tensor cores do. Before it is timed the kernel is held against XLA's graph, and it is
not timed if it differs.
"""

import json
import math
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from absl import app, flags

from octavo.model.layers import activate, project
from octavo.model.matmul_plan import Epilogue, MatmulTuning, choose
from octavo.model.mosaic_matmul import matmul
from octavo.serve.devices import configure_xla

_ORDER = ["256", "640", "8192", "1024", "512", "768", "2048"]
_ROWS = flags.DEFINE_list("rows", _ORDER, "Rows, in order.")
_ONLY = flags.DEFINE_list("only", ["gate_up", "down", "out", "qkv"], "Matrices.")
_BUDGET = flags.DEFINE_float("seconds", 50.0, "After so long no further number of rows begins.")
_DATE = flags.DEFINE_string("date", time.strftime("%Y-%m-%d"), "Date written into the results.")

READ_CEILING, MATRIX_CEILING = 4.48e12, 812e12
"""Bytes/s and FLOP/s: the most that one H200 was measured to do."""

WEIGHT_BYTES = 5e8
"""Weights that a program goes through before it comes to the first again."""

PROGRAM_SECONDS, QUEUED = 1.5e-3, 16
"""About how long a program runs, and how many are queued."""

LARGEST_ERROR = 0.004
"""Against XLA's, root mean squares; a rounding of bfloat16 is a quarter of it."""

IN_USE, SWEPT_ROWS = "in use", (256, 640)
EMBED, FFN, QKV = 4096, 14336, 6144


@dataclass(frozen=True)
class Case:
    """A matrix, what follows it, and rows; a gated one's width is that of its result."""

    name: str
    rows: int
    depth: int
    width: int
    epilogue: Epilogue

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the weights, as a layer has them."""
        if self.epilogue is Epilogue.GATED:
            return (self.depth, 2, self.width)
        return (self.depth, self.width)

    @property
    def weight_bytes(self) -> int:
        """Of one copy."""
        return math.prod(self.shape) * 2

    @property
    def flops(self) -> int:
        """Of a product."""
        return 2 * self.rows * math.prod(self.shape)

    @property
    def floor(self) -> float:
        """Seconds."""
        lines = self.depth + self.width * (2 if self.epilogue is Epilogue.RESIDUAL else 1)
        moved = self.weight_bytes + self.rows * lines * 2
        return max(moved / READ_CEILING, self.flops / MATRIX_CEILING)

    @property
    def copies(self) -> int:
        """Of the weights."""
        return max(2, round(WEIGHT_BYTES / self.weight_bytes))

    @property
    def products(self) -> int:
        """In a program."""
        return max(2, round(PROGRAM_SECONDS / self.floor))


def case_of(name: str, rows: int) -> Case:
    """The matrix of that name of Llama-3-8B."""
    depth, width, epilogue = {
        "gate_up": (EMBED, FFN, Epilogue.GATED),
        "down": (FFN, EMBED, Epilogue.RESIDUAL),
        "out": (EMBED, EMBED, Epilogue.RESIDUAL),
        "qkv": (EMBED, QKV, Epilogue.PLAIN),
    }[name]
    return Case(name, rows, depth, width, epilogue)


def graph(x: jax.Array, weight: jax.Array, residual: jax.Array) -> jax.Array:
    """A product and what follows it, as the model's graph has it."""
    out = project(x, weight)
    if weight.ndim == 3:
        gate, up = out[:, 0].astype(jnp.float32), out[:, 1].astype(jnp.float32)
        return (activate(gate, "silu") * up).astype(x.dtype)
    return residual + out if residual.size else out


def kernel(x: jax.Array, weight: jax.Array, residual: jax.Array, tuning: MatmulTuning) -> jax.Array:
    """The same by the kernel."""
    gated = weight.ndim == 3
    weight = weight.reshape(len(weight), -1)
    return matmul(x, weight, residual if residual.size else None, gated=gated, tuning=tuning)


def program(case: Case, product: Callable) -> Callable:
    """Products one after the other, no two of the same operands: those would be made once."""

    def run(inputs: list, weights: list, residual: jax.Array) -> list[jax.Array]:
        outs = []
        for index in range(case.products):
            x, weight = inputs[index // len(weights)], weights[index % len(weights)]
            # In order, so that no result is in the L2 when it is overwritten or read.
            x, *_ = jax.lax.optimization_barrier((x, *outs[-1:]))
            outs.append(product(x, weight, residual))
        return outs

    return run


def draw(case: Case) -> tuple[list, list, jax.Array]:
    """Inputs, copies of the weights and a residual (empty where none is added)."""
    normal = partial(jax.random.normal, dtype=jnp.bfloat16)
    keys = jax.random.split(jax.random.key(case.rows), 1000)
    weights = [
        normal(keys[copy], case.shape) * jnp.bfloat16(case.depth**-0.5)
        for copy in range(case.copies)
    ]
    inputs = [
        normal(keys[100 + index], (case.rows, case.depth))
        for index in range(-(-case.products // case.copies))
    ]
    wanted = case.epilogue is Epilogue.RESIDUAL
    residual = normal(keys[-1], (case.rows, case.width) if wanted else (0, case.width))
    return inputs, weights, residual


def variants(case: Case) -> Iterator[tuple[str, MatmulTuning]]:
    """Name and tuning of what is timed: what is in use first."""
    used = choose(case.rows, case.depth, case.width, case.epilogue)
    yield IN_USE, used
    others = {"256": MatmulTuning()}
    if case.rows in SWEPT_ROWS:
        others["192"] = MatmulTuning(192)
        if case.epilogue is not Epilogue.GATED:
            for columns, splits, stages in ((128, 1, 6), (128, 2, 6), (256, 4, 4)):
                tuning = MatmulTuning(columns, splits, stages)
                others[f"{columns} / {splits}"] = tuning
    elif case.rows > 4096:
        others |= {"group 16": replace(used, group=16)}
    yield from ((name, tuning) for name, tuning in others.items() if tuning != used)


def seconds_per_product(case: Case, compiled: Callable, arguments: tuple) -> float:
    """The best of three queues of programs."""
    jax.block_until_ready(compiled(*arguments))
    queued = max(2, min(QUEUED, round(0.03 / (case.products * case.floor))))
    times = []
    for _ in range(3):
        begin = time.perf_counter()
        for _ in range(queued - 1):
            compiled(*arguments)
        jax.block_until_ready(compiled(*arguments))
        times.append(time.perf_counter() - begin)
    return min(times) / queued / case.products


def compile_program(case: Case, product: Callable, arguments: tuple, **options: bool) -> Callable:
    """Ahead of time."""
    lowered = jax.jit(program(case, product)).lower(*arguments)
    return lowered.compile(compiler_options=options or None)


class Prepared(NamedTuple):
    """A case's operands and compiled programs: the graph's, and by name the kernel's."""

    case: Case
    arguments: tuple
    reference: Callable
    kernels: dict[str, tuple[MatmulTuning, Future]]


def prepare(cases: list[Case], pool: ThreadPoolExecutor) -> list[Prepared]:
    """Everything compiled: the graphs one by one, since XLA times products for them."""
    operands = [draw(case) for case in cases]
    jobs = [
        {
            name: (
                tuning,
                pool.submit(compile_program, case, partial(kernel, tuning=tuning), given),
            )
            for name, tuning in variants(case)
        }
        for case, given in zip(cases, operands)
    ]
    wait([job for kernels in jobs for _, job in kernels.values()])
    graphs = [
        compile_program(case, graph, given, xla_gpu_enable_triton_gemm=False)
        for case, given in zip(cases, operands)
    ]
    return [Prepared(*parts) for parts in zip(cases, operands, graphs, jobs)]


def measure(prepared: Prepared) -> Iterator[dict]:
    """XLA's graph, then the kernel in every variant."""
    case, arguments, reference, kernels = prepared
    line = {"what": "matmul", "matrix": case.name, "rows": case.rows}
    yield line | {"impl": "xla"} | figures(case, seconds_per_product(case, reference, arguments))
    expected = reference(*arguments)[-2:]
    line["impl"] = "mosaic"
    for name, (tuning, job) in kernels.items():
        line |= {"variant": name, "tuning": str(tuning).removeprefix("MatmulTuning")}
        try:
            found = job.result()(*arguments)[-2:]
            error = max(float(relative_error(*pair)) for pair in zip(found, expected))
            if not error <= LARGEST_ERROR:
                yield line | {"error": error, "failed": "differs from the graph"}
                continue
            seconds = seconds_per_product(case, job.result(), arguments)
        except Exception as failure:
            yield line | {"failed": repr(failure)[:300]}
            continue
        yield line | {"error": round(error, 5)} | figures(case, seconds)


@jax.jit
def relative_error(found: jax.Array, expected: jax.Array) -> jax.Array:
    """Root mean squares."""
    found, expected = found.astype(jnp.float32), expected.astype(jnp.float32)
    return jnp.sqrt(((found - expected) ** 2).mean() / (expected**2).mean())


def figures(case: Case, seconds: float) -> dict:
    """Microseconds, floor, share and rate."""
    return {
        "us": round(seconds * 1e6, 2),
        "floor_us": round(case.floor * 1e6, 2),
        "share": round(case.floor / seconds, 3),
        "TFLOPs": round(case.flops / seconds / 1e12),
    }


def main(_: list[str]) -> None:
    """One line a matrix, number of rows and implementation."""
    configure_xla()
    begin, device = time.monotonic(), jax.devices()[0]
    stamp = {"date": _DATE.value, "device": device.device_kind, "jax": jax.__version__}
    with ThreadPoolExecutor(12) as pool:
        for rows in map(int, _ROWS.value):
            if time.monotonic() - begin > _BUDGET.value:
                break
            for prepared in prepare([case_of(name, rows) for name in _ONLY.value], pool):
                for line in measure(prepared):
                    print(json.dumps(stamp | line), flush=True)


if __name__ == "__main__":
    app.run(main)
