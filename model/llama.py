"""Llama 2 and 3.x and what shares their graph: SmolLM2, and Mistral with its sliding window."""

from collections.abc import Mapping
from typing import Any

from octavo.model.config import LayerConfig, ModelConfig, activation_from_hf, common_fields, require
from octavo.model.rope import rope_from_hf


def config_from_hf(hf: Mapping[str, Any]) -> ModelConfig:
    """LlamaForCausalLM's config.json."""
    return _config(hf, window=None)


def mistral_config_from_hf(hf: Mapping[str, Any]) -> ModelConfig:
    """MistralForCausalLM's config.json; a missing `sliding_window` means 4096, null means none."""
    return _config(hf, window=hf.get("sliding_window", 4096))


def _config(hf: Mapping[str, Any], window: int | None) -> ModelConfig:
    fields = common_fields(hf, tied=False)
    bias = bool(hf.get("attention_bias"))
    layer = LayerConfig(rope_from_hf(hf), window)
    return ModelConfig(
        **fields,
        layers=(layer,) * require(hf, "num_hidden_layers"),
        activation=activation_from_hf(hf, ("hidden_act",), "silu"),
        qkv_bias=bias,
        out_bias=bias,
        mlp_bias=bool(hf.get("mlp_bias")),
    )
