"""Log-probabilities of raw logits: of chosen tokens, their ranks, and the likeliest tokens."""

from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float32, Int32

from octavo.sampling.blocks import (
    BLOCK,
    block_masses,
    block_peaks,
    exact_sum,
    relative_weights,
    take_token,
    to_blocks,
)


@partial(
    jax.tree_util.register_dataclass,
    data_fields=["logprob", "rank", "top_ids", "top_logprobs"],
    meta_fields=[],
)
@dataclass(frozen=True)
class Logprobs:
    """float32 log-softmax of raw logits, temperature and penalties not applied.

    Attributes:
        logprob: of the chosen token.
        rank: 1 + how many tokens have a larger logit.
        top_ids, top_logprobs: the n likeliest tokens, likeliest first, lowest id first on ties.
    """

    logprob: Float32[Array, " S"]
    rank: Int32[Array, " S"]
    top_ids: Int32[Array, "S n"]
    top_logprobs: Float32[Array, "S n"]


def logprobs_of(logits: Float32[Array, "S V"], tokens: Int32[Array, " S"], top_n: int) -> Logprobs:
    """Log-probabilities of `tokens` and of each row's top_n likeliest tokens.

    Rows may be sampled rows or positions of a prompt. Tokens outside 0 .. V-1 are clipped. Refuses
    top_n outside 0 .. V (ValueError).
    """
    if not 0 <= top_n <= logits.shape[1]:
        raise ValueError(f"top_n must be in 0 .. {logits.shape[1]}, got {top_n}")
    with jax.named_scope("logprobs"):
        blocks = to_blocks(logits)
        peaks = block_peaks(blocks)
        top = jnp.max(peaks, axis=1)
        total = jnp.log(_total_weight(blocks, peaks, top))
        chosen = take_token(blocks, jnp.clip(tokens, 0, logits.shape[1] - 1))
        larger = blocks > chosen[:, None, None]
        values, ids = _top(blocks, peaks, top_n)
        return Logprobs(
            logprob=chosen - top - total,
            rank=1 + jnp.sum(larger, axis=(1, 2), dtype=jnp.int32),
            top_ids=ids,
            top_logprobs=values - top[:, None] - total[:, None],
        )


def _total_weight(
    blocks: Float32[Array, "S N b"], peaks: Float32[Array, "S N"], top: Float32[Array, " S"]
) -> Float32[Array, " S"]:
    """Sum of exp(logit - top) over the vocabulary."""
    one, nowhere = jnp.ones_like(top), jnp.full_like(top, -jnp.inf)
    masses = block_masses(blocks, peaks, one, nowhere, nowhere)
    weights = masses * relative_weights(peaks, top[:, None], one[:, None])
    return exact_sum(weights, bound=BLOCK)


def _top(
    blocks: Float32[Array, "S N b"], peaks: Float32[Array, "S N"], top_n: int
) -> tuple[Float32[Array, "S n"], Int32[Array, "S n"]]:
    """The n largest logits and their ids.

    They lie in the n blocks that come first by (largest logit descending, index ascending): any
    other block is preceded by n blocks that each hold a token preceding all of its own.
    """
    if top_n == 0:
        rows = blocks.shape[0]
        return jnp.zeros((rows, 0), jnp.float32), jnp.zeros((rows, 0), jnp.int32)
    _, best = jax.lax.top_k(peaks, min(top_n, peaks.shape[1]))
    # In index order, so that position among the candidates orders ties by token id.
    best = jnp.sort(best, axis=1)
    candidates = jnp.take_along_axis(blocks, best[:, :, None], axis=1, mode="clip")
    values, places = jax.lax.top_k(candidates.reshape(blocks.shape[0], -1), top_n)
    index = jnp.take_along_axis(best, places // BLOCK, axis=1, mode="clip")
    return values, (index * BLOCK + places % BLOCK).astype(jnp.int32)
