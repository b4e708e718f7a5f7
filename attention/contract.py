"""The types of the one attention operation: what is static, what travels as arrays.

Letters: T tokens in the step (padded), S rows (padded), P pages in a row's table (padded),
H query heads, K KV heads, D head dim, p page size.
"""

from dataclasses import dataclass, field
from functools import partial

import jax
from jaxtyping import Array, Int32

PADDING_PAGE = 0
"""Page that absorbs the writes of padding tokens and pads block tables; never allocated."""


@dataclass(frozen=True)
class AttentionSpec:
    """Static description of one layer's attention.

    Attributes:
        scale: factor on q·k before soft cap and softmax.
        window: tokens a query sees, itself included (key position > query position - window);
            None is unlimited.
        soft_cap: logits become cap * tanh(logits / cap); None is no cap.
        sinks: whether a per-head sink logit [H] joins each softmax's denominator.
        mesh_axis: mesh axis that shards KV heads (and their query heads); None is unsharded.
    """

    scale: float
    window: int | None = None
    soft_cap: float | None = None
    sinks: bool = False
    mesh_axis: str | None = None


@partial(
    jax.tree_util.register_dataclass,
    data_fields=["block_tables", "kv_lens", "query_starts", "slots", "num_rows"],
    meta_fields=["max_query_len"],
)
@dataclass(frozen=True)
class AttentionMeta:
    """Which tokens belong to which row, and where each row's keys live.

    Row r owns tokens query_starts[r] : query_starts[r + 1]; they are the *last* of its kv_lens[r]
    keys, so the query at offset i has position kv_lens[r] - query_len + i. Keys of this step are
    written before any row attends.

    Attributes:
        block_tables: pages of each row in order; the tail is PADDING_PAGE.
        kv_lens: keys of each row, this step's included; 0 on padding rows.
        query_starts: first token of each row; padding rows repeat the end.
        slots: flat cache slot (page * page_size + offset) of each token's key; padding tokens
            point into PADDING_PAGE.
        num_rows: live rows, which come first.
        max_query_len: static upper bound of a row's query tokens; 1 promises a pure decode step
            (token r is row r, T == S).
    """

    block_tables: Int32[Array, "S P"]
    kv_lens: Int32[Array, " S"]
    query_starts: Int32[Array, " S_plus_1"]
    slots: Int32[Array, " T"]
    num_rows: Int32[Array, ""]
    max_query_len: int = field(default=1)
