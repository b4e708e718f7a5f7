"""Ragged paged prefill for Hopper in Pallas Mosaic GPU: chunks, cached prefixes and decode rows.

The queries of a KV head's group are the rows (token, head) of a tile: two compute warpgroups of up
to 64 rows share one ring of key and value blocks that a memory warpgroup fills by TMA, page by page
from the block table, and take turns on the tensor cores (FlashAttention-3, Shah et al. 2024). A
tile walks only the blocks that its row's queries see; masks cost only at the borders. A persistent
grid takes the tiles in strides, the longest walk first.

Queries are read from, and results written to, the step's own arrays, where rows begin and end
anywhere. A product's operand lies in lines of 128 bytes, eight of them a swizzle; so a tile is
held as slices of 64 of head_dim: the heads of any tokens are whole lines of such a slice, and one
copy by TMA brings those of all a warpgroup's tokens (groups that do not divide 64 are padded). The
memory warpgroup fetches the next tile's queries, and the fields of its item, while this one's are
in use.
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
from jaxtyping import Array, Float

from octavo.attention.contract import AttentionMeta, AttentionSpec
from octavo.attention.hopper import SMEM_BYTES, swizzled
from octavo.attention.mosaic_decode import (
    TMA_BYTES,
    Ref,
    base2,
    product,
    refuse_inputs,
)
from octavo.attention.prefill_tiles import ITEM, Item, Shape, tiles_of
from octavo.attention.prefill_tuning import WG_ROWS, PrefillTuning, default_prefill_tuning
from octavo.attention.splits import FLOOR, LOG2E
from octavo.cache.layout import LayerCache

ITEMS = 4
"""Items in shared memory: of this tile, the one before, and two to come."""

COMPUTE_REGISTERS, MEMORY_REGISTERS = 232, 40
"""Registers a thread by warpgroup, in eights: a block has 512 times 128 for the three."""


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
    if group > WG_ROWS:
        raise NotImplementedError(f"{group} query heads a KV head exceed a tile of {WG_ROWS}")
    # Tokens must fill a warpgroup's rows, and each begin at an aligned place of its tile.
    sizes = (n for n in range(group, WG_ROWS + 1) if WG_ROWS % n == 0)
    padded = next(n for n in sizes if n * head_dim * 2 % TMA_BYTES == 0)
    tuning = tuning or default_prefill_tuning(head_dim)
    if tuning.smem_bytes(head_dim) > SMEM_BYTES:
        raise NotImplementedError(
            f"{tuning} needs {tuning.smem_bytes(head_dim)} B of shared memory"
        )
    shape = Shape(padded, num_kv_heads, head_dim, page_size, meta.block_tables.shape[1])
    tiles = tiles_of(meta, num_tokens, spec.window, tuning.block, shape.tokens)
    grouped = q.reshape(num_tokens, num_kv_heads, group, head_dim)
    # The hardware reads zeros past the last token; the interpreter reads nothing there.
    past = shape.tokens if tuning.interpreted else 0
    grouped = jnp.pad(grouped, ((0, past), (0, 0), (0, padded - group), (0, 0)))
    arguments = [*tiles, meta.block_tables, grouped, layer.k, layer.v]
    if sinks is not None:
        arguments.append(_sink_rows(sinks, group, shape))
    avals = tuple(jax.ShapeDtypeStruct(array.shape, array.dtype) for array in arguments)
    mesh = jax.sharding.get_abstract_mesh()
    traced = _traced_kernel(avals, spec, tuning, shape, mesh)
    (out,) = jaxpr_as_fun(traced)(*arguments)
    return out[:num_tokens, :, :group].reshape(q.shape)


def _sink_rows(sinks: Array, group: int, shape: Shape) -> Float[Array, "K 64"]:
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
    shape: Shape,
    mesh: jax.sharding.AbstractMesh,
) -> ClosedJaxpr:
    """The kernel's jaxpr, one object for all layers alike (see the decode kernel's)."""
    del mesh  # part of the key only: a trace belongs to the mesh it was made under
    grouped, head_dim = avals[3], shape.head_dim
    dtype = grouped.dtype
    copies = max(1, tuning.block // shape.page_size)

    def ring(stages: int) -> Any:
        return swizzled((stages, tuning.block, head_dim), dtype, shape.slice)

    slices, width = head_dim // shape.slice, shape.slice
    apart = tuning.results_apart(head_dim)
    # Tiles a warpgroup: queries of this item and of the next, results.
    lines = swizzled((2, 2 + apart, slices, WG_ROWS, width), dtype, width)
    by_token = (2, 2 + apart, slices, shape.wg_tokens, shape.group, width)
    tokens = swizzled(by_token, dtype, width, rows=shape.group)
    scratch = {
        "items": plgpu.SMEM((ITEMS, ITEM), jnp.int32),
        "tiles": (lines, tokens) if tuning.interpreted else plgpu.RefUnion(lines, tokens),
        "k_ring": ring(tuning.key_stages),
        "v_ring": ring(tuning.value_stages),
        "item_ready": plgpu.Barrier(num_barriers=ITEMS),
        "q_ready": plgpu.Barrier(num_arrivals=2 * slices, num_barriers=2),
        "q_free": plgpu.Barrier(num_arrivals=2, num_barriers=2),
        "k_ready": plgpu.Barrier(num_arrivals=copies, num_barriers=tuning.key_stages),
        "v_ready": plgpu.Barrier(num_arrivals=copies, num_barriers=tuning.value_stages),
        "k_free": plgpu.Barrier(num_arrivals=2, num_barriers=tuning.key_stages),
        "v_free": plgpu.Barrier(num_arrivals=2, num_barriers=tuning.value_stages),
        "turn": plgpu.Barrier(num_arrivals=2),
    }
    if tuning.interpreted:
        scratch["w_tile"] = swizzled((2, WG_ROWS, tuning.block), dtype, 64)
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


class _Buffers(NamedTuple):
    """Shared memory and barriers of a block."""

    items: Ref  # [ITEMS, 32]
    lines: Ref  # [2, 2 or 3, D / 64, 64, 64]
    tokens: Ref  # [2, 2 or 3, D / 64, 64 / G, G, 64]: the same memory, unless interpreted
    k_ring: Ref  # [key_stages, block, D]
    v_ring: Ref  # [value_stages, block, D]
    item_ready: Ref
    q_ready: Ref
    q_free: Ref
    k_ready: Ref
    v_ready: Ref
    k_free: Ref
    v_free: Ref
    turn: Ref
    w_tile: Ref | None = None  # [2, 64, block]


class _Deal(NamedTuple):
    """The items of a block.

    Attributes:
        source: i32[I, 32] in memory.
        number: how many there are.
        place: where the one of a turn lies, head by head.
    """

    source: Ref
    number: Array
    place: Callable[[Array], Array]
    heads: int

    def ask(self, index: Array, buffers: _Buffers) -> None:
        """Fetches an item into shared memory; past the end the last one once more."""
        at = self.place(jnp.minimum(index, self.number - 1))
        entry = jnp.minimum(lax.div(at, jnp.int32(self.heads)), self.source.shape[0] - 1)
        slot = lax.rem(index, jnp.int32(ITEMS))
        target, ready = buffers.items.at[slot], buffers.item_ready.at[slot]
        plgpu.copy_gmem_to_smem(self.source.at[entry], target, ready)

    def wait(self, index: Array, buffers: _Buffers) -> None:
        plgpu.barrier_wait(buffers.item_ready.at[lax.rem(index, jnp.int32(ITEMS))])

    def read(self, index: Array, buffers: _Buffers) -> Item:
        """An item that has arrived."""
        at = self.place(jnp.minimum(index, self.number - 1))
        slot = lax.rem(index, jnp.int32(ITEMS))
        fields = (buffers.items[slot, field] for field in range(8))
        return Item(lax.rem(at, jnp.int32(self.heads)), *fields)


def _kernel(
    items_ref: Ref,  # [I, 32]
    count_ref: Ref,  # [1]
    table_ref: Ref,  # [S, P]
    q_ref: Ref,  # [T, K, G, D]
    k_ref: Ref,  # [N, p, K, D]
    v_ref: Ref,  # [N, p, K, D]
    *refs: Ref,  # sinks [K, 64] if there are any; out [T, K, G, D]
    shape: Shape,
    spec: AttentionSpec,
    tuning: PrefillTuning,
    **scratch: Ref,
) -> None:
    """Deals the tiles of all heads to the blocks, one each a turn."""
    wg, block = lax.axis_index("wg"), lax.axis_index("block")
    heads, stride = jnp.int32(shape.heads), jnp.int32(tuning.num_blocks)
    lines, tokens = scratch.pop("tiles")
    buffers = _Buffers(lines=lines, tokens=tokens, **scratch)

    def place(turn: Array) -> Array:
        # There and back: who has the longest tile of one turn has the shortest of the next.
        back = lax.rem(turn, jnp.int32(2)) == 1
        return turn * stride + jnp.where(back, stride - 1 - block, block)

    total = count_ref[0] * heads
    turns = lax.div(total, stride)
    count = turns + (place(turns) < total).astype(jnp.int32)

    deal = _Deal(items_ref, count, place, shape.heads)

    @pl.when(wg < 2)
    def _compute() -> None:
        plgpu.set_max_registers(COMPUTE_REGISTERS, action="increase")
        sinks = refs[0] if spec.sinks else None
        _attend_tiles(wg, deal, buffers, sinks, refs[-1], spec, tuning, shape)

    @pl.when(wg == 2)
    def _memory() -> None:
        plgpu.set_max_registers(MEMORY_REGISTERS, action="decrease")
        fetch = partial(_fetch_tiles, deal, buffers, table_ref, (q_ref, k_ref, v_ref))
        pl.when(count > 0)(partial(fetch, tuning, shape))


def _fetch_tiles(
    deal: _Deal,
    buffers: _Buffers,
    table: Ref,
    sources: tuple[Ref, Ref, Ref],
    tuning: PrefillTuning,
    shape: Shape,
) -> None:
    """The memory warpgroup: keeps the rings full over the borders of tiles.

    Page ids are read one step ahead, items two tiles ahead.
    """
    block, page_size = tuning.block, shape.page_size
    size = min(page_size, block)
    per_page = jnp.int32(max(1, page_size // block))
    q_ref, k_ref, v_ref = sources
    rings = (
        (k_ref, buffers.k_ring, buffers.k_ready, buffers.k_free, tuning.key_stages),
        (v_ref, buffers.v_ring, buffers.v_ready, buffers.v_free, tuning.value_stages),
    )

    def page_ids(row: Array, first_key: Array) -> tuple[Array, ...]:
        first = lax.div(first_key, jnp.int32(page_size))
        last = jnp.int32(shape.num_pages - 1)
        return tuple(table[row, jnp.minimum(first + i, last)] for i in range(block // size))

    def ask_for_queries(index: Array, item: Item) -> None:
        slot = lax.rem(index, jnp.int32(2))
        pl.when(index >= 2)(partial(plgpu.barrier_wait, buffers.q_free.at[slot]))
        for wg in range(2):
            # What is past the tile's own tokens is computed and dropped.
            tokens = pl.ds(item.token + wg * shape.wg_tokens, shape.wg_tokens)
            for part in range(shape.head_dim // shape.slice):
                columns = pl.ds(part * shape.slice, shape.slice)
                source = q_ref.at[tokens, item.head, :, columns]
                target = buffers.tokens.at[wg, slot, part]
                plgpu.copy_gmem_to_smem(source, target, buffers.q_ready.at[slot])

    def fetch_tile(index: Array, carry: tuple) -> tuple:
        filled, item, ids = carry
        ask_for_queries(index, item)
        # Its place is that of the item whose queries have just been replaced.
        deal.ask(index + 2, buffers)
        deal.wait(index + 1, buffers)
        following = deal.read(index + 1, buffers)

        def fetch(step: Array, ids: tuple[Array, ...]) -> tuple[Array, ...]:
            inside = step + 1 < item.steps
            next_key = jnp.where(inside, item.begin + (step + 1) * block, following.begin)
            next_ids = page_ids(jnp.where(inside, item.row, following.row), next_key)
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

        ids = lax.fori_loop(0, item.steps, fetch, ids)
        return filled + item.steps, following, ids

    deal.ask(jnp.int32(0), buffers)
    deal.ask(jnp.int32(1), buffers)
    deal.wait(jnp.int32(0), buffers)
    first = deal.read(jnp.int32(0), buffers)
    initial = (jnp.int32(0), first, page_ids(first.row, first.begin))
    filled, _, _ = lax.fori_loop(0, deal.number, fetch_tile, initial)
    # The last release of everything is awaited, so that no barrier ends half used.
    deal.wait(deal.number + 1, buffers)
    for slot in range(2):
        pl.when(slot < deal.number)(partial(plgpu.barrier_wait, buffers.q_free.at[slot]))
    for *_, free, stages in rings:
        for slot in range(stages):
            pl.when(slot < filled)(partial(plgpu.barrier_wait, free.at[slot]))


def _attend_tiles(
    wg: Array,
    deal: _Deal,
    buffers: _Buffers,
    sinks: Ref | None,
    out: Ref,
    spec: AttentionSpec,
    tuning: PrefillTuning,
    shape: Shape,
) -> None:
    """A compute warpgroup: its rows of one tile after the other."""
    apart, width = tuning.results_apart(shape.head_dim), shape.slice
    parts = range(shape.head_dim // width)

    def store(item: Item, place: Array | int) -> None:
        """Starts the copies of the tile's results to the tokens that are its own."""
        first_token = item.token + wg * shape.wg_tokens
        mine = jnp.clip(item.tokens - wg * shape.wg_tokens, 0, shape.wg_tokens)

        def copy(staged: Any, tokens: Any) -> None:
            for part in parts:
                source = buffers.tokens.at[wg, place, part, staged]
                target = out.at[tokens, item.head, :, pl.ds(part * width, width)]
                plgpu.copy_smem_to_gmem(source, target, commit_group=part == parts[-1])

        def copy_token(token: Array, _: None) -> None:
            copy(token, first_token + token)

        @pl.when(mine == shape.wg_tokens)
        def _whole() -> None:
            copy(slice(None), pl.ds(first_token, shape.wg_tokens))

        @pl.when(mine < shape.wg_tokens)
        def _token_by_token() -> None:
            lax.fori_loop(0, mine, copy_token, None)

    def pass_over(done: Array, index: Array, _: None) -> None:
        """A step of a warpgroup without queries: its turns, and its word that a block is free."""
        rings = (
            (buffers.k_ready, buffers.k_free, tuning.key_stages),
            (buffers.v_ready, buffers.v_free, tuning.value_stages),
        )
        for ready, free, stages in rings:
            place = lax.rem(done + index, jnp.int32(stages))
            plgpu.barrier_wait(ready.at[place])
            _take_turn(buffers)
            plgpu.barrier_arrive(free.at[place])

    def tile(index: Array, done: Array) -> Array:
        slot = lax.rem(index, jnp.int32(2))
        plgpu.barrier_wait(buffers.q_ready.at[slot])
        if tuning.interpreted:
            _to_lines(wg, slot, buffers, shape)
        item = deal.read(index, buffers)
        # A tile of few tokens, as a row that decodes has, leaves warpgroup 1 without any.
        idle = item.tokens <= wg * shape.wg_tokens
        lax.fori_loop(0, jnp.where(idle, item.steps, 0), partial(pass_over, done), None)
        walked = item._replace(steps=jnp.where(idle, 0, item.steps))
        q_tile = buffers.lines.at[wg, slot]
        result = _attend_tile(wg, walked, done, q_tile, buffers, sinks, spec, tuning, shape)
        # Read again: over the loop inside, what it doesn't need would hold registers.
        item = deal.read(index, buffers)
        # Warpgroup 1 ends a tile only when 0 takes a turn in the next one: so one of no steps has a
        # turn, too. Over two without it, 0 would wait for queries in the place of those still used.
        pl.when(item.steps == 0)(partial(_take_turn, buffers))
        place = 2 if apart else slot
        # The copies of the last results have read them long ago.
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        for part in parts:
            columns = result[:, part * width : (part + 1) * width]
            buffers.lines.at[wg, place, part][...] = columns
        if tuning.interpreted:
            _to_tokens(wg, place, buffers, shape)
        plgpu.commit_smem()
        if apart:
            plgpu.barrier_arrive(buffers.q_free.at[slot])
        store(item, place)
        if not apart:
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
            plgpu.barrier_arrive(buffers.q_free.at[slot])
        return done + item.steps

    @pl.when(deal.number > 0)
    def _all() -> None:
        pl.when(wg == 1)(partial(_take_turn, buffers))
        lax.fori_loop(0, deal.number, tile, jnp.int32(0))
        pl.when(wg == 0)(partial(_take_turn, buffers))
        plgpu.wait_smem_to_gmem(0)


def _to_lines(wg: Array, slot: Array, buffers: _Buffers, shape: Shape) -> None:
    """For the interpreter, in which the two views of a tile are not the same memory."""
    for part in range(shape.head_dim // shape.slice):
        for token in range(shape.wg_tokens):
            rows = pl.ds(token * shape.group, shape.group)
            buffers.lines[wg, slot, part, rows] = buffers.tokens[wg, slot, part, token]
    plgpu.commit_smem()


def _to_tokens(wg: Array, place: Array | int, buffers: _Buffers, shape: Shape) -> None:
    """See `_to_lines`."""
    for part in range(shape.head_dim // shape.slice):
        for token in range(shape.wg_tokens):
            rows = pl.ds(token * shape.group, shape.group)
            buffers.tokens[wg, place, part, token] = buffers.lines[wg, place, part, rows]


def _take_turn(buffers: _Buffers) -> None:
    plgpu.barrier_arrive(buffers.turn)
    plgpu.barrier_wait(buffers.turn)


def _attend_tile(
    wg: Array,
    item: Item,
    done: Array,
    q_tile: Ref,  # [D / 64, 64, 64]
    buffers: _Buffers,
    sinks: Ref | None,
    spec: AttentionSpec,
    tuning: PrefillTuning,
    shape: Shape,
) -> Array:
    """[64, D] of a warpgroup's rows: a running softmax over the blocks; `done` came before."""
    block, layout = tuning.block, plgpu.Layout.WGMMA

    def step(index: Array, carry: tuple, border: bool) -> tuple:
        acc, top, total = carry
        k_slot = lax.rem(done + index, jnp.int32(tuning.key_stages))
        v_slot = lax.rem(done + index, jnp.int32(tuning.value_stages))
        begin = item.begin + index * block
        plgpu.barrier_wait(buffers.k_ready.at[k_slot])
        keys = buffers.k_ring.at[k_slot]

        def multiply(acc_ref: Ref) -> Array:
            for part in range(shape.head_dim // shape.slice):
                columns = pl.ds(part * shape.slice, shape.slice)
                plgpu.wgmma(acc_ref, q_tile.at[part], keys.at[:, columns].transpose((1, 0)))
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
    share = 1.0 / (total.sum(axis=1) + 1e-30)
    return (acc * lax.broadcast_in_dim(share, acc.shape, [0])).astype(q_tile.dtype)


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
    logits: Array, wg: Array, item: Item, begin: Array, spec: AttentionSpec, shape: Shape
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


def _zero_unseen(item: Item, begin: Array, values: Ref) -> None:
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
