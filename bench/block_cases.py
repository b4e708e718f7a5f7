"""What benchmarks of the work between two attentions share: shapes, inputs, XLA's graph."""

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from octavo.bench.shapes import FOLDER
from octavo.bench.timing import median_seconds
from octavo.model import decoder
from octavo.model.config import ModelConfig
from octavo.model.decode_block import between_reference
from octavo.model.families import config_from_hf
from octavo.model.params import param_bytes

READ_CEILING = 4.48e12
"""Bytes/s: the most that one H200 was measured to read from its memory."""

WEIGHT_BYTES = 1.5e9
"""Weights that a program goes through before it comes to the first again."""

PROGRAM_SECONDS = 0.04
"""About how long a program runs, so that its dispatch (0.3 ms) doesn't count."""

LARGEST_ERROR = 0.02
"""Of x and qkv against the graph, root mean squares; roundings of bfloat16 are a quarter of it."""

IN_USE = "in use"
"""How lines call the variant that models have."""

MATRICES = ("out", "gate_up", "down", "qkv")


@dataclass(frozen=True)
class Case:
    """A model's shape, its layers cut to as many as are gone through, and rows of a step."""

    name: str
    config: ModelConfig
    rows: int

    @property
    def layer_bytes(self) -> int:
        """Of the weights between two attentions."""
        layer = decoder.abstract_params(self.config)["layers"][0]
        return param_bytes({name: layer[name] for name in MATRICES})

    @property
    def floor(self) -> float:
        """Seconds a layer."""
        return self.layer_bytes / READ_CEILING

    @property
    def rounds(self) -> int:
        """Times that a program goes over its layers."""
        return max(2, round(PROGRAM_SECONDS / self.floor / len(self.config.layers)))


def load_case(name: str, rows: int) -> Case:
    """The case of a shape under configs/shapes."""
    config = config_from_hf(json.loads((FOLDER / name / "config.json").read_text()))
    config = replace(config, vocab_size=128)
    layers = max(2, round(WEIGHT_BYTES / Case(name, config, rows).layer_bytes))
    return Case(name, replace(config, layers=config.layers[:1] * layers), rows)


def draw_inputs(case: Case, params: Any) -> tuple[list, jax.Array, jax.Array, jax.Array]:
    """Layers' weights, a norm, the residual stream and what attention mixed."""
    config, keys = case.config, jax.random.split(jax.random.key(case.rows), 2)
    heads = (config.num_kv_heads, config.group_size, config.head_dim)
    x = jax.random.normal(keys[0], (case.rows, config.hidden_size), jnp.bfloat16)
    mixed = jax.random.normal(keys[1], (case.rows, *heads), jnp.bfloat16)
    return list(params["layers"]), params["final_norm"], x, mixed


def layers_program(case: Case, between: Callable, state: Callable[[], Any]) -> Callable:
    """All layers, many times. `between` takes what `triton_block.between_attentions` does.

    The results of every layer's qkv are carried on, or XLA would not compute them. `state` makes
    what the first `between` takes as the state that it returns.
    """

    def run(layers: list, norm: jax.Array, x: jax.Array, mixed: jax.Array) -> tuple:
        def one_round(_: jax.Array, carry: tuple) -> tuple:
            x, held, results = carry[0], carry[1], []
            for index, weights in enumerate(layers):
                following = layers[(index + 1) % len(layers)]
                x, qkv, held = between(weights, following, norm, case.config, x, mixed, held)
                results.append(qkv)
            return x, held, results

        none = [jnp.zeros((case.rows, *layer["qkv"].shape[1:]), x.dtype) for layer in layers]
        return lax.fori_loop(0, case.rounds, one_round, (x, state(), none))

    return run


def graph_program(case: Case) -> Callable:
    """XLA's."""
    return layers_program(case, lambda *given: (*between_reference(*given[:-1]), ()), tuple)


def seconds_per_layer(case: Case, compiled: jax.stages.Compiled, arguments: tuple) -> float:
    """Median of three runs of a program, a layer."""
    return median_seconds(compiled, arguments) / case.rounds / len(case.config.layers)


def relative_errors(found: tuple, expected: tuple) -> Iterator[float]:
    """Of each array against what it should be: root mean squares."""
    for ours, theirs in zip(found, expected, strict=True):
        ours, theirs = np.asarray(ours, np.float32), np.asarray(theirs, np.float32)
        yield float(np.sqrt(((ours - theirs) ** 2).mean() / (theirs**2).mean()))


def figures(case: Case, seconds: float) -> dict:
    """Microseconds a layer, floor and share."""
    return {
        "us": round(seconds * 1e6, 2),
        "floor_us": round(case.floor * 1e6, 2),
        "share": round(case.floor / seconds, 3),
        "TBps": round(case.layer_bytes / seconds / 1e12, 3),
    }
