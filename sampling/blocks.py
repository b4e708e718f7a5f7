"""Row reductions over the vocabulary in blocks, with sums that do not depend on their order.

A draw must be bit-equal in any batch, and XLA may reduce the same row in another order when the
batch's shape or the surrounding fusion differs. Maxima and counts don't care; masses are therefore
summed as integers: each block of BLOCK tokens in units of 2**-24 of its own maximum's weight
(relative error of a block's mass at most 2**-18), and sums over blocks in two integer limbs.

Letters: S rows, V vocab, N blocks, b tokens a block.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float32, Int32

BLOCK = 128
"""Tokens a block. Part of the draw: changing it changes every seeded sample."""

_UNIT = 2.0**24


def to_blocks(logits: Float32[Array, "S V"]) -> Float32[Array, "S N b"]:
    """The rows cut into blocks, the last one padded with -inf."""
    short = -logits.shape[1] % BLOCK
    if short:
        logits = jnp.pad(logits, ((0, 0), (0, short)), constant_values=-jnp.inf)
    return logits.reshape(logits.shape[0], -1, BLOCK)


def block_peaks(blocks: Float32[Array, "S N b"]) -> Float32[Array, "S N"]:
    """Largest logit of each block; NaN if it holds one."""
    with jax.named_scope("block_peaks"):
        return jnp.max(blocks, axis=-1)


def block_masses(
    blocks: Float32[Array, "S N b"],
    peaks: Float32[Array, "S N"],
    inverse_temperature: Float32[Array, " S"],
    floor: Float32[Array, " S"],
    above: Float32[Array, " S"],
) -> Float32[Array, "S N"]:
    """Each block's sum of exp((x - peak) / temperature) over its tokens x >= floor, x > above.

    In [0, b], relative to the block's own peak; exactly the same however it is computed.
    """
    with jax.named_scope("block_masses"):
        kept = (blocks >= floor[:, None, None]) & (blocks > above[:, None, None])
        weights = relative_weights(blocks, peaks[:, :, None], inverse_temperature[:, None, None])
        units = jnp.where(kept, jnp.round(weights * _UNIT), 0.0).astype(jnp.uint32)
        return jnp.sum(units, axis=-1, dtype=jnp.uint32).astype(jnp.float32) / _UNIT


def relative_weights(
    logits: Float32[Array, "*n"],
    peak: Float32[Array, "*m"],
    inverse_temperature: Float32[Array, "*m"],
) -> Float32[Array, "*n"]:
    """exp((logits - peak) / temperature) in [0, 1]; a peak of -inf gives 0, not NaN."""
    finite = jnp.maximum(peak, jnp.finfo(jnp.float32).min)
    return jnp.exp((logits - finite) * inverse_temperature)


def exact_sum(values: Float32[Array, "*lead n"], bound: int) -> Float32[Array, "*lead"]:
    """Sum over the last axis of values in [0, bound], in whatever order with the same result.

    Each value is cut into two integer limbs whose sums cannot overflow; it loses less than
    2**-(60 - 2 * log2(n) - log2(bound)).
    """
    tail_bits = 31 - (values.shape[-1] - 1).bit_length()
    head_bits = tail_bits - (bound - 1).bit_length()
    scaled = values * 2.0**head_bits
    heads = jnp.floor(scaled)
    tails = jnp.floor((scaled - heads) * 2.0**tail_bits)
    head = jnp.sum(heads.astype(jnp.uint32), axis=-1, dtype=jnp.uint32)
    tail = jnp.sum(tails.astype(jnp.uint32), axis=-1, dtype=jnp.uint32)
    scale = 2.0**-head_bits
    return head.astype(jnp.float32) * scale + tail.astype(jnp.float32) * (scale * 2.0**-tail_bits)


def take_block(blocks: Float32[Array, "S N b"], index: Int32[Array, " S"]) -> Float32[Array, "S b"]:
    """One block of each row."""
    return jnp.take_along_axis(blocks, index[:, None, None], axis=1, mode="clip")[:, 0]


def take_token(blocks: Float32[Array, "S N b"], token: Int32[Array, " S"]) -> Float32[Array, " S"]:
    """One logit of each row."""
    inside = (token % BLOCK)[:, None]
    return jnp.take_along_axis(take_block(blocks, token // BLOCK), inside, axis=1, mode="clip")[
        :, 0
    ]


def argmax_token(
    blocks: Float32[Array, "S N b"], peaks: Float32[Array, "S N"]
) -> Int32[Array, " S"]:
    """Lowest id of each row's largest logit; one pass over the vocabulary, which made `peaks`."""
    index = jnp.argmax(peaks, axis=1).astype(jnp.int32)
    inside = jnp.argmax(take_block(blocks, index), axis=1).astype(jnp.int32)
    return index * BLOCK + inside
