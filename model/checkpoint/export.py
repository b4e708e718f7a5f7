"""Parameters back to a Hugging Face folder: the inverse of the loader's assembly."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
from safetensors.numpy import save_file

from octavo.model.checkpoint.companions import copy_companions, hf_config, write_json
from octavo.model.checkpoint.hf import INDEX_NAME
from octavo.model.checkpoint.orbax import new_folder
from octavo.model.checkpoint.source import Checkpoint
from octavo.model.families import family_of
from octavo.model.names import Piece

SHARD_BYTES = 4 << 30


def export_hf(checkpoint: Checkpoint, path: str | Path, shard_bytes: int = SHARD_BYTES) -> None:
    """Writes config.json, safetensors and the tokenizer's files to a new or empty folder.

    Tensors keep the dtype they have now; copies of replicated KV heads are left out. Files hold
    about `shard_bytes` each, so that the host holds that much at a time. The tokenizer of a GGUF
    stays in GGUF's form (`tokenizer.gguf`), which `load_tokenizer` reads.
    """
    folder = new_folder(Path(path))
    shards: list[list[str]] = []
    for shard in _shards(checkpoint, shard_bytes):
        # Numbered when their count is known.
        save_file(shard, folder / f"{len(shards)}.safetensors", metadata={"format": "pt"})
        shards.append(list(shard))
    _name_shards(folder, shards)
    write_json(folder / "config.json", hf_config(checkpoint))
    # The library lets nobody else read what it writes.
    mode = (folder / "config.json").stat().st_mode
    for file in folder.glob("*.safetensors"):
        file.chmod(mode)
    copy_companions(checkpoint.path, folder)
    if not (folder / "generation_config.json").exists():
        write_json(folder / "generation_config.json", _generation(checkpoint))


def _generation(checkpoint: Checkpoint) -> dict[str, Any]:
    """generation_config.json that gives the same end ids and defaults when read again."""
    fields = dict(checkpoint.generation)
    if "max_tokens" in fields:
        fields["max_new_tokens"] = fields.pop("max_tokens")
    return {"eos_token_id": list(checkpoint.eos_ids), **fields}


def _shards(checkpoint: Checkpoint, limit: int) -> Iterator[dict[str, np.ndarray]]:
    shard, size = {}, 0
    for name, tensor in _tensors(checkpoint):
        if shard and size + tensor.nbytes > limit:
            yield shard
            shard, size = {}, 0
        shard[name] = tensor
        size += tensor.nbytes
    yield shard


def _tensors(checkpoint: Checkpoint) -> Iterator[tuple[str, np.ndarray]]:
    names = family_of(checkpoint.config).hf_names(checkpoint.config)
    for path, pieces in names.items():
        leaf: Any = checkpoint.params
        for key in path:
            leaf = leaf[key]
        host = np.asarray(jax.device_get(leaf))
        for piece in pieces:
            yield piece.name, _take(host, piece)


def _take(leaf: np.ndarray, piece: Piece) -> np.ndarray:
    """The tensor as stored: undoes the piece's place, transposition, repetition and reshape."""
    part = leaf[piece.place]
    if piece.transpose is not None:
        part = part.transpose(np.argsort(piece.transpose))
    return np.ascontiguousarray(part[:: piece.repeat]).reshape(piece.shape)


def _name_shards(folder: Path, shards: list[list[str]]) -> None:
    if len(shards) == 1:
        (folder / "0.safetensors").rename(folder / "model.safetensors")
        return
    weight_map = {}
    for number, names in enumerate(shards):
        file = f"model-{number + 1:05d}-of-{len(shards):05d}.safetensors"
        (folder / f"{number}.safetensors").rename(folder / file)
        weight_map |= dict.fromkeys(names, file)
    total = sum((folder / file).stat().st_size for file in set(weight_map.values()))
    write_json(folder / INDEX_NAME, {"metadata": {"total_size": total}, "weight_map": weight_map})
