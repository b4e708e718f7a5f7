"""Draws one token a row. Pure, jit-able, and blind to the other rows.

A random draw is a race of exponentials (the Gumbel-max trick without its logarithms: the argmax of
weight / Exp(1) falls on a token with probability proportional to its weight), run twice: among the
blocks of the vocabulary by their masses, then among the tokens of the block that won. So noise is
needed for V / BLOCK + BLOCK places instead of V. top_k is a cut by value (threshold.py). top_p
alone needs no cut: the draw is repeated among the tokens above the one drawn until the mass above
it is less than top_p, which is exactly a draw from the nucleus (each round is a draw from a set
that contains it; a round's outcome counts only if it falls inside).

The noise is threefry keyed by (seed, sample index, position, round), one counter a place, so it
does not depend on the batch; masses are exact sums (blocks.py), so nothing else does either.
"""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float32, Int32, UInt32

from octavo.sampling.batch import SamplingBatch
from octavo.sampling.blocks import (
    BLOCK,
    argmax_token,
    block_masses,
    block_peaks,
    exact_sum,
    relative_weights,
    take_block,
    take_token,
    to_blocks,
)
from octavo.sampling.flags import SamplingFlags
from octavo.sampling.state import RowState
from octavo.sampling.threshold import top_k_floor
from octavo.sampling.transforms import transform

NO_TOKEN = -1
"""Drawn by a row that has no finite largest logit: NaN, +inf, or every token banned."""

_SMALLEST_TOP_P = 1e-30
_Loop = tuple[Array, Array, Array]
"""(token, done, turn) of the rows that redraw until their token lies in the nucleus."""


def sample(
    logits: Float32[Array, "S V"],
    batch: SamplingBatch,
    state: RowState | None,
    flags: SamplingFlags,
) -> Int32[Array, " S"]:
    """The next token of each row, or NO_TOKEN for a row that cannot be drawn from.

    Penalties, bias and bans, temperature, top_k, top_p, min_p, in this order; temperature 0 takes
    the largest logit, lowest id first. Tokens tied with the last one that top_k or top_p keeps are
    kept. `flags` must cover every row's parameters; refuses flags that need a state without one.
    """
    with jax.named_scope("sample"):
        transformed = transform(logits, batch, state, flags)
        if transformed is not logits:
            # The rows are read several times below: XLA must not redo the transforms each time.
            transformed = jax.lax.optimization_barrier(transformed)
        blocks = to_blocks(transformed)
        peaks = block_peaks(blocks)
        usable = jnp.isfinite(jnp.max(peaks, axis=1))
        token = argmax_token(blocks, peaks)
        if not flags.greedy_only:
            drawn = _draw(blocks, peaks, batch, flags, usable)
            token = jnp.where(batch.temperature > 0, drawn, token)
        return jnp.where(usable, token, NO_TOKEN)


def finite_rows(logits: Float32[Array, "S V"]) -> Bool[Array, " S"]:
    """Whether each row has no NaN and no +inf, and is not -inf throughout."""
    return jnp.isfinite(jnp.max(block_peaks(to_blocks(logits)), axis=1))


def row_keys(batch: SamplingBatch) -> Array:
    """Typed threefry keys [S] of the rows' draws: of seed, sample index and position alone."""
    keys = jax.random.wrap_key_data(batch.seed, impl="threefry2x32")
    keys = jax.vmap(jax.random.fold_in)(keys, batch.sample_index)
    return jax.vmap(jax.random.fold_in)(keys, batch.position)


def _draw(
    blocks: Float32[Array, "S N b"],
    peaks: Float32[Array, "S N"],
    batch: SamplingBatch,
    flags: SamplingFlags,
    usable: Bool[Array, " S"],
) -> Int32[Array, " S"]:
    random = (batch.temperature > 0) & usable
    race = _Race(
        blocks=blocks,
        peaks=peaks,
        top=jnp.max(peaks, axis=1),
        inverse=jnp.where(random, 1.0 / jnp.where(random, batch.temperature, 1.0), 1.0),
        keys=row_keys(batch),
    )
    nowhere = jnp.full_like(race.top, -jnp.inf)
    if not flags.filters:
        return race.winner(race.weights(nowhere, nowhere), nowhere, nowhere, jnp.uint32(0))
    top_p = jnp.maximum(batch.top_p, _SMALLEST_TOP_P)
    floor, settled = top_k_floor(blocks, peaks, batch.top_k, top_p, race.inverse)
    settled |= ~random
    # min_p counts after top_p, whose total must not miss what min_p removes.
    min_p_floor = race.top + jnp.log(batch.min_p) / race.inverse
    final_floor = jnp.maximum(floor, min_p_floor)
    first_floor = jnp.where(settled, final_floor, floor)
    weights = race.weights(first_floor, nowhere)
    limit = top_p * exact_sum(weights, bound=BLOCK)
    first = race.winner(weights, first_floor, nowhere, jnp.uint32(0))

    def redraw(loop: _Loop) -> _Loop:
        token, done, turn = loop
        drawn = take_token(blocks, token)
        weights = race.weights(final_floor, drawn)
        done |= (drawn >= min_p_floor) & (exact_sum(weights, bound=BLOCK) < limit)
        fresh = race.winner(weights, final_floor, drawn, turn)
        return jnp.where(done, token, fresh), done, turn + jnp.uint32(1)

    start = (first, settled, jnp.uint32(1))
    return jax.lax.while_loop(lambda loop: ~jnp.all(loop[1]), redraw, start)[0]


@dataclass(frozen=True)
class _Race:
    """One step's rows and their noise; see the module's head."""

    blocks: Float32[Array, "S N b"]
    peaks: Float32[Array, "S N"]
    top: Float32[Array, " S"]
    inverse: Float32[Array, " S"]
    keys: Array

    def weights(
        self, floor: Float32[Array, " S"], above: Float32[Array, " S"]
    ) -> Float32[Array, "S N"]:
        """Each block's mass of logits >= floor and > above, in units of the top token's weight."""
        masses = block_masses(self.blocks, self.peaks, self.inverse, floor, above)
        return masses * relative_weights(self.peaks, self.top[:, None], self.inverse[:, None])

    def winner(
        self,
        weights: Float32[Array, "S N"],
        floor: Float32[Array, " S"],
        above: Float32[Array, " S"],
        turn: UInt32[Array, ""],
    ) -> Int32[Array, " S"]:
        """The token that wins: first its block by `weights`, then itself among the kept there."""
        noise = _exponentials(self.keys, turn, BLOCK + weights.shape[1])
        index = jnp.argmax(weights / noise[:, BLOCK:], axis=1).astype(jnp.int32)
        block = take_block(self.blocks, index)
        peak = jnp.take_along_axis(self.peaks, index[:, None], axis=1)
        kept = (block >= floor[:, None]) & (block > above[:, None])
        inner = jnp.where(kept, relative_weights(block, peak, self.inverse[:, None]), 0.0)
        inside = jnp.argmax(inner / noise[:, :BLOCK], axis=1).astype(jnp.int32)
        return index * BLOCK + inside


def _exponentials(keys: Array, turn: UInt32[Array, ""], places: int) -> Float32[Array, "S n"]:
    """Exp(1) noise of each row; place i depends on the row's key, the turn and i alone."""
    keys = jax.vmap(jax.random.fold_in, in_axes=(0, None))(keys, turn)
    bits = jax.vmap(lambda key: jax.random.bits(key, (places,), jnp.uint32))(keys)
    # Small values decide a race, so keep their full resolution: uniform in [2**-33, 1 - 2**-24].
    uniform = jnp.maximum(bits.astype(jnp.float32), 0.5) * 2.0**-32
    return -jnp.log1p(-jnp.minimum(uniform, 1.0 - 2.0**-24))
