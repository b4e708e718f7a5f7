"""The k-th largest logit of a row, and with it the top-p cut, without sorting the vocabulary.

Small k: only the KEEP blocks with the largest maxima can hold a row's KEEP largest logits, and of
those only the KEEP groups with the largest maxima; what remains is a few hundred numbers. A row
whose cut can't be told from them (k > KEEP, or ties that reach beyond them) is searched over the
whole row by bit pattern. Which way a row goes depends on that row alone.

A cut is a value: tokens tied with the last one kept are kept.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float32, Int32, UInt32

from octavo.sampling.blocks import exact_sum, relative_weights

KEEP = 64
_GROUP = 8
_PIVOT_BITS = 2


def top_k_floor(
    blocks: Float32[Array, "S N b"],
    peaks: Float32[Array, "S N"],
    top_k: Int32[Array, " S"],
    top_p: Float32[Array, " S"],
    inverse_temperature: Float32[Array, " S"],
) -> tuple[Float32[Array, " S"], Bool[Array, " S"]]:
    """(floor, settled): tokens with logit >= floor pass top_k, and top_p too where settled.

    top_p is taken over the top_k tokens' renormalised probabilities. Rows without top_k (0 or at
    least the vocabulary) get -inf; they are settled if top_p is 1.
    """
    with jax.named_scope("top_k"):
        size = blocks.shape[1] * blocks.shape[2]
        wanted = (top_k > 0) & (top_k < size)
        values, missing = _largest(blocks, peaks)
        kth = jnp.minimum(top_k, values.shape[1]) - 1
        kth_value = jnp.take_along_axis(values, jnp.maximum(kth, 0)[:, None], axis=1, mode="clip")[
            :, 0
        ]
        complete = missing == -jnp.inf
        known = complete | ((top_k <= values.shape[1]) & (kth_value > missing))
        kth_value = jnp.where(complete & (top_k > values.shape[1]), -jnp.inf, kth_value)
        nucleus = _nucleus_floor(values, kth_value, top_p, inverse_temperature)
        search = wanted & ~known
        searched = jax.lax.cond(
            jnp.any(search),
            lambda: _search(blocks, jnp.where(search, top_k, 0)),
            lambda: jnp.full_like(kth_value, -jnp.inf),
        )
        floor = jnp.where(known, jnp.maximum(kth_value, nucleus), searched)
        floor = jnp.where(wanted, floor, -jnp.inf)
        return floor, (wanted & known) | (top_p >= 1.0)


def _largest(
    blocks: Float32[Array, "S N b"], peaks: Float32[Array, "S N"]
) -> tuple[Float32[Array, "S k"], Float32[Array, " S"]]:
    """The row's (at most) KEEP largest logits, descending, and the largest one not among them."""
    rows = blocks.shape[0]
    chosen, missing = _best_groups(blocks, peaks)
    groups = chosen.reshape(rows, -1, _GROUP)
    fine, missing_too = _best_groups(groups, jnp.max(groups, axis=-1))
    values, last = _best_groups(fine.reshape(rows, -1, 1), fine.reshape(rows, -1))
    values = values.reshape(rows, -1)
    if values.shape[1] < KEEP:
        values = -jnp.sort(-values, axis=1)
    return values, jnp.maximum(jnp.maximum(missing, missing_too), last)


def _best_groups(
    groups: Float32[Array, "S n w"], peaks: Float32[Array, "S n"]
) -> tuple[Float32[Array, "S k w"], Float32[Array, " S"]]:
    """The KEEP groups with the largest peaks, and the largest peak of the others."""
    if groups.shape[1] <= KEEP:
        return groups, jnp.full(groups.shape[0], -jnp.inf, jnp.float32)
    values, ids = jax.lax.top_k(peaks, KEEP + 1)
    return jnp.take_along_axis(groups, ids[:, :KEEP, None], axis=1, mode="clip"), values[:, KEEP]


def _nucleus_floor(
    values: Float32[Array, "S k"],
    kth_value: Float32[Array, " S"],
    top_p: Float32[Array, " S"],
    inverse_temperature: Float32[Array, " S"],
) -> Float32[Array, " S"]:
    """Smallest of the descending values with less than top_p of the top-k mass before it."""
    weights = relative_weights(values, values[:, :1], inverse_temperature[:, None])
    weights = jnp.where(values >= kth_value[:, None], weights, 0.0)
    before = jnp.tril(jnp.ones((values.shape[1],) * 2, jnp.bool_), -1)
    mass_before = exact_sum(jnp.where(before[None], weights[:, None, :], 0.0), bound=1)
    limit = top_p * exact_sum(weights, bound=1)
    inside = mass_before < limit[:, None]
    floor = jnp.min(jnp.where(inside, values, jnp.inf), axis=1)
    return jnp.where(top_p < 1.0, floor, -jnp.inf)


def _search(blocks: Float32[Array, "S N b"], top_k: Int32[Array, " S"]) -> Float32[Array, " S"]:
    """k-th largest value of each row by bit pattern, _PIVOT_BITS bits a pass (k = 0: anything)."""
    pivots = 2**_PIVOT_BITS - 1
    steps = 32 // _PIVOT_BITS

    def narrow(i: Int32[Array, ""], low: UInt32[Array, " S"]) -> UInt32[Array, " S"]:
        shift = ((steps - 1 - i) * _PIVOT_BITS).astype(jnp.uint32)
        passed = jnp.zeros(low.shape, jnp.uint32)
        for pivot in range(1, pivots + 1):
            key = low + jnp.left_shift(jnp.uint32(pivot), shift)
            at_least = blocks >= _from_key(key)[:, None, None]
            count = jnp.sum(at_least, axis=(1, 2), dtype=jnp.int32)
            passed += (count >= top_k).astype(jnp.uint32)
        return low + jnp.left_shift(passed, shift)

    low = jax.lax.fori_loop(0, steps, narrow, jnp.zeros(top_k.shape, jnp.uint32))
    # The search ends on the largest pattern that compares equal to the k-th value, which where
    # subnormal numbers count as zero is not the value's own.
    at_least = blocks >= _from_key(low)[:, None, None]
    return jnp.min(jnp.where(at_least, blocks, jnp.inf), axis=(1, 2))


def _from_key(key: UInt32[Array, " S"]) -> Float32[Array, " S"]:
    """Inverse of the map of floats to unsigned integers that keeps their order.

    Keys outside the infinities' stand for them, so that no pivot is a NaN.
    """
    negative = key < jnp.uint32(0x80000000)
    bits = jnp.where(negative, ~key, key ^ jnp.uint32(0x80000000))
    value = jax.lax.bitcast_convert_type(bits, jnp.float32)
    value = jnp.where(key >= jnp.uint32(0xFF800000), jnp.inf, value)
    return jnp.where(key <= jnp.uint32(0x007FFFFF), -jnp.inf, value)
