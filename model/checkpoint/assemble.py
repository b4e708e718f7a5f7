"""Tensors of a checkpoint to parameter leaves on their devices, one leaf at a time.

The host holds at most one assembled leaf (and, for quantised files, one dequantised tensor) beside
the mapped file; a CPU device keeps the leaf itself. Transposing is what takes the
time, so each tensor is copied in slabs by threads.
"""

import os
import re
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Sharding
from tqdm import tqdm

from octavo.model.checkpoint.source import CheckpointError, TensorSource
from octavo.model.config import ModelConfig
from octavo.model.families import family_of
from octavo.model.names import Path, Piece
from octavo.model.params import ParamSpec, is_spec, param_bytes

NOT_WEIGHTS = re.compile(r"\.rotary_emb\.inv_freq$|\.masked_bias$|\.attn\.bias$")
"""Buffers that older versions of transformers saved; the graph computes them."""

_SLAB_BYTES = 2 << 20  # of 0.5, 1, 2 and 4 MiB the fastest with 16 threads (8 GB/s of bfloat16)
_ALIGNMENT = 64
_THREADS = min(16, os.cpu_count() or 1)
_SHOWN = 5


def assemble(source: TensorSource, config: ModelConfig, shardings: Any, progress: bool) -> Any:
    """The parameter tree of `config` from a source, each leaf placed as `shardings` says.

    `shardings` is a tree like the parameters, or None for the default device. Every tensor is
    checked against the config before any is read.
    """
    family = family_of(config)
    specs, names = family.abstract_params(config), family.hf_names(config)
    check_names(source, [piece for pieces in names.values() for piece in pieces])
    if config.tie_embeddings and "lm_head.weight" in source.names():
        _check_tied(source)
    flat, tree = jax.tree.flatten_with_path(specs, is_leaf=is_spec)
    places = [None] * len(flat) if shardings is None else jax.tree.leaves(shardings)
    leaves = []
    scratch = _scratch(places[0], max(spec.nbytes for _, spec in flat))
    bar = tqdm(total=param_bytes(specs), unit="B", unit_scale=True, disable=not progress)
    with bar, ThreadPoolExecutor(_THREADS) as pool:
        for (path, spec), place in zip(flat, places):
            host = _view(_aligned(spec.nbytes) if scratch is None else scratch, spec)
            _fill(host, source, names[_plain(path)], pool)
            leaves.append(jax.device_put(host, place).block_until_ready())
            bar.update(spec.nbytes)
    return tree.unflatten(leaves)


def _scratch(place: Sharding | None, size: int) -> np.ndarray | None:
    """Memory that every leaf is assembled in before it is copied to a device.

    None on a CPU, which takes a leaf over where it lies. Touching new memory for each leaf would
    cost more than its transposition and its transfer together (4 GB/s against 8 and 8 on an H200's
    host with 16 cores).
    """
    devices = jax.devices()[:1] if place is None else place.device_set
    return None if any(device.platform == "cpu" for device in devices) else _aligned(size)


def _aligned(size: int) -> np.ndarray:
    """Fresh bytes, aligned as a CPU device wants them of an array that it is to take over."""
    raw = np.empty(size + _ALIGNMENT, np.uint8)
    start = -raw.ctypes.data % _ALIGNMENT
    return raw[start : start + size]


def _view(memory: np.ndarray, spec: ParamSpec) -> np.ndarray:
    """The start of a stretch of bytes as a leaf."""
    return memory[: spec.nbytes].view(jnp.dtype(spec.dtype)).reshape(spec.shape)


def _plain(path: Iterable[Any]) -> Path:
    """jax's key path as the plain keys of `hf_names`."""
    return tuple(key.idx if hasattr(key, "idx") else key.key for key in path)


def check_names(source: TensorSource, pieces: list[Piece]) -> None:
    """Refuses missing, misshapen and unknown tensors, naming them and their file."""
    present, wanted = set(source.names()), {piece.name: piece for piece in pieces}
    if missing := [name for name in wanted if name not in present]:
        where = source.file_of(next(iter(present))) if present else "the checkpoint"
        raise CheckpointError(f"{where} (or a file beside it) lacks {_listed(missing)}")
    for name, piece in wanted.items():
        if source.shape(name) != piece.shape:
            raise CheckpointError(
                f"{source.file_of(name)}: tensor {name} has shape {list(source.shape(name))}, "
                f"the config asks for {list(piece.shape)}"
            )
    unknown = [
        name
        for name in source.names()
        if name not in wanted and name != "lm_head.weight" and not NOT_WEIGHTS.search(name)
    ]
    if unknown:
        raise CheckpointError(
            f"{source.file_of(unknown[0])}: this architecture has no place for {_listed(unknown)}"
        )


def _listed(names: list[str]) -> str:
    shown = ", ".join(names[:_SHOWN])
    return f"tensor {shown}" + (f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else "")


def _check_tied(source: TensorSource) -> None:
    """A tied model may store its head again, but only the same one."""
    head, embed = source.read("lm_head.weight"), source.read("model.embed_tokens.weight")
    if head.shape != embed.shape or not np.array_equal(_bits(head), _bits(embed)):
        raise CheckpointError(
            f"{source.file_of('lm_head.weight')}: tensor lm_head.weight differs from "
            "model.embed_tokens.weight although the config ties them (tie_word_embeddings)"
        )


def _fill(
    leaf: np.ndarray, source: TensorSource, pieces: tuple[Piece, ...], pool: ThreadPoolExecutor
) -> None:
    """Writes a leaf from its checkpoint tensors."""
    for piece in pieces:
        tensor = source.read(piece.name)
        tensor = tensor if piece.reshape is None else tensor.reshape(piece.reshape)
        target = leaf[piece.place]
        if piece.transpose is not None:
            target = target.transpose(np.argsort(piece.transpose))
        rows = max(1, _SLAB_BYTES * len(tensor) // max(1, tensor.nbytes))
        jobs = [
            pool.submit(_copy, tensor[row : row + rows], target, row, piece.repeat)
            for row in range(0, len(tensor), rows)
        ]
        finite = [job.result() for job in jobs]
        if not all(finite):
            raise CheckpointError(
                f"{source.file_of(piece.name)}: tensor {piece.name} holds NaN or infinity"
                f" (as {leaf.dtype})"
            )


def _copy(slab: np.ndarray, target: np.ndarray, row: int, repeat: int) -> bool:
    """Casts, checks and copies one slab; whether all its values are finite."""
    if slab.dtype != target.dtype:
        with np.errstate(over="ignore"):  # an overflow is infinity, which the check below finds
            slab = slab.astype(target.dtype)
    slab = slab if repeat == 1 else np.repeat(slab, repeat, axis=0)
    bits = _bits(slab)
    _bits(target)[row * repeat : row * repeat + len(slab)] = bits
    exponent = _bits(np.asarray(np.inf, target.dtype))
    return not bool(np.any((bits & exponent) == exponent))


def _bits(array: np.ndarray) -> np.ndarray:
    """The array as unsigned integers, which numpy copies faster than bfloat16."""
    return array.view(f"u{array.dtype.itemsize}")
