"""`octavo build`: an engine's programs compiled before its first start, and care of artefacts."""

import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from octavo.serve.artefact import SUFFIX, make_private, read_payload, root_of
from octavo.serve.config import EngineConfig
from octavo.serve.inventory import (
    CORRUPT,
    EXPOSED,
    USABLE,
    Artefact,
    artefacts,
    prune,
    table,
    verify,
)
from octavo.serve.same_kernels import differences

NOWHERE = "artefact_dir is empty: there is no folder to keep programs in"


def build(config: EngineConfig) -> str:
    """Compile or load every program that serving with `config` can need; what came of it.

    Raises ValueError where nothing can be kept, and whatever a start raises.
    """
    root = _root(config)
    try:
        make_private(root)
        with tempfile.TemporaryFile(dir=root):
            pass
    except OSError as error:
        raise ValueError(f"nothing can be kept in artefact_dir {root}: {error.strerror}") from None
    from octavo.serve.launch import build_engine

    engine = build_engine(replace(config, warmup="all", progress=True))
    store, timeline = engine.runner.programs.store, engine.timeline
    if store is None or timeline is None:
        raise ValueError("nothing is kept: the warning above says why")
    size = sum(path.stat().st_size for path in store.folder.glob(f"*{SUFFIX}"))
    return (
        f"{store.folder}: {timeline.compiled} programs compiled, {timeline.loaded} loaded, "
        f"{size / 1e6:.1f} MB\n{timeline}"
    )


def show(config: EngineConfig) -> list[str]:
    """Lines of `octavo build --list`."""
    root = _root(config)
    found = artefacts(root)
    return table(found, int(time.time())) if found else [f"no artefacts in {root}"]


def check(config: EngineConfig) -> tuple[list[str], bool]:
    """Lines of `octavo build --verify`, and whether all is well.

    Every file's digest is checked and every program of a usable artefact is loaded. One that is
    stale or foreign is told of, and no fault.
    """
    found = artefacts(_root(config))
    lines, well = [], True
    for one, (state, reason) in zip(found, verify(found, _environment()), strict=True):
        if state == USABLE:
            failures = _load_all(one)
            state, reason = (CORRUPT, "; ".join(failures)) if failures else (state, _counted(one))
        well &= state not in (CORRUPT, EXPOSED)
        lines.append(f"{one.folder.name}  {state}: {reason}")
    return lines, well


def compare(config: EngineConfig, other: str) -> tuple[list[str], bool]:
    """Lines of `octavo build --same_as`, and whether both folders hold the same kernels.

    Artefacts that this installation can use are paired by name: built for the same model, settings
    and machine. ValueError if none can be.
    """
    if not Path(other).is_dir():
        raise ValueError(f"same_as: folder {other} does not exist")
    environment = _environment()
    here, there = (
        {one.folder.name: one for one in artefacts(root) if _usable(one, environment)}
        for root in (_root(config), Path(other))
    )
    shared = sorted(here.keys() & there.keys())
    if not shared:
        raise ValueError(f"{_root(config)} and {other} have no artefact in common")
    lines, same = [], True
    for name in shared:
        found = differences(_programs(here[name]), _programs(there[name]))
        same &= not found
        count = len(here[name].programs)
        lines.append(f"{name}  {len(found)} of {count} programs differ")
        lines += [f"  {program}: {reason}" for program, reason in found.items()]
    return lines, same


def remove(config: EngineConfig, keep: int | None) -> list[str]:
    """Lines of `octavo build --prune`: what was removed, what could not be, and the bytes."""
    lines, freed = [], 0
    for done in prune(_root(config), _environment(), keep):
        one = done.artefact
        if done.kept:
            lines.append(f"kept {one.folder.name} ({done.kept})  {done.reason}")
        else:
            freed += one.size
            lines.append(f"removed {one.folder.name}, {one.size} bytes  {done.reason}")
    return [*lines, f"{freed} bytes freed"]


def _root(config: EngineConfig) -> Path:
    root = root_of(config.artefact_dir)
    if root is None:
        raise ValueError(NOWHERE)
    return root


def _environment() -> dict[str, Any]:
    from octavo.serve import devices, launch

    devices.configure_xla()
    return launch.environment()


def _counted(one: Artefact) -> str:
    return f"{len(one.programs)} programs load" if one.programs else "a measurement"


def _load_all(one: Artefact) -> list[str]:
    """Why programs of a usable artefact don't load; empty if all do."""
    failures = []
    for name in one.programs:
        try:
            _load(one, name)
        except Exception as error:  # whatever a damaged executable raises
            failures.append(f"{name}: {type(error).__name__}: {error}")
    return failures


def _usable(one: Artefact, environment: dict[str, Any]) -> bool:
    return bool(one.programs) and one.state(environment)[0] == USABLE


def _programs(one: Artefact) -> dict[str, Any]:
    """Every program of a usable artefact by name."""
    return {name: _load(one, name) for name in one.programs}


def _load(one: Artefact, name: str) -> Any:
    from octavo.serve.compile import read_program

    payload = read_payload(one.folder / f"{name}{SUFFIX}")
    return read_program(payload, _devices(str(one.depends_on.get("mesh", ""))))


def _devices(mesh: str) -> Sequence[Any]:
    """The devices that programs of a mesh run on."""
    from octavo.model.sharding import make_mesh
    from octavo.serve import devices

    parallel = EngineConfig(mesh=mesh).tensor_parallel
    return devices.of(make_mesh(parallel) if mesh else None)
