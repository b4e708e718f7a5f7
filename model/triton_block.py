"""Everything between two attentions of a decode step, as four products of few rows."""

from typing import Any

from jaxtyping import Array, Float, Int32

from octavo.model.config import ModelConfig
from octavo.model.layer import Params
from octavo.model.layers import rms_norm
from octavo.model.triton_plan import LayerTiles
from octavo.model.triton_products import Norm, added_product, gated_product, normed_product


def between_attentions(
    weights: Params,
    following: Params | None,
    final_norm: Float[Array, " E"],
    config: ModelConfig,
    x: Float[Array, "T E"],
    mixed: Float[Array, "T K G D"],
    counts: Int32[Array, " counts"],
    tiles: LayerTiles,
) -> tuple[Float[Array, "T E"], Any, Array]:
    """x after this layer, the following layer's qkv, and `counts` for that layer.

    After the last layer (`following` is None) the second result is norm(x). `counts` is
    `no_counts()` for the first layer.
    """
    rows, embed, eps = len(x), config.hidden_size, config.norm_eps
    attended = added_product(
        mixed.reshape(rows, -1), weights["out"].reshape(-1, embed), x, tiles.out, counts
    )
    norm = Norm(weights["mlp_norm"], attended.squares, eps)
    gate_up = weights["gate_up"].reshape(embed, -1)
    gated = gated_product(attended.y, norm, gate_up, tiles.gate_up)
    after = added_product(gated, weights["down"], attended.y, tiles.down, attended.counts)
    if following is None:
        return after.y, rms_norm(after.y, final_norm, eps, config.norm_offset), after.counts
    norm = Norm(following["attn_norm"], after.squares, eps)
    matrix = following["qkv"].reshape(embed, -1)
    qkv, counts = normed_product(after.y, norm, matrix, tiles.qkv, after.counts)
    qkv = qkv.reshape(rows, *following["qkv"].shape[1:])
    bias = following.get("qkv_bias")
    return after.y, qkv if bias is None else qkv + bias[None], counts
