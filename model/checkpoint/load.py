"""One door to every checkpoint format: a path in, a model on its devices out."""

from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, Sharding
from jaxtyping import Array

from octavo.model.checkpoint.assemble import assemble
from octavo.model.checkpoint.hf import PICKLE_SUFFIXES, HFSource
from octavo.model.checkpoint.json_file import read_json
from octavo.model.checkpoint.source import Checkpoint, CheckpointError, TensorSource
from octavo.model.config import ConfigError, ModelConfig
from octavo.model.families import config_from_hf, family_of
from octavo.model.params import ParamSpec, cast, init_leaf, is_spec
from octavo.model.sharding import TENSOR, kv_replicas_for, sharding_tree

FORMATS = ("auto", "hf", "gguf", "orbax", "dummy")
ORBAX_MARKERS = ("_CHECKPOINT_METADATA", "*/_CHECKPOINT_METADATA", "*/_METADATA")
"""Files that Orbax leaves in a checkpoint or in its parts."""

_DUMMY_SEED = 0


def load_checkpoint(
    path: str | Path,
    *,
    dtype: str = "auto",
    mesh: Mesh | None = None,
    load_format: str = "auto",
    kv_replicas: int | None = None,
    progress: bool = False,
) -> Checkpoint:
    """Reads a model and places it.

    Args:
        path: a Hugging Face folder, a GGUF file (or a folder with one), an Orbax checkpoint; for
            "dummy" whatever holds a config.
        dtype: of weights and activations; "auto" is what the checkpoint says.
        mesh: shards the weights by the rules of `octavo.model.sharding`; None is one device.
        load_format: one of FORMATS; "dummy" draws random weights and reads only the config.
        kv_replicas: copies of each KV head (ModelConfig.with_kv_replicas); None is what the mesh
            needs.
        progress: show a bar of the bytes placed.

    Raises:
        CheckpointError: damaged, incomplete, unknown or unsafe files; names file and tensor.
        ConfigError: a model that is not supported; names the field.
    """
    path = Path(path)
    if load_format not in FORMATS:
        raise ValueError(f"load_format={load_format!r} is not one of {', '.join(FORMATS)}")
    kind = detect_format(path) if load_format == "auto" else load_format
    if kind == "orbax":
        return _restore(path, dtype, mesh, kv_replicas)
    source = None if kind == "dummy" else open_source(path, kind)
    config = read_config(path, source)
    if kv_replicas is None:
        kv_replicas = 1 if mesh is None else kv_replicas_for(config, mesh.shape[TENSOR])
    config = config.with_kv_replicas(kv_replicas)
    config = config if dtype == "auto" else config.with_dtype(dtype)
    specs = family_of(config).abstract_params(config)
    shardings = None if mesh is None else sharding_tree(specs, mesh)
    if source is None:
        params = dummy_params(specs, shardings)
    else:
        params = assemble(source, config, shardings, progress)
    from octavo.model.checkpoint.generation import stop_and_defaults

    eos_ids, generation = stop_and_defaults(_beside(path, source), config)
    return Checkpoint(config, params, eos_ids, generation, path, kind)


def _beside(path: Path, source: TensorSource | None) -> Any:
    """Where generation config and tokenizer are: an open GGUF, or the folder."""
    if isinstance(source, HFSource) or source is None:
        return path.parent if path.suffix == ".json" else path
    return source


def detect_format(path: Path) -> str:
    """ "hf", "gguf" or "orbax" by what lies at the path; anything else is refused."""
    if not path.exists():
        raise CheckpointError(f"{path} does not exist")
    if path.is_file():
        if path.suffix in PICKLE_SUFFIXES:
            raise CheckpointError(f"{path} is a pickle, which can run code when loaded")
        if path.suffix == ".gguf":
            return "gguf"
        raise CheckpointError(f"{path} is neither a model folder nor a .gguf file")
    if any(next(path.glob(marker), None) for marker in ORBAX_MARKERS):
        return "orbax"
    holds_gguf = next(path.glob("*.gguf"), None) is not None
    return "gguf" if holds_gguf and not (path / "config.json").is_file() else "hf"


def open_source(path: Path, kind: str) -> TensorSource:
    """The tensors of an "hf" folder or a "gguf" file (or of a folder that holds one)."""
    if kind == "hf":
        return HFSource(path)
    from octavo.model.checkpoint.gguf import find_gguf, open_gguf

    return open_gguf(find_gguf(path))


def read_config(path: Path, source: TensorSource | None = None) -> ModelConfig:
    """The config of a checkpoint, without its weights; a refusal names the path too."""
    if source is not None:
        described = source.config_dict()
    elif path.is_file() and path.suffix == ".json":
        described = read_json(path)
    elif (path / "config.json").is_file():
        described = read_json(path / "config.json")
    else:
        described = open_source(path, "gguf").config_dict()
    try:
        return config_from_hf(described)
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from error


def dummy_params(specs: Any, shardings: Any | None = None) -> Any:
    """Random weights drawn where they will live, leaf by leaf; the same on every mesh."""
    flat, tree = jax.tree.flatten(specs, is_leaf=is_spec)
    places = [None] * len(flat) if shardings is None else jax.tree.leaves(shardings)
    key = jax.random.key(_DUMMY_SEED)
    leaves = [
        _drawing(spec, place)(key, np.uint32(index))
        for index, (spec, place) in enumerate(zip(flat, places))
    ]
    return tree.unflatten(leaves)


@cache
def _drawing(spec: ParamSpec, place: Sharding | None) -> Callable[[Array, np.uint32], Array]:
    """The compiled draw of every leaf of this shape and place."""
    return jax.jit(partial(init_leaf, spec), out_shardings=place)


def _restore(path: Path, dtype: str, mesh: Mesh | None, kv_replicas: int | None) -> Checkpoint:
    from octavo.model.checkpoint.orbax import restore

    checkpoint = restore(path, mesh)
    if kv_replicas not in (None, checkpoint.config.kv_replicas):
        raise CheckpointError(
            f"{path} was written with {checkpoint.config.kv_replicas} copies of each KV head, "
            f"{kv_replicas} are needed: convert the original checkpoint, or load that"
        )
    if dtype in ("auto", checkpoint.config.dtype):
        return checkpoint
    config = checkpoint.config.with_dtype(dtype)
    return replace(checkpoint, config=config, params=cast(checkpoint.params, dtype))
