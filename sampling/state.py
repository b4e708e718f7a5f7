"""What sampling remembers of each row slot: on the device, donated, updated in place.

It lives there because an overlapped host does not know the last token when it packs a step.
"""

from dataclasses import dataclass, replace
from functools import partial

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float32, Int32, UInt32

from octavo.sampling.params import MAX_LOGIT_BIAS

WORD = 32


@partial(
    jax.tree_util.register_dataclass,
    data_fields=["counts", "prompt_seen", "allowed", "bias_ids", "bias_values"],
    meta_fields=[],
)
@dataclass(frozen=True)
class RowState:
    """Per row slot (R of them) what penalties, bias and bans need.

    Attributes:
        counts: how often each token was generated.
        prompt_seen: bitmask of the prompt's tokens (bit t % 32 of word t // 32).
        allowed: bitmask of the tokens that may be drawn.
        bias_ids, bias_values: sparse logit bias; -1 pads the ids.
    """

    counts: Int32[Array, "R V"]
    prompt_seen: UInt32[Array, "R words"]
    allowed: UInt32[Array, "R words"]
    bias_ids: Int32[Array, "R B"]
    bias_values: Float32[Array, "R B"]


def init_row_state(num_slots: int, vocab_size: int) -> RowState:
    """State of slots that restrict nothing; 4 * num_slots * vocab_size bytes and a little."""
    words = -(-vocab_size // WORD)
    return RowState(
        counts=jnp.zeros((num_slots, vocab_size), jnp.int32),
        prompt_seen=jnp.zeros((num_slots, words), jnp.uint32),
        allowed=jnp.full((num_slots, words), 0xFFFFFFFF, jnp.uint32),
        bias_ids=jnp.full((num_slots, MAX_LOGIT_BIAS), -1, jnp.int32),
        bias_values=jnp.zeros((num_slots, MAX_LOGIT_BIAS), jnp.float32),
    )


def reset_row(
    state: RowState,
    slot: Int32[Array, ""],
    prompt_ids: Int32[Array, " P"],
    generated_ids: Int32[Array, " G"],
    allowed: UInt32[Array, " words"],
    bias_ids: Int32[Array, " B"],
    bias_values: Float32[Array, " B"],
) -> RowState:
    """Builds one slot anew from a request's history; -1 pads the id arrays.

    After preemption `generated_ids` holds the tokens emitted so far. `allowed` and the bias come
    from `pack.allowed_mask` and `pack.bias_arrays`. A slot beyond the state changes nothing.
    """
    vocab_size = state.counts.shape[1]
    counts = jnp.zeros(vocab_size, jnp.int32)
    counts = counts.at[_valid(generated_ids, vocab_size)].add(1, mode="drop")
    seen = jnp.zeros(state.prompt_seen.shape[1] * WORD, jnp.bool_)
    seen = seen.at[_valid(prompt_ids, vocab_size)].set(True, mode="drop")
    return RowState(
        counts=state.counts.at[slot].set(counts, mode="drop"),
        prompt_seen=state.prompt_seen.at[slot].set(pack_bits(seen), mode="drop"),
        allowed=state.allowed.at[slot].set(allowed, mode="drop"),
        bias_ids=state.bias_ids.at[slot].set(bias_ids, mode="drop"),
        bias_values=state.bias_values.at[slot].set(bias_values, mode="drop"),
    )


def record(
    state: RowState,
    slots: Int32[Array, " S"],
    tokens: Int32[Array, " S"],
    live: Bool[Array, " S"],
) -> RowState:
    """Counts each live row's drawn token; padding slots and tokens outside 0 .. V-1 are dropped."""
    num_slots, vocab_size = state.counts.shape
    rows = jnp.where(live, slots, num_slots)
    counts = state.counts.at[rows, _valid(tokens, vocab_size)].add(1, mode="drop")
    return replace(state, counts=counts)


def pack_bits(bits: Bool[Array, " n"]) -> UInt32[Array, " words"]:
    """Bitmask of n (a multiple of 32) booleans, lowest bit first."""
    places = jnp.left_shift(jnp.uint32(1), jnp.arange(WORD, dtype=jnp.uint32))
    grouped = bits.reshape(-1, WORD).astype(jnp.uint32)
    return jnp.sum(grouped * places[None, :], axis=1, dtype=jnp.uint32)


def unpack_bits(words: UInt32[Array, "S words"], size: int) -> Bool[Array, "S size"]:
    """The first `size` bits of each row's mask."""
    shifts = jnp.arange(WORD, dtype=jnp.uint32)
    bits = jnp.right_shift(words[:, :, None], shifts[None, None, :]) & jnp.uint32(1)
    return bits.reshape(words.shape[0], -1)[:, :size] != 0


def _valid(ids: Int32[Array, " n"], vocab_size: int) -> Int32[Array, " n"]:
    # A negative index would wrap to the end; one beyond the end is dropped.
    return jnp.where(ids < 0, vocab_size, ids)
