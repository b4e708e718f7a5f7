"""What kernels must know of the chip they are written for, an H200, and of its shared memory."""

# pyright: reportAbstractUsage=false
# Pallas leaves an abstract method on the transforms that it exports.

from typing import Any

import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import DTypeLike

MULTIPROCESSORS = 132
"""Thread blocks of a persistent grid, one on each."""

SMEM_BYTES = 227 * 1024
"""Shared memory that a thread block may have."""


def swizzled(shape: tuple[int, ...], dtype: DTypeLike, columns: int, *, rows: int = 8) -> Any:
    """Shared memory in lines of `columns` (32, 64 or 128 bytes), as TMA and wgmma take it.

    `rows` of them are a tile. The last two dimensions of `shape` are multiples of both.
    """
    line = columns * jnp.dtype(dtype).itemsize
    transforms = (plgpu.TilingTransform((rows, columns)), plgpu.SwizzleTransform(line))
    return plgpu.SMEM(shape, dtype, transforms=transforms)
