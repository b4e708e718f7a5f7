"""Writes small GGUF files for tests."""

import gguf
import numpy as np

LLAMA = {
    "block_count": 1,
    "context_length": 64,
    "embedding_length": 32,
    "feed_forward_length": 64,
    "attention.head_count": 4,
    "attention.head_count_kv": 2,
    "attention.layer_norm_rms_epsilon": 1e-5,
}
BYTE_PIECES = [f"<0x{byte:02X}>" for byte in range(256)]


def write_gguf(path, architecture="llama", keys=None, tensors=None, extra=None):
    """A file with `<architecture>.<key>` metadata, `extra` metadata, and tensors.

    A tensor is a float array, or (uint8 blocks [rows, bytes], ggml type).
    """
    writer = gguf.GGUFWriter(path, architecture)
    named = {f"{architecture}.{key}": value for key, value in (keys or {}).items()}
    for key, value in (named | (extra or {})).items():
        _add(writer, key, value)
    for name, value in (tensors or {}).items():
        if isinstance(value, tuple):
            writer.add_tensor(name, value[0], raw_dtype=value[1])
        else:
            writer.add_tensor(name, value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _add(writer, key, value):
    if isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    elif isinstance(value, str):
        writer.add_string(key, value)
    else:
        writer.add_array(key, value)


def llama_tensors(seed=0):
    """Float tensors of a one-layer llama with LLAMA's sizes, under ggml's names."""
    draw = np.random.default_rng(seed)
    shapes = {
        "token_embd.weight": (48, 32),
        "blk.0.attn_norm.weight": (32,),
        "blk.0.attn_q.weight": (32, 32),
        "blk.0.attn_k.weight": (16, 32),
        "blk.0.attn_v.weight": (16, 32),
        "blk.0.attn_output.weight": (32, 32),
        "blk.0.ffn_norm.weight": (32,),
        "blk.0.ffn_gate.weight": (64, 32),
        "blk.0.ffn_up.weight": (64, 32),
        "blk.0.ffn_down.weight": (32, 64),
        "output_norm.weight": (32,),
    }
    return {name: draw.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}
