# pyright: reportAbstractUsage=false
# Pallas leaves an abstract method on the transforms that it exports.
"""Ragged paged prefill for Hopper in Pallas Mosaic GPU: chunks, cached prefixes and decode rows.

The queries of a KV head's group are the rows (token, head) of a tile: two compute warpgroups of up
to 64 rows share one ring of key and value blocks that a memory warpgroup fills by TMA, page by page
from the block table, and take turns on the tensor cores (FlashAttention-3, Shah et al. 2024). A
tile walks only the blocks that its row's queries see; masks cost only at the borders. A persistent
grid takes the tiles in strides, the longest walk first.

Queries are read from, and results written to, the step's own arrays, token by token: rows begin and
end anywhere, which TMA allows for plain shared memory but not in the swizzled layout of a product's
operand. So both pass through a staging tile; the next tile's queries arrive in it while this one's
are in use.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.extend.core import ClosedJaxpr, jaxpr_as_fun
from jaxtyping import Array, Float, Int32

from octavo.attention.contract import AttentionMeta, AttentionSpec
from octavo.attention.mosaic_decode import (
    SMEM_BYTES,
    TMA_BYTES,
    Ref,
    base2,
    product,
    refuse_inputs,
)
from octavo.attention.splits import FLOOR, LOG2E
from octavo.cache.layout import LayerCache

WG_ROWS = 64

REGISTERS = 504
"""Registers a thread of the three warpgroups together, in eights: 512 times 128 are a block's."""


@dataclass(frozen=True)
class PrefillTuning:
    """How the kernel is laid out on the chip.

    Attributes:
        block: keys a pipeline step, 64 or 128.
        key_stages, value_stages: blocks in the two rings.
        num_blocks: thread blocks of the persistent grid, one a multiprocessor.
        memory_registers: registers a thread of the memory warpgroup, 24 or 40; the other two share
            the rest.
        interpreted: softmax weights go through shared memory: slower, but Pallas' interpreter
            doesn't multiply from registers.
    """

    block: int = 128
    key_stages: int = 2
    value_stages: int = 2
    num_blocks: int = 132
    memory_registers: int = 40
    interpreted: bool = False

    def __post_init__(self) -> None:
        if self.block not in (64, 128):
            raise ValueError(f"block={self.block} must be 64 or 128")
        if self.memory_registers not in (24, 40):
            raise ValueError(f"memory_registers={self.memory_registers} must be 24 or 40")
        for name in ("key_stages", "value_stages", "num_blocks"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)} must be positive")

    def smem_bytes(self, head_dim: int) -> int:
        """Shared memory of a block, in bytes."""
        weights = 2 * WG_ROWS * self.block if self.interpreted else 0
        tiles = (4 * WG_ROWS + (self.key_stages + self.value_stages) * self.block) * head_dim
        return (tiles + weights) * 2 + 1024


def default_prefill_tuning(head_dim: int) -> PrefillTuning:
    """Blocks of 128 keys up to head_dim 128, of 64 above: a warpgroup's registers hold no more."""
    return PrefillTuning(
        block=128 if head_dim <= 128 else 64, value_stages=2 if head_dim < 256 else 1
    )


@dataclass(frozen=True)
class _Shape:
    """Static sizes: query heads a KV head, KV heads, head_dim, and of the pages."""

    group: int
    heads: int
    head_dim: int
    page_size: int
    num_pages: int

    @property
    def wg_tokens(self) -> int:
        """Tokens of a warpgroup's rows."""
        return WG_ROWS // self.group

    @property
    def tokens(self) -> int:
        """Tokens a tile."""
        return 2 * self.wg_tokens


class _Tiles(NamedTuple):
    """The tiles of a step in the order they are taken.

    Attributes:
        items: i32[I, 8]; row, position of the first query, first key (a multiple of the block),
            steps of a block, first key any query sees, keys of the row, first token, tokens.
        live: i32[1]; live tiles, which come first.
    """

    items: Int32[Array, "I 8"]
    live: Int32[Array, " 1"]


def _tiles_of(
    meta: AttentionMeta, num_tokens: int, window: int | None, block: int, per_tile: int
) -> _Tiles:
    """Longest walk first. The padding tokens are a last row that sees no key: they get zeros."""
    starts, kv_lens = meta.query_starts, jnp.append(meta.kv_lens, 0)
    lengths = jnp.diff(starts, append=num_tokens)
    tiles = -(-lengths // per_tile)
    ends = jnp.cumsum(tiles)
    num_rows = kv_lens.shape[0]
    index = jnp.arange(num_tokens // per_tile + num_rows, dtype=jnp.int32)
    row = jnp.searchsorted(ends, index, side="right", method="compare_all").astype(jnp.int32)
    live = row < num_rows
    row = jnp.minimum(row, num_rows - 1)
    offset = (index - (ends - tiles)[row]) * per_tile
    tokens = jnp.minimum(per_tile, lengths[row] - offset)
    first = kv_lens[row] - lengths[row] + offset
    lowest = jnp.zeros_like(first)
    if window is not None:
        lowest = jnp.maximum(first - window + 1, 0)
    begin = lowest // block * block
    steps = jnp.where(kv_lens[row] > 0, -(-(first + tokens - begin) // block), 0)

    order = jnp.where(live, steps, -1)
    tie = (order[None] == order[:, None]) & (index[None] < index[:, None])
    rank = jnp.sum((order[None] > order[:, None]) | tie, axis=1, dtype=jnp.int32)
    table_row = jnp.minimum(row, num_rows - 2)
    fields = (table_row, first, begin, steps, lowest, kv_lens[row], starts[row] + offset, tokens)
    items = jnp.zeros((index.shape[0], 8), jnp.int32).at[rank].set(jnp.stack(fields, axis=1))
    return _Tiles(items, ends[-1:].astype(jnp.int32))


def prefill_mosaic(
    q: Float[Array, "T H D"],
    layer: LayerCache,
    meta: AttentionMeta,
    spec: AttentionSpec,
    sinks: Float[Array, " H"] | None = None,
    tuning: PrefillTuning | None = None,
) -> Float[Array, "T H D"]:
    """`attend` for rows of any number of queries, on a Hopper GPU.

    Refuses what `refuse_inputs` names, and groups of more than 64 query heads.
    """
    refuse_inputs(q, layer)
    num_tokens, num_heads, head_dim = q.shape
    page_size, num_kv_heads = layer.k.shape[1:3]
    group = num_heads // num_kv_heads
    # Each token's queries are a copy of their own: they must begin at an aligned place of a tile.
    padded = next(n for n in range(group, 2 * group + 2) if n * head_dim * 2 % TMA_BYTES == 0)
    if padded > WG_ROWS:
        raise NotImplementedError(f"{group} query heads a KV head exceed a tile of {WG_ROWS}")
    tuning = tuning or default_prefill_tuning(head_dim)
    if tuning.smem_bytes(head_dim) > SMEM_BYTES:
        raise NotImplementedError(
            f"{tuning} needs {tuning.smem_bytes(head_dim)} B of shared memory"
        )
    shape = _Shape(padded, num_kv_heads, head_dim, page_size, meta.block_tables.shape[1])
    tiles = _tiles_of(meta, num_tokens, spec.window, tuning.block, shape.tokens)
    grouped = q.reshape(num_tokens, num_kv_heads, group, head_dim)
    grouped = jnp.pad(grouped, ((0, 0), (0, 0), (0, padded - group), (0, 0)))
    arguments = [*tiles, meta.block_tables, grouped, layer.k, layer.v]
    if sinks is not None:
        arguments.append(_sink_rows(sinks, group, shape))
    avals = tuple(jax.ShapeDtypeStruct(array.shape, array.dtype) for array in arguments)
    mesh = jax.sharding.get_abstract_mesh()
    traced = _traced_kernel(avals, spec, tuning, shape, mesh)
    (out,) = jaxpr_as_fun(traced)(*arguments)
    return out[:, :, :group].reshape(q.shape)


def _sink_rows(sinks: Array, group: int, shape: _Shape) -> Float[Array, "K 64"]:
    """Base-2 sink logit of each row of a warpgroup's tile."""
    grouped = sinks.astype(jnp.float32).reshape(shape.heads, group) * LOG2E
    token = jnp.pad(grouped, ((0, 0), (0, shape.group - group)))
    rows = jnp.tile(token, (1, shape.wg_tokens))
    return jnp.pad(rows, ((0, 0), (0, WG_ROWS - rows.shape[1])))


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
    grouped, head_dim = avals[3], shape.head_dim
    dtype = grouped.dtype
    swizzle = 128 if head_dim % 64 == 0 else 64
    transforms = (plgpu.TilingTransform((8, swizzle // 2)), plgpu.SwizzleTransform(swizzle))
    copies = max(1, tuning.block // shape.page_size)

    def ring(stages: int) -> Any:
        return plgpu.SMEM((stages, tuning.block, head_dim), dtype, transforms=transforms)

    scratch = {
        "staging": plgpu.SMEM((2, WG_ROWS, head_dim), dtype),
        "q_tile": plgpu.SMEM((2, WG_ROWS, head_dim), dtype, transforms=transforms),
        "k_ring": ring(tuning.key_stages),
        "v_ring": ring(tuning.value_stages),
        "q_ready": plgpu.Barrier(num_arrivals=shape.wg_tokens, num_barriers=2),
        "k_ready": plgpu.Barrier(num_arrivals=copies, num_barriers=tuning.key_stages),
        "v_ready": plgpu.Barrier(num_arrivals=copies, num_barriers=tuning.value_stages),
        "k_free": plgpu.Barrier(num_arrivals=2, num_barriers=tuning.key_stages),
        "v_free": plgpu.Barrier(num_arrivals=2, num_barriers=tuning.value_stages),
        "turn": plgpu.Barrier(num_arrivals=2),
    }
    if tuning.interpreted:
        full = (plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128))
        scratch["w_tile"] = plgpu.SMEM((2, WG_ROWS, tuning.block), dtype, transforms=full)
    kernel = plgpu.kernel(
        partial(_kernel, shape=shape, spec=spec, tuning=tuning),
        out_type=[grouped],
        grid=(tuning.num_blocks,),
        grid_names=("block",),
        num_threads=3,
        thread_name="wg",
        scratch_types=scratch,
        compiler_params=plgpu.CompilerParams(approx_math=True, reduction_scratch_bytes=0),
        kernel_name="ragged_paged_prefill",
    )
    return jax.make_jaxpr(kernel)(*avals)


class _Item(NamedTuple):
    """A tile's walk for one KV head; fields as in `_Tiles.items`."""

    head: Array
    row: Array
    first_query: Array
    begin: Array
    steps: Array
    lowest: Array
    kv_len: Array
    token: Array
    tokens: Array


class _Buffers(NamedTuple):
    """Shared memory and barriers of a block."""

    staging: Ref  # [2, 64, D]
    q_tile: Ref  # [2, 64, D]
    k_ring: Ref  # [key_stages, block, D]
    v_ring: Ref  # [value_stages, block, D]
    q_ready: Ref
    k_ready: Ref
    v_ready: Ref
    k_free: Ref
    v_free: Ref
    turn: Ref
    w_tile: Ref | None = None  # [2, 64, block]


LoadItem = Callable[[Array], _Item]


def _kernel(
    items_ref: Ref,  # [I, 8]
    count_ref: Ref,  # [1]
    table_ref: Ref,  # [S, P]
    q_ref: Ref,  # [T, K, G, D]
    k_ref: Ref,  # [N, p, K, D]
    v_ref: Ref,  # [N, p, K, D]
    *refs: Ref,  # sinks [K, 64] if there are any; out [T, K, G, D]
    shape: _Shape,
    spec: AttentionSpec,
    tuning: PrefillTuning,
    **scratch: Ref,
) -> None:
    """Deals the tiles of all heads to the blocks, one each a turn."""
    wg, block = lax.axis_index("wg"), lax.axis_index("block")
    heads, stride = jnp.int32(shape.heads), jnp.int32(tuning.num_blocks)
    buffers = _Buffers(**scratch)

    def place(turn: Array) -> Array:
        # There and back: who has the longest tile of one turn has the shortest of the next.
        back = lax.rem(turn, jnp.int32(2)) == 1
        return turn * stride + jnp.where(back, stride - 1 - block, block)

    total = count_ref[0] * heads
    turns = lax.div(total, stride)
    count = turns + (place(turns) < total).astype(jnp.int32)

    def load_item(index: Array) -> _Item:
        # Past the end the last item is read again: the prefetch has no branch.
        at = place(jnp.maximum(jnp.minimum(index, count - 1), 0))
        entry = jnp.minimum(lax.div(at, heads), items_ref.shape[0] - 1)
        return _Item(lax.rem(at, heads), *(items_ref[entry, field] for field in range(8)))

    @pl.when(wg < 2)
    def _compute() -> None:
        compute_registers = (REGISTERS - tuning.memory_registers) // 2
        plgpu.set_max_registers(compute_registers, action="increase")
        sinks = refs[0] if spec.sinks else None
        _attend_tiles(wg, load_item, count, buffers, q_ref, sinks, refs[-1], spec, tuning, shape)

    @pl.when(wg == 2)
    def _memory() -> None:
        plgpu.set_max_registers(tuning.memory_registers, action="decrease")
        _fetch_tiles(load_item, count, buffers, table_ref, (k_ref, v_ref), tuning, shape)


def _fetch_tiles(
    load_item: LoadItem,
    count: Array,
    buffers: _Buffers,
    table: Ref,
    sources: tuple[Ref, Ref],
    tuning: PrefillTuning,
    shape: _Shape,
) -> None:
    """The memory warpgroup: keeps the rings full over the borders of tiles.

    Page ids are read one step ahead.
    """
    block, page_size = tuning.block, shape.page_size
    size = min(page_size, block)
    per_page = jnp.int32(max(1, page_size // block))
    rings = (
        (sources[0], buffers.k_ring, buffers.k_ready, buffers.k_free, tuning.key_stages),
        (sources[1], buffers.v_ring, buffers.v_ready, buffers.v_free, tuning.value_stages),
    )

    def page_ids(item: _Item, step: Array) -> tuple[Array, ...]:
        first = lax.div(item.begin + step * block, jnp.int32(page_size))
        last = jnp.int32(shape.num_pages - 1)
        return tuple(table[item.row, jnp.minimum(first + i, last)] for i in range(block // size))

    def fetch_tile(index: Array, filled: Array) -> Array:
        item = load_item(index)

        def fetch(step: Array, ids: tuple[Array, ...]) -> tuple[Array, ...]:
            next_ids = page_ids(item, step + 1)
            position = filled + step
            # Written so that the compiler sees that it is a multiple of the block.
            offset = lax.rem(lax.div(item.begin, jnp.int32(block)) + step, per_page) * block
            for source, ring, ready, free, stages in rings:
                slot = lax.rem(position, jnp.int32(stages))
                pl.when(position >= stages)(partial(plgpu.barrier_wait, free.at[slot]))
                for copy, page in enumerate(ids):
                    rows = source.at[page, pl.ds(offset, size), item.head]
                    target = ring.at[slot, pl.ds(copy * size, size)]
                    plgpu.copy_gmem_to_smem(rows, target, ready.at[slot])
            return next_ids

        lax.fori_loop(0, item.steps, fetch, page_ids(item, jnp.int32(0)))
        return filled + item.steps

    filled = lax.fori_loop(0, count, fetch_tile, jnp.int32(0))
    # The last release of everything is awaited, so that no barrier ends half used.
    for *_, free, stages in rings:
        for slot in range(stages):
            pl.when(slot < filled)(partial(plgpu.barrier_wait, free.at[slot]))


def _attend_tiles(
    wg: Array,
    load_item: LoadItem,
    count: Array,
    buffers: _Buffers,
    q_ref: Ref,
    sinks: Ref | None,
    out: Ref,
    spec: AttentionSpec,
    tuning: PrefillTuning,
    shape: _Shape,
) -> None:
    """A compute warpgroup: its rows of one tile after the other."""
    staging, q_tile = buffers.staging.at[wg], buffers.q_tile.at[wg]
    last_token = jnp.int32(out.shape[0] - 1)

    def place(token: Array) -> Ref:
        """The staged rows of a token."""
        return staging.at[pl.ds(token * shape.group, shape.group)]

    def first_token(item: _Item) -> Array:
        return item.token + wg * shape.wg_tokens

    def ask_for_queries(item: _Item) -> None:
        def copy(token: Array, _: None) -> None:
            # What is past the tile's own tokens is computed and dropped.
            source = q_ref.at[jnp.minimum(first_token(item) + token, last_token), item.head]
            plgpu.copy_gmem_to_smem(source, place(token), buffers.q_ready.at[wg])

        lax.fori_loop(0, shape.wg_tokens, copy, None)

    def take_queries() -> None:
        plgpu.barrier_wait(buffers.q_ready.at[wg])
        loaded = plgpu.load(staging, layout=plgpu.Layout.WGMMA, optimized=False)
        plgpu.commit_smem()
        q_tile[...] = loaded
        plgpu.commit_smem()

    def store(item: _Item) -> None:
        """The staged results of the tile's tokens; the copies have read them when it returns."""

        def copy(token: Array, _: None) -> None:
            plgpu.copy_smem_to_gmem(place(token), out.at[first_token(item) + token, item.head])

        mine = jnp.clip(item.tokens - wg * shape.wg_tokens, 0, shape.wg_tokens)
        lax.fori_loop(0, mine, copy, None)
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)

    def tile(index: Array, done: Array) -> Array:
        item = load_item(index)
        result = _attend_tile(wg, item, done, buffers, sinks, spec, tuning, shape)
        take_queries()
        staging[...] = result
        plgpu.commit_smem()
        # Read again: over the loop inside, what it doesn't need would hold registers.
        store(load_item(index))
        ask_for_queries(load_item(index + 2))
        return done + item.steps

    @pl.when(count > 0)
    def _all() -> None:
        ask_for_queries(load_item(jnp.int32(0)))
        take_queries()
        ask_for_queries(load_item(jnp.int32(1)))
        pl.when(wg == 1)(partial(_take_turn, buffers))
        lax.fori_loop(0, count, tile, jnp.int32(0))
        pl.when(wg == 0)(partial(_take_turn, buffers))
        plgpu.barrier_wait(buffers.q_ready.at[wg])
        plgpu.wait_smem_to_gmem(0)


def _take_turn(buffers: _Buffers) -> None:
    plgpu.barrier_arrive(buffers.turn)
    plgpu.barrier_wait(buffers.turn)


def _attend_tile(
    wg: Array,
    item: _Item,
    done: Array,
    buffers: _Buffers,
    sinks: Ref | None,
    spec: AttentionSpec,
    tuning: PrefillTuning,
    shape: _Shape,
) -> Array:
    """[64, D] of a warpgroup's rows: a running softmax over the blocks; `done` came before."""
    block, layout = tuning.block, plgpu.Layout.WGMMA
    q_tile = buffers.q_tile.at[wg]

    def step(index: Array, carry: tuple, border: bool) -> tuple:
        acc, top, total = carry
        k_slot = lax.rem(done + index, jnp.int32(tuning.key_stages))
        v_slot = lax.rem(done + index, jnp.int32(tuning.value_stages))
        begin = item.begin + index * block
        plgpu.barrier_wait(buffers.k_ready.at[k_slot])
        keys = buffers.k_ring.at[k_slot].transpose((1, 0))

        def multiply(acc_ref: Ref) -> Array:
            plgpu.wgmma(acc_ref, q_tile, keys)
            # The other's product may queue behind this one.
            _take_turn(buffers)
            return acc_ref[...]

        logits = pl.run_scoped(multiply, plgpu.WGMMAAccumulatorRef((WG_ROWS, block), jnp.float32))
        plgpu.barrier_arrive(buffers.k_free.at[k_slot])
        scale = spec.scale * LOG2E
        if spec.soft_cap is not None:
            logits, scale = base2(logits, spec), 1.0
        if border:
            logits = _masked(logits, wg, item, begin, spec, shape)
        # The largest is found before the scale, which then joins exp2's argument: a fused product.
        new_top = jnp.maximum(top, logits.max(axis=1) * scale)
        decay = jnp.exp2(top - new_top)
        weights = jnp.exp2(logits * scale - lax.broadcast_in_dim(new_top, logits.shape, [0]))
        acc *= lax.broadcast_in_dim(decay, acc.shape, [0])
        total *= lax.broadcast_in_dim(decay, total.shape, [0])
        for start in range(0, block, 8):
            total += weights[:, start : start + 8]
        weights = weights.astype(q_tile.dtype)
        plgpu.barrier_wait(buffers.v_ready.at[v_slot])
        if border:
            # Warpgroup 1 multiplies these values only after warpgroup 0 has taken its turn.
            pl.when(wg == 0)(partial(_zero_unseen, item, begin, buffers.v_ring.at[v_slot]))
        _take_turn(buffers)
        acc = _add_product(acc, weights, buffers.v_ring.at[v_slot], wg, buffers)
        plgpu.barrier_arrive(buffers.v_free.at[v_slot])
        return acc, new_top, total

    per_row = layout.reduce(1)
    top = plgpu.layout_cast(jnp.full((WG_ROWS,), FLOOR, jnp.float32), per_row)
    # Of each eighth column: what the threads of a row hold is added up at the end only.
    total = plgpu.layout_cast(jnp.zeros((WG_ROWS, 8), jnp.float32), layout)
    if sinks is not None:
        top = plgpu.load(sinks.at[item.head], layout=per_row, optimized=False)
        total += 1.0 / 8
    acc = plgpu.layout_cast(jnp.zeros((WG_ROWS, shape.head_dim), jnp.float32), layout)
    state = (acc, top, total)
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
    acc, _, total = lax.fori_loop(inner, item.steps, partial(step, border=True), state)
    total = total.sum(axis=1) + 1e-30
    return (acc / lax.broadcast_in_dim(total, acc.shape, [0])).astype(q_tile.dtype)


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
    row = plgpu.broadcasted_iota(jnp.int32, (WG_ROWS,), 0, layout=layout.reduce(1))
    query = item.first_query + wg * shape.wg_tokens + lax.div(row, jnp.int32(shape.group))
    last = jnp.minimum(query, item.kv_len - 1) - begin
    # A thread holds two columns of each eight. What depends on the thread is moved to the row's
    # side of the comparison: the other one is a constant then, and no column's index is held in a
    # register over the loops.
    column = plgpu.broadcasted_iota(jnp.int32, (logits.shape[1],), 0, layout=layout.reduce(0))
    eights = lax.broadcast_in_dim(column & ~7, logits.shape, [1])
    place = lax.broadcast_in_dim(column & 7, logits.shape, [1])
    seen = eights <= lax.broadcast_in_dim(last, logits.shape, [0]) - place
    if spec.window is not None:
        before = lax.broadcast_in_dim(query - spec.window - begin, logits.shape, [0])
        seen &= eights > before - place
    return jnp.where(seen, logits, -jnp.inf)


def _zero_unseen(item: _Item, begin: Array, values: Ref) -> None:
    """Zeroes values no query sees: a zero weight times a stale NaN would be NaN."""
    block = values.shape[0]

    @pl.when((begin < item.lowest) | (begin + block > item.kv_len))
    def _() -> None:
        for start in range(0, block, WG_ROWS):
            part = values.at[pl.ds(start, WG_ROWS)]
            loaded = plgpu.load(part, layout=plgpu.Layout.WGMMA)
            row = plgpu.broadcasted_iota(
                jnp.int32, (WG_ROWS,), 0, layout=plgpu.Layout.WGMMA.reduce(1)
            )
            key = row + begin + start
            seen = (key >= item.lowest) & (key < item.kv_len)
            seen = lax.broadcast_in_dim(seen, loaded.shape, [0])
            part[...] = jnp.where(seen, loaded, jnp.zeros_like(loaded))
        plgpu.commit_smem()
