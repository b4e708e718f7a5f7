"""The Mosaic-GPU kernels: interpreted with race detection here, the whole suite on a GPU."""

from dataclasses import replace
from functools import partial
from itertools import pairwise

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attention_suite import (
    CASES,
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

from octavo.attention import mosaic_write
from octavo.attention.api import attend, write
from octavo.attention.contract import AttentionSpec
from octavo.attention.decode_tuning import DecodeTuning, default_tuning
from octavo.attention.hopper import SMEM_BYTES
from octavo.attention.mosaic_decode import decode_mosaic
from octavo.attention.mosaic_prefill import PrefillTuning, default_prefill_tuning, prefill_mosaic
from octavo.attention.splits import count_chunks, decode_work
from octavo.cache.layout import LayerCache

_BY_NAME = {case.name: case for case in CASES}
_DECODE = {"dtype": "bfloat16", "head_dim": 64}

INTERPRETED = (
    Case("padded", ((1, 200), (1, 64), (1, 5)), heads=8, page=64, pad_rows=1, **_DECODE),
    Case("window_cap_sinks", ((1, 700), (1, 130)), window=100, sinks=True, soft_cap=2.0, **_DECODE),
    Case("few_queries", ((3, 200), (1, 64), (2, 5)), page=32, window=70, pad_tokens=2, **_DECODE),
    Case("head_dim_96", ((1, 300),), page=128, dtype="float16", head_dim=96),
)

ON_GPU = (
    *(
        Case(f"head_dim_{dim}_page_{page}", _rows, 8, 2, dim, page, "bfloat16", pad_rows=2)
        for dim in (64, 96, 128, 192, 256)
        for page in (16, 32, 64, 128)
        for _rows in [((1, 5), (1, 1300), (1, 512), (1, 513), (1, 64), (1, 1024))]
    ),
    *(
        Case(f"queries_{dim}", ((8, 900), (1, 77), (3, 64), (5, 5)), 8, 2, dim, 64, "float16",
             window=300, soft_cap=3.0, sinks=True, pad_rows=1, pad_tokens=3)
        for dim in (64, 128, 256)
    ),
    Case("window_below_page", ((1, 640), (1, 65), (1, 3)), 8, 2, 128, 64, "bfloat16", window=5),
    Case("window_crosses_chunks", ((1, 1500), (1, 9)), 8, 8, 128, 16, "bfloat16", window=700),
    Case("infinity", ((1, 700), (1, 77)), 8, 1, 128, 64, "bfloat16", poison=np.inf),
    Case("many_rows", tuple((1, 37 * i + 1) for i in range(70)), 32, 8, 128, 64, "bfloat16"),
)  # fmt: skip


PREFILL_ON_GPU = (
    *(
        Case(f"prefill_{dim}_page_{page}", _rows, 8, 2, dim, page, "bfloat16", pad_rows=2,
             pad_tokens=9)
        for dim in (64, 96, 128, 192, 256)
        for page in (16, 64, 128)
        for _rows in [((300, 300), (1, 700), (64, 513), (7, 7), (33, 160))]
    ),
    *(
        Case(f"prefill_everything_{dim}", ((200, 900), (1, 77), (130, 131)), 12, 4, dim, 32,
             "float16", window=300, soft_cap=3.0, sinks=True, pad_rows=1, pad_tokens=3)
        for dim in (64, 128, 256)
    ),
    *(
        Case(f"prefill_group_of_{group}", ((150, 700), (64, 64), (9, 77)), 2 * group, 2, dim, 64,
             "bfloat16", pad_rows=1, pad_tokens=3)
        for group, dim in ((1, 128), (1, 96), (3, 128), (5, 64), (8, 128), (33, 128), (64, 64))
    ),
    Case("prefill_window_below_page", ((90, 640), (12, 65)), 8, 2, 128, 64, "bfloat16", window=5),
    Case("prefill_infinity", ((150, 700), (9, 77)), 8, 1, 128, 64, "bfloat16", poison=np.inf),
    Case("prefill_padding", ((40, 90), (33, 33)), 32, 8, 128, 64, "bfloat16", pad_tokens=1200),
    Case("prefill_long", ((1100, 2100), (500, 500)), 8, 2, 128, 64, "bfloat16"),
)  # fmt: skip


@pytest.mark.parametrize("case", INTERPRETED, ids=lambda case: case.name)
def test_decode_interpreted_with_race_detection(case: Case):
    problem = build(case)
    tuning = DecodeTuning(chunk=256, stages=2, pairs=2, num_blocks=2, interpreted=True)
    run = partial(decode_mosaic, spec=problem.spec, tuning=tuning)
    with interpreter():
        out = jax.jit(run)(problem.q, problem.layer, problem.meta, sinks=problem.sinks)
    assert error(out, oracle(problem)) <= TOLERANCE[case.dtype]


INTERPRETED_PREFILL = (
    Case("chunks_block_128", ((40, 200), (1, 64), (5, 5)), heads=4, page=64, pad_rows=1,
         pad_tokens=3, **_DECODE),
    Case("window_cap_sinks", ((70, 300), (1, 130)), heads=4, page=16, window=100, sinks=True,
         soft_cap=2.0, **_DECODE),
    Case("group_of_3", ((33, 100),), 3, 1, 96, 128, "float16"),
    Case("group_of_1", ((150, 170), (9, 9)), 1, 1, 64, 64, "bfloat16"),
    Case("group_of_33", ((3, 40),), 33, 1, 64, 64, "bfloat16"),
    Case("whole_tiles", ((70, 200), (1, 64), (5, 5), (33, 130)), heads=8, page=64, window=100,
         sinks=True, pad_rows=1, pad_tokens=3, **_DECODE),
)  # fmt: skip


@pytest.mark.parametrize("case", INTERPRETED_PREFILL, ids=lambda case: case.name)
def test_prefill_interpreted_with_race_detection(case: Case):
    problem = build(case)
    tuning = PrefillTuning(
        block=128 if "128" in case.name else 64,
        value_stages=1,
        num_blocks=3,
        interpreted=True,
    )
    run = partial(prefill_mosaic, spec=problem.spec, tuning=tuning)
    with interpreter():
        out = jax.jit(run)(problem.q, problem.layer, problem.meta, sinks=problem.sinks)
    assert error(out, oracle(problem)) <= TOLERANCE[case.dtype]


@pytest.mark.parametrize("head_dim", [96, 128, 256])
def test_prefill_lowers_for_cuda_without_a_gpu(head_dim: int):
    case = Case("lowered", ((40, 200), (1, 64)), 8, 2, head_dim, 64, "bfloat16", window=100)
    problem = build(case)
    with use_abstract_mesh(H200):
        run = jax.jit(partial(attend, spec=problem.spec, impl="mosaic"))
        traced = run.trace(problem.q, problem.layer, problem.meta)
        lowered(traced)


@pytest.mark.parametrize("head_dim", [96, 128, 256])
def test_decode_lowers_for_cuda_without_a_gpu(head_dim: int):
    case = Case("lowered", ((2, 200), (1, 64)), 8, 2, head_dim, 64, "bfloat16", window=100)
    problem = build(case)
    with use_abstract_mesh(H200):
        run = jax.jit(partial(attend, spec=problem.spec, impl="mosaic"))
        traced = run.trace(problem.q, problem.layer, problem.meta)
        lowered(traced)


def _to_write(tokens: int, heads: int) -> tuple[LayerCache, jax.Array, jax.Array, jax.Array]:
    """Pages, keys, values and shuffled slots of so many tokens, the last of them padding."""
    rng, pages, page = np.random.default_rng(tokens), tokens // 16 + 2, 16
    draw = lambda *shape: jnp.asarray(rng.standard_normal(shape), jnp.bfloat16)  # noqa: E731
    layer = LayerCache(draw(pages, page, heads, 64), draw(pages, page, heads, 64))
    slots = rng.permutation(np.arange(page, pages * page))[:tokens]
    slots[-1] = 3
    slots = jnp.asarray(slots, jnp.int32)
    return layer, draw(tokens, heads, 64), draw(tokens, heads, 64), slots


def _assert_written(out: LayerCache, problem: tuple) -> None:
    layer, k, v, slots = problem
    for pages, before, new in ((out.k, layer.k, k), (out.v, layer.v, v)):
        expected = np.array(before).reshape(-1, *new.shape[1:])
        expected[np.asarray(slots[:-1])] = np.asarray(new[:-1])
        np.testing.assert_array_equal(np.asarray(pages).reshape(expected.shape), expected)


@pytest.mark.parametrize("tokens", [5, 24])
def test_write_interpreted_with_race_detection(tokens: int, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(mosaic_write, "BATCHED_FROM", 24)
    problem = _to_write(tokens, 2)
    with interpreter():
        out = jax.jit(mosaic_write.write_mosaic)(*problem)
    _assert_written(out, problem)


def test_write_is_in_place_and_lowers_for_cuda_without_a_gpu():
    problem = _to_write(256, 2)
    with use_abstract_mesh(H200):
        traced = jax.jit(mosaic_write.write_mosaic, donate_argnums=0).trace(*problem)
        text = lowered(traced, swizzled=False)
    assert text.count("mosaic_gpu_v2") == 1
    assert text.count("tf.aliasing_output") == 2
    assert "stablehlo.scatter" not in text


@pytest.mark.parametrize(
    ("heads", "dim", "dtype", "reason"),
    [
        (1, 32, "bfloat16", "a slot has 64 bytes"),
        (32, 100, "bfloat16", "32 times 100: no whole lines"),
        (32, 128, "float32", "8 slots of 32768 bytes exceed"),
        (300, 64, "bfloat16", "300 KV heads of 64 exceed 256"),
    ],
)
def test_write_refusals_name_their_reason(heads: int, dim: int, dtype: str, reason: str):
    pages = jnp.zeros((2, 16, heads, dim), dtype)
    new = jnp.zeros((4, heads, dim), dtype)
    with pytest.raises(NotImplementedError, match=reason):
        mosaic_write.write_mosaic(LayerCache(pages, pages), new, new, jnp.zeros(4, jnp.int32))


def test_prefill_steps_write_by_the_kernel_and_decode_steps_scatter():
    layer, k, v, slots = _to_write(256, 2)
    meta = build(Case("meta", ((1, 64),), page=16, **_DECODE)).meta
    for longest, kernels in ((256, 1), (1, 0)):
        step = replace(meta, slots=slots, max_query_len=longest)
        run = jax.jit(partial(write, spec=AttentionSpec(scale=1.0)))
        with use_abstract_mesh(H200):
            text = run.trace(layer, k, v, step).lower(lowering_platforms=("cuda",)).as_text()
        assert text.count("mosaic_gpu_v2") == kernels


def _chunks(lowest: int, length: int, chunk: int) -> set[tuple[int, int, int]]:
    """Index, first key and end of each chunk of a row, by walking its positions."""
    borders = list(range(0, length + chunk, chunk))
    if len(borders) > 2 and length - borders[-2] <= chunk // 2:
        borders.pop(-2)
    return {
        (index, max(start, lowest // 64 * 64), min(end, length))
        for index, (start, end) in enumerate(pairwise(borders))
        if end > lowest and start < length
    }


@pytest.mark.parametrize("window", [None, 600, 100])
def test_work_covers_each_chunk_once_with_the_longest_first(window: int | None):
    lengths = (1300, 512, 70, 513, 1, 256, 257, 3000, 768, 769)
    case = Case("work", tuple((1, n) for n in lengths), page=64, pad_rows=2, window=window)
    work = decode_work(build(case).meta, case.page, window, 512)
    count = int(work.live[0])
    items = work.items[:count].tolist()
    expected = {
        (row, index, begin, -(-(end - begin) // 64))
        for row, length in enumerate(lengths)
        for index, begin, end in _chunks(max(0, length - (window or length)), length, 512)
    }
    assert len(items) == len(expected) == count
    assert {tuple(item[:4]) for item in items} == expected
    assert max(part for _, part, *_ in items) < count_chunks(3000, 512)
    assert np.asarray(work.end_chunk - work.first_chunk).tolist()[len(lengths) :] == [0, 0]
    if window is None:
        steps = [item[3] for item in items]
        assert steps == sorted(steps, reverse=True)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"dtype": "float32"}, "queries float32"),
        ({"head_dim": 80}, "head_dim 80 is not one of"),
        ({"page": 8}, "page size 8 is not one of"),
        ({"rows": ((9, 20),), "heads": 130, "kv_heads": 1}, "130 query heads a KV head exceed"),
    ],
)
def test_refusals_name_their_reason(change: dict, reason: str):
    case = replace(Case("refused", ((1, 20),), page=64, **_DECODE), **change)
    problem = build(case)
    with use_abstract_mesh(H200), pytest.raises(NotImplementedError, match=reason):
        attend(problem.q, problem.layer, problem.meta, problem.spec, "mosaic")


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"rows": ((9, 20),)}, "9 queries a row; takes up to 8"),
        ({"rows": ((8, 20),), "heads": 16, "kv_heads": 1}, "128 queries a KV head exceed"),
    ],
)
def test_what_decode_leaves_to_prefill(change: dict, reason: str):
    problem = build(replace(Case("refused", ((1, 20),), page=64, **_DECODE), **change))
    with pytest.raises(NotImplementedError, match=reason):
        decode_mosaic(problem.q, problem.layer, problem.meta, problem.spec)


def test_a_machine_without_a_hopper_gpu_is_refused():
    problem = build(_BY_NAME["decode"])
    if jax.default_backend() == "gpu":
        pytest.skip("this machine has one")
    with pytest.raises(NotImplementedError, match="needs a Hopper GPU; running on"):
        attend(problem.q, problem.layer, problem.meta, problem.spec, "mosaic")


@pytest.mark.parametrize(
    ("field", "value"), [("chunk", 100), ("stages", 1), ("pairs", 3), ("num_blocks", 0)]
)
def test_decode_tuning_is_validated(field: str, value: int):
    with pytest.raises(ValueError, match=f"{field}={value}"):
        DecodeTuning(**{field: value})


@pytest.mark.parametrize(
    ("field", "value"), [("block", 96), ("key_stages", 0), ("value_stages", 0)]
)
def test_prefill_tuning_is_validated(field: str, value: int):
    with pytest.raises(ValueError, match=f"{field}={value}"):
        PrefillTuning(**{field: value})


@pytest.mark.parametrize("head_dim", [64, 96, 128, 192, 256])
def test_default_tunings_fit_shared_memory(head_dim: int):
    for tuning in (default_tuning(head_dim), default_prefill_tuning(head_dim)):
        assert tuning.smem_bytes(head_dim) <= SMEM_BYTES


def _on_gpu(problem: Problem, impl: str) -> jax.Array:
    run = partial(attend, spec=problem.spec, impl=impl)
    return jax.jit(run)(problem.q, problem.layer, problem.meta, sinks=problem.sinks)


@pytest.mark.gpu
@pytest.mark.parametrize("case", [*ON_GPU, *PREFILL_ON_GPU], ids=lambda case: case.name)
def test_kernels_on_the_gpu(case: Case):
    for seed in (1, 2):
        problem = build(case, seed)
        out = _on_gpu(problem, "mosaic")
        assert error(out, oracle(problem)) <= TOLERANCE[case.dtype]


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [300, 1024, 1030])
def test_write_on_the_gpu(tokens: int):
    problem = _to_write(tokens, 8)
    _assert_written(jax.jit(mosaic_write.write_mosaic)(*problem), problem)


@pytest.mark.gpu
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_auto_on_the_gpu(case: Case):
    problem = build(case)
    assert error(_on_gpu(problem, "auto"), oracle(problem)) <= TOLERANCE[case.dtype]


@pytest.mark.gpu
def test_a_row_is_bit_equal_in_any_batch_on_the_gpu():
    problem = build(ON_GPU[-1])
    out = _on_gpu(problem, "mosaic")
    for rows in (slice(69, 70), slice(40, 60)):
        meta = decode_rows(problem.meta, rows)
        alone = replace(problem, q=problem.q[rows], meta=meta)
        np.testing.assert_array_equal(_on_gpu(alone, "mosaic"), out[rows])
