"""The abstract parameter tree: init, shardings, loading and byte counts all come from it."""

import math
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, UInt32


@dataclass(frozen=True)
class ParamSpec:
    """One weight before it exists.

    Attributes:
        shape: of the array.
        dtype: name of its element type.
        axes: logical axis of each dimension, or None; `octavo.model.sharding` maps them to a mesh.
        init: "random" (mean 0, deviation `scale`), "ones" or "zeros".
        scale: deviation of a random init.
    """

    shape: tuple[int, ...]
    dtype: str
    axes: tuple[str | None, ...]
    init: str = "random"
    scale: float = 0.02

    def __post_init__(self) -> None:
        if len(self.axes) != len(self.shape):
            raise ValueError(f"{len(self.axes)} axes for a weight of shape {self.shape}")
        if self.init not in ("random", "ones", "zeros"):
            raise ValueError(f"init {self.init!r} is not one of random, ones, zeros")

    @property
    def nbytes(self) -> int:
        """Bytes of the whole array."""
        return math.prod(self.shape) * jnp.dtype(self.dtype).itemsize


def is_spec(node: Any) -> bool:
    """Whether a tree node is a ParamSpec, for `is_leaf`."""
    return isinstance(node, ParamSpec)


def init_leaf(spec: ParamSpec, key: Array, index: UInt32[Array, ""]) -> Array:
    """One random (or constant) weight, drawn from (key, index) whatever its sharding.

    A hash of the element's number rather than jax.random: threefry over a large array takes XLA
    seconds to compile for a CPU, per shape, and these weights only have to be of the right size.
    """
    dtype = jnp.dtype(spec.dtype)
    if spec.init == "ones":
        return jnp.ones(spec.shape, dtype)
    if spec.init == "zeros":
        return jnp.zeros(spec.shape, dtype)
    words = jax.random.key_data(key)
    seed = _scramble(words[0] ^ _scramble(words[-1] + _scramble(index)))
    number = jnp.zeros(spec.shape, jnp.uint32)
    for axis, size in enumerate(spec.shape):
        number = number * jnp.uint32(size) + lax.broadcasted_iota(jnp.uint32, spec.shape, axis)
    bits = _scramble(_scramble(number) ^ seed)
    unit = (bits >> jnp.uint32(8)).astype(jnp.float32) * jnp.float32(2**-23) - 1.0
    return (unit * jnp.float32(math.sqrt(3) * spec.scale)).astype(dtype)


def _scramble(word: Array) -> Array:
    """A bijection of 32-bit words that spreads every bit: MurmurHash3's finaliser (A. Appleby)."""
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35)):
        word = (word ^ (word >> jnp.uint32(shift))) * jnp.uint32(factor)
    return word ^ (word >> jnp.uint32(16))


def init_params(specs: Any, key: Array) -> Any:
    """Random weights for a tree of specs; a leaf's draw depends on its place in the tree alone."""
    leaves, tree = jax.tree.flatten(specs, is_leaf=is_spec)
    numbers = jnp.arange(len(leaves), dtype=jnp.uint32)
    return tree.unflatten([init_leaf(spec, key, index) for spec, index in zip(leaves, numbers)])


def param_bytes(specs: Any) -> int:
    """Bytes of all weights of a tree of specs."""
    return sum(spec.nbytes for spec in jax.tree.leaves(specs, is_leaf=is_spec))


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
