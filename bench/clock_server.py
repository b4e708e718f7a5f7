"""The processes of `octavo serve` around a ClockEngine.

`running(...)` starts them; `python -m octavo.bench.clock_server JSON` is the first of them.
"""

import json
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from octavo.bench.clock_engine import VOCAB, ClockConfig
from octavo.bench.plain_tokenizer import write_tokenizer
from octavo.bench.server_tree import ServerTree, started
from octavo.serve.command import command_of
from octavo.serve.config import ServerConfig

START_SECONDS = 60.0


@contextmanager
def running(period: float = 0.0, api_processes: int = 1) -> Iterator[ServerTree]:
    """A server that is ready; its engine makes a step each `period` seconds (0: at once)."""
    with tempfile.TemporaryDirectory() as folder:
        write_tokenizer(Path(folder), VOCAB)
        order = {"tokenizer": folder, "period": period, "api_processes": api_processes}
        command = [*command_of("octavo.bench.clock_server"), json.dumps(order)]
        with started(command, START_SECONDS) as server:
            yield server


def main(order: dict[str, Any]) -> int:
    """Serve as `running` says."""
    # Here, because other benches run where no server is installed.
    from octavo.serve.api import Parts
    from octavo.serve.server import run

    config: Any = ClockConfig(order["tokenizer"], order["period"])
    server = ServerConfig(port=0, api_processes=order["api_processes"], log_level="warning")
    return run(config, server, Parts("octavo.bench.clock_engine:make"))


if __name__ == "__main__":
    sys.exit(main(json.loads(sys.argv[1])))
