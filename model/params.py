"""The abstract parameter tree: init, shardings, loading and byte counts all come from it."""

import math
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array


@dataclass(frozen=True)
class ParamSpec:
    """One weight before it exists.

    Attributes:
        shape: of the array.
        dtype: name of its element type.
        axes: logical axis of each dimension, or None; `octavo.model.sharding` maps them to a mesh.
        init: "normal" (deviation `scale`), "ones" or "zeros".
        scale: deviation of a normal init.
    """

    shape: tuple[int, ...]
    dtype: str
    axes: tuple[str | None, ...]
    init: str = "normal"
    scale: float = 0.02

    def __post_init__(self) -> None:
        if len(self.axes) != len(self.shape):
            raise ValueError(f"{len(self.axes)} axes for a weight of shape {self.shape}")
        if self.init not in ("normal", "ones", "zeros"):
            raise ValueError(f"init {self.init!r} is not one of normal, ones, zeros")

    @property
    def nbytes(self) -> int:
        """Bytes of the whole array."""
        return math.prod(self.shape) * jnp.dtype(self.dtype).itemsize


def is_spec(node: Any) -> bool:
    """Whether a tree node is a ParamSpec, for `is_leaf`."""
    return isinstance(node, ParamSpec)


def init_leaf(spec: ParamSpec, key: Array) -> Array:
    """One random (or constant) weight."""
    dtype = jnp.dtype(spec.dtype)
    if spec.init == "ones":
        return jnp.ones(spec.shape, dtype)
    if spec.init == "zeros":
        return jnp.zeros(spec.shape, dtype)
    return jax.random.normal(key, spec.shape, dtype) * jnp.asarray(spec.scale, dtype)


def init_params(specs: Any, key: Array) -> Any:
    """Random weights for a tree of specs; a leaf's draw depends on its place in the tree alone."""
    leaves, tree = jax.tree.flatten(specs, is_leaf=is_spec)
    keys = [jax.random.fold_in(key, index) for index in range(len(leaves))]
    return tree.unflatten([init_leaf(spec, key) for spec, key in zip(leaves, keys)])


def param_bytes(specs: Any) -> int:
    """Bytes of all weights of a tree of specs."""
    return sum(spec.nbytes for spec in jax.tree.leaves(specs, is_leaf=is_spec))


def param_count(specs: Any) -> int:
    """Number of weights in a tree of specs."""
    return sum(math.prod(spec.shape) for spec in jax.tree.leaves(specs, is_leaf=is_spec))


def cast(params: Any, dtype: str) -> Any:
    """The same tree (of specs or of arrays) in another element type."""
    return jax.tree.map(
        lambda leaf: replace(leaf, dtype=dtype) if is_spec(leaf) else leaf.astype(dtype),
        params,
        is_leaf=is_spec,
    )


def shape_dtypes(specs: Any, shardings: Any | None = None) -> Any:
    """The tree as jax.ShapeDtypeStruct, for lowering without weights."""
    if shardings is None:
        return jax.tree.map(
            lambda spec: jax.ShapeDtypeStruct(spec.shape, spec.dtype), specs, is_leaf=is_spec
        )
    return jax.tree.map(
        lambda spec, sharding: jax.ShapeDtypeStruct(spec.shape, spec.dtype, sharding=sharding),
        specs,
        shardings,
        is_leaf=is_spec,
    )
