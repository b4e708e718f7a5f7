"""What stands beside the weights: config, tokenizer and generation files, carried from one
checkpoint to another. No jax."""

import json
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

from octavo.model.checkpoint.gguf import find_gguf, open_gguf
from octavo.model.checkpoint.gguf_file import GgufFile
from octavo.model.checkpoint.json_file import read_json
from octavo.model.checkpoint.source import CheckpointError

if TYPE_CHECKING:
    from octavo.model.checkpoint.source import Checkpoint

GGUF_VOCABULARY = "tokenizer.gguf"
"""A GGUF's metadata without its tensors: how a converted GGUF model keeps its tokenizer."""

COMPANIONS = (
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "chat_template.json",
    "tokenizer.model",
    "vocab.json",
    "merges.txt",
    GGUF_VOCABULARY,
)


def hf_config(checkpoint: "Checkpoint") -> dict[str, Any]:
    """The model's config.json, from the files it was read from, with its present dtype."""
    path = checkpoint.path
    if (path / "config.json").is_file():
        described = read_json(path / "config.json")
    elif path.suffix == ".gguf" or path.is_dir():
        described = open_gguf(path).config_dict()
    else:
        raise CheckpointError(f"{path} holds no description of the model to write")
    dtypes = [key for key in ("dtype", "torch_dtype") if key in described] or ["torch_dtype"]
    return described | dict.fromkeys(dtypes, checkpoint.config.dtype)


def copy_companions(source: Path, target: Path) -> None:
    """Copies tokenizer, chat template and generation files into the folder `target`."""
    if source.is_file() or not (source / "config.json").is_file():
        (target / GGUF_VOCABULARY).write_bytes(GgufFile(find_gguf(source)).vocabulary())
        return
    for name in COMPANIONS:
        if (source / name).is_file():
            shutil.copyfile(source / name, target / name)
    extra = source / "additional_chat_templates"
    if extra.is_dir():
        shutil.copytree(extra, target / extra.name)


def write_json(path: Path, content: dict[str, Any]) -> None:
    """One JSON object a file, readable."""
    text = json.dumps(content, ensure_ascii=False, indent=2)
    path.write_text(text + "\n", encoding="utf-8")
