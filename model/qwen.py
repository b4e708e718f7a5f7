"""Qwen2 and 2.5 (bias on q, k, v), Qwen3 (norms on q and k)."""

from collections.abc import Mapping
from typing import Any

from octavo.model.config import (
    LayerConfig,
    ModelConfig,
    activation_from_hf,
    common_fields,
    require,
    windows_from_types,
)
from octavo.model.rope import rope_from_hf


def config_from_hf(hf: Mapping[str, Any]) -> ModelConfig:
    """Qwen2ForCausalLM's config.json."""
    return _config(hf, qkv_bias=True)


def qwen3_config_from_hf(hf: Mapping[str, Any]) -> ModelConfig:
    """Qwen3ForCausalLM's config.json."""
    bias = bool(hf.get("attention_bias"))
    return _config({"head_dim": 128, **hf}, qkv_bias=bias, out_bias=bias, qk_norm=True)


def _config(hf: Mapping[str, Any], **fields: Any) -> ModelConfig:
    rope = rope_from_hf(hf)
    return ModelConfig(
        **common_fields(hf, tied=False),
        **fields,
        layers=tuple(LayerConfig(rope, window) for window in _windows(hf)),
        activation=activation_from_hf(hf, ("hidden_act",), "silu"),
    )


def _windows(hf: Mapping[str, Any]) -> list[int | None]:
    """Windows only with use_sliding_window: by layer_types, else from max_window_layers on."""
    count = require(hf, "num_hidden_layers")
    window = hf.get("sliding_window", 4096) if hf.get("use_sliding_window") else None
    if types := hf.get("layer_types"):
        return windows_from_types(types, window, count)
    first = hf.get("max_window_layers")
    first = 28 if first is None else first
    return [window if index >= first else None for index in range(count)]
