"""`make_generate`: prompts to tokens as one jitted pure function, on the engine's own graph."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Int32

from octavo.attention.contract import AttentionMeta
from octavo.cache.layout import init_cache
from octavo.model.config import ModelConfig
from octavo.model.families import family_of
from octavo.sampling.batch import SamplingBatch, SamplingFlags
from octavo.sampling.pack import allowed_mask, bias_arrays, pack_matrix
from octavo.sampling.params import MAX_LOGIT_BIAS, SamplingParams
from octavo.sampling.sampler import sample
from octavo.sampling.state import RowState, init_row_state, record, reset_row

PAGE_SIZE = 16

Generate = Callable[[Any, Array, Array, Array], Array]


def make_generate(
    config: ModelConfig,
    *,
    max_tokens: int,
    sampling: SamplingParams | None = None,
    eos_ids: tuple[int, ...] = (),
    attention: str = "auto",
) -> Generate:
    """A jitted function (params, tokens i32[B, T], lengths i32[B], key) -> i32[B, max_tokens].

    Row b's prompt is tokens[b, :lengths[b]], 1 <= lengths[b] <= T; what follows is padding. Each
    row draws with its own stream from `key`; after a stop id its tokens are -1. `eos_ids` (say,
    config.eos_ids) are stop ids unless sampling.ignore_eos. `sampling` gives
    temperature, filters, penalties, bias, min_tokens and stop ids; its max_tokens, n, seed, stop
    strings and logprobs play no part here.
    """
    if max_tokens < 1:
        raise ValueError(f"max_tokens must be at least 1, not {max_tokens}")
    params = replace(
        sampling or SamplingParams(temperature=0.0), max_tokens=None, logprobs=None, stop=()
    )
    return jax.jit(partial(_generate, config, max_tokens, params, eos_ids, attention))


def _generate(
    config: ModelConfig,
    max_tokens: int,
    sampling: SamplingParams,
    eos_ids: tuple[int, ...],
    attention: str,
    params: Any,
    tokens: Int32[Array, "B T"],
    lengths: Int32[Array, " B"],
    key: Array,
) -> Int32[Array, "B max_tokens"]:
    rows, width = tokens.shape
    family = family_of(config)
    flags = SamplingFlags.for_params([sampling])
    pages = -(-(width + max_tokens) // PAGE_SIZE)
    cache = init_cache(config.cache_layout(rows * pages + 1, PAGE_SIZE))
    tables = jnp.arange(1, rows * pages + 1, dtype=jnp.int32).reshape(rows, pages)
    batch = _batch(sampling, eos_ids, key, lengths)
    state = _state(config, sampling, tokens, lengths) if flags.needs_state else None

    # Padding runs as queries behind each prompt: nobody sees its keys, decode overwrites them.
    positions = jnp.tile(jnp.arange(width, dtype=jnp.int32), rows)
    meta = _meta(tables, jnp.full(rows, width, jnp.int32), positions.reshape(rows, width))
    hidden, cache = family.forward(
        params, config, tokens.reshape(-1), positions, cache, meta, attention
    )
    last = hidden.reshape(rows, width, -1)[jnp.arange(rows), lengths - 1]
    drawn, state, live = _draw(family.unembed(params, config, last), batch, state, flags)
    out = jnp.full((max_tokens, rows), -1, jnp.int32).at[0].set(drawn)

    def body(carry: tuple) -> tuple:
        step, cache, state, drawn, live, out = carry
        at = lengths + step - 1
        meta = _meta(tables, at + 1, at[:, None])
        hidden, cache = family.forward(params, config, drawn, at, cache, meta, attention)
        now = replace(batch, position=at + 1, generated=jnp.full_like(at, step))
        drawn, state, going = _draw(family.unembed(params, config, hidden), now, state, flags)
        out = out.at[step].set(jnp.where(live, drawn, -1))
        return step + 1, cache, state, drawn, live & going, out

    def unfinished(carry: tuple) -> Array:
        return (carry[0] < max_tokens) & carry[4].any()

    init = (jnp.int32(1), cache, state, drawn, live, out)
    return lax.while_loop(unfinished, body, init)[5].T


def _draw(
    logits: Array, batch: SamplingBatch, state: RowState | None, flags: SamplingFlags
) -> tuple[Array, RowState | None, Array]:
    """Tokens, the state that has noted them, and whether each row goes on."""
    drawn = sample(logits, batch, state, flags)
    going = ~(drawn[:, None] == batch.stop_ids).any(axis=1)
    if state is not None:
        state = record(state, batch.slot, drawn, jnp.ones_like(going))
    return drawn, state, going


def _batch(
    sampling: SamplingParams, eos_ids: tuple[int, ...], key: Array, lengths: Array
) -> SamplingBatch:
    rows = len(lengths)
    matrix = pack_matrix([(sampling, 0, 0, 0, row, 0, eos_ids) for row in range(rows)], rows)
    batch = SamplingBatch.from_matrix(jnp.asarray(matrix))
    return replace(batch, seed=jax.random.bits(key, (rows, 2), jnp.uint32), position=lengths)


def _state(
    config: ModelConfig, sampling: SamplingParams, tokens: Array, lengths: Array
) -> RowState:
    rows, width = tokens.shape
    state = init_row_state(rows, config.vocab_size)
    ids, values = bias_arrays(sampling, MAX_LOGIT_BIAS)
    allowed = jnp.asarray(allowed_mask(sampling, config.vocab_size))
    for row in range(rows):
        prompt = jnp.where(jnp.arange(width) < lengths[row], tokens[row], -1)
        nothing = jnp.full(1, -1, jnp.int32)
        state = reset_row(
            state, jnp.int32(row), prompt, nothing, allowed, jnp.asarray(ids), jnp.asarray(values)
        )
    return state


def _meta(tables: Array, kv_lens: Array, positions: Int32[Array, "B L"]) -> AttentionMeta:
    rows, queries = positions.shape
    pages = jnp.take_along_axis(tables, positions // PAGE_SIZE, axis=1)
    return AttentionMeta(
        block_tables=tables,
        kv_lens=kv_lens,
        query_starts=jnp.arange(rows + 1, dtype=jnp.int32) * queries,
        slots=(pages * PAGE_SIZE + positions % PAGE_SIZE).reshape(-1),
        num_rows=jnp.int32(rows),
        max_query_len=queries,
    )
