"""Everything between two attentions of a decode step, by one kernel or by the plain graph.

The kernel (`mosaic_block`) is for plain layers (no biases but qkv's, no norms after attention or
MLP) in bfloat16 on one Hopper GPU, and for steps of up to MAX_ROWS rows.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jaxtyping import Array, Float, Int32

from octavo.attention.mosaic import refuse_device
from octavo.model.block_kernel import BlockInputs, BlockOutputs, vector_size
from octavo.model.block_plan import TILE, BlockPlan, BlockShape, BlockTuning, plan_block
from octavo.model.config import ModelConfig
from octavo.model.layer import Params, mlp, out_projection, qkv_heads, qkv_projection
from octavo.model.layers import rms_norm
from octavo.model.mosaic_block import run_block

MAX_ROWS = 128
"""Rows of a step that the kernel takes; larger steps are the plain graph's."""

ROWS = 8
"""What the rows of one row tile are a multiple of; two are always full."""

TUNINGS = {1: BlockTuning(), 2: BlockTuning(ring=15, activation_ring=3, row_tiles=2)}
"""By the number of row tiles. All have as many blocks, and so the same cuts."""


def unlike_plain(config: ModelConfig, mesh: Mesh | None) -> list[str]:
    """What keeps a model's layers from being the plain ones that kernels between attentions do."""
    unlike = {
        "tensor parallelism": mesh is not None,
        f"dtype {config.dtype}": config.dtype != "bfloat16",
        f"activation {config.activation}": config.activation != "silu",
        "biases of out or MLP": config.out_bias or config.mlp_bias,
        "norms after attention and MLP": config.post_norms,
        "norms with an offset": config.norm_offset != 0.0,
    }
    return [name for name, present in unlike.items() if present]


def block_refusal(config: ModelConfig, mesh: Mesh | None = None) -> str | None:
    """Why no step of this model can use the kernel here; None if those of few rows can."""
    found = unlike_plain(config, mesh)
    if not vector_size(config.hidden_size):
        found.append(f"hidden size {config.hidden_size}, no multiple of 128")
    if found:
        return f"not for {', '.join(found)}"
    try:
        refuse_device()
        plan_for(config, last=False)
    except NotImplementedError as refusal:
        return str(refusal)
    needed, there = TUNINGS[1].num_blocks, _multiprocessors()
    if there is not None and there < needed:
        return f"needs {needed} multiprocessors at once; the device has {there}"
    return None


def _multiprocessors() -> int | None:
    """Of the device; None where a program is lowered for one that is not here."""
    if jax.sharding.get_abstract_mesh().abstract_device is not None:
        return None
    return getattr(jax.devices()[0], "core_count", None)


def plan_for(config: ModelConfig, last: bool) -> BlockPlan:
    """The cuts of a model's matrices; NotImplementedError where they don't divide into tiles."""
    kv_heads, group, dim = config.num_kv_heads, config.group_size, config.head_dim
    return plan_block(
        heads=kv_heads * group * dim,
        embed=config.hidden_size,
        ffn=config.intermediate_size,
        qkv=None if last else kv_heads * (group + 2) * dim,
        num_blocks=TUNINGS[1].num_blocks,
    )


def tuning_for(rows: int) -> BlockTuning:
    """The tuning in use for a step's rows."""
    return TUNINGS[-(-rows // TILE)]


def pad_rows(x: Float[Array, "T E"]) -> Float[Array, "R E"]:
    """x with rows of zeros up to a multiple of ROWS, beyond TILE rows of TILE."""
    return jnp.pad(x, ((0, -len(x) % (ROWS if len(x) <= TILE else TILE)), (0, 0)))


def launch_block(
    weights: Params,
    following: Params | None,
    final_norm: Float[Array, " E"],
    config: ModelConfig,
    x: Float[Array, "R E"],
    mixed: Float[Array, "T K G D"],
    arrivals: Int32[Array, " barriers"],
    tuning: BlockTuning | None = None,
    plan: BlockPlan | None = None,
) -> BlockOutputs:
    """The kernel alone: see `between_attentions`, which adds up qkv's splits."""
    rows, embed = len(x), config.hidden_size
    if rows > MAX_ROWS or rows % (ROWS if rows <= TILE else TILE):
        raise NotImplementedError(
            f"{rows} rows; takes multiples of {ROWS} up to {TILE}, {MAX_ROWS}"
        )
    tuning = tuning or tuning_for(rows)
    inputs = BlockInputs(
        mixed=pad_rows(mixed.reshape(len(mixed), -1)),
        x=x,
        out=weights["out"].reshape(-1, embed),
        mlp_norm=weights["mlp_norm"],
        gate_up=weights["gate_up"].reshape(embed, -1),
        down=weights["down"],
        next_norm=final_norm if following is None else following["attn_norm"],
        qkv=None if following is None else following["qkv"].reshape(embed, -1),
    )
    plan = plan or plan_for(config, last=following is None)
    return run_block(inputs, BlockShape(rows, embed, config.norm_eps, plan), tuning, arrivals)


def between_attentions(
    weights: Params,
    following: Params | None,
    final_norm: Float[Array, " E"],
    config: ModelConfig,
    x: Float[Array, "R E"],
    mixed: Float[Array, "T K G D"],
    arrivals: Int32[Array, " barriers"],
    tuning: BlockTuning | None = None,
    plan: BlockPlan | None = None,
) -> tuple[Float[Array, "R E"], Float[Array, "T K G_plus_2 D"] | Float[Array, "T E"], Array]:
    """By the kernel: x after this layer, the following layer's qkv, and `arrivals` for that layer.

    After the last layer (`following` is None) the second result is norm(x). x has padded rows
    (`pad_rows`), mixed those of the step. `arrivals` is `no_arrivals()` for the first layer. The
    sums of qkv's splits are added here, in their order: XLA makes that part of what uses them.
    """
    tokens = len(mixed)
    done = launch_block(
        weights, following, final_norm, config, x, mixed, arrivals, tuning=tuning, plan=plan
    )
    if following is None:
        return done.x, done.normed[:tokens], done.no_arrivals
    sums = done.qkv_sums[:, :tokens]
    total = sums[0]
    for split in range(1, len(sums)):
        total = total + sums[split]
    return done.x, qkv_heads(following, total.astype(x.dtype)), done.no_arrivals


def between_reference(
    weights: Params,
    following: Params | None,
    final_norm: Float[Array, " E"],
    config: ModelConfig,
    x: Float[Array, "T E"],
    mixed: Float[Array, "T K G D"],
) -> tuple[Array, Any]:
    """`between_attentions` by the plain graph; x without padded rows."""
    x = mlp(weights, config, out_projection(weights, config, x, mixed))
    if following is None:
        return x, rms_norm(x, final_norm, config.norm_eps, config.norm_offset)
    return x, qkv_projection(following, config, x)
