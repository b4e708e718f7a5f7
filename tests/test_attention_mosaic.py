"""The Mosaic-GPU kernels: interpreted with race detection here, the whole suite on a GPU."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attention_suite import CASES, TOLERANCE, Case, Problem, build, error, oracle
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.sharding import AbstractDevice, AbstractMesh, use_abstract_mesh

from octavo.attention.api import attend
from octavo.attention.mosaic_decode import DecodeTuning, decode_mosaic, default_tuning
from octavo.attention.splits import decode_work

_BY_NAME = {case.name: case for case in CASES}
_H200 = AbstractMesh(
    (), (), abstract_device=AbstractDevice(device_kind="NVIDIA H200", platform="gpu", num_cores=132)
)
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


@contextmanager
def _interpreter() -> Iterator[None]:
    races = plgpu.InterpretGPUParams(detect_races=True)
    with plgpu.force_gpu_interpret_mode(races), use_abstract_mesh(_H200):
        yield


@pytest.mark.parametrize("case", INTERPRETED, ids=lambda case: case.name)
def test_decode_interpreted_with_race_detection(case: Case):
    problem = build(case)
    tuning = DecodeTuning(chunk=256, stages=2, pairs=2, num_blocks=2, interpreted=True)
    run = partial(decode_mosaic, spec=problem.spec, tuning=tuning)
    with _interpreter():
        out = jax.jit(run)(problem.q, problem.layer, problem.meta, sinks=problem.sinks)
    assert error(out, oracle(problem)) <= TOLERANCE[case.dtype]


@pytest.mark.parametrize("head_dim", [96, 128, 256])
def test_decode_lowers_for_cuda_without_a_gpu(head_dim: int):
    case = Case("lowered", ((2, 200), (1, 64)), 8, 2, head_dim, 64, "bfloat16", window=100)
    problem = build(case)
    with use_abstract_mesh(_H200):
        run = jax.jit(partial(attend, spec=problem.spec, impl="mosaic"))
        traced = run.trace(problem.q, problem.layer, problem.meta)
        assert "mosaic_gpu" in traced.lower(lowering_platforms=("cuda",)).as_text()


def test_work_covers_each_chunk_once_with_the_longest_ends_first():
    case = Case("work", ((1, 1300), (1, 512), (1, 70), (1, 513)), page=64, pad_rows=2, window=600)
    problem = build(case)
    work = decode_work(problem.meta, case.page, case.window, 256)
    count = int(work.live[0])
    items = [tuple(item[:2]) for item in work.items[:count].tolist()]
    expected = {
        (row, chunk)
        for row, (_, length) in enumerate(case.rows)
        for chunk in range(max(0, length - 600) // 256, (length - 1) // 256 + 1)
    }
    assert len(items) == count == len(expected)
    assert set(items) == expected
    assert [row for row, _ in items[-4:]] == [1, 2, 0, 3]


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"dtype": "float32"}, "queries float32"),
        ({"head_dim": 80}, "head_dim 80 is not one of"),
        ({"page": 8}, "page size 8 is not one of"),
        ({"rows": ((9, 20),)}, "9 queries a row; takes up to 8"),
        ({"rows": ((8, 20),), "heads": 16, "kv_heads": 1}, "128 queries a KV head exceed"),
    ],
)
def test_refusals_name_their_reason(change: dict, reason: str):
    case = replace(Case("refused", ((1, 20),), page=64, **_DECODE), **change)
    problem = build(case)
    with use_abstract_mesh(_H200), pytest.raises(NotImplementedError, match=reason):
        attend(problem.q, problem.layer, problem.meta, problem.spec, "mosaic")


def test_a_machine_without_a_hopper_gpu_is_refused():
    problem = build(_BY_NAME["decode"])
    if jax.default_backend() == "gpu":
        pytest.skip("this machine has one")
    with pytest.raises(NotImplementedError, match="needs a Hopper GPU; running on"):
        attend(problem.q, problem.layer, problem.meta, problem.spec, "mosaic")


@pytest.mark.parametrize(
    ("field", "value"), [("chunk", 100), ("stages", 1), ("pairs", 3), ("num_blocks", 0)]
)
def test_tuning_is_validated(field: str, value: int):
    with pytest.raises(ValueError, match=f"{field}={value}"):
        DecodeTuning(**{field: value})


@pytest.mark.parametrize("head_dim", [64, 96, 128, 192, 256])
def test_default_tuning_fits_shared_memory(head_dim: int):
    assert default_tuning(head_dim).stages >= 2


def _on_gpu(problem: Problem, impl: str) -> jax.Array:
    run = partial(attend, spec=problem.spec, impl=impl)
    return jax.jit(run)(problem.q, problem.layer, problem.meta, sinks=problem.sinks)


@pytest.mark.gpu
@pytest.mark.parametrize("case", ON_GPU, ids=lambda case: case.name)
def test_decode_on_the_gpu(case: Case):
    for seed in (1, 2):
        problem = build(case, seed)
        out = _on_gpu(problem, "mosaic")
        assert error(out, oracle(problem)) <= TOLERANCE[case.dtype]


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
        count = rows.stop - rows.start
        meta = replace(
            problem.meta,
            block_tables=problem.meta.block_tables[rows],
            kv_lens=problem.meta.kv_lens[rows],
            query_starts=jnp.arange(count + 1, dtype=jnp.int32),
            slots=problem.meta.slots[rows],
            num_rows=jnp.int32(count),
        )
        alone = replace(problem, q=problem.q[rows], meta=meta)
        np.testing.assert_array_equal(_on_gpu(alone, "mosaic"), out[rows])
