"""One of several API processes: an ApiServer that its parent, the Fleet, supervises.

It is told of the engine's life and of the drain by zmq, asks there whether an API key's limits
allow a request, and reports what it has measured once a second, which is its sign of life too.
"""

import asyncio
import logging
import pickle
import socket
import sys
from dataclasses import dataclass
from typing import Any

import msgspec
import zmq

from octavo.serve import errors, logs
from octavo.serve.api import ApiServer, Parts
from octavo.serve.child import follow_parent
from octavo.serve.config import ServerConfig
from octavo.serve.event_loop import loop_factory
from octavo.serve.key_limits import Ask, Doorman, Over, Verdict
from octavo.serve.metrics import Recorder
from octavo.serve.supervisor import connect
from octavo.serve.wire import EngineNews

BEAT_SECONDS = 1.0
ANSWER_SECONDS = 5.0

log = logging.getLogger("octavo.fleet")


@dataclass(frozen=True)
class WorkerSpec:
    """How to start an API process.

    Attributes:
        address: zmq address of the fleet.
        identity: its name there and at the engine core.
        fd: inherited file descriptor of its listening socket.
    """

    address: str
    identity: bytes
    fd: int
    engine_config: Any
    config: ServerConfig
    parts: Parts


class Joined(msgspec.Struct, tag="joined"):
    """A process is connected; it is told of the engine from now on."""


class Loaded(msgspec.Struct, tag="loaded"):
    """Its tokenizer is loaded; `error` says why not."""

    error: str = ""


class Beat(msgspec.Struct, tag="beat"):
    """It lives; `recorder` is a pickled Recorder. `ask` wants a Total back."""

    recorder: bytes
    ask: bool = False


class Drain(msgspec.Struct, tag="drain"):
    """End once the running requests have."""


class Total(msgspec.Struct, tag="total"):
    """The sum of all processes' recorders, pickled."""

    recorder: bytes


ToFleet = Joined | Loaded | Beat | Ask | Over
ToWorker = EngineNews | Drain | Total | Verdict


class Worker:
    """The process's side of the fleet."""

    def __init__(self, spec: WorkerSpec) -> None:
        listener = socket.socket(fileno=spec.fd)
        self._api = ApiServer(spec.engine_config, spec.config, spec.parts, listener, spec.identity)
        self._context = self._api.context
        self._context.total = self.total
        self._doorman = self._context.keys.doorman = Doorman(self._send)
        self._socket = connect(spec.address, spec.identity)
        self._socket.set(zmq.LINGER, 1000)
        self._decode = msgspec.msgpack.Decoder(ToWorker).decode
        self._asked: asyncio.Future[Recorder] | None = None

    async def run(self) -> int:
        """Serve until the fleet says Drain."""
        self._send(Joined())
        tasks = [asyncio.create_task(job()) for job in (self._read, self._beat, self._load)]
        await self._api.run()
        self._report()
        for task in tasks:
            task.cancel()
        self._socket.close()
        return 0

    async def total(self) -> Recorder:
        """The whole fleet's sum; ApiError 503 if the fleet doesn't answer.

        This process's own would look as if every counter had been set back.
        """
        asked = self._asked
        if asked is None or asked.done():
            asked = self._asked = asyncio.get_running_loop().create_future()
            self._report(ask=True)
        done, _ = await asyncio.wait([asked], timeout=ANSWER_SECONDS)
        if done:
            return asked.result()
        if self._asked is asked:
            self._asked = None  # it may be lost: the next to want it asks anew
        raise errors.unavailable("the sum of all API processes can't be had")

    async def _read(self) -> None:
        """Take what the fleet says; where that fails this process ends, and another is started."""
        try:
            while True:
                self._take(await self._socket.recv())
        except Exception:
            log.exception("what the fleet said could not be taken: ending")
            self._api.end()

    def _take(self, payload: bytes) -> None:
        match self._decode(payload):
            case EngineNews() as news:
                self._api.on_news(news)
            case Drain():
                self._api.drain()
            case Verdict() as verdict:
                self._doorman.answered(verdict)
            case Total() as total if self._asked is not None and not self._asked.done():
                self._asked.set_result(pickle.loads(total.recorder))
            case _:
                pass

    async def _beat(self) -> None:
        while True:
            self._report()
            await asyncio.sleep(BEAT_SECONDS)

    async def _load(self) -> None:
        try:
            await self._api.loaded()
        except Exception as error:
            self._send(Loaded(str(error) or type(error).__name__))
        else:
            self._send(Loaded())

    def _report(self, *, ask: bool = False) -> None:
        self._send(Beat(pickle.dumps(self._context.measured()), ask))

    def _send(self, message: ToFleet) -> None:
        if self._socket.closed:  # a request ends behind everything else
            return
        self._socket.send(msgspec.msgpack.encode(message), zmq.NOBLOCK)


def main() -> int:
    """Read the spec from standard input and serve."""
    spec: WorkerSpec = pickle.load(sys.stdin.buffer)
    follow_parent(spec.address)
    logs.configure(spec.config.log_level)

    async def serve() -> int:
        return await Worker(spec).run()

    return asyncio.run(serve(), loop_factory=loop_factory())


if __name__ == "__main__":
    sys.exit(main())
