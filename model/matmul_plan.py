"""How the matmul of many rows is cut into tiles for thread blocks.

A product [rows, depth] x [depth, width] is cut into tiles of 2 * ROWS rows and `columns` columns,
each the work of a cluster of two thread blocks, which take ROWS of the rows each and fetch the
weights once for both. What a tile sums up, and in which order, depends on neither its size
nor its place: a row's results are the same bits in any tile, so also for any number of rows, unless
the depth is split. `choose` splits it only where whole tiles are too few for the chip.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from enum import Enum

from octavo.attention.hopper import MULTIPROCESSORS, SMEM_BYTES

ROWS = 128
"""Rows of a block in a tile: 64 for each of the two warpgroups that multiply."""

CLUSTER = 2
"""Blocks that share a tile's weights."""

STEP = 64
"""Depth of a step: 128 bytes of bfloat16 in each line."""

WIDTHS = (64, 96, 128, 192, 256)
"""Columns that a tile may have."""

BARRIER_BYTES = 1024
STAGED_BYTES = 2 * 2 * 64 * 128
"""Where results leave from: two lots a warpgroup, of 64 rows of 128 bytes."""

SPLIT_ROWS = 256
"""Rows up to which a narrow product's depth is split; beyond, and where it is 0, none is."""


class Epilogue(Enum):
    """What becomes of a tile's sums, which are float32."""

    PLAIN = "plain"  # rounded
    RESIDUAL = "residual"  # rounded, added to what was there, rounded
    GATED = "gated"  # silu(gate) * up of columns of both, rounded before and after
    SUMS = "sums"  # stored as they are, each split's for itself


@dataclass(frozen=True)
class MatmulShape:
    """What is static about a product; a gated one's width is that of its result."""

    rows: int
    depth: int
    width: int
    epilogue: Epilogue = Epilogue.PLAIN

    @property
    def parts(self) -> int:
        """Matrices side by side: the gate's and up's, or one."""
        return 2 if self.epilogue is Epilogue.GATED else 1


@dataclass(frozen=True)
class MatmulTuning:
    """How the kernel is laid out on the chip. Of all this only `splits` changes a result.

    Attributes:
        columns: of a tile; of a gated one half are the gate's, half up's.
        splits: parts of the depth, summed up apart.
        stages: steps in flight in a block.
        group: tiles of rows that are gone through before the next columns.
        num_blocks: thread blocks of the persistent grid.
        tail: columns of the tiles that come last, so that the last round is as full as the others;
            0 for none.
        wide: how many tiles side by side have `columns`, if there is a tail.
    """

    columns: int = 256
    splits: int = 1
    stages: int = 4
    group: int = 8
    num_blocks: int = MULTIPROCESSORS
    tail: int = 0
    wide: int = 0

    def __post_init__(self) -> None:
        if self.columns not in WIDTHS or self.tail not in (0, *WIDTHS):
            raise ValueError(f"{self}: columns must be of {WIDTHS}, tail too, or 0")
        if self.tail > self.columns or self.wide < 0 or (self.wide == 0) != (self.tail == 0):
            raise ValueError(f"{self}: a tail is narrower and follows wide tiles")
        if min(self.splits, self.group) < 1 or self.stages < 2 or self.num_blocks < CLUSTER:
            raise ValueError(f"{self}: splits and group from 1, stages from 2, a cluster of blocks")
        if self.smem_bytes() > SMEM_BYTES:
            raise ValueError(f"{self} needs {self.smem_bytes()} bytes of shared memory")

    @property
    def clusters(self) -> int:
        """Of the persistent grid."""
        return self.num_blocks // CLUSTER

    def smem_bytes(self) -> int:
        """Shared memory of a block, in bytes."""
        return self.stages * (ROWS + self.columns) * STEP * 2 + STAGED_BYTES + BARRIER_BYTES


@dataclass(frozen=True)
class Section:
    """Column tiles of one width, each for all rows and splits.

    Attributes:
        columns: of a tile, of all its parts.
        first: the first one's first column of the result.
        tiles: side by side; the last may reach beyond the matrix.
        start: items of the sections before.
        items: pieces of work that clusters are dealt.
    """

    columns: int
    first: int
    tiles: int
    start: int
    items: int


@dataclass(frozen=True)
class Cut:
    """A product's tiles as a tuning has them.

    Attributes:
        row_tiles: one below the other; the last may reach beyond.
        sections: one, or two where the last tiles are narrower.
        steps: along a tile's depth, of one split.
    """

    row_tiles: int
    sections: tuple[Section, ...]
    splits: int
    steps: int
    group: int

    @property
    def items(self) -> int:
        """Pieces of work that clusters are dealt."""
        return sum(section.items for section in self.sections)


def cut(shape: MatmulShape, tuning: MatmulTuning) -> Cut:
    """The tiles; NotImplementedError where the depth does not divide into the splits."""
    steps, row_tiles = -(-shape.depth // STEP), -(-shape.rows // (CLUSTER * ROWS))
    if steps % tuning.splits:
        raise NotImplementedError(f"{steps} steps do not divide into {tuning.splits} splits")
    if (tuning.splits > 1) != (shape.epilogue is Epilogue.SUMS):
        raise NotImplementedError(f"{tuning.splits} splits with {shape.epilogue}")
    sections, first, start = [], 0, 0
    for columns, most in ((tuning.columns, tuning.wide), (tuning.tail, 0)):
        if columns == 0 or first >= shape.width:
            continue
        if columns % (32 * shape.parts):
            raise NotImplementedError(f"tiles of {columns} columns for {shape.parts} matrices")
        own = columns // shape.parts
        tiles = -(-(shape.width - first) // own)
        tiles = min(tiles, most) if most else tiles
        items = tiles * row_tiles * tuning.splits
        sections.append(Section(columns, first, tiles, start, items))
        first, start = first + tiles * own, start + items
    return Cut(row_tiles, tuple(sections), tuning.splits, steps // tuning.splits, tuning.group)


STEP_CYCLES = {256: 1024, 192: 800, 128: 640, 96: 550, 64: 470}
"""Cycles of a step by a tile's columns: of the tensor cores (4 a column) at 256, and below that
more, for shared memory takes and gives 128 bytes a cycle and a small tile uses each byte less."""

TILE_CYCLES = 2000
"""Of a tile beside its steps: the first fetch that nothing hides, and its results."""

SUM_CYCLES = {"written": 1 / 32, "read": 2 / 2900, "launch": 5000}
"""A byte of float32 sums, written by its block, and read (and written to the L2) by the chip; and
of the kernel that adds them up."""


def cycles(shape: MatmulShape, tuning: MatmulTuning) -> float:
    """About how long a product takes: the busiest cluster's tiles, and the sums of splits."""
    done, clusters = cut(shape, tuning), tuning.clusters
    sums = shape.epilogue is Epilogue.SUMS
    busy = [0.0] * clusters
    for section in done.sections:
        tile = done.steps * STEP_CYCLES[section.columns] + TILE_CYCLES
        tile += ROWS * section.columns * 4 * SUM_CYCLES["written"] if sums else 0
        for cluster in range(clusters):
            left = section.items - (cluster - section.start) % clusters
            busy[cluster] += tile * -(-left // clusters)
    if not sums:
        return max(busy)
    size = tuning.splits * shape.rows * shape.width * 4
    return max(busy) + size * SUM_CYCLES["read"] + SUM_CYCLES["launch"]


def choose(rows: int, depth: int, width: int, epilogue: Epilogue) -> MatmulTuning:
    """The tuning that is quickest by `cycles`; one with splits leaves sums to be added up."""
    options = []
    for tuning in _options(MatmulShape(rows, depth, width, epilogue)):
        kind = Epilogue.SUMS if tuning.splits > 1 else epilogue
        try:
            options.append((cycles(MatmulShape(rows, depth, width, kind), tuning), tuning))
        except NotImplementedError:
            continue
    return min(options, key=lambda option: option[0])[1]


def _options(shape: MatmulShape) -> Iterator[MatmulTuning]:
    """Whole tiles first, wide ones first: they win a tie."""
    few = shape.rows <= SPLIT_ROWS and shape.epilogue is not Epilogue.GATED
    for splits in (1, 2, 4, 8) if few else (1,):
        for columns, stages in ((256, 4), (192, 4), (128, 6), (64, 8)):
            yield MatmulTuning(columns, splits, stages)
    base = MatmulTuning()
    tiles = cut(shape, base)
    rounds = tiles.items // base.clusters
    for full in (rounds, rounds - 1):
        wide = full * base.clusters // tiles.row_tiles
        if 0 < wide < tiles.sections[0].tiles:
            yield from (replace(base, wide=wide, tail=tail) for tail in WIDTHS[-2::-1])
