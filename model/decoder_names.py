"""Hugging Face's tensor names of the shared decoder, and where each goes in its parameter tree."""

from octavo.model.config import ModelConfig
from octavo.model.names import Path, Piece


def hf_names(config: ModelConfig) -> dict[Path, tuple[Piece, ...]]:
    """The checkpoint tensors of every leaf of `abstract_params(config)`.

    Stored matrices are [out, in]; leaves are [in, out] with q, k, v and gate, up side by side.
    """
    vocab, embed = config.vocab_size, config.hidden_size
    leaves: dict[Path, tuple[Piece, ...]] = {
        ("embed",): (Piece("model.embed_tokens.weight", (vocab, embed)),)
    }
    for index in range(config.num_layers):
        prefix = f"model.layers.{index}"
        for name, pieces in {**_attention(config, prefix), **_mlp(config, prefix)}.items():
            leaves["layers", index, name] = pieces
    leaves["final_norm",] = (Piece("model.norm.weight", (embed,)),)
    if not config.tie_embeddings:
        leaves["head",] = (Piece("lm_head.weight", (vocab, embed), transpose=(1, 0)),)
    return leaves


def _attention(config: ModelConfig, prefix: str) -> dict[str, tuple[Piece, ...]]:
    embed, dim, group = config.hidden_size, config.head_dim, config.group_size
    attn = f"{prefix}.self_attn"
    leaves = {
        "attn_norm": (Piece(f"{prefix}.input_layernorm.weight", (embed,)),),
        "qkv": _heads(config, f"{attn}.{{}}_proj.weight", (embed,)),
        "out": (
            Piece(
                f"{attn}.o_proj.weight",
                (embed, config.num_heads * dim),
                reshape=(embed, config.num_kv_heads, group, dim),
                transpose=(1, 2, 3, 0),
            ),
        ),
    }
    if config.qkv_bias:
        leaves["qkv_bias"] = _heads(config, f"{attn}.{{}}_proj.bias", ())
    if config.out_bias:
        leaves["out_bias"] = (Piece(f"{attn}.o_proj.bias", (embed,)),)
    if config.qk_norm:
        leaves["q_norm"] = (Piece(f"{attn}.q_norm.weight", (dim,)),)
        leaves["k_norm"] = (Piece(f"{attn}.k_norm.weight", (dim,)),)
    if config.post_norms:
        leaves["attn_post_norm"] = (Piece(f"{prefix}.post_attention_layernorm.weight", (embed,)),)
    return leaves


def _heads(config: ModelConfig, pattern: str, inner: tuple[int, ...]) -> tuple[Piece, ...]:
    """q, k, v of one weight ([out, in], inner = (in,)) or bias ([out], inner = ())."""
    kv_heads, group, dim = config.num_kv_heads, config.group_size, config.head_dim
    stored = kv_heads // config.kv_replicas
    lead = (slice(None),) * len(inner)
    order = (2, 0, 1) if inner else (0, 1)
    q = Piece(
        pattern.format("q"),
        (config.num_heads * dim, *inner),
        (*lead, slice(None), slice(0, group)),
        reshape=(kv_heads, group, dim, *inner),
        transpose=(3, 0, 1, 2) if inner else (0, 1, 2),
    )
    k, v = (
        Piece(
            pattern.format(name),
            (stored * dim, *inner),
            (*lead, slice(None), group + offset),
            reshape=(stored, dim, *inner),
            repeat=config.kv_replicas,
            transpose=order,
        )
        for offset, name in enumerate("kv")
    )
    return (q, k, v)


def _mlp(config: ModelConfig, prefix: str) -> dict[str, tuple[Piece, ...]]:
    embed, ffn, mlp = config.hidden_size, config.intermediate_size, f"{prefix}.mlp"
    everything = slice(None)
    before = "pre_feedforward" if config.post_norms else "post_attention"
    leaves = {
        "mlp_norm": (Piece(f"{prefix}.{before}_layernorm.weight", (embed,)),),
        "gate_up": tuple(
            Piece(f"{mlp}.{name}_proj.weight", (ffn, embed), (everything, i), transpose=(1, 0))
            for i, name in enumerate(("gate", "up"))
        ),
        "down": (Piece(f"{mlp}.down_proj.weight", (embed, ffn), transpose=(1, 0)),),
    }
    if config.mlp_bias:
        leaves["gate_up_bias"] = tuple(
            Piece(f"{mlp}.{name}_proj.bias", (ffn,), (i,)) for i, name in enumerate(("gate", "up"))
        )
        leaves["down_bias"] = (Piece(f"{mlp}.down_proj.bias", (embed,)),)
    if config.post_norms:
        leaves["mlp_post_norm"] = (Piece(f"{prefix}.post_feedforward_layernorm.weight", (embed,)),)
    return leaves
