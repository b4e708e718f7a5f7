"""Text to token ids and back, and conversations to prompts. No jax, torch or transformers.

Reads the files of a Hugging Face folder (tokenizer.json, tokenizer_config.json,
special_tokens_map.json, added_tokens.json, chat_template.jinja and friends) or a GGUF's metadata.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, processors
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
from octavo.serve.chat_messages import CUT_MARK, prepare_messages
from octavo.serve.chat_template import ChatTemplateError, render_template
from octavo.serve.panics import panics_are_errors
from octavo.serve.tokenizer_gguf import build_tokenizer, default_bos

_NAMED = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token")
_GGUF_NAMES = {"bos": "bos", "eos": "eos", "unknown": "unk", "padding": "pad", "seperator": "sep"}


class TokenizerError(ValueError):
    """Tokenizer files that are refused; the message names the file."""


class Tokenizer:
    """One model's tokenizer.

    Attributes:
        bos_id: the id that starts a text, if the model has one.
        eos_ids: ids that end a text by the tokenizer's own files, sorted.
        special_ids: ids that skip_special_tokens leaves out.
        vocab_size: ids, added tokens included (a model's embedding may have more rows).
        prefix, suffix: ids put around a text with add_special_tokens.
        templates: chat templates by name; "default" is the usual one.
        special_tokens: e.g. "bos_token" -> its text, as templates see them.
    """

    def __init__(
        self,
        backend: Backend,
        *,
        special_tokens: Mapping[str, str],
        eos_ids: Sequence[int] = (),
        prefix: Sequence[int] = (),
        suffix: Sequence[int] = (),
        templates: Mapping[str, str] | None = None,
    ) -> None:
        backend.no_truncation()
        backend.no_padding()
        self.backend = backend
        self.special_tokens = dict(special_tokens)
        self.templates = dict(templates or {})
        self.prefix, self.suffix = tuple(prefix), tuple(suffix)
        bos = self.special_tokens.get("bos_token")
        self.bos_id = None if bos is None else backend.token_to_id(bos)
        self.eos_ids = tuple(sorted(set(eos_ids)))
        added = backend.get_added_tokens_decoder()
        self.special_ids = frozenset(id_ for id_, token in added.items() if token.special)
        self.vocab_size = backend.get_vocab_size(with_added_tokens=True)

    @property
    def chat_template(self) -> str | None:
        """The default chat template, if the model has one."""
        return self.templates.get("default")

    @property
    def tool_template(self) -> str | None:
        """The chat template for conversations with tools."""
        return self.templates.get("tool_use") or self.chat_template

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Ids of `text`; special tokens spelled out in it become their ids.

        ValueError for text that is not valid Unicode (a lone surrogate).
        """
        try:
            # A batch of one: `encode` itself would hold the interpreter's lock all the while.
            with panics_are_errors("the tokenizer"):
                (encoding,) = self.backend.encode_batch_fast([text], add_special_tokens=False)
        except TypeError:  # what tokenizers says of a str that has no UTF-8 form
            raise ValueError("text is not valid Unicode: it has a lone surrogate") from None
        ids = encoding.ids
        return [*self.prefix, *ids, *self.suffix] if add_special_tokens else ids

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Text of `ids`; ids outside the vocabulary have none. ValueError for a negative id."""
        try:
            with panics_are_errors("the tokenizer"):
                (text,) = self.backend.decode_batch([list(ids)], skip_special_tokens)
                return text
        except OverflowError:
            raise ValueError("token ids must be in [0, 2**32)") from None

    def id_to_token(self, token_id: int) -> str | None:
        """The vocabulary's own spelling of a token; None outside it."""
        return self.backend.id_to_token(token_id)

    def render_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        /,
        *,
        add_generation_prompt: bool | None = None,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        template: str | None = None,
        **variables: Any,
    ) -> str:
        """The prompt text of a conversation.

        Args:
            messages: role and content each; content is text or a list of text parts.
            add_generation_prompt: end with the start of the assistant's turn; unless given, the
                opposite of continue_final_message.
            continue_final_message: end inside the last message, right behind its content.
            tools: functions in OpenAI's form; a template that shows none gets them as text.
            template: name of one of `templates`, or the text of another.
            variables: further names the template sees (documents, enable_thinking, ...).

        Raises:
            ValueError: no template, a message or part that is not text, both ways to end, or what
                the template itself refuses.
        """
        if add_generation_prompt is None:
            add_generation_prompt = not continue_final_message
        if add_generation_prompt and continue_final_message:
            raise ValueError("add_generation_prompt and continue_final_message exclude each other")
        source = self._choose(template, bool(tools))
        text = render_template(
            source,
            {
                **self.special_tokens,
                **variables,
                "messages": prepare_messages(
                    messages, source, cut=continue_final_message, tools=tools
                ),
                "tools": list(tools) if tools else None,
                "documents": variables.get("documents"),
                "add_generation_prompt": add_generation_prompt,
            },
        )
        if not continue_final_message:
            return text
        before, found, _ = text.rpartition(CUT_MARK)
        if not found:
            raise ChatTemplateError("the chat template does not show the final message")
        return before

    def encode_chat(self, messages: Sequence[Mapping[str, Any]], /, **options: Any) -> list[int]:
        """Ids of `render_chat(messages, **options)`.

        The template writes the special tokens it wants, so none are added; should it (or the text
        it shows) start with BOS twice, one is kept.
        """
        ids = self.encode(self.render_chat(messages, **options), add_special_tokens=False)
        begins = next((i for i, id_ in enumerate(ids) if id_ != self.bos_id), len(ids))
        return ids[max(begins - 1, 0) :]

    def save(self, folder: Path) -> None:
        """Writes tokenizer.json and tokenizer_config.json, as Hugging Face libraries read them."""
        backend = Backend.from_str(self.backend.to_str())
        if self.prefix or self.suffix:
            around = {id_: backend.id_to_token(id_) for id_ in (*self.prefix, *self.suffix)}
            backend.post_processor = processors.TemplateProcessing(
                single=[*(around[i] for i in self.prefix), "$A", *(around[i] for i in self.suffix)],
                pair=None,
                special_tokens=[(token, id_) for id_, token in around.items()],
            )
        backend.save(str(folder / "tokenizer.json"))
        named = [{"name": name, "template": text} for name, text in self.templates.items()]
        config: dict[str, Any] = {
            "tokenizer_class": "PreTrainedTokenizerFast",
            **self.special_tokens,
        }
        if named:
            alone = list(self.templates) == ["default"]
            config["chat_template"] = self.chat_template if alone else named
        text = json.dumps(config, ensure_ascii=False, indent=2)
        (folder / "tokenizer_config.json").write_text(text + "\n", encoding="utf-8")

    def _choose(self, template: str | None, tools: bool) -> str:
        if template is not None:
            return self.templates.get(template, template)
        source = self.tool_template if tools else self.chat_template
        if source is None:
            raise ValueError("this model has no chat template; pass one")
        return source


def load_tokenizer(path: str | Path) -> Tokenizer | None:
    """The tokenizer of a GGUF file or of a model folder; None for a folder without one.

    TokenizerError naming the file for files that are corrupt or of a kind that is not read
    (SentencePiece's tokenizer.model alone, vocab.json with merges.txt alone).
    """
    path = Path(path)
    if not path.exists():
        raise TokenizerError(f"{path} does not exist")
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
    config = _read_json(folder / "tokenizer_config.json")
    names = _read_json(folder / "special_tokens_map.json") | config
    texts = {name: token_text(names.get(name), name, folder) for name in _NAMED}
    named = {name: text for name, text in texts.items() if text is not None}
    _add_listed(backend, config, _read_json(folder / "added_tokens.json"), folder)
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


def _read_json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise TokenizerError(f"{path} is not readable JSON: {error}") from error
    if not isinstance(content, dict):
        raise TokenizerError(f"{path} does not hold a JSON object")
    return content


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
    for found in (config, _read_json(folder / "chat_template.json")):
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
