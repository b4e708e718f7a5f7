"""The API process's side of the engine hop: sends requests, hands out events, survives restarts.

Who starts and restarts the core is the supervisor's business (`supervisor.py`); its news arrive
through `EngineClient.on_news`.
"""

import asyncio
import itertools
import logging
import math
from collections.abc import Sequence
from typing import Any

import msgspec
import zmq
import zmq.asyncio

from octavo.serve import errors
from octavo.serve.call import Call, StartOver
from octavo.serve.errors import ApiError
from octavo.serve.supervisor import Silence, connect
from octavo.serve.types import EngineStats, Request
from octavo.serve.wire import (
    Abort,
    Control,
    Controlled,
    EngineNews,
    EngineState,
    Events,
    Hello,
    Ready,
    Rejected,
    ToApi,
    ToCore,
    add,
)

EVENTS_A_TURN = 1024
"""Events taken from the engine before whatever else this process has to do gets its turn."""

RETRY_SECONDS, MAX_RETRY_SECONDS = 5, 600
"""Bounds of Retry-After: loading takes seconds, a breaker is open for minutes."""

log = logging.getLogger("octavo.client")


class EngineClient:
    """The connection of one API process to the core, through all of the core's lives.

    After a restart, calls of which nothing has reached a client are sent again, once; the others
    fail.

    Attributes:
        ready: what the core said when the model was first loaded; None until then.
        up: the core is loaded and connected.
        failure: why there is no engine for now; None while there is, or while one loads.
        news: what the supervisor said last.
        closing: the server ends; no call is taken any more.
        stats: the engine's last report; None until there is one.
        state: what operators have changed of it.
    """

    def __init__(self, identity: bytes) -> None:
        self._identity = identity
        self._calls: dict[str, Call] = {}
        self._encode = msgspec.msgpack.Encoder().encode
        self._decode = msgspec.msgpack.Decoder(ToApi).decode
        self._socket: zmq.asyncio.Socket | None = None
        self._reader: asyncio.Task[None] | None = None
        self._silence = Silence()
        self.ready: Ready | None = None
        self.up = False
        self.failure: str | None = None
        self.news: EngineNews | None = None
        self.closing = False
        self.stats: EngineStats | None = None
        self.state = EngineState()
        self._serials = itertools.count()
        self._asked: dict[int, asyncio.Future[Controlled]] = {}

    @property
    def in_flight(self) -> int:
        """Samples that have not ended."""
        return len(self._calls)

    @property
    def retry_after(self) -> int:
        """Seconds after which it makes sense to try again, while there is no engine."""
        wait = self.news.retry_after if self.news is not None else 0.0
        return min(max(RETRY_SECONDS, math.ceil(min(wait, MAX_RETRY_SECONDS))), MAX_RETRY_SECONDS)

    def on_news(self, news: EngineNews) -> None:
        """Connect to a core that is ready, or part with one that has ended."""
        self.news = news
        self.disconnect()
        if news.phase in ("starting", "ready"):
            self.failure = None
            if news.phase == "ready":
                self._socket = connect(news.address, self._identity)
                self._reader = asyncio.create_task(self._read(self._socket))
                self._send(Hello())
            return
        self.failure = news.reason
        for asked in self._asked.values():
            if not asked.done():
                asked.set_exception(errors.internal(news.reason))
        for call in self._open_calls():
            if news.phase == "failed" or not call.start_over():
                call.fail(errors.internal(news.reason))

    def disconnect(self) -> None:
        """Drop the connection; the calls stay."""
        self.up = False
        if self._reader is not None:
            self._reader.cancel()
        if self._socket is not None:
            self._socket.close()
        self._socket = self._reader = None

    def submit(self, requests: Sequence[Request], start_over: StartOver | None = None) -> Call:
        """Send the samples of one call; refusals arrive through `Call.next`.

        With `start_over`, nothing of the call reaches its client before its end, so after a restart
        it is sent again also if the engine has begun it.
        """
        call = Call(self.abort, requests, start_over)
        call.epoch = self.state.weights_epoch
        if self.closing or not self.up:
            call.open.clear()
            reason = "the server is shutting down" if self.closing else self.failure
            reason = reason or "the engine is restarting"
            call.fail(errors.unavailable(reason, self.retry_after))
            return call
        for request in requests:
            self._calls[request.request_id] = call
        self._send(add(requests))
        return call

    async def control(self, action: str, **fields: Any) -> Controlled:
        """Have the engine do what an operator asks, see wire.Control; ApiError if it doesn't."""
        if not self.up:
            raise errors.unavailable(self.failure or "the engine is restarting", self.retry_after)
        serial = next(self._serials)
        asked = self._asked[serial] = asyncio.get_running_loop().create_future()
        try:
            self._send(Control(serial, action, **fields))
            done = await asked
        finally:
            del self._asked[serial]
        if done.kind == "busy":
            raise errors.conflict(done.message)
        if done.kind:
            make = errors.invalid if done.kind == "invalid" else errors.internal
            raise make(done.message)
        return done

    def abort(self, request_ids: list[str]) -> None:
        """Stop samples; their later events are dropped."""
        for request_id in request_ids:
            self._calls.pop(request_id, None)
        self._send(Abort(request_ids))

    def fail_all(self, error: ApiError) -> None:
        """End every call with `error`."""
        for call in self._open_calls():
            call.fail(error)

    def stuck_for(self) -> float:
        """Seconds that the loaded core has said nothing, a compile's time allowed for.

        0.0 while something it has said lies unread: then this process was the slow one.
        """
        if not self.up or self._socket is None or int(self._socket.get(zmq.EVENTS)) & zmq.POLLIN:
            return 0.0
        return self._silence.seconds()

    def _open_calls(self) -> list[Call]:
        return list(dict.fromkeys(self._calls.values()))

    def _send(self, message: ToCore) -> None:
        # zmq queues without blocking (no high-water mark), so there is nothing to wait for.
        if self._socket is not None:
            self._socket.send(self._encode(message), zmq.NOBLOCK)

    async def _read(self, socket: zmq.asyncio.Socket) -> None:
        """Take what has arrived, up to EVENTS_A_TURN events, then let each call have its own.

        A bug in that fails the calls that are open: a reader that ended would leave them and all
        later ones waiting for ever.
        """
        while True:
            touched: dict[Call, None] = {}
            payload: bytes | None = await socket.recv()
            events = 0
            try:
                while payload is not None:
                    events += self._handle(payload, touched)
                    payload = await _next_if_there(socket) if events < EVENTS_A_TURN else None
                for call in touched:
                    call.wake()
            except Exception as error:
                log.exception("the engine's news could not be handed out")
                self.fail_all(errors.internal(f"internal error: {type(error).__name__}"))
            await asyncio.sleep(0)

    def _handle(self, payload: bytes, touched: dict[Call, None]) -> int:
        """Take one message; the number of its events, whose calls are added to `touched`."""
        try:
            message = self._decode(payload)
        except msgspec.DecodeError:
            log.error("undecodable message of %d bytes from the engine", len(payload))
            self.fail_all(errors.internal("the engine sent what can't be read"))
            return 0
        self._silence.heard(message)
        match message:
            case Events():
                self._deliver(message, touched)
                return len(message.events)
            case Rejected():
                self._reject(message)
            case Ready():
                self._on_ready(message)
            case EngineState():
                self.state = message
            case Controlled():
                asked = self._asked.get(message.serial)
                if asked is not None and not asked.done():
                    asked.set_result(message)
            case _:  # Compiling has been heard; of Fatal the supervisor tells
                pass
        return 0

    def _on_ready(self, message: Ready) -> None:
        self.ready = message
        self.up = True
        for call in self._open_calls():
            self._send(add(call.requests))

    def _deliver(self, message: Events, touched: dict[Call, None]) -> None:
        if message.stats is not None:
            self.stats = message.stats
        for event in message.events:
            call = self._calls.get(event.request_id)
            if call is None:
                continue
            if event.finish_reason is not None:
                del self._calls[event.request_id]
            if not call.begun:
                call.begin(self.state.weights_epoch)
            call.put(event)
            touched[call] = None

    def _reject(self, message: Rejected) -> None:
        if not message.request_ids:
            for call in self._open_calls():
                if not call.begun:
                    call.fail(_refusal(message))
        for request_id in message.request_ids:
            call = self._calls.pop(request_id, None)
            if call is not None:
                call.open.clear()
                call.fail(_refusal(message))


async def _next_if_there(socket: zmq.asyncio.Socket) -> bytes | None:
    """The next message if it has arrived; waits for nothing."""
    try:
        return await socket.recv(zmq.NOBLOCK)
    except zmq.Again:
        return None


def _refusal(message: Rejected) -> ApiError:
    if message.reason == "full":
        return errors.overloaded(message.message, message.retry_after)
    if message.reason == "invalid":
        return errors.invalid(message.message)
    return errors.internal(message.message)
