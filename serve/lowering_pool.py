"""Processes that lower programs beside the engine's, which compiles them meanwhile.

Tracing and lowering hold Python's lock. One after the other they are most of a cold start on a
GPU: 40 to 100 s of an 8B model's 50 programs, where compiling, in parallel threads, takes 30.
"""

import logging
import os
import pickle
import queue
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import Pipe

import jax

from octavo.serve import devices
from octavo.serve.command import command_of
from octavo.serve.compile import Lower, Lowerable, ProgramKey
from octavo.serve.lowering import LoweringSpec, restore
from octavo.serve.programs import ProgramBuilder

READY_SECONDS = 120.0
LOWER_SECONDS = 120.0
"""A process that takes longer to start, or for one program, is ended; the engine lowers itself."""

MOST_HELPERS = 6
PROGRAMS_A_HELPER = 4
"""Fewer are lowered here before a helper is up."""

log = logging.getLogger("octavo.lowering")


class _Helper:
    """A process that lowers one program after the other.

    Attributes:
        delivered: programs that came of it.
    """

    def __init__(self, pickled: bytes) -> None:
        self.delivered = 0
        self._connection, theirs = Pipe()
        with theirs:
            self._process = subprocess.Popen(
                [*command_of("octavo.serve.lowering"), str(theirs.fileno())],
                stdin=subprocess.PIPE,  # held open: its end means that the engine is gone
                stdout=subprocess.DEVNULL,
                pass_fds=(theirs.fileno(),),
                start_new_session=True,
                env=os.environ | {"JAX_PLATFORMS": "cpu"},
            )
        self._connection.send_bytes(pickled)

    def receive(self, seconds: float) -> bytes:
        """Its next message. TimeoutError, OSError or EOFError: it is of no more use."""
        if not self._connection.poll(seconds):
            raise TimeoutError(f"no answer within {seconds:g} s")
        return self._connection.recv_bytes()

    def lower(self, key: ProgramKey) -> tuple[bytes, str]:
        """What `carry` gave for a program, or why it gave nothing; raises as `receive` does."""
        self._connection.send_bytes(pickle.dumps(key))
        return pickle.loads(self.receive(LOWER_SECONDS))

    def end(self) -> None:
        """End it, whatever it does."""
        self._process.kill()
        self._process.communicate()
        self._connection.close()


class LoweringPool:
    """Lowers programs here and, once they are up, in `helpers` processes.

    `lower` may run in several threads. Whatever happens to a helper costs time only: what it does
    not deliver is lowered here.

    Args:
        build: what is to be lowered.
        here: lowers in this process.
        spec: what helpers must know; None for no helpers.
    """

    def __init__(
        self,
        build: Callable[[ProgramKey], Lowerable],
        here: Lower,
        spec: LoweringSpec | None = None,
        helpers: int = 0,
    ) -> None:
        self._build, self._here = build, here
        self._free: queue.SimpleQueue[_Helper | None] = queue.SimpleQueue()
        self._free.put(None)  # this process
        self._helpers: list[_Helper] = []
        self._starting: list[threading.Thread] = []
        pickled = pickle.dumps(spec) if helpers else b""
        for _ in range(helpers):
            try:
                helper = _Helper(pickled)
            except OSError as error:
                log.warning("programs are lowered in the engine's process alone: %s", error)
                return
            self._helpers.append(helper)
            thread = threading.Thread(target=self._await, args=(helper,), daemon=True)
            thread.start()
            self._starting.append(thread)

    def lower(self, key: ProgramKey) -> tuple[jax.stages.Lowered, float]:
        """The lowered program of `key` and how long that took; raises what its lowering raises."""
        helper = self._free.get()
        if helper is None:
            try:
                return self._here(key)
            finally:
                self._free.put(None)
        start = time.perf_counter()
        try:
            payload, reason = helper.lower(key)
            lowered = restore(payload, self._build(key)) if payload else None
        except Exception as error:
            log.warning("a process that lowers programs is of no use: %r", error)
            helper.end()
            return self._here(key)
        helper.delivered += lowered is not None
        self._free.put(helper)
        if lowered is None:
            log.info("%s is lowered in the engine's process: %s", key, reason)
            return self._here(key)
        return lowered, time.perf_counter() - start

    @property
    def lowered_apart(self) -> int:
        """Programs that helpers have delivered."""
        return sum(helper.delivered for helper in self._helpers)

    def close(self) -> None:
        """End the helpers. Nobody may be in `lower`."""
        for helper in self._helpers:
            helper.end()
        for thread in self._starting:
            thread.join()

    def _await(self, helper: _Helper) -> None:
        try:
            helper.receive(READY_SECONDS)
        except (OSError, EOFError) as error:  # TimeoutError is an OSError
            log.info("a process that lowers programs did not start: %r", error)
            return
        self._free.put(helper)


@contextmanager
def lowering(builder: ProgramBuilder, here: Lower, programs: int) -> Iterator[LoweringPool]:
    """A pool for so many programs, with as many helpers as are worth their start on this machine.

    `here` lowers in this process.
    """
    helpers = helpers_for(builder, programs)
    pool = LoweringPool(builder.build, here, LoweringSpec.of(builder), helpers)
    try:
        yield pool
    finally:
        pool.close()


def helpers_for(builder: ProgramBuilder, programs: int) -> int:
    """How many: none on a CPU, whose compiler takes the time, nor for programs of a mesh."""
    if builder.graph.mesh is not None or not devices.on_gpu():
        return 0
    cores = len(os.sched_getaffinity(0))
    return min(MOST_HELPERS, cores // 2, programs // PROGRAMS_A_HELPER)
