"""A decode step's products of few rows in Pallas Triton, with what surrounds them folded in.

    plain      y = x @ W
    residual   y = r + x @ W, and the sums of squares of y's rows, for the norm that follows
    gated      y = silu(x @ gate) * (x @ up)

In each x may be normalised on its way in: the sums of squares that a residual product left make
that one factor a row. A block computes some columns of all rows; rows beyond the step's repeat the
last one and are not stored. Results are rounded where the plain graph rounds.

Where the depth is split, the parts' sums go through memory, and the block that arrives last at its
columns' count adds them up in the order of the parts: which one is last changes no bit.
"""

import warnings
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu
from jaxtyping import Array, BFloat16, Float32, Int32

from octavo.model.triton_plan import NUM_COUNTS, Tiles

# JAX wants new kernels to be written for Mosaic GPU, where these have no advantage: a block of a
# product of few rows waits for memory only. The version of JAX is pinned.
warnings.filterwarnings("ignore", message="The Pallas Triton backend", category=DeprecationWarning)

MIN_ROWS = 16
"""Rows of the smallest tile that tensor cores multiply."""


class Norm(NamedTuple):
    """What makes x of a residual product's result: see `product`.

    Attributes:
        factor: [depth], of each column.
        squares: float32 [parts, row tile], of x's rows, to be summed over the parts.
        eps: added to the mean of squares.
    """

    factor: BFloat16[Array, " depth"]
    squares: Float32[Array, "parts row_tile"]
    eps: float


class Added(NamedTuple):
    """A residual product's results: y, the sums of squares of its rows by parts, the counts."""

    y: BFloat16[Array, "rows width"]
    squares: Float32[Array, "parts row_tile"]
    counts: Int32[Array, " counts"]


@dataclass(frozen=True)
class _Form:
    """What is static about a product; `width` is that of the result."""

    rows: int
    depth: int
    width: int
    tiles: Tiles
    normed: bool = False
    added: bool = False
    gated: bool = False
    parts: int = 0
    eps: float = 0.0

    @property
    def row_tile(self) -> int:
        """Rows of a tile: a power of two."""
        return row_tile(self.rows)


def row_tile(rows: int) -> int:
    """Rows that a product of so many computes."""
    return max(MIN_ROWS, pl.next_power_of_2(rows))


def no_counts() -> Int32[Array, " counts"]:
    """Arrivals at each tile before the first product; every product leaves it as it was."""
    return jnp.zeros((NUM_COUNTS,), jnp.int32)


def added_product(
    x: BFloat16[Array, "rows depth"],
    weight: BFloat16[Array, "depth width"],
    residual: BFloat16[Array, "rows width"],
    tiles: Tiles,
    counts: Int32[Array, " counts"],
) -> Added:
    """residual + x @ weight, and what the norm of it needs."""
    depth, width = weight.shape
    form = _Form(len(x), depth, width, tiles, added=True)
    y, squares, counts = _launch(form, (x, weight, residual), counts)
    return Added(y, squares, counts)


def normed_product(
    x: BFloat16[Array, "rows depth"],
    norm: Norm,
    weight: BFloat16[Array, "depth width"],
    tiles: Tiles,
    counts: Int32[Array, " counts"],
) -> tuple[BFloat16[Array, "rows width"], Int32[Array, " counts"]]:
    """norm(x) @ weight, and the counts."""
    (depth, width), parts = weight.shape, len(norm.squares)
    form = _Form(len(x), depth, width, tiles, True, parts=parts, eps=norm.eps)
    y, counts = _launch(form, (x, norm.factor, norm.squares, weight), counts)
    return y, counts


def gated_product(
    x: BFloat16[Array, "rows depth"],
    norm: Norm,
    weight: BFloat16[Array, "depth two_width"],
    tiles: Tiles,
) -> BFloat16[Array, "rows width"]:
    """silu(norm(x) @ gate) * (norm(x) @ up); weight has the gate's columns, then up's."""
    depth, width = weight.shape[0], weight.shape[1] // 2
    parts = len(norm.squares)
    form = _Form(len(x), depth, width, tiles, True, gated=True, parts=parts, eps=norm.eps)
    return _launch(form, (x, norm.factor, norm.squares, weight), None)[0]


def _launch(
    form: _Form, operands: tuple[Array, ...], counts: Int32[Array, " counts"] | None
) -> list[Array]:
    """y, squares of an added product, and the counts if there are any."""
    tiles, split = form.tiles, form.tiles.splits > 1
    tiles.check(form.depth, form.width, form.gated)
    blocks = form.width // tiles.columns
    out = [jax.ShapeDtypeStruct((form.rows, form.width), jnp.bfloat16)]
    if form.added:
        out.append(jax.ShapeDtypeStruct((blocks, form.row_tile), jnp.float32))
    aliases = {}
    if split:
        assert counts is not None
        aliases = {len(operands): len(out)}
        sums = (tiles.splits, form.row_tile, form.width)
        operands = (*operands, counts)
        out.append(jax.ShapeDtypeStruct(counts.shape, counts.dtype))
        out.append(jax.ShapeDtypeStruct(sums, jnp.float32))
    kind = "gated" if form.gated else "added" if form.added else "normed"
    done = pl.pallas_call(
        partial(_body, form=form, num_inputs=len(operands)),
        out_shape=out,
        grid=(blocks, tiles.splits),
        input_output_aliases=aliases,
        compiler_params=plgpu.CompilerParams(num_warps=tiles.warps, num_stages=tiles.stages),
        interpret=tiles.interpreted,
        name=f"few_rows_{kind}",
    )(*operands)
    results = list(done[:-1] if split else done)
    return results if split or counts is None else [*results, counts]


def _body(*refs: Array, form: _Form, num_inputs: int) -> None:
    """What a block does: its part of the depth, and the rest if it is the last of its columns."""
    inputs, outputs = refs[:num_inputs], list(refs[num_inputs:])
    tiles = form.tiles
    tile, split = pl.program_id(0), pl.program_id(1)
    columns = tile * tiles.columns + jnp.arange(tiles.columns)
    sums = _multiply(inputs, columns, split * (form.depth // tiles.splits), form)
    finish = partial(_finish, inputs, outputs, columns, tile, form)
    if tiles.splits == 1:
        finish(sums)
        return
    partial_sums, counts = outputs[-1], outputs[-2]
    every = jnp.arange(form.row_tile)[:, None]
    plgpu.store(partial_sums.at[split, every, columns[None]], sums[0])
    if not tiles.interpreted:
        plgpu.debug_barrier()  # all of the block's sums are stored before it counts itself
    arrived = plgpu.atomic_add(counts, (tile,), jnp.int32(1))

    @pl.when(arrived == tiles.splits - 1)
    def _() -> None:
        total = jnp.zeros((form.row_tile, tiles.columns), jnp.float32)
        for part in range(tiles.splits):
            total += plgpu.load(partial_sums.at[part, every, columns[None]])
        finish((total,))
        plgpu.store(counts.at[tile], jnp.int32(0))


def _multiply(inputs: tuple, columns: Array, first: Array, form: _Form) -> tuple[Array, ...]:
    """float32 sums over the block's part of the depth: of y's columns, or of gate's and up's."""
    tiles, x, weight = form.tiles, inputs[0], inputs[3 if form.normed else 1]
    rows = _rows(form)[:, None]
    offsets = (0, form.width) if form.gated else (0,)
    inverse = _inverse(inputs[2], form)[:, None] if form.normed else None

    def step(index: Array, sums: tuple[Array, ...]) -> tuple[Array, ...]:
        depth = first + index * tiles.step + jnp.arange(tiles.step)
        mine = plgpu.load(x.at[rows, depth[None]])
        if inverse is not None:
            factor = plgpu.load(inputs[1].at[depth]).astype(jnp.float32)[None]
            mine = (mine.astype(jnp.float32) * inverse * factor).astype(x.dtype)
        return tuple(
            total + plgpu.dot(mine, plgpu.load(weight.at[depth[:, None], (columns + offset)[None]]))
            for total, offset in zip(sums, offsets)
        )

    none = jnp.zeros((form.row_tile, tiles.columns), jnp.float32)
    steps = form.depth // (tiles.splits * tiles.step)
    return lax.fori_loop(0, steps, step, (none,) * len(offsets))


def _rows(form: _Form) -> Array:
    """The row that each of the tile's takes its values from."""
    rows = jnp.arange(form.row_tile)
    return rows if form.rows == form.row_tile else jnp.minimum(rows, form.rows - 1)


def _inverse(squares: Array, form: _Form) -> Array:
    """The factor of each row that makes the mean of squares 1."""
    parts = jnp.arange(pl.next_power_of_2(form.parts))[:, None]
    there = plgpu.load(
        squares.at[parts, jnp.arange(form.row_tile)[None]],
        mask=jnp.broadcast_to(parts < form.parts, (len(parts), form.row_tile)),
        other=0.0,
    )
    return lax.rsqrt(jnp.sum(there, axis=0) / form.depth + form.eps)


def _finish(
    inputs: tuple, outputs: list, columns: Array, tile: Array, form: _Form, sums: tuple[Array, ...]
) -> None:
    """What becomes of the sums over the whole depth, rounded as in the plain graph."""
    y, rows, kind = outputs[0], jnp.arange(form.row_tile)[:, None], jnp.bfloat16
    rounded = [total.astype(kind) for total in sums]
    result = rounded[0]
    if form.gated:
        gate, up = (total.astype(jnp.float32) for total in rounded)
        result = (jax.nn.silu(gate) * up).astype(kind)
    if form.added:
        residual = plgpu.load(inputs[2].at[_rows(form)[:, None], columns[None]])
        result = (residual.astype(jnp.float32) + result.astype(jnp.float32)).astype(kind)
        wide = result.astype(jnp.float32)
        plgpu.store(outputs[1].at[tile, jnp.arange(form.row_tile)], jnp.sum(wide * wide, axis=1))
    mask = jnp.broadcast_to(rows < form.rows, (form.row_tile, form.tiles.columns))
    plgpu.store(y.at[rows, columns[None]], result, mask=mask)
