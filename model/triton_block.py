"""Everything between two attentions of a decode step, as four products of few rows.

    x1 = x + mixed @ out
    h = silu(norm(x1) @ gate) * (norm(x1) @ up)
    x2 = x1 + h @ down
    qkv = norm(x2) @ the next layer's qkv

Each is one Pallas Triton kernel (`triton_products`), cut as `triton_plan` says. For the layers that
`decode_block` is for, on the same devices, of sizes that the tiles divide.
"""

from typing import Any

from jax.sharding import Mesh
from jaxtyping import Array, Float, Int32

from octavo.attention.mosaic import refuse_device
from octavo.model.config import ModelConfig
from octavo.model.decode_block import unlike_plain
from octavo.model.layer import Params, qkv_heads
from octavo.model.layers import rms_norm
from octavo.model.triton_plan import LayerTiles, choose
from octavo.model.triton_products import added_product, gated_product, normed_product


def triton_refusal(config: ModelConfig, mesh: Mesh | None = None) -> str | None:
    """Why no step of this model can use the kernels here; None if those of few rows can."""
    if found := unlike_plain(config, mesh):
        return f"not for {', '.join(found)}"
    try:
        refuse_device()
        choose(config, 1)
    except NotImplementedError as refusal:
        return str(refusal)
    return None


def between_attentions(
    weights: Params,
    following: Params | None,
    final_norm: Float[Array, " E"],
    config: ModelConfig,
    x: Float[Array, "T E"],
    mixed: Float[Array, "T K G D"],
    counts: Int32[Array, " counts"],
    tiles: LayerTiles | None = None,
) -> tuple[Float[Array, "T E"], Any, Array]:
    """x after this layer, the following layer's qkv, and `counts` for that layer.

    After the last layer (`following` is None) the second result is norm(x). `counts` is
    `no_counts()` for the first layer. By the tiles in use (`choose`), or by others.
    """
    tiles = tiles or choose(config, len(x))
    rows, embed, eps = len(x), config.hidden_size, config.norm_eps
    out, gate_up = weights["out"].reshape(-1, embed), weights["gate_up"].reshape(embed, -1)
    heads, factor = mixed.reshape(rows, -1), weights["mlp_norm"]
    attended = added_product(heads, out, x, factor, tiles.out, counts)
    gated = gated_product(attended.scaled, eps, gate_up, tiles.gate_up)
    factor = final_norm if following is None else following["attn_norm"]
    after = added_product(gated, weights["down"], attended.y, factor, tiles.down, attended.counts)
    if following is None:
        return after.y, rms_norm(after.y, final_norm, eps), after.counts
    matrix = following["qkv"].reshape(embed, -1)
    qkv, counts = normed_product(after.scaled, eps, matrix, tiles.qkv, after.counts)
    return after.y, qkv_heads(following, qkv), counts
