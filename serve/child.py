"""Child processes and their parents: how one is started, and how it follows its parent.

A child gets its spec, pickled, on its standard input. The parent keeps that pipe open: its end
means that the parent is gone.
"""

import asyncio
import os
import pickle
import shutil
import signal
import sys
import threading
from collections.abc import Callable, Sequence
from functools import partial

from octavo.serve.command import command_of

EXIT_ORPHANED = 3


async def spawn(
    module: str, spec: object, pass_fds: Sequence[int] = ()
) -> asyncio.subprocess.Process:
    """A process that runs `python -m MODULE` on a spec; OSError if it can't be started.

    It has a session of its own: a terminal's Ctrl-C reaches only the server, which drains.
    """
    pickled = pickle.dumps(spec)  # before there is a process that would wait for it
    process = await asyncio.create_subprocess_exec(
        *command_of(module),
        stdin=asyncio.subprocess.PIPE,
        start_new_session=True,
        pass_fds=pass_fds,
    )
    assert process.stdin is not None
    process.stdin.write(pickled)
    return process


def follow_parent(address: str) -> None:
    """End with the parent and at its word only.

    The process exits when its standard input closes, however deep the main thread is in a compile;
    it takes the folder of the zmq `address` with it, which the parent had no time to remove.
    Signals meant for the whole service (a process group's, a container's) are the parent's
    business: it drains first.
    """
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    folder = os.path.dirname(address.removeprefix("ipc://"))
    end_with_parent(partial(shutil.rmtree, folder, ignore_errors=True))


def end_with_parent(last: Callable[[], object] = lambda: None) -> None:
    """Exit once the standard input closes, after `last`, whatever the main thread does."""
    fd = sys.stdin.fileno()

    def wait() -> None:
        while os.read(fd, 1):
            pass
        last()
        os._exit(EXIT_ORPHANED)

    threading.Thread(target=wait, name="parent-watch", daemon=True).start()
