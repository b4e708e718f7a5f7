"""The seam between checkpoint formats and the loader: where tensors come from, what comes out."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

if TYPE_CHECKING:  # ModelConfig brings jax, which readers of metadata alone must not
    from octavo.model.config import ModelConfig


class CheckpointError(ValueError):
    """A refused checkpoint; the message names the file and, where it applies, the tensor."""


class TensorSource(Protocol):
    """Named tensors of one checkpoint, read lazily. Names and layouts are Hugging Face's.

    A matrix is [out, in] and q/k rows are in Hugging Face's rotary order (halves, not pairs),
    whatever the file holds. `read` returns a float32, float16 or bfloat16 (ml_dtypes) array of
    exactly `shape(name)`, memory-mapped where the stored form allows it; it raises
    CheckpointError where the file is damaged.
    """

    def names(self) -> list[str]:
        """Every tensor of the checkpoint, in file order."""
        ...

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of the array that `read` returns."""
        ...

    def read(self, name: str) -> np.ndarray:
        """The tensor, dequantised; may be a read-only view of the file."""
        ...

    def file_of(self, name: str) -> str:
        """Path of the file that holds the tensor, for error messages."""
        ...

    def config_dict(self) -> dict[str, Any]:
        """The model's description in Hugging Face's config.json spelling."""
        ...


@dataclass(frozen=True)
class Checkpoint:
    """A model, ready to run.

    Attributes:
        config: what the graph needs; KV heads counted after replication.
        params: tree of device arrays as `abstract_params(config)` describes it.
        eos_ids: ids that end a text, from config, generation config and tokenizer.
        generation: default sampling fields of generation_config.json (empty if none).
        path: file or folder it was read from.
        format: "hf", "gguf", "orbax" or "dummy".
    """

    config: "ModelConfig"
    params: Any
    eos_ids: tuple[int, ...]
    generation: dict[str, Any] = field(default_factory=dict)
    path: Path = Path()
    format: str = "hf"
