"""The API process's side of the engine hop: spawns the core, sends requests, hands out events."""

import asyncio
import logging
import pickle
import shutil
import sys
import tempfile
import time
from collections.abc import Iterable, Sequence
from typing import Any

import msgspec
import zmq
import zmq.asyncio

from octavo.serve import errors
from octavo.serve.core import CoreSpec
from octavo.serve.errors import ApiError
from octavo.serve.types import EngineStats, Request, TokenEvent
from octavo.serve.wire import (
    Abort,
    Add,
    Events,
    Fatal,
    Hello,
    Ready,
    Rejected,
    Shutdown,
    ToApi,
    ToCore,
)

STOP_SECONDS = 5.0

log = logging.getLogger("octavo.client")


class Call:
    """The samples of one HTTP request: their events in order, from one place."""

    __slots__ = ("_client", "_error", "_events", "_waiter", "open")

    def __init__(self, client: "EngineClient", request_ids: Iterable[str]) -> None:
        self._client = client
        self._error: Exception | None = None
        self._events: list[TokenEvent] = []
        self._waiter: asyncio.Future[None] | None = None
        self.open = set(request_ids)

    async def next(self) -> list[TokenEvent]:
        """The events since the last call, at least one; raises what `fail` was given."""
        while not self._events:
            if self._error is not None:
                raise self._error
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
        events, self._events = self._events, []
        return events

    def put(self, event: TokenEvent) -> None:
        """Append an event; the reader wakes the call once a message."""
        self._events.append(event)
        if event.finish_reason is not None:
            self.open.discard(event.request_id)

    def wake(self) -> None:
        """Let `next` return."""
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def fail(self, error: Exception) -> None:
        """End the call: what still runs is aborted and `next` raises `error` at once."""
        self._events.clear()
        self._error = error
        self.close()
        self.wake()

    def finish(self, request_id: str) -> None:
        """Abort one sample that a stop string has ended."""
        self.open.discard(request_id)
        self._client.abort([request_id])

    def close(self) -> None:
        """Abort whatever still runs."""
        if self.open:
            self._client.abort(list(self.open))
            self.open.clear()


class EngineClient:
    """Owns the core process and the socket to it.

    Attributes:
        ready: what the core said when the model was loaded; None while it loads.
        failure: why there is no engine any more; None while there is.
        stats: the engine's last report.
        settled: set once the model is loaded or the core has failed.
        progress_at: monotonic time of the last finished step, or of the last idle moment.
    """

    def __init__(self, factory: str, config: Any, log_level: str = "info") -> None:
        self._factory, self._config, self._log_level = factory, config, log_level
        self._folder = ""
        self._calls: dict[str, Call] = {}
        self._encode = msgspec.msgpack.Encoder().encode
        self._decode = msgspec.msgpack.Decoder(ToApi).decode
        self._tasks: list[asyncio.Task[None]] = []
        self._stopping = False
        self.ready: Ready | None = None
        self.failure: str | None = None
        self.stats = EngineStats()
        self.settled = asyncio.Event()
        self.dead = asyncio.Event()
        self.progress_at = time.monotonic()

    @property
    def in_flight(self) -> int:
        """Samples that have not ended."""
        return len(self._calls)

    @property
    def core_pid(self) -> int:
        """Process id of the core."""
        return self._process.pid

    async def start(self) -> None:
        """Spawn the core and connect; the model loads in the background (see `settled`)."""
        self._folder = tempfile.mkdtemp(prefix="octavo-")
        address = f"ipc://{self._folder}/core"
        self._socket = zmq.asyncio.Context.instance().socket(zmq.DEALER)
        self._socket.set(zmq.SNDHWM, 0)
        self._socket.set(zmq.RCVHWM, 0)
        self._socket.set(zmq.LINGER, 0)
        self._socket.connect(address)
        # A session of its own: a terminal's Ctrl-C reaches only the API process, which drains.
        self._process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "octavo.serve.core",
            stdin=asyncio.subprocess.PIPE,
            start_new_session=True,
        )
        spec = CoreSpec(address, self._factory, self._config, self._log_level)
        assert self._process.stdin is not None
        self._process.stdin.write(pickle.dumps(spec))
        self._send(Hello())
        self._tasks = [asyncio.create_task(self._read()), asyncio.create_task(self._watch())]

    def submit(self, requests: Sequence[Request]) -> Call:
        """Send the samples of one call; refusals arrive through `Call.next`."""
        call = Call(self, [r.request_id for r in requests])
        if self.failure is not None:
            call.open.clear()
            call.fail(errors.unavailable(self.failure))
            return call
        if not self._calls:
            self.progress_at = time.monotonic()
        for request in requests:
            self._calls[request.request_id] = call
        self._send(Add(list(requests)))
        return call

    def abort(self, request_ids: list[str]) -> None:
        """Stop samples; their later events are dropped."""
        for request_id in request_ids:
            self._calls.pop(request_id, None)
        if self.failure is None:
            self._send(Abort(request_ids))

    def fail_all(self, error: ApiError) -> None:
        """End every call with `error`."""
        for call in set(self._calls.values()):
            call.fail(error)

    def stuck_for(self) -> float:
        """Seconds since the last finished step while work is pending, else 0."""
        return time.monotonic() - self.progress_at if self._calls else 0.0

    async def stop(self) -> int:
        """End the core, by force after STOP_SECONDS; its exit code."""
        self._stopping = True
        if self.ready is None:
            self.kill()
        if self._process.returncode is None:
            self._send(Shutdown())
            try:
                await asyncio.wait_for(self._process.wait(), STOP_SECONDS)
            except TimeoutError:
                self.kill()
        code = await self._process.wait()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._socket.close()
        shutil.rmtree(self._folder, ignore_errors=True)
        return code

    def kill(self) -> None:
        """End the core at once."""
        if self._process.returncode is None:
            self._process.kill()

    def _send(self, message: ToCore) -> None:
        # zmq queues without blocking (no high-water mark), so there is nothing to wait for.
        self._socket.send(self._encode(message), zmq.NOBLOCK)

    async def _watch(self) -> None:
        code = await self._process.wait()
        if not self._stopping:
            self._die(f"{errors.CORE_DEAD} (exit code {code})")

    def _die(self, reason: str) -> None:
        if self.failure is None:
            log.error("%s", reason)
            self.failure = reason
            self.settled.set()
            self.fail_all(errors.internal(reason))
        self.dead.set()

    async def _read(self) -> None:
        while True:
            message = self._decode(await self._socket.recv())
            match message:
                case Events():
                    self._deliver(message)
                case Rejected():
                    self._reject(message)
                case Ready():
                    self.ready = message
                    self.settled.set()
                case Fatal():
                    self._die(message.message)

    def _deliver(self, message: Events) -> None:
        if message.stats is not None:
            if message.stats.steps != self.stats.steps or not self._calls:
                self.progress_at = time.monotonic()
            self.stats = message.stats
        touched: set[Call] = set()
        for event in message.events:
            call = self._calls.get(event.request_id)
            if call is None:
                continue
            if event.finish_reason is not None:
                del self._calls[event.request_id]
            call.put(event)
            touched.add(call)
        for call in touched:
            call.wake()

    def _reject(self, message: Rejected) -> None:
        for request_id in message.request_ids:
            call = self._calls.pop(request_id, None)
            if call is None:
                continue
            call.open.clear()
            call.fail(_refusal(message))


def _refusal(message: Rejected) -> ApiError:
    if message.reason == "full":
        return errors.overloaded(message.message, message.retry_after)
    if message.reason == "invalid":
        return errors.invalid(message.message)
    return errors.internal(message.message)
