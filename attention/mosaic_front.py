"""The front of a decode step inside the decode kernel: qk-norm, rope, and the new key's write.

The memory warpgroup of a pair prepares the work item that follows the one it fetches: it stages the
raw heads, normalises and turns them in registers, and stores the queries to a buffer of its lane,
from which they are fetched into the product's swizzled tile. If the item holds the row's last
position, it also writes the new key and value into their page. That item is the only one that reads
this position, and the same thread fetches it after its store has ended: no block waits for another,
and attention sees the bits that the cache holds.

Shared memory is short by exactly such a staging place. Of a tile of queries only the first rows are
used; the others lie fallow, and in them the heads are staged: what a product makes of them are rows
of results that nobody reads.
"""

from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array

from octavo.attention.contract import PADDING_PAGE
from octavo.attention.front import Front
from octavo.attention.splits import TileShape

Ref = Any

ROWS = 8
"""Rows of heads that a warpgroup turns at once."""

MAX_ROWS = 24
"""Query rows of a tile up to which its fallow ones hold the raw heads."""


@dataclass(frozen=True)
class FrontSpec:
    """Static part of a `Front`: whether heads are normalised, and how."""

    normed: bool
    eps: float
    offset: float


def front_spec(front: Front) -> FrontSpec:
    """The static part; what says nothing without norms is left out, so that equal kernels are."""
    if front.q_norm is None:
        return FrontSpec(False, 0.0, 0.0)
    return FrontSpec(True, front.eps, front.offset)


def front_refusal(qkv: Array, front: Front) -> str | None:
    """Why the kernel can't take this front; None if it can."""
    group, head_dim = qkv.shape[2] - 2, qkv.shape[3]
    if 2 * front.cos.shape[1] != head_dim:
        return f"rope turns {2 * front.cos.shape[1]} of {head_dim} dimensions; takes all or nothing"
    if (front.q_norm is None) != (front.k_norm is None):
        return "one of q_norm and k_norm is missing"
    if group > MAX_ROWS:
        return f"{group} query heads a KV head; takes up to {MAX_ROWS}"
    return None


class FrontRefs(NamedTuple):
    """What a pair's memory warpgroup reads and writes for the front."""

    qkv: Ref  # [S, K, G + 2, D]
    k: Ref  # [N, p, K, D]
    v: Ref  # [N, p, K, D]
    cos: Ref  # [S, D / 2]
    sin: Ref  # [S, D / 2]
    norms: tuple[Ref, ...]  # of queries and keys, [D] each, or none
    queries: Ref  # [lanes, 2, R, D]
    staging: Ref  # [64, D], this pair's
    ready: Ref


class Ahead(NamedTuple):
    """The front's part in the memory warpgroup: prepares each item while the one before is fetched.

    Attributes:
        total: items of this lane.
    """

    refs: FrontRefs
    lane: Array
    total: Array
    shape: TileShape
    spec: FrontSpec

    def queries(self, _: Any, index: Array) -> Ref:
        """[R, D] where an item's queries are stored: of two places in turn, so that those of the
        item before may still be on their way into shared memory."""
        return self.refs.queries.at[self.lane, lax.rem(index, jnp.int32(2))]

    def start(self, first: Any) -> None:
        """Before all items."""
        pl.when(self.total > 0)(partial(self._ask, first))

    def begin(self, index: Array, following: Any) -> None:
        """Before an item's steps: the next item's heads are asked for.

        What was staged for this item must have been read, but need not have arrived.
        """
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        pl.when((index > 0) & (index + 1 < self.total))(partial(self._ask, following))

    def finish(self, index: Array, item: Any, following: Any) -> None:
        """Before an item's queries and its last page are fetched: all that it reads is stored."""

        @pl.when(index == 0)
        def _first() -> None:
            self._turn_and_store(item, index)
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
            pl.when(self.total > 1)(partial(self._ask, following))

        plgpu.wait_smem_to_gmem(0)

    def prepare(self, index: Array, following: Any) -> None:
        """When the ring is full: the next item's heads, which came meanwhile, are turned."""
        pl.when(index + 1 < self.total)(partial(self._turn_and_store, following, index + 1))

    def _ask(self, item: Any) -> None:
        """Starts the copy of an item's raw heads."""
        refs, group, rows = self.refs, self.shape.group, self.shape.rows
        # The target of a copy is aligned: key and value each begin a group of rows.
        for first, count, target in (
            (0, group, rows),
            (group, 1, 2 * rows),
            (group + 1, 1, 2 * rows + ROWS),
        ):
            heads = refs.qkv.at[item.row, item.head, pl.ds(first, count)]
            plgpu.copy_gmem_to_smem(heads, refs.staging.at[pl.ds(target, count)], refs.ready)

    def _turn_and_store(self, item: Any, index: Array) -> None:
        """Turns what was asked for and starts its stores: queries, and the new key and value.

        Padding tokens, whose slot lies in the padding page, are not stored.
        """
        refs, rows, page_size = self.refs, self.shape.rows, jnp.int32(self.shape.page_size)
        plgpu.barrier_wait(refs.ready)
        for start in range(rows, 2 * rows, ROWS):
            _turn(refs, item.row, start, 0, self.spec)
        pl.when(item.newest)(partial(_turn, refs, item.row, 2 * rows, 1, self.spec))
        plgpu.commit_smem()
        queries = self.queries(item, index)
        plgpu.copy_smem_to_gmem(refs.staging.at[pl.ds(rows, rows)], queries)

        @pl.when(item.newest & (item.slot >= (PADDING_PAGE + 1) * page_size))
        def _write() -> None:
            page, offset = lax.div(item.slot, page_size), lax.rem(item.slot, page_size)
            for pages, row in ((refs.k, 2 * rows), (refs.v, 2 * rows + ROWS)):
                target = pages.at[page, offset, pl.ds(item.head, 1)]
                plgpu.copy_smem_to_gmem(refs.staging.at[pl.ds(row, 1)], target)


def _turn(refs: FrontRefs, row: Array, start: int, norm: int, spec: FrontSpec) -> None:
    """Normalises and turns ROWS staged heads in place, in `front_reference`'s roundings."""
    half = refs.staging.shape[1] // 2
    layout = _layout(half)

    def along(source: Ref) -> Array:
        """[ROWS, half] of a vector of one element a column."""
        vector = plgpu.load(source, layout=layout.reduce(0), optimized=False)
        return lax.broadcast_in_dim(vector.astype(jnp.float32), (ROWS, half), [1])

    staged = [refs.staging.at[pl.ds(start, ROWS), pl.ds(i * half, half)] for i in range(2)]
    halves = [plgpu.load(ref, layout=layout, optimized=False).astype(jnp.float32) for ref in staged]
    if spec.normed:
        squares = (halves[0] * halves[0] + halves[1] * halves[1]).sum(axis=1)
        inverse = lax.rsqrt(squares / (2 * half) + spec.eps)
        inverse = lax.broadcast_in_dim(inverse, (ROWS, half), [0])
        weights = [along(refs.norms[norm].at[pl.ds(i * half, half)]) for i in range(2)]
        halves = [
            (x * inverse * (weight + spec.offset)).astype(refs.staging.dtype).astype(jnp.float32)
            for x, weight in zip(halves, weights)
        ]
    cos, sin = along(refs.cos.at[row]), along(refs.sin.at[row])
    first, second = halves
    staged[0][...] = (first * cos - second * sin).astype(refs.staging.dtype)
    staged[1][...] = (second * cos + first * sin).astype(refs.staging.dtype)


def keep_plain(ref: Ref) -> None:
    """Says that shared memory lies row after row, as it is declared; emits nothing.

    Left to layout inference, memory without transforms may be swizzled: the staging's copies of
    single rows made that tiles of [1, 64] with a swizzle of 128 bytes. Copies swizzle by address,
    but a load or store of registers by the offset in its slice, so a slice that does not begin at a
    multiple of 8 lines, such as the second half of the columns, meets its 16-byte groups in another
    order. The interpreter knows no swizzle and sees nothing.
    """
    plgpu.inline_mgpu(arg_types=(plgpu.RefType(),))(lambda _, ref: None)(ref)


def _layout(columns: int) -> Any:
    """[8, columns] over a warpgroup: a warp has 2 rows, each in 16 lanes, so a norm stays in it."""
    vector = 2 if columns % 32 == 0 else 1
    tiling = plgpu.Tiling(((ROWS, 16 * vector), (2, 16 * vector), (vector,)))
    return plgpu.Layout.TILED(tiling, warp_dims=(-5,), lane_dims=(-3, -2), vector_dim=-1)
