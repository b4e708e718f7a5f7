"""The artefacts of a folder: what each is, whether this installation can use it, and removal.

Reads manifests and digests only: nothing is executed here.
"""

import contextlib
import fcntl
import os
import re
import shutil
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from octavo.serve.artefact import (
    FOLDER_NAME,
    MANIFEST,
    SUFFIX,
    ExposedError,
    check_private,
    differences,
    folder_name,
    read_manifest,
    read_payload,
)
from octavo.serve.atomic import UNFINISHED

USABLE, STALE, FOREIGN, CORRUPT, EXPOSED = "usable", "stale", "foreign", "corrupt", "exposed"
MACHINE = ("device", "platform", "devices", "cpu")
"""Fields of a manifest that name the machine; the others name versions, settings and code."""

MEASURED = "temporaries"
"""A measurement that a start keeps; an artefact that holds nothing else has no programs."""

_OURS = re.compile(rf"[0-9a-f]{{{FOLDER_NAME}}}")
_UNITS = (("d", 86400), ("h", 3600), ("min", 60))


@dataclass(frozen=True)
class Artefact:
    """One folder of programs.

    Attributes:
        about: name of the model, when it was made.
        depends_on: what its programs were compiled for; {} if its manifest can't be read.
        fault: why it can be used by nobody, as (state, reason); None if that isn't so.
        programs: names of its programs.
        size: bytes of its files.
        written: when a file of it was last written, in seconds since the epoch.
    """

    folder: Path
    about: dict[str, Any] = field(default_factory=dict)
    depends_on: dict[str, Any] = field(default_factory=dict)
    fault: tuple[str, str] | None = None
    programs: tuple[str, ...] = ()
    size: int = 0
    written: float = 0.0

    def state(self, environment: dict[str, Any]) -> tuple[str, str]:
        """One of the states, and the reason; `environment` is this installation's manifest."""
        if self.fault:
            return self.fault
        theirs = {name: self.depends_on.get(name) for name in environment}
        found = differences(theirs, environment)
        if not found:
            return USABLE, ""
        foreign = any(theirs[name] != environment[name] for name in MACHINE if name in environment)
        return FOREIGN if foreign else STALE, "; ".join(found)

    def damaged(self) -> dict[str, str]:
        """Its files that fail their digest, with the reason; reads them all."""
        found = {}
        for path in sorted(self.folder.glob(f"*{SUFFIX}")):
            try:
                read_payload(path)
            except (OSError, ValueError) as error:
                found[path.stem] = str(error)
        return found


def artefacts(root: Path) -> list[Artefact]:
    """Every artefact below `root`, the newest first; other folders are left out."""
    if not root.is_dir():
        return []
    found = [_read(path) for path in root.iterdir() if _is_artefact(path)]
    return sorted(found, key=lambda one: (-one.written, one.folder.name))


def _is_artefact(path: Path) -> bool:
    """Whether it is named like one and holds nothing that one wouldn't."""
    if not _OURS.fullmatch(path.name) or path.is_symlink() or not path.is_dir():
        return False
    try:
        return all(
            file.name == MANIFEST or file.suffix == SUFFIX or file.name.startswith(UNFINISHED)
            for file in path.iterdir()
        )
    except OSError:  # another user's: told of, and left
        return True


def _read(folder: Path) -> Artefact:
    """An artefact as it lies there, whoever wrote it."""
    files: list[tuple[Path, os.stat_result]] = []
    try:
        files = [(path, path.stat()) for path in folder.iterdir()]
        check_private(folder)
        manifest = read_manifest(folder)
        fault = None
        if folder_name(manifest["depends_on"]) != folder.name:
            fault = (CORRUPT, f"its {MANIFEST} was changed: the folder's name is not its digest")
    except ExposedError as error:
        return Artefact(folder, fault=(EXPOSED, str(error)), written=folder.stat().st_mtime)
    except OSError as error:
        return Artefact(folder, fault=(CORRUPT, str(error)), written=folder.stat().st_mtime)
    except ValueError as error:
        manifest, fault = {"about": {}, "depends_on": {}}, (CORRUPT, str(error))
    stems = sorted(path.stem for path, _ in files if path.suffix == SUFFIX)
    return Artefact(
        folder,
        manifest["about"],
        manifest["depends_on"],
        fault,
        tuple(stem for stem in stems if stem != MEASURED),
        sum(info.st_size for _, info in files),
        max((info.st_mtime for _, info in files), default=folder.stat().st_mtime),
    )


def table(found: Iterable[Artefact], now: float) -> list[str]:
    """Lines that show the artefacts to a person."""
    rows = [("artefact", "model", "device", "jax", "programs", "MB", "age", "")]
    for one in found:
        about, depends_on = one.about, one.depends_on
        rows.append(
            (
                one.folder.name,
                str(about.get("model", "?")) or "?",
                str(depends_on.get("device", "?")),
                str(depends_on.get("jax", "?")),
                str(len(one.programs)),
                f"{one.size / 1e6:.1f}",
                _age(now - one.written),
                "in use" if in_use(one.folder) else "",
            )
        )
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    padded = (map(str.ljust, row, widths) for row in rows)
    return ["  ".join(row).rstrip() for row in padded]


def _age(seconds: float) -> str:
    for unit, size in _UNITS:
        if seconds >= size:
            return f"{seconds / size:.0f} {unit}"
    return f"{max(seconds, 0):.0f} s"


@contextlib.contextmanager
def _alone(folder: Path) -> Iterator[bool]:
    """Whether no process uses the folder; none begins to before the block ends."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:  # held by an engine, or on a file system that can't tell
        yield False
    else:
        yield True
    finally:
        os.close(handle)


def in_use(folder: Path) -> bool:
    """Whether an engine uses the folder, or that can't be known."""
    try:
        with _alone(folder) as alone:
            return not alone
    except OSError:
        return False


@dataclass(frozen=True)
class Pruned:
    """What `prune` did with one artefact; `kept` says why it is still there, if it is."""

    artefact: Artefact
    reason: str
    kept: str = ""


def prune(root: Path, environment: dict[str, Any], keep: int | None = None) -> Iterator[Pruned]:
    """Remove what this installation can't use and, with `keep`, all but the `keep` newest.

    One in use stays. Measurements without programs don't count among the newest and stay.
    """
    usable = 0
    for one in artefacts(root):
        state, reason = one.state(environment)
        if state == USABLE:
            usable += bool(one.programs)
            if keep is None or not one.programs or usable <= keep:
                continue
            state, reason = "old", f"{keep} newer ones are kept"
        yield Pruned(one, f"{state}: {reason}", _remove(one.folder))


def _remove(folder: Path) -> str:
    """Remove a folder; why not, if it can't be."""
    try:
        with _alone(folder) as alone:
            if not alone:
                return "in use"
            shutil.rmtree(folder)
    except OSError as error:
        return str(error)
    return ""


def verify(found: Iterable[Artefact], environment: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """State and reason of each artefact in turn, with the digest of every file checked."""
    for one in found:
        state, reason = one.state(environment)
        damaged = {} if state in (CORRUPT, EXPOSED) else one.damaged()
        if damaged:
            state, reason = CORRUPT, "; ".join(f"{n}: {why}" for n, why in damaged.items())
        yield state, reason
