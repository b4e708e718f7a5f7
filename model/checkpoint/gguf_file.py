"""The GGUF container: metadata and tensor directory of one file, every offset checked. No jax.

Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md, versions 2 and 3, little-endian.
The `gguf` package's own reader makes an array object per vocabulary entry (4.8 s for SmolLM2's
49k tokens, 0.15 s here) and reads past the end of a truncated file, so only its dequantisation
is used.
"""

import os
import struct
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import numpy as np

from octavo.model.checkpoint.source import CheckpointError

MAX_DIMS = 8
_CHUNK_ELEMENTS = 1 << 16  # fits a core's cache; 1 << 20 takes 1.7 times as long
MAX_ALIGNMENT = 1 << 16


@dataclass(frozen=True)
class BlockType:
    """How a tensor type packs its elements: `elements` of them in `num_bytes`."""

    code: int
    name: str
    elements: int
    num_bytes: int


BLOCK_TYPES = {
    t.code: t
    for t in (
        BlockType(0, "F32", 1, 4),
        BlockType(1, "F16", 1, 2),
        BlockType(2, "Q4_0", 32, 18),
        BlockType(3, "Q4_1", 32, 20),
        BlockType(6, "Q5_0", 32, 22),
        BlockType(7, "Q5_1", 32, 24),
        BlockType(8, "Q8_0", 32, 34),
        BlockType(12, "Q4_K", 256, 144),
        BlockType(13, "Q5_K", 256, 176),
        BlockType(14, "Q6_K", 256, 210),
        BlockType(30, "BF16", 1, 2),
    )
}

_SCALARS = {
    0: np.dtype("<u1"),
    1: np.dtype("<i1"),
    2: np.dtype("<u2"),
    3: np.dtype("<i2"),
    4: np.dtype("<u4"),
    5: np.dtype("<i4"),
    6: np.dtype("<f4"),
    7: np.dtype("?"),
    10: np.dtype("<u8"),
    11: np.dtype("<i8"),
    12: np.dtype("<f8"),
}
_STRING, _ARRAY = 8, 9


@dataclass(frozen=True)
class GgufTensor:
    """One tensor where it lies in its file.

    Attributes:
        name: ggml's name, e.g. "blk.0.attn_q.weight".
        type_code: ggml type; a key of BLOCK_TYPES if it can be read.
        shape: row-major, slowest dimension first ([out, in] for a matrix).
        offset: bytes from the start of the file.
        path, data: the file and its memory map.
    """

    name: str
    type_code: int
    shape: tuple[int, ...]
    offset: int
    path: Path
    data: np.memmap

    @property
    def block_type(self) -> BlockType:
        """The tensor's packing; CheckpointError naming type and tensor when it is not readable."""
        if self.type_code in BLOCK_TYPES:
            return BLOCK_TYPES[self.type_code]
        raise CheckpointError(
            f"{self.path}: tensor '{self.name}' has type {_type_name(self.type_code)};"
            f" readable are {', '.join(t.name for t in BLOCK_TYPES.values())}"
        )

    def raw(self) -> np.ndarray:
        """The blocks, uint8 [rows, bytes of a row] (a vector is one row), a view of the file.

        CheckpointError when the type is not readable or the bytes are not all there.
        """
        kind, row = self.block_type, self.shape[-1]
        if row % kind.elements:
            raise CheckpointError(
                f"{self.path}: tensor '{self.name}': rows of {row} do not divide into"
                f" {kind.name} blocks of {kind.elements}"
            )
        row_bytes = row // kind.elements * kind.num_bytes
        rows = prod(self.shape[:-1])
        end = self.offset + rows * row_bytes
        if end > self.data.size:
            raise CheckpointError(
                f"{self.path}: truncated: tensor '{self.name}' ends at byte {end},"
                f" the file at {self.data.size}"
            )
        return np.asarray(self.data[self.offset : end]).reshape(rows, row_bytes)


class _Cursor:
    """Reads forward through the header; refuses to step past the end of the file."""

    def __init__(self, path: Path, data: np.memmap) -> None:
        self.path = path
        self.data = memoryview(data)
        self.at = 0
        self.reading = "header"

    def fail(self, problem: str) -> CheckpointError:
        return CheckpointError(f"{self.path}: {problem} (reading {self.reading} at byte {self.at})")

    def take(self, num_bytes: int) -> memoryview:
        end = self.at + num_bytes
        if end > len(self.data):
            raise self.fail(f"truncated: {num_bytes} bytes wanted, file has {len(self.data)}")
        piece = self.data[self.at : end]
        self.at = end
        return piece

    def u32(self) -> int:
        return int.from_bytes(self.take(4), "little")

    def u64(self) -> int:
        return int.from_bytes(self.take(8), "little")

    def string(self) -> str:
        raw = bytes(self.take(self.u64()))
        try:
            return raw.decode("utf-8")
        except UnicodeDecodeError as error:
            raise self.fail(f"corrupt: text is not UTF-8 ({error.reason})") from None

    def value(self, kind: int) -> Any:
        if kind in _SCALARS:
            dtype = _SCALARS[kind]
            return np.frombuffer(self.take(dtype.itemsize), dtype)[0].item()
        if kind == _STRING:
            return self.string()
        if kind == _ARRAY:
            return self.array()
        raise self.fail(f"corrupt: unknown metadata type {kind}")

    def array(self) -> list[Any]:
        kind, count = self.u32(), self.u64()
        if kind in _SCALARS:
            dtype = _SCALARS[kind]
            return np.frombuffer(self.take(dtype.itemsize * count), dtype).tolist()
        if kind != _STRING:
            raise self.fail(f"corrupt: arrays of metadata type {kind} do not occur")
        # A string takes at least its length field: bounds the loop on a corrupt count.
        if 8 * count > len(self.data) - self.at:
            raise self.fail(f"truncated: an array of {count} strings does not fit")
        return self.strings(count)

    def strings(self, count: int) -> list[str]:
        # Vocabularies hold hundreds of thousands of strings: local names, no call per string.
        data, at, size = self.data, self.at, len(self.data)
        length_at = struct.Struct("<Q").unpack_from
        out = []
        try:
            for _ in range(count):
                start = at + 8
                at = start + length_at(data, at)[0]
                if at > size:
                    raise self.fail("truncated: a string reaches past the end")
                out.append(str(data[start:at], "utf-8"))
        except struct.error:
            raise self.fail("truncated: a string reaches past the end") from None
        except UnicodeDecodeError as error:
            raise self.fail(f"corrupt: text is not UTF-8 ({error.reason})") from None
        self.at = at
        return out


class GgufFile:
    """One memory-mapped file.

    Attributes:
        path: the file.
        metadata: key -> int, float, bool, str or list of these.
        tensors: name -> directory entry, in file order.
    """

    def __init__(self, path: str | Path) -> None:
        """Reads the header. CheckpointError if not GGUF, big-endian, truncated or corrupt."""
        self.path = Path(path)
        if self.path.stat().st_size < 24:
            raise CheckpointError(f"{self.path}: too short to be a GGUF file")
        data = np.memmap(self.path, mode="r")
        cursor = _Cursor(self.path, data)
        num_tensors, num_keys = _read_preamble(cursor)
        metadata_start = cursor.at
        self.metadata = _read_metadata(cursor, num_keys)
        self._metadata_span = (num_keys, metadata_start, cursor.at)
        self.tensors = _read_directory(cursor, num_tensors, self.metadata, data)

    def vocabulary(self) -> bytes:
        """A GGUF file with this one's metadata and no tensors."""
        num_keys, start, end = self._metadata_span
        with self.path.open("rb") as file:
            head = file.read(8)
            file.seek(start)
            return head + struct.pack("<QQ", 0, num_keys) + file.read(end - start)


def _type_name(code: int) -> str:
    from gguf.constants import GGMLQuantizationType

    try:
        return GGMLQuantizationType(code).name
    except ValueError:
        return f"number {code}"


def _read_preamble(cursor: _Cursor) -> tuple[int, int]:
    if bytes(cursor.take(4)) != b"GGUF":
        raise CheckpointError(f"{cursor.path}: not a GGUF file (its magic number is missing)")
    version = cursor.u32()
    if version & 0xFFFF == 0:
        raise CheckpointError(f"{cursor.path}: big-endian GGUF is not supported")
    if version not in (2, 3):
        raise CheckpointError(f"{cursor.path}: GGUF version {version}; 2 and 3 are readable")
    return cursor.u64(), cursor.u64()


def _read_metadata(cursor: _Cursor, count: int) -> dict[str, Any]:
    metadata: dict[str, Any] = {}
    for index in range(count):
        cursor.reading = f"metadata key {index}"
        key = cursor.string()
        cursor.reading = f"metadata '{key}'"
        if key in metadata:
            raise cursor.fail("corrupt: key occurs twice")
        metadata[key] = cursor.value(cursor.u32())
    return metadata


def _read_directory(
    cursor: _Cursor, count: int, metadata: dict[str, Any], data: np.memmap
) -> dict[str, GgufTensor]:
    entries = []
    for index in range(count):
        cursor.reading = f"directory entry {index}"
        entries.append(_read_entry(cursor))
    alignment = metadata.get("general.alignment", 32)
    if not (isinstance(alignment, int) and 0 < alignment <= MAX_ALIGNMENT):
        raise CheckpointError(f"{cursor.path}: corrupt: general.alignment is {alignment!r}")
    base = -(-cursor.at // alignment) * alignment
    tensors = {
        name: GgufTensor(name, code, shape, base + offset, cursor.path, data)
        for name, shape, code, offset in entries
    }
    if len(tensors) != count:
        raise CheckpointError(f"{cursor.path}: corrupt: a tensor name occurs twice")
    return tensors


def _read_entry(cursor: _Cursor) -> tuple[str, tuple[int, ...], int, int]:
    name = cursor.string()
    cursor.reading = f"tensor '{name}'"
    num_dims = cursor.u32()
    if not 1 <= num_dims <= MAX_DIMS:
        raise cursor.fail(f"corrupt: {num_dims} dimensions")
    shape = tuple(reversed([cursor.u64() for _ in range(num_dims)]))
    if 0 in shape:
        raise cursor.fail(f"corrupt: shape {shape}")
    return name, shape, cursor.u32(), cursor.u64()


def dequantise(raw: np.ndarray, kind: BlockType, dtype: np.dtype) -> np.ndarray:
    """Elements of uint8 blocks [rows, row bytes] as `dtype` [rows, row elements].

    Computed in float32 through the gguf package, in chunks by a few threads (numpy lets go of the
    interpreter), so that beside the result only chunks are alive. Values are gguf's to the bit,
    rounded once when dtype is narrower.
    """
    expand = _expander(kind)
    blocks = raw.reshape(-1, kind.num_bytes)
    out = np.empty((blocks.shape[0], kind.elements), dtype)
    step = _CHUNK_ELEMENTS // kind.elements

    def fill(start: int) -> None:
        chunk = blocks[start : start + step]
        out[start : start + step] = expand(chunk.reshape(1, -1)).reshape(-1, kind.elements)

    starts = range(0, blocks.shape[0], step)
    if len(starts) == 1:
        fill(0)
    else:
        with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:
            list(pool.map(fill, starts))
    return out.reshape(raw.shape[0], -1)


def _expander(kind: BlockType) -> Callable[[np.ndarray], np.ndarray]:
    from gguf.constants import GGMLQuantizationType
    from gguf.quants import dequantize

    type_id = GGMLQuantizationType(kind.code)
    return lambda blocks: dequantize(blocks, type_id)
