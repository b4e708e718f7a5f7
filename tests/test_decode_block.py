"""The kernel between two attentions: its cuts, interpreted with race detection, on a GPU."""

import re
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from multiprocessing import get_context
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attention_suite import H200, interpreter, lowered
from jax.sharding import use_abstract_mesh
from paged_model import PagedModel
from tiny import tiny_fields

from octavo.model import decode_block, decoder
from octavo.model.block_plan import TILE, BlockPlan, BlockTuning, Product, cut
from octavo.model.blocks import BLOCKS
from octavo.model.checkpoint.json_file import read_json
from octavo.model.decode_block import (
    between_attentions,
    between_reference,
    block_refusal,
    pad_rows,
    plan_for,
)
from octavo.model.families import config_from_hf
from octavo.model.mosaic_block import no_arrivals
from octavo.model.params import init_params, shape_dtypes
from octavo.model.sharding import host_mesh

SHAPES = Path(__file__).parent.parent / "configs" / "shapes"
SMALL = BlockTuning(num_blocks=2, ring=6, activation_ring=2, interpreted=True)
"""Two blocks, and rings that come round often."""

WIDE = replace(SMALL, row_tiles=2)


def _config(**fields):
    wide = {"hidden_size": 128, "intermediate_size": 192, "num_attention_heads": 2, "head_dim": 64}
    few = {"num_key_value_heads": 1, "torch_dtype": "bfloat16"}
    return config_from_hf(tiny_fields(**(wide | few | fields)))


def _shape(name):
    return config_from_hf(read_json(SHAPES / name / "config.json"))


def _layer(config, rows, seed=0):
    """Random weights of two layers, the residual stream and what attention mixed."""
    params = init_params(decoder.abstract_params(config), jax.random.key(seed))
    rng = np.random.default_rng(seed)
    draw = lambda *shape: jnp.asarray(rng.standard_normal(shape), jnp.bfloat16)  # noqa: E731
    norms = {name: draw(config.hidden_size) for name in ("attn_norm", "mlp_norm")}
    layers = [dict(layer) | norms for layer in params["layers"][:2]]
    heads = (config.num_kv_heads, config.group_size, config.head_dim)
    return (*layers, draw(config.hidden_size)), draw(rows, config.hidden_size), draw(rows, *heads)


def _assert_close(found, expected, tolerance=0.004):
    """Equal but for roundings of bfloat16 that fall the other way."""
    found, expected = (np.asarray(array, np.float32) for array in (found, expected))
    assert found.shape == expected.shape
    assert np.isfinite(found).all()
    assert np.abs(found - expected).max() <= 0.02 * np.abs(expected).max()
    assert np.sqrt(((found - expected) ** 2).mean()) <= tolerance * np.sqrt((expected**2).mean())


def _cuts(out, down, qkv):
    """A plan that uses what the small shape's own does not: splits, 3 tiles, uneven items."""
    return BlockPlan(
        Product(128, 128, 1, out), Product(128, 384, 2, gated=True),
        Product(192, 128, 2, down), Product(128, 256, *qkv),
    )  # fmt: skip


@pytest.mark.parametrize("name", ["llama3_8b", "llama32_1b"])
def test_cuts_keep_blocks_busy_and_cover_the_matrix(name):
    for product in plan_for(_shape(name), last=False).products():
        assert 96 <= product.items <= 128
        assert product.columns * product.tiles * TILE == product.width
        assert product.steps * product.splits * TILE == product.depth
    for gated in (False, True):
        fewest = cut(4096, 6144, 128, gated).block_bytes(128, 64)
        for tiles in (2, 4):
            assert fewest <= Product(4096, 6144, tiles, 1, gated).block_bytes(128, 64)


@pytest.fixture(scope="module")
def apart():
    """Calls a function of this module in a process whose XLA computes where it is called.

    XLA's threads may be fewer than the interpreter needs at once: one for each warpgroup of each
    block, all of which wait for each other.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("JAX_CPU_ENABLE_ASYNC_DISPATCH", "0")
        patch.setenv("NPROC", "64")  # the size of XLA's thread pools
        with get_context("spawn").Pool(1) as pool:
            yield lambda function, *args: pool.apply_async(function, args).get(timeout=240)


@pytest.mark.parametrize(
    ("rows", "last", "plan"),
    [
        (3, False, None),
        (64, True, None),
        (16, False, _cuts(2, 3, (4, 2))),
        (100, False, _cuts(2, 1, (2, 1))),
    ],
    ids=["ragged", "last_layer", "splits", "two_row_tiles"],
)
def test_interpreted_equals_the_graph_without_races(rows, last, plan, apart):
    apart(_interpret, rows, last, plan)


def _interpret(rows, last, plan):
    config = _config()
    (weights, following, norm), x, mixed = _layer(config, rows)
    tuning = SMALL if rows <= 64 else WIDE
    run = partial(
        between_attentions, config=config, arrivals=no_arrivals(), tuning=tuning, plan=plan
    )
    # What lies in padded rows must not reach others.
    padded = pad_rows(x).at[rows:].set(jnp.nan)
    with interpreter():
        found = jax.jit(run)(weights, None if last else following, norm, x=padded, mixed=mixed)
        jax.block_until_ready(found)
    expected = between_reference(weights, None if last else following, norm, config, x, mixed)
    _assert_close(found[0][:rows], expected[0])
    _assert_close(found[1], expected[1])


@pytest.mark.parametrize(
    ("name", "rows"), [("llama3_8b", 1), ("llama3_8b", 128), ("llama32_1b", 64)]
)
def test_lowers_for_cuda_without_a_gpu(name, rows):
    config = _shape(name)
    layer = shape_dtypes(decoder.abstract_params(config))["layers"][0]
    draw = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.bfloat16)  # noqa: E731
    x = jax.eval_shape(pad_rows, draw(rows, config.hidden_size))
    mixed = draw(rows, config.num_kv_heads, config.group_size, config.head_dim)
    norm = draw(config.hidden_size)
    with use_abstract_mesh(H200):
        run = jax.jit(partial(between_attentions, config=config, arrivals=no_arrivals()))
        for following in (layer, None):
            traced = run.trace(layer, following, norm, x=x, mixed=mixed)
            lowered(traced)


QWEN2 = {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2"}
QWEN3 = {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3"}


@pytest.mark.parametrize("fields", [QWEN2, QWEN3], ids=["qwen2", "qwen3"])
def test_decode_steps_of_a_model_equal_those_of_the_graph(fields, apart):
    apart(_decode_by_both, fields)


def _decode_by_both(fields):
    config, calls = _config(**fields), []
    params = init_params(decoder.abstract_params(config), jax.random.key(1))
    counted = lambda *args: calls.append(args[1]) or between_attentions(*args)  # noqa: E731
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(decode_block, "TUNINGS", {1: SMALL})
        patch.setitem(BLOCKS, "mosaic", BLOCKS["mosaic"]._replace(between=counted))
        _assert_same_logits(config, params, calls)


def _assert_same_logits(config, params, calls):
    logits = {}
    for block in ("xla", "mosaic"):
        model = PagedModel(
            config, params, rows=3, max_len=16, page_size=16, impl="xla", block=block
        )
        # A mixed step is the plain graph's in both.
        model.step([[5, 6, 7], [8], []], width=8)
        assert not calls
        with interpreter() if block == "mosaic" else nullcontext():
            logits[block] = model.step([[9], [10], [11]], width=3)
    assert [following is None for following in calls] == [False, True]
    for graph, kernel in zip(logits["xla"], logits["mosaic"]):
        assert np.abs(graph - kernel).max() <= 0.05 * np.abs(graph).max()


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"torch_dtype": "float32"}, "dtype float32"),
        ({"hidden_act": "gelu"}, "activation gelu"),
        ({"mlp_bias": True}, "biases of out or MLP"),
        ({"hidden_size": 192}, "hidden size 192, no multiple of 128"),
        ({"intermediate_size": 96}, r"\[128, 192\] does not divide"),
    ],
)
def test_models_it_is_not_for_are_refused_by_name(fields, words):
    _assert_refused(block_refusal, fields, words)


def _assert_refused(refusal, fields, words):
    """A model of these fields, a mesh and a machine without a GPU, each in words that say why."""
    with use_abstract_mesh(H200):
        assert refusal(_config()) is None
        found = refusal(_config(**fields))
        assert found is not None
        assert re.search(words, found)
        assert "tensor parallelism" in refusal(_config(), mesh=host_mesh())
    assert "Hopper" in refusal(_config())


def test_tunings_that_do_not_fit_are_refused():
    with pytest.raises(ValueError, match="shared memory"):
        BlockTuning(ring=40)
    with pytest.raises(ValueError, match="ring from 4"):
        BlockTuning(ring=3)
    with pytest.raises(ValueError, match="row_tiles must be 1 or 2"):
        BlockTuning(row_tiles=3)


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [1, 8, 33, 64, 70, 128])
@pytest.mark.parametrize("name", ["llama3_8b", "llama32_1b"])
def test_on_a_gpu_it_equals_the_graph(name, rows):
    config = replace(_shape(name), layers=_shape(name).layers[:2], vocab_size=128)
    (weights, following, norm), x, mixed = _layer(config, rows)
    run = jax.jit(partial(between_attentions, config=config, arrivals=no_arrivals()))
    plain = jax.jit(partial(between_reference, config=config))
    for after in (following, None):
        found = run(weights, after, norm, x=pad_rows(x), mixed=mixed)
        expected = plain(weights, after, norm, x=x, mixed=mixed)
        # XLA may keep what the graph rounds between two products.
        _assert_close(found[0][:rows], expected[0], 0.01)
        _assert_close(found[1], expected[1], 0.01)


@pytest.mark.gpu
def test_on_a_gpu_a_row_is_bit_equal_in_any_batch_and_run():
    config = replace(_shape("llama3_8b"), layers=_shape("llama3_8b").layers[:2], vocab_size=128)
    (weights, following, norm), x, mixed = _layer(config, 128)
    run = jax.jit(partial(between_attentions, config=config, arrivals=no_arrivals()))
    x_all, qkv_all = run(weights, following, norm, x=x, mixed=mixed)
    for _ in range(20):
        for rows in (1, 8, 24, 64, 100, 128):
            found = run(weights, following, norm, x=pad_rows(x[:rows]), mixed=mixed[:rows])
            assert (found[0][:rows] == x_all[:rows]).all()
            assert (found[1] == qkv_all[:rows]).all()
