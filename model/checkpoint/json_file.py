"""JSON objects in the files of a model."""

import json
from pathlib import Path
from typing import Any

from octavo.model.checkpoint.source import CheckpointError


def read_json(path: Path, refused: type[Exception] = CheckpointError) -> dict[str, Any]:
    """The JSON object in a file; `refused`, naming the file, for anything else or no file."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError):
        raise refused(f"{path} does not exist") from None
    except (OSError, ValueError, RecursionError) as error:
        raise refused(f"{path} is not readable JSON: {error}") from error
    if not isinstance(content, dict):
        raise refused(f"{path} holds a {type(content).__name__}, not a JSON object")
    return content


def read_json_if_there(path: Path, refused: type[Exception] = CheckpointError) -> dict[str, Any]:
    """As `read_json`; {} where there is no such file."""
    return read_json(path, refused) if path.is_file() else {}
