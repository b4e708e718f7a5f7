"""Split-KV: which chunks of the context a decode step works on, and how their results combine.

Chunk borders are multiples of the chunk's size and chunks are added in order, so a row's result is
the same whatever batch and bucket it is in. Which of them is the last follows from the row's length
alone: it takes up to half a chunk more rather than leave a short one behind.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Int32

from octavo.attention.contract import AttentionMeta

LOG2E = math.log2(math.e)

BLOCK = 64
"""Keys a pipeline step: one wgmma tile of logits."""

FLOOR = -1e30
"""First running maximum: finite, so that a step whose keys are all masked (-inf) adds zero."""

UNROLLED_CHUNKS = 64
"""Chunks up to which the combine is one fusion; longer contexts loop."""


@dataclass(frozen=True)
class TileShape:
    """Static sizes: queries a row, query heads a KV head, KV heads, head_dim, and of the pages."""

    queries: int
    group: int
    heads: int
    head_dim: int
    page_size: int
    num_pages: int

    @property
    def used_rows(self) -> int:
        """Rows of a tile that hold queries."""
        return self.queries * self.group

    @property
    def rows(self) -> int:
        """Rows of a tile that travel: whole swizzle tiles of 8."""
        return -(-self.used_rows // 8) * 8

    @property
    def stored_rows(self) -> int:
        """Rows of a result in memory: those of queries, but no swizzle tile that is cut off."""
        return self.used_rows if self.used_rows < 8 else self.rows

    @property
    def copies(self) -> int:
        """Pages a step of BLOCK keys touches."""
        return max(1, BLOCK // self.page_size)


class Work(NamedTuple):
    """The items of a step in the order they are taken, and which chunks of a row exist.

    Attributes:
        items: i32[I, 8]; row, chunk, first position (a multiple of BLOCK), steps of BLOCK keys,
            first key any query sees, position of the first query, keys of the row, slot of its
            token (0 unless rows have one query).
        live: i32[1]; live items, which come first.
        first_chunk, end_chunk: i32[S]; the chunks of each row.
    """

    items: Int32[Array, "I 8"]
    live: Int32[Array, " 1"]
    first_chunk: Int32[Array, " S"]
    end_chunk: Int32[Array, " S"]


def count_chunks(tokens: int, chunk: int) -> int:
    """Chunks of a context of so many tokens."""
    return max(tokens - 1 - chunk // 2, 0) // chunk + 1


def longest_chunk(chunk: int) -> int:
    """Tokens of the longest context that is one chunk."""
    return chunk + chunk // 2


def decode_work(meta: AttentionMeta, page_size: int, window: int | None, chunk: int) -> Work:
    """The work list of a step. Equal for all layers of equal window, so XLA computes it once.

    Order: last chunks that exceed a whole one, whole chunks, the other last chunks by size; what is
    dealt in this order ends within about half a chunk of each other.
    """
    num_rows, num_pages = meta.block_tables.shape
    kv_lens = meta.kv_lens
    lengths = meta.query_starts[1:] - meta.query_starts[:-1]
    first_query = kv_lens - jnp.maximum(lengths, 1)
    lowest = jnp.zeros_like(first_query)
    if window is not None:
        lowest = jnp.maximum(first_query - window + 1, 0)
    live = kv_lens > 0
    final = jnp.maximum(kv_lens - 1 - chunk // 2, 0) // chunk
    first_chunk = jnp.minimum(lowest // chunk, final)
    last_chunk = jnp.where(live, final, first_chunk)
    size = jnp.where(live, kv_lens - last_chunk * chunk, 0)
    by_size = _longest_first(size)
    long = jnp.sum(size > chunk, dtype=jnp.int32)

    max_chunks = count_chunks(num_pages * page_size, chunk)
    index = jnp.arange(num_rows * max_chunks, dtype=jnp.int32)
    counts = last_chunk - first_chunk
    ends = jnp.cumsum(counts)
    whole_index = index - long
    row = jnp.searchsorted(ends, whole_index, side="right", method="compare_all").astype(jnp.int32)
    row = jnp.minimum(row, num_rows - 1)
    part = first_chunk[row] + whole_index - (ends - counts)[row]
    is_whole = (whole_index >= 0) & (whole_index < ends[-1])
    tail_index = jnp.where(whole_index < 0, index, index - ends[-1])
    tail = by_size[jnp.clip(tail_index, 0, num_rows - 1)]
    row = jnp.where(is_whole, row, tail)
    part = jnp.where(is_whole, part, last_chunk[tail])

    begin = jnp.maximum(part * chunk, lowest[row] // BLOCK * BLOCK)
    end = jnp.where(part == last_chunk[row], kv_lens[row], (part + 1) * chunk)
    slot = meta.slots[row] if meta.max_query_len == 1 else jnp.zeros_like(row)
    fields = (row, part, begin, -(-(end - begin) // BLOCK), lowest[row], first_query[row])
    items = jnp.stack([*fields, kv_lens[row], slot], axis=1)
    count = ends[-1] + jnp.sum(live, dtype=jnp.int32)
    return Work(items, count[None], first_chunk, jnp.where(live, last_chunk + 1, first_chunk))


def _longest_first(size: Array) -> Array:
    """Row indices by descending size."""
    index = jnp.arange(size.shape[0], dtype=jnp.int32)
    tie = (size[None] == size[:, None]) & (index[None] < index[:, None])
    rank = jnp.sum((size[None] > size[:, None]) | tie, axis=1, dtype=jnp.int32)
    return jnp.zeros_like(index).at[rank].set(index)


def combine(parts: Array, lse: Array, work: Work, sinks: Array | None, shape: TileShape) -> Array:
    """[S, Q, K, G, D] float32 of every chunk's [S, C, K, Q * G or more, D] result and log-sum-exp.

    Log-sum-exps [S, C, K, R] are in base 2.

    The largest log-sum-exp is found first, so that no chunk's weight waits for another's; then
    chunks are added in order, one by one. One that a row doesn't have adds exact zeros: the result
    doesn't depend on how many chunks the bucket has.
    """
    num_rows, num_chunks = parts.shape[:2]
    parts, lse = parts[..., : shape.used_rows, :], lse[..., : shape.used_rows]
    top, sink = jnp.full(lse[:, 0].shape, FLOOR, jnp.float32), None
    if sinks is not None:
        sink = sinks.astype(jnp.float32).reshape(shape.heads, 1, shape.group) * LOG2E
        sink = jnp.broadcast_to(sink, (shape.heads, shape.queries, shape.group))
        sink = jnp.broadcast_to(sink.reshape(1, shape.heads, shape.used_rows), top.shape)
        top = sink

    def live(index: int | Array) -> Array:
        return ((index >= work.first_chunk) & (index < work.end_chunk))[:, None, None]

    def highest(index: int | Array, top: Array) -> Array:
        # A chunk that doesn't exist was never written: it may hold anything.
        return jnp.maximum(top, jnp.where(live(index), _chunk(lse, index), FLOOR))

    top = _over_chunks(num_chunks, highest, top)
    total = jnp.zeros_like(top) if sink is None else jnp.exp2(sink - top)

    def add(index: int | Array, state: tuple[Array, Array]) -> tuple[Array, Array]:
        total, acc = state
        weight = jnp.where(live(index), jnp.exp2(_chunk(lse, index) - top), 0.0)
        part = jnp.where(live(index)[..., None], _chunk(parts, index), 0).astype(jnp.float32)
        return total + weight, acc + part * weight[..., None]

    acc = jnp.zeros(parts[:, 0].shape, jnp.float32)
    total, acc = _over_chunks(num_chunks, add, (total, acc))
    out = acc / jnp.where(total > 0, total, 1.0)[..., None]
    out = out.reshape(num_rows, shape.heads, shape.queries, shape.group, -1)
    return out.transpose(0, 2, 1, 3, 4)


def _over_chunks(count: int, body: Callable[[Any, Any], Any], state: Any) -> Any:
    """`body` over all chunks in order: one fusion if they are few."""
    if count > UNROLLED_CHUNKS:
        return lax.fori_loop(0, count, body, state)
    for index in range(count):
        state = body(index, state)
    return state


def _chunk(array: Array, index: int | Array) -> Array:
    return lax.dynamic_index_in_dim(array, index, axis=1, keepdims=False)
