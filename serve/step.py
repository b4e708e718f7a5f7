"""The device programs of a step: pure functions that compile.py turns into executables.

`forward_step` and `sample_step` are two programs, so that a sampling variant costs a small compile
and a grammar mask can be uploaded between them; `decode_loop` fuses both for several decode steps
in one dispatch.
"""

from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh
from jaxtyping import Array, Float, Float32, Int32, UInt32

from octavo.attention.contract import AttentionMeta
from octavo.cache.layout import KVCache
from octavo.model.config import ModelConfig
from octavo.model.decoder import Attended
from octavo.model.families import Family
from octavo.sampling.batch import SamplingBatch, SamplingFlags
from octavo.sampling.logprobs import logprobs_of
from octavo.sampling.sampler import finite_rows, sample
from octavo.sampling.state import RowState, record, reset_row
from octavo.serve.buckets import Bucket
from octavo.serve.packing import PackLayout

Params = dict
States = Float[Array, "T E"] | Attended

PROMPT_CHUNK = 128
"""Rows whose logits exist at once while prompt log-probabilities are computed."""


@dataclass(frozen=True)
class Graph:
    """What every program closes over: the model's functions, and which of their implementations."""

    family: Family
    config: ModelConfig
    attention: str
    mesh: Mesh | None
    page_size: int
    block: str
    matmul: str

    def forward(
        self,
        params: Params,
        tokens: Int32[Array, " T"],
        positions: Int32[Array, " T"],
        cache: KVCache,
        meta: AttentionMeta,
    ) -> tuple[Float[Array, "T E"], KVCache]:
        """Hidden states after the final norm, and the cache with this step's keys and values."""
        return self.family.forward(
            params,
            self.config,
            tokens,
            positions,
            cache,
            meta,
            self.attention,
            self.mesh,
            self.block,
            self.matmul,
        )

    def attend_through(
        self,
        params: Params,
        tokens: Int32[Array, " T"],
        positions: Int32[Array, " T"],
        cache: KVCache,
        meta: AttentionMeta,
    ) -> tuple[Attended, KVCache]:
        """`forward` but for what follows the last layer's attention (`finish`)."""
        return self.family.attend_through(
            params,
            self.config,
            tokens,
            positions,
            cache,
            meta,
            self.attention,
            self.mesh,
            self.matmul,
        )


def unpack(layout: PackLayout, buffer: Int32[Array, " n"]) -> dict[str, Array]:
    """The arrays of a packed buffer, by name."""
    arrays = {}
    for field, start in zip(layout.fields, layout.starts):
        words = buffer[start : start + field.size].reshape(field.shape)
        dtype = {"i32": jnp.int32, "f32": jnp.float32, "u32": jnp.uint32}[field.kind]
        arrays[field.name] = lax.bitcast_convert_type(words, dtype)
    return arrays


def forward_step(
    graph: Graph,
    bucket: Bucket,
    layout: PackLayout,
    params: Params,
    cache: KVCache,
    last_tokens: Int32[Array, " slots"],
    packed: Int32[Array, " n"],
) -> tuple[KVCache, Float32[Array, "S V"], States]:
    """Write the step's keys, run the model, unembed each row's last token.

    Returns the cache (the donated one), logits f32[S, V] of the rows' last tokens, and what hidden
    states of all tokens are made of, for those who need them (`states_step`).
    """
    x = unpack(layout, packed)
    meta = AttentionMeta(
        block_tables=x["block_tables"],
        kv_lens=x["kv_lens"],
        query_starts=x["query_starts"],
        slots=x["slots"],
        num_rows=x["num_rows"],
        max_query_len=bucket.max_query_len,
    )
    tokens = resolve_tokens(x["tokens"], last_tokens)
    if bucket.is_decode:
        hidden, cache = graph.forward(params, tokens, x["positions"], cache, meta)
        states = hidden
    else:
        states, cache = graph.attend_through(params, tokens, x["positions"], cache, meta)
        last = jax.tree.map(lambda array: array[x["last"]], states)
        hidden = states_step(graph, params, last)
    with jax.named_scope("unembed"):
        logits = graph.family.unembed(params, graph.config, hidden)
    return cache, logits, states


def states_step(graph: Graph, params: Params, attended: Attended) -> Float[Array, "T E"]:
    """Hidden states of all tokens of a mixed step; a decode step's forward program has them."""
    return graph.family.finish(params, graph.config, attended)


def resolve_tokens(
    tokens: Int32[Array, " T"], last_tokens: Int32[Array, " slots"]
) -> Int32[Array, " T"]:
    """Token ids, where -1 - slot stands for the last token sampled in that row slot."""
    return jnp.where(tokens < 0, last_tokens[jnp.maximum(-1 - tokens, 0)], tokens)


def sample_step(
    flags: SamplingFlags,
    layout: PackLayout,
    logits: Float32[Array, "S V"],
    last_tokens: Int32[Array, " slots"],
    state: RowState | None,
    packed: Int32[Array, " n"],
    mask: UInt32[Array, "S words"] | None = None,
) -> tuple[Int32[Array, " slots"], RowState | None, Int32[Array, "S W"]]:
    """Draw a token for each live row and note it in the device's per-slot state.

    `mask` are the tokens that grammars allow, when the flags say that some row has one.
    """
    x = unpack(layout, packed)
    live = x["live"] > 0
    batch = replace(SamplingBatch.from_matrix(x["sampling"]), mask=mask)
    tokens, out = draw(logits, batch, state, flags)
    last_tokens = note_tokens(last_tokens, batch.slot, tokens, live)
    if state is not None:
        state = record(state, batch.slot, tokens, live)
    return last_tokens, state, out


def draw(
    logits: Float32[Array, "S V"],
    batch: SamplingBatch,
    state: RowState | None,
    flags: SamplingFlags,
) -> tuple[Int32[Array, " S"], Int32[Array, "S W"]]:
    """Tokens and their packed report: [token, finite, (logprob, rank, top ids, top logprobs)]."""
    with jax.named_scope("sample"):
        tokens = sample(logits, batch, state, flags)
        columns = [tokens[:, None], finite_rows(logits, flags).astype(jnp.int32)[:, None]]
    if flags.logprobs >= 0:
        columns += logprob_columns(logits, tokens, flags.logprobs)
    return tokens, jnp.concatenate(columns, axis=1)


def logprob_columns(
    logits: Float32[Array, "S V"], tokens: Int32[Array, " S"], top_n: int
) -> list[Int32[Array, "S _"]]:
    """Log-probability, rank, top ids and top log-probabilities as int32 columns."""
    with jax.named_scope("logprobs"):
        found = logprobs_of(logits, tokens, top_n)
    as_bits = lambda x: lax.bitcast_convert_type(x, jnp.int32)  # noqa: E731
    columns = [as_bits(found.logprob)[:, None], found.rank[:, None]]
    if top_n:
        columns += [found.top_ids, as_bits(found.top_logprobs)]
    return columns


def note_tokens(
    last_tokens: Int32[Array, " slots"],
    slots: Int32[Array, " S"],
    tokens: Int32[Array, " S"],
    live: Array,
) -> Int32[Array, " slots"]:
    """`last_tokens` with live rows' tokens written; dead rows write nowhere."""
    target = jnp.where(live, slots, last_tokens.shape[0])
    return last_tokens.at[target].set(tokens, mode="drop")


def decode_loop(
    graph: Graph,
    bucket: Bucket,
    max_steps: int,
    flags: SamplingFlags,
    layout: PackLayout,
    params: Params,
    cache: KVCache,
    last_tokens: Int32[Array, " slots"],
    packed: Int32[Array, " n"],
) -> tuple[KVCache, Int32[Array, " slots"], Int32[Array, "k S W"]]:
    """Up to `max_steps` decode steps with stop tests on the device.

    A row runs num_steps[row] steps or until it draws a stop id; then it writes to the padding page
    and its reports are -1. No row needs per-slot sampling state: the scheduler gives one that does
    single steps. Returns reports i32[max_steps, S, W] (see `draw`).
    """
    x = unpack(layout, packed)
    batch = SamplingBatch.from_matrix(x["sampling"])
    rows = bucket.rows
    width = 2 + (2 + 2 * flags.logprobs if flags.logprobs >= 0 else 0)

    def body(carry: tuple) -> tuple:
        i, cache, tokens, live, out = carry
        positions, meta = decode_meta(graph.page_size, x, i, live)
        hidden, cache = graph.forward(params, tokens, positions, cache, meta)
        logits = graph.family.unembed(params, graph.config, hidden)
        step_batch = replace(batch, position=batch.position + i, generated=batch.generated + i)
        drawn, report = draw(logits, step_batch, None, flags)
        out = out.at[i].set(jnp.where(live[:, None], report, -1))
        tokens = jnp.where(live, drawn, tokens)
        stopped = (drawn[:, None] == batch.stop_ids).any(axis=1)
        live = live & ~stopped & (i + 1 < x["num_steps"])
        return i + 1, cache, tokens, live, out

    def unfinished(carry: tuple) -> Array:
        return (carry[0] < max_steps) & carry[3].any()

    tokens = resolve_tokens(x["tokens"], last_tokens)
    live = x["num_steps"] > 0
    out = jnp.full((max_steps, rows, width), -1, jnp.int32)
    init = (jnp.int32(0), cache, tokens, live, out)
    _, cache, tokens, _, out = lax.while_loop(unfinished, body, init)
    last_tokens = note_tokens(last_tokens, batch.slot, tokens, live)
    return cache, last_tokens, out


def decode_meta(
    page: int, x: dict[str, Array], i: Array, live: Array
) -> tuple[Int32[Array, " S"], AttentionMeta]:
    """Positions and metadata of step i of a decode loop.

    Dead rows see nothing and write to the padding page.
    """
    positions = x["starts"] + i
    rows = len(positions)
    pages = jnp.take_along_axis(x["block_tables"], (positions // page)[:, None], axis=1)[:, 0]
    nowhere = jnp.arange(rows, dtype=jnp.int32) % page
    meta = AttentionMeta(
        block_tables=x["block_tables"],
        kv_lens=jnp.where(live, positions + 1, 0),
        query_starts=jnp.arange(rows + 1, dtype=jnp.int32),
        slots=jnp.where(live, pages * page + positions % page, nowhere),
        num_rows=x["num_rows"],
        max_query_len=1,
    )
    return positions, meta


def reset_step(layout: PackLayout, state: RowState, packed: Int32[Array, " n"]) -> RowState:
    """Build one slot's sampling state anew from its request's history."""
    x = unpack(layout, packed)
    return reset_row(
        state,
        x["slot"],
        x["prompt"],
        x["generated"],
        x["allowed"],
        x["bias_ids"],
        x["bias_values"],
    )


def prompt_logprobs_step(
    graph: Graph,
    top_n: int,
    params: Params,
    hidden: Float[Array, "T E"],
    targets: Int32[Array, " T"],
) -> Int32[Array, "T W"]:
    """Log-probability columns of `targets` under the logits of each hidden state.

    Chunked: logits of a whole 8k prefill would take 4 GB.
    """

    def chunk(pair: tuple[Array, Array]) -> Array:
        logits = graph.family.unembed(params, graph.config, pair[0])
        return jnp.concatenate(logprob_columns(logits, pair[1], top_n), axis=1)

    size = min(PROMPT_CHUNK, len(targets))
    chunks = -(-len(targets) // size)
    padding = chunks * size - len(targets)
    hidden = jnp.pad(hidden, ((0, padding), (0, 0))).reshape(chunks, size, -1)
    targets = jnp.pad(targets, (0, padding)).reshape(chunks, size)
    columns = lax.map(chunk, (hidden, targets))
    return columns.reshape(chunks * size, -1)[: chunks * size - padding]


def logits_step(graph: Graph, params: Params, hidden: Float[Array, "T E"]) -> Float32[Array, "T V"]:
    """Logits of every hidden state, for `score`."""
    return graph.family.unembed(params, graph.config, hidden)
