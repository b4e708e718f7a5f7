"""The attention operation in its plainest form: dense, differentiable, any shape."""

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from octavo.attention.contract import AttentionMeta, AttentionSpec
from octavo.attention.numerics import MASKED, product, product_dtype, scaled
from octavo.cache.layout import LayerCache


def attend_reference(
    q: Float[Array, "T H D"],
    layer: LayerCache,
    meta: AttentionMeta,
    spec: AttentionSpec,
    sinks: Float[Array, " H"] | None = None,
) -> Float[Array, "T H D"]:
    """Attention of each row's queries over all the pages of its table, masked to what they see.

    Works on [S, max_query_len] queries and [S, P * p] keys at once: memory grows with both. Softmax
    and both products accumulate in float32. Padding tokens and rows without keys give zeros.
    """
    num_tokens, num_heads, head_dim = q.shape
    num_kv_heads = layer.k.shape[2]
    tokens, live = _tokens_of_rows(meta, num_tokens)
    dtype = product_dtype(q.dtype, layer.k.dtype)
    queries = (
        q[tokens]
        .astype(dtype)
        .reshape(*tokens.shape, num_kv_heads, num_heads // num_kv_heads, head_dim)
    )
    keys, values, visible = _keys_of_rows(layer, meta, spec, live)

    logits = scaled(product("sqkgd,sckd->skgqc", queries, keys.astype(dtype)), spec)
    logits = jnp.where(visible[:, None, None], logits, MASKED)
    weights = _softmax(logits, sinks, visible)
    out = product("skgqc,sckd->sqkgd", weights.astype(dtype), values.astype(dtype))

    out = out.reshape(*tokens.shape, num_heads, head_dim).astype(q.dtype)
    target = jnp.where(live, tokens, num_tokens)
    return jnp.zeros_like(q).at[target].set(out, mode="drop")


def _tokens_of_rows(meta: AttentionMeta, num_tokens: int) -> tuple[Array, Array]:
    """Index of each row's tokens [S, max_query_len], and which of them exist."""
    starts, ends = meta.query_starts[:-1], meta.query_starts[1:]
    tokens = starts[:, None] + jnp.arange(meta.max_query_len, dtype=jnp.int32)[None]
    live = (tokens < ends[:, None]) & (meta.kv_lens > 0)[:, None]
    return jnp.minimum(tokens, num_tokens - 1), live


def _keys_of_rows(
    layer: LayerCache, meta: AttentionMeta, spec: AttentionSpec, live: Array
) -> tuple[Array, Array, Array]:
    """Keys and values [S, C, K, D], zeros where unwritten, and visibility [S, Q, C]; C = P * p."""
    num_rows, num_pages = meta.block_tables.shape
    _, page_size, num_kv_heads, head_dim = layer.k.shape
    context = num_pages * page_size
    shape = (num_rows, context, num_kv_heads, head_dim)
    written = jnp.arange(context, dtype=jnp.int32)[None] < meta.kv_lens[:, None]
    # Zeroed, not only masked: a zero weight times a NaN left in a stale page would be NaN.
    keys = jnp.where(written[..., None, None], layer.k[meta.block_tables].reshape(shape), 0)
    values = jnp.where(written[..., None, None], layer.v[meta.block_tables].reshape(shape), 0)

    lengths = meta.query_starts[1:] - meta.query_starts[:-1]
    first = meta.kv_lens - lengths
    position = (first[:, None] + jnp.arange(live.shape[1], dtype=jnp.int32)[None])[..., None]
    key_position = jnp.arange(context, dtype=jnp.int32)[None, None]
    visible = (key_position <= position) & live[..., None]
    if spec.window is not None:
        visible &= key_position > position - spec.window
    return keys, values, visible


def _softmax(logits: Array, sinks: Array | None, visible: Array) -> Array:
    """Weights of [S, K, G, Q, C] logits; a sink takes its share of the mass and gives nothing."""
    top = logits.max(axis=-1, keepdims=True)
    if sinks is None:
        sink = jnp.float32(MASKED)
    else:
        sink = sinks.astype(jnp.float32).reshape(1, *logits.shape[1:3], 1, 1)
    top = lax.stop_gradient(jnp.maximum(top, sink))
    weights = jnp.where(visible[:, None, None], jnp.exp(logits - top), 0.0)
    total = weights.sum(axis=-1, keepdims=True)
    if sinks is not None:
        total += jnp.exp(sink - top)
    return weights / jnp.where(total > 0, total, 1.0)
