"""A decode step's products of few rows in Pallas Triton, with what surrounds them folded in.

    added      y = r + x @ W; also y * factor, and the sums of squares of y's rows
    normed     inverse * (x @ W), where x is y * factor: norm(y) @ W
    gated      silu(gate) * up, both as above

A norm is so cut in two that loops hold nothing but fetches and products (what is computed on
a fetched tile before it is multiplied stalls every step): the product that makes y scales its
columns by the norm's factor, the one that follows its own sums by each row's inverse root. The
norm's result is then rounded before it is divided by the root, and not once more after it.

A block computes some columns of all rows; rows beyond the step's repeat the last one and are not
stored. Where the depth is split, the parts' sums go through memory, and the block that arrives last
at its columns' count adds them up in the order of the parts: which one is last changes no bit.
"""

import warnings
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu
from jaxtyping import Array, BFloat16, Float32, Int32

from octavo.model.triton_plan import NUM_COUNTS, Tiles, row_tile

# JAX wants new kernels to be written for Mosaic GPU, where these have no advantage: a block of a
# product of few rows waits for memory only. The version of JAX is pinned.
warnings.filterwarnings("ignore", message="The Pallas Triton backend", category=DeprecationWarning)

Ref = Any
"""A Pallas reference; its shape and element type stand in a comment where it matters."""


class Scaled(NamedTuple):
    """What a norm of y makes of it, but for each row's inverse root.

    Attributes:
        y: [rows, width], times the norm's factor.
        squares: float32 [parts, row tile], of y's rows, to be summed over the parts.
    """

    y: BFloat16[Array, "rows width"]
    squares: Float32[Array, "parts row_tile"]


class Added(NamedTuple):
    """An added product's results, and the counts as they were."""

    y: BFloat16[Array, "rows width"]
    scaled: Scaled
    counts: Int32[Array, " counts"]


@dataclass(frozen=True)
class _Form:
    """What is static about a product.

    Attributes:
        kind: "added", "normed" or "gated".
        rows, depth, width: of the product, a gated one's width that of its result.
        parts, eps: of the squares, and added to their mean, where x is scaled.
    """

    kind: str
    rows: int
    depth: int
    width: int
    tiles: Tiles
    parts: int = 0
    eps: float = 0.0

    @property
    def row_tile(self) -> int:
        """Rows that a block computes."""
        return row_tile(self.rows)


def no_counts() -> Int32[Array, " counts"]:
    """Arrivals at each tile before the first product; every product leaves it as it was."""
    return jnp.zeros((NUM_COUNTS,), jnp.int32)


def added_product(
    x: BFloat16[Array, "rows depth"],
    weight: BFloat16[Array, "depth width"],
    residual: BFloat16[Array, "rows width"],
    factor: BFloat16[Array, " width"],
    tiles: Tiles,
    counts: Int32[Array, " counts"],
) -> Added:
    """residual + x @ weight, and what a norm of that factor makes of it."""
    depth, width = weight.shape
    form = _Form("added", len(x), depth, width, tiles)
    y, scaled, squares, counts = _launch(form, (x, weight, residual, factor), counts)
    return Added(y, Scaled(scaled, squares), counts)


def normed_product(
    x: Scaled,
    eps: float,
    weight: BFloat16[Array, "depth width"],
    tiles: Tiles,
    counts: Int32[Array, " counts"],
) -> tuple[BFloat16[Array, "rows width"], Int32[Array, " counts"]]:
    """norm(y) @ weight, and the counts; eps is added to the mean of y's squares."""
    (depth, width), parts = weight.shape, len(x.squares)
    form = _Form("normed", len(x.y), depth, width, tiles, parts, eps)
    y, counts = _launch(form, (x.y, weight, x.squares), counts)
    return y, counts


def gated_product(
    x: Scaled,
    eps: float,
    weight: BFloat16[Array, "depth two_width"],
    tiles: Tiles,
) -> BFloat16[Array, "rows width"]:
    """silu(norm(y) @ gate) * (norm(y) @ up); weight has the gate's columns, then up's."""
    depth, width, parts = weight.shape[0], weight.shape[1] // 2, len(x.squares)
    form = _Form("gated", len(x.y), depth, width, tiles, parts, eps)
    return _launch(form, (x.y, weight, x.squares), None)[0]


def _launch(
    form: _Form, operands: tuple[Array, ...], counts: Int32[Array, " counts"] | None
) -> list[Array]:
    """y; of an added product also y scaled and its squares; the counts if there are any."""
    tiles, split = form.tiles, form.tiles.splits > 1
    tiles.check(form.depth, form.width, form.kind == "gated")
    blocks, aliases = form.width // tiles.columns, {}
    y = jax.ShapeDtypeStruct((form.rows, form.width), jnp.bfloat16)
    out = [y]
    if form.kind == "added":
        out += [y, jax.ShapeDtypeStruct((blocks, form.row_tile), jnp.float32)]
    if split:
        assert counts is not None
        aliases = {len(operands): len(out)}
        operands = (*operands, counts)
        out.append(jax.ShapeDtypeStruct(counts.shape, counts.dtype))
        sums = (tiles.splits, form.row_tile, form.width)
        out.append(jax.ShapeDtypeStruct(sums, jnp.float32))
    done = pl.pallas_call(
        partial(_body, form=form, num_inputs=len(operands)),
        out_shape=out,
        grid=(blocks, tiles.splits),
        input_output_aliases=aliases,
        compiler_params=plgpu.CompilerParams(num_warps=tiles.warps, num_stages=tiles.stages),
        interpret=tiles.interpreted,
        name=f"few_rows_{form.kind}",
    )(*operands)
    results = list(done[:-1] if split else done)
    return results if split or counts is None else [*results, counts]


def _body(*refs: Ref, form: _Form, num_inputs: int) -> None:
    """What a block does: its part of the depth, and the rest if it is the last of its columns."""
    inputs, outputs = refs[:num_inputs], refs[num_inputs:]
    tiles, tile, split = form.tiles, pl.program_id(0), pl.program_id(1)
    columns = (tile * tiles.columns + jnp.arange(tiles.columns))[None]
    ahead = _fetch_ahead(inputs[2:], columns, form)
    sums = _multiply(inputs[0], inputs[1], columns, split * (form.depth // tiles.splits), form)
    if tiles.splits == 1:
        _finish(outputs, columns, tile, form, ahead, sums)
        return
    partial_sums, counts = outputs[-1], outputs[-2]
    every = jnp.arange(form.row_tile)[:, None]
    plgpu.store(partial_sums.at[split, every, columns], sums[0])
    if not tiles.interpreted:
        plgpu.debug_barrier()  # all of the block's sums are stored before it counts itself
    arrived = plgpu.atomic_add(counts, (tile,), jnp.int32(1))

    @pl.when(arrived == tiles.splits - 1)
    def _() -> None:
        total = jnp.zeros((form.row_tile, tiles.columns), jnp.float32)
        for part in range(tiles.splits):
            # Volatile: other multiprocessors wrote them, the first-level cache might not know.
            total += plgpu.load(partial_sums.at[part, every, columns], volatile=True)
        _finish(outputs, columns, tile, form, ahead, (total,))
        plgpu.store(counts.at[tile], jnp.int32(0))


def _fetch_ahead(refs: tuple[Ref, ...], columns: Array, form: _Form) -> tuple[Array, ...]:
    """What the end needs, asked for before the loop: the residual and the factor, or squares."""
    if form.kind == "added":
        residual, factor = refs[:2]
        return plgpu.load(residual.at[_rows(form), columns]), plgpu.load(factor.at[columns])
    parts, rows = jnp.arange(pl.next_power_of_2(form.parts))[:, None], jnp.arange(form.row_tile)
    place = refs[0].at[parts, rows[None]]
    if len(parts) == form.parts:
        return (plgpu.load(place),)
    there = jnp.broadcast_to(parts < form.parts, (len(parts), form.row_tile))
    return (plgpu.load(place, mask=there, other=0.0),)


def _multiply(x: Ref, weight: Ref, columns: Array, first: Array, form: _Form) -> tuple[Array, ...]:
    """float32 sums over the block's part of the depth: of y's columns, or of gate's and up's."""
    tiles, rows = form.tiles, _rows(form)
    offsets = (0, form.width) if form.kind == "gated" else (0,)

    def step(index: Array, sums: tuple[Array, ...]) -> tuple[Array, ...]:
        depth = first + index * tiles.step + jnp.arange(tiles.step)
        mine = plgpu.load(x.at[rows, depth[None]])
        tile = [plgpu.load(weight.at[depth[:, None], columns + offset]) for offset in offsets]
        return tuple(total + plgpu.dot(mine, theirs) for total, theirs in zip(sums, tile))

    none = jnp.zeros((form.row_tile, tiles.columns), jnp.float32)
    steps = form.depth // (tiles.splits * tiles.step)
    return lax.fori_loop(0, steps, step, (none,) * len(offsets))


def _rows(form: _Form) -> Array:
    """[row tile, 1], the row that each of the tile's takes its values from."""
    rows = jnp.arange(form.row_tile)[:, None]
    return rows if form.rows == form.row_tile else jnp.minimum(rows, form.rows - 1)


def _finish(
    outputs: tuple[Ref, ...],
    columns: Array,
    tile: Array,
    form: _Form,
    ahead: tuple[Array, ...],
    sums: tuple[Array, ...],
) -> None:
    """What becomes of the sums over the whole depth."""
    rows, kind = jnp.arange(form.row_tile), jnp.bfloat16
    mask = jnp.broadcast_to(rows[:, None] < form.rows, (form.row_tile, form.tiles.columns))
    if form.kind == "added":
        residual, factor = (array.astype(jnp.float32) for array in ahead)
        result = (residual + sums[0].astype(kind).astype(jnp.float32)).astype(kind)
        wide = result.astype(jnp.float32)
        plgpu.store(outputs[2].at[tile, rows], jnp.sum(wide * wide, axis=1))
        scaled = (wide * factor).astype(kind)
        plgpu.store(outputs[1].at[rows[:, None], columns], scaled, mask=mask)
    else:
        mean = jnp.sum(ahead[0], axis=0) / form.depth
        inverse = lax.rsqrt(mean + form.eps)[:, None]
        rounded = [(total * inverse).astype(kind) for total in sums]
        result = rounded[0]
        if form.kind == "gated":
            gate, up = (total.astype(jnp.float32) for total in rounded)
            result = (jax.nn.silu(gate) * up).astype(kind)
    plgpu.store(outputs[0].at[rows[:, None], columns], result, mask=mask)
