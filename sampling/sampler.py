"""Draws one token a row. Pure, jit-able, and blind to the other rows.

A random draw is a race of exponentials (the Gumbel-max trick without its logarithms: the argmax of
weight / Exp(1) falls on a token with probability proportional to its weight), run twice: among the
blocks of the vocabulary by their masses, then among the tokens of the block that won. So noise is
needed for V / BLOCK + BLOCK places instead of V. top_k is a cut by value (threshold.py). top_p
alone needs no cut: the draw is repeated among the tokens above the one drawn until the mass above
it is less than top_p, which is exactly a draw from the nucleus (each round is a draw from a set
that contains it; a round's outcome counts only if it falls inside).

The noise is threefry of (place, round) under a key made of (seed, sample index, position), so it
does not depend on the batch; masses are exact sums (blocks.py), so nothing else does either.
"""

from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.extend.random import threefry_2x32
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


def sample(
    logits: Float32[Array, "S V"],
    batch: SamplingBatch,
    state: RowState | None,
    flags: SamplingFlags,
) -> Int32[Array, " S"]:
    """The next token of each row, or NO_TOKEN for a row that cannot be drawn from.

    Penalties, bias and bans, grammar masks, temperature, top_k, top_p, min_p, in this order;
    temperature 0 takes the largest logit, lowest id first. Tokens tied with the last one that top_k
    or top_p keeps are kept. `flags` must cover every row's parameters; refuses flags that need a
    state or a mask without one.
    """
    with jax.named_scope("sample"):
        transformed = transform(logits, batch, state, flags)
        if flags.greedy_only:
            token, top = _largest(transformed)
            return jnp.where(jnp.isfinite(top), token, NO_TOKEN)
        if transformed is not logits:
            # The rows are read several times below: XLA must not redo the transforms each time.
            transformed = jax.lax.optimization_barrier(transformed)
        blocks = to_blocks(transformed)
        peaks = block_peaks(blocks)
        usable = jnp.isfinite(jnp.max(peaks, axis=1))
        drawn = _draw(blocks, peaks, batch, flags, usable)
        token = jnp.where(batch.temperature > 0, drawn, argmax_token(blocks, peaks))
        return jnp.where(usable, token, NO_TOKEN)


def finite_rows(logits: Float32[Array, "S V"], flags: SamplingFlags) -> Bool[Array, " S"]:
    """Whether each row has no NaN and no +inf, and is not -inf throughout.

    Computed as `sample` does under these flags, so that one pass over untouched logits does both.
    """
    if flags.greedy_only:
        return jnp.isfinite(_largest(logits)[1])
    return jnp.isfinite(jnp.max(block_peaks(to_blocks(logits)), axis=1))


def _largest(logits: Float32[Array, "S V"]) -> tuple[Int32[Array, " S"], Float32[Array, " S"]]:
    """Lowest id of each row's largest logit, and the logit; NaN where there is one."""
    token = jnp.argmax(logits, axis=1).astype(jnp.int32)
    return token, jnp.take_along_axis(logits, token[:, None], axis=1, mode="clip")[:, 0]


def row_keys(batch: SamplingBatch) -> UInt32[Array, "S 2"]:
    """Keys of the rows' draws: threefry of (sample index, position) keyed by the seed."""
    counters = jnp.stack([batch.sample_index, batch.position], axis=1).astype(jnp.uint32)
    return jax.vmap(threefry_2x32)(batch.seed, counters)


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
    min_p_floor = race.top + jnp.log(batch.min_p) / race.inverse
    final_floor = jnp.maximum(floor, min_p_floor)
    # min_p counts after top_p, whose total must not miss what min_p removes.
    first_floor = jnp.where(settled, final_floor, floor)

    def turn(loop: _Loop) -> _Loop:
        first = loop.turn == 0
        above = jnp.where(first, nowhere, take_token(blocks, loop.token))
        kept = jnp.where(first, first_floor, final_floor)
        weights = race.weights(kept, above)
        mass = exact_sum(weights, bound=BLOCK)
        accepted = ~first & (above >= min_p_floor) & (mass < loop.limit)
        done = loop.done | accepted
        token = jnp.where(done, loop.token, race.winner(weights, kept, above, loop.turn))
        limit = jnp.where(first, top_p * mass, loop.limit)
        return _Loop(token, done | settled, limit, loop.turn + jnp.uint32(1))

    start = _Loop(jnp.zeros_like(batch.slot), jnp.zeros_like(random), nowhere, jnp.uint32(0))
    return jax.lax.while_loop(lambda loop: ~jnp.all(loop.done), turn, start).token


class _Loop(NamedTuple):
    """Rows that redraw until their token lies in the nucleus; limit is top_p of their mass."""

    token: Int32[Array, " S"]
    done: Bool[Array, " S"]
    limit: Float32[Array, " S"]
    turn: UInt32[Array, ""]


@dataclass(frozen=True)
class _Race:
    """One step's rows and their noise; see the module's head."""

    blocks: Float32[Array, "S N b"]
    peaks: Float32[Array, "S N"]
    top: Float32[Array, " S"]
    inverse: Float32[Array, " S"]
    keys: UInt32[Array, "S 2"]

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
        peak = jnp.take_along_axis(self.peaks, index[:, None], axis=1, mode="clip")
        kept = (block >= floor[:, None]) & (block > above[:, None])
        inner = jnp.where(kept, relative_weights(block, peak, self.inverse[:, None]), 0.0)
        inside = jnp.argmax(inner / noise[:, :BLOCK], axis=1).astype(jnp.int32)
        return index * BLOCK + inside


def _exponentials(
    keys: UInt32[Array, "S 2"], turn: UInt32[Array, ""], places: int
) -> Float32[Array, "S n"]:
    """Exp(1) noise: two places a threefry block, whose counter is (block, turn)."""
    half = -(-places // 2)
    counters = jnp.concatenate([jnp.arange(half, dtype=jnp.uint32), jnp.full(half, turn)])
    bits = jax.vmap(threefry_2x32, in_axes=(0, None))(keys, counters)[:, :places]
    # Small values decide a race, so keep their full resolution: uniform in [2**-33, 1 - 2**-24].
    uniform = jnp.maximum(bits.astype(jnp.float32), 0.5) * 2.0**-32
    return -jnp.log1p(-jnp.minimum(uniform, 1.0 - 2.0**-24))
