"""What an engine core leaves to its successor: which weights were loaded last.

It is written before anybody is told, so that no end of the core, a kill included, comes between an
operator's hearing that a change is done and the next core's knowing of it.
"""

import logging
from pathlib import Path

import msgspec

from octavo.serve.atomic import write_atomically
from octavo.serve.wire import EngineState

log = logging.getLogger("octavo.core")


def leave(path: Path, state: EngineState) -> None:
    """Write `state` for the next core, whole or not at all.

    What can't be written is logged: this core is well; a successor loads what `path` held before.
    """
    try:
        write_atomically(path, msgspec.msgpack.encode(state))
    except OSError as error:
        log.error("a restarted engine would not know of the present weights: %s", error)


def left(path: Path) -> EngineState:
    """What the last core left; of a first one, the state in which engines begin."""
    if not path.exists():
        return EngineState()
    return msgspec.msgpack.decode(path.read_bytes(), type=EngineState)
