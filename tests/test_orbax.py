"""Conversion: to Orbax and back onto shardings, to a Hugging Face folder and back, bit for bit."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest
from family_data import FOLDER, NAMES
from tokenizers import Tokenizer, models

from octavo.model.checkpoint.export import export_hf
from octavo.model.checkpoint.hf import INDEX_NAME, HFSource
from octavo.model.checkpoint.load import load_checkpoint
from octavo.model.checkpoint.orbax import MARKER, WEIGHTS, restore, save
from octavo.model.checkpoint.source import CheckpointError
from octavo.model.families import family_of
from octavo.model.sharding import make_mesh, sharding_tree
from octavo.serve.tokenizer_files import load_tokenizer

GGUF = Path(__file__).parent / "data" / "gguf" / "tiny-llama-q4_k_m.gguf"


@pytest.fixture
def source(tmp_path):
    """A Hugging Face folder with everything that may stand beside the weights."""
    folder = tmp_path / "source"
    folder.mkdir()
    for name in ("config.json", "model.safetensors"):
        shutil.copyfile(FOLDER / "qwen2" / name, folder / name)
    vocab = {"a": 0, "b": 1, "</s>": 2}
    Tokenizer(models.WordLevel(vocab, unk_token="a")).save(str(folder / "tokenizer.json"))
    files = {
        "tokenizer_config": {"eos_token": "</s>", "chat_template": "hi"},
        "generation_config": {"eos_token_id": [5], "do_sample": True, "temperature": 0.5},
    }
    for name, content in files.items():
        (folder / f"{name}.json").write_text(json.dumps(content))
    return folder


def assert_equal(first, second):
    assert first.config == second.config
    assert (first.eos_ids, first.generation) == (second.eos_ids, second.generation)
    assert jax.tree.structure(first.params) == jax.tree.structure(second.params)
    for a, b in zip(jax.tree.leaves(first.params), jax.tree.leaves(second.params)):
        assert a.dtype == b.dtype
        np.testing.assert_array_equal(np.asarray(a), np.asarray(b))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_orbax_roundtrip(source, tmp_path, dtype):
    checkpoint = load_checkpoint(source, dtype=dtype)
    save(checkpoint, tmp_path / "orbax")
    again = load_checkpoint(tmp_path / "orbax")
    assert again.format == "orbax"
    assert_equal(checkpoint, again)
    assert load_tokenizer(tmp_path / "orbax").chat_template == "hi"
    export_hf(again, tmp_path / "hf")
    assert_equal(checkpoint, load_checkpoint(tmp_path / "hf"))
    assert len({file.stat().st_mode for file in (tmp_path / "hf").iterdir()}) == 1
    assert load_tokenizer(tmp_path / "hf").chat_template == "hi"


def test_restored_onto_shardings(source, tmp_path):
    mesh = make_mesh(2)
    checkpoint = load_checkpoint(source)
    save(load_checkpoint(source, mesh=mesh), tmp_path / "orbax")
    again = restore(tmp_path / "orbax", mesh)
    assert_equal(checkpoint, again)
    wanted = sharding_tree(family_of(again.config).abstract_params(again.config), mesh)
    for leaf, sharding in zip(jax.tree.leaves(again.params), jax.tree.leaves(wanted)):
        assert leaf.sharding == sharding
    split = again.params["layers"][0]["gate_up"]
    assert split.addressable_shards[0].data.size == split.size // 2
    assert_equal(checkpoint, restore(tmp_path / "orbax"))


def test_replicated_heads_are_stored_once_in_a_hugging_face_folder(source, tmp_path):
    replicated = load_checkpoint(source, kv_replicas=2)
    export_hf(replicated, tmp_path / "hf")
    assert_equal(load_checkpoint(source), load_checkpoint(tmp_path / "hf"))
    save(replicated, tmp_path / "orbax")
    assert_equal(replicated, load_checkpoint(tmp_path / "orbax", kv_replicas=2))


@pytest.mark.parametrize("name", NAMES)
def test_export_gives_back_every_tensor(name, tmp_path):
    export_hf(load_checkpoint(FOLDER / name), tmp_path / "hf")
    before, after = HFSource(FOLDER / name), HFSource(tmp_path / "hf")
    assert set(before.names()) == set(after.names())
    for tensor in before.names():
        np.testing.assert_array_equal(before.read(tensor), after.read(tensor))


def test_export_in_shards(source, tmp_path):
    checkpoint = load_checkpoint(source)
    export_hf(checkpoint, tmp_path / "hf", shard_bytes=200_000)
    files = sorted(path.name for path in (tmp_path / "hf").glob("*.safetensors"))
    assert len(files) > 2
    assert files[0] == f"model-00001-of-{len(files):05d}.safetensors"
    assert (tmp_path / "hf" / INDEX_NAME).is_file()
    assert_equal(checkpoint, load_checkpoint(tmp_path / "hf"))


def test_a_gguf_keeps_its_tokenizer_and_end_ids(tmp_path):
    checkpoint = load_checkpoint(GGUF, dtype="float32")
    tokenizer = load_tokenizer(GGUF)
    save(checkpoint, tmp_path / "orbax")
    export_hf(checkpoint, tmp_path / "direct")
    export_hf(load_checkpoint(tmp_path / "orbax"), tmp_path / "through")
    for name in ("orbax", "direct", "through"):
        assert_equal(checkpoint, load_checkpoint(tmp_path / name))
        again = load_tokenizer(tmp_path / name)
        assert again.encode("The quick <s> fox") == tokenizer.encode("The quick <s> fox")
        assert again.chat_template == tokenizer.chat_template
    assert (tmp_path / "orbax" / "tokenizer.gguf").stat().st_size < 30_000


def test_only_new_or_empty_folders_are_written(source, tmp_path):
    checkpoint = load_checkpoint(source)
    for write in (save, export_hf):
        with pytest.raises(CheckpointError, match="not an empty folder"):
            write(checkpoint, source)


def test_incomplete_and_foreign_folders_are_refused(source, tmp_path):
    with pytest.raises(CheckpointError, match=MARKER):
        restore(source)
    save(load_checkpoint(source), tmp_path / "orbax")
    marker = tmp_path / "orbax" / MARKER
    described = json.loads(marker.read_text())
    marker.write_text(json.dumps(described | {"format": 99}))
    with pytest.raises(CheckpointError, match="format"):
        restore(tmp_path / "orbax")
    for name in ("dtype", "kv_replicas", "eos_ids", "generation"):
        marker.write_text(json.dumps(described | {name: None}))
        with pytest.raises(CheckpointError, match=rf"{MARKER}: {name} is None"):
            restore(tmp_path / "orbax")
    marker.unlink()
    with pytest.raises(CheckpointError, match=MARKER):
        load_checkpoint(tmp_path / "orbax")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_hidden_layers": 5}, r"layers\.4\.\w+ is missing"),
        ({"vocab_size": 64}, r"embed .* \[64, \d+\]"),
        ({"num_hidden_layers": 3}, r"unknown weight layers\.3"),
    ],
)
def test_weights_that_do_not_fit_the_config_are_named(source, tmp_path, change, message):
    save(load_checkpoint(source), tmp_path / "orbax")
    path = tmp_path / "orbax" / "config.json"
    config = json.loads(path.read_text()) | change
    config.pop("layer_types", None)
    path.write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match=message):
        restore(tmp_path / "orbax")


RESTORE = """
import sys
from octavo.model.checkpoint.orbax import restore
from octavo.model.checkpoint.source import CheckpointError
try:
    restore(sys.argv[1])
except CheckpointError as error:
    print(error)
"""


def test_damaged_data_is_refused(source, tmp_path):
    """In processes of their own: of a restore that is given up half-way, reads go on."""
    save(load_checkpoint(source), tmp_path / "orbax")
    shutil.copytree(tmp_path / "orbax", tmp_path / "other")
    for path in (tmp_path / "orbax" / WEIGHTS).rglob("d/*"):
        path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    (tmp_path / "other" / WEIGHTS / "_METADATA").write_text("{")
    for name in ("orbax", "other"):
        command = [sys.executable, "-c", RESTORE, str(tmp_path / name)]
        printed = subprocess.run(command, capture_output=True, text=True).stdout
        assert f"{tmp_path / name / WEIGHTS} is not a readable Orbax checkpoint" in printed
