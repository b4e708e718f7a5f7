"""Which logical axis of a weight or cache lies on which mesh axis; one table for all families."""

import math
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from octavo.cache.layout import CacheLayout, KVCache, LayerCache
from octavo.model.config import ModelConfig
from octavo.model.params import ParamSpec, is_spec

TENSOR = "tensor"
"""The mesh axis of tensor parallelism: KV heads with their query heads, MLP width, vocabulary."""

RULES = {"kv_heads": TENSOR, "mlp": TENSOR, "vocab": TENSOR}
"""Logical axis -> mesh axis; axes that are not listed are held whole by every device."""

MAY_REPLICATE = frozenset({"vocab"})
"""Axes held whole where the mesh doesn't divide them; elsewhere that is an error."""


def make_mesh(size: int) -> Mesh:
    """A mesh of the first `size` devices under the axis "tensor"; refused if there are fewer."""
    devices = jax.devices()
    if not 1 <= size <= len(devices):
        raise ValueError(f"mesh tensor={size} needs {size} devices; {len(devices)} are visible")
    return jax.make_mesh((size,), (TENSOR,), axis_types=(AxisType.Auto,), devices=devices[:size])


def host_mesh() -> Mesh:
    """A mesh of the host alone, whatever devices there are beside it."""
    devices = jax.devices("cpu")[:1]
    return jax.make_mesh((1,), (TENSOR,), axis_types=(AxisType.Auto,), devices=devices)


def partition(shape: tuple[int, ...], axes: tuple[str | None, ...], mesh: Mesh) -> PartitionSpec:
    """Mesh axis of each dimension; one that the mesh can't divide is refused with the numbers."""
    parts: list[str | None] = []
    for size, axis in zip(shape, axes):
        target = RULES.get(axis) if axis else None
        if target and size % mesh.shape[target]:
            if axis not in MAY_REPLICATE:
                raise ValueError(f"{axis} {size} can't be split over {target}={mesh.shape[target]}")
            target = None
        parts.append(target)
    return PartitionSpec(*parts)


def sharding_tree(specs: Any, mesh: Mesh) -> Any:
    """The NamedSharding of every weight in a tree of ParamSpec."""

    def place(spec: ParamSpec) -> NamedSharding:
        return NamedSharding(mesh, partition(spec.shape, spec.axes, mesh))

    return jax.tree.map(place, specs, is_leaf=is_spec)


def device_bytes(specs: Any, mesh: Mesh) -> int:
    """Bytes of the weights that each device holds: its part of those split, all of the others."""
    leaves = jax.tree.leaves(specs, is_leaf=is_spec)
    shapes = [sharding_tree(spec, mesh).shard_shape(spec.shape) for spec in leaves]
    return sum(
        math.prod(shape) * jnp.dtype(spec.dtype).itemsize for shape, spec in zip(shapes, leaves)
    )


def cache_sharding(layout: CacheLayout, mesh: Mesh) -> KVCache:
    """The sharding of each array of a cache, as a tree of the cache's shape."""
    spec = partition(layout.layer_shape, layout.logical_axes, mesh)
    layer = LayerCache(NamedSharding(mesh, spec), NamedSharding(mesh, spec))  # pyright: ignore[reportArgumentType]
    return KVCache((layer,) * layout.num_layers)


def kv_replicas_for(config: ModelConfig, size: int) -> int:
    """Copies of each KV head that tensor=size needs: 1 if the heads divide, else size / heads.

    Refused where neither divides the other.
    """
    heads = config.num_kv_heads // config.kv_replicas
    if heads % size == 0:
        return 1
    if size % heads:
        raise ValueError(f"{heads} KV heads can't be split over tensor={size}")
    return size // heads
