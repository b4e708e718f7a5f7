"""The model as a plain function of tokens: pure, jit-able, differentiable."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int32

from octavo.attention.contract import AttentionMeta
from octavo.cache.layout import init_cache
from octavo.model.config import ModelConfig
from octavo.model.families import family_of


def forward(
    config: ModelConfig, params: Any, tokens: Int32[Array, "*B T"]
) -> Float[Array, "*B T V"]:
    """float32 logits of every position of token ids [T] or [B, T].

    Causal; rows are of equal length and padding, if any, belongs at their end. The graph is the
    one that serves, over a cache that lives for this call: one page a row. Compiled once for each
    shape of tokens, outside of a `jit` too.
    """
    if tokens.ndim not in (1, 2):
        raise ValueError(f"tokens must be [T] or [B, T], not of shape {tokens.shape}")
    return _forward(config, params, tokens)


@partial(jax.jit, static_argnums=0)
def _forward(
    config: ModelConfig, params: Any, tokens: Int32[Array, "*B T"]
) -> Float[Array, "*B T V"]:
    """Called outside of a `jit`, the decoder alone would compile its layers anew in each call."""
    rows, length = (1, *tokens.shape)[-2:]
    family = family_of(config)
    row = jnp.arange(rows, dtype=jnp.int32)
    offset = jnp.arange(length, dtype=jnp.int32)
    meta = AttentionMeta(
        block_tables=row[:, None] + 1,
        kv_lens=jnp.full((rows,), length, jnp.int32),
        query_starts=jnp.arange(rows + 1, dtype=jnp.int32) * length,
        slots=((row[:, None] + 1) * length + offset[None, :]).reshape(-1),
        num_rows=jnp.asarray(rows, jnp.int32),
        max_query_len=length,
    )
    hidden, _ = family.forward(
        params,
        config,
        tokens.reshape(-1),
        jnp.tile(offset, rows),
        init_cache(config.cache_layout(rows + 1, length)),
        meta,
        impl="reference",
    )
    return family.unembed(params, config, hidden).reshape(*tokens.shape, config.vocab_size)
