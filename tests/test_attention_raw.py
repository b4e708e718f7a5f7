"""The decode kernel from raw projections: against norm, rope, write and attention one by one."""

import re
from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attention_suite import (
    H200,
    TOLERANCE,
    Case,
    Problem,
    build,
    decode_rows,
    error,
    interpreter,
    lowered,
    oracle,
)
from jax.sharding import use_abstract_mesh
from tiny import tiny_config

from octavo.attention import mosaic_decode
from octavo.attention.api import attend_raw, write
from octavo.attention.contract import AttentionMeta
from octavo.attention.decode_tuning import DecodeTuning
from octavo.attention.front import Front, front_reference
from octavo.attention.mosaic_decode import decode_mosaic
from octavo.attention.mosaic_raw import decode_raw_mosaic
from octavo.cache.layout import KVCache, LayerCache, init_cache
from octavo.model.families import family_of
from octavo.model.layers import rms_norm
from octavo.model.params import init_params
from octavo.model.rope import apply_rope

_BF16 = {"dtype": "bfloat16", "head_dim": 64, "heads": 4, "kv_heads": 2}
_SMALL = DecodeTuning(chunk=128, stages=2, pairs=2, num_blocks=2, interpreted=True)

INTERPRETED = (
    # A chunk and a page that begin with the new token, a lone token, padding rows.
    Case("borders", ((1, 129), (1, 128), (1, 1)), page=64, pad_rows=2, **_BF16),
    Case("normed_window_cap_sinks", ((1, 270), (1, 65)), heads=9, kv_heads=1, head_dim=64, page=16,
         dtype="float16", window=70, sinks=True, soft_cap=2.0),
    Case("normed_head_dim_96", ((1, 150),), page=128, dtype="bfloat16", head_dim=96),
    Case("one_chunk_group_of_9", ((1, 90), (1, 3)), heads=9, kv_heads=1, head_dim=64, page=64,
         dtype="bfloat16", table_pages=2),
)  # fmt: skip

ON_GPU = (
    *(
        Case(f"normed_head_dim_{dim}_page_{page}", _rows, 8, 2, dim, page, "bfloat16", pad_rows=2)
        for dim in (64, 96, 128, 192, 256)
        for page in (16, 64, 128)
        for _rows in [((1, 5), (1, 1300), (1, 512), (1, 1025), (1, 1), (1, 1024))]
    ),
    Case("normed_everything", ((1, 1500), (1, 9)), 48, 2, 128, 32, "float16", window=700,
         soft_cap=3.0, sinks=True, pad_rows=1),
    *(
        Case(f"one_chunk_group_of_{group}", ((1, 900), (1, 70)), 2 * group, 2, 128, 64, "bfloat16",
             pad_rows=1)
        for group in (1, 7, 9, 12)
    ),
    Case("many_rows", tuple((1, 37 * i + 1) for i in range(70)), 32, 8, 128, 64, "bfloat16"),
)  # fmt: skip


def _raw(case: Case, seed: int = 0) -> tuple[Problem, jax.Array, Front]:
    """The suite's problem with raw heads and a front of random angles; norms if the name says so.

    What the new tokens' slots hold is poison.
    """
    problem, rng = build(case, seed), np.random.default_rng(seed + 100)
    rows, width = problem.q.shape[0], case.heads // case.kv_heads + 2
    draw = lambda *shape: jnp.asarray(rng.standard_normal(shape), case.dtype)  # noqa: E731
    angles = rng.uniform(-9, 9, (rows, case.head_dim // 2)).astype(np.float32)
    norms = [draw(case.head_dim) for _ in range(2)] if "normed" in case.name else []
    front = Front(jnp.cos(angles), jnp.sin(angles), *norms, eps=1e-5, offset=0.5)
    live = problem.meta.slots[: len(case.rows)]
    page, offset = jnp.divmod(live, case.page)
    poisoned = LayerCache(
        *(pages.at[page, offset].set(np.nan) for pages in (problem.layer.k, problem.layer.v))
    )
    qkv = draw(rows, case.kv_heads, width, case.head_dim) * 2
    return replace(problem, layer=poisoned), qkv, front


def _one_by_one(problem: Problem, qkv: jax.Array, front: Front) -> Problem:
    """The problem that `attend` is left with when queries are made and keys are written."""
    # XLA may leave out a rounding between the norm and the rotation; the kernel never does.
    rounded = {"xla_allow_excess_precision": False}
    q, k, v = jax.jit(front_reference, compiler_options=rounded)(qkv, front)
    layer = write(problem.layer, k, v, problem.meta, problem.spec, impl="xla")
    return replace(problem, q=q.reshape(problem.q.shape), layer=layer)


def _assert_mixed(out: jax.Array, expected: Problem) -> None:
    """What the rows' queries come out as; padding rows may come out as anything."""
    live = slice(len(expected.case.rows))
    assert error(out[live], oracle(expected)[live]) <= TOLERANCE[expected.case.dtype]


def _assert_written(layer: LayerCache, expected: LayerCache, case: Case) -> None:
    """Pages apart from the padding page: within a rounding of the type, and hardly any differ."""
    close = 2 * float(jnp.finfo(case.dtype).eps)
    for pages, wanted in ((layer.k, expected.k), (layer.v, expected.v)):
        got, want = (np.asarray(x[1:].astype(jnp.float32)) for x in (pages, wanted))
        np.testing.assert_allclose(got, want, rtol=close, atol=close)
        changed = (got != want) & ~(np.isnan(got) & np.isnan(want))
        assert changed.sum() <= 0.01 * case.head_dim * case.kv_heads * len(case.rows)


@pytest.mark.parametrize("case", INTERPRETED, ids=lambda case: case.name)
def test_raw_decode_interpreted_with_race_detection(case: Case):
    problem, qkv, front = _raw(case)
    expected = _one_by_one(problem, qkv, front)
    run = partial(decode_raw_mosaic, spec=problem.spec, tuning=_SMALL)
    with interpreter():
        out, layer = jax.jit(run)(qkv, front, problem.layer, problem.meta, sinks=problem.sinks)
    _assert_mixed(out, expected)
    _assert_written(layer, expected.layer, case)


def test_raw_decode_has_the_bits_of_the_separate_path():
    case = Case("long_last_chunks", ((1, 192), (1, 193), (1, 330)), page=64, **_BF16)
    problem, qkv, front = _raw(case)
    expected = _one_by_one(problem, qkv, front)
    with interpreter():
        run = jax.jit(partial(decode_raw_mosaic, spec=problem.spec, tuning=_SMALL))
        out, layer = run(qkv, front, problem.layer, problem.meta)
        separate = jax.jit(partial(decode_mosaic, spec=problem.spec, tuning=_SMALL))
        wanted = separate(expected.q, expected.layer, expected.meta)
    assert error(wanted, oracle(expected)) <= TOLERANCE[case.dtype]
    np.testing.assert_array_equal(out, wanted)
    _assert_written(layer, expected.layer, case)


@pytest.mark.parametrize(("pages", "combined"), [(12, False), (13, True)])
def test_one_chunk_has_the_same_bits_uncombined(pages, combined):
    """Tables of up to 192 tokens are one chunk of 128 that takes half of one more."""
    rows = ((1, 192), (1, 65), (1, 1))
    case = Case("one_chunk", rows, pad_rows=2, page=16, table_pages=pages, **_BF16)
    problem, qkv, front = _raw(case)
    expected = _one_by_one(problem, qkv, front)
    run = jax.jit(partial(decode_raw_mosaic, spec=problem.spec, tuning=_SMALL))
    arguments = (qkv, front, problem.layer, problem.meta)
    with interpreter():
        out, layer = run(*arguments)
        separate = jax.jit(partial(decode_mosaic, spec=problem.spec, tuning=_SMALL))
        wanted = separate(expected.q, expected.layer, expected.meta)
        text = run.lower(*arguments).as_text()
    np.testing.assert_array_equal(out[: len(rows)], wanted[: len(rows)])
    _assert_written(layer, expected.layer, case)
    assert _combines(text) == combined


def _combines(text: str) -> bool:
    """Whether a program weighs chunks by their log-sum-exps outside of the kernel."""
    return re.search(r"stablehlo\.divide .*xf32>", text) is not None


def test_the_reference_is_the_models_norm_and_rope():
    _, qkv, front = _raw(Case("normed", ((1, 9), (1, 30)), **_BF16))
    q, k, v = front_reference(qkv, front)
    assert front.q_norm is not None
    assert front.k_norm is not None
    for part, weight, out in (
        (qkv[:, 0, :2], front.q_norm, q[:, 0]),
        (qkv[:, :, 2], front.k_norm, k),
    ):
        normed = rms_norm(part, weight, front.eps, front.offset)
        np.testing.assert_array_equal(out, apply_rope(normed, (front.cos, front.sin)))
    np.testing.assert_array_equal(v, qkv[:, :, 3])


def _scattered(text: str) -> set[str]:
    """Types of what a lowered program scatters into; the work list's order is of i32."""
    found = re.findall(r'"stablehlo.scatter".*?}\) : \(tensor<[^>]*x(\w+)>', text, re.DOTALL)
    assert len(found) == text.count('stablehlo.scatter"')
    return set(found)


def _decode_inputs(config, rows: int, pages: int) -> tuple[jax.Array, KVCache, AttentionMeta]:
    """Positions, a cache of random keys, and rows of 40, 41, ... tokens; page size 64."""
    lengths = jnp.arange(40, 40 + rows, dtype=jnp.int32)
    layers = init_cache(config.cache_layout(pages, 64)).layers
    keys = iter(jax.random.split(jax.random.key(2), 2 * len(layers)))
    filled = [
        LayerCache(*(jax.random.normal(next(keys), x.shape, x.dtype) for x in (layer.k, layer.v)))
        for layer in layers
    ]
    own = jnp.arange(1, rows + 1, dtype=jnp.int32)
    meta = AttentionMeta(
        block_tables=own[:, None],
        kv_lens=lengths,
        query_starts=jnp.arange(rows + 1, dtype=jnp.int32),
        slots=own * 64 + lengths - 1,
        num_rows=jnp.int32(rows),
        max_query_len=1,
    )
    return lengths - 1, KVCache(tuple(filled)), meta


_MODEL = {"head_dim": 64, "hidden_size": 64, "torch_dtype": "bfloat16"}


def test_a_models_decode_step_from_raw_projections(monkeypatch: pytest.MonkeyPatch):
    """Gemma's norms, their offset and both ropes arrive where they belong."""
    gemma = {"architectures": ["Gemma3ForCausalLM"], "model_type": "gemma3_text"}
    gemma |= {"sliding_window": 32, "layer_types": ["sliding_attention", "full_attention"]}
    config = tiny_config(**_MODEL, **gemma, hidden_activation="gelu_pytorch_tanh")
    family = family_of(config)
    params = init_params(family.abstract_params(config), jax.random.key(1))
    for layer in params["layers"]:
        layer |= {name: layer[name] + 0.3 * i for i, name in enumerate(("q_norm", "k_norm"), 1)}
    positions, cache, meta = _decode_inputs(config, 2, 3)
    tokens = jnp.asarray([5, 9], jnp.int32)
    monkeypatch.setattr(mosaic_decode, "default_tuning", lambda _: _SMALL)
    run = lambda impl: family.forward(params, config, tokens, positions, cache, meta, impl)  # noqa: E731
    hidden, written = run("xla")
    with interpreter():
        raw_hidden, raw_written = jax.jit(partial(run, "mosaic"))()
    assert error(raw_hidden, np.asarray(hidden.astype(jnp.float32))) <= TOLERANCE["bfloat16"]
    for pages, wanted in zip(jax.tree.leaves(raw_written), jax.tree.leaves(written)):
        assert error(pages, np.asarray(wanted.astype(jnp.float32))) <= TOLERANCE["bfloat16"]


@pytest.mark.parametrize("head_dim", [64, 96, 128, 192, 256])
def test_raw_decode_lowers_for_cuda_without_a_gpu_and_in_place(head_dim: int):
    case = Case("normed", tuple((1, 900 + i) for i in range(8)), 32, 8, head_dim, 64, "bfloat16")
    problem, qkv, front = _raw(case)
    with use_abstract_mesh(H200):
        run = jax.jit(partial(attend_raw, spec=problem.spec), donate_argnums=2)
        traced = run.trace(qkv, front, problem.layer, problem.meta)
        text = lowered(traced)
    assert text.count("mosaic_gpu_v2") == 1
    assert text.count("tf.aliasing_output") == 2
    assert _scattered(text) == {"i32"}


def test_a_models_raw_decode_step_has_one_kernel_a_layer_and_no_scatter():
    config = tiny_config(**_MODEL)
    family = family_of(config)
    params = family.abstract_params(config)
    params = jax.eval_shape(lambda: init_params(params, jax.random.key(0)))
    positions, cache, meta = _decode_inputs(config, 4, 5)

    def step(cache: KVCache, params: dict, meta: AttentionMeta) -> tuple:
        return family.forward(params, config, positions, positions, cache, meta, "mosaic")

    with use_abstract_mesh(H200):
        traced = jax.jit(step, donate_argnums=0).trace(cache, params, meta)
        text = lowered(traced)
    assert text.count("mosaic_gpu_v2") == 1
    assert text.count("call @_through_attention(") == len(config.layers)
    assert text.count("tf.aliasing_output") == 2 * len(config.layers)
    assert _scattered(text) == {"i32"}


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"dtype": "float32"}, "queries float32"),
        ({"heads": 50}, "25 query heads a KV head; takes up to 24"),
        ({"rows": ((2, 20),)}, "2 queries a row; takes raw ones singly"),
    ],
)
def test_refusals_name_their_reason(change: dict, reason: str):
    problem, qkv, front = _raw(replace(Case("refused", ((1, 20),), page=64, **_BF16), **change))
    with use_abstract_mesh(H200), pytest.raises(NotImplementedError, match=reason):
        attend_raw(qkv, front, problem.layer, problem.meta, problem.spec)


@pytest.mark.parametrize("kind", ["raw", "several queries"])
@pytest.mark.parametrize("group", [1, 7, 8, 9, 12, 16])
def test_decode_lowers_for_cuda_with_any_number_of_query_heads(group: int, kind: str):
    """What the kernel does not refuse must lower: a program that can't ends an engine's start."""
    queries = 3 if kind == "several queries" else 1
    case = Case("any", ((queries, 200), (1, 64)), group, 1, 64, 64, "bfloat16")
    problem = build(case)
    with use_abstract_mesh(H200):
        if kind == "raw":
            problem, qkv, front = _raw(case)
            run = jax.jit(partial(decode_raw_mosaic, spec=problem.spec))
            lowered(run.trace(qkv, front, problem.layer, problem.meta))
        run = jax.jit(partial(decode_mosaic, spec=problem.spec))
        lowered(run.trace(problem.q, problem.layer, problem.meta))


def test_a_partial_rope_is_refused():
    problem, qkv, front = _raw(Case("refused", ((1, 20),), page=64, **_BF16))
    half = replace(front, cos=front.cos[:, :16], sin=front.sin[:, :16])
    with use_abstract_mesh(H200), pytest.raises(NotImplementedError, match="turns 32 of 64"):
        attend_raw(qkv, half, problem.layer, problem.meta, problem.spec)


@pytest.mark.gpu
@pytest.mark.parametrize("case", ON_GPU, ids=lambda case: case.name)
def test_raw_decode_on_the_gpu(case: Case):
    for seed in (1, 2):
        problem, qkv, front = _raw(case, seed)
        expected = _one_by_one(problem, qkv, front)
        run = jax.jit(partial(decode_raw_mosaic, spec=problem.spec))
        out, layer = run(qkv, front, problem.layer, problem.meta, sinks=problem.sinks)
        _assert_mixed(out, replace(expected, layer=layer))
        _assert_written(layer, expected.layer, case)


@pytest.mark.gpu
def test_a_row_is_bit_equal_in_any_batch_on_the_gpu():
    problem, qkv, front = _raw(ON_GPU[-1])
    run = jax.jit(partial(decode_raw_mosaic, spec=problem.spec))
    out, layer = run(qkv, front, problem.layer, problem.meta)
    for rows in (slice(69, 70), slice(40, 60)):
        meta = decode_rows(problem.meta, rows)
        turned = replace(front, cos=front.cos[rows], sin=front.sin[rows])
        alone, pages = run(qkv[rows], turned, problem.layer, meta)
        np.testing.assert_array_equal(alone, out[rows])
        own = meta.block_tables[meta.block_tables > 0]
        bits = [np.asarray(x.k[own]).view(np.uint16) for x in (pages, layer)]  # poison is NaN
        np.testing.assert_array_equal(*bits)
