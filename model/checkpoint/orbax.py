"""Octavo's own checkpoint: weights as the graph holds them, in Orbax, restored onto shardings.

A folder with `weights/` (Orbax), `config.json` (Hugging Face's spelling), the tokenizer's files,
and `octavo.json`, which is written last: without it the folder is incomplete and refused.
"""

from pathlib import Path
from typing import Any

import jax
from jax.sharding import Mesh, SingleDeviceSharding

from octavo.model.checkpoint.companions import copy_companions, hf_config, write_json
from octavo.model.checkpoint.json_file import read_json
from octavo.model.checkpoint.source import Checkpoint, CheckpointError
from octavo.model.families import config_from_hf, family_of
from octavo.model.params import is_spec
from octavo.model.sharding import sharding_tree

MARKER = "octavo.json"
WEIGHTS = "weights"
FORMAT = 1
_FIELDS = {"dtype": str, "kv_replicas": int, "eos_ids": list, "generation": dict}


def save(checkpoint: Checkpoint, path: str | Path) -> None:
    """Writes a checkpoint to a new or empty folder.

    Weights are stored in their present dtype and KV replication; config, tokenizer and generation
    config come from the files the checkpoint was read from. Refuses a folder with files in it and
    a checkpoint whose files are gone.
    """
    folder = new_folder(Path(path))
    write_json(folder / "config.json", hf_config(checkpoint))
    copy_companions(checkpoint.path, folder)
    import orbax.checkpoint as ocp

    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(folder.resolve() / WEIGHTS, checkpoint.params)
    described = {
        "format": FORMAT,
        "dtype": checkpoint.config.dtype,
        "kv_replicas": checkpoint.config.kv_replicas,
        "eos_ids": list(checkpoint.eos_ids),
        "generation": checkpoint.generation,
    }
    write_json(folder / MARKER, described)


def restore(path: str | Path, mesh: Mesh | None = None) -> Checkpoint:
    """Reads what `save` wrote, bit for bit, each device only its part of every weight.

    `mesh` shards by the rules of `octavo.model.sharding`; None is the default device.
    CheckpointError for a folder that `save` did not (completely) write, a weight that is missing,
    misshapen or unknown, or damaged data; it names the folder and the weight.
    """
    folder = Path(path)
    if not (folder / MARKER).is_file():
        raise CheckpointError(f"{folder} is no complete Octavo checkpoint: {MARKER} is missing")
    described = read_json(folder / MARKER)
    if described.get("format") != FORMAT:
        raise CheckpointError(
            f"{folder / MARKER}: format {described.get('format')!r}, not {FORMAT}"
        )
    _check_marker(folder / MARKER, described)
    config = config_from_hf(read_json(folder / "config.json"))
    config = config.with_dtype(described["dtype"]).with_kv_replicas(described["kv_replicas"])
    specs = family_of(config).abstract_params(config)
    params = _restore_weights(folder.resolve() / WEIGHTS, _abstract(specs, mesh))
    eos_ids = tuple(described["eos_ids"])
    return Checkpoint(config, params, eos_ids, described["generation"], folder, "orbax")


def new_folder(path: Path) -> Path:
    """The folder, made if need be; refused if anything is in it."""
    require_free(path)
    path.mkdir(parents=True, exist_ok=True)
    return path


def require_free(path: Path) -> None:
    """CheckpointError unless a checkpoint can be written there: a new or an empty folder."""
    if path.exists() and (not path.is_dir() or next(path.iterdir(), None)):
        raise CheckpointError(f"{path} exists and is not an empty folder")


def _check_marker(path: Path, described: dict[str, Any]) -> None:
    for name, kind in _FIELDS.items():
        value = described.get(name)
        if not isinstance(value, kind):
            raise CheckpointError(f"{path}: {name} is {value!r:.80}, not a {kind.__name__}")


def _abstract(specs: Any, mesh: Mesh | None) -> Any:
    """Shape, dtype and place of every weight."""
    if mesh is None:
        one = SingleDeviceSharding(jax.devices()[0])
        places = jax.tree.map(lambda _: one, specs, is_leaf=is_spec)
    else:
        places = sharding_tree(specs, mesh)
    return jax.tree.map(
        lambda spec, place: jax.ShapeDtypeStruct(spec.shape, spec.dtype, sharding=place),
        specs,
        places,
        is_leaf=is_spec,
    )


def _restore_weights(weights: Path, wanted: Any) -> Any:
    import orbax.checkpoint as ocp

    with ocp.StandardCheckpointer() as checkpointer:
        try:
            stored = checkpointer.metadata(weights).item_metadata
            found = {leaf.name: leaf for leaf in jax.tree.leaves(stored.tree)}
        except Exception as error:  # Orbax and TensorStore raise many kinds for damaged files
            raise _unreadable(weights, error) from error
        _check(weights, found, wanted)
        try:
            return checkpointer.restore(weights, wanted)
        except Exception as error:
            raise _unreadable(weights, error) from error


def _unreadable(weights: Path, error: Exception) -> CheckpointError:
    reason = (str(error).strip() or repr(error)).splitlines()[0]
    return CheckpointError(f"{weights} is not a readable Orbax checkpoint: {reason}")


def _check(weights: Path, found: dict[str, Any], wanted: Any) -> None:
    """Names, shapes and dtypes, all before any data is read."""
    for path, leaf in jax.tree.leaves_with_path(wanted):
        name = ".".join(str(getattr(key, "key", getattr(key, "idx", key))) for key in path)
        if name not in found:
            raise CheckpointError(f"{weights}: weight {name} is missing")
        stored = found.pop(name)
        if tuple(stored.shape) != leaf.shape or stored.dtype != leaf.dtype:
            raise CheckpointError(
                f"{weights}: weight {name} is {stored.dtype} {list(stored.shape)}, the config asks"
                f" for {leaf.dtype} {list(leaf.shape)}"
            )
    if found:
        raise CheckpointError(f"{weights}: unknown weight {next(iter(found))}")
