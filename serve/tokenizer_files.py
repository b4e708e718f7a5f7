"""The files that a tokenizer is read from. No jax, torch or transformers.

Those of a Hugging Face folder (tokenizer.json, tokenizer_config.json, special_tokens_map.json,
added_tokens.json, chat_template.jinja and friends) or a GGUF's metadata.
"""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from tokenizers import AddedToken
from tokenizers import Tokenizer as Backend

from octavo.model.checkpoint.companions import GGUF_VOCABULARY
from octavo.model.checkpoint.generation import (
    TOKEN_FLAGS,
    added_tokens,
    gguf_eos_ids,
    gguf_named_ids,
    token_text,
)
from octavo.model.checkpoint.gguf import find_gguf
from octavo.model.checkpoint.gguf_file import GgufFile
from octavo.model.checkpoint.json_file import read_json_if_there
from octavo.serve.tokenizer import Tokenizer
from octavo.serve.tokenizer_gguf import build_tokenizer, default_bos

_NAMED = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token")
_GGUF_NAMES = {"bos": "bos", "eos": "eos", "unknown": "unk", "padding": "pad", "seperator": "sep"}


class TokenizerError(ValueError):
    """Tokenizer files that are refused; the message names the file."""


def load_tokenizer(path: str | Path) -> Tokenizer | None:
    """The tokenizer of a GGUF file or of a model folder; None for a folder without one.

    TokenizerError naming the file for files that are corrupt or of a kind that is not read
    (SentencePiece's tokenizer.model alone, vocab.json with merges.txt alone).
    """
    path = Path(path)
    if not path.exists():
        raise TokenizerError(f"tokenizer {str(path)!r} does not exist")
    if path.suffix == ".json":
        path = path.parent
    if path.is_file():
        return _from_gguf(path)
    if (path / "tokenizer.json").is_file():
        return _from_folder(path)
    if (path / GGUF_VOCABULARY).is_file():
        return _from_gguf(path / GGUF_VOCABULARY)
    for name in ("tokenizer.model", "vocab.json", "spiece.model"):
        if (path / name).is_file():
            raise TokenizerError(
                f"{path / name}: only tokenizer.json is read; make one with"
                " transformers' AutoTokenizer.from_pretrained(folder).save_pretrained(folder)"
            )
    if next(path.glob("*.gguf"), None) and not (path / "config.json").is_file():
        return _from_gguf(find_gguf(path))
    return None


def _from_gguf(path: Path) -> Tokenizer | None:
    metadata = GgufFile(path).metadata
    if "tokenizer.ggml.model" not in metadata:
        return None
    try:
        return _from_metadata(metadata)
    except Exception as error:  # tokenizers raises plain Exception
        raise TokenizerError(f"{path}: {error}") from error


def _from_metadata(metadata: dict[str, Any]) -> Tokenizer:
    backend = build_tokenizer(metadata)
    ids = gguf_named_ids(metadata)
    named = {
        f"{name}_token": backend.id_to_token(ids[key])
        for key, name in _GGUF_NAMES.items()
        if key in ids
    }
    add_bos = metadata.get("tokenizer.ggml.add_bos_token", default_bos(metadata))
    add_eos = metadata.get("tokenizer.ggml.add_eos_token", False)
    return Tokenizer(
        backend,
        special_tokens={name: text for name, text in named.items() if text is not None},
        eos_ids=sorted(gguf_eos_ids(metadata)),
        prefix=[ids["bos"]] if add_bos and "bos" in ids else [],
        suffix=[ids["eos"]] if add_eos and "eos" in ids else [],
        templates=_gguf_templates(metadata),
    )


def _gguf_templates(metadata: Mapping[str, Any]) -> dict[str, str]:
    stem = "tokenizer.chat_template"
    found: dict[str, str] = {}
    for key, text in metadata.items():
        if key == stem or key.startswith(f"{stem}."):
            if not isinstance(text, str):
                raise TokenizerError(f"{key} is {text!r:.80}, not a template")
            found[key.removeprefix(stem).removeprefix(".") or "default"] = text
    return found


def _from_folder(folder: Path) -> Tokenizer:
    file = folder / "tokenizer.json"
    try:
        backend = Backend.from_file(str(file))
    except Exception as error:  # tokenizers raises plain Exception
        raise TokenizerError(f"{file}: {error}") from error
    config = read_json_if_there(folder / "tokenizer_config.json", TokenizerError)
    names = read_json_if_there(folder / "special_tokens_map.json", TokenizerError) | config
    texts = {name: token_text(names.get(name), name, folder) for name in _NAMED}
    named = {name: text for name, text in texts.items() if text is not None}
    added = read_json_if_there(folder / "added_tokens.json", TokenizerError)
    _add_listed(backend, config, added, folder)
    _make_special(backend, named.values())
    prefix, suffix = _around(backend, config, named)
    eos = backend.token_to_id(named["eos_token"]) if "eos_token" in named else None
    return Tokenizer(
        backend,
        special_tokens=named,
        eos_ids=() if eos is None else (eos,),
        prefix=prefix,
        suffix=suffix,
        templates=_folder_templates(folder, config),
    )


def _add_listed(
    backend: Backend, config: dict[str, Any], added: Mapping[str, Any], folder: Path
) -> None:
    """Adds tokens that only tokenizer_config.json or added_tokens.json list.

    What the former says of a token that tokenizer.json has, too, goes before, as in transformers.
    """
    for text, id_ in added.items():
        if isinstance(id_, bool) or not isinstance(id_, int):
            raise TokenizerError(f"{folder / 'added_tokens.json'}: {text!r} has id {id_!r:.80}")
    present = backend.get_added_tokens_decoder()
    wanted: dict[int, dict[str, Any]] = {
        id_: {"content": text} for text, id_ in added.items() if id_ not in present
    }
    wanted |= added_tokens(config, folder / "tokenizer_config.json")
    tokens: dict[int, AddedToken] = {}
    for id_, entry in sorted(wanted.items()):
        before = present.get(id_)
        if before is None or before.content == entry["content"]:
            flags = {flag: entry[flag] for flag in TOKEN_FLAGS if flag in entry}
            if before is not None and before.special:
                flags["special"] = True  # the library goes on skipping it
            tokens[id_] = AddedToken(entry["content"], **flags)
    backend.add_tokens(list(tokens.values()))
    for id_, token in tokens.items():
        if backend.token_to_id(token.content) != id_:
            raise TokenizerError(
                f"{folder}: added token {token.content!r} has id {id_}, but tokenizer.json"
                f" gives it {backend.token_to_id(token.content)}"
            )


def _make_special(backend: Backend, texts: Iterable[str]) -> None:
    """Makes tokens of the vocabulary special; how much around them they take in stays."""
    present = {token.content: token for token in backend.get_added_tokens_decoder().values()}
    known = [text for text in texts if backend.token_to_id(text) is not None]
    tokens = [present.get(text, AddedToken(text, normalized=False)) for text in known]
    backend.add_special_tokens(tokens)


def _around(
    backend: Backend, config: Mapping[str, Any], named: Mapping[str, str]
) -> tuple[list[int], list[int]]:
    """Ids put before and behind a text.

    What tokenizer.json does to a sample, corrected by add_bos_token and add_eos_token where
    tokenizer_config.json sets them.
    """
    plain = backend.encode("a", add_special_tokens=False).ids
    whole = backend.encode("a", add_special_tokens=True).ids
    start = next(i for i in range(len(whole)) if whole[i : i + len(plain)] == plain)
    prefix, suffix = whole[:start], whole[start + len(plain) :]
    for ids, flag, name in ((prefix, "add_bos_token", "bos"), (suffix, "add_eos_token", "eos")):
        id_ = backend.token_to_id(named.get(f"{name}_token", ""))
        wanted = config.get(flag)
        if wanted is True and id_ is not None and id_ not in ids:
            ids.insert(0, id_)
        elif wanted is False and id_ in ids:
            ids.remove(id_)
    return prefix, suffix


def _folder_templates(folder: Path, config: Mapping[str, Any]) -> dict[str, str]:
    """Templates of tokenizer_config.json, over them chat_template.json, over them .jinja files."""
    templates: dict[str, str] = {}
    for found in (config, read_json_if_there(folder / "chat_template.json", TokenizerError)):
        value = found.get("chat_template")
        if isinstance(value, str):
            templates["default"] = value
        elif isinstance(value, list):
            templates |= dict(_named_template(entry, folder) for entry in value)
    files = {path.stem: path for path in folder.glob("additional_chat_templates/*.jinja")}
    if (folder / "chat_template.jinja").is_file():
        files["default"] = folder / "chat_template.jinja"
    return templates | {name: _read_text(path) for name, path in files.items()}


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise TokenizerError(f"{path} is not UTF-8: {error.reason}") from error


def _named_template(entry: Any, folder: Path) -> tuple[str, str]:
    name, text = (
        (entry.get("name"), entry.get("template")) if isinstance(entry, dict) else (None, None)
    )
    if not isinstance(name, str) or not isinstance(text, str):
        raise TokenizerError(f"{folder}: chat_template has {entry!r:.80}, not name and template")
    return name, text
