"""How the decode kernel is laid out on the chip, and what fits there."""

from dataclasses import dataclass

from octavo.attention.hopper import MULTIPROCESSORS, SMEM_BYTES
from octavo.attention.splits import BLOCK, longest_chunk

TILE_ROWS = 64
"""Rows of a wgmma tile; the query heads of a KV head times the queries of a row must fit in it."""

BARRIER_BYTES = 2048


@dataclass(frozen=True)
class DecodeTuning:
    """How the kernel is laid out on the chip. Only the first can change a result's rounding.

    Attributes:
        chunk: tokens of context a work item, a multiple of 64; a row's last one has between half
            and one and a half of it.
        stages: pages' tiles in each ring.
        pairs: memory and compute warpgroups a block, 1 or 2 of each.
        num_blocks: thread blocks of the persistent grid, one a multiprocessor.
        interpreted: softmax weights go through shared memory: slower, but Pallas' interpreter
            doesn't multiply from registers.
    """

    chunk: int = 1024
    stages: int = 2
    pairs: int = 2
    num_blocks: int = MULTIPROCESSORS
    interpreted: bool = False

    def __post_init__(self) -> None:
        if self.chunk <= 0 or self.chunk % BLOCK:
            raise ValueError(f"chunk={self.chunk} must be a positive multiple of {BLOCK}")
        if self.stages < 2:
            raise ValueError(f"stages={self.stages} must be at least 2")
        if self.pairs not in (1, 2):
            raise ValueError(f"pairs={self.pairs} must be 1 or 2")
        if self.num_blocks < 1:
            raise ValueError(f"num_blocks={self.num_blocks} must be positive")

    def smem_bytes(self, head_dim: int) -> int:
        """Shared memory of a block, in bytes."""
        tiles = TILE_ROWS + 2 * self.stages * BLOCK
        weights = TILE_ROWS * BLOCK * 2 if self.interpreted else 0
        return self.pairs * (tiles * head_dim * 2 + weights + TILE_ROWS * 4) + BARRIER_BYTES


def default_tuning(head_dim: int) -> DecodeTuning:
    """Deepest rings that fit: two pairs up to head_dim 128, one above."""
    pairs = 2 if head_dim <= 128 else 1
    fitting = [
        tuning
        for stages in (2, 3, 4)
        if (tuning := DecodeTuning(stages=stages, pairs=pairs)).smem_bytes(head_dim) <= SMEM_BYTES
    ]
    return fitting[-1]


def one_chunk_tokens(head_dim: int) -> int:
    """Tokens of the longest context whose attention is one work item: nothing is to be combined."""
    return longest_chunk(default_tuning(head_dim).chunk)
