"""Ports for servers that tests start."""

import itertools
import os
import socket

FIRST, STRIPE, STRIPES = 20_000, 1_000, 12
"""Below the ports that the kernel hands out by itself, from 32768 on."""

_WORKER = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw")) % STRIPES
_offsets = itertools.count(os.getpid())


def free_port():
    """A port that nothing listens on; of a stripe that no other test process of the run uses."""
    while True:
        port = FIRST + _WORKER * STRIPE + next(_offsets) % STRIPE
        try:
            socket.create_server(("127.0.0.1", port)).close()
        except OSError:
            continue
        return port
