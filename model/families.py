"""The table of supported architectures. A new family is one file and one line here."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from jax.sharding import Mesh
from jaxtyping import Array, Float, Int32

from octavo.attention.contract import AttentionMeta
from octavo.cache.layout import KVCache
from octavo.model import decoder, decoder_names, gemma, llama, qwen
from octavo.model.config import ConfigError, ModelConfig
from octavo.model.config_fields import check_fields
from octavo.model.names import Path, Piece


class Forward(Protocol):
    """A family's graph; see `octavo.model.decoder.forward`."""

    def __call__(
        self,
        params: Any,
        config: ModelConfig,
        tokens: Int32[Array, " T"],
        positions: Int32[Array, " T"],
        cache: KVCache,
        meta: AttentionMeta,
        impl: str = "auto",
        mesh: Mesh | None = None,
        block: str = "xla",
        matmul: str = "xla",
    ) -> tuple[Float[Array, "T E"], KVCache]:
        """Hidden states after the final norm, and the updated cache."""
        ...


@dataclass(frozen=True)
class Family:
    """The functions that make up one kind of model.

    Attributes:
        name: short name, for messages.
        config_from_hf: config.json as a dict -> ModelConfig.
        abstract_params: tree of ParamSpec.
        hf_names: path of each leaf -> the checkpoint tensors that fill it.
        forward, unembed: the graph, split where only some rows need logits.
        attend_through, finish: `forward` in two, split where only some need the last layer.
    """

    name: str
    config_from_hf: Callable[[Mapping[str, Any]], ModelConfig]
    abstract_params: Callable[[ModelConfig], Any] = decoder.abstract_params
    hf_names: Callable[[ModelConfig], dict[Path, tuple[Piece, ...]]] = decoder_names.hf_names
    forward: Forward = decoder.forward
    attend_through: Callable[..., tuple[decoder.Attended, KVCache]] = decoder.attend_through
    finish: Callable[[Any, ModelConfig, decoder.Attended], Array] = decoder.finish
    unembed: Callable[[Any, ModelConfig, Array], Array] = decoder.unembed


FAMILIES: dict[str, Family] = {
    "LlamaForCausalLM": Family("llama", llama.config_from_hf),
    "MistralForCausalLM": Family("mistral", llama.mistral_config_from_hf),
    "Qwen2ForCausalLM": Family("qwen2", qwen.config_from_hf),
    "Qwen3ForCausalLM": Family("qwen3", qwen.qwen3_config_from_hf),
    "Gemma3ForCausalLM": Family("gemma3", gemma.config_from_hf),
}


def family_of(config: ModelConfig) -> Family:
    """The family of a config's architecture."""
    return FAMILIES[config.architecture]


def config_from_hf(hf: Mapping[str, Any]) -> ModelConfig:
    """ModelConfig of a config.json; an architecture that is not in the table is refused by name."""
    check_fields(hf)
    architectures = hf.get("architectures") or []
    if len(architectures) != 1 or architectures[0] not in FAMILIES:
        found = ", ".join(architectures) or f"none (model_type {hf.get('model_type')!r})"
        raise ConfigError(f"architecture {found} is not supported; known: {', '.join(FAMILIES)}")
    return FAMILIES[architectures[0]].config_from_hf(hf)
