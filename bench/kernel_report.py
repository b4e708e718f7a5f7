"""What the compiler makes of a Mosaic GPU kernel: registers, spills and the loops' instructions.

    python bench/kernel_report.py --out=DIR                  # paged prefill, decode, raw decode
    python bench/kernel_report.py --out=DIR --only=prefill --head_dim=64

Needs no GPU and no driver: XLA compiles ahead of time for the H200 described below. It needs the
CUDA packages of jax (the extra `cuda13`) and, for the loops, `nvidia-cuda-nvdisasm`. DIR gets each
kernel's PTX, ptxas' report, the machine code with its control columns, and the MLIR.

The cycles of a loop are those in which a warp issues or must wait by the code's own stall counts:
waits for memory, barriers and products come on top. Registers "used" are those of the launch; a
role's own number is that of its setmaxnreg.
"""

import os
import re
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from absl import app, flags
from jax.experimental import topologies
from jax.sharding import AbstractDevice, AbstractMesh, SingleDeviceSharding, use_abstract_mesh

from octavo.attention.contract import AttentionMeta, AttentionSpec
from octavo.attention.front import Front
from octavo.attention.mosaic_decode import decode_mosaic
from octavo.attention.mosaic_prefill import prefill_mosaic
from octavo.attention.mosaic_raw import decode_raw_mosaic
from octavo.cache.layout import LayerCache

_OUT = flags.DEFINE_string("out", None, "Folder for what the compiler writes.", required=True)
_ONLY = flags.DEFINE_list("only", ["prefill", "decode"], "Kernels to report.")
_HEAD_DIM = flags.DEFINE_integer("head_dim", 128, "Dimension of a head.")
_WINDOW = flags.DEFINE_integer("window", None, "Sliding window in tokens.")

H200 = """
gpu_device_info {
  threads_per_block_limit: 1024 threads_per_warp: 32 threads_per_core_limit: 2048
  shared_memory_per_block: 49152 shared_memory_per_block_optin: 232448
  shared_memory_per_core: 233472 core_count: 132 fpus_per_core: 128
  block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
  thread_dim_limit_x: 1024 thread_dim_limit_y: 1024 thread_dim_limit_z: 64
  registers_per_core_limit: 65536 registers_per_block_limit: 65536
  memory_bandwidth: 4800000000000 l2_cache_size: 52428800 clock_rate_ghz: 1.98
  device_memory_size: 151397597184 device_address_bits: 64 ecc_enabled: true
  cuda_compute_capability { major: 9 feature_extension: ACCELERATED_FEATURES }
  device_vendor: "NVIDIA Corporation" name: "NVIDIA H200"
  driver_version: "13.0.0" runtime_version: "13.0.0" compile_time_toolkit_version: "13.0.0"
}
platform_name: "CUDA"
dnn_version_info { major: 9 minor: 10 }
device_description_str: "NVIDIA H200"
"""
"""XLA's GpuTargetConfigProto as text: limits of the chip."""

_INSTRUCTION = re.compile(
    r":(?P<stall>\d\d)\s+/\*(?P<address>[0-9a-f]{4,6})\*/\s+(@!?U?P\w+\s+)?(?P<name>[A-Z]\S*)(?P<rest>.*)"
)


def programs() -> dict[str, tuple[Callable, tuple]]:
    """Functions and their abstract arguments: 32/8 heads, pages of 64 tokens, bfloat16."""
    dim, spec = _HEAD_DIM.value, AttentionSpec(_HEAD_DIM.value**-0.5, window=_WINDOW.value)

    def case(rows: int, queries: int, kernel: Callable) -> tuple[Callable, tuple]:
        integers: Any = partial(jax.ShapeDtypeStruct, dtype=jnp.int32)
        pages: Any = jax.ShapeDtypeStruct((512, 64, 8, dim), jnp.bfloat16)
        q = jax.ShapeDtypeStruct((rows * queries, 32, dim), jnp.bfloat16)
        meta = AttentionMeta(
            block_tables=integers((rows, 128)),
            kv_lens=integers((rows,)),
            query_starts=integers((rows + 1,)),
            slots=integers((rows * queries,)),
            num_rows=integers(()),
            max_query_len=queries,
        )
        return partial(kernel, spec=spec), (q, LayerCache(pages, pages), meta)

    prefill, decode = case(4, 2048, prefill_mosaic), case(64, 1, decode_mosaic)
    angles: Any = jax.ShapeDtypeStruct((64, dim // 2), jnp.float32)
    norm: Any = jax.ShapeDtypeStruct((dim,), jnp.bfloat16)
    qkv = jax.ShapeDtypeStruct((64, 8, 6, dim), jnp.bfloat16)
    raw = partial(decode_raw_mosaic, spec=spec)
    arguments = (qkv, Front(angles, angles, norm, norm), *decode[1][1:])
    return {"prefill": prefill, "decode": decode, "raw": (raw, arguments)}


def compile_for_h200(function: Callable, arguments: tuple) -> jax.stages.Compiled:
    """The program for an H200 that need not be there."""
    topology = topologies.get_topology_desc(platform="cuda", target_config=H200, topology="1x1x1")
    on_device = SingleDeviceSharding(topology.devices[0])
    arguments = jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=on_device), arguments
    )
    device = AbstractDevice(device_kind="NVIDIA H200", platform="gpu", num_cores=132)
    with use_abstract_mesh(AbstractMesh((), (), abstract_device=device)):
        traced = jax.jit(function).trace(*arguments)
    return traced.lower(lowering_platforms=("cuda",)).compile()


def loops(code: str) -> Iterator[tuple[int, int, list[Any]]]:
    """Start, end and instructions of each loop of the machine code, by their starts."""
    instructions, labels, waiting = [], {}, []
    for line in code.splitlines():
        if label := re.match(r"(\.L_x_\d+):", line.strip()):
            waiting.append(label[1])
        elif found := _INSTRUCTION.search(line):
            address = int(found["address"], 16)
            labels |= dict.fromkeys(waiting, address)
            waiting = []
            instructions.append((address, found))
    # Behind the last EXIT lie only the repeated waits for barriers.
    last = max((at for at, found in instructions if found["name"] == "EXIT"), default=0)
    ends: dict[int, int] = {}
    for address, found in instructions:
        target = re.search(r"\.L_x_\d+", found["rest"])
        start = labels.get(target[0]) if target and found["name"] == "BRA" else None
        if start is not None and start < address <= last:
            ends[start] = max(ends.get(start, 0), address)
    for start, end in sorted(ends.items()):
        yield start, end, [found for at, found in instructions if start <= at <= end]


def report(folder: Path) -> Iterator[str]:
    """Lines about every kernel that the compiler wrote into the folder."""
    for path in sorted(folder.glob("*.ptxas")):
        yield path.stem
        for line in path.read_text().splitlines():
            if re.search(r"warning|Used \d+ registers|spill|C75\d\d", line):
                yield "  " + line.removeprefix("ptxas ").strip()
        for code in folder.glob(f"{path.stem}.sass*"):
            for start, end, body in loops(code.read_text()):
                kinds = Counter(re.split(r"[.]", found["name"])[0] for found in body)
                cycles = sum(max(1, int(found["stall"])) for found in body)
                most = ", ".join(f"{name} {count}" for name, count in kinds.most_common(14))
                size = f"{len(body)} instructions, {cycles} cycles"
                yield f"  loop {start:#x}..{end:#x}: {size}: {most}"


def main(_: list[str]) -> None:
    """Compiles the kernels asked for, each into a folder of its own, and prints its report."""
    os.environ.setdefault("JAX_SKIP_CUDA_CONSTRAINTS_CHECK", "1")  # the check asks the driver
    os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + " --xla_gpu_autotune_level=0"
    known = programs()
    for name in _ONLY.value:
        if name not in known:
            raise app.UsageError(f"--only={name} is none of {', '.join(known)}")
        folder = Path(_OUT.value).absolute() / name
        folder.mkdir(parents=True, exist_ok=True)
        os.environ["MOSAIC_GPU_DUMP_TO"] = str(folder)
        compile_for_h200(*known[name])
        print("\n".join(report(folder)))


if __name__ == "__main__":
    app.run(main)
