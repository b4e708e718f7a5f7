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

    What can't be written is logged: this core is well, and its supervisor will hear of it.
    """
    try:
        write_atomically(path, msgspec.msgpack.encode(state))
    except OSError as error:
        log.error("what the engine would leave to its successor can't be written: %s", error)


def left(path: Path, heard: EngineState) -> EngineState:
    """What the last core left, or what its supervisor has `heard` where that is later.

    It is where the file was never written, is gone or can't be read: no reason not to start.
    """
    try:
        state = msgspec.msgpack.decode(path.read_bytes(), type=EngineState)
    except FileNotFoundError:
        return heard
    except (OSError, msgspec.DecodeError) as error:
        log.error("what the last engine left can't be read: %s", error)
        return heard
    return max(state, heard, key=lambda one: one.weights_epoch)
