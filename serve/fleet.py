"""Several API processes on one port: starts them, restarts those that die, sums what they do.

Each has a listening socket of its own that this process keeps open, so that connections which wait
on a dead process's socket are answered by its successor; in a drain it has none, and the socket
is closed. A process is killed when it has given no
sign of life for `watchdog_seconds`. The engine core is told of a dead one and aborts its requests;
what it held of its callers' key limits is free again.
"""

import asyncio
import logging
import pickle
import shutil
import socket
import tempfile
import time
from collections.abc import Callable
from typing import Any

import msgspec
import zmq
import zmq.asyncio

from octavo.serve.api import CLOSING_SECONDS, Parts
from octavo.serve.child import spawn
from octavo.serve.config import ServerConfig
from octavo.serve.key_limits import Ask, Holder, KeyLimits, Over
from octavo.serve.metrics import Recorder, add_up
from octavo.serve.supervisor import Standstill
from octavo.serve.wire import EngineNews
from octavo.serve.worker import (
    BEAT_SECONDS,
    Beat,
    Drain,
    Joined,
    Loaded,
    ToFleet,
    Total,
    ToWorker,
    WorkerSpec,
)

# A process that dies younger than this is not started again at once.
YOUNG_SECONDS = 10.0
PAUSE_SECONDS = 1.0
MISSED_BEATS = 3
"""Signs of life that a process may at least miss, however short watchdog_seconds are."""

log = logging.getLogger("octavo.fleet")


class Member:
    """One API process in its present life."""

    def __init__(
        self, identity: bytes, process: asyncio.subprocess.Process, limits: KeyLimits
    ) -> None:
        self.identity = identity
        self.process = process
        self.holder = Holder(limits)
        self.recorder = Recorder()
        self.heard_at = time.monotonic()
        self.joined = False
        self.loaded = False

    def kill(self) -> None:
        """End it at once."""
        if self.process.returncode is None:
            self.process.kill()


class Fleet:
    """The API processes. `gone` is told the identity of each that died."""

    def __init__(
        self,
        engine_config: Any,
        config: ServerConfig,
        parts: Parts,
        listeners: list[socket.socket],
        gone: Callable[[bytes], None],
    ) -> None:
        self._engine_config, self._config, self._parts = engine_config, config, parts
        self._listeners = listeners
        self._gone = gone
        self._patience = max(config.watchdog_seconds, MISSED_BEATS * BEAT_SECONDS)
        self._folder = tempfile.mkdtemp(prefix="octavo-api-")
        self._address = f"ipc://{self._folder}/fleet"
        self._socket = zmq.asyncio.Context.instance().socket(zmq.ROUTER)
        self._socket.set(zmq.LINGER, 0)
        self._socket.bind(self._address)
        self._decode = msgspec.msgpack.Decoder(ToFleet).decode
        self._members: dict[bytes, Member] = {}
        self._departed = Recorder()
        self._limits = KeyLimits()
        self._news: EngineNews | None = None
        self._stopping = False
        self._all_loaded: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    async def run(self) -> None:
        """Run the processes until all have ended after `drain` or `end`."""
        helpers = [asyncio.create_task(self._read()), asyncio.create_task(self._watch())]
        try:
            await asyncio.gather(*(self._keep(i) for i in range(len(self._listeners))))
        finally:
            for member in self._members.values():
                member.kill()
            for task in helpers:
                task.cancel()
            self._socket.close()
            shutil.rmtree(self._folder, ignore_errors=True)

    async def loaded(self) -> None:
        """Wait for every process's tokenizer; RuntimeError with the reason if one can't load."""
        await self._all_loaded

    def on_news(self, news: EngineNews) -> None:
        """Pass on news of the engine."""
        self._news = news
        self._broadcast(news)

    def drain(self) -> None:
        """Have every process end once its requests have."""
        if not self._stopping:
            self._stopping = True
            self._broadcast(Drain())
            patience = self._config.drain_seconds + 2 * CLOSING_SECONDS
            asyncio.get_running_loop().call_later(patience, self.end)

    def end(self) -> None:
        """End every process at once."""
        self._stopping = True
        for member in self._members.values():
            member.kill()

    async def _keep(self, index: int) -> None:
        """Keep one process running."""
        life = 0
        while not self._stopping:
            born = time.monotonic()
            try:
                member = await self._spawn(index, f"api-{index}-{life}".encode())
            except OSError as error:  # out of memory or processes, now; the others serve on
                if not self._all_loaded.done():
                    raise
                log.error("API process %d can't be started: %s", index, error)
                await asyncio.sleep(PAUSE_SECONDS)
                continue
            code = await member.process.wait()
            del self._members[member.identity]
            member.holder.close()
            member.recorder.key_running.clear()
            self._departed = add_up([self._departed, member.recorder])
            self._gone(member.identity)
            if self._stopping:
                # Nobody accepts there any more: new connections go to those that still drain.
                self._listeners[index].close()
                return
            log.error("API process %d has ended (exit code %d); starting another", index, code)
            if time.monotonic() - born < YOUNG_SECONDS:
                await asyncio.sleep(PAUSE_SECONDS)
            life += 1

    async def _spawn(self, index: int, identity: bytes) -> Member:
        fd = self._listeners[index].fileno()
        spec = WorkerSpec(
            self._address, identity, fd, self._engine_config, self._config, self._parts
        )
        process = await spawn("octavo.serve.worker", spec, pass_fds=(fd,))
        self._members[identity] = member = Member(identity, process, self._limits)
        return member

    async def _read(self) -> None:
        while True:
            identity, payload = await self._socket.recv_multipart()
            member = self._members.get(identity)
            if member is None:
                continue
            member.heard_at = time.monotonic()
            try:
                self._take(member, payload)
            except Exception:  # a reader that ended would hear of no process any more
                log.exception("a message of API process %s could not be taken", identity)

    def _take(self, member: Member, payload: bytes) -> None:
        match self._decode(payload):
            case Joined():
                self._welcome(member)
            case Loaded() as loaded:
                self._note_loaded(member, loaded.error)
            case Ask() as ask:
                self._send(member, member.holder.enter(ask))
            case Over() as over:
                member.holder.over(over.ticket)
            case Beat() as beat:
                member.recorder = pickle.loads(beat.recorder)
                if beat.ask:
                    self._send(member, Total(pickle.dumps(self._total())))

    def _welcome(self, member: Member) -> None:
        member.joined = True
        if self._news is not None:
            self._send(member, self._news)
        if self._stopping:
            self._send(member, Drain())

    def _note_loaded(self, member: Member, error: str) -> None:
        member.loaded = not error
        if error:
            log.error("API process %s: %s", member.identity, error)
        if self._all_loaded.done():
            if error:
                member.kill()
            return
        if error:
            self._all_loaded.set_exception(RuntimeError(error))
        elif sum(m.loaded for m in self._members.values()) == len(self._listeners):
            self._all_loaded.set_result(None)

    def _total(self) -> Recorder:
        return add_up([self._departed, *(m.recorder for m in self._members.values())])

    async def _watch(self) -> None:
        """Kill a process that gives no sign of life."""
        period = min(1.0, self._patience / 8)
        standstill = Standstill(period)
        while True:
            await asyncio.sleep(period)
            self._look(time.monotonic(), stood_still=standstill.noticed())

    def _look(self, now: float, *, stood_still: bool) -> None:
        for member in self._members.values():
            if stood_still:
                member.heard_at = now
            elif member.joined and now - member.heard_at > self._patience:
                log.error("API process %s hangs", member.identity)
                member.kill()

    def _broadcast(self, message: ToWorker) -> None:
        for member in self._members.values():
            if member.joined:
                self._send(member, message)

    def _send(self, member: Member, message: ToWorker) -> None:
        # Nothing waits here: the socket drops what a dead process can't take.
        self._socket.send_multipart([member.identity, msgspec.msgpack.encode(message)], zmq.NOBLOCK)
