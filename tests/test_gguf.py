"""GGUF: dequantised weights, names, configs, logits of the oracle's files, and every refusal."""

import contextlib
import shutil
import struct
import subprocess
import sys
from functools import cache
from pathlib import Path

import gguf
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from gguf_files import LLAMA, llama_tensors, write_gguf

from octavo.model.checkpoint.gguf import open_gguf
from octavo.model.checkpoint.gguf_file import BLOCK_TYPES, GgufFile, dequantise
from octavo.model.checkpoint.load import load_checkpoint
from octavo.model.checkpoint.source import CheckpointError
from octavo.model.families import config_from_hf
from octavo.model.forward import forward

DATA = Path(__file__).parent / "data" / "gguf"
ORACLE = Path(__file__).parents[2] / "shared" / "oracle" / "gguf"
FILES = {path.stem: path for path in [*ORACLE.glob("*.gguf"), *DATA.glob("*.gguf")]}
TOLERANCE = 1e-4
"""Largest error of a logit, in standard deviations of the logits. The references allow 2e-3."""


@pytest.mark.parametrize("name", sorted(FILES))
def test_dequantised_weights_equal_the_reference(name):
    source = open_gguf(FILES[name])
    with np.load(FILES[name].with_suffix(".npz")) as reference:
        arrays = {key: reference[key] for key in reference.files if key.startswith("dequant/")}
    assert arrays
    for key, expected in arrays.items():
        stored = key.removeprefix("dequant/")
        assert source.shape(stored) == expected.shape
        np.testing.assert_array_equal(source.read(stored).astype(np.float32), expected)


@cache
def _forward():
    return jax.jit(forward, static_argnums=0)


@pytest.mark.parametrize("name", sorted(FILES))
def test_logits_and_greedy_tokens_equal_the_reference(name):
    checkpoint = load_checkpoint(FILES[name], dtype="float32")
    with np.load(FILES[name].with_suffix(".npz")) as data:
        reference = dict(data)
    prompts = [reference[f"prompt{i}_ids"] for i in range(3)]
    greedy = [reference[f"prompt{i}_greedy"] for i in range(3)]
    rows = [np.concatenate([p, g[:-1]]) for p, g in zip(prompts, greedy)]
    tokens = np.zeros((3, max(map(len, rows))), np.int32)
    for row, ids in enumerate(rows):
        tokens[row, : len(ids)] = ids
    logits = np.asarray(_forward()(checkpoint.config, checkpoint.params, jnp.asarray(tokens)))
    for i, (prompt, row) in enumerate(zip(prompts, rows)):
        out, start = logits[i, : len(row)], len(prompt) - 1
        expected = np.concatenate(
            [reference[f"prompt{i}_logits"], reference[f"prompt{i}_greedy_logits"][1:]]
        )
        assert np.abs(out - expected).max() <= TOLERANCE * reference["logit_std"]
        assert out[start:].argmax(-1).tolist() == greedy[i].tolist()


@pytest.mark.parametrize("kind", BLOCK_TYPES.values(), ids=lambda kind: kind.name)
@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16], ids=["f32", "bf16"])
def test_chunked_dequantisation_equals_the_gguf_package(kind, dtype):
    draw = np.random.default_rng(kind.code)
    row_bytes = 96 * kind.num_bytes
    raw = draw.integers(0, 256, (37, row_bytes), np.uint8)
    # Scales are float16 at some place of a block: no byte of theirs may make a NaN or infinity.
    raw &= 0x3B
    expected = gguf.quants.dequantize(raw, gguf.GGMLQuantizationType(kind.code))
    found = dequantise(raw, kind, np.dtype(dtype))
    np.testing.assert_array_equal(found, expected.reshape(37, -1).astype(dtype))


def test_float_tensors_are_views_of_the_file(tmp_path):
    path = write_gguf(tmp_path / "a.gguf", keys=LLAMA, tensors=llama_tensors())
    embed = open_gguf(path).read("model.embed_tokens.weight")
    assert not embed.flags.owndata
    assert not embed.flags.writeable


def test_q_and_k_rows_return_to_halves(tmp_path):
    """llama.cpp's converter interleaves the halves of each head; biases move along."""
    tensors = llama_tensors()
    wanted = {name: tensors[f"blk.0.attn_{name}.weight"].copy() for name in "qk"}
    for name, heads in (("q", 4), ("k", 2)):
        rows = wanted[name].shape[0]
        order = np.arange(rows).reshape(heads, 2, rows // heads // 2).swapaxes(1, 2).reshape(-1)
        tensors[f"blk.0.attn_{name}.weight"] = wanted[name][order]
        tensors[f"blk.0.attn_{name}.bias"] = wanted[name][order, 0].copy()
    source = open_gguf(write_gguf(tmp_path / "a.gguf", keys=LLAMA, tensors=tensors))
    assert source.config_dict()["attention_bias"]
    for name in "qk":
        prefix = f"model.layers.0.self_attn.{name}_proj"
        np.testing.assert_array_equal(source.read(f"{prefix}.weight"), wanted[name])
        np.testing.assert_array_equal(source.read(f"{prefix}.bias"), wanted[name][:, 0])


def _gemma_tensors():
    tensors = llama_tensors()
    for name in ("attn_q_norm", "attn_k_norm", "post_attention_norm", "post_ffw_norm"):
        tensors[f"blk.0.{name}.weight"] = np.full(8 if "attn_" in name else 32, 1.5, np.float32)
    return tensors


def test_gemma_norms_lose_the_one_that_was_added(tmp_path):
    keys = LLAMA | {"attention.sliding_window": 16, "attention.key_length": 8}
    path = write_gguf(tmp_path / "a.gguf", "gemma3", keys, _gemma_tensors())
    source = open_gguf(path)
    for name in ("self_attn.q_norm", "post_attention_layernorm", "post_feedforward_layernorm"):
        assert np.all(source.read(f"model.layers.0.{name}.weight") == 0.5)
    before = llama_tensors()["blk.0.ffn_norm.weight"]
    after = source.read("model.layers.0.pre_feedforward_layernorm.weight")
    np.testing.assert_array_equal(after, before - np.float32(1))


def test_gemma3_config(tmp_path):
    keys = LLAMA | {
        "block_count": 7,
        "attention.sliding_window": 16,
        "attention.key_length": 8,
        "rope.freq_base": 1e6,
        "rope.scaling.type": "linear",
        "rope.scaling.factor": 8.0,
    }
    source = open_gguf(write_gguf(tmp_path / "a.gguf", "gemma3", keys, _gemma_tensors()))
    config = config_from_hf(source.config_dict())
    assert config.architecture == "Gemma3ForCausalLM"
    assert [layer.window for layer in config.layers] == [16] * 5 + [None, 16]
    local, far = config.layers[0].rope, config.layers[5].rope
    assert (local.theta, local.kind) == (10000.0, "default")
    assert (far.theta, far.kind, far.factor) == (1e6, "linear", 8.0)
    assert config.attention_scale == 8**-0.5
    assert config.norm_offset == 1.0


def _llama3_divisors(factor, head_dim=8, theta=500000.0):
    """Hugging Face's formula for llama3 rope scaling, as the converter writes it."""
    out = []
    for freq in theta ** -(np.arange(0, head_dim, 2) / head_dim):
        wave = 2 * np.pi / freq
        smooth = (8192 / wave - 1) / 3
        out.append(
            1.0
            if wave < 8192 / 4
            else factor
            if wave > 8192
            else 1 / ((1 - smooth) / factor + smooth)
        )
    return np.asarray(out, np.float32)


def test_llama3_rope_scaling_from_its_tensor(tmp_path):
    keys = LLAMA | {"rope.freq_base": 500000.0}
    tensors = llama_tensors() | {"rope_freqs.weight": _llama3_divisors(32.0)}
    source = open_gguf(write_gguf(tmp_path / "a.gguf", keys=keys, tensors=tensors))
    assert "rope_freqs.weight" not in source.names()
    rope = config_from_hf(source.config_dict()).layers[0].rope
    assert (rope.kind, rope.factor, rope.original_max_len) == ("llama3", 32.0, 8192)
    tensors["rope_freqs.weight"][1] *= 1.5
    path = write_gguf(tmp_path / "b.gguf", keys=keys, tensors=tensors)
    with pytest.raises(CheckpointError, match=r"rope_freqs\.weight"):
        open_gguf(path)


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        ({}, None),
        ({"rope.scaling.type": "none", "rope.scaling.factor": 4.0}, None),
        ({"rope.scale_linear": 4.0}, {"rope_type": "linear", "factor": 4.0}),
        (
            {
                "rope.scaling.type": "yarn",
                "rope.scaling.factor": 4.0,
                "rope.scaling.original_context_length": 16,
            },
            {
                "rope_type": "yarn",
                "factor": 4.0,
                "original_max_position_embeddings": 16,
                "attention_factor": None,
            },
        ),
    ],
)
def test_rope_scaling_metadata(tmp_path, keys, expected):
    path = write_gguf(tmp_path / "a.gguf", keys=LLAMA | keys, tensors=llama_tensors())
    config = open_gguf(path).config_dict()
    assert config["rope_scaling"] == expected
    config_from_hf(config)


@pytest.mark.parametrize(
    ("architecture", "keys", "expected"),
    [
        ("llama", {}, "LlamaForCausalLM"),
        ("llama", {"attention.sliding_window": 16}, "MistralForCausalLM"),
        ("qwen2", {}, "Qwen2ForCausalLM"),
        ("qwen3", {"attention.key_length": 8, "attention.value_length": 8}, "Qwen3ForCausalLM"),
    ],
)
def test_architectures(tmp_path, architecture, keys, expected):
    extra = {"tokenizer.ggml.bos_token_id": 1, "tokenizer.ggml.eos_token_id": 2}
    tensors = llama_tensors()
    path = write_gguf(tmp_path / "a.gguf", architecture, LLAMA | keys, tensors, extra)
    described = open_gguf(path).config_dict()
    config = config_from_hf(described)
    assert described["architectures"] == [expected]
    assert (config.num_heads, config.num_kv_heads, config.head_dim) == (4, 2, 8)
    assert (config.vocab_size, config.norm_eps, config.tie_embeddings) == (48, 1e-5, True)
    assert (config.bos_id, config.eos_ids, config.dtype) == (1, (2,), "float32")
    assert config.layers[0].window == keys.get("attention.sliding_window")


@pytest.mark.parametrize(
    ("architecture", "keys", "message"),
    [
        ("mamba", {}, "'mamba' is not supported"),
        ("llama", {"expert_count": 8}, "mixture-of-experts"),
        ("llama", {"rope.dimension_count": 4}, "partial rotary"),
        ("llama", {"attention.value_length": 4}, "keys and values differ"),
        ("llama", {"attention.head_count": [4, 2]}, "differs between layers"),
        ("llama", {"rope.scaling.type": "longrope", "rope.scaling.factor": 2.0}, "longrope"),
        ("llama", {"embedding_length": "32"}, "wrong type"),
        ("llama", {"attention.head_count": ["4"]}, "wrong type"),
        ("gemma3", {}, "gemma3.attention.sliding_window"),
    ],
)
def test_refused_models_are_named(tmp_path, architecture, keys, message):
    tensors = llama_tensors()
    path = write_gguf(tmp_path / "a.gguf", architecture, LLAMA | keys, tensors)
    with pytest.raises(CheckpointError, match=message) as refusal:
        open_gguf(path)
    assert str(path) in str(refusal.value)


def test_unknown_tensors_are_refused_by_the_loader(tmp_path):
    tensors = llama_tensors() | {"blk.0.surprise.weight": np.ones((2, 2), np.float32)}
    path = write_gguf(tmp_path / "a.gguf", keys=LLAMA, tensors=tensors)
    with pytest.raises(CheckpointError, match=r"blk\.0\.surprise\.weight"):
        load_checkpoint(path)


def test_tensor_types_that_are_not_read_are_named(tmp_path):
    blocks = np.zeros((64, 18), np.uint8)
    tensors = llama_tensors()
    tensors["blk.0.ffn_up.weight"] = (blocks, gguf.GGMLQuantizationType.IQ4_NL)
    path = write_gguf(tmp_path / "a.gguf", keys=LLAMA, tensors=tensors)
    with pytest.raises(CheckpointError, match=r"'blk\.0\.ffn_up\.weight' has type IQ4_NL"):
        open_gguf(path)


def test_truncated_weights_name_file_and_tensor(tmp_path):
    path = write_gguf(tmp_path / "a.gguf", keys=LLAMA, tensors=llama_tensors())
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(CheckpointError, match=r"truncated: tensor 'output_norm\.weight'") as error:
        open_gguf(path)
    assert str(path) in str(error.value)


def test_every_shorter_header_is_refused(tmp_path):
    whole = (DATA / "tiny-llama-q4_0.gguf").read_bytes()
    path = tmp_path / "a.gguf"
    for size in [*range(0, 400, 7), *range(400, 24_000, 1493)]:
        path.write_bytes(whole[:size])
        with pytest.raises(CheckpointError, match=r"a\.gguf"):
            open_gguf(path)


def test_corrupt_headers_are_refused(tmp_path):
    """Random bytes in the header never end in another exception, a hang or a huge allocation."""
    whole = bytearray((DATA / "tiny-llama-q4_0.gguf").read_bytes())
    draw, path = np.random.default_rng(0), tmp_path / "a.gguf"
    for _ in range(150):
        spoiled = bytearray(whole)
        for at in draw.integers(0, 1200, 3):
            spoiled[at] = draw.integers(0, 256)
        path.write_bytes(spoiled)
        with contextlib.suppress(CheckpointError):
            open_gguf(path)


@pytest.mark.parametrize(
    ("head", "message"),
    [
        (b"GGML" + bytes(40), "not a GGUF file"),
        (b"GGUF" + struct.pack(">I", 3) + bytes(40), "big-endian"),
        (b"GGUF" + struct.pack("<I", 9) + bytes(40), "version 9"),
    ],
)
def test_other_files_are_refused(tmp_path, head, message):
    path = tmp_path / "a.gguf"
    path.write_bytes(head)
    with pytest.raises(CheckpointError, match=message):
        GgufFile(path)


def test_split_models(tmp_path):
    tensors = llama_tensors()
    names = sorted(tensors, reverse=True)
    for part in range(2):
        write_gguf(
            tmp_path / f"m-{part + 1:05d}-of-00002.gguf",
            keys=LLAMA if part == 0 else None,
            tensors={name: tensors[name] for name in names[part::2]},
            extra={"split.count": 2, "split.no": part},
        )
    source = open_gguf(tmp_path)
    assert len(source.names()) == len(tensors)
    np.testing.assert_array_equal(source.read("model.norm.weight"), tensors["output_norm.weight"])
    second = tmp_path / "m-00002-of-00002.gguf"
    write_gguf(second, tensors={names[0]: tensors[names[0]]})
    with pytest.raises(CheckpointError, match=r"m-00002-of-00002\.gguf: tensor .* in another part"):
        open_gguf(tmp_path)
    second.unlink()
    with pytest.raises(CheckpointError, match=r"m-00002-of-00002\.gguf: missing part"):
        open_gguf(tmp_path)


def test_a_folder_must_hold_one_model(tmp_path):
    with pytest.raises(CheckpointError, match="found none"):
        open_gguf(tmp_path)
    for name in ("a.gguf", "b.gguf"):
        shutil.copy(DATA / "tiny-llama-q4_0.gguf", tmp_path / name)
    with pytest.raises(CheckpointError, match=r"a\.gguf, b\.gguf"):
        open_gguf(tmp_path)


def test_reading_a_file_needs_no_jax():
    code = (
        "import sys; from octavo.serve.tokenizer_files import load_tokenizer; "
        f"from octavo.model.checkpoint.gguf import open_gguf; load_tokenizer({str(DATA)!r} + "
        f"'/tiny-llama-q4_0.gguf'); open_gguf({str(DATA)!r} + '/tiny-llama-q4_0.gguf'); "
        "sys.exit('jax' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
