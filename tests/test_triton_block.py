"""The Triton kernels between two attentions: interpreted, lowered, in a model, on a GPU."""

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attention_suite import H200
from jax.sharding import use_abstract_mesh
from paged_model import PagedModel
from test_decode_block import QWEN2, QWEN3, _assert_refused, _config, _layer, _shape

from octavo.model import decoder
from octavo.model.blocks import BLOCKS
from octavo.model.config import ModelConfig
from octavo.model.decode_block import between_reference
from octavo.model.params import init_params, shape_dtypes
from octavo.model.triton_block import between_attentions, triton_refusal
from octavo.model.triton_plan import NUM_COUNTS, LayerTiles, Tiles, choose
from octavo.model.triton_products import no_counts


def _tiles(columns, step, splits=1):
    return Tiles(columns, step, splits, interpreted=True)


WHOLE = LayerTiles(_tiles(64, 64), _tiles(64, 32), _tiles(32, 64), _tiles(128, 64))
SPLIT = LayerTiles(_tiles(32, 32, 4), _tiles(32, 64), _tiles(64, 32, 3), _tiles(64, 64, 2))


def _distance(found, expected):
    """Of root mean squares."""
    found, expected = (np.asarray(array, np.float32) for array in (found, expected))
    assert found.shape == expected.shape
    return np.sqrt(((found - expected) ** 2).mean() / (expected**2).mean())


def _wide(tree):
    return jax.tree.map(lambda leaf: leaf.astype(jnp.float32), tree)


@pytest.mark.parametrize(
    ("rows", "tiles", "last"),
    [
        (1, WHOLE, False),
        (7, SPLIT, False),
        (16, SPLIT, True),
        (33, WHOLE, True),
        (64, SPLIT, False),
    ],
    ids=["1", "7_split", "16_split_last", "33_last", "64_split"],
)
def test_interpreted_it_is_as_near_to_the_truth_as_the_graph(rows, tiles, last):
    config = _config()
    (weights, following, norm), x, mixed = _layer(config, rows)
    inputs = (weights, None if last else following, norm)
    run = jax.jit(partial(between_attentions, config=config, counts=no_counts(), tiles=tiles))
    *found, counts = run(*inputs, x=x, mixed=mixed)
    graph = between_reference(*inputs, config, x, mixed)
    wide, (wide_x, wide_mixed) = _wide(inputs), _wide((x, mixed))
    exact = replace(config, dtype="float32")
    truth = between_reference(wide[0], wide[1], wide[2], exact, wide_x, wide_mixed)
    assert not counts.any()
    for ours, theirs, true in zip(found, graph, truth):
        assert ours.dtype == jnp.bfloat16
        assert _distance(ours, true) <= 1.2 * _distance(theirs, true)


def test_a_row_is_bit_equal_among_other_rows():
    config = _config()
    (weights, following, norm), x, mixed = _layer(config, 16)
    run = jax.jit(partial(between_attentions, config=config, counts=no_counts(), tiles=SPLIT))
    every = run(weights, following, norm, x=x, mixed=mixed)
    some = run(weights, following, norm, x=x[3:8], mixed=mixed[3:8])
    for all_rows, few in zip(every[:2], some[:2]):
        assert (all_rows[3:8] == few).all()


@pytest.mark.parametrize(
    ("name", "rows"),
    [("llama3_8b", 1), ("llama3_8b", 64), ("llama32_1b", 32)],
)
def test_lowers_for_cuda_without_a_gpu_to_four_kernels(name, rows):
    config = _shape(name)
    layer = shape_dtypes(decoder.abstract_params(config))["layers"][0]
    draw = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.bfloat16)  # noqa: E731
    x, norm = draw(rows, config.hidden_size), draw(config.hidden_size)
    mixed = draw(rows, config.num_kv_heads, config.group_size, config.head_dim)
    with use_abstract_mesh(H200):
        run = jax.jit(partial(between_attentions, config=config, counts=no_counts()))
        for following, kernels in ((layer, 4), (None, 3)):
            traced = run.trace(layer, following, norm, x=x, mixed=mixed)
            text = traced.lower(lowering_platforms=("cuda",)).as_text()
            assert text.count("custom_call @__gpu$xla.gpu.triton") == kernels


@pytest.mark.parametrize("fields", [QWEN2, QWEN3], ids=["qwen2", "qwen3"])
def test_decode_steps_of_a_model_equal_those_of_the_graph(fields, monkeypatch):
    config, calls, logits = _config(**fields), [], {}
    params = init_params(decoder.abstract_params(config), jax.random.key(1))

    def counted(*args):
        calls.append(args[1])
        return between_attentions(*args, tiles=SPLIT)

    monkeypatch.setitem(BLOCKS, "triton", BLOCKS["triton"]._replace(between=counted))
    for block in ("xla", "triton"):
        model = PagedModel(
            config, params, rows=3, max_len=16, page_size=16, impl="xla", block=block
        )
        # A mixed step is the plain graph's in both.
        model.step([[5, 6, 7], [8], []], width=8)
        assert not calls
        steps = [model.step([[n], [n + 1], [n + 2]], width=3) for n in (9, 20)]
        logits[block] = np.array(steps)
    assert [following is None for following in calls] == [False, True]
    largest = np.abs(logits["xla"]).max()
    assert 0 < np.abs(logits["xla"] - logits["triton"]).max() <= 0.05 * largest


def test_more_rows_than_it_is_for_are_the_graphs(monkeypatch):
    none = BLOCKS["triton"]._replace(max_rows=2, between=None)
    monkeypatch.setitem(BLOCKS, "triton", none)
    config = _config()
    params = init_params(decoder.abstract_params(config), jax.random.key(1))
    model = PagedModel(config, params, rows=3, max_len=16, page_size=16, impl="xla", block="triton")
    assert all(np.isfinite(row).all() for row in model.step([[1], [2], [3]], width=3))


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"torch_dtype": "float32"}, "dtype float32"),
        ({"hidden_act": "gelu"}, "activation gelu"),
        ({"mlp_bias": True}, "biases of out or MLP"),
        ({"intermediate_size": 80}, r"\[128, 80\] does not divide"),
    ],
)
def test_models_it_is_not_for_are_refused_by_name(fields, words):
    _assert_refused(triton_refusal, fields, words)


@pytest.mark.parametrize("rows", [1, 32, 64])
@pytest.mark.parametrize("name", ["llama3_8b", "llama32_1b"])
def test_the_cuts_in_use_keep_a_chip_busy_and_fit_its_memory(name, rows):
    config: ModelConfig = _shape(name)
    tiles = choose(config, rows)
    for cut, width in ((tiles.out, config.hidden_size), (tiles.gate_up, config.intermediate_size)):
        blocks, wide = cut.blocks(width), 2 if cut is tiles.gate_up else 1
        assert 60 <= blocks <= 4 * 132
        stage = cut.step * (wide * cut.columns + max(16, rows)) * 2
        assert cut.stages * stage * -(-blocks // 132) <= 227 * 1024


def test_cuts_that_do_not_fit_a_product_are_refused():
    config = _config()
    (weights, following, norm), x, mixed = _layer(config, 2)
    for name, cut in (
        ("out", _tiles(64, 48)),
        ("down", _tiles(64, 64, 2)),
        ("gate_up", _tiles(32, 64, 2)),
    ):
        with pytest.raises(NotImplementedError, match=str(cut.columns)):
            between_attentions(
                *(weights, following, norm, config, x, mixed, no_counts()),
                tiles=replace(WHOLE, **{name: cut}),
            )
    with pytest.raises(NotImplementedError, match="no splits"):
        _tiles(32, 32, 2).check(64, 32 * (NUM_COUNTS + 1), False)


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [1, 8, 16, 33, 64])
@pytest.mark.parametrize("name", ["llama3_8b", "llama32_1b"])
def test_on_a_gpu_it_equals_the_graph(name, rows):
    config = replace(_shape(name), layers=_shape(name).layers[:2], vocab_size=128)
    (weights, following, norm), x, mixed = _layer(config, rows)
    run = jax.jit(partial(between_attentions, config=config, counts=no_counts()))
    plain = jax.jit(partial(between_reference, config=config))
    for after in (following, None):
        found = run(weights, after, norm, x=x, mixed=mixed)
        for ours, theirs in zip(found[:2], plain(weights, after, norm, x=x, mixed=mixed)):
            assert _distance(ours, theirs) <= 0.01
        assert not found[2].any()


@pytest.mark.gpu
def test_on_a_gpu_results_are_the_same_bits_in_every_run():
    config = replace(_shape("llama3_8b"), layers=_shape("llama3_8b").layers[:2], vocab_size=128)
    run = jax.jit(partial(between_attentions, config=config, counts=no_counts()))
    for rows in (3, 32, 64):
        (weights, following, norm), x, mixed = _layer(config, rows)
        first = run(weights, following, norm, x=x, mixed=mixed)
        for _ in range(20):
            again = run(weights, following, norm, x=x, mixed=mixed)
            assert all((one == other).all() for one, other in zip(first, again))
