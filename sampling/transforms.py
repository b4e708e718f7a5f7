"""Logit transforms before temperature: penalties, bias, bans, grammar masks, in this order.

Penalties as in CTRL (arXiv:1909.05858) for repetition and the OpenAI API for presence and
frequency. Every step leaves the logits of rows that did not ask for it bit-identical.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float32, Int32, UInt32

from octavo.sampling.batch import SamplingBatch
from octavo.sampling.flags import SamplingFlags
from octavo.sampling.state import RowState, unpack_bits


def transform(
    logits: Float32[Array, "S V"],
    batch: SamplingBatch,
    state: RowState | None,
    flags: SamplingFlags,
) -> Float32[Array, "S V"]:
    """Raw logits with the transforms that `flags` name; banned tokens become -inf.

    Refuses flags that need a RowState or a mask without one (ValueError).
    """
    if flags.needs_state and state is None:
        raise ValueError(f"{flags} needs a RowState")
    if flags.grammar and batch.mask is None:
        raise ValueError(f"{flags} needs a mask")
    if state is not None and flags.penalties:
        logits = penalise(logits, batch, state)
    if state is not None and flags.bias:
        logits = bias_and_ban(logits, batch, state)
    if flags.min_tokens:
        logits = ban_stop_ids(logits, batch)
    if batch.mask is not None and flags.grammar:
        logits = keep_allowed(logits, batch.mask)
    return logits


def penalise(
    logits: Float32[Array, "S V"], batch: SamplingBatch, state: RowState
) -> Float32[Array, "S V"]:
    """Repetition over prompt and output, frequency and presence over the output alone."""
    with jax.named_scope("penalties"):
        counts = state.counts.at[batch.slot].get(mode="clip")
        prompt = state.prompt_seen.at[batch.slot].get(mode="clip")
        drawn = counts > 0
        seen = unpack_bits(prompt, logits.shape[1]) | drawn
        factor = batch.repetition[:, None]
        repeated = jnp.where(logits > 0, logits / factor, logits * factor)
        logits = jnp.where(seen, repeated, logits)
        logits = logits - batch.frequency[:, None] * counts.astype(jnp.float32)
        return logits - batch.presence[:, None] * drawn.astype(jnp.float32)


def bias_and_ban(
    logits: Float32[Array, "S V"], batch: SamplingBatch, state: RowState
) -> Float32[Array, "S V"]:
    """Adds the sparse bias, then bans what the row's mask doesn't allow."""
    with jax.named_scope("bias"):
        stateful = (batch.stateful != 0)[:, None]
        ids = jnp.where(stateful, state.bias_ids.at[batch.slot].get(mode="clip"), -1)
        values = state.bias_values.at[batch.slot].get(mode="clip")
        rows, columns = _row_indices(ids), _drop_negative(ids, logits.shape[1])
        logits = logits.at[rows, columns].add(values, mode="drop")
        allowed = unpack_bits(state.allowed.at[batch.slot].get(mode="clip"), logits.shape[1])
        return jnp.where(allowed | ~stateful, logits, -jnp.inf)


def ban_stop_ids(logits: Float32[Array, "S V"], batch: SamplingBatch) -> Float32[Array, "S V"]:
    """Bans the stop ids of rows that have drawn fewer than min_tokens tokens."""
    with jax.named_scope("min_tokens"):
        young = (batch.generated < batch.min_tokens)[:, None]
        ids = jnp.where(young, batch.stop_ids, -1)
        columns = _drop_negative(ids, logits.shape[1])
        return logits.at[_row_indices(ids), columns].set(-jnp.inf, mode="drop")


def keep_allowed(
    logits: Float32[Array, "S V"], mask: UInt32[Array, "S words"]
) -> Float32[Array, "S V"]:
    """Bans the tokens whose bit is 0; `mask` has at least V bits a row."""
    with jax.named_scope("grammar"):
        return jnp.where(unpack_bits(mask, logits.shape[1]), logits, -jnp.inf)


def _row_indices(ids: Int32[Array, "S n"]) -> Int32[Array, "S n"]:
    return jax.lax.broadcasted_iota(jnp.int32, ids.shape, 0)


def _drop_negative(ids: Int32[Array, "S n"], vocab_size: int) -> Int32[Array, "S n"]:
    return jnp.where(ids < 0, vocab_size, ids)
