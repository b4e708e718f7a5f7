"""The one decoder graph that the dense families share; what differs is in ModelConfig.

Parameters of a layer (optional ones as the config says), K KV heads of G query heads each:

    attn_norm [E]   qkv [E, K, G+2, D]: for each KV head its query heads, then k, then v
    qkv_bias [K, G+2, D]   q_norm, k_norm [D]   out [K, G, D, E]   out_bias [E]
    mlp_norm [E]   gate_up [E, 2, F]   gate_up_bias [2, F]   down [F, E]   down_bias [E]
    attn_post_norm, mlp_post_norm [E]

and of the model: embed [V, E], layers (a tuple), final_norm [E], head [E, V] unless tied. One
product computes q, k and v, one gate and up: narrow products are what keeps a decode step from
the speed of memory. Layers are unrolled: a scan over stacked weights copies each of them out. Those
alike are calls of one inner `jit`, so that a program traces and lowers them once. XLA inlines the
calls: the executable is what it would be without.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jaxtyping import Array, Float, Int32

from octavo.attention.api import attend, attend_raw, takes_raw, write
from octavo.attention.contract import AttentionMeta
from octavo.attention.front import Front
from octavo.cache.layout import KVCache, LayerCache
from octavo.model.blocks import BLOCKS
from octavo.model.config import LayerConfig, ModelConfig, RopeConfig
from octavo.model.layer import Params, mlp, out_projection, qkv_projection
from octavo.model.layers import contract, fan_in_scale, rms_norm, soft_cap
from octavo.model.params import ParamSpec
from octavo.model.rope import apply_rope, rope_tables
from octavo.model.sharding import TENSOR

Rope = tuple[Float[Array, "T R"], Float[Array, "T R"]]
Tables = dict[RopeConfig, Rope]


class Attended(NamedTuple):
    """Where the last layer's attention leaves off; what is left takes each token by itself.

    Attributes:
        x: [T, E], the residual stream before that layer.
        mixed: [T, K, G, D], what its attention mixed for each query head.
    """

    x: Float[Array, "T E"]
    mixed: Float[Array, "T K G D"]


def abstract_params(config: ModelConfig) -> Params:
    """The tree of ParamSpec of a model, as the module's docstring lays it out."""
    vocab, embed = config.vocab_size, config.hidden_size
    layer = _abstract_layer(config)
    params: Params = {
        "embed": ParamSpec((vocab, embed), config.dtype, ("vocab", None)),
        "layers": tuple(dict(layer) for _ in config.layers),
        "final_norm": _norm(config, embed),
    }
    if not config.tie_embeddings:
        params["head"] = ParamSpec(
            (embed, vocab), config.dtype, (None, "vocab"), scale=fan_in_scale(embed)
        )
    return params


def _norm(config: ModelConfig, size: int) -> ParamSpec:
    return ParamSpec((size,), config.dtype, (None,), "zeros" if config.norm_offset else "ones")


def _abstract_layer(config: ModelConfig) -> Params:
    embed, ffn, dim = config.hidden_size, config.intermediate_size, config.head_dim
    kv_heads, group, dtype = config.num_kv_heads, config.group_size, config.dtype

    def weight(shape: tuple[int, ...], axes: tuple[str | None, ...], fan_in: int) -> ParamSpec:
        return ParamSpec(shape, dtype, axes, scale=fan_in_scale(fan_in))

    def bias(shape: tuple[int, ...], axes: tuple[str | None, ...]) -> ParamSpec:
        return ParamSpec(shape, dtype, axes)

    heads = ("kv_heads", None, None)
    layer: Params = {
        "attn_norm": _norm(config, embed),
        "qkv": weight((embed, kv_heads, group + 2, dim), (None, *heads), embed),
        "out": weight((kv_heads, group, dim, embed), (*heads, None), config.num_heads * dim),
        "mlp_norm": _norm(config, embed),
        "gate_up": weight((embed, 2, ffn), (None, None, "mlp"), embed),
        "down": weight((ffn, embed), ("mlp", None), ffn),
    }
    if config.qkv_bias:
        layer["qkv_bias"] = bias((kv_heads, group + 2, dim), heads)
    if config.out_bias:
        layer["out_bias"] = bias((embed,), (None,))
    if config.mlp_bias:
        layer["gate_up_bias"] = bias((2, ffn), (None, "mlp"))
        layer["down_bias"] = bias((embed,), (None,))
    if config.qk_norm:
        layer |= {"q_norm": _norm(config, dim), "k_norm": _norm(config, dim)}
    if config.post_norms:
        layer |= {"attn_post_norm": _norm(config, embed), "mlp_post_norm": _norm(config, embed)}
    return layer


def forward(
    params: Params,
    config: ModelConfig,
    tokens: Int32[Array, " T"],
    positions: Int32[Array, " T"],
    cache: KVCache,
    meta: AttentionMeta,
    impl: str = "auto",
    mesh: Mesh | None = None,
    block: str = "xla",
    matmul: str = "xla",
) -> tuple[Float[Array, "T E"], KVCache]:
    """Hidden states after the final norm, and the cache with this step's keys and values in it.

    `meta` says which row each token belongs to; positions are absolute within the row. A mesh
    makes attention run per device over its KV heads; the rest follows the weights' shardings.
    A `block` of `BLOCKS` does in decode steps of few rows by its own kernels what lies between two
    attentions, for models that it doesn't refuse; `matmul="mosaic"` in steps of many
    rows the products that gain by it (`products`), where `matmul_refusal` doesn't refuse.
    """
    few = block in BLOCKS and len(tokens) <= BLOCKS[block].max_rows
    if few and meta.max_query_len == 1:
        x, tables = _begin(params, config, tokens, positions)
        return _layers_by_kernel(params, config, x, tables, cache, meta, impl, block)
    attended, cache = attend_through(
        params, config, tokens, positions, cache, meta, impl, mesh, matmul
    )
    return finish(params, config, attended), cache


def attend_through(
    params: Params,
    config: ModelConfig,
    tokens: Int32[Array, " T"],
    positions: Int32[Array, " T"],
    cache: KVCache,
    meta: AttentionMeta,
    impl: str = "auto",
    mesh: Mesh | None = None,
    matmul: str = "xla",
) -> tuple[Attended, KVCache]:
    """`forward` up to what the last layer's attention mixes, for `finish` of the tokens wanted.

    A prompt's tokens are needed in the cache, but only its last one gets logits: without the rest
    of the last layer for all of them a long prompt of a model of 32 layers is 2 % less work.
    """
    x, tables = _begin(params, config, tokens, positions)
    before = _of_each_kind(_through_attention, config, impl, mesh, matmul)
    after = _once(_after_attention, config, matmul)
    layers: list[LayerCache] = []
    last = len(config.layers) - 1
    for index, (kind, weights) in enumerate(zip(config.layers, params["layers"])):
        with jax.named_scope(f"layer_{index}"):
            mixed, layer = before[kind](weights, x, tables[kind.rope], cache.layers[index], meta)
            layers.append(layer)
            if index == last:
                return Attended(x, mixed), KVCache(tuple(layers))
            x = after(weights, x, mixed)
    raise ValueError("a model without layers")


def finish(params: Params, config: ModelConfig, attended: Attended) -> Float[Array, "T E"]:
    """Hidden states after the final norm, of any of the tokens of `attend_through`.

    By XLA's products: for one layer no program is worth the compile of two kernels more.
    """
    with jax.named_scope(f"layer_{len(config.layers) - 1}"):
        x = _after_attention(config, "xla", params["layers"][-1], *attended)
    with jax.named_scope("final_norm"):
        return rms_norm(x, params["final_norm"], config.norm_eps, config.norm_offset)


def _begin(
    params: Params,
    config: ModelConfig,
    tokens: Int32[Array, " T"],
    positions: Int32[Array, " T"],
) -> tuple[Float[Array, "T E"], Tables]:
    """The tokens' embeddings, and the tables of each rope that a layer has."""
    with jax.named_scope("embed"):
        x = params["embed"][tokens]
        if config.embedding_scale != 1.0:
            x = x * jnp.asarray(config.embedding_scale, x.dtype)
        ropes = dict.fromkeys(layer.rope for layer in config.layers)
        return x, {rope: rope_tables(rope, config.head_dim, positions) for rope in ropes}


def _layers_by_kernel(
    params: Params,
    config: ModelConfig,
    x: Float[Array, "T E"],
    tables: Tables,
    cache: KVCache,
    meta: AttentionMeta,
    impl: str,
    block: str,
) -> tuple[Float[Array, "T E"], KVCache]:
    """`forward` from the embeddings on, with what lies between attentions by a block's kernels."""
    run = _of_each_kind(_layer_by_kernel, config, impl, None, block=block)
    layers: list[LayerCache] = []
    carried = qkv_projection(params["layers"][0], config, x)
    x, state = BLOCKS[block].pad(x), BLOCKS[block].begin()
    for index, (kind, weights) in enumerate(zip(config.layers, params["layers"])):
        norms = (*params["layers"], None)[index + 1], params["final_norm"]
        attended = tables[kind.rope], cache.layers[index], meta
        with jax.named_scope(f"layer_{index}"):
            (x, carried, state), layer = run[kind](weights, *norms, x, carried, state, *attended)
        layers.append(layer)
    return carried, KVCache(tuple(layers))


@dataclass(frozen=True)
class _Static:
    """What a layer up to its attention depends on beside arrays."""

    config: ModelConfig
    layer: LayerConfig
    impl: str
    mesh: Mesh | None
    matmul: str
    block: str


def _once(function: Callable[..., Any], *static: Any) -> Callable[..., Any]:
    """function(*static, *arrays), traced at its first call only.

    Made anew by each trace of a model: nothing is remembered beyond it.
    """
    return jax.jit(partial(function, *static))


def _of_each_kind(
    function: Callable[..., Any],
    config: ModelConfig,
    impl: str,
    mesh: Mesh | None,
    matmul: str = "xla",
    block: str = "xla",
) -> dict[LayerConfig, Callable[..., Any]]:
    """`_once` for each kind of layer that the model has."""
    return {
        kind: _once(function, _Static(config, kind, impl, mesh, matmul, block))
        for kind in dict.fromkeys(config.layers)
    }


def _through_attention(
    static: _Static,
    weights: Params,
    x: Float[Array, "T E"],
    rope: Rope,
    layer: LayerCache,
    meta: AttentionMeta,
) -> tuple[Float[Array, "T K G D"], LayerCache]:
    """A layer up to what its attention mixes, and its cache with the new keys."""
    qkv = qkv_projection(weights, static.config, x, static.matmul)
    return _attention(static, weights, qkv, rope, layer, meta)


def _after_attention(
    config: ModelConfig,
    matmul: str,
    weights: Params,
    x: Float[Array, "T E"],
    mixed: Float[Array, "T K G D"],
) -> Float[Array, "T E"]:
    return mlp(weights, config, out_projection(weights, config, x, mixed, matmul), matmul)


def _layer_by_kernel(
    static: _Static,
    weights: Params,
    following: Params | None,
    final_norm: Float[Array, " E"],
    x: Float[Array, "R E"],
    qkv: Float[Array, "T K G_plus_2 D"],
    state: Int32[Array, " counts"],
    rope: Rope,
    layer: LayerCache,
    meta: AttentionMeta,
) -> tuple[tuple[Array, Array, Array], LayerCache]:
    """From a layer's attention to the next: what a block's `between` returns, and the cache."""
    mixed, layer = _attention(static, weights, qkv, rope, layer, meta)
    with jax.named_scope("block"):
        carried = BLOCKS[static.block].between(
            weights, following, final_norm, static.config, x, mixed, state
        )
    return carried, layer


@jax.named_scope("attention")
def _attention(
    static: _Static,
    weights: Params,
    qkv: Float[Array, "T K G_plus_2 D"],
    rope: Rope,
    layer: LayerCache,
    meta: AttentionMeta,
) -> tuple[Float[Array, "T K G D"], LayerCache]:
    """What attention mixes for each query head, and the layer's cache with the new keys."""
    config, impl, mesh = static.config, static.impl, static.mesh
    group, eps, offset = config.group_size, config.norm_eps, config.norm_offset
    spec = config.attention_spec(static.layer, None if mesh is None else TENSOR)
    front = Front(*rope, weights.get("q_norm"), weights.get("k_norm"), eps, offset)
    if takes_raw(impl, qkv, front, layer, meta):
        with jax.named_scope("attend"):
            mixed, layer = attend_raw(qkv, front, layer, meta, spec, mesh=mesh)
        return mixed.reshape(-1, config.num_kv_heads, group, config.head_dim), layer
    q = qkv[:, :, :group].reshape(-1, config.num_heads, config.head_dim)
    k, v = qkv[:, :, group], qkv[:, :, group + 1]
    with jax.named_scope("rope"):
        if config.qk_norm:
            q = rms_norm(q, weights["q_norm"], eps, offset)
            k = rms_norm(k, weights["k_norm"], eps, offset)
        q, k = apply_rope(q, rope), apply_rope(k, rope)
    with jax.named_scope("kv_write"):
        layer = write(layer, k, v, meta, spec, impl=impl, mesh=mesh)
    with jax.named_scope("attend"):
        mixed = attend(q, layer, meta, spec, impl=impl, mesh=mesh)
    return mixed.reshape(-1, config.num_kv_heads, group, config.head_dim), layer


@jax.named_scope("unembed")
def unembed(
    params: Params, config: ModelConfig, hidden: Float[Array, "R E"]
) -> Float[Array, "R V"]:
    """float32 logits of hidden states; a tied model multiplies by its embeddings."""
    if config.tie_embeddings:
        logits = contract(hidden, params["embed"], axis=1, dtype=jnp.float32)
    else:
        logits = contract(hidden, params["head"], dtype=jnp.float32)
    return soft_cap(logits, config.logit_soft_cap)
