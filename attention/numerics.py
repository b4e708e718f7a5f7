"""Arithmetic that the implementations share."""

from functools import partial

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, DTypeLike, Float

from octavo.attention.contract import AttentionSpec

MASKED = -1e30
"""Logit of a masked key and maximum of no keys: finite, so that differences are never NaN."""


def scaled(logits: Float[Array, "..."], spec: AttentionSpec) -> Float[Array, "..."]:
    """float32 q·k times the scale, under the soft cap."""
    logits = logits * spec.scale
    return logits if spec.soft_cap is None else spec.soft_cap * jnp.tanh(logits / spec.soft_cap)


def product_dtype(queries: DTypeLike, pages: DTypeLike) -> DTypeLike:
    """Type in which queries, pages and weights are multiplied: theirs, float32 if they differ."""
    return queries if jnp.dtype(queries) == jnp.dtype(pages) else jnp.float32


def product(
    subscripts: str, left: Float[Array, "..."], right: Float[Array, "..."]
) -> Float[Array, "..."]:
    """Einsum of equal types to float32; float32 operands are not rounded to tf32 on a GPU."""
    exact = partial(_exact_product, subscripts)
    if left.dtype == jnp.float32:
        return exact(left, right)
    # XLA's CPU backend compiles some 16-bit products that it then can't run.
    narrow = partial(jnp.einsum, subscripts, preferred_element_type=jnp.float32)
    return lax.platform_dependent(left, right, cpu=exact, default=narrow)


def _exact_product(subscripts: str, left: Array, right: Array) -> Array:
    left, right = left.astype(jnp.float32), right.astype(jnp.float32)
    return jnp.einsum(subscripts, left, right, precision=lax.Precision.HIGHEST)
