"""What a decoder layer does before and after its attention, as plain functions of its weights.

`decoder` lays the weights out; T tokens, E embed, K KV heads of G query heads each, D head dim.
"""

from typing import Any

import jax
from jaxtyping import Array, Float

from octavo.model.config import ModelConfig
from octavo.model.layers import gated_mlp, project, rms_norm

Params = dict[str, Any]


@jax.named_scope("qkv")
def qkv_projection(
    weights: Params, config: ModelConfig, x: Float[Array, "T E"]
) -> Float[Array, "T K G_plus_2 D"]:
    """Each KV head's query heads, then its key and its value, of norm(x)."""
    normed = rms_norm(x, weights["attn_norm"], config.norm_eps, config.norm_offset)
    return project(normed, weights["qkv"], weights.get("qkv_bias"))


@jax.named_scope("out")
def out_projection(
    weights: Params, config: ModelConfig, x: Float[Array, "T E"], mixed: Float[Array, "T K G D"]
) -> Float[Array, "T E"]:
    """x + out(mixed), what attention mixed."""
    out = project(mixed, weights["out"], weights.get("out_bias"), dims=3)
    if config.post_norms:
        out = rms_norm(out, weights["attn_post_norm"], config.norm_eps, config.norm_offset)
    return x + out


@jax.named_scope("mlp")
def mlp(weights: Params, config: ModelConfig, x: Float[Array, "T E"]) -> Float[Array, "T E"]:
    """x + mlp(norm(x))."""
    out = gated_mlp(
        rms_norm(x, weights["mlp_norm"], config.norm_eps, config.norm_offset),
        weights["gate_up"],
        weights["down"],
        config.activation,
        weights.get("gate_up_bias"),
        weights.get("down_bias"),
    )
    if config.post_norms:
        out = rms_norm(out, weights["mlp_post_norm"], config.norm_eps, config.norm_offset)
    return x + out
