"""The cases every attention implementation is run through, and a float64 oracle in plain numpy."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src.pallas.mosaic_gpu.interpret import gpu_callbacks
from jax.experimental.mosaic import gpu as mosaic_gpu
from jax.experimental.mosaic.gpu.fragmented_array import FragmentedArray
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.sharding import AbstractDevice, AbstractMesh, use_abstract_mesh
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import builtin, memref

from octavo.attention.contract import AttentionMeta, AttentionSpec
from octavo.cache.layout import LayerCache

H200 = AbstractMesh(
    (), (), abstract_device=AbstractDevice(device_kind="NVIDIA H200", platform="gpu", num_cores=132)
)


@contextmanager
def interpreter() -> Iterator[None]:
    """Runs the GPU kernels on the CPU; fails if none runs or two accesses to shared memory race.

    The interpreter keeps the record of the last kernel only, and beyond its run.
    """
    begin, records = gpu_callbacks.GPURaceDetectionState, []
    races = plgpu.InterpretGPUParams(detect_races=True)
    with pytest.MonkeyPatch.context() as patch:
        kept = lambda **cores: records.append(begin(**cores)) or records[-1]  # noqa: E731
        patch.setattr(gpu_callbacks, "GPURaceDetectionState", kept)
        with plgpu.force_gpu_interpret_mode(races), use_abstract_mesh(H200):
            yield
            jax.effects_barrier()
    assert records, "no kernel was interpreted"
    assert not any(record.races_found for record in records)


def lowered(traced: jax.stages.Traced, swizzled: bool = True) -> str:
    """The program for CUDA, as text; fails if a kernel would take registers from a wrong place.

    Mosaic swizzles a load or store of registers by the offset in its slice of shared memory, TMA
    and wgmma by address. They agree only on slices that begin at a multiple of the pattern, which
    the interpreter, without swizzles, doesn't notice. `swizzled`: whether there are such transfers.
    """
    original, transfers = FragmentedArray.transfer_tiled, []

    def recorded(ref: Any, swizzle: int | None, *arguments: Any, **options: Any) -> Any:
        # Inference tries transfers of a reference that no memory stands behind.
        tried = isinstance(ref.owner, builtin.UnrealizedConversionCastOp)
        if swizzle is not None and swizzle > 16 and not tried:
            transfers.append(_offsets(ref, 8 * swizzle))
        return original(ref, swizzle, *arguments, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(FragmentedArray, "transfer_tiled", staticmethod(recorded))
        text = traced.lower(lowering_platforms=("cuda",)).as_text()
    assert "mosaic_gpu" in text
    assert bool(transfers) == swizzled
    assert not any(map(any, transfers)), f"slices that begin within a swizzle: {transfers}"
    return text


def _offsets(ref: Any, period: int) -> list[int]:
    """Bytes past a multiple of the period at which each slicing of a reference may begin."""
    offsets = []
    while not isinstance(ref.owner, memref.ViewOp):
        operation, ref = ref.owner, ref.owner.source
        if isinstance(operation, memref.CastOp):
            continue
        assert isinstance(operation, memref.SubViewOp)
        size = mosaic_gpu.bitwidth(ref.type.element_type) // 8
        strides, _ = ref.type.get_strides_and_offset()
        for stride, start in zip(strides, operation.static_offsets):
            # A start that is known at run time only may be 1.
            step = 1 if ir.ShapedType.is_dynamic_size(start) else start
            offsets.append(step * stride * size % period)
    return offsets


def decode_rows(meta: AttentionMeta, rows: slice) -> AttentionMeta:
    """Some rows of a decode step as a step of their own."""
    count = rows.stop - rows.start
    return replace(
        meta,
        block_tables=meta.block_tables[rows],
        kv_lens=meta.kv_lens[rows],
        query_starts=jnp.arange(count + 1, dtype=jnp.int32),
        slots=meta.slots[rows],
        num_rows=jnp.int32(count),
    )


@dataclass(frozen=True)
class Case:
    """One step. rows: (query tokens, keys) of each; padding: rows and tokens beyond them."""

    name: str
    rows: tuple[tuple[int, int], ...]
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 16
    page: int = 16
    dtype: str = "float32"
    window: int | None = None
    soft_cap: float | None = None
    sinks: bool = False
    pad_rows: int = 0
    pad_tokens: int = 0
    spare_pages: int = 2
    poison: float = np.nan
    table_pages: int | None = None

    @property
    def is_decode(self) -> bool:
        return all(queries == 1 for queries, _ in self.rows)


@dataclass(frozen=True)
class Problem:
    case: Case
    q: jnp.ndarray
    layer: LayerCache
    meta: AttentionMeta
    spec: AttentionSpec
    sinks: jnp.ndarray | None


def build(case: Case, seed: int = 0) -> Problem:
    """Random inputs: shuffled pages; everything no row may read is poison."""
    rng = np.random.default_rng(seed)
    tables, num_pages = _block_tables(case, rng)
    queries = [q for q, _ in case.rows]
    total = sum(queries) + case.pad_tokens
    if case.is_decode:
        total = len(case.rows) + case.pad_rows
    shape = (num_pages, case.page, case.kv_heads, case.head_dim)
    pages = [_poisoned(rng.standard_normal(shape), case, tables) for _ in range(2)]
    starts = np.concatenate([[0], np.cumsum(queries), [sum(queries)] * case.pad_rows])
    slots = [
        tables[r, pos // case.page] * case.page + pos % case.page
        for r, (n, length) in enumerate(case.rows)
        for pos in range(length - n, length)
    ]
    slots += [0] * (total - len(slots))
    dtype = jnp.dtype(case.dtype)
    meta = AttentionMeta(
        block_tables=jnp.asarray(tables, jnp.int32),
        kv_lens=jnp.asarray([n for _, n in case.rows] + [0] * case.pad_rows, jnp.int32),
        query_starts=jnp.asarray(starts, jnp.int32),
        slots=jnp.asarray(slots, jnp.int32),
        num_rows=jnp.int32(len(case.rows)),
        max_query_len=1 if case.is_decode else max(queries),
    )
    spec = AttentionSpec(
        scale=case.head_dim**-0.5,
        window=case.window,
        soft_cap=case.soft_cap,
        sinks=case.sinks,
    )
    q = jnp.asarray(rng.standard_normal((total, case.heads, case.head_dim)) * 2, dtype)
    sinks = jnp.asarray(rng.standard_normal(case.heads) * 2, jnp.float32) if case.sinks else None
    layer = LayerCache(jnp.asarray(pages[0], dtype), jnp.asarray(pages[1], dtype))
    return Problem(case, q, layer, meta, spec, sinks)


def _block_tables(case: Case, rng: np.random.Generator) -> tuple[np.ndarray, int]:
    needed = [-(-length // case.page) for _, length in case.rows]
    num_pages = 1 + sum(needed) + case.spare_pages
    free = list(rng.permutation(np.arange(1, num_pages)))
    width = case.table_pages or max(needed) + 1
    tables = np.zeros((len(case.rows) + case.pad_rows, width), np.int32)
    for row, count in enumerate(needed):
        tables[row, :count] = [free.pop() for _ in range(count)]
    return tables, num_pages


def _poisoned(pages: np.ndarray, case: Case, tables: np.ndarray) -> np.ndarray:
    written = np.zeros(pages.shape[:2], bool)
    for row, (_, length) in enumerate(case.rows):
        position = np.arange(length)
        written[tables[row, position // case.page], position % case.page] = True
    return np.where(written[..., None, None], pages, case.poison)


def oracle(problem: Problem) -> np.ndarray:
    """float64 attention, one query and head at a time, from the stored (rounded) inputs."""
    case, meta, spec = problem.case, problem.meta, problem.spec
    q = np.asarray(problem.q.astype(jnp.float32), np.float64)
    k, v = (
        np.asarray(x.astype(jnp.float32), np.float64) for x in (problem.layer.k, problem.layer.v)
    )
    tables, starts = np.asarray(meta.block_tables), np.asarray(meta.query_starts)
    out = np.zeros_like(q)
    for row, (queries, length) in enumerate(case.rows):
        position = np.arange(length)
        at = (tables[row, position // case.page], position % case.page)
        for i in range(queries):
            last = length - queries + i
            first = 0 if spec.window is None else max(0, last - spec.window + 1)
            for head in range(case.heads):
                kv_head = head // (case.heads // case.kv_heads)
                token = starts[row] + i
                keys, values = k[at][first : last + 1, kv_head], v[at][first : last + 1, kv_head]
                out[token, head] = _attend_one(q[token, head], keys, values, problem, head)
    return out


def _attend_one(
    q: np.ndarray, keys: np.ndarray, values: np.ndarray, problem: Problem, head: int
) -> np.ndarray:
    spec = problem.spec
    logits = keys @ q * spec.scale
    if spec.soft_cap is not None:
        logits = spec.soft_cap * np.tanh(logits / spec.soft_cap)
    top = logits.max()
    extra = 0.0
    if problem.sinks is not None:
        sink = float(problem.sinks[head])
        top = max(top, sink)
        extra = np.exp(sink - top)
    weights = np.exp(logits - top)
    return weights @ values / (weights.sum() + extra)


def _ragged(count: int, max_query: int, max_len: int, seed: int) -> tuple[tuple[int, int], ...]:
    rng = np.random.default_rng(seed)
    lengths = rng.integers(1, max_len + 1, count)
    return tuple((int(rng.integers(1, min(max_query, n) + 1)), int(n)) for n in lengths)


_MIXED = ((1, 37), (5, 5), (20, 45), (1, 1), (3, 64))

CASES = (
    Case("single_token", ((1, 1),)),
    Case("decode", ((1, 5), (1, 16), (1, 17), (1, 100))),
    Case("decode_padded", ((1, 33), (1, 7)), pad_rows=3),
    Case("decode_page_borders", ((1, 15), (1, 16), (1, 17), (1, 32), (1, 33)), pad_rows=1),
    Case("decode_long", ((1, 1100), (1, 3), (1, 513), (1, 512)), head_dim=8),
    Case("decode_many_kv_heads", ((1, 700), (1, 40)), heads=12, kv_heads=6, head_dim=8),
    Case("decode_window", ((1, 700), (1, 9), (1, 1)), window=20, pad_rows=1),
    Case("decode_window_below_page", ((1, 64), (1, 65), (1, 3)), window=5),
    Case("decode_window_above_context", ((1, 64), (1, 5)), window=1000),
    Case("decode_everything", ((1, 90), (1, 600)), window=50, soft_cap=2.0, sinks=True, pad_rows=1),
    Case("prefill", ((70, 70),)),
    Case("prefill_padded_tokens", ((17, 17),), pad_tokens=15, pad_rows=2),
    Case("prefill_two_tiles", ((150, 150), (130, 141)), head_dim=8, pad_tokens=6),
    Case("chunk_on_prefix", ((13, 77),)),
    Case("chunk_page_borders", ((16, 32), (15, 31), (17, 33), (16, 48))),
    Case("mixed", _MIXED),
    Case("mixed_padded", _MIXED, pad_rows=3, pad_tokens=7),
    Case("mixed_window", _MIXED, window=10, pad_tokens=1),
    Case("mixed_window_below_page", _MIXED, window=3),
    Case("mixed_window_above_context", _MIXED, window=500),
    Case("mixed_soft_cap", _MIXED, soft_cap=1.5),
    Case("mixed_sinks", _MIXED, sinks=True, pad_rows=1, pad_tokens=2),
    Case("mixed_everything", _MIXED, window=18, soft_cap=2.0, sinks=True, pad_rows=1),
    Case("mixed_mqa", _MIXED, heads=3, kv_heads=1),
    Case("mixed_mha", _MIXED, heads=3, kv_heads=3),
    Case("mixed_smollm2", ((1, 130), (40, 100)), heads=9, kv_heads=3, head_dim=64),
    Case("mixed_head_dim_8", _MIXED, head_dim=8),
    Case("mixed_head_dim_80", _MIXED, head_dim=80),
    Case("mixed_head_dim_256", ((1, 30), (7, 20)), heads=2, kv_heads=1, head_dim=256),
    Case("mixed_page_64", ((1, 130), (70, 128), (5, 64), (1, 64)), page=64),
    Case("mixed_bf16", _MIXED, dtype="bfloat16", pad_tokens=3),
    Case("mixed_f16_everything", _MIXED, dtype="float16", window=18, soft_cap=2.0, sinks=True),
    Case("poisoned_with_infinity", _MIXED, poison=np.inf, pad_rows=1, pad_tokens=2),
    Case("wide_table", _MIXED, table_pages=70, pad_rows=1),
    Case("ragged_1", _ragged(6, 40, 120, 1), pad_tokens=5),
    Case("ragged_2", _ragged(6, 9, 700, 2), window=33, sinks=True, head_dim=8),
)

TOLERANCE = {"float32": 2e-6, "bfloat16": 2e-2, "float16": 2e-3}
"""Largest allowed error over the largest output, by input type."""


def error(out: jnp.ndarray, expected: np.ndarray) -> float:
    """Largest difference over the largest expected value; NaN if any output is NaN."""
    difference = np.abs(np.asarray(out.astype(jnp.float32), np.float64) - expected)
    return float(difference.max() / np.abs(expected).max())
