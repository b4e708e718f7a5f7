"""What sampling should do, in float64 NumPy with sorts, and helpers to call the device's."""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from octavo.sampling.batch import SamplingBatch
from octavo.sampling.flags import SamplingFlags
from octavo.sampling.pack import allowed_mask, bias_arrays, pack_matrix
from octavo.sampling.params import MAX_LOGIT_BIAS, SamplingParams
from octavo.sampling.sampler import sample
from octavo.sampling.state import RowState, init_row_state, reset_row

ALL_FLAGS = SamplingFlags(filters=True, penalties=True, bias=True, min_tokens=True)

draw = jax.jit(
    lambda logits, matrix, state, flags: sample(
        logits, SamplingBatch.from_matrix(matrix), state, flags
    ),
    static_argnums=3,
)
reset = jax.jit(reset_row)


def draws(logits: np.ndarray, rows: Sequence, state: RowState | None, flags: SamplingFlags):
    """Tokens of `rows` (see pack.Row) under the compiled sampler."""
    matrix = jnp.asarray(pack_matrix(rows, len(logits)))
    return np.asarray(draw(jnp.asarray(logits, jnp.float32), matrix, state, flags))


def build_state(rows: Sequence[tuple[SamplingParams, list[int], list[int]]], vocab: int, size: int):
    """RowState whose slot i has the i-th row's (params, prompt, generated)."""
    state = init_row_state(len(rows), vocab)
    for slot, (params, prompt, generated) in enumerate(rows):
        ids, values = bias_arrays(params, MAX_LOGIT_BIAS)
        padded = [np.array(x + [-1] * (size - len(x)), np.int32) for x in (prompt, generated)]
        mask = allowed_mask(params, vocab)
        state = reset(state, np.int32(slot), *padded, mask, ids, values)
    return state


def transformed(logits: np.ndarray, params: SamplingParams, prompt, generated, stop_ids=()):
    """One row's logits after penalties, bias and bans, float64."""
    x = np.array(logits, np.float64)
    counts = np.bincount(np.array(generated, int), minlength=len(x))[: len(x)]
    seen = counts > 0
    seen[list(prompt)] = True
    factor = params.repetition_penalty
    x = np.where(seen, np.where(x > 0, x / factor, x * factor), x)
    x -= params.frequency_penalty * counts + params.presence_penalty * (counts > 0)
    for token, bias in params.logit_bias.items():
        x[token] += bias
    if params.allowed_token_ids is not None:
        x[np.setdiff1d(np.arange(len(x)), params.allowed_token_ids)] = -np.inf
    x[list(params.bad_token_ids)] = -np.inf
    if len(generated) < params.min_tokens:
        x[list(stop_ids)] = -np.inf
    return x


def probabilities(x: np.ndarray, params: SamplingParams, slack: float = 0.0) -> np.ndarray:
    """Distribution of the drawn token given transformed logits.

    `slack` widens (or, negative, narrows) each cut a little, to bound what rounding may do.
    """
    if params.is_greedy:
        return (np.arange(len(x)) == np.argmax(x)).astype(np.float64)
    p = np.exp((x - x.max()) / params.temperature)
    order = np.argsort(-p, kind="stable")
    keep = p > 0
    if 0 < params.top_k < len(x):
        keep &= x >= x[order[params.top_k - 1]] - slack
    p = np.where(keep, p, 0)
    if params.top_p < 1:
        above = np.array([p[x > value].sum() for value in x]) / p.sum()
        keep &= above < params.top_p + slack
    keep &= p >= params.min_p * p.max() * (1 - slack)
    p = np.where(keep, p, 0)
    return p / p.sum()
