"""Attention in plain XLA: any backend, and no work on pages beyond a row's keys.

A decode step is one batched pass over all rows. Other steps are such a pass over the rows with a
single query, then a loop over tiles of the longer rows' queries. Both walk the context in blocks
of pages with a running softmax (Milakov & Gimelshein 2018; Dao et al. 2022), so temporaries
don't grow with the context.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, DTypeLike, Float, Int32

from octavo.attention.contract import AttentionMeta, AttentionSpec
from octavo.attention.numerics import MASKED, product, product_dtype, scaled
from octavo.cache.layout import LayerCache

DECODE_BLOCK = 256
"""Keys a block of a decode pass: on two CPU cores 256 was best at batch 8, and no worse than 128 or
512 at batch 1."""

BATCH_TOKENS = 32768
"""Keys of all rows a decode block may gather; bounds temporaries at large batch."""

QUERY_TILE = 128
TILE_BLOCK = 128
"""Queries a tile and keys a block of it. With 9 heads of 64 a block's logits stay in a CPU core's
L2 (512 tokens: 10.5 ms against 14.2 with blocks of 512)."""

DIAGONAL_KV_HEADS = 4
"""Up to so many KV heads decode multiplies pages as [keys, K * D] matrices with block-diagonal
queries: K times the arithmetic, but no transposed copy of the pages. Logits stay [keys, heads], as
the product makes them: asked for transposed, it takes twice as long (CPU, 3 heads, 8 rows)."""


class _Softmax(NamedTuple):
    """Running softmax of [..., M] queries: maximum, sum, and weighted values [..., M, D]."""

    top: Array
    total: Array
    acc: Array

    def values(self) -> Array:
        """Weighted mean of the values seen; zeros where no key was."""
        return self.acc / jnp.where(self.total > 0, self.total, 1.0)[..., None]


class _Row(NamedTuple):
    """Rows as the key walk sees them: pages, first key any of its queries sees, end of its keys."""

    pages: Int32[Array, "S P"]
    lowest: Int32[Array, " S"]
    end: Int32[Array, " S"]


def attend_xla(
    q: Float[Array, "T H D"],
    layer: LayerCache,
    meta: AttentionMeta,
    spec: AttentionSpec,
    sinks: Float[Array, " H"] | None = None,
) -> Float[Array, "T H D"]:
    """`attend` in plain XLA; takes every shape. float32 is multiplied at full precision."""
    if meta.max_query_len == 1:
        return _decode(q, layer, meta.block_tables, meta.kv_lens, spec, sinks)
    lengths = meta.query_starts[1:] - meta.query_starts[:-1]
    last = jnp.clip(meta.query_starts[1:] - 1, 0, q.shape[0] - 1)
    kv_lens = jnp.where(lengths == 1, meta.kv_lens, 0)
    singles = _decode(q[last], layer, meta.block_tables, kv_lens, spec, sinks)
    target = jnp.where(kv_lens > 0, last, q.shape[0])
    out = jnp.zeros_like(q).at[target].set(singles, mode="drop")
    return _extend(q, out, layer, meta, spec, sinks)


def _decode(
    q: Array,
    layer: LayerCache,
    block_tables: Array,
    kv_lens: Array,
    spec: AttentionSpec,
    sinks: Array | None,
) -> Array:
    """One query a row [S, H, D], at position kv_lens - 1; rows with kv_lens 0 give zeros."""
    num_rows, _, head_dim = q.shape
    num_kv_heads = layer.k.shape[2]
    dtype = product_dtype(q.dtype, layer.k.dtype)
    queries = q.astype(dtype).reshape(num_rows, num_kv_heads, -1, head_dim)
    rows = _Row(block_tables, _lowest(kv_lens - 1, spec), kv_lens)
    decode = _rows_diagonal if num_kv_heads <= DIAGONAL_KV_HEADS else _rows
    values = decode(queries, layer, rows, min(DECODE_BLOCK, BATCH_TOKENS // num_rows), spec, sinks)
    return values.astype(q.dtype).reshape(q.shape)


def _rows(
    queries: Array,
    layer: LayerCache,
    rows: _Row,
    limit: int,
    spec: AttentionSpec,
    sinks: Array | None,
) -> Array:
    """float32 attention of one query a row [S, K, G, D], a product for each KV head."""

    def step(state: _Softmax, keys: Array, values: Array, seen: Array, _: Array) -> _Softmax:
        # keys, values [S, C, K, D], seen [S, C]
        seen = seen[:, None, None]
        logits = scaled(product("skgd,sckd->skgc", queries, keys), spec)
        state, weights = _fold(state, jnp.where(seen, logits, MASKED), seen)
        weights = weights.astype(values.dtype)
        return state._replace(acc=state.acc + product("skgc,sckd->skgd", weights, values))

    state = _start(queries.shape[:3], queries.shape[3], _sinks(sinks, queries.shape[1:3]))
    return _walk(layer, queries.dtype, rows, limit, state, step).values()


def _rows_diagonal(
    queries: Array,
    layer: LayerCache,
    rows: _Row,
    limit: int,
    spec: AttentionSpec,
    sinks: Array | None,
) -> Array:
    """`_rows` as products of [C, K * D] pages with block-diagonal queries [K * G, K * D]."""
    num_rows, num_kv_heads, group, head_dim = queries.shape
    heads, width = num_kv_heads * group, num_kv_heads * head_dim
    eye = jnp.eye(num_kv_heads, dtype=queries.dtype)
    spread = queries[:, :, :, None] * eye[None, :, None, :, None]
    spread = spread.reshape(num_rows, heads, width)

    def step(state: _Softmax, keys: Array, values: Array, seen: Array, _: Array) -> _Softmax:
        # keys, values [S, C, K, D], seen [S, C]
        keys, values = (pages.reshape(*seen.shape, width) for pages in (keys, values))
        seen = seen[:, :, None]
        logits = scaled(product("sce,sme->scm", keys, spread), spec)
        state, weights = _fold(state, jnp.where(seen, logits, MASKED), seen, axis=1)
        weights = weights.astype(values.dtype)
        return state._replace(acc=state.acc + product("scm,sce->sme", weights, values))

    state = _start((num_rows, heads), width, _sinks(sinks, (heads,)))
    pairs = _walk(layer, queries.dtype, rows, limit, state, step).values()
    pairs = pairs.reshape(num_rows, num_kv_heads, group, num_kv_heads, head_dim)
    return jnp.stack([pairs[:, head, :, head] for head in range(num_kv_heads)], axis=1)


def _extend(
    q: Array,
    out: Array,
    layer: LayerCache,
    meta: AttentionMeta,
    spec: AttentionSpec,
    sinks: Array | None,
) -> Array:
    """`out` with the tokens of every row of more than one query filled in, a tile at a time."""
    tile = min(QUERY_TILE, meta.max_query_len, q.shape[0])
    lengths = meta.query_starts[1:] - meta.query_starts[:-1]
    tiles = jnp.where((lengths > 1) & (meta.kv_lens > 0), -(-lengths // tile), 0)
    ends = jnp.cumsum(tiles)

    def one_tile(index: Array, out: Array) -> Array:
        row = jnp.searchsorted(ends, index, side="right").astype(jnp.int32)
        begin = meta.query_starts[row] + (index - ends[row] + tiles[row]) * tile
        # A tile at the end of q starts early instead of reading out of bounds.
        start = jnp.minimum(begin, q.shape[0] - tile)
        tokens = start + jnp.arange(tile, dtype=jnp.int32)
        stop = jnp.minimum(begin + tile, meta.query_starts[row + 1])
        position = meta.kv_lens[row] - meta.query_starts[row + 1] + tokens
        ahead = meta.query_starts[row + 1] - stop
        queries = lax.dynamic_slice_in_dim(q, start, tile)
        lowest = _lowest(position[0] + begin - start, spec)
        rows = _Row(meta.block_tables[row][None], lowest[None], (meta.kv_lens[row] - ahead)[None])
        attended = _tile(queries, position, layer, rows, spec, sinks)
        live = (tokens >= begin) & (tokens < stop)
        kept = lax.dynamic_slice_in_dim(out, start, tile)
        merged = jnp.where(live[:, None, None], attended, kept)
        return lax.dynamic_update_slice_in_dim(out, merged, start, 0)

    return lax.fori_loop(jnp.int32(0), ends[-1], one_tile, out)


def _tile(
    q: Array,
    position: Array,
    layer: LayerCache,
    row: _Row,
    spec: AttentionSpec,
    sinks: Array | None,
) -> Array:
    """Attention of one row's tile of queries [M, H, D] at the given positions [M]."""
    num_queries, num_heads, head_dim = q.shape
    num_kv_heads = layer.k.shape[2]
    group = num_heads // num_kv_heads
    dtype = product_dtype(q.dtype, layer.k.dtype)
    queries = q.astype(dtype).reshape(num_queries, num_kv_heads, group, head_dim)
    queries = queries.transpose(1, 2, 0, 3)
    queries = queries.reshape(num_kv_heads, group * num_queries, head_dim)

    def step(
        state: _Softmax, keys: Array, values: Array, seen: Array, key_position: Array
    ) -> _Softmax:
        # keys, values [1, C, K, D], seen and key_position [1, C]
        seen = seen & (key_position <= position[:, None])
        if spec.window is not None:
            seen &= key_position > position[:, None] - spec.window
        seen = jnp.tile(seen, (group, 1))[None]
        logits = scaled(product("kmd,ckd->kmc", queries, keys[0]), spec)
        state, weights = _fold(state, jnp.where(seen, logits, MASKED), seen)
        weights = weights.astype(values.dtype)
        return state._replace(acc=state.acc + product("kmc,ckd->kmd", weights, values[0]))

    shape = (num_kv_heads, group * num_queries)
    sink = _sinks(sinks, (num_kv_heads, group))
    sink = None if sink is None else jnp.repeat(sink, num_queries, axis=1)
    state = _walk(layer, dtype, row, TILE_BLOCK, _start(shape, head_dim, sink), step)
    values = state.values().astype(q.dtype)
    values = values.reshape(num_kv_heads, group, num_queries, head_dim).transpose(2, 0, 1, 3)
    return values.reshape(q.shape)


def _walk(
    layer: LayerCache,
    dtype: DTypeLike,
    rows: _Row,
    limit: int,
    state: _Softmax,
    step: Callable[[_Softmax, Array, Array, Array, Array], _Softmax],
) -> _Softmax:
    """Folds `step` over blocks of at most `limit` keys of every row, as far as the longest needs.

    Each row starts at the block of its own lowest key. Values a row doesn't see are zeros: a zero
    weight times a NaN left in a stale page would be NaN. Keys come as they are, since `step` masks
    their logits.
    """
    page_size = layer.k.shape[1]
    num_pages = rows.pages.shape[1]
    pages = min(max(limit // page_size, 1), num_pages)
    block = pages * page_size
    first = rows.lowest // block

    def body(index: Array, state: _Softmax) -> _Softmax:
        at = (first + index)[:, None]
        slots = jnp.minimum(at * pages + jnp.arange(pages, dtype=jnp.int32)[None], num_pages - 1)
        ids = jnp.take_along_axis(rows.pages, slots, axis=1)
        position = at * block + jnp.arange(block, dtype=jnp.int32)[None]
        seen = (position >= rows.lowest[:, None]) & (position < rows.end[:, None])
        keys, values = (_gather(pages, ids).astype(dtype) for pages in (layer.k, layer.v))
        values = jnp.where(seen[:, :, None, None], values, 0)
        return step(state, keys, values, seen, position)

    count = jnp.max(jnp.where(rows.end > 0, -(-rows.end // block) - first, 0))
    return lax.fori_loop(jnp.int32(0), count, body, state)


def _gather(pages: Array, ids: Array) -> Array:
    """[S, C, K, D] of pages ids [S, C / p]."""
    return pages[ids].reshape(ids.shape[0], -1, *pages.shape[2:])


def _start(shape: tuple[int, ...], head_dim: int, sinks: Array | None) -> _Softmax:
    """The state before any key. A sink is a key of its own logit and value zero."""
    acc = jnp.zeros((*shape, head_dim), jnp.float32)
    if sinks is None:
        return _Softmax(jnp.full(shape, MASKED, jnp.float32), jnp.zeros(shape, jnp.float32), acc)
    return _Softmax(jnp.broadcast_to(sinks, shape), jnp.ones(shape, jnp.float32), acc)


def _fold(state: _Softmax, logits: Array, seen: Array, axis: int = -1) -> tuple[_Softmax, Array]:
    """The state rescaled to a new maximum with its sum updated, and this block's weights.

    Keys run along `axis` of the logits.
    """
    top = jnp.maximum(state.top, logits.max(axis=axis))
    weights = jnp.where(seen, jnp.exp(logits - jnp.expand_dims(top, axis)), 0.0)
    decay = jnp.exp(state.top - top)
    total = state.total * decay + weights.sum(axis=axis)
    return _Softmax(top, total, state.acc * decay[..., None]), weights


def _lowest(position: Array, spec: AttentionSpec) -> Array:
    """First key that a query at `position` sees."""
    if spec.window is None:
        return jnp.zeros_like(position)
    return jnp.maximum(position - spec.window + 1, 0)


def _sinks(sinks: Array | None, shape: tuple[int, ...]) -> Array | None:
    return None if sinks is None else sinks.astype(jnp.float32).reshape(shape)
