"""Keeps an engine core running: starts it, watches it, and starts it again when it ends or hangs.

The core has ended when its process has, whatever the reason; it hangs when it has said nothing for
two watchdog periods (it speaks several times a second, busy or idle). API processes hear of both
through `publish`.
"""

import asyncio
import contextlib
import dataclasses
import logging
import shutil
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import zmq
import zmq.asyncio

from octavo.serve import errors
from octavo.serve.breaker import RestartBudget
from octavo.serve.child import spawn
from octavo.serve.config import ServerConfig
from octavo.serve.core import EXIT_FAILED, CoreSpec
from octavo.serve.handover import left
from octavo.serve.wire import (
    SUPERVISOR,
    Compiling,
    EngineNews,
    EngineState,
    Fatal,
    Gone,
    Hello,
    Ready,
    Shutdown,
    ToApi,
    ToCore,
)

STOP_SECONDS = 5.0
# A core that has failed has said why: how long that may be on its way when the process has ended.
LAST_WORDS_SECONDS = 2.0
# A compile may keep the core silent for this much longer than a step.
COMPILE_SECONDS = 1800.0
HANG_PERIODS = 2

log = logging.getLogger("octavo.supervisor")


class Silence:
    """How long the core has said nothing, with time allowed for a compile."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._until = clock()

    def heard(self, message: ToApi) -> None:
        """The core spoke; when it is about to compile it may be silent for longer."""
        self._until = self._clock() + (COMPILE_SECONDS if isinstance(message, Compiling) else 0)

    def reset(self) -> None:
        """Start counting now."""
        self._until = self._clock()

    def seconds(self) -> float:
        """Seconds of silence that nothing explains."""
        return max(0.0, self._clock() - self._until)


class Standstill:
    """Whether this process was the one that stood still, so that what others said is unread."""

    def __init__(self, period: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._period = period
        self._clock = clock
        self._last = clock()

    def noticed(self) -> bool:
        """To be asked every `period` seconds: whether the last time is four periods ago or more."""
        last, self._last = self._last, self._clock()
        return self._last - last >= 4 * self._period


class CoreSupervisor:
    """Owns the core process. `publish` gets every EngineNews.

    Attributes:
        news: the last news.
        given_up: set when the core has ended and won't be started again.
        ready: set once the model was loaded for the first time.
    """

    def __init__(
        self,
        factory: str,
        engine_config: Any,
        config: ServerConfig,
        publish: Callable[[EngineNews], None],
    ) -> None:
        self._factory, self._engine_config, self._config = factory, engine_config, config
        self._publish = publish
        self._budget = RestartBudget(config.max_engine_restarts, config.engine_restart_window)
        self._encode = msgspec.msgpack.Encoder().encode
        self._decode = msgspec.msgpack.Decoder(ToApi).decode
        self._folder = ""
        self._process: asyncio.subprocess.Process | None = None
        self._socket: zmq.asyncio.Socket | None = None
        self._stopping = False
        self._reason: str | None = None
        self._told = asyncio.Event()
        self._loaded = False
        self._heard = EngineState()
        self._silence = Silence()
        self._task: asyncio.Task[None] | None = None
        self.news = EngineNews("restarting", reason="the engine has not been started")
        self.ready = asyncio.Event()
        self.given_up = asyncio.Event()

    def start(self) -> None:
        """Start the core, and keep it running in the background."""
        self._folder = tempfile.mkdtemp(prefix="octavo-")
        self._task = asyncio.create_task(self._run())

    async def started(self) -> bool:
        """Wait until the model is loaded; False when it can't be."""
        ends = [asyncio.create_task(event.wait()) for event in (self.ready, self.given_up)]
        await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
        for task in ends:
            task.cancel()
        return self.ready.is_set()

    async def stop(self) -> None:
        """End the core, by force after STOP_SECONDS."""
        self._stopping = True
        if self._loaded:
            self._send(Shutdown())
        else:
            self._kill_process()
        process = self._process
        if process is not None and process.returncode is None:
            try:
                await asyncio.wait_for(process.wait(), STOP_SECONDS)
            except TimeoutError:
                self._kill_process()
                await process.wait()
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        shutil.rmtree(self._folder, ignore_errors=True)

    def kill(self) -> None:
        """End the core at once, for good."""
        self._stopping = True
        self._kill_process()

    def _kill_process(self) -> None:
        if self._process is not None and self._process.returncode is None:
            self._process.kill()

    def forget(self, identity: bytes) -> None:
        """An API process has ended: have the core stop its requests."""
        self._send(Gone(identity))

    async def _run(self) -> None:
        restarts = 0
        while not self._stopping:
            try:
                reason = await self._live(restarts)
            except Exception as error:
                log.debug("no engine process", exc_info=True)
                reason = f"the engine process can't be started: {error}"
            if self._stopping:
                return
            log.error("%s", reason)
            wait = self._budget.delay() if self.ready.is_set() else float("inf")
            phase = "failed" if wait == float("inf") or self._budget.spent() else "restarting"
            self._tell(EngineNews(phase, reason=reason, retry_after=wait, restarts=restarts))
            if wait == float("inf"):
                self.given_up.set()
                return
            await asyncio.sleep(wait)
            self._budget.note()
            restarts += 1

    async def _live(self, restarts: int) -> str:
        """One life of the core; why it ended."""
        self._reason, self._loaded = None, False
        self._told.clear()
        address = f"ipc://{self._folder}/core-{restarts}"
        handover = Path(self._folder, "weights")
        weights = left(handover, self._heard)
        config, level = self._config_with(weights), self._config.log_level
        spec = CoreSpec(address, self._factory, config, handover, level, weights)
        self._process = await spawn("octavo.serve.core", spec)
        self._socket = connect(address, SUPERVISOR)
        self._send(Hello())
        self._tell(EngineNews("starting", restarts=restarts))
        ready = EngineNews("ready", address=address, restarts=restarts)
        helpers = [asyncio.create_task(self._read(ready)), asyncio.create_task(self._watch())]
        try:
            code = await self._process.wait()
            if code == EXIT_FAILED:
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._told.wait(), LAST_WORDS_SECONDS)
        finally:
            for task in helpers:
                task.cancel()
            self._socket.close()  # before anything is awaited: `stop` may cancel here
            self._socket = None
            await asyncio.gather(*helpers, return_exceptions=True)
        return self._reason or f"{errors.CORE_DEAD} (exit code {code})"

    def _config_with(self, weights: EngineState) -> Any:
        """The settings, with the model whose weights were loaded last; its tokenizer stays."""
        config, model = self._engine_config, weights.model
        if not model:
            return config
        return dataclasses.replace(config, model=model, tokenizer=config.tokenizer or config.model)

    async def _read(self, ready: EngineNews) -> None:
        assert self._socket is not None
        while True:
            payload = await self._socket.recv()
            try:
                message = self._decode(payload)
            except msgspec.DecodeError:
                log.error("undecodable message of %d bytes from the engine", len(payload))
                continue
            self._silence.heard(message)
            if isinstance(message, Fatal):
                self._reason = message.message
                self._told.set()
            elif isinstance(message, EngineState):
                self._heard = message
            elif isinstance(message, Ready):
                self._loaded = True
                self.ready.set()
                self._tell(ready)

    async def _watch(self) -> None:
        """Kill a core that hangs. Loading may take any time; it is not watched."""
        limit = self._config.watchdog_seconds * HANG_PERIODS
        period = min(1.0, limit / 8)
        standstill = Standstill(period)
        while True:
            await asyncio.sleep(period)
            if standstill.noticed():
                self._silence.reset()
            if self._loaded and self._silence.seconds() > limit:
                self._reason = f"the engine hangs: no step ended for {limit:g} s"
                self._kill_process()
                return

    def _tell(self, news: EngineNews) -> None:
        self.news = news
        self._publish(news)

    def _send(self, message: ToCore) -> None:
        if self._socket is not None:
            with contextlib.suppress(zmq.ZMQError):
                self._socket.send(self._encode(message), zmq.NOBLOCK)


def connect(address: str, identity: bytes) -> zmq.asyncio.Socket:
    """A DEALER socket to the core, without bounds of its own: sending never waits."""
    socket = zmq.asyncio.Context.instance().socket(zmq.DEALER)
    socket.set(zmq.ROUTING_ID, identity)
    socket.set(zmq.SNDHWM, 0)
    socket.set(zmq.RCVHWM, 0)
    socket.set(zmq.LINGER, 0)
    socket.connect(address)
    return socket
