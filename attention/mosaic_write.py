"""The write of a step's keys and values into their pages, in place, in Pallas Mosaic GPU.

A slot's key (all KV heads) is one contiguous run of bytes: a block fetches the keys and values of a
few neighbouring tokens and stores each where it belongs, all by TMA. Padding tokens are skipped.
XLA's scatters of the same took 70 us a layer at 8,192 tokens on an H200, seven times their bytes'.
"""

from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, Int32

from octavo.attention.contract import PADDING_PAGE
from octavo.attention.mosaic_decode import TMA_BYTES, Ref
from octavo.cache.layout import LayerCache

BATCHED_FROM = 1024
"""Tokens from which a block takes several; below, each has a block and so the shortest way."""

BATCH = 8

STRIDE_BYTES = 16
"""What strides in global memory are multiples of."""

STAGED_BYTES = 192 * 1024
"""Shared memory a block may take for the tokens that it stages."""

MAX_BOX = 256
"""Longest side of a TMA copy."""


def write_refusal(layer: LayerCache) -> str | None:
    """Why the kernel can't write these pages; None if it can."""
    _, _, heads, head_dim = layer.k.shape
    if (layer.k.shape, layer.k.dtype) != (layer.v.shape, layer.v.dtype):
        return f"keys {layer.k.shape} and values {layer.v.shape} differ"
    size = heads * head_dim * layer.k.dtype.itemsize
    if size % TMA_BYTES or head_dim * layer.k.dtype.itemsize % STRIDE_BYTES:
        return f"a slot has {size} bytes, {heads} times {head_dim}: no whole lines of {TMA_BYTES}"
    if max(heads, head_dim) > MAX_BOX:
        return f"{heads} KV heads of {head_dim} exceed {MAX_BOX}"
    if 2 * size * BATCH > STAGED_BYTES:
        return f"{BATCH} slots of {2 * size} bytes exceed {STAGED_BYTES}"
    return None


def write_mosaic(
    layer: LayerCache, k: Float[Array, "T K D"], v: Float[Array, "T K D"], slots: Int32[Array, " T"]
) -> LayerCache:
    """The layer with each token's key and value in its slot, on a Hopper GPU.

    k and v in the pages' type. Raises NotImplementedError for what `write_refusal` names.
    """
    if reason := write_refusal(layer):
        raise NotImplementedError(reason)
    pages, page_size = layer.k.shape[:2]
    flat = (pages * page_size, *layer.k.shape[2:])
    refs = [jax.new_ref(array.reshape(flat)) for array in (layer.k, layer.v)]
    kernel = _kernel_for(k.shape, jnp.dtype(k.dtype), page_size, jax.sharding.get_abstract_mesh())
    kernel(slots, k, v, *refs)
    return LayerCache(*(jax.freeze(ref).reshape(layer.k.shape) for ref in refs))


@cache
def _kernel_for(
    shape: tuple[int, ...], dtype: jnp.dtype, page_size: int, mesh: jax.sharding.AbstractMesh
) -> Any:
    del mesh  # part of the key only, as of the other kernels' traces
    tokens = shape[0]
    batch = BATCH if tokens >= BATCHED_FROM and tokens % BATCH == 0 else 1
    staged = plgpu.SMEM((batch, *shape[1:]), dtype)
    return plgpu.kernel(
        partial(_kernel, batch=batch, page_size=page_size),
        out_type=(),
        grid=(tokens // batch,),
        grid_names=("block",),
        scratch_types={"keys": staged, "values": staged, "ready": plgpu.Barrier(num_arrivals=2)},
        kernel_name="kv_write",
    )


def _kernel(
    slots: Ref,  # [T]
    k: Ref,  # [T, K, D]
    v: Ref,  # [T, K, D]
    k_pages: Ref,  # [N * p, K, D]
    v_pages: Ref,  # [N * p, K, D]
    *,
    keys: Ref,  # [batch, K, D]
    values: Ref,  # [batch, K, D]
    ready: Ref,
    batch: int,
    page_size: int,
) -> None:
    first = lax.axis_index("block") * batch
    for source, staged in ((k, keys), (v, values)):
        plgpu.copy_gmem_to_smem(source.at[pl.ds(first, batch)], staged, ready)
    targets = [slots[first + token] for token in range(batch)]
    plgpu.barrier_wait(ready)
    for token, slot in enumerate(targets):

        @pl.when(slot >= (PADDING_PAGE + 1) * page_size)
        def _store(token: int = token, slot: Array = slot) -> None:
            plgpu.copy_smem_to_gmem(keys.at[token], k_pages.at[slot])
            plgpu.copy_smem_to_gmem(values.at[token], v_pages.at[slot])

    plgpu.wait_smem_to_gmem(0)
