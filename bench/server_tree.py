"""A server that a benchmark starts, as processes: when it is ready, what it uses. Linux (/proc)."""

import os
import re
import selectors
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from octavo.bench.load import Target
from octavo.bench.serve import reach

END_SECONDS = 60.0
ADDRESS = re.compile(rb" on http://127\.0\.0\.1:(\d+)\n")
"""Ends the line that a server writes once it serves."""

ENGINE = ("octavo.serve.core", "octavo.serve.grammar_trial")
"""Modules that the engine's processes run."""

TICKS = os.sysconf("SC_CLK_TCK")
PAGE = os.sysconf("SC_PAGE_SIZE")


class ServerTree:
    """A running server: its first process and all that this one has started.

    Attributes:
        port: on 127.0.0.1.
    """

    def __init__(self, pid: int, port: int) -> None:
        self._pid = pid
        self.port = port

    def cpu_seconds(self) -> dict[str, float]:
        """Processor time until now: of the engine core, and of what answers HTTP."""
        return self._by_kind(_cpu)

    def resident(self) -> dict[str, float]:
        """Resident bytes of the same."""
        return self._by_kind(lambda pid: float(_read(pid, "statm").split()[1]) * PAGE)

    def _by_kind(self, measure: Callable[[int], float]) -> dict[str, float]:
        out = {"core": 0.0, "api": 0.0}
        for pid in _family(self._pid):
            command = _read(pid, "cmdline")
            out["core" if any(name in command for name in ENGINE) else "api"] += measure(pid)
        return out


@contextmanager
def started(command: Sequence[str], seconds: float) -> Iterator[ServerTree]:
    """The server that `command` starts on a port of the server's choice, once it is ready.

    It is ended afterwards. ValueError if it is not ready in `seconds`.
    """
    process = subprocess.Popen(command, stdout=subprocess.PIPE)
    try:
        port = _port_of(process, time.monotonic() + seconds)
        reach(Target(f"http://127.0.0.1:{port}"), seconds, lambda: process.poll() is None)
        yield ServerTree(process.pid, port)
    finally:
        process.terminate()
        try:
            process.wait(END_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        assert process.stdout is not None
        process.stdout.close()


def _port_of(process: subprocess.Popen[bytes], end: float) -> int:
    """The port that a server says it serves on; ValueError if it doesn't before `end`."""
    assert process.stdout is not None
    said = b""
    with selectors.DefaultSelector() as selector:
        selector.register(process.stdout, selectors.EVENT_READ)
        while not (found := ADDRESS.search(said)):
            if not selector.select(max(0.0, end - time.monotonic())):
                raise ValueError("the server is not ready in time")
            piece = os.read(process.stdout.fileno(), 4096)
            if not piece:
                raise ValueError("the server has ended")
            said += piece
    return int(found[1])


def _family(pid: int) -> list[int]:
    """A process and all that descend from it."""
    lists = Path(f"/proc/{pid}/task").glob("*/children")
    children = [int(child) for path in lists for child in path.read_text().split()]
    return [pid, *(found for child in children for found in _family(child))]


def _read(pid: int, name: str) -> str:
    return Path(f"/proc/{pid}/{name}").read_text()


def _cpu(pid: int) -> float:
    fields = _read(pid, "stat").rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / TICKS
