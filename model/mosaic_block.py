"""Everything between two attentions of a decode step as one persistent Pallas Mosaic-GPU kernel.

    out projection, + residual, norm, gate and up, silu(gate) * up, down, + residual, norm, qkv

One launch a layer, one block a multiprocessor. In each block one warpgroup streams the block's
share of all four matrices through a deep ring in shared memory, in an order that depends on nothing
computed, so that it runs ahead of the phases; a second one fetches activations, which wait for the
phase before; a third multiplies and, in the phases between products, adds up partial sums, adds the
residual and normalises. Phases are divided by barriers over the whole grid. While a barrier and a
norm pass, the ring fills: memory is never idle. `block_plan` has the cuts.

Rows are the 64 rows of a wgmma tile; a second warpgroup multiplies rows 65 to 128. Rows that are
not there are neither loaded nor stored, and what the tile holds in their place reaches no other.

All blocks must be on the device at once: they wait for each other. Nothing that waits for this
kernel may run beside it (two such kernels at once, as MPS allows, could wait for ever).
"""

from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.extend.core import ClosedJaxpr, jaxpr_as_fun
from jaxtyping import Array, Int32

from octavo.attention.hopper import swizzled
from octavo.model.block_kernel import NUM_BARRIERS, BlockInputs, BlockOutputs, block_kernel
from octavo.model.block_plan import TILE, BlockShape, BlockTuning, Product


def no_arrivals() -> Int32[Array, " barriers"]:
    """Arrivals at the barriers of the grid before a launch; one that follows takes its outputs'."""
    return jnp.zeros((NUM_BARRIERS,), jnp.int32)


def run_block(
    inputs: BlockInputs, shape: BlockShape, tuning: BlockTuning, arrivals: Int32[Array, " barriers"]
) -> BlockOutputs:
    """One launch. The sums of the splits of `qkv_sums` are left to the caller, in their order."""
    operands = (*(array for array in inputs if array is not None), arrivals)
    avals = tuple(jax.ShapeDtypeStruct(array.shape, array.dtype) for array in operands)
    traced = _traced_kernel(avals, shape, tuning, jax.sharding.get_abstract_mesh())
    return BlockOutputs(*jaxpr_as_fun(traced)(*operands))


@cache
def _traced_kernel(
    avals: tuple[jax.ShapeDtypeStruct, ...],
    shape: BlockShape,
    tuning: BlockTuning,
    mesh: jax.sharding.AbstractMesh,
) -> ClosedJaxpr:
    """The kernel's jaxpr, one object for all layers alike: XLA is then given its code once."""
    del mesh  # part of the key only: a trace belongs to the mesh it was made under
    if tuning.interpreted:
        layout: dict[str, Any] = {"cluster": (tuning.num_blocks,), "cluster_names": ("block",)}
    else:
        layout = {"grid": (tuning.num_blocks,), "grid_names": ("block",)}
    kernel = plgpu.kernel(
        partial(block_kernel, num_inputs=len(avals) - 1, shape=shape, tuning=tuning),
        out_type=_out_types(shape),
        num_threads=tuning.row_tiles + 2,
        thread_name="wg",
        scratch_types=_scratch(tuning),
        compiler_params=plgpu.CompilerParams(approx_math=True, reduction_scratch_bytes=2048),
        kernel_name="decode_block",
        **layout,
    )

    def launch(*operands: Array) -> list[Array]:
        *inputs, arrivals = operands
        return kernel(*inputs, jax.new_ref(arrivals))

    return jax.make_jaxpr(launch)(*avals)


def _out_types(shape: BlockShape) -> list[jax.ShapeDtypeStruct]:
    plan, rows = shape.plan, shape.rows

    def sums(product: Product) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((product.splits, rows, product.width), jnp.float32)

    hidden = jax.ShapeDtypeStruct((rows, shape.embed), jnp.bfloat16)
    gated = jax.ShapeDtypeStruct((rows, plan.down.depth), jnp.bfloat16)
    arrivals = jax.ShapeDtypeStruct((NUM_BARRIERS,), jnp.int32)
    types = [arrivals, sums(plan.out), hidden, hidden, gated, sums(plan.down), hidden, hidden]
    return types if plan.qkv is None else [*types, sums(plan.qkv)]


def _scratch(tuning: BlockTuning) -> dict[str, Any]:
    """Shared memory and barriers, by the names of `Smem`."""
    tiles, activations, parts = tuning.ring, tuning.activation_ring, tuning.row_tiles
    scratch = {
        "ring": swizzled((tiles, TILE, TILE), jnp.bfloat16, 64),
        "rows": swizzled((activations, parts, TILE, TILE), jnp.bfloat16, 64),
        "sums": swizzled((parts, TILE, TILE), jnp.float32, 32),
        "gated": swizzled((parts, TILE, TILE), jnp.bfloat16, 64),
        "ring_ready": plgpu.Barrier(num_barriers=tiles),
        "ring_free": plgpu.Barrier(num_arrivals=parts, num_barriers=tiles),
        "rows_ready": plgpu.Barrier(num_arrivals=parts, num_barriers=activations),
        "rows_free": plgpu.Barrier(num_arrivals=parts, num_barriers=activations),
    }
    if tuning.interpreted:
        axes = ("block",)
        scratch["barriers"] = plgpu.ClusterBarrier(
            collective_axes=axes, num_barriers=NUM_BARRIERS, num_arrivals=parts
        )
    return scratch
