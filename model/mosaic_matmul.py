"""The products of many rows (more than a decode step's block kernel takes) in Pallas Mosaic GPU.

A persistent grid of thread blocks, one a multiprocessor, in clusters of two that share the weights
of a tile; in each block one warpgroup fetches by TMA and two multiply tiles of 64 rows by up to 256
columns. What XLA does in passes over memory after a product, the results do on their way out:
silu(gate) * up, and the sum with the residual. `matmul_plan` has the tiles, `matmul_kernel` what a
block does. TMA reads zeros beyond a tile's last row and leaves out stores there.
"""

from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.extend.core import ClosedJaxpr, jaxpr_as_fun
from jaxtyping import Array, BFloat16

from octavo.attention.hopper import swizzled
from octavo.model.matmul_kernel import WG_ROWS, matmul_kernel
from octavo.model.matmul_plan import (
    CLUSTER,
    ROWS,
    STEP,
    Epilogue,
    MatmulShape,
    MatmulTuning,
    choose,
    cut,
)

ROWS_OF, SIZES_OF = 8, 64
"""What rows are a multiple of, and what depth and width are: Mosaic cuts arrays in memory into
swizzle tiles of 8 lines of 64 elements, and none may be cut off."""


def matmul(
    x: BFloat16[Array, "M K"],
    weight: BFloat16[Array, "K N"],
    residual: BFloat16[Array, "M N"] | None = None,
    *,
    gated: bool = False,
    tuning: MatmulTuning | None = None,
) -> BFloat16[Array, "M N"]:
    """x @ weight; or residual + x @ weight; or, gated, silu(x @ gate) * (x @ up) as [M, N / 2].

    A gated weight has the gate's columns, then up's. Products are rounded to bfloat16 before they
    are added or gated. By the tuning in use (`choose`), or by another.

    Raises:
        NotImplementedError: rows that are no multiple of ROWS_OF, a depth or width that is none of
            SIZES_OF, or a tuning that does not divide.
    """
    depth, width = weight.shape
    width = width // 2 if gated else width
    if len(x) % ROWS_OF or depth % SIZES_OF or width % SIZES_OF:
        sizes = f"{len(x)} rows by [{depth}, {width}]"
        raise NotImplementedError(f"{sizes}: takes multiples of {ROWS_OF} rows, {SIZES_OF} columns")
    epilogue = Epilogue.GATED if gated else Epilogue.PLAIN
    epilogue = epilogue if residual is None else Epilogue.RESIDUAL
    tuning = tuning or choose(len(x), depth, width, epilogue)
    if tuning.splits == 1:
        operands = (x, weight) if residual is None else (x, weight, residual)
        return _launch(operands, MatmulShape(len(x), depth, width, epilogue), tuning)
    if gated:
        raise NotImplementedError("gate and up are not summed up in splits")
    sums = _launch((x, weight), MatmulShape(len(x), depth, width, Epilogue.SUMS), tuning)
    total = sums[0]
    for split in range(1, tuning.splits):
        total = total + sums[split]
    out = total.astype(x.dtype)
    return out if residual is None else residual + out


def _launch(operands: tuple[Array, ...], shape: MatmulShape, tuning: MatmulTuning) -> Array:
    avals = tuple(jax.ShapeDtypeStruct(array.shape, array.dtype) for array in operands)
    traced = _traced_kernel(avals, shape, tuning, jax.sharding.get_abstract_mesh())
    return jaxpr_as_fun(traced)(*operands)[0]


@cache
def _traced_kernel(
    avals: tuple[jax.ShapeDtypeStruct, ...],
    shape: MatmulShape,
    tuning: MatmulTuning,
    mesh: jax.sharding.AbstractMesh,
) -> ClosedJaxpr:
    """The kernel's jaxpr, one object for all layers alike: XLA is then given its code once."""
    del mesh  # part of the key only: a trace belongs to the mesh it was made under
    num_clusters = min(tuning.clusters, cut(shape, tuning).items)
    sums = shape.epilogue is Epilogue.SUMS
    out = (tuning.splits, shape.rows, shape.width) if sums else (shape.rows, shape.width)
    kernel = plgpu.kernel(
        partial(matmul_kernel, shape=shape, tuning=tuning, num_clusters=num_clusters),
        out_type=[jax.ShapeDtypeStruct(out, jnp.float32 if sums else jnp.bfloat16)],
        grid=(num_clusters,),
        grid_names=("cluster",),
        cluster=(CLUSTER,),
        cluster_names=("block",),
        num_threads=3,
        thread_name="wg",
        scratch_types=_scratch(shape, tuning),
        compiler_params=plgpu.CompilerParams(approx_math=True, reduction_scratch_bytes=0),
        kernel_name=f"matmul_{shape.epilogue.value}",
    )
    return jax.make_jaxpr(kernel)(*avals)


def _scratch(shape: MatmulShape, tuning: MatmulTuning) -> dict[str, Any]:
    """Shared memory and barriers, by the names of `Smem`."""
    stages, parts, sections = tuning.stages, shape.parts, cut(shape, tuning).sections
    widths = [section.columns // parts for section in sections]
    # Lines of 128 bytes, or of 64 where a width is no multiple of that.
    lines = [64 if width % 64 == 0 else 32 for width in widths]
    weights = [
        swizzled((stages, parts, STEP, width), jnp.bfloat16, line)
        for width, line in zip(widths, lines)
    ]
    # A wgmma's operands have lines of one length.
    rows = [swizzled((stages, ROWS, STEP), jnp.bfloat16, line) for line in lines]
    if shape.epilogue is Epilogue.SUMS:
        staged = swizzled((2, 2, WG_ROWS, 32), jnp.float32, 32)
    else:
        staged = swizzled((2, 2, WG_ROWS, min(lines)), jnp.bfloat16, min(lines))
    return {
        "rows": plgpu.RefUnion(*rows) if len(rows) > 1 else rows[0],
        "weights": plgpu.RefUnion(*weights) if len(weights) > 1 else weights[0],
        "staged": staged,
        "ready": plgpu.Barrier(num_arrivals=1 + parts, num_barriers=stages),
        "free": plgpu.ClusterBarrier(
            collective_axes=("block",), num_arrivals=2, num_barriers=stages
        ),
        "fetched": plgpu.Barrier(num_barriers=4),
    }
