"""The ways to do all between two attentions of a decode step other than XLA's graph, by name."""

from collections.abc import Callable
from typing import NamedTuple

from jax.sharding import Mesh
from jaxtyping import Array

from octavo.model import decode_block, triton_block
from octavo.model.config import ModelConfig
from octavo.model.mosaic_block import no_arrivals
from octavo.model.triton_plan import MAX_ROWS
from octavo.model.triton_products import no_counts


class Block(NamedTuple):
    """One way.

    Attributes:
        max_rows: rows of a step up to which it is used; beyond, the graph is.
        pad: the residual stream [T, E] as the first layer's `between` takes it.
        begin: what the first layer's `between` takes as the state that it returns.
        between: see `decode_block.between_attentions`.
        refusal: why a model can't have it here (given its config and mesh), or None.
    """

    max_rows: int
    pad: Callable[[Array], Array]
    begin: Callable[[], Array]
    between: Callable[..., tuple[Array, Array, Array]]
    refusal: Callable[[ModelConfig, Mesh | None], str | None]


BLOCKS = {
    "mosaic": Block(
        decode_block.MAX_ROWS,
        decode_block.pad_rows,
        no_arrivals,
        decode_block.between_attentions,
        decode_block.block_refusal,
    ),
    "triton": Block(
        MAX_ROWS,
        lambda x: x,
        no_counts,
        triton_block.between_attentions,
        triton_block.triton_refusal,
    ),
}
