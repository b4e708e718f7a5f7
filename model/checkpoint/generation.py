"""What ends a text, and how a model's authors would sample it. No jax.

Sources: config.json, generation_config.json, the tokenizer's files or GGUF metadata.
"""

import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

from octavo.model.checkpoint.gguf import GgufSource, open_gguf
from octavo.model.checkpoint.json_file import read_json_if_there
from octavo.model.checkpoint.source import CheckpointError

if TYPE_CHECKING:  # the config brings jax
    from octavo.model.config import ModelConfig

_GGUF_ENDS = ("eos", "eot", "eom")
_GGUF_END_TEXTS = frozenset(
    (
        "</s>",
        "<|endoftext|>",
        "<|end_of_text|>",
        "<|eot_id|>",
        "<|eom_id|>",
        "<|im_end|>",
        "<end_of_turn>",
    )
)
"""Control tokens that end a text or a turn; a GGUF names one of them where
generation_config.json lists all."""

_GGUF_ID = re.compile(r"tokenizer\.ggml\.(\w+)_token_id")
_MAX_IDS = 2**31
_CONTROL_TYPE = 3

TOKEN_FLAGS = ("lstrip", "rstrip", "normalized", "single_word", "special")
"""What an added token may say of itself beside its text."""

_FIELDS: dict[str, tuple[str, float, float]] = {
    "temperature": ("temperature", 0.0, 100.0),
    "top_k": ("top_k", 0, 2**31 - 1),
    "top_p": ("top_p", 1e-6, 1.0),
    "min_p": ("min_p", 0.0, 1.0),
    "repetition_penalty": ("repetition_penalty", 1e-6, 10.0),
    "max_new_tokens": ("max_tokens", 1, 2**31 - 1),
}
"""generation_config.json's field -> SamplingParams' field and its range."""

_ALWAYS = ("repetition_penalty", "max_new_tokens")


def stop_and_defaults(
    where: str | Path | GgufSource, config: "ModelConfig"
) -> tuple[tuple[int, ...], dict[str, Any]]:
    """End-of-sequence ids and default sampling fields of a checkpoint.

    `where` is a Hugging Face folder, a GGUF file or an open one. The ids are the union of
    config.json's, generation_config.json's and the tokenizer's, sorted, less those the vocabulary
    does not have. The defaults are SamplingParams fields, from generation_config.json:
    temperature, top_k, top_p and min_p count if `do_sample` is true or left out beside them;
    `"do_sample": false` makes greedy decoding the default (temperature 0). repetition_penalty and
    max_new_tokens (as max_tokens) count either way. CheckpointError names a file that is not JSON
    or a value out of range.
    """
    if isinstance(where, str | Path) and Path(where).suffix == ".gguf":
        where = open_gguf(where)
    if isinstance(where, GgufSource):
        try:
            found, defaults = gguf_eos_ids(where.metadata), {}
        except CheckpointError as error:
            raise CheckpointError(f"{where.path}: {error}") from None
    else:
        folder = Path(where)
        generation = read_json_if_there(folder / "generation_config.json")
        found = _ids(generation.get("eos_token_id"), folder / "generation_config.json")
        found |= _tokenizer_eos(folder)
        defaults = _defaults(generation, folder / "generation_config.json")
    ids = sorted(found | set(config.eos_ids))
    return tuple(id_ for id_ in ids if 0 <= id_ < config.vocab_size), defaults


def gguf_named_ids(metadata: dict[str, Any]) -> dict[str, int]:
    """Ids of the tokens that GGUF metadata names ("bos", "eos", "padding", ...).

    Those the vocabulary does not have are left out: files spell "none" as 2**32 - 1.
    CheckpointError naming the key for one that is no id.
    """
    size = len(_listed(metadata, "tokenizer.ggml.tokens")) or _MAX_IDS
    found: dict[str, int] = {}
    for key, value in metadata.items():
        if match := _GGUF_ID.fullmatch(key):
            if isinstance(value, bool) or not isinstance(value, int):
                raise CheckpointError(f"{key} is {value!r:.80}, not a token id")
            found[match[1]] = value
    return {name: id_ for name, id_ in found.items() if 0 <= id_ < size}


def gguf_eos_ids(metadata: dict[str, Any]) -> set[int]:
    """Ids that end a text by GGUF metadata: those it names, and well-known control tokens."""
    named = gguf_named_ids(metadata)
    pieces = _listed(metadata, "tokenizer.ggml.tokens")
    types = _listed(metadata, "tokenizer.ggml.token_type")
    ends = (
        index
        for index, (piece, kind) in enumerate(zip(pieces, types))
        if kind == _CONTROL_TYPE and piece in _GGUF_END_TEXTS
    )
    return {named[name] for name in _GGUF_ENDS if name in named}.union(ends)


def _listed(metadata: dict[str, Any], key: str) -> list[Any]:
    value = metadata.get(key, [])
    if not isinstance(value, list):
        raise CheckpointError(f"{key} is {value!r:.80}, not a list")
    return value


def _ids(value: Any, path: Path) -> set[int]:
    ids = value if isinstance(value, list) else [] if value is None else [value]
    if not all(isinstance(id_, int) and not isinstance(id_, bool) for id_ in ids):
        raise CheckpointError(f"{path}: eos_token_id is {value!r}, not an id or a list of ids")
    return set(ids)


def _tokenizer_eos(folder: Path) -> set[int]:
    """The id of tokenizer_config.json's eos_token, found without building the tokenizer."""
    described = read_json_if_there(folder / "tokenizer_config.json")
    mapped = read_json_if_there(folder / "special_tokens_map.json")
    token = described.get("eos_token") or mapped.get("eos_token")
    text = token_text(token, "eos_token", folder)
    if text is None:
        return set()
    for id_, entry in added_tokens(described, folder / "tokenizer_config.json").items():
        if entry["content"] == text:
            return {id_}
    file = folder / "tokenizer.json"
    backend = read_json_if_there(file)
    try:
        added = {entry["content"]: entry["id"] for entry in backend.get("added_tokens") or ()}
        vocab = (backend.get("model") or {}).get("vocab")
    except (AttributeError, KeyError, TypeError) as error:
        raise CheckpointError(f"{file} is no tokenizer: {error!r}") from error
    return _ids(added.get(text, vocab.get(text) if isinstance(vocab, dict) else None), file)


def token_text(token: Any, name: str, folder: Path) -> str | None:
    """The text of a special token, given as text or as an object; CheckpointError otherwise."""
    text = token.get("content") if isinstance(token, dict) else token
    if text is not None and not isinstance(text, str):
        raise CheckpointError(f"{folder}: the tokenizer's {name} is {token!r:.80}, not a token")
    return text


def added_tokens(described: dict[str, Any], path: Path) -> dict[int, dict[str, Any]]:
    """tokenizer_config.json's added_tokens_decoder by id; CheckpointError naming a bad entry."""
    entries = described.get("added_tokens_decoder") or {}
    if not isinstance(entries, dict):
        raise CheckpointError(f"{path}: added_tokens_decoder is {entries!r:.80}, not an object")
    for key, entry in entries.items():
        content = entry.get("content") if isinstance(entry, dict) else None
        good = isinstance(content, str) and all(
            isinstance(entry.get(flag, False), bool) for flag in TOKEN_FLAGS
        )
        if not (key.isascii() and key.isdigit() and len(key) < 10 and good):
            raise CheckpointError(f"{path}: added_tokens_decoder has {key!r}: {entry!r:.80}")
    return {int(key): entry for key, entry in entries.items()}


def _defaults(generation: dict[str, Any], path: Path) -> dict[str, Any]:
    sample = generation.get("do_sample")
    defaults: dict[str, Any] = {}
    for name, (field, low, high) in _FIELDS.items():
        value = generation.get(name)
        if value is None or (sample is False and name not in _ALWAYS):
            continue
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise CheckpointError(f"{path}: {name} is {value!r}, not a number")
        if (name, value) == ("top_k", -1):  # "off", in some authors' spelling
            value = 0
        if not low <= value <= high:
            raise CheckpointError(f"{path}: {name} is {value}, not in [{low:g}, {high:g}]")
        defaults[field] = int(value) if isinstance(low, int) else float(value)
    if sample is False:
        defaults["temperature"] = 0.0
    return defaults
