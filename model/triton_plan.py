"""How the products of few rows are cut into tiles for thread blocks."""

from dataclasses import dataclass

from octavo.model.config import ModelConfig

NUM_COUNTS = 512
"""Tiles side by side that a product with a split depth may have."""

MIN_ROWS = 16
"""Rows of the smallest tile that tensor cores multiply."""

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

    def blocks(self, width: int) -> int:
        """Thread blocks of a product whose result has so many columns."""
        return width // self.columns * self.splits

    def divides(self, depth: int, width: int) -> bool:
        """Whether a product [depth, width] divides into these."""
        return width % self.columns == 0 and depth % (self.step * self.splits) == 0

    def check(self, depth: int, width: int, gated: bool) -> None:
        """NotImplementedError where a product can't be cut like this."""
        if not self.divides(depth, width):
            raise NotImplementedError(f"[{depth}, {width}] does not divide into {self}")
        if self.splits > 1 and (gated or width // self.columns > NUM_COUNTS):
            raise NotImplementedError(f"[{depth}, {width}], gated: {gated}: no splits as in {self}")


def row_tile(rows: int) -> int:
    """Rows that a product of so many computes: a power of two."""
    return max(MIN_ROWS, 1 << (rows - 1).bit_length())


@dataclass(frozen=True)
class LayerTiles:
    """The tiles of the four products between two attentions."""

    out: Tiles
    gate_up: Tiles
    down: Tiles
    qkv: Tiles


PREFERRED = {
    "out": {
        16: (Tiles(64, 128, 2, 4), Tiles(32, 128, 1, 8)),
        32: (Tiles(128, 64, 4, 6), Tiles(32, 128, 1, 8)),
        64: (Tiles(64, 64, 2, 8), Tiles(32, 128, 1, 8)),
    },
    "gate_up": {
        16: (Tiles(128, 32, 1, 4), Tiles(64, 32, 1, 8)),
        32: (Tiles(128, 64, 1, 4, 8), Tiles(64, 64, 1, 3)),
        64: (Tiles(64, 64, 1, 3),),
    },
    "down": {
        16: (Tiles(128, 64, 4, 4), Tiles(64, 128, 4, 8)),
        32: (Tiles(128, 64, 4, 6), Tiles(64, 128, 4, 4)),
        64: (Tiles(64, 64, 2, 8), Tiles(64, 128, 4, 3)),
    },
    "qkv": {
        16: (Tiles(64, 128, 1, 8), Tiles(32, 128, 1, 8)),
        32: (Tiles(128, 64, 2, 6), Tiles(32, 128, 1, 6)),
        64: (Tiles(64, 128, 1, 6), Tiles(32, 128, 1, 4)),
    },
}
"""By product and row tile, the best first. The first are of the 8B shape, of the quickest layers
that were measured (docs/kernels.md); the second, for narrower matrices, of products alone."""

SHORT = 2048
"""Depth up to which none is split: adding the parts up takes longer than it saves."""

SMALLEST = Tiles(32, 32, 1, 8)
"""For sizes that no other divides."""

LEAST_BLOCKS = 96
"""Of the cuts that divide a product the first with so many is taken, or the one with most."""


def sizes(config: ModelConfig) -> dict[str, tuple[int, int]]:
    """Depth, and width of the result, of the four products of a model's layers."""
    kv_heads, group, dim = config.num_kv_heads, config.group_size, config.head_dim
    embed, ffn = config.hidden_size, config.intermediate_size
    return {
        "out": (kv_heads * group * dim, embed),
        "gate_up": (embed, ffn),
        "down": (ffn, embed),
        "qkv": (embed, kv_heads * (group + 2) * dim),
    }


def choose(config: ModelConfig, rows: int) -> LayerTiles:
    """The tiles in use for a model's decode steps of so many rows.

    Raises:
        NotImplementedError: a size that is no multiple of 32.
    """
    tile = row_tile(rows)
    return LayerTiles(**{name: _pick(name, tile, *size) for name, size in sizes(config).items()})


def _pick(product: str, tile: int, depth: int, width: int) -> Tiles:
    options = [
        tiles
        for tiles in (*PREFERRED[product][tile], SMALLEST)
        if tiles.divides(depth, width) and (tiles.splits == 1 or depth > SHORT)
    ]
    if not options:
        raise NotImplementedError(f"a matrix [{depth}, {width}] does not divide into {SMALLEST}")
    enough = [tiles for tiles in options if tiles.blocks(width) >= LEAST_BLOCKS]
    return enough[0] if enough else max(options, key=lambda tiles: tiles.blocks(width))
