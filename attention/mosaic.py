"""The Mosaic-GPU kernels as one implementation: refusals of the device, choice of the kernel."""

import jax
from jaxtyping import Array, Float, Int32

from octavo.attention.contract import AttentionMeta, AttentionSpec
from octavo.attention.front import Front
from octavo.attention.mosaic_decode import decode_mosaic, decode_refusal
from octavo.attention.mosaic_prefill import prefill_mosaic
from octavo.attention.mosaic_raw import decode_raw_mosaic, refuse_raw
from octavo.attention.mosaic_write import write_mosaic
from octavo.cache.layout import LayerCache

HOPPER = "9.0"
HOPPER_KINDS = ("H100", "H200", "GH200")


def attend_mosaic(
    q: Float[Array, "T H D"],
    layer: LayerCache,
    meta: AttentionMeta,
    spec: AttentionSpec,
    sinks: Float[Array, " H"] | None = None,
) -> Float[Array, "T H D"]:
    """`attend` by the kernels written for Hopper GPUs.

    Raises:
        NotImplementedError: no such GPU, or a type or size that `refuse_inputs` names.
    """
    refuse_device()
    if decode_refusal(q, layer, meta) is None:
        return decode_mosaic(q, layer, meta, spec, sinks)
    return prefill_mosaic(q, layer, meta, spec, sinks)


def attend_raw_mosaic(
    qkv: Float[Array, "T K G_plus_2 D"],
    front: Front,
    layer: LayerCache,
    meta: AttentionMeta,
    spec: AttentionSpec,
    sinks: Float[Array, " H"] | None = None,
) -> tuple[Float[Array, "T H D"], LayerCache]:
    """`attend_raw` by the kernel written for Hopper GPUs.

    Raises:
        NotImplementedError: no such GPU, or what `decode_raw_mosaic` refuses.
    """
    refuse_device()
    return decode_raw_mosaic(qkv, front, layer, meta, spec, sinks)


def takes_raw_mosaic(
    qkv: Float[Array, "T K G_plus_2 D"], front: Front, layer: LayerCache, meta: AttentionMeta
) -> bool:
    """Whether `attend_raw_mosaic` does not refuse these."""
    try:
        refuse_device()
        refuse_raw(qkv, front, layer, meta)
    except NotImplementedError:
        return False
    return True


def write_by_kernel(
    layer: LayerCache, k: Float[Array, "T K D"], v: Float[Array, "T K D"], slots: Int32[Array, " T"]
) -> LayerCache:
    """`write` by the kernel for Hopper GPUs; k and v in the pages' type.

    Raises:
        NotImplementedError: no such GPU, or a size that `write_refusal` names.
    """
    refuse_device()
    return write_mosaic(layer, k, v, slots)


def refuse_device() -> None:
    """NotImplementedError unless programs are made for a Hopper GPU."""
    abstract = jax.sharding.get_abstract_mesh().abstract_device
    if abstract is not None:
        if not any(kind in abstract.device_kind for kind in HOPPER_KINDS):
            raise NotImplementedError(f"needs a Hopper GPU; lowering for {abstract.device_kind}")
        return
    device = jax.devices()[0]
    capability = getattr(device, "compute_capability", None)
    if device.platform != "gpu" or capability != HOPPER:
        raise NotImplementedError(f"needs a Hopper GPU; running on {device.device_kind}")
