"""What the warpgroups of a block do in the kernel that `mosaic_matmul` launches.

The third fetches steps of rows and weights into a ring, over the borders of tiles; the first two
multiply 64 rows each with the same weights and send the results off. The blocks of a cluster fetch
one half each of the weights, for both: a place of the ring is free when the warpgroups of both have
done with it.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array

from octavo.attention.mosaic_decode import Ref
from octavo.model.matmul_plan import (
    CLUSTER,
    ROWS,
    STEP,
    Cut,
    Epilogue,
    MatmulShape,
    MatmulTuning,
    Section,
    cut,
)

WG_ROWS = ROWS // 2
COMPUTE_REGISTERS, MEMORY_REGISTERS = 232, 40


class Operands(NamedTuple):
    """The arrays in global memory."""

    x: Ref  # [M, K]
    weight: Ref  # [K, N], or [K, 2F]: the gate's columns, then up's
    out: Ref  # [M, N], or f32 [splits, M, N]
    residual: Ref | None  # [M, N]


class Smem(NamedTuple):
    """Shared memory and barriers of a block."""

    rows: Ref  # [stages, 128, 64]; of each section, in one place
    weights: Ref  # [stages, parts, 64, columns / parts]; likewise
    staged: Ref  # [2 warpgroups, 2 lots, 64, columns of 128 bytes, or of 64]
    ready: Ref  # [stages]
    free: Ref  # [stages]
    fetched: Ref  # [4]: what was there of a lot, by warpgroup and lot


class Place(NamedTuple):
    """A block's part of a tile: its first row and column, and its split."""

    row: Array
    column: Array
    split: Array


Walk = Callable[[Callable[[Place, Array], Array]], Array]


def matmul_kernel(
    *refs: Ref, shape: MatmulShape, tuning: MatmulTuning, num_clusters: int, **scratch: Ref
) -> None:
    """Gives each warpgroup its role. refs: x, weight, the residual if there is one, out."""
    x, weight, *residual, out = refs
    operands = Operands(x, weight, out, residual[0] if residual else None)
    wg, tiles = lax.axis_index("wg"), cut(shape, tuning)
    sections = [
        (section, _of_section(scratch, index if len(tiles.sections) > 1 else None))
        for index, section in enumerate(tiles.sections)
    ]
    walk = partial(_walk, tiles=tiles, shape=shape, num_clusters=num_clusters)

    @pl.when(wg < 2)
    def _compute() -> None:
        plgpu.set_max_registers(COMPUTE_REGISTERS, action="increase")
        for section, smem in sections:
            multiply = partial(_multiply, section=section, operands=operands, smem=smem, wg=wg)
            walk(partial(multiply, shape=shape, tuning=tuning), section=section)
        plgpu.wait_smem_to_gmem(0)

    @pl.when(wg == 2)
    def _memory() -> None:
        plgpu.set_max_registers(MEMORY_REGISTERS, action="decrease")
        for section, smem in sections:
            fetch = partial(_fetch, section=section, operands=operands, smem=smem)
            filled = walk(partial(fetch, shape=shape, tuning=tuning), section=section)
            # The last release of everything is awaited: the next section has the same places,
            # and a block that ended could not be written to.
            for slot in range(tuning.stages):
                pl.when(slot < filled)(partial(plgpu.barrier_wait, smem.free.at[slot]))


def _of_section(scratch: dict[str, Any], index: int | None) -> Smem:
    """What a section uses of the shared memory; None if there is but one section."""
    if index is None:
        return Smem(**scratch)
    own = {name: scratch[name][index] for name in ("rows", "weights")}
    return Smem(**(scratch | own))


def _walk(
    visit: Callable[[Place, Array], Array],
    section: Section,
    tiles: Cut,
    shape: MatmulShape,
    num_clusters: int,
) -> Array:
    """Calls done = visit(place, done) for each of this block's tiles; `done` counts steps.

    Clusters are dealt the tiles of all sections in turn.
    """
    first = lax.axis_index("cluster") + -section.start % num_clusters
    first = lax.rem(first, jnp.int32(num_clusters))
    count = lax.div(section.items - first + (num_clusters - 1), jnp.int32(num_clusters))

    def one(index: Array, done: Array) -> Array:
        return visit(_place(first + index * num_clusters, section, tiles, shape), done)

    return lax.fori_loop(0, count, one, jnp.int32(0))


def _place(index: Array, section: Section, tiles: Cut, shape: MatmulShape) -> Place:
    """Columns of a group of row tiles one after the other: neighbours share rows and weights."""
    whole, grouped = tiles.row_tiles * section.tiles, tiles.group * section.tiles
    split, at = lax.div(index, jnp.int32(whole)), lax.rem(index, jnp.int32(whole))
    first = lax.div(at, jnp.int32(grouped)) * tiles.group
    height = jnp.minimum(tiles.row_tiles - first, tiles.group)
    inside = lax.rem(at, jnp.int32(grouped))
    row, column = first + lax.rem(inside, height), lax.div(inside, height)
    row = row * CLUSTER + lax.axis_index("block")
    column = section.first + column * (section.columns // shape.parts)
    return Place(row * ROWS, column, split)


def _fetch(
    place: Place,
    filled: Array,
    section: Section,
    operands: Operands,
    smem: Smem,
    shape: MatmulShape,
    tuning: MatmulTuning,
) -> Array:
    """A tile's steps, each as soon as there is room."""
    steps, part = cut(shape, tuning).steps, section.columns // shape.parts

    def fetch(step: Array, _: None) -> None:
        count = filled + step
        slot = lax.rem(count, jnp.int32(tuning.stages))
        pl.when(count >= tuning.stages)(partial(plgpu.barrier_wait, smem.free.at[slot]))
        depth, ready = pl.ds((place.split * steps + step) * STEP, STEP), smem.ready.at[slot]
        rows = operands.x.at[pl.ds(place.row, ROWS), depth]
        plgpu.copy_gmem_to_smem(rows, smem.rows.at[slot], ready)
        for index in range(shape.parts):
            columns = pl.ds(place.column + index * shape.width, part)
            source, target = operands.weight.at[depth, columns], smem.weights.at[slot, index]
            plgpu.copy_gmem_to_smem(source, target, ready, collective_axes="block")

    lax.fori_loop(0, steps, fetch, None)
    return filled + steps


def _multiply(
    place: Place,
    done: Array,
    section: Section,
    operands: Operands,
    smem: Smem,
    wg: Array,
    shape: MatmulShape,
    tuning: MatmulTuning,
) -> Array:
    """A warpgroup's rows of a tile; `done` counts the steps used so far."""
    steps, stages = cut(shape, tuning).steps, jnp.int32(tuning.stages)
    results = _Results(place, section, operands, smem, wg, shape)
    results.ask()

    def multiply(step: Array | int, accumulators: tuple[Ref, ...]) -> None:
        slot = lax.rem(done + step, stages)
        plgpu.barrier_wait(smem.ready.at[slot])
        rows = smem.rows.at[slot, pl.ds(wg * WG_ROWS, WG_ROWS)]
        for index, accumulator in enumerate(accumulators):
            plgpu.wgmma(accumulator, rows, smem.weights.at[slot, index])

    def release(step: Array | int) -> None:
        plgpu.barrier_arrive(smem.free.at[lax.rem(done + step, stages)])

    def accumulate(*accumulators: Ref) -> tuple[Array, ...]:
        def step(index: Array, _: None) -> None:
            # One step is in flight while the next is issued.
            multiply(index, accumulators)
            plgpu.wgmma_wait(len(accumulators))
            release(index - 1)

        multiply(0, accumulators)
        lax.fori_loop(1, steps, step, None)
        plgpu.wgmma_wait(0)
        release(steps - 1)
        return tuple(accumulator[...] for accumulator in accumulators)

    part = plgpu.WGMMAAccumulatorRef((WG_ROWS, section.columns // shape.parts), jnp.float32)
    results.store(pl.run_scoped(accumulate, *[part] * shape.parts))
    return done + steps


class _Results(NamedTuple):
    """A warpgroup's results of a tile, lot by lot of as many columns as are 128 bytes."""

    place: Place
    section: Section
    operands: Operands
    smem: Smem
    wg: Array
    shape: MatmulShape

    @property
    def lots(self) -> int:
        """How many a tile has."""
        return self.section.columns // self.shape.parts // self.smem.staged.shape[-1]

    def ask(self) -> None:
        """Begins to fetch what the first lots are added to."""
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        for lot in range(min(2, self.lots)):
            self._fetch(lot)

    def store(self, sums: tuple[Array, ...]) -> None:
        """Sends off what the epilogue makes of the sums."""
        for lot in range(self.lots):
            staged = self._staged(lot)
            if lot > 1 and self.operands.residual is None:
                plgpu.wait_smem_to_gmem(1, wait_read_only=True)
            staged[...] = self._finish(lot, sums).astype(staged.dtype)
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(staged, self._window(self.operands.out, lot))
            if lot + 2 < self.lots and self.operands.residual is not None:
                plgpu.wait_smem_to_gmem(0, wait_read_only=True)
                self._fetch(lot + 2)

    def _finish(self, lot: int, sums: tuple[Array, ...]) -> Array:
        """A lot of the results, rounded where the graph rounds."""
        width = self.smem.staged.shape[-1]
        values = [part[:, lot * width : (lot + 1) * width] for part in sums]
        if self.shape.epilogue is Epilogue.SUMS:
            return values[0]
        values = [value.astype(jnp.bfloat16) for value in values]
        if self.shape.epilogue is Epilogue.GATED:
            gate, up = (value.astype(jnp.float32) for value in values)
            return gate / (1 + jnp.exp(-gate)) * up
        if self.operands.residual is None:
            return values[0]
        plgpu.barrier_wait(self.smem.fetched.at[self.wg * 2 + lot % 2])
        there = plgpu.load(self._staged(lot), layout=plgpu.Layout.WGMMA, optimized=False)
        return there.astype(jnp.float32) + values[0].astype(jnp.float32)

    def _fetch(self, lot: int) -> None:
        if self.operands.residual is not None:
            source, barrier = self._window(self.operands.residual, lot), self.wg * 2 + lot % 2
            plgpu.copy_gmem_to_smem(source, self._staged(lot), self.smem.fetched.at[barrier])

    def _staged(self, lot: int) -> Ref:
        return self.smem.staged.at[self.wg, lot % 2]

    def _window(self, array: Ref, lot: int) -> Ref:
        """A lot's place in an array in global memory; copies leave out what is beyond it."""
        if self.shape.epilogue is Epilogue.SUMS:
            array = array.at[self.place.split]
        width = self.smem.staged.shape[-1]
        rows = pl.ds(self.place.row + self.wg * WG_ROWS, WG_ROWS)
        return array.at[rows, pl.ds(self.place.column + lot * width, width)]
