"""The engine core process: one thread that receives, steps and sends.

Its supervisor writes a pickled CoreSpec to its standard input and keeps that pipe open; end of file
means that the supervisor is gone, and the core exits. Requests and events cross by zmq (`wire.py`):
the core binds a ROUTER socket, the supervisor and every API process connect a DEALER.
"""

import gc
import importlib
import logging
import pickle
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import zmq

from octavo.serve import logs
from octavo.serve.child import follow_parent
from octavo.serve.control import Controls
from octavo.serve.core_engine import CoreEngine
from octavo.serve.handover import leave
from octavo.serve.queue import QueueFull
from octavo.serve.types import FINISH_ABORT, TokenEvent
from octavo.serve.wire import (
    SUPERVISOR,
    Abort,
    Add,
    Compiling,
    Control,
    Controlled,
    EngineState,
    Events,
    Fatal,
    Gone,
    Hello,
    Ready,
    Rejected,
    Shutdown,
    ToApi,
    ToCore,
    requests_of,
)

EXIT_FAILED = 1
STATS_PERIOD = 0.25
IDLE_POLL_MS = 250
CONTROL_POLL_MS = 5
# How long a core that can't start waits for its supervisor to connect and hear why.
LAST_WORDS_MS = 10_000
MESSAGES_PER_TURN = 1024
NAP = 0.0001
"""Seconds between looks at what has arrived in the last millisecond before a dispatch."""
# A step that raises fails the requests in flight; this many in a row mean the engine is broken.
MAX_STEP_FAILURES = 3

log = logging.getLogger("octavo.core")


@dataclass(frozen=True)
class CoreSpec:
    """How to start a core: where to listen, in a folder of the parent's own, and what to build.

    `factory` is an importable "module:attribute" called with `config`; `weights` says which ones
    these are, if a former life has loaded others than it began with, and `handover` is where this
    one writes the same (`handover.py`).
    """

    address: str
    factory: str
    config: Any
    handover: Path
    log_level: str = "info"
    weights: EngineState = field(default_factory=EngineState)


class CoreLoop:
    """Serves one engine on one ROUTER socket until told to stop."""

    def __init__(
        self,
        engine: CoreEngine,
        socket: zmq.Socket[bytes],
        weights: EngineState | None = None,
        handover: Path | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._engine = engine
        self._socket = socket
        self._handover, self._clock = handover, clock
        self._encode = msgspec.msgpack.Encoder().encode
        self._decode = msgspec.msgpack.Decoder(ToCore).decode
        self._owners: dict[str, bytes] = {}
        self._clients: set[bytes] = set()
        self._gone: set[bytes] = set()
        self._step_failures = 0
        self._stats_due = 0.0
        self._stopping = False
        engine.on_compile(lambda: self.broadcast(Compiling()))
        self._controls = Controls(
            engine,
            weights or EngineState(),
            answer=self._answer_order,
            tell=self._tell_state,
            abort_all=self._abort_all,
            excuse=lambda: self.broadcast(Compiling()),
        )

    def run(self) -> int:
        """Loop until Shutdown (0) or until the engine keeps failing (1)."""
        while not self._stopping:
            busy = self._engine.has_work()
            idle = CONTROL_POLL_MS if self._controls.busy else IDLE_POLL_MS
            self.receive(0 if busy else idle)
            self.await_newcomers()
            busy = self._engine.has_work() or busy  # what came may end in the step that begins it
            if self._engine.has_work() and not self.step():
                return EXIT_FAILED
            if not self.control():
                return EXIT_FAILED
            came_to_rest = busy and not self._engine.has_work()
            if came_to_rest or self._clock() >= self._stats_due:
                self._send_stats()
        return 0

    def receive(self, timeout_ms: int) -> None:
        """Handle what has arrived; wait at most `timeout_ms` for the first message."""
        if not self._socket.poll(timeout_ms):
            return
        for _ in range(MESSAGES_PER_TURN):
            try:
                identity, *frames = self._socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            self._handle(identity, b"".join(frames))

    def await_newcomers(self) -> None:
        """Take what arrives while the device has enough to do: it goes with the next dispatch."""
        while not self._stopping and (slack := self._engine.slack()) > NAP:
            wait_ms = int(slack * 1000)
            self.receive(wait_ms)
            if not wait_ms:  # zmq's waits are of whole milliseconds, of a step that takes a few
                time.sleep(NAP)

    def step(self) -> bool:
        """One engine step, its events sent; False when the engine is beyond use."""
        try:
            events = self._engine.step()
        except Exception as error:
            log.exception("engine step failed")
            self._step_failures += 1
            if self._recover(f"the engine failed: {type(error).__name__}: {error}"):
                return True
            self.broadcast(Fatal(f"engine steps keep failing; the last: {error}"))
            return False
        self._step_failures = 0
        self._route(events)
        return True

    def control(self) -> bool:
        """Go on with what operators have asked for; False when it has cost the engine."""
        try:
            self._controls.advance()
        except Exception as error:
            log.exception("the weights were lost")
            self.broadcast(Fatal(f"the weights can't be put in place: {error}"))
            return False
        return True

    def broadcast(self, message: ToApi) -> None:
        """Send to every API process."""
        for identity in self._clients:
            self._send(identity, message)

    def _handle(self, identity: bytes, payload: bytes) -> None:
        if identity in self._gone:
            return
        try:
            message = self._decode(payload)
        except msgspec.DecodeError as error:
            log.error("undecodable message of %d bytes: %s", len(payload), error)
            self._send(identity, Rejected([], "error", "the engine could not read the request"))
            return
        match message:
            case Add():
                self._add(identity, message)
            case Abort():
                for request_id in message.request_ids:
                    self._abort(request_id)
            case Gone():
                self._forget(message.identity)
            case Hello():
                self._clients.add(identity)
                self._send_stats()
                self._send(identity, self._controls.state)  # known before anything is served
                self._send(identity, self._ready())
            case Control():
                self._controls.take(identity, message)
            case Shutdown():
                self._stopping = True

    def _ready(self) -> Ready:
        engine = self._engine
        return Ready(
            max_model_len=engine.max_model_len,
            vocab_size=engine.model_config.vocab_size,
            eos_ids=tuple(engine.eos_ids),
            generation=dict(engine.generation),
        )

    def _add(self, identity: bytes, message: Add) -> None:
        reason, text, retry_after = "", "", 1.0
        try:
            requests = requests_of(message)
        except ValueError as error:
            log.error("an inconsistent Add was refused: %s", error)
            ids = [request.request_id for request in message.requests]
            self._send(identity, Rejected(ids, "error", str(error)))
            return
        for request in requests:
            try:
                self._engine.add(request)
            except QueueFull as error:
                reason, text, retry_after = "full", str(error), error.retry_after
            except ValueError as error:
                reason, text = "invalid", str(error)
            except Exception as error:
                log.exception("engine refused %s", request.request_id)
                reason, text = "error", f"{type(error).__name__}: {error}"
            if reason:
                break
            self._owners[request.request_id] = identity
        if not reason:
            return
        for request in requests:
            self._abort(request.request_id)
        self._send(identity, Rejected([r.request_id for r in requests], reason, text, retry_after))

    def _abort(self, request_id: str) -> None:
        if self._owners.pop(request_id, None) is None:
            return
        try:
            self._engine.abort(request_id)
        except Exception:
            log.exception("abort of %s failed", request_id)

    def _abort_all(self) -> None:
        """End every request, in the words of an abort."""
        ended = [TokenEvent(i, finish_reason=FINISH_ABORT) for i in self._owners]
        for event in ended:
            self._engine.abort(event.request_id)
        self._route(ended)

    def _forget(self, identity: bytes) -> None:
        """An API process is gone: nobody reads what its requests make.

        What it has sent may be read after this news of another's; it counts no more.
        """
        self._gone.add(identity)
        self._clients.discard(identity)
        for request_id in [i for i, owner in self._owners.items() if owner == identity]:
            self._abort(request_id)

    def _route(self, events: list[TokenEvent]) -> None:
        """One message an API process; events of aborted requests are dropped."""
        by_owner: dict[bytes, list[TokenEvent]] = {}
        for event in events:
            owner = self._owners.get(event.request_id)
            if owner is None:
                continue
            by_owner.setdefault(owner, []).append(event)
            if event.finish_reason is not None:
                del self._owners[event.request_id]
        for owner, news in by_owner.items():
            self._send(owner, Events(news))

    def _recover(self, reason: str) -> bool:
        """Clean errors for what was running; False when the engine can't be made ready."""
        try:
            self._route(self._engine.recover(reason))
            return self._step_failures < MAX_STEP_FAILURES or self._probe()
        except Exception:
            log.exception("the engine could not recover")
            return False

    def _probe(self) -> bool:
        """Whether the device still computes: then the requests were to blame, not the engine."""
        try:
            self._engine.score([0])
        except Exception:
            log.exception("the engine fails without a request too")
            return False
        self._step_failures = 0
        return True

    def _answer_order(self, identity: bytes, reply: Controlled) -> None:
        """Tell an operator that it is done, after the figures that it has changed."""
        self._send_stats()
        self._send(identity, reply)

    def _tell_state(self, state: EngineState) -> None:
        if self._handover is not None:
            leave(self._handover, state)
        self.broadcast(state)

    def _send_stats(self) -> None:
        self._stats_due = self._clock() + STATS_PERIOD
        self.broadcast(Events(stats=self._engine.stats()))

    def _send(self, identity: bytes, message: ToApi) -> None:
        self._socket.send_multipart([identity, self._encode(message)])


def freeze_loaded() -> None:
    """Once a process is loaded: garbage collections need not look at what is there again.

    Modules and tables are some 80,000 objects in an API process and more in the core, so that a
    full collection took 15 ms and more, in which no stream got a token.
    """
    gc.collect()
    gc.freeze()


def resolve(name: str) -> Any:
    """The object that "package.module:attribute.attribute" names."""
    module, _, path = name.partition(":")
    target: Any = importlib.import_module(module)
    for attribute in path.split("."):
        target = getattr(target, attribute)
    return target


def bind(address: str) -> zmq.Socket[bytes]:
    """The core's ROUTER socket.

    No high-water mark: a full ROUTER queue drops messages, so tokens would vanish. The queue is
    bounded all the same, by the admitted requests times their max_tokens.
    """
    socket = zmq.Context.instance().socket(zmq.ROUTER)
    socket.set(zmq.SNDHWM, 0)
    socket.set(zmq.RCVHWM, 0)
    socket.set(zmq.LINGER, 1000)
    socket.bind(address)
    return socket


def say_last_words(socket: zmq.Socket[bytes], message: str) -> None:
    """Tell the supervisor why there is no engine, once it has connected."""
    while socket.poll(LAST_WORDS_MS):
        if socket.recv_multipart()[0] == SUPERVISOR:
            socket.send_multipart([SUPERVISOR, msgspec.msgpack.encode(Fatal(message))])
            return


def main() -> int:
    """Read the spec from standard input, build the engine, serve."""
    spec: CoreSpec = pickle.load(sys.stdin.buffer)
    follow_parent(spec.address)
    logs.configure(spec.log_level)
    socket = bind(spec.address)
    try:
        engine = resolve(spec.factory)(spec.config)
    except Exception as error:
        log.debug("start failed", exc_info=True)
        say_last_words(socket, f"{type(error).__name__}: {error}")
        socket.close()
        return EXIT_FAILED
    freeze_loaded()
    code = CoreLoop(engine, socket, spec.weights, spec.handover).run()
    socket.close()
    return code


if __name__ == "__main__":
    sys.exit(main())
