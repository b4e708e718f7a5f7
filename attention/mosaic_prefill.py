# pyright: reportAbstractUsage=false
# Pallas leaves an abstract method on the transforms that it exports.
"""Ragged paged prefill for Hopper in Pallas Mosaic GPU: chunks, cached prefixes and decode rows.

The queries of a KV head's group are packed as rows (token, head), 128 rows a tile: two compute
warpgroups of 64 rows share one ring of key and value blocks that a memory warpgroup fills by TMA,
page by page from the block table, and take turns on the tensor cores (FlashAttention-3, Shah et al.
2024). A tile walks only the blocks that its row's queries see; masks cost only at the borders.
Tiles of no row end at once, and the longest walks start first.
"""

from dataclasses import dataclass
from functools import cache, partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.extend.core import ClosedJaxpr, jaxpr_as_fun
from jaxtyping import Array, Float

from octavo.attention.contract import AttentionMeta, AttentionSpec
from octavo.attention.mosaic_decode import (
    COMPUTE_REGISTERS,
    MEMORY_REGISTERS,
    SMEM_BYTES,
    Ref,
    base2,
    product,
    refuse_inputs,
)
from octavo.attention.splits import FLOOR, LOG2E
from octavo.cache.layout import LayerCache

WG_ROWS = 64
TILE_ROWS = 2 * WG_ROWS


@dataclass(frozen=True)
class PrefillTuning:
    """How the kernel is laid out on the chip.

    Attributes:
        block: keys a pipeline step, 64 or 128.
        stages: blocks in each ring.
        interpreted: softmax weights go through shared memory: slower, but Pallas' interpreter
            doesn't multiply from registers.
    """

    block: int = 128
    stages: int = 2
    interpreted: bool = False

    def __post_init__(self) -> None:
        if self.block not in (64, 128):
            raise ValueError(f"block={self.block} must be 64 or 128")
        if self.stages < 2:
            raise ValueError(f"stages={self.stages} must be at least 2")

    def smem_bytes(self, head_dim: int) -> int:
        """Shared memory of a block, in bytes."""
        weights = TILE_ROWS * self.block if self.interpreted else 0
        tiles = (TILE_ROWS + 2 * self.stages * self.block) * head_dim
        return (tiles + weights) * 2 + TILE_ROWS * 4 + 1024


def default_prefill_tuning(head_dim: int) -> PrefillTuning:
    """Blocks of 128 keys up to head_dim 128, of 64 above: a warpgroup's registers hold no more."""
    return PrefillTuning(block=128 if head_dim <= 128 else 64)


@dataclass(frozen=True)
class _Shape:
    """Static sizes: query heads a KV head, KV heads, head_dim, and of the pages."""

    group: int
    heads: int
    head_dim: int
    page_size: int
    num_pages: int

    @property
    def tokens(self) -> int:
        """Tokens a tile."""
        return TILE_ROWS // self.group


class _Tiles(NamedTuple):
    """The tiles of a step: what the kernel reads of each, and where each token went.

    items: i32[I, 8]: row, position of the first query, first key (a multiple of the block), steps,
    first key any query sees, keys of the row, live, 0. token: i32[I, tokens] in q. tile, place:
    i32[T] of each token; tile is I for padding tokens.
    """

    items: Array
    token: Array
    tile: Array
    place: Array


def _tiles_of(
    meta: AttentionMeta, num_tokens: int, window: int | None, block: int, per_tile: int
) -> _Tiles:
    """Tiles in the order they start, longest walk first."""
    starts, kv_lens = meta.query_starts[:-1], meta.kv_lens
    lengths = jnp.where(kv_lens > 0, meta.query_starts[1:] - starts, 0)
    tiles = -(-lengths // per_tile)
    ends = jnp.cumsum(tiles)
    num_rows = kv_lens.shape[0]
    index = jnp.arange(num_tokens // per_tile + num_rows, dtype=jnp.int32)
    row = jnp.searchsorted(ends, index, side="right", method="compare_all").astype(jnp.int32)
    live = row < num_rows
    row = jnp.minimum(row, num_rows - 1)
    offset = (index - (ends - tiles)[row]) * per_tile
    first = kv_lens[row] - lengths[row] + offset
    end = first + jnp.minimum(per_tile, lengths[row] - offset)
    lowest = jnp.zeros_like(first)
    if window is not None:
        lowest = jnp.maximum(first - window + 1, 0)
    begin = lowest // block * block
    steps = jnp.where(live, -(-(end - begin) // block), 0)

    tie = (steps[None] == steps[:, None]) & (index[None] < index[:, None])
    rank = jnp.sum((steps[None] > steps[:, None]) | tie, axis=1, dtype=jnp.int32)
    fields = (row, first, begin, steps, lowest, kv_lens[row], live.astype(jnp.int32), 0 * row)
    items = jnp.zeros((index.shape[0], 8), jnp.int32).at[rank].set(jnp.stack(fields, axis=1))
    token = (starts[row] + offset)[:, None] + jnp.arange(per_tile, dtype=jnp.int32)[None]
    token = jnp.zeros_like(token).at[rank].set(jnp.minimum(token, num_tokens - 1))

    every = jnp.arange(num_tokens, dtype=jnp.int32)
    owner = jnp.searchsorted(meta.query_starts[1:], every, side="right", method="compare_all")
    owner = jnp.minimum(owner.astype(jnp.int32), num_rows - 1)
    within = every - starts[owner]
    real = (within < lengths[owner]) & (within >= 0)
    tile = rank[jnp.clip((ends - tiles)[owner] + within // per_tile, 0, index.shape[0] - 1)]
    return _Tiles(items, token, jnp.where(real, tile, index.shape[0]), within % per_tile)


def prefill_mosaic(
    q: Float[Array, "T H D"],
    layer: LayerCache,
    meta: AttentionMeta,
    spec: AttentionSpec,
    sinks: Float[Array, " H"] | None = None,
    tuning: PrefillTuning | None = None,
) -> Float[Array, "T H D"]:
    """`attend` for rows of any number of queries, on a Hopper GPU.

    Refuses what `refuse_inputs` names, and groups of more than 128 query heads.
    """
    refuse_inputs(q, layer)
    num_tokens, num_heads, head_dim = q.shape
    page_size, num_kv_heads = layer.k.shape[1:3]
    group = num_heads // num_kv_heads
    if group > TILE_ROWS:
        raise NotImplementedError(f"{group} query heads a KV head exceed a tile of {TILE_ROWS}")
    tuning = tuning or default_prefill_tuning(head_dim)
    if tuning.smem_bytes(head_dim) > SMEM_BYTES:
        raise NotImplementedError(
            f"{tuning} needs {tuning.smem_bytes(head_dim)} B of shared memory"
        )
    shape = _Shape(group, num_kv_heads, head_dim, page_size, meta.block_tables.shape[1])
    tiles = _tiles_of(meta, num_tokens, spec.window, tuning.block, shape.tokens)

    packed = q[tiles.token].reshape(-1, shape.tokens, num_kv_heads, group, head_dim)
    packed = packed.transpose(0, 2, 1, 3, 4).reshape(
        -1, num_kv_heads, shape.tokens * group, head_dim
    )
    packed = jnp.pad(packed, ((0, 0), (0, 0), (0, TILE_ROWS - shape.tokens * group), (0, 0)))
    arguments = (tiles.items, meta.block_tables, packed, layer.k, layer.v)
    avals = tuple(jax.ShapeDtypeStruct(array.shape, array.dtype) for array in arguments)
    traced = _traced_kernel(avals, spec, tuning, shape, jax.sharding.get_abstract_mesh())
    out, lse = jaxpr_as_fun(traced)(*arguments)
    return _unpack(out, lse, tiles, sinks, shape).reshape(q.shape)


def _unpack(out: Array, lse: Array, tiles: _Tiles, sinks: Array | None, shape: _Shape) -> Array:
    """[T, K, G, D] of the tiles' rows; sinks take their share; padding tokens are zeros."""
    used = shape.tokens * shape.group
    sizes = (out.shape[0], shape.heads, shape.tokens, shape.group)
    live = tiles.tile < out.shape[0]
    tile = jnp.minimum(tiles.tile, out.shape[0] - 1)
    rows = out[:, :, :used].reshape(*sizes, shape.head_dim)[tile, :, tiles.place]
    rows = jnp.where(live[:, None, None, None], rows, 0)
    if sinks is None:
        return rows
    total = lse[:, :, :used].reshape(sizes)[tile, :, tiles.place]
    sink = sinks.astype(jnp.float32).reshape(1, shape.heads, shape.group) * LOG2E
    kept = jnp.where(live[:, None, None], 1 / (1 + jnp.exp2(sink - total)), 0.0)
    return (rows.astype(jnp.float32) * kept[..., None]).astype(out.dtype)


@cache
def _traced_kernel(
    avals: tuple[jax.ShapeDtypeStruct, ...],
    spec: AttentionSpec,
    tuning: PrefillTuning,
    shape: _Shape,
    mesh: jax.sharding.AbstractMesh,
) -> ClosedJaxpr:
    """The kernel's jaxpr, one object for all layers alike (see the decode kernel's)."""
    del mesh  # part of the key only: a trace belongs to the mesh it was made under
    num_tiles, dtype, head_dim = avals[2].shape[0], avals[2].dtype, shape.head_dim
    swizzle = 128 if head_dim % 64 == 0 else 64
    transforms = (plgpu.TilingTransform((8, swizzle // 2)), plgpu.SwizzleTransform(swizzle))
    stages, copies = tuning.stages, max(1, tuning.block // shape.page_size)
    ring = plgpu.SMEM((stages, tuning.block, head_dim), dtype, transforms=transforms)
    loaded = plgpu.Barrier(num_arrivals=copies, num_barriers=stages)
    released = plgpu.Barrier(num_arrivals=2, num_barriers=stages)
    scratch = {
        "q_tile": plgpu.SMEM((2, WG_ROWS, head_dim), dtype, transforms=transforms),
        "k_ring": ring,
        "v_ring": ring,
        "lse_tile": plgpu.SMEM((2, WG_ROWS), jnp.float32),
        "q_ready": plgpu.Barrier(num_barriers=2),
        "k_ready": loaded,
        "v_ready": loaded,
        "k_free": released,
        "v_free": released,
        "turn": plgpu.Barrier(num_arrivals=2),
    }
    if tuning.interpreted:
        full = (plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128))
        scratch["w_tile"] = plgpu.SMEM((2, WG_ROWS, tuning.block), dtype, transforms=full)
    rows = (num_tiles, shape.heads, TILE_ROWS)
    kernel = plgpu.kernel(
        partial(_kernel, shape=shape, spec=spec, tuning=tuning),
        out_type=[
            jax.ShapeDtypeStruct((*rows, head_dim), dtype),
            jax.ShapeDtypeStruct(rows, jnp.float32),
        ],
        grid=(shape.heads, num_tiles),
        grid_names=("head", "tile"),
        num_threads=3,
        thread_name="wg",
        scratch_types=scratch,
        compiler_params=plgpu.CompilerParams(approx_math=True, reduction_scratch_bytes=0),
        kernel_name="ragged_paged_prefill",
    )
    return jax.make_jaxpr(kernel)(*avals)


class _Item(NamedTuple):
    """A tile's walk; fields as in `_Tiles.items`."""

    head: Array
    tile: Array
    row: Array
    first_query: Array
    begin: Array
    steps: Array
    lowest: Array
    kv_len: Array
    live: Array


class _Buffers(NamedTuple):
    """Shared memory and barriers of a block."""

    q_tile: Ref  # [2, 64, D]
    k_ring: Ref  # [stages, block, D]
    v_ring: Ref  # [stages, block, D]
    lse_tile: Ref  # [2, 64]
    q_ready: Ref
    k_ready: Ref
    v_ready: Ref
    k_free: Ref
    v_free: Ref
    turn: Ref
    w_tile: Ref | None = None  # [2, 64, block]


def _kernel(
    items_ref: Ref,  # [I, 8]
    table_ref: Ref,  # [S, P]
    q_ref: Ref,  # [I, K, 128, D]
    k_ref: Ref,  # [N, p, K, D]
    v_ref: Ref,  # [N, p, K, D]
    out_ref: Ref,  # [I, K, 128, D]
    lse_ref: Ref,  # [I, K, 128]
    *,
    shape: _Shape,
    spec: AttentionSpec,
    tuning: PrefillTuning,
    **scratch: Ref,
) -> None:
    """One tile of one KV head a block."""
    wg, tile = lax.axis_index("wg"), lax.axis_index("tile")
    fields = [items_ref[tile, field] for field in range(7)]
    item = _Item(lax.axis_index("head"), tile, *fields)
    buffers = _Buffers(**scratch)

    @pl.when((wg < 2) & (item.live > 0))
    def _compute() -> None:
        plgpu.set_max_registers(COMPUTE_REGISTERS[1], action="increase")
        _attend_tile(wg, item, buffers, q_ref, (out_ref, lse_ref), spec, tuning, shape)

    @pl.when((wg == 2) & (item.live > 0))
    def _memory() -> None:
        plgpu.set_max_registers(MEMORY_REGISTERS, action="decrease")
        _fetch_blocks(item, buffers, table_ref, (k_ref, v_ref), tuning, shape)


def _fetch_blocks(
    item: _Item,
    buffers: _Buffers,
    table: Ref,
    sources: tuple[Ref, Ref],
    tuning: PrefillTuning,
    shape: _Shape,
) -> None:
    """The memory warpgroup: fills the rings; page ids are read one step ahead."""
    block, stages, page_size = tuning.block, tuning.stages, shape.page_size
    size = min(page_size, block)
    per_page = jnp.int32(max(1, page_size // block))

    def page_ids(step: Array) -> tuple[Array, ...]:
        first = lax.div(item.begin + step * block, jnp.int32(page_size))
        last = jnp.int32(shape.num_pages - 1)
        return tuple(table[item.row, jnp.minimum(first + i, last)] for i in range(block // size))

    def fetch(step: Array, ids: tuple[Array, ...]) -> tuple[Array, ...]:
        next_ids = page_ids(step + 1)
        slot = lax.rem(step, jnp.int32(stages))
        # Written so that the compiler sees that it is a multiple of the block.
        offset = lax.rem(lax.div(item.begin, jnp.int32(block)) + step, per_page) * block
        for source, ring, ready, free in (
            (sources[0], buffers.k_ring, buffers.k_ready, buffers.k_free),
            (sources[1], buffers.v_ring, buffers.v_ready, buffers.v_free),
        ):
            pl.when(step >= stages)(partial(plgpu.barrier_wait, free.at[slot]))
            for copy, page in enumerate(ids):
                rows = source.at[page, pl.ds(offset, size), item.head]
                target = ring.at[slot, pl.ds(copy * size, size)]
                plgpu.copy_gmem_to_smem(rows, target, ready.at[slot])
        return next_ids

    lax.fori_loop(0, item.steps, fetch, page_ids(jnp.int32(0)))
    for slot in range(stages):
        for free in (buffers.k_free, buffers.v_free):
            pl.when(slot < item.steps)(partial(plgpu.barrier_wait, free.at[slot]))


def _attend_tile(
    wg: Array,
    item: _Item,
    buffers: _Buffers,
    q_ref: Ref,
    results: tuple[Ref, Ref],
    spec: AttentionSpec,
    tuning: PrefillTuning,
    shape: _Shape,
) -> None:
    """A compute warpgroup: a running softmax of its 64 rows over the tile's blocks."""
    block, layout = tuning.block, plgpu.Layout.WGMMA
    q_tile, lse_tile = buffers.q_tile.at[wg], buffers.lse_tile.at[wg]
    rows = pl.ds(wg * WG_ROWS, WG_ROWS)

    def take_turn() -> None:
        plgpu.barrier_arrive(buffers.turn)
        plgpu.barrier_wait(buffers.turn)

    def step(index: Array, carry: tuple, border: bool) -> tuple:
        acc, top, total = carry
        slot = lax.rem(index, jnp.int32(tuning.stages))
        begin = item.begin + index * block
        plgpu.barrier_wait(buffers.k_ready.at[slot])
        logits = product(q_tile, buffers.k_ring.at[slot].transpose((1, 0)), block)
        take_turn()
        plgpu.barrier_arrive(buffers.k_free.at[slot])
        logits = base2(logits, spec)
        if border:
            logits = _masked(logits, wg, item, begin, spec, shape)
        new_top = jnp.maximum(top, logits.max(axis=1))
        decay = jnp.exp2(top - new_top)
        weights = jnp.exp2(logits - lax.broadcast_in_dim(new_top, logits.shape, [0]))
        acc *= lax.broadcast_in_dim(decay, acc.shape, [0])
        total = total * decay + weights.sum(axis=1)
        weights = weights.astype(q_tile.dtype)
        plgpu.barrier_wait(buffers.v_ready.at[slot])
        if border:
            # Warpgroup 1 multiplies these values only after warpgroup 0 has taken its turn.
            pl.when(wg == 0)(partial(_zero_unseen, item, begin, buffers.v_ring.at[slot]))
        take_turn()
        acc = _add_product(acc, weights, buffers.v_ring.at[slot], wg, buffers)
        plgpu.barrier_arrive(buffers.v_free.at[slot])
        return acc, new_top, total

    plgpu.copy_gmem_to_smem(q_ref.at[item.tile, item.head, rows], q_tile, buffers.q_ready.at[wg])
    state = (
        plgpu.layout_cast(jnp.zeros((WG_ROWS, shape.head_dim), jnp.float32), layout),
        plgpu.layout_cast(jnp.full((WG_ROWS,), FLOOR, jnp.float32), layout.reduce(1)),
        plgpu.layout_cast(jnp.zeros((WG_ROWS,), jnp.float32), layout.reduce(1)),
    )
    plgpu.barrier_wait(buffers.q_ready.at[wg])
    pl.when(wg == 1)(take_turn)
    # Blocks inside see no border: all their keys lie between the last query's window and the first.
    inner = jnp.minimum(lax.div(item.first_query + 1 - item.begin, jnp.int32(block)), item.steps)
    outer = jnp.int32(0)
    if spec.window is not None:
        window_end = item.first_query + shape.tokens - spec.window - item.begin
        outer = lax.div(jnp.maximum(window_end, 0) + block - 1, jnp.int32(block))
        outer = jnp.minimum(outer, item.steps)
        state = lax.fori_loop(0, outer, partial(step, border=True), state)
    inner = jnp.maximum(inner, outer)
    state = lax.fori_loop(outer, inner, partial(step, border=False), state)
    acc, top, total = lax.fori_loop(inner, item.steps, partial(step, border=True), state)
    pl.when(wg == 0)(take_turn)
    total += 1e-30
    q_tile[...] = (acc / lax.broadcast_in_dim(total, acc.shape, [0])).astype(q_tile.dtype)
    lse_tile[...] = top + jnp.log(total) * LOG2E
    plgpu.commit_smem()
    for tile, result in zip((q_tile, lse_tile), results):
        plgpu.copy_smem_to_gmem(tile, result.at[item.tile, item.head, rows])
    plgpu.wait_smem_to_gmem(0)


def _add_product(acc: Array, weights: Array, values: Ref, wg: Array, buffers: _Buffers) -> Array:
    """acc + weights @ values; under the interpreter through shared memory."""
    if buffers.w_tile is not None:
        tile = buffers.w_tile.at[wg]
        tile[...] = weights
        plgpu.commit_smem()
        return acc + product(tile, values, acc.shape[1])

    def accumulate(acc_ref: Ref) -> None:
        plgpu.wgmma(acc_ref, weights, values)

    initial: Any = plgpu.WGMMAAccumulatorRef.init(acc)
    return pl.run_state(accumulate)(initial)


def _masked(
    logits: Array, wg: Array, item: _Item, begin: Array, spec: AttentionSpec, shape: _Shape
) -> Array:
    """Logits of keys from `begin` on, -inf where a row's query doesn't see the key."""
    layout = plgpu.Layout.WGMMA
    key = plgpu.broadcasted_iota(jnp.int32, logits.shape, 1, layout=layout) + begin
    row = plgpu.broadcasted_iota(jnp.int32, logits.shape, 0, layout=layout) + wg * WG_ROWS
    query = item.first_query + lax.div(row, jnp.int32(shape.group))
    seen = (key <= query) & (key < item.kv_len)
    if spec.window is not None:
        seen &= key > query - spec.window
    return jnp.where(seen, logits, -jnp.inf)


def _zero_unseen(item: _Item, begin: Array, values: Ref) -> None:
    """Zeroes values no query sees: a zero weight times a stale NaN would be NaN."""
    block = values.shape[0]

    @pl.when((begin < item.lowest) | (begin + block > item.kv_len))
    def _() -> None:
        for start in range(0, block, WG_ROWS):
            part = values.at[pl.ds(start, WG_ROWS)]
            loaded = plgpu.load(part, layout=plgpu.Layout.WGMMA)
            key = plgpu.broadcasted_iota(jnp.int32, loaded.shape, 0, layout=plgpu.Layout.WGMMA)
            key += begin + start
            seen = (key >= item.lowest) & (key < item.kv_len)
            part[...] = jnp.where(seen, loaded, jnp.zeros_like(loaded))
        plgpu.commit_smem()
