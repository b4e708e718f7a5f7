"""How the products of few rows are cut into tiles for thread blocks."""

from dataclasses import dataclass

from octavo.model.config import ModelConfig

NUM_COUNTS = 512
"""Tiles side by side that a product with a split depth may have."""

SIZES_OF = 64
"""What every matrix' depth and width are multiples of."""

MAX_ROWS = 64
"""Rows of a step that these products are for."""


@dataclass(frozen=True)
class Tiles:
    """How a product is cut. Of all this only `splits` and `step` change a result.

    Attributes:
        columns: of the result that a block computes; of a gated product as many of gate and of up.
        step: depth that a block multiplies at once.
        splits: parts of the depth, each a block's.
        stages: steps in flight in a block, and one.
        warps: of a block.
        interpreted: run by Pallas' interpreter.
    """

    columns: int
    step: int
    splits: int = 1
    stages: int = 4
    warps: int = 4
    interpreted: bool = False

    def check(self, depth: int, width: int, gated: bool) -> None:
        """NotImplementedError where a product [depth, width] does not divide into these."""
        if width % self.columns or depth % (self.step * self.splits):
            raise NotImplementedError(f"[{depth}, {width}] does not divide into {self}")
        if self.splits > 1 and (gated or width // self.columns > NUM_COUNTS):
            raise NotImplementedError(f"[{depth}, {width}], gated: {gated}: no splits as in {self}")


@dataclass(frozen=True)
class LayerTiles:
    """The tiles of the four products between two attentions."""

    out: Tiles
    gate_up: Tiles
    down: Tiles
    qkv: Tiles


def choose(config: ModelConfig, rows: int) -> LayerTiles:
    """The tiles in use for a model's decode steps of so many rows."""
    del config
    if rows <= 16:
        narrow = Tiles(32, 128, 1, 6)
        return LayerTiles(narrow, Tiles(64, 64, 1, 5), narrow, Tiles(32, 128, 1, 6))
    narrow = Tiles(128, 64, 4, 6)
    return LayerTiles(narrow, Tiles(128, 64, 1, 4, 8), narrow, Tiles(128, 64, 2, 6))
