"""A layer's products, each by the kernel for many rows (`mosaic_matmul`) or by XLA.

The kernel is for bfloat16 on one Hopper GPU, and takes what it was measured to be quicker at.
"""

import jax.numpy as jnp
from jax.sharding import Mesh
from jaxtyping import Array, Float

from octavo.attention.mosaic import refuse_device
from octavo.model.config import ModelConfig
from octavo.model.layers import activate, project
from octavo.model.mosaic_matmul import ROWS_OF, SIZES_OF, matmul

MANY = 1024
WINS = {
    "qkv": ((MANY, None),),
    "out": ((MANY, None),),
    "gate_up": ((256, 256), (MANY, None)),
    "down": ((256, 256), (MANY, None)),
}
"""Rows, from and to, of which the kernel beat XLA's graph: in `bench/results/matmul_h200.jsonl`, of
256, 512, 640, 768, 1,024 and 8,192 rows of the 8B shape on one H200. Between 256 and MANY a product
has too few tiles of 256 columns to share out evenly, and narrower ones take longer a column."""


def matmul_refusal(config: ModelConfig, mesh: Mesh | None = None) -> str | None:
    """Why none of this model's products can use the kernel here; None if those of WINS can."""
    heads = config.num_kv_heads * config.group_size * config.head_dim
    qkv = config.num_kv_heads * (config.group_size + 2) * config.head_dim
    sizes = (config.hidden_size, config.intermediate_size, heads, qkv)
    unlike = {
        "tensor parallelism": mesh is not None,
        f"dtype {config.dtype}": config.dtype != "bfloat16",
        f"sizes {sizes}, no multiples of {SIZES_OF}": any(x % SIZES_OF for x in sizes),
    }
    if found := [name for name, present in unlike.items() if present]:
        return f"not for {', '.join(found)}"
    try:
        refuse_device()
    except NotImplementedError as refusal:
        return str(refusal)
    return None


def by_kernel(impl: str, product: str, rows: int) -> bool:
    """Whether a product of that name of so many rows is the kernel's under "mosaic", or "xla"."""
    ranges = WINS[product] if impl == "mosaic" and rows % ROWS_OF == 0 else ()
    return any(first <= rows and (last is None or rows <= last) for first, last in ranges)


def qkv_product(
    x: Float[Array, "T E"],
    weight: Float[Array, "E K G_plus_2 D"],
    bias: Float[Array, "K G_plus_2 D"] | None,
    impl: str,
) -> Float[Array, "T K G_plus_2 D"]:
    """x @ weight + bias."""
    if bias is None and by_kernel(impl, "qkv", len(x)):
        return matmul(x, weight.reshape(len(weight), -1)).reshape(len(x), *weight.shape[1:])
    return project(x, weight, bias)


def residual_product(
    product: str,
    x: Float[Array, "T *in"],
    weight: Float[Array, "*in E"],
    bias: Float[Array, " E"] | None,
    residual: Float[Array, "T E"],
    impl: str,
) -> Float[Array, "T E"]:
    """residual + x @ weight + bias."""
    if bias is None and by_kernel(impl, product, len(x)):
        return matmul(x.reshape(len(x), -1), weight.reshape(-1, weight.shape[-1]), residual)
    return residual + project(x, weight, bias, dims=x.ndim - 1)


def gated_product(
    x: Float[Array, "T E"],
    weight: Float[Array, "E 2 F"],
    bias: Float[Array, "2 F"] | None,
    activation: str,
    impl: str,
) -> Float[Array, "T F"]:
    """activation(x @ gate) * (x @ up), biases added (Shazeer 2020, arXiv:2002.05202)."""
    if bias is None and activation == "silu" and by_kernel(impl, "gate_up", len(x)):
        return matmul(x, weight.reshape(len(weight), -1), gated=True)
    both = project(x, weight, bias)
    gate, up = both[:, 0].astype(jnp.float32), both[:, 1].astype(jnp.float32)
    return (activate(gate, activation) * up).astype(x.dtype)
