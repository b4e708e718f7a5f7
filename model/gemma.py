"""Gemma 3, text only: local and global layers with their own rope bases, norms on both sides."""

from collections.abc import Mapping
from typing import Any

from octavo.model.config import (
    ConfigError,
    LayerConfig,
    ModelConfig,
    activation_from_hf,
    common_fields,
    require,
    windows_from_types,
)
from octavo.model.rope import rope_from_hf

GLOBAL_THETA, LOCAL_THETA = 1_000_000.0, 10_000.0
DEFAULTS = {
    "head_dim": 256,
    "sliding_window": 4096,
    "query_pre_attn_scalar": 256,
    "max_position_embeddings": 131072,
}
"""What the architecture assumes where config.json is silent."""


def config_from_hf(hf: Mapping[str, Any]) -> ModelConfig:
    """Gemma3ForCausalLM's config.json, layers by `layer_types` or `sliding_window_pattern`."""
    hf = {**DEFAULTS, **hf}
    if hf.get("use_bidirectional_attention"):
        raise ConfigError("use_bidirectional_attention is not supported")
    bias = bool(hf.get("attention_bias"))
    fields = common_fields(hf, tied=True)
    fields["attention_scale"] = require(hf, "query_pre_attn_scalar") ** -0.5
    return ModelConfig(
        **fields,
        layers=_layers(hf),
        activation=activation_from_hf(hf, ("hidden_activation", "hidden_act"), "gelu_pytorch_tanh"),
        qkv_bias=bias,
        out_bias=bias,
        qk_norm=True,
        post_norms=True,
        norm_offset=1.0,
        embedding_scale=hf["hidden_size"] ** 0.5,
        attention_soft_cap=hf.get("attn_logit_softcapping"),
        logit_soft_cap=hf.get("final_logit_softcapping"),
    )


def _layers(hf: Mapping[str, Any]) -> tuple[LayerConfig, ...]:
    count = require(hf, "num_hidden_layers")
    if not (types := hf.get("layer_types")):
        pattern = hf.get("sliding_window_pattern") or hf.get("_sliding_window_pattern") or 6
        types = [
            "full_attention" if (index + 1) % pattern == 0 else "sliding_attention"
            for index in range(count)
        ]
    full = rope_from_hf(hf, GLOBAL_THETA, "full_attention")
    if hf.get("rope_parameters"):
        local = rope_from_hf(hf, LOCAL_THETA, "sliding_attention")
    else:
        # The old spelling scales the global rope only.
        base = hf.get("rope_local_base_freq", LOCAL_THETA)
        local = rope_from_hf({**hf, "rope_theta": base, "rope_scaling": None})
    return tuple(
        LayerConfig(full if window is None else local, window)
        for window in windows_from_types(types, hf["sliding_window"], count)
    )
