"""How the prefill kernel is laid out on the chip."""

from dataclasses import dataclass

from octavo.attention.hopper import MULTIPROCESSORS

WG_ROWS = 64
"""Rows of a compute warpgroup's tile, token and query head of a KV head."""


@dataclass(frozen=True)
class PrefillTuning:
    """How the kernel is laid out on the chip.

    Attributes:
        block: keys a pipeline step, 64 or 128.
        key_stages, value_stages: blocks in the two rings.
        num_blocks: thread blocks of the persistent grid, one a multiprocessor.
        interpreted: softmax weights go through shared memory: slower, but Pallas' interpreter
            doesn't multiply from registers.
    """

    block: int = 128
    key_stages: int = 2
    value_stages: int = 2
    num_blocks: int = MULTIPROCESSORS
    interpreted: bool = False

    def __post_init__(self) -> None:
        if self.block not in (64, 128):
            raise ValueError(f"block={self.block} must be 64 or 128")
        for name in ("key_stages", "value_stages", "num_blocks"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)} must be positive")

    def results_apart(self, head_dim: int) -> bool:
        """Whether there is room for a tile of results; else they take that of their queries."""
        return head_dim <= 128

    def smem_bytes(self, head_dim: int) -> int:
        """Shared memory of a block, in bytes."""
        weights = 2 * WG_ROWS * self.block if self.interpreted else 0
        q_tiles = 2 * (2 + self.results_apart(head_dim))
        tiles = (q_tiles * WG_ROWS + (self.key_stages + self.value_stages) * self.block) * head_dim
        return (tiles + weights) * 2 + 1024


def default_prefill_tuning(head_dim: int) -> PrefillTuning:
    """Blocks of 128 keys up to head_dim 128, of 64 above: a warpgroup's registers hold no more."""
    return PrefillTuning(
        block=128 if head_dim <= 128 else 64, value_stages=2 if head_dim < 256 else 1
    )
