"""Types and ranges of config.json's fields, checked before a family reads them."""

from collections.abc import Callable, Mapping
from typing import Any

from octavo.model.config import ConfigError

MAX_SIZE = 2**31 - 1
MAX_LAYERS = 65536
MAX_FLOAT = 3e38

_SIZES = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "max_position_embeddings",
    "sliding_window",
    "sliding_window_pattern",
    "_sliding_window_pattern",
)
_POSITIVE = (
    "rms_norm_eps",
    "rope_theta",
    "rope_local_base_freq",
    "query_pre_attn_scalar",
    "partial_rotary_factor",
    "final_logit_softcapping",
    "attn_logit_softcapping",
)
_SWITCHES = (
    "tie_word_embeddings",
    "attention_bias",
    "mlp_bias",
    "use_sliding_window",
    "use_bidirectional_attention",
)
_TEXTS = ("hidden_act", "hidden_activation", "dtype", "torch_dtype")
_ROPE_POSITIVE = (
    "factor",
    "rope_theta",
    "partial_rotary_factor",
    "original_max_position_embeddings",
    "low_freq_factor",
    "high_freq_factor",
    "beta_fast",
    "beta_slow",
    "attention_factor",
    "mscale",
    "mscale_all_dim",
)


def check_fields(hf: Mapping[str, Any]) -> None:
    """ConfigError naming the first field of config.json that is of a wrong type or range.

    A null is a field left out; fields that no family reads are not looked at.
    """
    for accepted, described, names in _KINDS:
        _check(hf, names, accepted, described)
    for name in ("rope_scaling", "rope_parameters"):
        _check_rope(name, hf.get(name))


def _check(
    fields: Mapping[str, Any],
    names: tuple[str, ...],
    accepted: Callable[[Any], bool],
    described: str,
    where: str = "",
) -> None:
    for name in names:
        value = fields.get(name)
        if value is not None and not accepted(value):
            raise ConfigError(f"{where}{name} must be {described}, not {value!r:.80}")


def _check_rope(name: str, fields: Any) -> None:
    """A flat description, or one a layer type."""
    if fields is None:
        return
    if not isinstance(fields, Mapping):
        raise ConfigError(f"{name} must be an object, not {fields!r:.80}")
    where = f"{name}."
    _check(fields, _ROPE_POSITIVE, _is_positive, _POSITIVE_WORDS, where)
    _check(fields, ("rope_type", "type"), _is_text, "a string", where)
    _check(fields, ("truncate",), _is_switch, "true or false", where)
    for key in ("full_attention", "sliding_attention"):
        _check_rope(where + key, fields.get(key))


def _is_whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_size(value: Any) -> bool:
    return _is_whole(value) and 1 <= value <= MAX_SIZE


def _is_count(value: Any) -> bool:
    return _is_size(value) and value <= MAX_LAYERS


def _is_index(value: Any) -> bool:
    return _is_whole(value) and 0 <= value <= MAX_SIZE


def _is_object(value: Any) -> bool:
    return isinstance(value, Mapping)


def _is_positive(value: Any) -> bool:
    """A number that float32 holds and that is above zero."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    return 0 < value <= MAX_FLOAT


def _is_switch(value: Any) -> bool:
    return isinstance(value, bool)


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


def _is_texts(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(item, str) for item in value)


def _is_ids(value: Any) -> bool:
    return all(_is_whole(item) for item in (value if isinstance(value, list) else [value]))


_POSITIVE_WORDS = "a finite number above 0"
_KINDS: tuple[tuple[Callable[[Any], bool], str, tuple[str, ...]], ...] = (
    (_is_texts, "a list of strings", ("architectures", "layer_types")),
    (_is_size, f"an integer in 1 .. {MAX_SIZE}", _SIZES),
    (_is_count, f"an integer in 1 .. {MAX_LAYERS}", ("num_hidden_layers",)),
    (_is_index, f"an integer in 0 .. {MAX_SIZE}", ("max_window_layers",)),
    (_is_positive, _POSITIVE_WORDS, _POSITIVE),
    (_is_switch, "true or false", _SWITCHES),
    (_is_text, "a string", _TEXTS),
    (_is_object, "an object", ("quantization_config",)),
    (_is_ids, "a token id or a list of them", ("bos_token_id", "eos_token_id")),
)
