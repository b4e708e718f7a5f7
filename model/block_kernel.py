"""What the warpgroups of a block do in the kernel that `mosaic_block` launches.

One streams weights, one fetches activations, one multiplies, adds up and normalises. The two that
fetch go through the same items in the same order as the third and are slowed by nothing but room
in their rings and, for activations, the barriers of the grid.
"""

from functools import partial
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array

from octavo.attention.mosaic_decode import Ref
from octavo.model.block_grid import Grid, Items
from octavo.model.block_plan import TILE, BlockShape, BlockTuning

COMPUTE_REGISTERS = {1: 240, 2: 208}
MEMORY_REGISTERS = 40
"""Registers a thread of each role, by the number of warpgroups that multiply."""

OUT_DONE, MLP_READY, GATED_DONE, DOWN_DONE, QKV_READY = range(5)
"""The barriers of the grid, in order: after each, what the phase before wrote may be read."""

NUM_BARRIERS = 5


class BlockInputs(NamedTuple):
    """The operands, matrices as [in, out]; gate_up has gate's columns first. bfloat16."""

    mixed: Any  # [R, H]: results of attention
    x: Any  # [R, E]: the residual stream
    out: Any  # [H, E]
    mlp_norm: Any  # [E]
    gate_up: Any  # [E, 2F]
    down: Any  # [F, E]
    next_norm: Any  # [E]
    qkv: Any = None  # [E, Q], or None after the last layer


class BlockOutputs(NamedTuple):
    """What the kernel writes; what is not said to be for others is read by itself only.

    `x`, `normed` and `qkv_sums` are results, `no_arrivals` is the grid's for a next launch.
    """

    no_arrivals: Any  # i32 [barriers]
    out_sums: Any  # f32 [splits, R, E]
    x_mid: Any  # [R, E]
    normed_mid: Any  # [R, E]
    gated: Any  # [R, F]
    down_sums: Any  # f32 [splits, R, E]
    x: Any  # [R, E]
    normed: Any  # [R, E]
    qkv_sums: Any = None  # f32 [splits, R, Q]


class Smem(NamedTuple):
    """Shared memory and barriers of a block."""

    ring: Ref  # [ring, 64, 64] weights, [depth, columns]
    rows: Ref  # [activation_ring, row_tiles, 64, 64] activations, [rows, depth]
    sums: Ref  # f32 [row_tiles, 64, 64]
    gated: Ref  # [row_tiles, 64, 64]
    ring_ready: Ref
    ring_free: Ref
    rows_ready: Ref
    rows_free: Ref


def block_kernel(
    *refs: Ref,
    num_inputs: int,
    shape: BlockShape,
    tuning: BlockTuning,
    barriers: Ref | None = None,
    **scratch: Ref,
) -> None:
    """Gives each warpgroup its role: a row tile to multiply each, weights, activations.

    refs: those of BlockInputs, the grid's arrivals, then those of BlockOutputs.
    """
    inputs, outputs = BlockInputs(*refs[:num_inputs]), BlockOutputs(*refs[num_inputs + 1 :])
    tiles = tuning.row_tiles
    grid = Grid(refs[num_inputs], tuning.num_blocks * tiles, barriers)
    smem = Smem(**scratch)
    block, wg = lax.axis_index("block"), lax.axis_index("wg")
    products = [Items(p, block, tuning.num_blocks) for p in shape.plan.products()]

    @pl.when(wg < tiles)
    def _compute() -> None:
        plgpu.set_max_registers(COMPUTE_REGISTERS[tiles], action="increase")
        tile = wg if tiles > 1 else 0
        _compute_phases(products, inputs, outputs, smem, grid, tile, shape, tuning)

    @pl.when(wg == tiles)
    def _weights() -> None:
        plgpu.set_max_registers(MEMORY_REGISTERS, action="decrease")

        @pl.when(block == 0)
        def _ready_next() -> None:
            for barrier in range(NUM_BARRIERS):
                outputs.no_arrivals[barrier] = jnp.int32(0)

        _fetch_weights(products, inputs, smem, tuning.ring)

    @pl.when(wg == tiles + 1)
    def _activations() -> None:
        plgpu.set_max_registers(MEMORY_REGISTERS, action="decrease")
        _fetch_activations(products, inputs, outputs, smem, grid, tuning)


def _fetch_weights(products: list[Items], inputs: BlockInputs, smem: Smem, size: int) -> None:
    """Keeps the ring full, over the borders of items and phases."""

    def fetch(
        step: Array, filled: Array, column: Array, split: Array, items: Items, matrix: Ref
    ) -> Array:
        depth = (split * items.product.steps + step) * TILE
        for tile in range(items.product.tiles):
            slot = lax.rem(filled + tile, jnp.int32(size))
            _when(filled + tile >= size, smem.ring_free.at[slot])
            first = items.tile_column(column, tile)
            source = matrix.at[pl.ds(depth, TILE), pl.ds(first, TILE)]
            plgpu.copy_gmem_to_smem(source, smem.ring.at[slot], smem.ring_ready.at[slot])
        return filled + items.product.tiles

    filled = jnp.int32(0)
    for items, matrix in zip(products, (inputs.out, inputs.gate_up, inputs.down, inputs.qkv)):
        filled = items.walk(partial(fetch, items=items, matrix=matrix), filled)
    _drain(smem.ring_free, filled, size)


def _fetch_activations(
    products: list[Items],
    inputs: BlockInputs,
    outputs: BlockOutputs,
    smem: Smem,
    grid: Grid,
    tuning: BlockTuning,
) -> None:
    """Fetches what the products multiply, each after the phase that makes it."""

    def fetch(
        step: Array, filled: Array, column: Array, split: Array, steps: int, source: Ref
    ) -> Array:
        del column
        slot = lax.rem(filled, jnp.int32(size))
        _when(filled >= size, smem.rows_free.at[slot])
        rows = source.shape[0] // tuning.row_tiles
        columns = pl.ds((split * steps + step) * TILE, TILE)
        for tile in range(tuning.row_tiles):
            target = smem.rows.at[slot, tile, pl.ds(0, rows)]
            part = source.at[pl.ds(tile * rows, rows), columns]
            plgpu.copy_gmem_to_smem(part, target, smem.rows_ready.at[slot])
        return filled + 1

    filled, size = jnp.int32(0), tuning.activation_ring
    sources = (
        (None, inputs.mixed),
        (MLP_READY, outputs.normed_mid),
        (GATED_DONE, outputs.gated),
        (QKV_READY, outputs.normed),
    )
    for items, (barrier, source) in zip(products, sources):
        if barrier is not None:
            grid.wait(barrier)
        visit = partial(fetch, steps=items.product.steps, source=source)
        filled = items.walk(visit, filled)
    _drain(smem.rows_free, filled, size)


def _drain(free: Ref, filled: Array, size: int) -> None:
    """Awaits the last release of everything, so that no barrier ends half used."""
    for slot in range(size):
        _when(slot < filled, free.at[slot])


def _when(condition: Array, barrier: Ref) -> None:
    pl.when(condition)(lambda: plgpu.barrier_wait(barrier))


def _compute_phases(
    products: list[Items],
    inputs: BlockInputs,
    outputs: BlockOutputs,
    smem: Smem,
    grid: Grid,
    tile: Array | int,
    shape: BlockShape,
    tuning: BlockTuning,
) -> None:
    """The way through a layer of the warpgroup that multiplies a row tile."""
    out, gate_up, down, *rest = products
    multiply = partial(_multiply, smem=smem, tile=tile, shape=shape, tuning=tuning)
    normalise = partial(_normalise, deal=out, tile=tile, shape=shape, grid=grid)
    done = (jnp.int32(0), jnp.int32(0))

    done = multiply(out, outputs.out_sums, done)
    grid.arrive(OUT_DONE)
    mid = (outputs.x_mid, outputs.normed_mid)
    normalise(outputs.out_sums, inputs.x, inputs.mlp_norm, mid, OUT_DONE)
    grid.arrive(MLP_READY)
    done = multiply(gate_up, outputs.gated, done)
    grid.arrive(GATED_DONE)
    done = multiply(down, outputs.down_sums, done)
    grid.arrive(DOWN_DONE)
    ends = (outputs.x, outputs.normed)
    normalise(outputs.down_sums, outputs.x_mid, inputs.next_norm, ends, DOWN_DONE)
    grid.arrive(QKV_READY)
    if rest:
        multiply(rest[0], outputs.qkv_sums, done)


def _multiply(
    items: Items,
    target: Ref,
    done: tuple[Array, Array],
    smem: Smem,
    tile: Array | int,
    shape: BlockShape,
    tuning: BlockTuning,
) -> tuple[Array, Array]:
    """The products of this block's items with a row tile, stored in `target`.

    `done` counts the weight and activation tiles used so far; the new counts are returned.
    """
    product, rows = items.product, shape.rows // tuning.row_tiles
    live = pl.ds(tile * rows, rows)

    def one(index: Array, done: tuple[Array, Array]) -> tuple[Array, Array]:
        column, split = items.place(index)

        def accumulate(*accumulators: Ref) -> tuple[Array, ...]:
            step = partial(_multiply_step, accumulators=accumulators, done=done)
            step = partial(step, smem=smem, tile=tile, tuning=tuning)
            lax.fori_loop(0, product.steps, lambda i, _: step(i), None)
            return tuple(accumulator[...] for accumulator in accumulators)

        accumulator = plgpu.WGMMAAccumulatorRef((TILE, TILE), jnp.float32)
        sums = pl.run_scoped(accumulate, *[accumulator] * product.tiles)
        if product.gated:
            _store_gated(sums, target.at[live], column, smem.gated.at[tile])
        else:
            for part, total in enumerate(sums):
                place = target.at[split, live, pl.ds(items.tile_column(column, part), TILE)]
                _store(total, smem.sums.at[tile], place)
        plgpu.wait_smem_to_gmem(0)
        return done[0] + product.steps * product.tiles, done[1] + product.steps

    return lax.fori_loop(0, items.total(), one, done)


def _multiply_step(
    step: Array,
    accumulators: tuple[Ref, ...],
    done: tuple[Array, Array],
    smem: Smem,
    tile: Array | int,
    tuning: BlockTuning,
) -> None:
    """One step along the depth: a tile of activations times as many tiles of weights."""
    used = done[0] + step * len(accumulators)
    rows = lax.rem(done[1] + step, jnp.int32(tuning.activation_ring))
    slots = [lax.rem(used + part, jnp.int32(tuning.ring)) for part in range(len(accumulators))]
    plgpu.barrier_wait(smem.rows_ready.at[rows])
    for accumulator, slot in zip(accumulators, slots):
        plgpu.barrier_wait(smem.ring_ready.at[slot])
        plgpu.wgmma(accumulator, smem.rows.at[rows, tile], smem.ring.at[slot])
    plgpu.wgmma_wait(0)
    for slot in slots:
        plgpu.barrier_arrive(smem.ring_free.at[slot])
    plgpu.barrier_arrive(smem.rows_free.at[rows])


def _store(value: Array, staged: Ref, target: Ref) -> None:
    """Stores the live rows of [64, 64] by way of shared memory."""
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)
    staged[...] = value.astype(staged.dtype)
    plgpu.commit_smem()
    plgpu.copy_smem_to_gmem(staged.at[pl.ds(0, target.shape[0])], target)


def _store_gated(sums: tuple[Array, ...], target: Ref, column: Array, staged: Ref) -> None:
    """silu(gate) * up of an item, with gate and up rounded first, as the graph does."""
    half = len(sums) // 2
    for tile, (gate, up) in enumerate(zip(sums[:half], sums[half:])):
        gate, up = (x.astype(jnp.bfloat16).astype(jnp.float32) for x in (gate, up))
        first = (column * half + tile) * TILE
        _store(gate / (1 + jnp.exp(-gate)) * up, staged, target.at[:, pl.ds(first, TILE)])


def _normalise(
    sums: Ref,
    x: Ref,
    weight: Ref,
    targets: tuple[Ref, Ref],
    barrier: int,
    deal: Items,
    tile: Array | int,
    shape: BlockShape,
    grid: Grid,
) -> None:
    """x plus the sum over splits, and its norm, of the rows block, block + num_blocks, ...

    The sums are there after `barrier`; the norm's weight is fetched before it. Of a block's
    warpgroups the first does it, for they would share the memory for sums over threads.
    """
    layout = plgpu.Layout.WG_STRIDED((shape.embed,), vec_size=vector_size(shape.embed))
    load = partial(plgpu.load, layout=layout)
    factor = load(weight).astype(jnp.float32)
    grid.wait(barrier)

    def one(index: Array, _: None) -> None:
        row = deal.block + index * deal.num_blocks
        total = load(sums.at[0, row])
        for split in range(1, sums.shape[0]):
            total += load(sums.at[split, row])
        total = total.astype(jnp.bfloat16).astype(jnp.float32)
        mixed = (load(x.at[row]).astype(jnp.float32) + total).astype(jnp.bfloat16)
        targets[0][row] = mixed
        wide = mixed.astype(jnp.float32)
        inverse = lax.rsqrt(jnp.sum(wide * wide) / shape.embed + shape.eps)
        targets[1][row] = (wide * inverse * factor).astype(jnp.bfloat16)

    left = shape.rows - deal.block + (deal.num_blocks - 1)
    count = lax.div(left, jnp.int32(deal.num_blocks))
    if grid.expected > deal.num_blocks:
        count = jnp.where(tile == 0, count, 0)
    lax.fori_loop(0, count, one, None)


def vector_size(size: int) -> int:
    """Elements that a thread of a warpgroup loads at once from a line of `size`; 0 if it can't."""
    return next((n for n in (4, 2, 1) if size % (128 * n) == 0), 0)
