"""Rotary position embeddings: how a config describes them, their frequencies, their application.

Frequencies are numpy constants of the graph, computed in float64 and rounded once; angles, cosines
and the rotation are float32 whatever the activations are.
"""

import math
from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int32

from octavo.model.config import ROPE_KINDS, ConfigError, RopeConfig, require


def rope_from_hf(
    hf: Mapping[str, Any], theta: float = 10000.0, layer_type: str = "full_attention"
) -> RopeConfig:
    """The rope of a layer type from either spelling of config.json.

    `theta` is the architecture's default base. `rope_parameters` may be flat or hold one entry a
    layer type. An unknown type is refused by name, a missing parameter by its key.
    """
    fields = hf.get("rope_parameters") or hf.get("rope_scaling") or {}
    fields = dict(fields.get(layer_type) or fields)
    base = fields.get("rope_theta") or hf.get("rope_theta") or theta
    partial = fields.get("partial_rotary_factor", hf.get("partial_rotary_factor")) or 1.0
    kind = fields.get("rope_type", fields.get("type", "default"))
    if kind not in ROPE_KINDS:
        raise ConfigError(f"rope type {kind!r} is not one of {', '.join(ROPE_KINDS)}")
    max_len = require(hf, "max_position_embeddings")
    if kind == "default":
        return RopeConfig(theta=base, partial=partial)
    original = fields.get("original_max_position_embeddings")
    if kind == "dynamic":
        original = max_len
    if kind == "yarn" and fields.get("factor") is None and original:
        fields["factor"] = max_len / original
    for key in ("factor", *(("low_freq_factor", "high_freq_factor") if kind == "llama3" else ())):
        if fields.get(key) is None:
            raise ConfigError(f"rope type {kind!r} needs {key!r}")
    if kind == "llama3" and not original:
        raise ConfigError("rope type 'llama3' needs 'original_max_position_embeddings'")
    return RopeConfig(
        theta=base,
        kind=kind,
        factor=float(fields["factor"]),
        original_max_len=original or max_len,
        low_freq_factor=fields.get("low_freq_factor", 1.0),
        high_freq_factor=fields.get("high_freq_factor", 4.0),
        beta_fast=fields.get("beta_fast") or 32.0,
        beta_slow=fields.get("beta_slow") or 1.0,
        truncate=fields.get("truncate", True),
        attention_factor=_yarn_attention_factor(fields) if kind == "yarn" else 1.0,
        partial=partial,
        max_len=max_len,
    )


def _yarn_attention_factor(fields: Mapping[str, Any]) -> float:
    """Factor on cos and sin: as given, DeepSeek's ratio of two mscales, or 0.1 ln(s) + 1."""
    if fields.get("attention_factor") is not None:
        return float(fields["attention_factor"])
    factor = fields["factor"]

    def mscale(weight: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0

    if fields.get("mscale") and fields.get("mscale_all_dim"):
        return mscale(fields["mscale"]) / mscale(fields["mscale_all_dim"])
    return mscale(1.0)


def inverse_frequencies(rope: RopeConfig, head_dim: int) -> np.ndarray:
    """Angle a position adds to each pair of dimensions, float32 [partial * head_dim / 2]."""
    dim = int(head_dim * rope.partial)
    if dim % 2:
        raise ConfigError(f"rope needs an even number of dimensions, not {dim}")
    theta = rope.theta
    if rope.kind == "dynamic":
        length = max(rope.max_len, rope.original_max_len)
        stretch = rope.factor * length / rope.original_max_len - (rope.factor - 1)
        theta *= stretch ** (dim / (dim - 2))
    freqs = theta ** -(np.arange(0, dim, 2, dtype=np.float64) / dim)
    if rope.kind == "linear":
        freqs = freqs / rope.factor
    elif rope.kind == "llama3":
        freqs = _llama3(rope, freqs)
    elif rope.kind == "yarn":
        freqs = _yarn(rope, freqs, dim)
    return freqs.astype(np.float32)


def _llama3(rope: RopeConfig, freqs: np.ndarray) -> np.ndarray:
    """Llama 3.1: long waves are stretched, short ones kept, those between blended."""
    wavelengths = 2 * math.pi / freqs
    low, high = rope.low_freq_factor, rope.high_freq_factor
    keep = np.clip((rope.original_max_len / wavelengths - low) / (high - low), 0, 1)
    return (1 - keep) * freqs / rope.factor + keep * freqs


def _yarn(rope: RopeConfig, freqs: np.ndarray, dim: int) -> np.ndarray:
    """YaRN, "NTK-by-parts" (Peng et al. 2023, arXiv:2309.00071, section 3.2)."""

    def dimension(rotations: float) -> float:
        waves = rope.original_max_len / (rotations * 2 * math.pi)
        return dim * math.log(waves) / (2 * math.log(rope.theta))

    low, high = dimension(rope.beta_fast), dimension(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    width = high - low or 0.001
    stretch = np.clip((np.arange(dim // 2) - low) / width, 0, 1)
    return freqs / rope.factor * stretch + freqs * (1 - stretch)


def rope_tables(
    rope: RopeConfig, head_dim: int, positions: Int32[Array, " T"]
) -> tuple[Float[Array, "T R"], Float[Array, "T R"]]:
    """float32 cos and sin of each position's angles, attention factor included."""
    freqs = jnp.asarray(inverse_frequencies(rope, head_dim))
    angles = positions.astype(jnp.float32)[:, None] * freqs[None, :]
    return jnp.cos(angles) * rope.attention_factor, jnp.sin(angles) * rope.attention_factor


def apply_rope(
    x: Float[Array, "T N D"], tables: tuple[Float[Array, "T R"], Float[Array, "T R"]]
) -> Float[Array, "T N D"]:
    """Turns the first 2R dimensions of each head, pairing i with i + R; the rest pass."""
    cos, sin = (table[:, None, None, :] for table in tables)
    size = 2 * cos.shape[-1]
    halves = x[..., :size].astype(jnp.float32).reshape(*x.shape[:-1], 2, -1)
    # A reversal, not a concatenation of the halves: XLA's code for the latter is several times
    # slower on a GPU.
    signs = jnp.array([-1.0, 1.0], jnp.float32).reshape(1, 1, 2, 1)
    turned = halves * cos + halves[..., ::-1, :] * (signs * sin)
    turned = turned.reshape(*x.shape[:-1], size).astype(x.dtype)
    return turned if size == x.shape[-1] else jnp.concatenate([turned, x[..., size:]], axis=-1)
