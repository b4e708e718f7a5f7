"""The processes of `octavo serve` around a ClockEngine, and what they use. Linux (/proc).

`running(...)` starts them; `python -m octavo.bench.clock_server JSON` is the first of them.
"""

import json
import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from octavo.bench.clock_engine import VOCAB, ClockConfig
from octavo.bench.load import Target
from octavo.bench.plain_tokenizer import write_tokenizer
from octavo.bench.serve import reach
from octavo.serve.api import Parts
from octavo.serve.config import ServerConfig
from octavo.serve.server import run

START_SECONDS = 60.0
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
        out = {"core": 0.0, "api": 0.0}
        for pid in _family(self._pid):
            out["core" if "octavo.serve.core" in _read(pid, "cmdline") else "api"] += _cpu(pid)
        return out

    def resident(self) -> int:
        """Resident bytes of all processes together."""
        return sum(int(_read(pid, "statm").split()[1]) * PAGE for pid in _family(self._pid))


@contextmanager
def running(period: float = 0.0, api_processes: int = 1) -> Iterator[ServerTree]:
    """A server that is ready; its engine makes a step each `period` seconds (0: at once)."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    with tempfile.TemporaryDirectory() as folder:
        write_tokenizer(Path(folder), VOCAB)
        order: dict[str, Any] = {"tokenizer": folder, "period": period}
        order |= {"port": port, "api_processes": api_processes}
        command = [sys.executable, "-m", "octavo.bench.clock_server", json.dumps(order)]
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
        try:
            alive = lambda: process.poll() is None  # noqa: E731
            reach(Target(f"http://127.0.0.1:{port}"), START_SECONDS, alive)
            yield ServerTree(process.pid, port)
        finally:
            process.terminate()
            try:
                process.wait(START_SECONDS)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


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


def main(order: dict[str, Any]) -> int:
    """Serve as `running` says."""
    config: Any = ClockConfig(order["tokenizer"], order["period"])
    server = ServerConfig(
        port=order["port"], api_processes=order["api_processes"], log_level="warning"
    )
    return run(config, server, Parts("octavo.bench.clock_engine:make"))


if __name__ == "__main__":
    sys.exit(main(json.loads(sys.argv[1])))
