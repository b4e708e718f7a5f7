"""Reading config.json in both spellings, rope formulas, refusals by name."""

import json
import math

import jax.numpy as jnp
import numpy as np
import pytest
from family_data import FOLDER, NAMES, config_of
from jax.sharding import PartitionSpec as P

from octavo.model.config import ConfigError, RopeConfig
from octavo.model.families import config_from_hf
from octavo.model.params import ParamSpec
from octavo.model.rope import apply_rope, inverse_frequencies, rope_from_hf, rope_tables
from octavo.model.sharding import kv_replicas_for, make_mesh, partition

LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 32,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
}


def rope(**fields):
    return rope_from_hf({"max_position_embeddings": 128, **fields})


@pytest.mark.parametrize("name", [name for name in NAMES if name != "llama_tied"])
def test_both_spellings_read_the_same(name):
    assert config_of(name) == config_of(name, "config_v4.json")


def test_defaults_of_a_sparse_llama_config():
    config = config_from_hf(LLAMA)
    assert (config.head_dim, config.num_kv_heads, config.group_size) == (8, 2, 4)
    assert config.attention_scale == 8**-0.5
    assert not config.tie_embeddings
    assert config.layers[0].rope == RopeConfig(theta=10000.0)
    assert config.eos_ids == ()
    assert config_from_hf({**LLAMA, "eos_token_id": [3, 4]}).eos_ids == (3, 4)
    assert config_from_hf({**LLAMA, "head_dim": 16}).head_dim == 16
    without_kv = {key: value for key, value in LLAMA.items() if key != "num_key_value_heads"}
    assert config_from_hf(without_kv).num_kv_heads == 8


def test_biases():
    llama = config_from_hf({**LLAMA, "attention_bias": True, "mlp_bias": True})
    assert (llama.qkv_bias, llama.out_bias, llama.mlp_bias) == (True, True, True)
    qwen = config_of("qwen2")
    assert (qwen.qkv_bias, qwen.out_bias, qwen.mlp_bias) == (True, False, False)


def test_mistral_window():
    mistral = {**LLAMA, "architectures": ["MistralForCausalLM"]}
    assert config_from_hf(mistral).layers[0].window == 4096
    assert config_from_hf({**mistral, "sliding_window": None}).layers[0].window is None
    assert [layer.window for layer in config_of("mistral").layers] == [16] * 4


def test_qwen_windows_start_at_max_window_layers():
    qwen = {**LLAMA, "architectures": ["Qwen2ForCausalLM"], "sliding_window": 8}
    assert {layer.window for layer in config_from_hf(qwen).layers} == {None}
    used = {**qwen, "use_sliding_window": True, "max_window_layers": 2}
    assert [layer.window for layer in config_from_hf(used).layers] == [None, None, 8]
    types = ["sliding_attention", "full_attention", "full_attention"]
    typed = config_from_hf({**used, "layer_types": types})
    assert [layer.window for layer in typed.layers] == [8, None, None]


def test_gemma_layers_scaling_and_old_rope():
    gemma = config_of("gemma3_text")
    assert [layer.window for layer in gemma.layers] == [16, 16, None, 16]
    assert [layer.rope.theta for layer in gemma.layers] == [1e4, 1e4, 1e6, 1e4]
    assert gemma.embedding_scale == 8.0
    assert gemma.norm_offset == 1.0
    old = json.loads((FOLDER / "gemma3_text" / "config_v4.json").read_text())
    old["rope_scaling"] = {"rope_type": "linear", "factor": 8.0}
    scaled = config_from_hf(old)
    assert [layer.rope.kind for layer in scaled.layers] == ["default"] * 2 + ["linear", "default"]
    del old["sliding_window_pattern"]
    assert [layer.window for layer in config_from_hf(old).layers] == [16] * 4


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"architectures": ["MambaForCausalLM"]}, "MambaForCausalLM"),
        ({"architectures": []}, "none"),
        ({"rope_scaling": {"rope_type": "longrope", "factor": 2.0}}, "longrope"),
        ({"rope_parameters": {"rope_type": "mrope", "rope_theta": 1.0}}, "mrope"),
        ({"rope_scaling": {"type": "linear"}}, "factor"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, "low_freq_factor"),
        ({"quantization_config": {"quant_method": "gptq"}}, "gptq"),
        ({"hidden_act": "relu6"}, "relu6"),
        ({"vocab_size": None}, "vocab_size"),
        ({"num_hidden_layers": None}, "num_hidden_layers"),
        ({"torch_dtype": "int8"}, "int8"),
        ({"num_key_value_heads": 3}, "3 KV heads"),
        (
            {"architectures": ["Qwen2ForCausalLM"], "layer_types": ["linear_attention"] * 3},
            "linear_attention",
        ),
        (
            {"architectures": ["Qwen2ForCausalLM"], "layer_types": ["full_attention"]},
            "layer_types",
        ),
        (
            {"architectures": ["Gemma3ForCausalLM"], "use_bidirectional_attention": True},
            "bidirectional",
        ),
    ],
)
def test_refusals_name_what_is_refused(change, named):
    with pytest.raises(ConfigError, match=named):
        config_from_hf({**LLAMA, **change})


def test_kv_replicas():
    config = config_from_hf(LLAMA)
    doubled = config.with_kv_replicas(2)
    assert (doubled.num_kv_heads, doubled.group_size, doubled.kv_replicas) == (4, 2, 2)
    assert doubled.with_kv_replicas(1) == config
    assert [kv_replicas_for(config, size) for size in (1, 2, 4, 8)] == [1, 1, 2, 4]
    with pytest.raises(ConfigError, match="4 query heads a KV head can't feed 3"):
        config.with_kv_replicas(3)
    with pytest.raises(ValueError, match="2 KV heads can't be split over tensor=3"):
        kv_replicas_for(config, 3)


def test_partition_refuses_what_it_cannot_divide():
    mesh = make_mesh(4)
    assert partition((8, 6), ("mlp", None), mesh) == P("tensor", None)
    assert partition((6, 6), ("vocab", None), mesh) == P(None, None)
    with pytest.raises(ValueError, match="mlp 6 can't be split over tensor=4"):
        partition((6,), ("mlp",), mesh)
    with pytest.raises(ValueError, match="tensor=99 needs 99 devices; 4 are visible"):
        make_mesh(99)
    with pytest.raises(ValueError, match="1 axes"):
        ParamSpec((2, 2), "float32", ("mlp",))


def expected_frequencies(dim, theta):
    return [theta ** (-2 * i / dim) for i in range(dim // 2)]


def test_linear_rope_divides_frequencies():
    scaled = rope(rope_scaling={"type": "linear", "factor": 4.0}, rope_theta=500.0)
    expected = [freq / 4 for freq in expected_frequencies(16, 500.0)]
    np.testing.assert_allclose(inverse_frequencies(scaled, 16), expected, rtol=1e-6)


def test_dynamic_rope_depends_on_the_longest_length():
    scaled = rope(rope_scaling={"type": "dynamic", "factor": 2.0})
    plain = inverse_frequencies(scaled, 16)
    np.testing.assert_allclose(plain, expected_frequencies(16, 10000.0), rtol=1e-6)
    config = config_from_hf({**LLAMA, "rope_scaling": {"type": "dynamic", "factor": 2.0}})
    assert config.with_max_len(100).layers[0].rope.max_len == 100
    longer = config.with_max_len(512).layers[0].rope
    base = 10000.0 * (2.0 * 512 / 128 - 1.0) ** (16 / 14)
    expected = expected_frequencies(16, base)
    np.testing.assert_allclose(inverse_frequencies(longer, 16), expected, rtol=1e-6)
    unscaled = config_from_hf(LLAMA)
    assert unscaled.with_max_len(512) == unscaled


def test_llama3_rope_blends_between_bands():
    fields = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    scaled = rope(
        rope_scaling={"rope_type": "llama3", "original_max_position_embeddings": 64, **fields}
    )
    expected = []
    for freq in expected_frequencies(32, 10000.0):
        wave = 2 * math.pi / freq
        if wave < 64 / 4.0:
            expected.append(freq)
        elif wave > 64 / 1.0:
            expected.append(freq / 8.0)
        else:
            smooth = (64 / wave - 1.0) / 3.0
            expected.append((1 - smooth) * freq / 8.0 + smooth * freq)
    np.testing.assert_allclose(inverse_frequencies(scaled, 32), expected, rtol=1e-6)


@pytest.mark.parametrize("truncate", [True, False])
def test_yarn_rope_by_parts(truncate):
    fields = {"factor": 4.0, "original_max_position_embeddings": 64, "truncate": truncate}
    scaled = rope(rope_parameters={"rope_type": "yarn", "rope_theta": 10000.0, **fields})
    bounds = [32 * math.log(64 / (b * 2 * math.pi)) / (2 * math.log(1e4)) for b in (32.0, 1.0)]
    if truncate:
        bounds = [math.floor(bounds[0]), math.ceil(bounds[1])]
    low, high = max(bounds[0], 0), min(bounds[1], 31)
    expected = []
    for i, freq in enumerate(expected_frequencies(32, 10000.0)):
        ramp = min(max((i - low) / (high - low), 0.0), 1.0)
        expected.append(freq / 4 * ramp + freq * (1 - ramp))
    np.testing.assert_allclose(inverse_frequencies(scaled, 32), expected, rtol=1e-6)


def test_yarn_attention_factor_variants():
    def factor(**fields):
        return rope(rope_scaling={"type": "yarn", "factor": 4.0, **fields}).attention_factor

    assert factor() == pytest.approx(0.1 * math.log(4) + 1)
    assert factor(attention_factor=0.5) == 0.5
    ratio = (0.1 * 1.0 * math.log(4) + 1) / (0.1 * 0.8 * math.log(4) + 1)
    assert factor(mscale=1.0, mscale_all_dim=0.8) == pytest.approx(ratio)
    assert factor(mscale=1.0) == pytest.approx(0.1 * math.log(4) + 1)
    implied = {"type": "yarn", "original_max_position_embeddings": 32}
    assert rope(rope_scaling=implied).factor == 4.0


def test_rope_turns_pairs_and_leaves_the_rest():
    partial = RopeConfig(theta=100.0, partial=0.5)
    x = jnp.asarray(np.random.default_rng(0).normal(size=(3, 2, 8)), jnp.float32)
    positions = jnp.asarray([0, 5, 9], jnp.int32)
    turned = np.asarray(apply_rope(x, rope_tables(partial, 8, positions)))
    np.testing.assert_array_equal(turned[..., 4:], np.asarray(x)[..., 4:])
    pairs = np.asarray(x)[..., :2] + 1j * np.asarray(x)[..., 2:4]
    angles = np.asarray(positions)[:, None, None] * np.asarray([1.0, 0.1])
    expected = pairs * np.exp(1j * angles)
    np.testing.assert_allclose(turned[..., :2], expected.real, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(turned[..., 2:4], expected.imag, rtol=1e-5, atol=1e-6)
    with pytest.raises(ConfigError, match="even number"):
        inverse_frequencies(RopeConfig(partial=0.375), 8)
