"""A GGUF model as a `TensorSource`: Hugging Face names and layouts over llama.cpp's. No jax."""

import re
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from octavo.model.checkpoint.gguf_config import architecture_of, config_from_gguf
from octavo.model.checkpoint.gguf_file import CheckpointError, GgufFile, dequantise

_TOP = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_GEMMA_LAYER = {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_IN_CONFIG = "rope_freqs.weight"  # read by gguf_config, not a weight of the graph
_FLOATS = {
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
}


class GgufSource:
    """Tensors of a GGUF model, one file or the parts of a split one.

    Undoes what llama.cpp's converter did: the rotary order of llama's q and k rows, and the 1
    added to Gemma's norm weights.

    Attributes:
        path: the (first) file.
        metadata: that file's, tokenizer included.
    """

    def __init__(self, file: GgufFile) -> None:
        """Refuses an unsupported architecture or tensor type and a truncated file, by name."""
        self.path = file.path
        self.metadata = file.metadata
        self._family = architecture_of(file)
        for tensor in file.tensors.values():
            tensor.raw()
        self._config = config_from_gguf(file)
        self._tensors = {
            self._hf_name(name): tensor
            for name, tensor in file.tensors.items()
            if name != _IN_CONFIG
        }

    def names(self) -> list[str]:
        """Hugging Face names in file order; a tensor unknown to the family keeps its own."""
        return list(self._tensors)

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of the dequantised tensor, [out, in] for a matrix."""
        return self._tensors[name].shape

    def file_of(self, name: str) -> str:
        """Path of the file that holds the tensor."""
        return str(self._tensors[name].path)

    def config_dict(self) -> dict[str, Any]:
        """The description in config.json's spelling (see `config_from_gguf`)."""
        return dict(self._config)

    def read(self, name: str, dtype: np.dtype | None = None) -> np.ndarray:
        """The tensor; dtype is that of blocks once dequantised (float32 unless said).

        F32, F16 and BF16 come in their own type, as a view of the file where rows stand in order.
        """
        tensor = self._tensors[name]
        raw = tensor.raw()
        if heads := self._permuted_heads(tensor.name):
            raw = _unpermute(raw.reshape(tensor.shape[0], -1), heads)
        kind = tensor.block_type
        if kind.name in _FLOATS:
            values = raw.view(_FLOATS[kind.name])
        else:
            values = dequantise(raw, kind, np.dtype(dtype or np.float32))
        values = values.reshape(tensor.shape)
        if self._family == "gemma3" and name.endswith("norm.weight"):
            values = values - np.asarray(1, values.dtype)
        return values

    def _permuted_heads(self, stored: str) -> int:
        match = re.fullmatch(r"blk\.\d+\.attn_([qk])\.(?:weight|bias)", stored)
        if self._family != "llama" or not match:
            return 0
        return self._config["num_attention_heads" if match[1] == "q" else "num_key_value_heads"]

    def _hf_name(self, stored: str) -> str:
        if stored in _TOP:
            return _TOP[stored]
        match = re.fullmatch(r"blk\.(\d+)\.(\w+)\.(weight|bias)", stored)
        names = _LAYER | _GEMMA_LAYER if self._family == "gemma3" else _LAYER
        if not match or match[2] not in names:
            return stored
        return f"model.layers.{match[1]}.{names[match[2]]}.{match[3]}"


def _unpermute(rows: np.ndarray, heads: int) -> np.ndarray:
    """Rows [heads * D, ...] from pairs of neighbours (llama.cpp) to two halves of each head."""
    size = rows.shape[0] // heads
    return rows.reshape(heads, size // 2, 2, -1).swapaxes(1, 2).reshape(rows.shape)


def open_gguf(path: str | Path) -> GgufSource:
    """The model in a GGUF file, in the parts of a split one (`…-00001-of-00003.gguf`), or in a
    folder that holds just one of these.

    CheckpointError naming the file (and tensor) when it is truncated, corrupt, of an unsupported
    architecture or tensor type, or a part is missing.
    """
    first = find_gguf(Path(path))
    file = GgufFile(first)
    count = file.metadata.get("split.count", 1)
    if count == 1:
        return GgufSource(file)
    match = re.fullmatch(r"(.*)-\d{5}-of-(\d{5})\.gguf", first.name)
    if not match or int(match[2]) != count:
        raise CheckpointError(f"{first}: part of {count}, but its name does not say which")
    for part in range(2, count + 1):
        other = first.with_name(f"{match[1]}-{part:05d}-of-{count:05d}.gguf")
        if not other.exists():
            raise CheckpointError(f"{other}: missing part of a model split in {count} files")
        more = GgufFile(other).tensors
        if twice := file.tensors.keys() & more.keys():
            raise CheckpointError(f"{other}: tensor {min(twice)} is in another part too")
        file.tensors |= more
    return GgufSource(file)


def find_gguf(path: Path) -> Path:
    """The (first part of the) model: `path` itself, or the one in a folder; else an error."""
    if not path.is_dir():
        return path
    found = sorted(path.glob("*.gguf"))
    heads = [file for file in found if not re.search(r"-\d{5}-of-\d{5}\.gguf$", file.name)]
    heads += [file for file in found if re.search(r"-00001-of-\d{5}\.gguf$", file.name)]
    if len(heads) != 1:
        names = ", ".join(file.name for file in heads) or "none"
        raise CheckpointError(f"{path}: a folder with one GGUF model is wanted, found {names}")
    return heads[0]
