"""What a decode step does to raw queries and keys before attention, as data and in plain JAX.

A front is the optional root-mean-square norm of each head (qk-norm) and the rotary embedding. The
decode kernel (`mosaic_front.py`) does both on the way into shared memory; `front_reference` is
what it must equal.
"""

from dataclasses import dataclass, field
from functools import partial

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float


@partial(
    jax.tree_util.register_dataclass,
    data_fields=["cos", "sin", "q_norm", "k_norm"],
    meta_fields=["eps", "offset"],
)
@dataclass(frozen=True)
class Front:
    """Norm and rotation of a step's queries and keys.

    Attributes:
        cos, sin: of each token's angles; dimension i turns with i + R.
        q_norm, k_norm: weights of the norms over a head; both or neither.
        eps: added to the mean square.
        offset: added to the weights.
    """

    cos: Float[Array, "T R"]
    sin: Float[Array, "T R"]
    q_norm: Float[Array, " D"] | None = None
    k_norm: Float[Array, " D"] | None = None
    eps: float = field(default=1e-6)
    offset: float = field(default=0.0)


def front_reference(
    qkv: Float[Array, "T K G_plus_2 D"], front: Front
) -> tuple[Float[Array, "T K G D"], Float[Array, "T K D"], Float[Array, "T K D"]]:
    """Queries and keys normalised and turned, and the values as they are.

    Each KV head has its query heads, then its key, then its value. Both stages compute in float32
    and round to qkv's type.
    """
    q, k, v = qkv[:, :, :-2], qkv[:, :, -2:-1], qkv[:, :, -1]
    if front.q_norm is not None and front.k_norm is not None:
        q = _normalised(q, front.q_norm, front)
        k = _normalised(k, front.k_norm, front)
    return _turned(q, front), _turned(k, front)[:, :, 0], v


def _normalised(x: Array, weight: Array, front: Front) -> Array:
    wide = x.astype(jnp.float32)
    inverse = lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + front.eps)
    factor = (weight.astype(jnp.float32) + front.offset).reshape(1, 1, 1, -1)
    return (wide * inverse * factor).astype(x.dtype)


def _turned(x: Array, front: Front) -> Array:
    cos, sin = front.cos[:, None, None], front.sin[:, None, None]
    size = front.cos.shape[1]
    first = x[..., :size].astype(jnp.float32)
    second = x[..., size : 2 * size].astype(jnp.float32)
    turned = (first * cos - second * sin, second * cos + first * sin)
    return jnp.concatenate(
        [*(half.astype(x.dtype) for half in turned), x[..., 2 * size :]], axis=-1
    )
