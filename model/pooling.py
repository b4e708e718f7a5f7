"""Sums of hidden states, which pooled embeddings are made of."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Float32, Int32


def sum_by_row(
    hidden: Float[Array, "T E"], row_of: Int32[Array, " T"], rows: int
) -> Float32[Array, "{rows} E"]:
    """For each row the sum of its tokens' hidden states; row_of >= rows counts nowhere."""
    with jax.named_scope("pool"):
        return jax.ops.segment_sum(hidden.astype(jnp.float32), row_of, num_segments=rows)
