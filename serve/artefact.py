"""Compiled programs on disk: one folder per (device, versions, model shape, source), one file each.

A file is a SHA-256 digest followed by the pickled executable that `compile.py` hands over. A file
that does not match its digest is refused and rebuilt. The folder is the user's own cache: it is
created for the owner alone, and one that others could write is not read, since unpickling executes
code.
"""

import hashlib
import json
import logging
import os
import stat
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

log = logging.getLogger("octavo.artefact")

DIGEST_BYTES = 32


def default_root() -> Path:
    """Where artefacts live unless told otherwise: the user's cache folder."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "octavo" / "artefacts"


def source_digest(paths: Iterable[Path]) -> str:
    """Digest of .py files, and of those below folders: new code never meets old executables."""
    digest = hashlib.sha256()
    for root in paths:
        for path in [root] if root.is_file() else sorted(root.rglob("*.py")):
            digest.update(f"{root.name}/{path.name}\0".encode())
            digest.update(path.read_bytes())
    return digest.hexdigest()


class ArtefactStore:
    """Executables of one manifest. `load` returns None for what is absent or refused.

    Raises OSError where the folder can't be made, ValueError where others could write to it.
    """

    def __init__(self, root: Path, manifest: dict[str, Any]) -> None:
        text = json.dumps(manifest, sort_keys=True, indent=1)
        self.folder = root / hashlib.sha256(text.encode()).hexdigest()[:24]
        self.refused: dict[str, str] = {}
        self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._check_owner()
        path = self.folder / "manifest.json"
        if not path.exists():
            _write_atomically(path, text.encode())

    def _check_owner(self) -> None:
        info = self.folder.stat()
        if info.st_uid != os.getuid() or info.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
            raise ValueError(
                f"artefact folder {self.folder} must belong to this user and be writable by no "
                "other: its files are executed"
            )

    def load(self, name: str) -> bytes | None:
        """Bytes saved under `name`, or None (with the reason in `refused` if they are corrupt)."""
        try:
            data = self._path(name).read_bytes()
        except FileNotFoundError:
            return None
        except OSError as error:
            self.refuse(name, str(error))
            return None
        digest, payload = data[:DIGEST_BYTES], data[DIGEST_BYTES:]
        if hashlib.sha256(payload).digest() != digest:
            self.refuse(name, "its digest does not match: truncated or changed")
            return None
        return payload

    def refuse(self, name: str, reason: str) -> None:
        """Note and log why a file is not used; it will be rebuilt."""
        self.refused[name] = reason
        log.warning("artefact %s refused: %s; rebuilding", self._path(name), reason)

    def save(self, name: str, payload: bytes) -> None:
        """Keep `payload`; a full disk costs the artefact, not the engine."""
        try:
            _write_atomically(self._path(name), hashlib.sha256(payload).digest() + payload)
        except OSError as error:
            log.warning("artefact %s not saved: %s", self._path(name), error)

    def _path(self, name: str) -> Path:
        return self.folder / f"{name}.bin"


def _write_atomically(path: Path, data: bytes) -> None:
    handle, temporary = tempfile.mkstemp(dir=path.parent)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
        os.replace(temporary, path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise
