"""What a decoder layer does before and after its attention, as plain functions of its weights.

`decoder` lays the weights out; T tokens, E embed, K KV heads of G query heads each, D head dim.
`matmul` is "xla", or "mosaic" where `matmul_refusal` has nothing against it.
"""

from typing import Any

import jax
from jaxtyping import Array, Float

from octavo.model.config import ModelConfig
from octavo.model.layers import project, rms_norm
from octavo.model.products import gated_product, qkv_product, residual_product

Params = dict[str, Any]


@jax.named_scope("qkv")
def qkv_projection(
    weights: Params, config: ModelConfig, x: Float[Array, "T E"], matmul: str = "xla"
) -> Float[Array, "T K G_plus_2 D"]:
    """Each KV head's query heads, then its key and its value, of norm(x)."""
    normed = rms_norm(x, weights["attn_norm"], config.norm_eps, config.norm_offset)
    return qkv_product(normed, weights["qkv"], weights.get("qkv_bias"), matmul)


def qkv_heads(weights: Params, qkv: Float[Array, "T width"]) -> Float[Array, "T K G_plus_2 D"]:
    """A kernel's product with the matrix of qkv, cut into heads, with the bias if there is one."""
    heads, bias = qkv.reshape(len(qkv), *weights["qkv"].shape[1:]), weights.get("qkv_bias")
    return heads if bias is None else heads + bias[None]


@jax.named_scope("out")
def out_projection(
    weights: Params,
    config: ModelConfig,
    x: Float[Array, "T E"],
    mixed: Float[Array, "T K G D"],
    matmul: str = "xla",
) -> Float[Array, "T E"]:
    """x + out(mixed), what attention mixed."""
    return _add(weights, config, x, mixed, "out", "attn_post_norm", matmul)


@jax.named_scope("mlp")
def mlp(
    weights: Params, config: ModelConfig, x: Float[Array, "T E"], matmul: str = "xla"
) -> Float[Array, "T E"]:
    """x + down(activation(gate(norm(x))) * up(norm(x)))."""
    normed = rms_norm(x, weights["mlp_norm"], config.norm_eps, config.norm_offset)
    bias = weights.get("gate_up_bias")
    gated = gated_product(normed, weights["gate_up"], bias, config.activation, matmul)
    return _add(weights, config, x, gated, "down", "mlp_post_norm", matmul)


def _add(
    weights: Params,
    config: ModelConfig,
    x: Float[Array, "T E"],
    inner: Float[Array, "T *inner"],
    product: str,
    post_norm: str,
    matmul: str,
) -> Float[Array, "T E"]:
    """x + product(inner), normalised before the sum in models that do."""
    weight, bias = weights[product], weights.get(f"{product}_bias")
    if not config.post_norms:
        return residual_product(product, inner, weight, bias, x, matmul)
    out = project(inner, weight, bias, dims=inner.ndim - 1)
    return x + rms_norm(out, weights[post_norm], config.norm_eps, config.norm_offset)
