"""Paged decode attention for Hopper in Pallas Mosaic GPU: split-KV over fixed chunks.

Work is cut into items (row, KV head, chunk of the context). Chunk borders depend on the position
only, so a row's arithmetic is the same in any batch. A persistent grid takes the items in strides,
the longest first, which balances ragged batches to about half a chunk. In each block `pairs` memory
warpgroups stream pages through rings in shared memory (TMA, page ids read from the block table one
step ahead) to as many compute warpgroups. A last fusion of XLA's combines the chunks, always in the
order of their positions. The query heads of a KV head are the rows of one 64-row wgmma tile
(FlashDecoding, Dao et al. 2023; FlashAttention-3, Shah et al. 2024).

With a front (`mosaic_raw.py`) the kernel takes the raw projections of rows of one query: its memory
warpgroups normalise and turn queries and keys, and write the new keys (`mosaic_front.py`).
"""

from collections.abc import Callable
from functools import cache, partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.extend.core import ClosedJaxpr, jaxpr_as_fun
from jaxtyping import Array, DTypeLike, Float

from octavo.attention.contract import AttentionMeta, AttentionSpec
from octavo.attention.decode_tuning import TILE_ROWS, DecodeTuning, default_tuning
from octavo.attention.hopper import SMEM_BYTES, swizzled
from octavo.attention.mosaic_front import Ahead, FrontRefs, FrontSpec, keep_plain
from octavo.attention.splits import (
    BLOCK,
    FLOOR,
    LOG2E,
    TileShape,
    combine,
    count_chunks,
    decode_work,
)
from octavo.cache.layout import LayerCache

Ref = Any
"""A Pallas reference: the kernels' operands have no public type."""

MAX_QUERIES = 8
"""Queries a row the kernel takes: decode, and verification of a few drafted tokens."""

HEAD_DIMS = (64, 96, 128, 192, 256)
PAGE_SIZES = (16, 32, 64, 128)
DTYPES = (jnp.bfloat16, jnp.float16)

COMPUTE_REGISTERS = {1: 232, 2: 208}
MEMORY_REGISTERS = 40
RAW_MEMORY_REGISTERS = {1: 96, 2: 40}
"""Registers a thread of each role, by pairs; they add up to at most the 65,536 of a block."""

TMA_BYTES = 128
"""Alignment of the shared-memory side of a copy."""


def refuse_inputs(q: Array, layer: LayerCache) -> None:
    """Raises NotImplementedError for types and sizes that no kernel here takes."""
    head_dim, page_size = q.shape[2], layer.k.shape[1]
    if q.dtype not in DTYPES or layer.k.dtype != q.dtype:
        raise NotImplementedError(f"queries {q.dtype} on {layer.k.dtype} pages; takes 16 bits only")
    if head_dim not in HEAD_DIMS:
        raise NotImplementedError(f"head_dim {head_dim} is not one of {HEAD_DIMS}")
    if page_size not in PAGE_SIZES:
        raise NotImplementedError(f"page size {page_size} is not one of {PAGE_SIZES}")


def decode_refusal(q: Array, layer: LayerCache, meta: AttentionMeta) -> str | None:
    """Why the decode kernel can't take these rows; None if it can."""
    if meta.max_query_len > MAX_QUERIES:
        return f"{meta.max_query_len} queries a row; takes up to {MAX_QUERIES}"
    rows = meta.max_query_len * (q.shape[1] // layer.k.shape[2])
    return f"{rows} queries a KV head exceed a tile of {TILE_ROWS}" if rows > TILE_ROWS else None


def decode_mosaic(
    q: Float[Array, "T H D"],
    layer: LayerCache,
    meta: AttentionMeta,
    spec: AttentionSpec,
    sinks: Float[Array, " H"] | None = None,
    tuning: DecodeTuning | None = None,
) -> Float[Array, "T H D"]:
    """`attend` for rows of at most MAX_QUERIES queries, on a Hopper GPU.

    Partial results of the chunks are kept in the type of q, their log-sum-exp in float32.
    Refuses as `refuse_inputs` and `decode_refusal` say.
    """
    refuse_inputs(q, layer)
    if reason := decode_refusal(q, layer, meta):
        raise NotImplementedError(reason)
    num_tokens, num_heads, head_dim = q.shape
    shape = tile_shape(layer, meta, num_heads // layer.k.shape[2])
    tuning = fitting(tuning, head_dim)
    work = decode_work(meta, shape.page_size, spec.window, tuning.chunk)
    tokens = meta.query_starts[:-1, None] + jnp.arange(shape.queries, dtype=jnp.int32)[None]
    packed = q if shape.queries == 1 else q[jnp.minimum(tokens, num_tokens - 1)]
    packed = packed.reshape(-1, shape.queries, shape.heads, shape.group, head_dim)
    packed = packed.transpose(0, 2, 1, 3, 4).reshape(-1, shape.heads, shape.used_rows, head_dim)
    # In a model this padding is part of the fusion that makes q.
    packed = jnp.pad(packed, ((0, 0), (0, 0), (0, shape.rows - shape.used_rows), (0, 0)))
    arguments = (work.items, work.live, meta.block_tables, packed, layer.k, layer.v)
    parts, lse = run_traced(traced_kernel, arguments, spec, tuning, shape)
    out = combine(parts, lse, work, sinks, shape).astype(q.dtype)
    if shape.queries == 1:
        return out.reshape(q.shape)
    live = (tokens < meta.query_starts[1:, None]) & (meta.kv_lens > 0)[:, None]
    out = out.reshape(-1, shape.queries, num_heads, head_dim)
    return jnp.zeros_like(q).at[jnp.where(live, tokens, num_tokens)].set(out, mode="drop")


def tile_shape(layer: LayerCache, meta: AttentionMeta, group: int) -> TileShape:
    """Sizes of a step whose KV heads have `group` query heads each."""
    _, page_size, num_kv_heads, head_dim = layer.k.shape
    return TileShape(
        queries=meta.max_query_len,
        group=group,
        heads=num_kv_heads,
        head_dim=head_dim,
        page_size=page_size,
        num_pages=meta.block_tables.shape[1],
    )


def fitting(tuning: DecodeTuning | None, head_dim: int) -> DecodeTuning:
    """The tuning, or the default one; raises NotImplementedError if it needs too much."""
    tuning = tuning or default_tuning(head_dim)
    if tuning.smem_bytes(head_dim) > SMEM_BYTES:
        raise NotImplementedError(
            f"{tuning} needs {tuning.smem_bytes(head_dim)} B of shared memory"
        )
    return tuning


def run_traced(
    trace: Callable[..., ClosedJaxpr],
    arguments: tuple[Array, ...],
    spec: AttentionSpec,
    tuning: DecodeTuning,
    shape: TileShape,
) -> list[Array]:
    """Normalised result [S, C, K, R, D] and base-2 log-sum-exp [S, C, K, R] of every work item.

    With a front, the written pages after them.
    """
    avals = tuple(jax.ShapeDtypeStruct(array.shape, array.dtype) for array in arguments)
    traced = trace(avals, spec, tuning, shape, jax.sharding.get_abstract_mesh())
    return jaxpr_as_fun(traced)(*arguments)


@cache
def traced_kernel(
    avals: tuple[jax.ShapeDtypeStruct, ...],
    spec: AttentionSpec,
    tuning: DecodeTuning,
    shape: TileShape,
    mesh: jax.sharding.AbstractMesh,
    front: FrontSpec | None = None,
) -> ClosedJaxpr:
    """The kernel's jaxpr, one object for all layers alike: XLA is then given its code once.

    Tracing and lowering a kernel takes 0.8 s; 32 layers would take half a minute a program.
    """
    del mesh  # part of the key only: a trace belongs to the mesh it was made under
    num_rows, num_pages = avals[2].shape
    num_chunks = count_chunks(num_pages * shape.page_size, tuning.chunk)
    head_dim, dtype = shape.head_dim, avals[3].dtype
    chunks = (num_rows, num_chunks, shape.heads)
    out_type = [
        jax.ShapeDtypeStruct((*chunks, shape.stored_rows, head_dim), dtype),
        jax.ShapeDtypeStruct((*chunks, shape.rows), jnp.float32),
    ]
    if front is not None:
        lanes = tuning.pairs * tuning.num_blocks
        out_type.append(jax.ShapeDtypeStruct((lanes, 2, shape.rows, head_dim), dtype))
    kernel = plgpu.kernel(
        partial(_kernel, shape=shape, spec=spec, tuning=tuning, front=front),
        out_type=out_type,
        grid=(tuning.num_blocks,),
        grid_names=("block",),
        num_threads=2 * tuning.pairs,
        thread_name="wg",
        scratch_types=_scratch(dtype, tuning, shape, front is not None),
        compiler_params=plgpu.CompilerParams(approx_math=True, reduction_scratch_bytes=0),
        kernel_name="paged_decode" if front is None else "raw_paged_decode",
    )
    if front is None:
        return jax.make_jaxpr(kernel)(*avals)

    def in_place(*arguments: Array) -> tuple[Array, ...]:
        pages = [jax.new_ref(array) for array in arguments[4:6]]
        parts, lse, _ = kernel(*arguments[:4], *pages, *arguments[6:])
        return parts, lse, *(jax.freeze(ref) for ref in pages)

    return jax.make_jaxpr(in_place)(*avals)


def _scratch(dtype: DTypeLike, tuning: DecodeTuning, shape: TileShape, raw: bool) -> dict[str, Any]:
    """Shared memory and barriers, by the names of `_Buffers`."""
    head_dim, pairs, stages = shape.head_dim, tuning.pairs, tuning.stages
    columns = 64 if head_dim % 64 == 0 else 32
    ring = swizzled((pairs, stages, BLOCK, head_dim), dtype, columns)
    loaded = plgpu.Barrier(num_arrivals=shape.copies, num_barriers=pairs * stages)
    released = plgpu.Barrier(num_barriers=pairs * stages)
    q_tile = swizzled((pairs, TILE_ROWS, head_dim), dtype, columns)
    scratch: dict[str, Any] = {
        "q_tile": q_tile,
        "k_ring": ring,
        "v_ring": ring,
        "lse_tile": plgpu.SMEM((pairs, TILE_ROWS), jnp.float32),
        "q_ready": plgpu.Barrier(num_barriers=pairs),
        "q_free": plgpu.Barrier(num_barriers=pairs),
        "k_ready": loaded,
        "v_ready": loaded,
        "k_free": released,
        "v_free": released,
    }
    if raw:
        scratch["staged"] = plgpu.Barrier(num_arrivals=3, num_barriers=pairs)
        plain = plgpu.SMEM((pairs, TILE_ROWS, head_dim), dtype)
        # Both views are of the same bytes, row group for row group. The interpreter, which keeps
        # them apart, would call it a race that a product reads rows that it doesn't need.
        if tuning.interpreted:
            scratch["staging"] = plain
        else:
            scratch["q_tile"] = plgpu.RefUnion(q_tile, plain)
    if tuning.interpreted:
        scratch["w_tile"] = swizzled((pairs, TILE_ROWS, BLOCK), dtype, 64)
    return scratch


def _kernel(
    items_ref: Ref,  # [I, 8]
    count_ref: Ref,  # [1]
    table_ref: Ref,  # [S, P]
    q_ref: Ref,  # [S, K, R, D]; raw heads [S, K, G + 2, D] with a front
    k_ref: Ref,  # [N, p, K, D]
    v_ref: Ref,  # [N, p, K, D]
    *refs: Ref,  # with a front cos and sin [S, D / 2], and two norms [D]; then the results:
    # parts [S, C, K, stored, D], log-sum-exp [S, C, K, R]; with a front queries [lanes, 2, R, D]
    shape: TileShape,
    spec: AttentionSpec,
    tuning: DecodeTuning,
    front: FrontSpec | None,
    **scratch: Ref,
) -> None:
    """Deals the items: pair p of block b takes items b + p * num_blocks + i * lanes."""
    pairs = tuning.pairs
    wg = lax.axis_index("wg")
    pair = lax.rem(wg, jnp.int32(pairs))
    lane = pair * tuning.num_blocks + lax.axis_index("block")
    lanes = tuning.num_blocks * pairs
    count = jnp.maximum(_ceil_div(count_ref[0] * shape.heads - lane, lanes), 0)

    def load_item(index: Array) -> _Item:
        # Past the end the last item is read again: the prefetch has no branch.
        at = lane + jnp.maximum(jnp.minimum(index, count - 1), 0) * lanes
        entry = jnp.minimum(lax.div(at, jnp.int32(shape.heads)), items_ref.shape[0] - 1)
        fields = [items_ref[entry, field] for field in range(8)]
        return _Item(lax.rem(at, jnp.int32(shape.heads)), *fields)

    if front is None:
        results, ahead = refs, None
        queries = lambda item, _: q_ref.at[item.row, item.head]  # noqa: E731
    else:
        cos, sin, *norms, parts, lse, turned = refs
        results = (parts, lse)
        if not tuning.interpreted:
            scratch["q_tile"], scratch["staging"] = scratch["q_tile"]
            keep_plain(scratch["staging"])
        staging, staged = (scratch.pop(name).at[pair] for name in ("staging", "staged"))
        raw = FrontRefs(q_ref, k_ref, v_ref, cos, sin, tuple(norms), turned, staging, staged)
        ahead = Ahead(raw, lane, count, shape, front)
        queries = ahead.queries
    pages = _Pages(table_ref, k_ref, v_ref, queries)
    buffers = _Buffers(pair=pair, stages=tuning.stages, **scratch)

    @pl.when(wg < pairs)
    def _compute() -> None:
        plgpu.set_max_registers(COMPUTE_REGISTERS[pairs], action="increase")
        _compute_items(load_item, count, buffers, results, spec, shape)

    @pl.when(wg >= pairs)
    def _memory() -> None:
        registers = MEMORY_REGISTERS if ahead is None else RAW_MEMORY_REGISTERS[pairs]
        plgpu.set_max_registers(registers, action="decrease")
        _fetch_items(load_item, count, buffers, pages, shape, ahead)


class _Item(NamedTuple):
    """A work item; fields as in `Work.items`."""

    head: Array
    row: Array
    part: Array
    begin: Array
    steps: Array
    lowest: Array
    first_query: Array
    kv_len: Array
    slot: Array

    @property
    def newest(self) -> Array:
        """Whether the row's last position is among its keys."""
        return self.begin + self.steps * BLOCK >= self.kv_len


class _Pages(NamedTuple):
    """What the memory warpgroups read."""

    table: Ref
    k: Ref
    v: Ref
    queries: Callable[[_Item, Array], Ref]  # of an item and its index, [R, D]


class _Buffers(NamedTuple):
    """Shared memory and barriers; this warpgroup's share is that of its pair."""

    pair: Array
    stages: int
    q_tile: Ref  # [pairs, 64, D]
    k_ring: Ref  # [pairs, stages, 64, D]
    v_ring: Ref  # [pairs, stages, 64, D]
    lse_tile: Ref  # [pairs, 64]
    q_ready: Ref
    q_free: Ref
    k_ready: Ref
    v_ready: Ref
    k_free: Ref
    v_free: Ref
    w_tile: Ref | None = None  # [pairs, 64, 64]

    def slot(self, position: Array) -> Array:
        """Place in the ring of the position-th step since the start."""
        return lax.rem(position, jnp.int32(self.stages))

    def barrier(self, position: Array) -> Array:
        """Index of that place's barriers."""
        return self.pair * self.stages + self.slot(position)


def _fetch_items(
    load_item: Callable[[Array], _Item],
    count: Array,
    buffers: _Buffers,
    pages: _Pages,
    shape: TileShape,
    ahead: Ahead | None,
) -> None:
    """The memory warpgroup: keeps the rings full, over the borders of items."""
    pair, stages = buffers.pair, buffers.stages
    size = min(shape.page_size, BLOCK)
    blocks_per_page = jnp.int32(max(1, shape.page_size // BLOCK))

    def page_ids(row: Array, begin: Array) -> tuple[Array, ...]:
        first = lax.div(begin, jnp.int32(shape.page_size))
        last = jnp.int32(shape.num_pages - 1)
        return tuple(pages.table[row, jnp.minimum(first + i, last)] for i in range(shape.copies))

    def fetch_block(source, ring, ready, ids, offset, head, position) -> None:  # noqa: ANN001
        for copy, page in enumerate(ids):
            tile = ring.at[pair, buffers.slot(position), pl.ds(copy * size, size)]
            rows = source.at[page, pl.ds(offset, size), head]
            plgpu.copy_gmem_to_smem(rows, tile, ready.at[buffers.barrier(position)])

    def fetch_item(index: Array, carry: tuple) -> tuple:
        filled, item, ids = carry
        following = load_item(index + 1)
        # The last place of the ring is released when the last item is stored, q's tile before.
        q_step = jnp.minimum(item.steps, stages) - 1
        if ahead is not None:
            ahead.begin(index, following)

        def fetch_step(step: Array, ids: tuple[Array, ...]) -> tuple[Array, ...]:
            position = filled + step
            begin = item.begin + step * BLOCK
            more = step + 1 < item.steps
            next_row = jnp.where(more, item.row, following.row)
            next_ids = page_ids(next_row, jnp.where(more, begin + BLOCK, following.begin))
            # Written so that the compiler sees that it is a multiple of BLOCK.
            offset = lax.rem(lax.div(begin, jnp.int32(BLOCK)), blocks_per_page) * BLOCK

            @pl.when(step == q_step)
            def _fetch_queries() -> None:
                if ahead is not None:
                    ahead.finish(index, item, following)
                _when(index > 0, plgpu.barrier_wait, buffers.q_free.at[pair])
                rows = pages.queries(item, index)
                tile = buffers.q_tile.at[pair, pl.ds(0, shape.rows)]
                plgpu.copy_gmem_to_smem(rows, tile, buffers.q_ready.at[pair])

            for source, ring, ready, free in (
                (pages.k, buffers.k_ring, buffers.k_ready, buffers.k_free),
                (pages.v, buffers.v_ring, buffers.v_ready, buffers.v_free),
            ):
                _when(position >= stages, plgpu.barrier_wait, free.at[buffers.barrier(position)])
                fetch_block(source, ring, ready, ids, offset, item.head, position)
            if ahead is not None:
                pl.when(step == q_step)(partial(ahead.prepare, index, following))
            return next_ids

        ids = lax.fori_loop(0, item.steps, fetch_step, ids)
        return filled + item.steps, following, ids

    first = load_item(jnp.int32(0))
    if ahead is not None:
        ahead.start(first)
    start = (jnp.int32(0), first, page_ids(first.row, first.begin))
    filled, _, _ = lax.fori_loop(0, count, fetch_item, start)
    # The last release of everything is awaited, so that no barrier ends half used.
    for slot in range(stages):
        for free in (buffers.k_free, buffers.v_free):
            _when(slot < filled, plgpu.barrier_wait, free.at[pair * stages + slot])
    _when(count > 0, plgpu.barrier_wait, buffers.q_free.at[pair])


def _compute_items(
    load_item: Callable[[Array], _Item],
    count: Array,
    buffers: _Buffers,
    results: tuple[Ref, Ref],
    spec: AttentionSpec,
    shape: TileShape,
) -> None:
    """The compute warpgroup: a running softmax over the steps of each item, then its results."""
    pair = buffers.pair
    q_tile, lse_tile = buffers.q_tile.at[pair], buffers.lse_tile.at[pair]
    per_row = plgpu.Layout.WGMMA.reduce(1)
    # Without a window, a single query sees every key of all blocks but the last.
    plain = shape.queries == 1 and spec.window is None

    def step(index: Array, carry: tuple, item: _Item, done: Array, last: bool) -> tuple:
        begin, position = item.begin + index * BLOCK, done + index
        acc, top, total = carry
        slot, barrier = buffers.slot(position), buffers.barrier(position)
        plgpu.barrier_wait(buffers.k_ready.at[barrier])
        keys = buffers.k_ring.at[pair, slot].transpose((1, 0))
        logits = base2(product(q_tile, keys, BLOCK), spec)
        plgpu.barrier_arrive(buffers.q_free.at[pair] if last else buffers.k_free.at[barrier])
        if last or not plain:
            logits = _masked(logits, item, begin, spec, shape)
        new_top = jnp.maximum(top, logits.max(axis=1))
        decay = jnp.exp2(top - new_top)
        weights = jnp.exp2(logits - lax.broadcast_in_dim(new_top, logits.shape, [0]))
        total = total * decay + weights.sum(axis=1)
        weights = weights.astype(q_tile.dtype)
        acc *= lax.broadcast_in_dim(decay, acc.shape, [0])
        plgpu.barrier_wait(buffers.v_ready.at[barrier])
        values = buffers.v_ring.at[pair, slot]
        if last or not plain:
            _zero_unseen(values, item, begin)
        acc = _add_product(acc, weights, values, buffers)
        plgpu.barrier_arrive(buffers.v_free.at[barrier])
        return acc, new_top, total

    def compute_item(index: Array, carry: tuple[Array, _Item]) -> tuple[Array, _Item]:
        done, item = carry
        following = load_item(index + 1)
        plgpu.barrier_wait(buffers.q_ready.at[pair])
        acc = jnp.zeros((TILE_ROWS, shape.head_dim), jnp.float32)
        state = (
            plgpu.layout_cast(acc, plgpu.Layout.WGMMA),
            plgpu.layout_cast(jnp.full((TILE_ROWS,), FLOOR, jnp.float32), per_row),
            plgpu.layout_cast(jnp.zeros((TILE_ROWS,), jnp.float32), per_row),
        )
        body = partial(step, item=item, done=done, last=False)
        state = lax.fori_loop(0, item.steps - 1, body, state)
        acc, top, total = step(item.steps - 1, state, item, done, last=True)
        total += 1e-30
        acc = acc / lax.broadcast_in_dim(total, acc.shape, [0])
        # The last keys are done with: their tile takes the result, and q's is loaded meanwhile.
        last = done + item.steps - 1
        out_tile = buffers.k_ring.at[pair, buffers.slot(last)]
        out_tile[...] = acc.astype(out_tile.dtype)
        lse_tile[...] = top + jnp.log(total) * LOG2E
        plgpu.commit_smem()
        rows = pl.ds(0, shape.rows)
        parts, lse = (result.at[item.row, item.part, item.head] for result in results)
        # Of fewer than eight rows parts have no others, and TMA leaves out the rest of its box. A
        # start that is known would be held to the array's bounds.
        first = item.head * 0
        plgpu.copy_smem_to_gmem(out_tile.at[rows], parts.at[pl.ds(first, shape.rows)])
        plgpu.copy_smem_to_gmem(lse_tile.at[rows], lse)
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        plgpu.barrier_arrive(buffers.k_free.at[buffers.barrier(last)])
        return done + item.steps, following

    lax.fori_loop(0, count, compute_item, (jnp.int32(0), load_item(jnp.int32(0))))


def product(left: Ref | Array, right: Ref, columns: int) -> Array:
    """Float32 [64, columns] of a wgmma into a fresh accumulator."""

    def multiply(acc_ref: Ref) -> Array:
        plgpu.wgmma(acc_ref, left, right)
        return acc_ref[...]

    return pl.run_scoped(multiply, plgpu.WGMMAAccumulatorRef((TILE_ROWS, columns), jnp.float32))


def _add_product(acc: Array, weights: Array, values: Ref, buffers: _Buffers) -> Array:
    """acc + weights @ values; under the interpreter through shared memory."""
    if buffers.w_tile is not None:
        tile = buffers.w_tile.at[buffers.pair]
        tile[...] = weights
        plgpu.commit_smem()
        return acc + product(tile, values, acc.shape[1])

    def accumulate(acc_ref: Ref) -> None:
        plgpu.wgmma(acc_ref, weights, values)

    initial: Any = plgpu.WGMMAAccumulatorRef.init(acc)
    return pl.run_state(accumulate)(initial)


def base2(logits: Array, spec: AttentionSpec) -> Array:
    """Logits in base 2 under scale and soft cap; tanh from exp2, as the hardware's is coarse."""
    if spec.soft_cap is None:
        return logits * (spec.scale * LOG2E)
    cap = spec.soft_cap
    grown = jnp.exp2(logits * (2 * LOG2E * spec.scale / cap))
    return cap * LOG2E - (2 * cap * LOG2E) / (1 + grown)


def _masked(
    logits: Array, item: _Item, begin: Array, spec: AttentionSpec, shape: TileShape
) -> Array:
    """Logits of keys from `begin` on, -inf where a query doesn't see the key."""
    layout = plgpu.Layout.WGMMA
    key = plgpu.broadcasted_iota(jnp.int32, logits.shape, 1, layout=layout) + begin
    if shape.queries == 1:
        first, last = item.lowest, item.first_query
    else:
        row = plgpu.broadcasted_iota(jnp.int32, logits.shape, 0, layout=layout)
        last = item.first_query + lax.div(row, jnp.int32(shape.group))
        first = last + 1 - (spec.window or 0)
    seen = (key <= last) & (key < item.kv_len)
    if spec.window is not None:
        seen &= key >= first
    return jnp.where(seen, logits, -jnp.inf)


def _zero_unseen(values: Ref, item: _Item, begin: Array) -> None:
    """Zeroes values that no query sees: a zero weight times a stale NaN would be NaN."""

    @pl.when((begin < item.lowest) | (begin + BLOCK > item.kv_len))
    def _() -> None:
        layout = plgpu.Layout.WGMMA
        tile = plgpu.load(values, layout=layout)
        key = plgpu.broadcasted_iota(jnp.int32, tile.shape, 0, layout=layout) + begin
        seen = (key >= item.lowest) & (key < item.kv_len)
        values[...] = jnp.where(seen, tile, jnp.zeros_like(tile))
        plgpu.commit_smem()


def _when(condition: Array, action: Callable[[Ref], None], operand: Ref) -> None:
    pl.when(condition)(lambda: action(operand))


def _ceil_div(value: Array, divisor: int) -> Array:
    return lax.div(value + (divisor - 1), jnp.int32(divisor))
