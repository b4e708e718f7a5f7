"""Hugging Face folders: config.json beside one or several safetensors files, memory-mapped.

Format: https://github.com/huggingface/safetensors#format. Read here rather than through the
package so that tensors are views of the file (also bfloat16) and a damaged one can be named.
"""

import json
from dataclasses import dataclass
from itertools import pairwise
from math import prod
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from octavo.model.checkpoint.json_file import read_json
from octavo.model.checkpoint.source import CheckpointError

DTYPES = {
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
}
MAX_HEADER_BYTES = 100_000_000
INDEX_NAME = "model.safetensors.index.json"
PICKLE_SUFFIXES = (".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle")


@dataclass(frozen=True)
class Entry:
    """One tensor of a file: where its bytes are, what they mean."""

    path: Path
    dtype: str
    shape: tuple[int, ...]
    start: int
    end: int


def read_header(path: Path) -> dict[str, Entry]:
    """The tensors of one safetensors file; a truncated or inconsistent file is refused."""
    size = path.stat().st_size
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if size < 8 or length > min(size - 8, MAX_HEADER_BYTES):
            raise CheckpointError(f"{path} is truncated or no safetensors file: bad header length")
        try:
            header = json.loads(file.read(length))
        except (ValueError, RecursionError) as error:
            raise CheckpointError(f"{path}: header is not JSON: {error}") from error
    if not isinstance(header, dict):
        raise CheckpointError(f"{path}: header is a {type(header).__name__}, not an object")
    header.pop("__metadata__", None)
    entries = {name: _entry(path, name, fields, 8 + length) for name, fields in header.items()}
    for name, entry in entries.items():
        if entry.end > size:
            raise CheckpointError(
                f"{path} is truncated: tensor {name} ends at byte {entry.end} of {size}"
            )
    _refuse_overlaps(path, entries)
    if (end := max((entry.end for entry in entries.values()), default=8 + length)) != size:
        raise CheckpointError(f"{path}: {size - end} bytes after the last tensor")
    return entries


def _refuse_overlaps(path: Path, entries: dict[str, Entry]) -> None:
    ordered = sorted(entries.items(), key=lambda item: (item[1].start, item[1].end))
    for (name, entry), (following, after) in pairwise(ordered):
        if after.start < entry.end:
            raise CheckpointError(f"{path}: tensors {name} and {following} share bytes")


def _entry(path: Path, name: str, fields: Any, base: int) -> Entry:
    try:
        dtype, shape = str(fields["dtype"]), tuple(int(size) for size in fields["shape"])
        start, end = (base + int(offset) for offset in fields["data_offsets"])
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        raise CheckpointError(f"{path}: bad header entry of tensor {name}: {error!r}") from error
    if min(shape, default=0) < 0 or not base <= start <= end:
        raise CheckpointError(f"{path}: bad header entry of tensor {name}: negative size")
    if dtype in DTYPES and end - start != prod(shape) * DTYPES[dtype].itemsize:
        raise CheckpointError(
            f"{path}: tensor {name} of {dtype} {list(shape)} can't take {end - start} bytes"
        )
    return Entry(path, dtype, shape, start, end)


class HFSource:
    """TensorSource of a Hugging Face folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._entries: dict[str, Entry] = {}
        for path in tensor_files(folder):
            for name, entry in read_header(path).items():
                if name in self._entries:
                    first = self._entries[name].path
                    raise CheckpointError(f"tensor {name} is both in {first} and in {path}")
                self._entries[name] = entry
        self._maps: dict[Path, np.memmap] = {}

    def names(self) -> list[str]:
        """Every tensor of every file."""
        return list(self._entries)

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape as stored."""
        return self._entries[name].shape

    def read(self, name: str) -> np.ndarray:
        """A read-only view of the file; element types that aren't plain floats are refused."""
        entry = self._entries[name]
        if entry.dtype not in DTYPES:
            raise CheckpointError(
                f"{entry.path}: tensor {name} is {entry.dtype}; only {', '.join(DTYPES)} are read"
            )
        if entry.path not in self._maps:
            self._maps[entry.path] = np.memmap(entry.path, np.uint8, "r")
        stored = np.asarray(self._maps[entry.path])[entry.start : entry.end]
        return stored.view(DTYPES[entry.dtype]).reshape(entry.shape)

    def file_of(self, name: str) -> str:
        """Path of the safetensors file."""
        return str(self._entries[name].path)

    def config_dict(self) -> dict[str, Any]:
        """config.json."""
        return read_json(self.folder / "config.json")


def tensor_files(folder: Path) -> list[Path]:
    """The safetensors files of a model: those of the index, else the only one.

    Refuses folders with pickled weights only, without weights, or with a choice of files.
    """
    index = folder / INDEX_NAME
    if index.is_file():
        return _indexed_files(index)
    if (single := folder / "model.safetensors").is_file():
        return [single]
    found = sorted(folder.glob("*.safetensors"))
    if len(found) == 1:
        return found
    if found:
        listed = ", ".join(path.name for path in found)
        raise CheckpointError(f"{folder} has several weight files and no {INDEX_NAME}: {listed}")
    pickles = sorted(path for path in folder.glob("*") if path.suffix in PICKLE_SUFFIXES)
    if pickles:
        raise CheckpointError(
            f"{pickles[0]} is a pickle, which can run code when loaded; convert it to safetensors"
        )
    raise CheckpointError(f"{folder} has no *.safetensors file")


def _indexed_files(index: Path) -> list[Path]:
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{index} has no weight_map")
    files = {}
    for name, file in weight_map.items():
        if (
            not isinstance(file, str)
            or Path(file).name != file
            or not file.endswith(".safetensors")
        ):
            raise CheckpointError(
                f"{index}: tensor {name} is in {file!r}, no safetensors file here"
            )
        files.setdefault(file, name)
    for file, name in files.items():
        if not (index.parent / file).is_file():
            raise CheckpointError(f"{index.parent / file} is missing; it holds tensor {name}")
    return [index.parent / file for file in sorted(files)]
