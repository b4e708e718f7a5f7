"""The tiles of a step's queries, planned by XLA before the prefill kernel takes them."""

from dataclasses import dataclass
from typing import NamedTuple

import jax.numpy as jnp
from jax import Array
from jaxtyping import Int32

from octavo.attention.contract import AttentionMeta
from octavo.attention.prefill_tuning import WG_ROWS

ITEM = 32
"""Integers that an item takes: 128 bytes, what TMA copies."""


@dataclass(frozen=True)
class Shape:
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

    @property
    def slice(self) -> int:
        """Columns of head_dim that are a line of shared memory."""
        return 64 if self.head_dim % 64 == 0 else 32


class Tiles(NamedTuple):
    """The tiles of a step in the order they are taken.

    Attributes:
        items: i32[I, 32]; row, position of the first query, first key (a multiple of the block),
            steps of a block, first key any query sees, keys of the row, first token, tokens; the
            rest is not used: an item is copied as 128 bytes.
        live: i32[1]; live tiles, which come first.
    """

    items: Int32[Array, "I 32"]
    live: Int32[Array, " 1"]


def tiles_of(
    meta: AttentionMeta, num_tokens: int, window: int | None, block: int, per_tile: int
) -> Tiles:
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
    items = jnp.zeros((index.shape[0], ITEM), jnp.int32)
    items = items.at[rank, : len(fields)].set(jnp.stack(fields, axis=1))
    return Tiles(items, ends[-1:].astype(jnp.int32))


class Item(NamedTuple):
    """A tile's walk for one KV head; fields as in `Tiles.items`."""

    head: Array
    row: Array
    first_query: Array
    begin: Array
    steps: Array
    lowest: Array
    kv_len: Array
    token: Array
    tokens: Array
