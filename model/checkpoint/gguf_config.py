"""GGUF metadata as a Hugging Face config.json dict. No jax.

Keys: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md and llama.cpp's model loader.
"""

from typing import Any

import numpy as np

from octavo.model.checkpoint.gguf_file import CheckpointError, GgufFile

ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "gemma3": "Gemma3ForCausalLM",
}
"""general.architecture -> Hugging Face's class. A llama with a sliding window is a Mistral."""

_STORED_DTYPES = {0: "float32", 1: "float16", 30: "bfloat16"}
_GEMMA3_PATTERN = 6  # every sixth layer is global; the file does not say so
_GEMMA3_27B_LAYERS = 62  # the one size whose query scale is hidden / heads, not head_dim


class _Reader:
    """Typed access to `<architecture>.<key>` with errors that name file and key."""

    def __init__(self, file: GgufFile) -> None:
        self.file = file
        self.prefix = file.metadata["general.architecture"]

    def get(self, key: str, kind: type | tuple[type, ...], default: Any = None) -> Any:
        value = self.file.metadata.get(f"{self.prefix}.{key}")
        if value is None:
            return default
        if not isinstance(value, kind):
            raise self.fail(f"{self.prefix}.{key} is {value!r}, which has the wrong type")
        return value

    def need(self, key: str, kind: type | tuple[type, ...]) -> Any:
        value = self.get(key, kind)
        if value is None:
            raise self.fail(f"metadata has no {self.prefix}.{key}")
        return value

    def uniform(self, key: str) -> int | None:
        """An int, or an array that says the same int for each layer."""
        value = self.get(key, (int, list))
        if isinstance(value, list):
            if len(set(value)) != 1:
                raise self.fail(f"{self.prefix}.{key} differs between layers: not supported")
            (value,) = set(value)
            if not isinstance(value, int):
                raise self.fail(f"{self.prefix}.{key} lists {value!r}, which has the wrong type")
        return value

    def fail(self, problem: str) -> CheckpointError:
        return CheckpointError(f"{self.file.path}: {problem}")


def architecture_of(file: GgufFile) -> str:
    """general.architecture; CheckpointError by name when no family reads it."""
    name = file.metadata.get("general.architecture")
    if not isinstance(name, str) or name not in ARCHITECTURES:
        raise CheckpointError(
            f"{file.path}: GGUF architecture {name!r} is not supported"
            f" (supported: {', '.join(ARCHITECTURES)})"
        )
    return name


def config_from_gguf(file: GgufFile) -> dict[str, Any]:
    """The model's description in config.json's spelling (rope_theta, rope_scaling, ...).

    dtype is the stored one, or bfloat16 where the matrices are quantised. CheckpointError for an
    architecture, expert layers, per-layer shapes or rope scaling that no family reads.
    """
    name = architecture_of(file)
    reader = _Reader(file)
    if reader.get("expert_count", int, 0):
        raise reader.fail("mixture-of-experts layers are not supported")
    config = {"architectures": [ARCHITECTURES[name]], "model_type": name}
    config |= _sizes(reader)
    config |= _rope(reader, config["head_dim"])
    config |= _special_ids(file.metadata)
    if name == "gemma3":
        config |= _gemma3(reader, config)
    elif (window := reader.get("attention.sliding_window", int)) and name == "llama":
        config |= {"architectures": ["MistralForCausalLM"], "sliding_window": window}
    return config


def _sizes(reader: _Reader) -> dict[str, Any]:
    tensors = reader.file.tensors
    if "token_embd.weight" not in tensors:
        raise reader.fail("tensor 'token_embd.weight' is missing")
    embedding = tensors["token_embd.weight"]
    hidden = reader.need("embedding_length", int)
    heads = reader.uniform("attention.head_count")
    if not heads:
        raise reader.fail(f"metadata has no {reader.prefix}.attention.head_count")
    head_dim = reader.get("attention.key_length", int, hidden // heads)
    if reader.get("attention.value_length", int, head_dim) != head_dim:
        raise reader.fail("heads whose keys and values differ in size are not supported")
    return {
        "vocab_size": embedding.shape[0],
        "hidden_size": hidden,
        "intermediate_size": reader.uniform("feed_forward_length"),
        "num_hidden_layers": reader.need("block_count", int),
        "num_attention_heads": heads,
        "num_key_value_heads": reader.uniform("attention.head_count_kv") or heads,
        "head_dim": head_dim,
        "max_position_embeddings": reader.need("context_length", int),
        # Written as float32; its shortest decimal is the number the model was made with.
        "rms_norm_eps": _shortest(reader.need("attention.layer_norm_rms_epsilon", float)),
        "tie_word_embeddings": "output.weight" not in tensors,
        "attention_bias": "blk.0.attn_q.bias" in tensors,
        "mlp_bias": "blk.0.ffn_gate.bias" in tensors,
        "torch_dtype": _dtype(reader.file),
    }


def _shortest(value: float) -> float:
    return float(str(np.float32(value)))


def _dtype(file: GgufFile) -> str:
    matrix = file.tensors.get("blk.0.ffn_down.weight", file.tensors["token_embd.weight"])
    return _STORED_DTYPES.get(matrix.type_code, "bfloat16")


def _special_ids(metadata: dict[str, Any]) -> dict[str, Any]:
    names = ("bos", "eos", "padding")
    ids = {name: metadata.get(f"tokenizer.ggml.{name}_token_id") for name in names}
    return {
        f"{'pad' if name == 'padding' else name}_token_id": value
        for name, value in ids.items()
        if value is not None
    }


def _rope(reader: _Reader, head_dim: int) -> dict[str, Any]:
    turned = reader.get("rope.dimension_count", int, head_dim)
    if turned != head_dim:
        raise reader.fail(f"partial rotary embedding ({turned} of {head_dim}) is not supported")
    theta = _shortest(reader.get("rope.freq_base", float, 10000.0))
    return {"rope_theta": theta, "rope_scaling": _rope_scaling(reader, head_dim)}


def _rope_scaling(reader: _Reader, head_dim: int) -> dict[str, Any] | None:
    if "rope_freqs.weight" in reader.file.tensors:
        return _llama3_scaling(reader, head_dim)
    kind = reader.get("rope.scaling.type", str, "linear")
    factor = reader.get("rope.scaling.factor", float, reader.get("rope.scale_linear", float, 0.0))
    if kind == "none" or factor in (0.0, 1.0):
        return None
    original = reader.get("rope.scaling.original_context_length", int)
    if kind == "linear":
        return {"rope_type": "linear", "factor": _shortest(factor)}
    if kind == "yarn" and original:
        return {
            "rope_type": "yarn",
            "factor": _shortest(factor),
            "original_max_position_embeddings": original,
            "attention_factor": _yarn_attention(reader),
        }
    raise reader.fail(f"rope scaling {kind!r} (original context {original}) is not supported")


def _yarn_attention(reader: _Reader) -> float | None:
    given = reader.get("rope.scaling.attn_factor", float)
    return None if given is None else _shortest(given)


def _llama3_scaling(reader: _Reader, head_dim: int) -> dict[str, Any]:
    """Llama 3's scaling from the divisor of each frequency, which is what the file holds.

    Every published model has the bands 1 and 4 over 8192 positions; others are refused rather
    than guessed.
    """
    divisors = reader.file.tensors["rope_freqs.weight"].raw().view("<f4").reshape(-1)
    factor = float(divisors.max())
    original = reader.get("rope.scaling.original_context_length", int, 8192)
    theta = reader.get("rope.freq_base", float, 10000.0)
    turns = original * theta ** -(np.arange(0, head_dim, 2) / head_dim) / (2 * np.pi)
    keep = np.clip((turns - 1.0) / 3.0, 0, 1)
    expected = 1 / ((1 - keep) / factor + keep)
    if divisors.shape != expected.shape or not np.allclose(divisors, expected, rtol=1e-4):
        raise reader.fail("tensor 'rope_freqs.weight' does not follow Llama 3's rope scaling")
    return {
        "rope_type": "llama3",
        "factor": _shortest(factor),
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": original,
    }


def _gemma3(reader: _Reader, config: dict[str, Any]) -> dict[str, Any]:
    layers = config["num_hidden_layers"]
    scalar = config["head_dim"]
    if layers == _GEMMA3_27B_LAYERS:
        scalar = config["hidden_size"] // config["num_attention_heads"]
    return {
        "model_type": "gemma3_text",
        "query_pre_attn_scalar": scalar,
        "sliding_window": reader.need("attention.sliding_window", int),
        "layer_types": [
            "sliding_attention" if (index + 1) % _GEMMA3_PATTERN else "full_attention"
            for index in range(layers)
        ],
        "rope_local_base_freq": _shortest(reader.get("rope.freq_base_swa", float, 10000.0)),
        "hidden_activation": "gelu_pytorch_tanh",
        "final_logit_softcapping": reader.get("final_logit_softcapping", float),
        "attn_logit_softcapping": reader.get("attn_logit_softcapping", float),
    }
