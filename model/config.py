"""What a model's graph needs to know, read once at the door.

Both spellings of config.json are taken: `rope_parameters` (transformers 5) and `rope_theta`,
`rope_scaling`, `rope_local_base_freq`, `torch_dtype` (transformers 4 and most published files).
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from octavo.attention.contract import AttentionSpec
from octavo.cache.layout import CacheLayout

DTYPES = ("float32", "bfloat16", "float16")
ROPE_KINDS = ("default", "linear", "dynamic", "llama3", "yarn")
ACTIVATIONS = {"silu": "silu", "gelu": "gelu", "gelu_pytorch_tanh": "gelu_tanh"}
"""Hugging Face's name of an activation -> ours."""


class ConfigError(ValueError):
    """A model description that is refused; the message names the field and its value."""


@dataclass(frozen=True)
class RopeConfig:
    """One rotary position embedding (Su et al. 2021, arXiv:2104.09864).

    Attributes:
        theta: base of the frequencies.
        kind: one of ROPE_KINDS.
        factor: context extension; 1 for "default".
        original_max_len: positions the model was trained on; used by dynamic, llama3 and yarn.
        low_freq_factor, high_freq_factor: llama3's band edges.
        beta_fast, beta_slow, truncate: yarn's band edges in rotations, and whether the
            dimensions they fall on are rounded outwards.
        attention_factor: yarn's factor on cos and sin, resolved when the config is read.
        partial: share of the head that turns, from its start.
        max_len: longest sequence that will be run; only dynamic depends on it.
    """

    theta: float = 10000.0
    kind: str = "default"
    factor: float = 1.0
    original_max_len: int = 0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    attention_factor: float = 1.0
    partial: float = 1.0
    max_len: int = 0


@dataclass(frozen=True)
class LayerConfig:
    """What may differ between the layers of one model.

    Attributes:
        rope: the layer's rotary embedding.
        window: tokens a query sees, itself included; None is all.
    """

    rope: RopeConfig
    window: int | None = None


@dataclass(frozen=True)
class ModelConfig:
    """Everything the graph of a decoder needs; static and hashable.

    Attributes:
        architecture: Hugging Face's class name, the key of the family table.
        num_kv_heads: after replication; kv_replicas of them in a row are copies of one stored head.
        layers: one entry a layer.
        attention_scale: factor on q·k.
        qkv_bias, out_bias, mlp_bias: which projections have a bias.
        qk_norm: RMS norm of q and k over the head, before rope.
        post_norms: norms after attention and after the MLP too (Gemma).
        norm_offset: added to norm weights, 1 where they are stored as w - 1 (Gemma).
        embedding_scale: factor on embeddings, rounded to the activations' dtype as the
            reference does.
        attention_soft_cap, logit_soft_cap: cap * tanh(x / cap); None is no cap.
        activation: "silu", "gelu" or "gelu_tanh", of the gate.
        dtype: element type of weights and activations.
    """

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    layers: tuple[LayerConfig, ...]
    max_position_embeddings: int
    attention_scale: float
    norm_eps: float = 1e-6
    tie_embeddings: bool = False
    qkv_bias: bool = False
    out_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    post_norms: bool = False
    norm_offset: float = 0.0
    embedding_scale: float = 1.0
    attention_soft_cap: float | None = None
    logit_soft_cap: float | None = None
    activation: str = "silu"
    bos_id: int | None = None
    eos_ids: tuple[int, ...] = ()
    dtype: str = "float32"
    kv_replicas: int = 1

    def __post_init__(self) -> None:
        sizes = ("vocab_size", "hidden_size", "intermediate_size", "num_heads", "num_kv_heads")
        for field in (*sizes, "head_dim", "max_position_embeddings", "kv_replicas"):
            if getattr(self, field) < 1:
                raise ConfigError(f"{field} must be at least 1, not {getattr(self, field)}")
        if not self.layers:
            raise ConfigError("a model needs at least one layer")
        if self.num_heads % self.num_kv_heads:
            raise ConfigError(
                f"{self.num_heads} query heads can't share {self.num_kv_heads} KV heads"
            )
        if self.dtype not in DTYPES:
            raise ConfigError(f"dtype {self.dtype!r} is not one of {', '.join(DTYPES)}")

    @property
    def num_layers(self) -> int:
        """Number of decoder layers."""
        return len(self.layers)

    @property
    def group_size(self) -> int:
        """Query heads of each KV head."""
        return self.num_heads // self.num_kv_heads

    def attention_spec(self, layer: LayerConfig, mesh_axis: str | None = None) -> AttentionSpec:
        """The attention of such a layer; mesh_axis shards its KV heads."""
        return AttentionSpec(
            scale=self.attention_scale,
            window=layer.window,
            soft_cap=self.attention_soft_cap,
            mesh_axis=mesh_axis,
        )

    def cache_layout(self, num_pages: int, page_size: int, dtype: str | None = None) -> CacheLayout:
        """A cache of num_pages pages (the padding page included) for this model."""
        return CacheLayout(
            num_layers=self.num_layers,
            num_pages=num_pages,
            page_size=page_size,
            num_kv_heads=self.num_kv_heads,
            head_dim=self.head_dim,
            dtype=dtype or self.dtype,
        )

    def with_kv_replicas(self, replicas: int) -> "ModelConfig":
        """This model with every stored KV head held `replicas` times, next to each other.

        Tensor parallelism over more devices than KV heads needs it. Refused where the query heads
        of a KV head can't be shared out over its copies.
        """
        if replicas < 1 or self.group_size * self.kv_replicas % replicas:
            group = self.group_size * self.kv_replicas
            raise ConfigError(f"{group} query heads a KV head can't feed {replicas} copies of it")
        heads = self.num_kv_heads // self.kv_replicas * replicas
        return replace(self, num_kv_heads=heads, kv_replicas=replicas)

    def with_max_len(self, max_len: int) -> "ModelConfig":
        """This model run with at most max_len tokens a row.

        Only dynamic rope depends on it: its base is computed once, for that length, where the
        reference changes it as a sequence grows (and leaves older keys turned by another base).
        """
        layers = tuple(
            replace(layer, rope=replace(layer.rope, max_len=max_len))
            if layer.rope.kind == "dynamic"
            else layer
            for layer in self.layers
        )
        return replace(self, layers=layers)

    def with_dtype(self, dtype: str) -> "ModelConfig":
        """This model with weights and activations of another type."""
        return replace(self, dtype=dtype)


def require(hf: Mapping[str, Any], key: str) -> Any:
    """hf[key], or a ConfigError that names the missing key."""
    if hf.get(key) is None:
        raise ConfigError(f"config.json has no {key!r}")
    return hf[key]


def activation_from_hf(hf: Mapping[str, Any], keys: tuple[str, ...], default: str) -> str:
    """Our name of the activation under the first of `keys` that is set; unknown ones refused."""
    name = next((hf[key] for key in keys if hf.get(key)), default)
    if name not in ACTIVATIONS:
        raise ConfigError(f"activation {name!r} is not one of {', '.join(ACTIVATIONS)}")
    return ACTIVATIONS[name]


def common_fields(hf: Mapping[str, Any], *, tied: bool) -> dict[str, Any]:
    """Fields that every supported decoder reads alike. `tied` is the architecture's default.

    Refuses quantised checkpoints by method.
    """
    if quantization := hf.get("quantization_config"):
        method = quantization.get("quant_method", "unnamed")
        raise ConfigError(f"quantization_config with quant_method {method!r} is not supported")
    heads, hidden = require(hf, "num_attention_heads"), require(hf, "hidden_size")
    eos = hf.get("eos_token_id")
    head_dim = hf.get("head_dim") or hidden // heads
    if head_dim < 1:
        raise ConfigError(f"hidden_size {hidden} is too small for {heads} attention heads")
    tie = hf.get("tie_word_embeddings")
    return {
        "architecture": hf["architectures"][0],
        "vocab_size": require(hf, "vocab_size"),
        "hidden_size": hidden,
        "intermediate_size": require(hf, "intermediate_size"),
        "num_heads": heads,
        "num_kv_heads": hf.get("num_key_value_heads") or heads,
        "head_dim": head_dim,
        "max_position_embeddings": require(hf, "max_position_embeddings"),
        "attention_scale": head_dim**-0.5,
        "norm_eps": hf.get("rms_norm_eps") or 1e-6,
        "tie_embeddings": tied if tie is None else tie,
        "bos_id": hf.get("bos_token_id"),
        "eos_ids": () if eos is None else tuple(eos) if isinstance(eos, list) else (eos,),
        "dtype": str(hf.get("dtype") or hf.get("torch_dtype") or "float32").removeprefix("torch."),
    }


def windows_from_types(types: list[str], window: int | None, count: int) -> list[int | None]:
    """The window of each of `count` layers from `layer_types`; other kinds are refused by name."""
    if len(types) != count:
        raise ConfigError(f"layer_types has {len(types)} entries for {count} layers")
    for kind in types:
        if kind not in ("full_attention", "sliding_attention"):
            raise ConfigError(f"layer type {kind!r} is not supported")
    return [window if kind == "sliding_attention" else None for kind in types]
