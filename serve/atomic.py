"""Files that are there whole or not at all, whenever a process may end."""

import os
import tempfile
from pathlib import Path

UNFINISHED = "tmp-"
"""Prefix of files that are being written, and of the locks of their writers."""


def write_atomically(path: Path, data: bytes) -> None:
    """Put `data` in place of what `path` holds; an error leaves that as it was."""
    handle, temporary = tempfile.mkstemp(prefix=UNFINISHED, dir=path.parent)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
        os.replace(temporary, path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise
