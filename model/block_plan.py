"""How the kernel between two attentions deals a layer's matrices to thread blocks.

A matrix [depth, width] is cut into items: `tiles` tiles of 64 output columns times a `splits`-th of
its depth. The cut depends on the shapes alone, never on the rows of the step, so a row's sums are
added in the same order in any batch.

With 128 blocks (bytes of bfloat16 weights a block streams; of activations it reads at 64 rows):

    Llama-3-8B          tiles  splits  items  a block's weights  activations
    out    4096 x 4096    2      4      128       0.26 MB          0.13 MB
    gate/up 4096 x 28672  4      1      112       2.10             0.52
    down  14336 x 4096    4      8      128       0.92             0.23
    qkv    4096 x 6144    3      4      128       0.39             0.13
    Llama-3.2-1B
    out    2048 x 2048    1      4      128       0.07             0.07
    gate/up 2048 x 16384  2      1      128       0.52             0.26
    down   8192 x 2048    2      8      128       0.26             0.13
    qkv    2048 x 3072    3      8      128       0.10             0.03
"""

from collections.abc import Iterator
from dataclasses import dataclass

from octavo.attention.hopper import SMEM_BYTES

TILE = 64
"""Columns of a tile, depth of a step and rows of a wgmma: 128 bytes of bfloat16 in each line."""

MAX_TILES = 4
"""Tiles of an item: their float32 accumulators take 128 of a thread's registers."""

MAX_SPLITS = 16

TILE_BYTES = TILE * TILE * 2
BARRIER_BYTES = 4096


@dataclass(frozen=True)
class Product:
    """One matrix and its cut.

    Attributes:
        depth, width: of the matrix; a gated one holds the gate's columns, then up's.
        tiles: tiles of TILE columns an item has; of a gated one half are gate's, half up's.
        splits: parts of the depth; each leaves its own partial sums.
        gated: whether the result is silu(gate) * up, which takes the whole depth.
    """

    depth: int
    width: int
    tiles: int
    splits: int = 1
    gated: bool = False

    def __post_init__(self) -> None:
        if self.width % (TILE * self.tiles) or self.depth % (TILE * self.splits):
            raise ValueError(f"{self} does not divide into tiles of {TILE}")
        if self.gated and (self.tiles % 2 or self.splits > 1):
            raise ValueError(f"{self}: a gated item has pairs of tiles and the whole depth")

    @property
    def columns(self) -> int:
        """Items side by side."""
        return self.width // (TILE * self.tiles)

    @property
    def items(self) -> int:
        """Pieces of work that blocks are dealt."""
        return self.columns * self.splits

    @property
    def steps(self) -> int:
        """Steps of TILE along an item's depth."""
        return self.depth // (TILE * self.splits)

    def block_bytes(self, num_blocks: int, rows: int) -> int:
        """Bytes that the busiest block moves for so many rows: weights, activations, sums.

        Sums are counted three times: written, read by the next phase, written back to memory.
        """
        columns = TILE * self.tiles
        weights = TILE * self.steps * columns * 2
        activations = TILE * self.steps * rows * 2
        sums = columns * rows if self.gated else 3 * columns * rows * 4
        return -(-self.items // num_blocks) * (weights + activations + sums)


def cut(depth: int, width: int, num_blocks: int, gated: bool = False) -> Product:
    """The cut whose busiest block moves the fewest bytes at 64 rows; fewer splits break a tie."""
    options = list(_cuts(depth, width, gated))
    if not options:
        raise NotImplementedError(f"a matrix [{depth}, {width}] does not divide into {TILE}s")
    return min(options, key=lambda p: (p.block_bytes(num_blocks, 64), p.splits, p.tiles))


def _cuts(depth: int, width: int, gated: bool) -> Iterator[Product]:
    for tiles in range(1, MAX_TILES + 1):
        for splits in range(1, 2 if gated else MAX_SPLITS + 1):
            try:
                yield Product(depth, width, tiles, splits, gated)
            except ValueError:
                continue


@dataclass(frozen=True)
class BlockPlan:
    """The cuts of the matrices between two attentions; `qkv` is None after the last layer."""

    out: Product
    gate_up: Product
    down: Product
    qkv: Product | None

    def products(self) -> tuple[Product, ...]:
        """In the order of their use."""
        return tuple(p for p in (self.out, self.gate_up, self.down, self.qkv) if p is not None)


def plan_block(heads: int, embed: int, ffn: int, qkv: int | None, num_blocks: int) -> BlockPlan:
    """Cuts for attention results of `heads` columns, hidden size `embed`, MLP width `ffn`.

    Raises NotImplementedError where a matrix does not divide into tiles.
    """
    return BlockPlan(
        out=cut(heads, embed, num_blocks),
        gate_up=cut(embed, 2 * ffn, num_blocks, gated=True),
        down=cut(ffn, embed, num_blocks),
        qkv=None if qkv is None else cut(embed, qkv, num_blocks),
    )


@dataclass(frozen=True)
class BlockTuning:
    """How the kernel is laid out on the chip; nothing here changes a result.

    Attributes:
        num_blocks: thread blocks, all of which must be on the device at once.
        ring: weight tiles of 8 KB in flight in a block.
        activation_ring: steps' activations in flight, 8 KB a row tile.
        row_tiles: tiles of 64 rows that a step has, 1 or 2, each with a warpgroup that multiplies.
        interpreted: the grid is one cluster, whose barriers Pallas' interpreter has.
    """

    num_blocks: int = 128
    ring: int = 20
    activation_ring: int = 4
    row_tiles: int = 1
    interpreted: bool = False

    def __post_init__(self) -> None:
        if self.row_tiles not in (1, 2):
            raise ValueError(f"{self}: row_tiles must be 1 or 2")
        if self.num_blocks < 1 or self.ring < 4 or self.activation_ring < 1:
            raise ValueError(f"{self}: blocks and activation ring from 1, ring from 4")
        if self.smem_bytes() > SMEM_BYTES:
            raise ValueError(f"{self} needs {self.smem_bytes()} bytes of shared memory")

    def smem_bytes(self) -> int:
        """Shared memory of a block, in bytes; a row tile's results are staged in three tiles'."""
        tiles = self.ring + self.row_tiles * (self.activation_ring + 3)
        return tiles * TILE_BYTES + BARRIER_BYTES


@dataclass(frozen=True)
class BlockShape:
    """What is static about a launch. `rows` is a multiple of 8 up to 64, or 128."""

    rows: int
    embed: int
    eps: float
    plan: BlockPlan
