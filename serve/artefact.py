"""Compiled programs on disk: one folder per (device, versions, model shape, source), one file each.

A file is a SHA-256 digest followed by the pickled executable that `compile.py` hands over. The
digest covers the file's place too, so neither a changed file nor another artefact's is loaded; it
is refused and rebuilt. What the folder depends on stands in its manifest.json, and the folder is
named after that. Only the user's own folder is read, below folders where no other user could put
another in its place, since unpickling executes code.
"""

import contextlib
import fcntl
import grp
import hashlib
import json
import logging
import os
import pwd
import stat
import time
import weakref
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from octavo.serve.atomic import UNFINISHED, write_atomically
from octavo.serve.config import AUTO

log = logging.getLogger("octavo.artefact")

DIGEST_BYTES = 32
MANIFEST = "manifest.json"
SUFFIX = ".bin"

BUILD_WAIT_SECONDS = 600.0
"""How long a program that another process builds is waited for; then it is built here too."""

LOCK_POLL_SECONDS = 0.05

FOLDER_NAME = 24
"""Hexadecimal digits of a folder's name."""


class ExposedError(ValueError):
    """A folder in which another user could place code; the message names it."""


def default_root() -> Path:
    """Where artefacts live unless told otherwise: the user's cache folder."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "octavo" / "artefacts"


def root_of(artefact_dir: str) -> Path | None:
    """The folder that the setting means; None for nowhere."""
    if not artefact_dir:
        return None
    return default_root() if artefact_dir == AUTO else Path(artefact_dir).expanduser()


def source_digest(paths: Iterable[Path]) -> str:
    """Digest of .py files, and of those below folders: new code never meets old executables."""
    digest = hashlib.sha256()
    for root in paths:
        for path in [root] if root.is_file() else sorted(root.rglob("*.py")):
            digest.update(f"{root.name}/{path.name}\0".encode())
            digest.update(path.read_bytes())
    return digest.hexdigest()


def folder_name(depends_on: dict[str, Any]) -> str:
    """Name of the folder for what depends on these (plain JSON values)."""
    text = json.dumps(depends_on, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:FOLDER_NAME]


def differences(theirs: dict[str, Any], ours: dict[str, Any], prefix: str = "") -> list[str]:
    """The fields in which two manifests differ, each with both values, in ours' order."""
    found = []
    for name in [*ours, *(name for name in theirs if name not in ours)]:
        old, new = theirs.get(name), ours.get(name)
        if isinstance(old, dict) and isinstance(new, dict):
            found += differences(old, new, f"{prefix}{name}.")
        elif old != new:
            found.append(f"{prefix}{name} is {_short(old)}, here {_short(new)}")
    return found


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 40 else f"{text[:18]}…{text[-18:]}"


def read_manifest(folder: Path) -> dict[str, Any]:
    """The manifest's `about` and `depends_on`; ValueError that says what is wrong with it."""
    try:
        manifest = json.loads((folder / MANIFEST).read_bytes())
    except FileNotFoundError:
        raise ValueError(f"it has no {MANIFEST}") from None
    except (OSError, ValueError) as error:
        raise ValueError(f"its {MANIFEST} can't be read: {error}") from None
    parts = manifest if isinstance(manifest, dict) else {}
    if not all(isinstance(parts.get(name), dict) for name in ("about", "depends_on")):
        raise ValueError(f"its {MANIFEST} lacks `about` or `depends_on`: another version's")
    return parts


def check_private(folder: Path) -> None:
    """ExposedError unless this user alone (and root) decides what is in `folder`."""
    user = os.getuid()
    info = folder.lstat()
    if info.st_uid != user or info.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise ExposedError(
            f"artefact folder {folder} must belong to this user and be writable by no "
            "other: its files are executed"
        )
    for parent in folder.resolve().parents:
        info = parent.stat()
        if info.st_uid not in (0, user) or _others_may_replace(info):
            raise ExposedError(
                f"artefact folder {folder} lies in {parent}, whose entries another user could "
                "replace: its files would be executed"
            )


def _others_may_replace(info: os.stat_result) -> bool:
    """Whether someone who isn't the folder's owner may rename what is in it."""
    if info.st_mode & stat.S_ISVTX:
        return False
    if info.st_mode & stat.S_IWOTH:
        return True
    return bool(info.st_mode & stat.S_IWGRP) and not _own_group(info.st_gid)


def _own_group(group: int) -> bool:
    """Whether it is the group that many systems make for each user, of the user's own name."""
    try:
        name, found = pwd.getpwuid(os.getuid()).pw_name, grp.getgrgid(group)
    except KeyError:
        return False
    return found.gr_name == name and set(found.gr_mem) <= {name}


def bound_digest(folder: str, name: str, payload: bytes) -> bytes:
    """What a file begins with: a digest of its payload and of where it belongs."""
    return hashlib.sha256(f"{folder}/{name}\0".encode() + payload).digest()


def read_payload(path: Path) -> bytes:
    """The payload of a program's file; ValueError with the reason if it is damaged or foreign."""
    data = path.read_bytes()
    digest, payload = data[:DIGEST_BYTES], data[DIGEST_BYTES:]
    if bound_digest(path.parent.name, path.stem, payload) != digest:
        raise ValueError("its digest does not match: truncated, changed or another artefact's")
    return payload


class ArtefactStore:
    """Executables of one manifest. `load` returns None for what is absent or refused.

    While the object lives the folder is marked as in use. Raises OSError where the folder can't be
    made, ExposedError where another user could write to it.

    Args:
        depends_on: plain JSON values; another value of any is another folder.
        model: what the model is called, for people.
    """

    def __init__(self, root: Path, depends_on: dict[str, Any], *, model: str = "") -> None:
        self.folder = root.resolve() / folder_name(depends_on)
        self.refused: dict[str, str] = {}
        self._hold()
        check_private(self.folder)
        if (self.folder / MANIFEST).exists():
            self._check_manifest(depends_on)
        if not (self.folder / MANIFEST).exists():
            self._say_what_differs(depends_on)
            about = {"model": model, "made": time.strftime("%Y-%m-%d %H:%M:%S")}
            manifest = {"about": about, "depends_on": depends_on}
            write_atomically(self.folder / MANIFEST, json.dumps(manifest, indent=1).encode())

    def _hold(self) -> None:
        """Make the folder and share its lock, so that nobody removes it before this object ends."""
        while True:
            make_private(self.folder)
            handle = os.open(self.folder, os.O_RDONLY)
            with contextlib.suppress(OSError):  # a file system without locks can't say "in use"
                fcntl.flock(handle, fcntl.LOCK_SH)
            weakref.finalize(self, os.close, handle)
            if _is_at(handle, self.folder):
                return

    def _check_manifest(self, depends_on: dict[str, Any]) -> None:
        """Empty the folder if its manifest is not the one it is named after."""
        try:
            found = differences(read_manifest(self.folder)["depends_on"], depends_on)
            reason = "its manifest was changed: " + ", ".join(found) if found else ""
        except ValueError as error:
            reason = str(error)
        if reason:
            log.warning("artefact %s refused: %s; rebuilding", self.folder, reason)
            for path in [*self.folder.glob(f"*{SUFFIX}"), self.folder / MANIFEST]:
                path.unlink(missing_ok=True)

    def _say_what_differs(self, depends_on: dict[str, Any]) -> None:
        """Log why the nearest artefact of the same model is not used."""
        found = [
            (differences(other, depends_on), folder)
            for folder, other in _manifests(self.folder.parent)
            if other.get("model") == depends_on.get("model") and other.keys() == depends_on.keys()
        ]
        if found:
            fields, folder = min(found, key=lambda pair: (len(pair[0]), str(pair[1])))
            log.info("artefact %s is not for this engine: %s", folder.name, "; ".join(fields))

    def load(self, name: str) -> bytes | None:
        """Bytes saved under `name`, or None (with the reason in `refused` if they are corrupt)."""
        try:
            return read_payload(self._path(name))
        except FileNotFoundError:
            return None
        except (OSError, ValueError) as error:
            self.refuse(name, str(error))
            return None

    def has(self, name: str) -> bool:
        """Whether there is something under `name`, which `load` may still refuse."""
        return self._path(name).exists()

    def refuse(self, name: str, reason: str) -> None:
        """Note and log why a file is not used; it will be rebuilt."""
        self.refused[name] = reason
        log.warning("artefact %s refused: %s; rebuilding", self._path(name), reason)

    def save(self, name: str, payload: bytes) -> None:
        """Keep `payload`; a full disk costs the artefact, not the engine."""
        digest = bound_digest(self.folder.name, name, payload)
        try:
            write_atomically(self._path(name), digest + payload)
        except OSError as error:
            log.warning("artefact %s not saved: %s", self._path(name), error)

    @contextlib.contextmanager
    def building(self, name: str) -> Iterator[None]:
        """Of the threads and processes that build `name`, one at a time is inside.

        The others wait, and then probably find it saved. Without locks (a read-only folder, a file
        system that has none), or when one takes too long, several go in.
        """
        path = self.folder / f"{UNFINISHED}{name}.lock"
        try:
            handle = _lock(path, BUILD_WAIT_SECONDS)
        except OSError:
            handle = None
        try:
            yield
        finally:
            if handle is not None:
                path.unlink(missing_ok=True)
                os.close(handle)

    def _path(self, name: str) -> Path:
        return self.folder / f"{name}{SUFFIX}"


def _manifests(root: Path) -> Iterator[tuple[Path, dict[str, Any]]]:
    """What each artefact below `root` depends on; unreadable ones are left out."""
    for folder in sorted(root.iterdir()):
        with contextlib.suppress(ValueError):
            yield folder, read_manifest(folder)["depends_on"]


def make_private(folder: Path) -> None:
    """Make the folder, and the parents that are missing, for their owner alone."""
    for path in reversed([folder, *folder.parents]):
        if not path.exists():
            path.mkdir(mode=0o700, exist_ok=True)


def _lock(path: Path, seconds: float) -> int | None:
    """A descriptor that holds the lock file; None after `seconds`.

    OSError where it can't be made or locked. Its holder removes the file, so that one which is no
    longer in its place is no lock: a new one is made.
    """
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            time.sleep(LOCK_POLL_SECONDS)
        except OSError:
            os.close(handle)
            raise
        else:
            if _is_at(handle, path):
                return handle
        os.close(handle)
    return None


def _is_at(handle: int, path: Path) -> bool:
    """Whether an open file or folder is the one at `path`."""
    try:
        return os.path.samestat(os.fstat(handle), path.stat())
    except FileNotFoundError:
        return False
