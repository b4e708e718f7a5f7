"""A whole decode step's attention from raw projections, in one kernel for Hopper GPUs."""

from functools import partial

from jaxtyping import Array, Float

from octavo.attention.contract import AttentionMeta, AttentionSpec
from octavo.attention.decode_tuning import DecodeTuning
from octavo.attention.front import Front
from octavo.attention.mosaic_decode import (
    fitting,
    refuse_inputs,
    run_traced,
    tile_shape,
    traced_kernel,
)
from octavo.attention.mosaic_front import front_refusal, front_spec
from octavo.attention.splits import combine, decode_work
from octavo.cache.layout import LayerCache


def decode_raw_mosaic(
    qkv: Float[Array, "T K G_plus_2 D"],
    front: Front,
    layer: LayerCache,
    meta: AttentionMeta,
    spec: AttentionSpec,
    sinks: Float[Array, " H"] | None = None,
    tuning: DecodeTuning | None = None,
) -> tuple[Float[Array, "T H D"], LayerCache]:
    """`attend_raw` for a decode step, on a Hopper GPU: attention, and the layer written in place.

    Block tables of so few pages that each row is one chunk need nothing combined.

    Refuses what `refuse_raw` does.
    """
    refuse_raw(qkv, front, layer, meta)
    num_rows, num_kv_heads, width, head_dim = qkv.shape
    group = width - 2
    shape = tile_shape(layer, meta, group)
    tuning = fitting(tuning, head_dim)
    work = decode_work(meta, shape.page_size, spec.window, tuning.chunk)
    arguments = [work.items, work.live, meta.block_tables, qkv, layer.k, layer.v]
    arguments += [front.cos, front.sin]
    if front.q_norm is not None and front.k_norm is not None:
        arguments += [front.q_norm, front.k_norm]
    traced = partial(traced_kernel, front=front_spec(front))
    parts, lse, k, v = run_traced(traced, tuple(arguments), spec, tuning, shape)
    if parts.shape[1] == 1 and sinks is None:
        # The one chunk is the result as it is; a mask of padding rows would be a launch of its own.
        out = parts[..., : shape.used_rows, :]
    else:
        out = combine(parts, lse, work, sinks, shape).astype(qkv.dtype)
    return out.reshape(num_rows, num_kv_heads * group, head_dim), LayerCache(k, v)


def refuse_raw(
    qkv: Float[Array, "T K G_plus_2 D"], front: Front, layer: LayerCache, meta: AttentionMeta
) -> None:
    """Raises NotImplementedError as `refuse_inputs` and `front_refusal` say, and for more queries.

    Of a row the kernel takes one.
    """
    refuse_inputs(qkv.reshape(qkv.shape[0], -1, qkv.shape[3]), layer)
    if meta.max_query_len > 1:
        raise NotImplementedError(f"{meta.max_query_len} queries a row; takes raw ones singly")
    if reason := front_refusal(qkv, front):
        raise NotImplementedError(reason)
