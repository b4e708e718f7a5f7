"""The one attention operation of the engine, its implementations, and the write beside it."""

import contextlib
from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh, PartitionSpec
from jaxtyping import Array, Float

from octavo.attention.contract import AttentionMeta, AttentionSpec
from octavo.attention.front import Front
from octavo.attention.mosaic import (
    attend_mosaic,
    attend_raw_mosaic,
    takes_raw_mosaic,
    write_by_kernel,
)
from octavo.attention.reference import attend_reference
from octavo.attention.xla import attend_xla
from octavo.cache.layout import LayerCache

Implementation = Callable[
    [Array, LayerCache, AttentionMeta, AttentionSpec, Array | None],
    Array,
]

IMPLEMENTATIONS: dict[str, Implementation] = {
    "reference": attend_reference,
    "xla": attend_xla,
    "mosaic": attend_mosaic,
}
"""What `impl` may name. Each raises NotImplementedError, before any work, for what it can't do."""

BY_KERNEL = ("auto", "mosaic")
"""Names under which kernels write keys, and attend from raw projections, where they can."""

AUTO_ORDER = ("mosaic", "xla")
"""What "auto" tries, in order: the kernels first, where they take the device, type and shape."""

LOGITS, TOKENS, PAGES = 0, 1, 2
"""The dimension of heads in sinks' logits, in arrays of a step's tokens, and in pages."""

WRITE_KERNEL_FROM = 256
"""Tokens from which the kernel that writes keys and values gains: XLA's scatters of fewer are short
and turn the keys by their positions on the way."""


def attend(
    q: Float[Array, "T H D"],
    layer: LayerCache,
    meta: AttentionMeta,
    spec: AttentionSpec,
    impl: str = "auto",
    sinks: Float[Array, " H"] | None = None,
    mesh: Mesh | None = None,
) -> Float[Array, "T H D"]:
    """Causal attention of a step's queries over the paged keys of their rows.

    Query head h reads KV head h // (H // K). The step's own keys must already be in the cache
    (`write`). Padding tokens come out as zeros, whatever the cache holds.

    Args:
        q: queries, rows one after another, padded to T.
        layer: k and v of this layer, [N, p, K, D].
        meta: which tokens and pages belong to which row.
        spec: scale, window, soft cap, sinks, sharding axis.
        impl: "auto", or a name in IMPLEMENTATIONS, which then never falls back.
        sinks: sink logit of each head; given exactly when spec.sinks.
        mesh: with spec.mesh_axis, shards query and KV heads over that axis.

    Raises:
        ValueError: shapes or arguments that contradict each other.
        NotImplementedError: the named implementation, or each one under "auto", refuses; the
            message gives every reason.
    """
    _validate(q, layer, meta, spec, sinks)
    run = partial(_attend_with, impl=impl, spec=spec)
    sharded = _over_heads(run, mesh, spec, (TOKENS, PAGES, None, LOGITS), TOKENS)
    return sharded(q, layer, meta, sinks)


def write(
    layer: LayerCache,
    k: Float[Array, "T K D"],
    v: Float[Array, "T K D"],
    meta: AttentionMeta,
    spec: AttentionSpec,
    impl: str = "auto",
    mesh: Mesh | None = None,
) -> LayerCache:
    """The layer with each token's key and value in its slot; in place when the layer is donated.

    Values are cast to the cache's dtype. Padding tokens land in the padding page or nowhere.
    Arguments are those of `attend`. "auto" and "mosaic" use the kernel in prefill steps of
    WRITE_KERNEL_FROM tokens and more, where it takes the device and sizes; all else scatters, to
    the same bits.
    """
    k, v = k.astype(layer.k.dtype), v.astype(layer.v.dtype)
    by_kernel = impl in BY_KERNEL and meta.max_query_len > 1
    run = partial(_write_with, by_kernel=by_kernel and k.shape[0] >= WRITE_KERNEL_FROM)
    sharded = _over_heads(run, mesh, spec, (PAGES, TOKENS, TOKENS, None), PAGES)
    return sharded(layer, k, v, meta.slots)


def takes_raw(
    impl: str,
    qkv: Float[Array, "T K G_plus_2 D"],
    front: Front,
    layer: LayerCache,
    meta: AttentionMeta,
) -> bool:
    """Whether `attend_raw` does this step, in place of norm, rope, `write` and `attend`."""
    return impl in BY_KERNEL and takes_raw_mosaic(qkv, front, layer, meta)


def attend_raw(
    qkv: Float[Array, "T K G_plus_2 D"],
    front: Front,
    layer: LayerCache,
    meta: AttentionMeta,
    spec: AttentionSpec,
    sinks: Float[Array, " H"] | None = None,
    mesh: Mesh | None = None,
) -> tuple[Float[Array, "T H D"], LayerCache]:
    """A decode step's attention from raw projections, and the layer with their keys and values.

    What `front_reference`, `write` and `attend` do one after the other, in one kernel; in place
    when the layer is donated. qkv holds for each KV head its query heads, then its key, then its
    value. What rows without keys come out as is not defined. Never falls back: `takes_raw` says
    when it may be called.

    Raises:
        ValueError: shapes or arguments that contradict each other.
        NotImplementedError: the kernel refuses; the message says why.
    """
    num_tokens, num_kv_heads, width, head_dim = qkv.shape
    queries = jax.ShapeDtypeStruct((num_tokens, num_kv_heads * (width - 2), head_dim), qkv.dtype)
    _validate(queries, layer, meta, spec, sinks)

    def run(
        qkv: Array, front: Front, layer: LayerCache, meta: AttentionMeta, sinks: Array | None
    ) -> tuple[Array, LayerCache]:
        return attend_raw_mosaic(qkv, front, layer, meta, spec, sinks)

    places = (TOKENS, None, PAGES, None, LOGITS)
    return _over_heads(run, mesh, spec, places, (TOKENS, PAGES))(qkv, front, layer, meta, sinks)


def _over_heads(
    run: Callable,
    mesh: Mesh | None,
    spec: AttentionSpec,
    arguments: tuple[int | None, ...],
    results: int | tuple[int, ...],
) -> Callable:
    """`run` on each device's heads, where spec names an axis of a mesh; else as it is.

    arguments, results: the dimension of heads in each one's arrays; None for what has none.
    """
    if mesh is None or spec.mesh_axis is None:
        return run

    def placed(dimension: int | None) -> PartitionSpec:
        if dimension is None:
            return PartitionSpec()
        return PartitionSpec(*[None] * dimension, spec.mesh_axis)

    return jax.shard_map(
        run,
        mesh=mesh,
        in_specs=tuple(map(placed, arguments)),
        out_specs=jax.tree.map(placed, results),
        # Loop carries start as constants, which are unvarying over the axis; nothing here
        # communicates, so the check could only ask for casts.
        check_vma=False,
    )


def _write_with(
    layer: LayerCache, k: Array, v: Array, slots: Array, *, by_kernel: bool
) -> LayerCache:
    if by_kernel:
        with contextlib.suppress(NotImplementedError):
            return write_by_kernel(layer, k, v, slots)
    return LayerCache(_scatter(layer.k, k, slots), _scatter(layer.v, v, slots))


def _scatter(pages: Array, tokens: Array, slots: Array) -> Array:
    page, offset = jnp.divmod(slots, pages.shape[1])
    if slots.shape[0] > 1:
        return pages.at[page, offset].set(tokens, mode="drop")
    # A scatter of one index becomes a bounds check that selects between two whole caches.
    return lax.dynamic_update_slice(pages, tokens[None], (page[0], offset[0], 0, 0))


def _attend_with(
    q: Array,
    layer: LayerCache,
    meta: AttentionMeta,
    sinks: Array | None,
    *,
    impl: str,
    spec: AttentionSpec,
) -> Array:
    if impl != "auto":
        if impl not in IMPLEMENTATIONS:
            raise ValueError(f"impl={impl!r} is not one of auto, {', '.join(IMPLEMENTATIONS)}")
        return IMPLEMENTATIONS[impl](q, layer, meta, spec, sinks)
    refusals = []
    for name in AUTO_ORDER:
        try:
            return IMPLEMENTATIONS[name](q, layer, meta, spec, sinks)
        except NotImplementedError as refusal:
            refusals.append(f"{name}: {refusal}")
    raise NotImplementedError("no implementation accepts this: " + "; ".join(refusals))


def _validate(
    q: Array | jax.ShapeDtypeStruct,
    layer: LayerCache,
    meta: AttentionMeta,
    spec: AttentionSpec,
    sinks: Array | None,
) -> None:
    _, num_heads, head_dim = q.shape
    _, _, num_kv_heads, key_dim = layer.k.shape
    if layer.v.shape != layer.k.shape:
        raise ValueError(f"v pages {layer.v.shape} differ from k pages {layer.k.shape}")
    if head_dim != key_dim:
        raise ValueError(f"queries have head_dim {head_dim}, keys {key_dim}")
    if num_heads % num_kv_heads:
        raise ValueError(f"{num_heads} query heads can't share {num_kv_heads} KV heads evenly")
    if spec.sinks != (sinks is not None):
        raise ValueError(f"spec.sinks is {spec.sinks} but sinks is {type(sinks).__name__}")
    if sinks is not None and sinks.shape != (num_heads,):
        raise ValueError(f"sinks has shape {sinks.shape}, expected ({num_heads},)")
    if meta.max_query_len == 1 and q.shape[0] != meta.kv_lens.shape[0]:
        raise ValueError(
            f"a decode step (max_query_len 1) has one token a row, not {q.shape[0]} tokens "
            f"for {meta.kv_lens.shape[0]} rows"
        )
