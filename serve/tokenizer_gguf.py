"""The tokenizer a GGUF file carries in its metadata, rebuilt with the `tokenizers` library. No jax.

Two kinds are read: "gpt2", byte-level BPE with merges and one of llama.cpp's named pre-tokenizers,
and "llama", SentencePiece BPE whose merges follow from the pieces' scores.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED, _BYTE = range(1, 7)
"""tokenizer.ggml.token_type."""

_LETTERS = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_CASED_WORDS = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
)
_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_EAST_ASIAN = "[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+"
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_LLAMA3 = rf"{_CONTRACTIONS}|{_LETTERS}|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_SPACES}"
_QWEN2 = rf"{_CONTRACTIONS}|{_LETTERS}|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_SPACES}"
_TEKKEN = rf"{_CASED_WORDS}|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_SPACES}"

_SPLITS: dict[str, tuple[str, ...]] = {
    "gpt-2": (_GPT2,),
    "smollm": (r"\p{N}", _GPT2),
    "llama-bpe": (_LLAMA3,),
    "smaug-bpe": (_LLAMA3,),
    "qwen2": (_QWEN2,),
    "deepseek-coder": (r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _EAST_ASIAN, r"\p{N}"),
    "tekken": (_TEKKEN,),
    "default": (r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", r"[0-9][0-9][0-9]"),
}
"""tokenizer.ggml.pre -> regular expressions, each splitting what the ones before left whole."""

_ALIASES = {
    "gpt2": "gpt-2",
    "llama3": "llama-bpe",
    "llama-v3": "llama-bpe",
    "falcon3": "llama-bpe",
    "pixtral": "llama-bpe",
    "mistral-bpe": "tekken",
    "deepseek-r1-qwen": "qwen2",
    "megrez": "qwen2",
    "starcoder": "smollm",
    "refact": "smollm",
}
_WHOLE_WORDS_FIRST = frozenset(("llama-bpe", "tekken"))
"""Pre-tokenizers whose vocabulary entries are taken before merges are tried."""


class GgufTokenizerError(ValueError):
    """A GGUF tokenizer that cannot be rebuilt; the message names the kind."""


def build_tokenizer(metadata: Mapping[str, Any]) -> Tokenizer:
    """The tokenizer of a GGUF file's metadata, without BOS or EOS of its own accord.

    GgufTokenizerError for a tokenizer kind or pre-tokenizer that is not known, by name, and for
    metadata that lacks pieces.
    """
    kind = metadata.get("tokenizer.ggml.model")
    builders = {"gpt2": _byte_level, "llama": _sentencepiece}
    if kind not in builders:
        known = ", ".join(builders)
        raise GgufTokenizerError(f"GGUF tokenizer {kind!r} is not supported (supported: {known})")
    pieces = _need(metadata, "tokens")
    types = metadata.get("tokenizer.ggml.token_type") or [_NORMAL] * len(pieces)
    if len(types) != len(pieces):
        raise GgufTokenizerError(f"GGUF tokenizer has {len(pieces)} tokens, {len(types)} types")
    tokenizer = builders[kind](metadata, pieces)
    _add_tokens(tokenizer, pieces, types)
    return tokenizer


def default_bos(metadata: Mapping[str, Any]) -> bool:
    """Whether text starts with BOS where the metadata does not say."""
    if metadata.get("tokenizer.ggml.model") == "llama":
        return True
    return _pre_tokenizer(metadata) in _WHOLE_WORDS_FIRST


def _need(metadata: Mapping[str, Any], key: str) -> list[Any]:
    value = metadata.get(f"tokenizer.ggml.{key}")
    if not value:
        raise GgufTokenizerError(f"GGUF metadata has no tokenizer.ggml.{key}")
    return value


def _add_tokens(tokenizer: Tokenizer, pieces: Sequence[str], types: Sequence[int]) -> None:
    special, plain = [], []
    for piece, kind in zip(pieces, types, strict=True):
        if kind in (_CONTROL, _UNKNOWN):
            special.append(AddedToken(piece, special=True, normalized=False))
        elif kind == _USER_DEFINED:
            plain.append(AddedToken(piece, special=False, normalized=False))
    tokenizer.add_special_tokens(special)
    tokenizer.add_tokens(plain)


def _pre_tokenizer(metadata: Mapping[str, Any]) -> str:
    name = str(metadata.get("tokenizer.ggml.pre", "default"))
    return _ALIASES.get(name, name)


def _byte_level(metadata: Mapping[str, Any], pieces: Sequence[str]) -> Tokenizer:
    name = _pre_tokenizer(metadata)
    if name not in _SPLITS:
        raise GgufTokenizerError(
            f"GGUF pre-tokenizer {name!r} is not supported (supported: {', '.join(_SPLITS)})"
        )
    merges = [tuple(merge.split(" ", 1)) for merge in _need(metadata, "merges")]
    vocab = {piece: index for index, piece in enumerate(pieces)}
    tokenizer = Tokenizer(
        models.BPE(vocab, merges, ignore_merges=name in _WHOLE_WORDS_FIRST)  # type: ignore[arg-type]
    )
    if name == "qwen2":
        tokenizer.normalizer = normalizers.NFC()
    splits = [pre_tokenizers.Split(Regex(regex), "isolated") for regex in _SPLITS[name]]
    bytes_only = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*splits, bytes_only])
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _sentencepiece(metadata: Mapping[str, Any], pieces: Sequence[str]) -> Tokenizer:
    scores = _need(metadata, "scores")
    if len(scores) != len(pieces):
        raise GgufTokenizerError(f"GGUF tokenizer has {len(pieces)} tokens, {len(scores)} scores")
    vocab = {piece: index for index, piece in enumerate(pieces)}
    unknown = metadata.get("tokenizer.ggml.unknown_token_id", 0)
    model = models.BPE(
        vocab,
        _merges_from_scores(vocab, pieces, scores),
        unk_token=pieces[unknown],
        fuse_unk=True,
        byte_fallback=True,
    )
    tokenizer = Tokenizer(model)
    to_space = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    if metadata.get("tokenizer.ggml.add_space_prefix", True):
        steps = [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
        tokenizer.normalizer = normalizers.Sequence(steps)
        to_space.append(decoders.Strip(" ", 1, 0))
    else:
        tokenizer.normalizer = normalizers.Replace(" ", "▁")
    tokenizer.decoder = decoders.Sequence(to_space)
    return tokenizer


def _merges_from_scores(
    vocab: Mapping[str, int], pieces: Sequence[str], scores: Sequence[float]
) -> list[tuple[str, str]]:
    """Every way to make a piece of two others, the piece with the highest score first.

    SentencePiece merges whichever neighbours form the best-scored piece; in rank order that is a
    list of merges. Ways to make the same piece go by their parts' ids.
    """
    merges, find = [], vocab.get
    for index in sorted(range(len(pieces)), key=lambda index: -scores[index]):
        piece, ways = pieces[index], []
        for cut in range(1, len(piece)):
            left = find(piece[:cut])
            if left is not None and (right := find(piece[cut:])) is not None:
                ways.append((left, right))
        merges += [(pieces[left], pieces[right]) for left, right in sorted(ways)]
    return merges
