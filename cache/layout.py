"""Shape of the paged KV cache, and the cache itself as a pytree."""

from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float


@dataclass(frozen=True)
class CacheLayout:
    """What a cache of given size looks like; the same numbers price it before it is allocated.

    Attributes:
        num_layers: layers, each with its own k and v array.
        num_pages: pages, the padding page (0) included.
        page_size: tokens a page.
        num_kv_heads: KV heads, after any replication for tensor parallelism.
        head_dim: size of a head.
        dtype: name of the element type, e.g. "bfloat16".
    """

    num_layers: int
    num_pages: int
    page_size: int
    num_kv_heads: int
    head_dim: int
    dtype: str

    @property
    def layer_shape(self) -> tuple[int, int, int, int]:
        """[N, p, K, D] of one k or v array."""
        return (self.num_pages, self.page_size, self.num_kv_heads, self.head_dim)

    @property
    def logical_axes(self) -> tuple[str | None, ...]:
        """Logical axis of each dimension of a layer's array, for the sharding rules."""
        return ("pages", None, "kv_heads", None)

    @property
    def page_bytes(self) -> int:
        """Bytes of one page over all layers, keys and values."""
        elements = self.page_size * self.num_kv_heads * self.head_dim
        return 2 * self.num_layers * elements * jnp.dtype(self.dtype).itemsize


@partial(jax.tree_util.register_dataclass, data_fields=["k", "v"], meta_fields=[])
@dataclass(frozen=True)
class LayerCache:
    """One layer's keys and values."""

    k: Float[Array, "N p K D"]
    v: Float[Array, "N p K D"]


@partial(jax.tree_util.register_dataclass, data_fields=["layers"], meta_fields=[])
@dataclass(frozen=True)
class KVCache:
    """Every layer's cache; donated to each step and returned by it, updated in place."""

    layers: tuple[LayerCache, ...]


def init_cache(layout: CacheLayout) -> KVCache:
    """A zeroed cache. Under jit with out_shardings it is created directly on its devices."""
    shape, dtype = layout.layer_shape, jnp.dtype(layout.dtype)
    return KVCache(
        tuple(
            LayerCache(jnp.zeros(shape, dtype), jnp.zeros(shape, dtype))
            for _ in range(layout.num_layers)
        )
    )
