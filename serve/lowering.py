"""How a lowered program crosses from one process to another, and the process that lowers.

It crosses as `jax.export` serialises it, without its trees, which the engine has itself. There it
becomes the body of a function with the same arguments, donated ones too, whose own lowering takes
milliseconds.
"""

import pickle
import sys
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

import jax
import jax.numpy as jnp
from jax import export
from jax.sharding import AbstractDevice, AbstractMesh, use_abstract_mesh

from octavo.cache.layout import CacheLayout
from octavo.serve import devices
from octavo.serve.child import end_with_parent
from octavo.serve.compile import Lowerable, ProgramKey
from octavo.serve.programs import ProgramBuilder, ProgramSettings
from octavo.serve.step import Graph

STABLE_CALLS = ("mosaic_gpu_v2", "mosaic_gpu", "__gpu$xla.gpu.triton", "cu_threefry2x32_ffi")
"""What programs call beyond StableHLO. jax would not keep such calls for other versions of itself;
both ends are one here."""


@dataclass(frozen=True)
class LoweringSpec:
    """What a process needs to lower an engine's programs.

    Attributes:
        graph, layout, settings: what the engine's ProgramBuilder is made of.
        platform: "cpu" or "gpu", what the programs are for.
        kind, num_cores: of a GPU.
        jax_values: `devices.jax_values` of the engine's process.
    """

    graph: Graph
    layout: CacheLayout
    settings: ProgramSettings
    platform: str
    kind: str
    num_cores: int | None
    jax_values: dict[str, Any]

    @classmethod
    def of(cls, builder: ProgramBuilder) -> "LoweringSpec":
        """For the programs of `builder` on this process's first device."""
        device = jax.devices()[0]
        return cls(
            builder.graph,
            builder.layout,
            builder.settings,
            device.platform,
            device.device_kind,
            getattr(device, "core_count", None),
            devices.jax_values(),
        )

    def device(self) -> AbstractContextManager[Any]:
        """Within it kernels are made for the spec's GPU."""
        if self.platform != "gpu":
            return nullcontext()
        device = AbstractDevice(
            device_kind=self.kind, num_cores=self.num_cores, platform=self.platform
        )
        return use_abstract_mesh(AbstractMesh((), (), abstract_device=device))


def carry(lowerable: Lowerable, spec: LoweringSpec) -> bytes:
    """A program lowered for the spec's device, which need not be there."""
    leaves, tree = jax.tree.flatten(lowerable.args)
    result: Any = None

    def flat(*leaves: jax.Array) -> list[jax.Array]:
        nonlocal result
        found, structure = jax.tree.flatten(lowerable.function(*tree.unflatten(leaves)))
        result = structure.unflatten(range(len(found)))
        return found

    platform = "cuda" if spec.platform == "gpu" else spec.platform
    checks = [export.DisabledSafetyCheck.custom_call(name) for name in STABLE_CALLS]
    with spec.device():
        make = export.export(jax.jit(flat), platforms=[platform], disabled_checks=checks)
        exported = make(*leaves)
    return pickle.dumps((bytes(exported.serialize()), result))


def restore(
    payload: bytes, lowerable: Lowerable, platforms: tuple[str, ...] | None = None
) -> jax.stages.Lowered:
    """What `lowerable.lower()` would give, made of what `carry` gave for it.

    `platforms` are those that `carry` lowered for, where they are not those of this process.
    """
    blob, result = pickle.loads(payload)
    exported = export.deserialize(bytearray(blob))
    used = set(exported.module_kept_var_idx)

    def carried(*args: Any) -> Any:
        leaves = enumerate(jax.tree.leaves(args))
        # What the program doesn't use shall not become an argument of the executable.
        found = exported.call(*(x if i in used else jnp.zeros(x.shape, x.dtype) for i, x in leaves))
        return jax.tree.map(lambda index: found[index], result)

    traced = jax.jit(carried, **lowerable.options).trace(*lowerable.args)
    return traced.lower(lowering_platforms=platforms)


def serve(connection: Connection) -> None:
    """A helper: a spec, then keys, each answered by (what `carry` gives, "") or (b"", why not)."""
    spec: LoweringSpec = pickle.loads(connection.recv_bytes())
    for name, value in spec.jax_values.items():
        if getattr(jax.config, name, None) != value:
            jax.config.update(name, value)
    # Kernels as this version of jax makes them, not as older ones could read them.
    jax.config.update("jax_export_ignore_forward_compatibility", True)
    builder = ProgramBuilder(spec.graph, spec.layout, spec.settings)
    connection.send_bytes(b"ready")
    while True:
        key: ProgramKey = pickle.loads(connection.recv_bytes())
        try:
            answer = (carry(builder.build(key), spec), "")
        except Exception as error:
            answer = (b"", f"{type(error).__name__}: {error}"[:500])
        connection.send_bytes(pickle.dumps(answer))


if __name__ == "__main__":
    end_with_parent()
    try:
        serve(Connection(int(sys.argv[1])))
    except (EOFError, OSError):  # the engine needs no more
        sys.exit(0)
