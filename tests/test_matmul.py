"""The matmul of many rows: its tiles, interpreted with race detection, where the graph uses it."""

import re
from dataclasses import replace
from functools import partial
from itertools import product

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attention_suite import H200, interpreter, lowered
from jax.sharding import use_abstract_mesh
from tiny import tiny_config

from octavo.model import decoder, products
from octavo.model.layer import mlp, out_projection, qkv_projection
from octavo.model.matmul_plan import (
    CLUSTER,
    ROWS,
    Epilogue,
    MatmulShape,
    MatmulTuning,
    choose,
    cut,
)
from octavo.model.mosaic_matmul import matmul
from octavo.model.params import init_params, shape_dtypes
from octavo.model.products import WINS, matmul_refusal
from octavo.model.sharding import host_mesh

PLAIN, RESIDUAL, GATED = Epilogue.PLAIN, Epilogue.RESIDUAL, Epilogue.GATED


def _operands(rows, depth, width, epilogue, seed=0):
    """x, weight and, for the epilogue that adds it, a residual; sums of about 1."""
    rng = np.random.default_rng(seed)
    draw = lambda *shape: jnp.asarray(rng.standard_normal(shape), jnp.bfloat16)  # noqa: E731
    wide = 2 * width if epilogue is GATED else width
    x, weight = draw(rows, depth), draw(depth, wide) * jnp.bfloat16(depth**-0.5)
    return x, weight, draw(rows, width) if epilogue is RESIDUAL else None


def _expected(x, weight, residual, epilogue):
    """In float64, rounded where the graph rounds."""
    rounded = lambda array: array.astype(jnp.bfloat16).astype(np.float64)  # noqa: E731
    out = rounded(np.asarray(x, np.float64) @ np.asarray(weight, np.float64))
    if epilogue is GATED:
        gate, up = np.split(out, 2, axis=1)
        out = gate / (1 + np.exp(-gate)) * up
    return rounded(out if residual is None else out + np.asarray(residual, np.float64))


def _assert_close(found, expected, tolerance=0.003):
    """Equal but for roundings of bfloat16 that fall the other way."""
    found = np.asarray(found, np.float64)
    assert found.shape == expected.shape
    assert np.isfinite(found).all()
    assert np.abs(found - expected).max() <= 0.02 * np.abs(expected).max()
    assert np.sqrt(((found - expected) ** 2).mean()) <= tolerance * np.sqrt((expected**2).mean())


@pytest.mark.parametrize("epilogue", [PLAIN, RESIDUAL, GATED])
def test_every_result_belongs_to_one_tile(epilogue):
    for rows, width in product((256, 1000, 8192), (4096, 6144, 14336, 1000)):
        tuning = choose(rows, 4096, width, epilogue)
        kind = Epilogue.SUMS if tuning.splits > 1 else epilogue
        tiles = cut(MatmulShape(rows, 4096, width, kind), tuning)
        assert tiles.row_tiles * CLUSTER * ROWS >= rows > (tiles.row_tiles - 1) * CLUSTER * ROWS
        covered, items = 0, 0
        for section in tiles.sections:
            assert (section.first, section.start) == (covered, items)
            assert covered < width
            covered += section.tiles * section.columns // (2 if epilogue is GATED else 1)
            items += section.tiles * tiles.row_tiles * tiles.splits
        assert covered >= width
        assert items == tiles.items


def test_depth_is_split_only_where_tiles_are_few():
    assert choose(256, 14336, 4096, RESIDUAL).splits == 4
    for rows, epilogue in product((1024, 8192), (PLAIN, RESIDUAL, GATED)):
        assert choose(rows, 14336, 4096, epilogue).splits == 1


INTERPRETED = (
    # Rows and columns that end within a tile, a ring that comes round, more tiles than clusters.
    (PLAIN, 296, 128, 192, MatmulTuning(128, stages=2, num_blocks=2)),
    (RESIDUAL, 136, 192, 320, MatmulTuning(256, stages=2, num_blocks=2)),
    (GATED, 264, 128, 192, MatmulTuning(128, stages=2, num_blocks=2, tail=64, wide=2)),
    (RESIDUAL, 72, 256, 128, MatmulTuning(64, splits=2, stages=2, num_blocks=2)),
    (GATED, 104, 64, 128, MatmulTuning(192, stages=2, num_blocks=4)),
)


@pytest.mark.parametrize(
    ("epilogue", "rows", "depth", "width", "tuning"),
    INTERPRETED,
    ids=["plain", "residual", "gated_tail", "splits", "gated_192"],
)
def test_interpreted_equals_float64_without_races(epilogue, rows, depth, width, tuning):
    x, weight, residual = _operands(rows, depth, width, epilogue)
    run = jax.jit(partial(matmul, gated=epilogue is GATED, tuning=tuning))
    with interpreter():
        found = jax.block_until_ready(run(x, weight, residual))
    _assert_close(found, _expected(x, weight, residual, epilogue))


def _layer(weights, config, x, mixed, impl):
    """All products of a layer."""
    qkv = qkv_projection(weights, config, x, impl)
    return qkv, mlp(weights, config, out_projection(weights, config, x, mixed, impl), impl)


def _config(**fields):
    wide = {"hidden_size": 128, "intermediate_size": 256, "num_attention_heads": 2, "head_dim": 64}
    few = {"num_key_value_heads": 1, "torch_dtype": "bfloat16"}
    return tiny_config(**(wide | few | fields))


def _kernels(config, rows, impl="mosaic"):
    """Names of the kernels in a layer's program for CUDA."""
    weights = shape_dtypes(decoder.abstract_params(config))["layers"][0]
    draw = lambda *shape: jax.ShapeDtypeStruct(shape, config.dtype)  # noqa: E731
    mixed = draw(rows, config.num_kv_heads, config.group_size, config.head_dim)
    with use_abstract_mesh(H200):
        run = jax.jit(partial(_layer, config=config, impl=impl))
        traced = run.trace(weights, x=draw(rows, config.hidden_size), mixed=mixed)
        text = traced.lower(lowering_platforms=("cuda",)).as_text()
    return sorted(re.findall(r"matmul_(\w+)_mosaic_gpu", text))


ALL = ["gated", "plain", "residual", "residual"]


@pytest.mark.parametrize(
    ("fields", "rows", "names"),
    [
        ({}, 8192, ALL),
        ({}, 1024, ALL),
        ({}, 1023, []),
        ({}, 2050, []),
        ({}, 2056, ALL),
        ({}, 257, []),
        ({}, 256, ["gated", "residual"]),
        ({}, 255, []),
        ({"attention_bias": True}, 1024, ["gated", "residual"]),
        ({"mlp_bias": True}, 1024, ["plain", "residual"]),
        ({"hidden_act": "gelu"}, 1024, ["plain", "residual", "residual"]),
    ],
)
def test_products_are_the_kernels_where_it_was_measured_to_be_quicker(fields, rows, names):
    assert _kernels(_config(**fields), rows) == names
    assert _kernels(_config(**fields), rows, "xla") == []


def test_norms_after_a_product_keep_it_from_the_kernel():
    config = replace(_config(), post_norms=True)
    assert _kernels(config, 1024) == ["gated", "plain"]


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"torch_dtype": "float32"}, "dtype float32"),
        ({"torch_dtype": "float16"}, "dtype float16"),
        ({"intermediate_size": 200}, r"sizes \(.*200.*\), no multiples of 64"),
        ({"hidden_size": 96}, r"sizes \(96,.*\), no multiples of 64"),
    ],
)
def test_models_it_is_not_for_are_refused_by_name(fields, words):
    with use_abstract_mesh(H200):
        assert matmul_refusal(_config()) is None
        assert re.search(words, matmul_refusal(_config(**fields)) or "")
        assert "tensor parallelism" in (matmul_refusal(_config(), mesh=host_mesh()) or "")
    assert "Hopper" in (matmul_refusal(_config()) or "")


def test_a_layer_by_the_kernel_is_the_graphs(monkeypatch):
    config, rows = _config(), 104
    weights = init_params(decoder.abstract_params(config), jax.random.key(1))["layers"][0]
    draw = partial(jax.random.normal, dtype=jnp.bfloat16)
    x = draw(jax.random.key(2), (rows, config.hidden_size))
    mixed = draw(jax.random.key(3), (rows, config.num_kv_heads, config.group_size, config.head_dim))
    expected = jax.jit(partial(_layer, config=config, impl="xla"))(weights, x=x, mixed=mixed)
    small = MatmulTuning(128, stages=2, num_blocks=2)
    monkeypatch.setattr(products, "matmul", partial(matmul, tuning=small))
    monkeypatch.setattr(products, "WINS", dict.fromkeys(WINS, ((1, None),)))
    with interpreter():
        run = jax.jit(partial(_layer, config=config, impl="mosaic"))
        found = jax.block_until_ready(run(weights, x=x, mixed=mixed))
    for ours, graphs in zip(found, expected, strict=True):
        assert ours.shape == graphs.shape
        _assert_close(ours, np.asarray(graphs, np.float64), 0.01)


@pytest.mark.parametrize("rows", [256, 1000, 8192])
@pytest.mark.parametrize("epilogue", [PLAIN, RESIDUAL, GATED])
def test_lowers_for_cuda_without_a_gpu(epilogue, rows):
    shapes = [(rows, 4096), (4096, 28672 if epilogue is GATED else 6144), (rows, 6144)]
    arrays = [jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in shapes]
    with use_abstract_mesh(H200):
        run = jax.jit(partial(matmul, gated=epilogue is GATED))
        lowered(run.trace(*arrays[: 3 if epilogue is RESIDUAL else 2]))


@pytest.mark.parametrize(("depth", "width"), [(64, 64), (192, 320), (960, 576), (448, 4160)])
@pytest.mark.parametrize(("epilogue", "rows"), [(PLAIN, 1032), (RESIDUAL, 256), (GATED, 256)])
def test_whatever_is_not_refused_lowers_for_cuda(epilogue, rows, depth, width):
    """A model whose products the kernel takes must start: what can't be lowered ends the engine."""
    wide = 2 * width if epilogue is GATED else width
    shapes = [(rows, depth), (depth, wide), (rows, width)]
    arrays = [jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in shapes]
    with use_abstract_mesh(H200):
        run = jax.jit(partial(matmul, gated=epilogue is GATED))
        lowered(run.trace(*arrays[: 3 if epilogue is RESIDUAL else 2]))


def test_what_does_not_fit_is_refused():
    x, weight, _ = _operands(64, 64, 64, PLAIN)
    with pytest.raises(NotImplementedError, match="multiples of 8 rows, 64 columns"):
        matmul(x, weight[:, :56])
    with pytest.raises(NotImplementedError, match=r"64 rows by \[56, 64\]"):
        matmul(x[:, :56], weight[:56])
    with pytest.raises(NotImplementedError, match="63 rows"):
        matmul(x[:63], weight)
    with pytest.raises(NotImplementedError, match="do not divide into 2 splits"):
        matmul(x, weight, tuning=MatmulTuning(splits=2))
    with pytest.raises(ValueError, match="shared memory"):
        MatmulTuning(stages=5)
    with pytest.raises(ValueError, match="columns must be of"):
        MatmulTuning(100)
    with pytest.raises(ValueError, match="a tail is narrower"):
        MatmulTuning(128, tail=64)


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [256, 1000, 1024, 2056])
@pytest.mark.parametrize(
    ("epilogue", "depth", "width"),
    [(PLAIN, 4096, 6144), (RESIDUAL, 4096, 4096), (RESIDUAL, 14336, 4096), (GATED, 4096, 14336)],
)
def test_on_a_gpu_it_equals_float64(epilogue, depth, width, rows):
    """In rows and columns drawn by lot; memory that results are put into holds NaNs before."""
    x, weight, residual = _operands(rows, depth, width, epilogue, seed=rows)
    run = jax.jit(partial(matmul, gated=epilogue is GATED))
    compiled = run.lower(x, weight, residual).compile()
    poison = jax.block_until_ready([jnp.full((rows, width), jnp.nan, jnp.bfloat16)] * 8)
    del poison
    found = np.asarray(compiled(x, weight, residual), np.float32)
    assert np.isfinite(found).all()
    rng = np.random.default_rng(rows)
    at = np.r_[rng.choice(rows, 60, replace=False), 0, rows - 1]
    columns = np.r_[rng.choice(width, 200, replace=False), 0, width - 1]
    both = np.r_[columns, columns + width] if epilogue is GATED else columns
    there = None if residual is None else np.asarray(residual, np.float32)[np.ix_(at, columns)]
    weights = np.asarray(weight, np.float32)[:, both]
    expected = _expected(np.asarray(x, np.float32)[at], weights, there, epilogue)
    _assert_close(found[np.ix_(at, columns)], expected)


@pytest.mark.gpu
@pytest.mark.parametrize(("epilogue", "width"), [(PLAIN, 6144), (RESIDUAL, 4096), (GATED, 14336)])
def test_on_a_gpu_a_row_is_bit_equal_in_any_batch_and_run(epilogue, width):
    x, weight, residual = _operands(2056, 4096, width, epilogue)
    run = jax.jit(partial(matmul, gated=epilogue is GATED))
    whole = run(x, weight, residual)
    for first, rows in ((0, 2056), (0, 1024), (1029, 1024), (3, 2048), (100, 600)):
        part = slice(first, first + rows)
        found = run(x[part], weight, None if residual is None else residual[part])
        assert (found == whole[part]).all()
