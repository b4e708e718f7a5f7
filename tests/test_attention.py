"""Attention implementations against the shared suite, and the reference against float64 numpy."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attention_suite import CASES, TOLERANCE, Case, Problem, build, error, oracle
from jax.sharding import AxisType, Mesh

from octavo.attention.api import IMPLEMENTATIONS, attend, write
from octavo.attention.contract import AttentionMeta, AttentionSpec
from octavo.cache.layout import LayerCache

_BY_NAME = {case.name: case for case in CASES}


def _run(problem: Problem, impl: str, mesh: Mesh | None = None, spec: AttentionSpec | None = None):
    run = partial(attend, spec=spec or problem.spec, impl=impl, mesh=mesh)
    # Unoptimised code compiles in half the time, and most of a test's time is compilation.
    quick = {"xla_backend_optimization_level": 0}
    compiled = jax.jit(run, compiler_options=quick)
    return compiled(problem.q, problem.layer, problem.meta, sinks=problem.sinks)


@pytest.mark.parametrize("impl", ["reference", "xla"])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_suite(case: Case, impl: str):
    problem = build(case)
    expected = oracle(problem)
    out = _run(problem, impl)
    assert out.dtype == problem.q.dtype
    assert error(out, expected) <= TOLERANCE[case.dtype]
    padding = sum(queries for queries, _ in case.rows)
    assert not np.any(np.asarray(out[padding:]))


@pytest.mark.parametrize("impl", ["reference", "xla"])
def test_float32_queries_over_a_bfloat16_cache(impl: str):
    problem = build(_BY_NAME["mixed_bf16"])
    wide = Problem(
        problem.case,
        problem.q.astype(jnp.float32),
        problem.layer,
        problem.meta,
        problem.spec,
        problem.sinks,
    )
    assert error(_run(wide, impl), oracle(wide)) <= TOLERANCE["float32"]


@pytest.mark.parametrize("impl", ["reference", "xla"])
def test_a_row_does_not_depend_on_the_bucket_or_its_company(impl: str):
    crowd = build(_BY_NAME["mixed"])
    out = _run(crowd, impl)
    meta = AttentionMeta(
        block_tables=crowd.meta.block_tables[2:3],
        kv_lens=crowd.meta.kv_lens[2:3],
        query_starts=jnp.asarray([0, 20], jnp.int32),
        slots=crowd.meta.slots[6:26],
        num_rows=jnp.int32(1),
        max_query_len=64,
    )
    alone = Problem(crowd.case, crowd.q[6:26], crowd.layer, meta, crowd.spec, None)
    np.testing.assert_allclose(_run(alone, impl), out[6:26], rtol=0, atol=3e-6)


@pytest.mark.parametrize("impl", ["reference", "xla"])
@pytest.mark.parametrize("name", ["decode_everything", "mixed_everything"])
def test_sharded_over_heads(name: str, impl: str):
    problem = build(_BY_NAME[name])
    mesh = jax.make_mesh((2,), ("tensor",), (AxisType.Auto,), devices=jax.devices()[:2])
    spec = AttentionSpec(**{**vars(problem.spec), "mesh_axis": "tensor"})
    sharded = _run(problem, impl, mesh, spec)
    np.testing.assert_allclose(sharded, _run(problem, impl), rtol=0, atol=1e-6)


def test_the_reference_is_differentiable_past_poison():
    problem = build(_BY_NAME["mixed_everything"])

    def loss(q, layer):
        out = attend(q, layer, problem.meta, problem.spec, "reference", problem.sinks)
        return (out * jnp.arange(out.size, dtype=jnp.float32).reshape(out.shape)).sum()

    grads = jax.jit(jax.grad(loss, argnums=(0, 1)))(problem.q, problem.layer)
    assert all(np.isfinite(np.asarray(leaf)).all() for leaf in jax.tree.leaves(grads))
    assert float(jnp.abs(grads[0]).max()) > 0


@pytest.mark.parametrize("tokens", [1, 40])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_write_is_in_place_and_exact(dtype: str, tokens: int):
    num_pages, page = 512, 16
    live_tokens = max(tokens - 7, 1)
    rng = np.random.default_rng(0)
    shape = (num_pages, page, 2, 32)
    before = rng.standard_normal(shape).astype(np.float32)
    k, v = (rng.standard_normal((tokens, 2, 32)).astype(np.float32) for _ in range(2))
    live = rng.permutation(np.arange(page, num_pages * page))[:live_tokens]
    slots = np.concatenate([live, np.zeros(tokens - live_tokens)])
    meta = AttentionMeta(
        block_tables=jnp.zeros((1, 1), jnp.int32),
        kv_lens=jnp.zeros(1, jnp.int32),
        query_starts=jnp.zeros(2, jnp.int32),
        slots=jnp.asarray(slots, jnp.int32),
        num_rows=jnp.int32(0),
        max_query_len=tokens,
    )
    layer = LayerCache(jnp.asarray(before, dtype), jnp.asarray(before, dtype))
    layer_bytes = 2 * layer.k.nbytes
    run = jax.jit(partial(write, spec=AttentionSpec(scale=1.0)), donate_argnums=0)
    program = run.lower(layer, jnp.asarray(k), jnp.asarray(v), meta).compile()
    memory = program.memory_analysis()
    assert memory.alias_size_in_bytes >= layer_bytes
    assert memory.temp_size_in_bytes < layer_bytes / 16
    expected = np.asarray(layer.k).reshape(-1, 2, 32).copy()
    after = program(layer, jnp.asarray(k), jnp.asarray(v), meta)
    expected[live] = np.asarray(jnp.asarray(k[:live_tokens], dtype))
    flat = np.asarray(after.k).reshape(-1, 2, 32)
    np.testing.assert_array_equal(flat[page:], expected[page:])
    values = np.asarray(after.v).reshape(-1, 2, 32)[live]
    np.testing.assert_array_equal(values, np.asarray(jnp.asarray(v[:live_tokens], dtype)))


def test_a_step_writes_and_attends_without_copying_the_cache():
    problem = build(_BY_NAME["mixed"])
    pages = jnp.zeros((4096, 16, 2, 16), jnp.float32)
    layer = LayerCache(pages, pages + 1)
    tokens = problem.q.shape[0]
    kv = jnp.ones((tokens, 2, 16), jnp.float32)

    def step(layer, q, k, v, meta):
        layer = write(layer, k, v, meta, AttentionSpec(scale=1.0))
        return layer, attend(q, layer, meta, problem.spec, "xla")

    compiled = jax.jit(step, donate_argnums=0).lower(layer, problem.q, kv, kv, problem.meta)
    memory = compiled.compile().memory_analysis()
    assert memory.alias_size_in_bytes >= 2 * pages.nbytes
    assert memory.temp_size_in_bytes < pages.nbytes / 8


def test_an_unknown_implementation_is_named():
    problem = build(_BY_NAME["decode"])
    with pytest.raises(ValueError, match="impl='fast' is not one of auto, reference"):
        _run(problem, "fast")


def test_auto_reports_every_refusal(monkeypatch: pytest.MonkeyPatch):
    def refuse(*_):
        raise NotImplementedError("not today")

    for name in ("mosaic", "xla"):
        monkeypatch.setitem(IMPLEMENTATIONS, name, refuse)
    with pytest.raises(NotImplementedError, match=r"mosaic: not today; xla: not today"):
        _run(build(_BY_NAME["decode"]), "auto")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"q": jnp.zeros((4, 3, 16))}, "3 query heads can't share 2 KV heads"),
        ({"q": jnp.zeros((4, 4, 8))}, "head_dim 8, keys 16"),
        ({"q": jnp.zeros((9, 4, 16))}, "one token a row, not 9 tokens for 4 rows"),
        ({"sinks": jnp.zeros(4)}, "spec.sinks is False"),
    ],
)
def test_contradictions_are_refused(change: dict, message: str):
    problem = build(_BY_NAME["decode"])
    arguments = {"q": problem.q, "sinks": None} | change
    with pytest.raises(ValueError, match=message):
        attend(arguments["q"], problem.layer, problem.meta, problem.spec, sinks=arguments["sinks"])
