"""`load_model`: the model as data."""

from pathlib import Path
from typing import Any

from octavo.model.checkpoint.load import load_checkpoint
from octavo.model.checkpoint.resolve import resolve_model
from octavo.model.config import ModelConfig


def load_model(model: str | Path, *, dtype: str = "auto") -> tuple[ModelConfig, Any]:
    """Config and parameter tree of a model, for `octavo.forward` and `octavo.make_generate`.

    `model` is a path, a Hugging Face id or a packaged demo model; see `load_checkpoint` for what
    is refused. Tensor parallelism: use `load_checkpoint` with a mesh.
    """
    checkpoint = load_checkpoint(resolve_model(str(model)), dtype=dtype)
    return checkpoint.config, checkpoint.params
