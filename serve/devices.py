"""What the devices are, how much of them is ours, and the one list of XLA settings in use."""

import hashlib
import os
from importlib.metadata import version
from pathlib import Path
from typing import Any

import jax
from jax.sharding import Mesh

GPU_MEMORY_SHARE = "0.95"
"""Share of a GPU's memory that XLA's allocator may take; the rest is CUDA's own."""


XLA_FLAGS = {
    # Loops run on the device as part of a CUDA graph. By default the host reads each turn's
    # condition: a decode loop then blocks its caller to the end, and nothing overlaps it.
    "xla_gpu_enable_command_buffer": (
        "FUSION,CUBLAS,CUBLASLT,CUSTOM_CALL,CUDNN,DYNAMIC_SLICE_FUSION,WHILE,CONDITIONAL"
    ),
    "xla_gpu_graph_min_graph_size": "1",
}
"""Every XLA flag in use, and why."""


def configure_xla() -> None:
    """Settings that must be in place before jax meets its devices. A user's own settings stand."""
    os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", GPU_MEMORY_SHARE)
    flags = os.environ.get("XLA_FLAGS", "")
    ours = [f"--{name}={value}" for name, value in XLA_FLAGS.items() if name not in flags]
    os.environ["XLA_FLAGS"] = " ".join([flags, *ours]).strip()


def on_gpu() -> bool:
    """Whether jax runs on a GPU."""
    return jax.default_backend() == "gpu"


def kinds() -> list[str]:
    """Kind of every device, e.g. "NVIDIA H200"."""
    return [device.device_kind for device in jax.devices()]


def of(mesh: Mesh | None) -> list[Any]:
    """The devices that an engine's programs run on."""
    return list(mesh.devices.flat) if mesh else jax.devices()[:1]


def memory_limit() -> int:
    """Bytes of the first device that this process may use."""
    stats = jax.devices()[0].memory_stats()
    if stats and "bytes_limit" in stats:
        return stats["bytes_limit"]
    return host_memory(Path("/proc/meminfo"), Path("/sys/fs/cgroup/memory.max"))


def host_memory(meminfo: Path, container_limit: Path) -> int:
    """Bytes of host memory that are free or only cache files, within the container's limit.

    Free pages alone would shrink with every file that was read, model files first of all.
    """
    found = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if meminfo.exists():
        lines = dict(line.split(":", 1) for line in meminfo.read_text().splitlines())
        found = int(lines["MemAvailable"].split()[0]) * 1024
    limit = container_limit.read_text().strip() if container_limit.exists() else "max"
    return found if limit == "max" else min(found, int(limit))


JAX_SETTINGS = (
    "jax_enable_x64",
    "jax_default_matmul_precision",
    "jax_numpy_dtype_promotion",
    "jax_default_prng_impl",
    "jax_threefry_partitionable",
    "jax_threefry_gpu_kernel_lowering",
    "jax_use_shardy_partitioner",
    "jax_softmax_custom_jvp",
    "jax_high_dynamic_range_gumbel",
    "jax_allow_f16_reductions",
    "jax_debug_nans",
    "jax_debug_infs",
    "jax_optimization_level",
    "jax_memory_fitting_level",
    "jax_pallas_enable_debug_checks",
    "jax_pallas_poison_buffers",
)
"""jax's own settings that change what a program computes or how it is compiled."""


def jax_values() -> dict[str, Any]:
    """The values of JAX_SETTINGS; those that are unset, or that this jax lacks, are left out."""
    values = {name: getattr(jax.config, name, None) for name in JAX_SETTINGS}
    return {name: value for name, value in values.items() if value is not None}


def jax_settings() -> dict[str, str]:
    """`jax_values` as text."""
    return {name: str(value) for name, value in jax_values().items()}


def fingerprint() -> dict[str, Any]:
    """What an executable depends on beside its program, as plain JSON values.

    Devices, compiler versions, XLA flags and jax's settings.
    """
    device = jax.devices()[0]
    return {
        "device": device.device_kind,
        "platform": device.platform,
        "platform_version": device.client.platform_version,
        "devices": str(jax.device_count()),
        "jax": jax.__version__,
        "jaxlib": version("jaxlib"),
        "jax_settings": jax_settings(),
        "xla_flags": os.environ.get("XLA_FLAGS", ""),
        "cpu": "" if on_gpu() else _cpu_features(),
    }


def _cpu_features() -> str:
    """Digest of the CPU's instruction set: machine code made for one may not run on another."""
    path = Path("/proc/cpuinfo")
    lines = path.read_text().splitlines() if path.exists() else []
    flags = next((line for line in lines if line.startswith(("flags", "Features"))), "")
    return hashlib.sha256(flags.encode()).hexdigest()[:16]
