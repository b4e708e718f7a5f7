"""One engine and whoever calls it: between calls, threads and interrupts nothing is lost.

Every access has the engine to itself, by a lock and with Ctrl-C held back. A caller that waits for
its news steps the engine, and with that the requests of all others; their news wait in their
mailboxes. What a caller leaves behind, by an exception or an iterator that nobody reads on, may be
found at any moment, by the garbage collector even in the middle of a step: it is noted, and dropped
when the engine is free.
"""

import os
import threading
import weakref
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from octavo.interrupts import Deferral, interrupts_deferred
from octavo.model.checkpoint.source import Checkpoint
from octavo.serve.engine import Engine
from octavo.serve.output import Delta, OutputProcessor, SampleOutput
from octavo.serve.queue import QueueFull
from octavo.serve.types import Request, TokenEvent

TURN_SECONDS = 0.005
"""How long a caller waits for the engine before it looks whether another has brought its news."""

Mailbox = deque[tuple[str, Delta]]
EventMailbox = deque[TokenEvent]


class Driver:
    """The engine's side of `octavo.LLM`."""

    def __init__(self, engine: Engine, outputs: OutputProcessor) -> None:
        self._engine: Engine | None = engine
        self._process = os.getpid()
        self._outputs = outputs
        self._mail: dict[str, Mailbox] = {}
        self._events: dict[str, EventMailbox] = {}
        self._turn = threading.Lock()
        self._left: deque[Iterable[str]] = deque()

    @property
    def engine(self) -> Engine:
        """The engine; RuntimeError once it is closed, and in a fork of its process."""
        self._check_process()
        if self._engine is None:
            raise RuntimeError("this LLM is closed")
        return self._engine

    @property
    def idle(self) -> bool:
        """Whether nobody has a request."""
        return not (self._mail or self._events or self._left)

    @contextmanager
    def alone(self) -> Iterator[Engine]:
        """The engine without another thread or Ctrl-C in between."""
        self._check_process()
        with interrupts_deferred(), self._turn:
            self._forget_left()
            yield self.engine

    def watch(self, owner: object, ids: list[str]) -> None:
        """Drop the requests `ids`, those added to it later too, when `owner` is gone."""
        weakref.finalize(owner, self._left.append, ids).atexit = False

    def submit(self, requests: Iterable[Request], mailbox: Mailbox) -> dict[str, SampleOutput]:
        """Queue requests whose deltas go to `mailbox`; the engine steps while its queue is full.

        No step comes between them but for that. The caller drops their ids, also if this raises.
        """
        waiting, samples = deque(requests), {}
        while True:
            with self.alone() as engine:
                while waiting:
                    request = waiting[0]
                    samples[request.request_id] = self._outputs.add(request, track=True)
                    self._mail[request.request_id] = mailbox
                    try:
                        engine.add(request)
                    except QueueFull:
                        self._outputs.discard(request.request_id)
                        break
                    waiting.popleft()
            if not waiting:
                return samples
            self.advance()

    def submit_plain(self, request: Request, mailbox: EventMailbox) -> None:
        """Queue a request that generates nothing; its last event goes to `mailbox`."""
        while True:
            with self.alone() as engine:
                self._events[request.request_id] = mailbox
                try:
                    return engine.add(request)
                except QueueFull:
                    pass
            self.advance()

    def advance(self) -> None:
        """One engine step, or a moment's wait while another thread makes one."""
        self._check_process()
        with interrupts_deferred() as deferral:
            if not self._turn.acquire(timeout=TURN_SECONDS):
                return
            try:
                self._forget_left()
                self._step(self.engine, deferral)
            finally:
                self._turn.release()

    def drop(self, ids: Iterable[str]) -> None:
        """Forget requests, running or ended; now, or when the engine is free."""
        self._left.append(ids)
        with interrupts_deferred():
            if self._turn.acquire(blocking=False):
                try:
                    self._forget_left()
                finally:
                    self._turn.release()

    def swap(self, staged: Checkpoint) -> int:
        """Put staged weights in place once what runs has ended; their epoch."""
        with self.alone() as engine:
            engine.gate = "closing"
        try:
            while True:
                with self.alone() as engine:
                    if not engine.begun:
                        engine.swap(staged)
                        return engine.weights_epoch
                self.advance()
        finally:
            with self.alone() as engine:
                engine.gate = "open"

    def close(self) -> None:
        """Let go of the engine and all it holds."""
        with interrupts_deferred(), self._turn:
            self._forget_left()
            self._engine = None
            self._mail.clear()
            self._events.clear()

    def _check_process(self) -> None:
        """RuntimeError in a fork: its threads are not there, and locks may be held by such."""
        if os.getpid() != self._process:
            raise RuntimeError("an LLM does not work in a fork: make one in the child process")

    def _step(self, engine: Engine, deferral: Deferral) -> None:
        try:
            with deferral.urgent():
                events = engine.step()
            self._deliver(engine, events)
        except BaseException as error:
            self._deliver(engine, engine.recover(f"{type(error).__name__}: {error}"))
            raise

    def _deliver(self, engine: Engine, events: list[TokenEvent]) -> None:
        for event in events:
            if event.finish_reason is not None and event.request_id in self._events:
                self._events.pop(event.request_id).append(event)
        deltas, aborts = self._outputs.process(events)
        for request_id in aborts:
            engine.abort(request_id)
        for request_id, delta in deltas:
            self._mail[request_id].append((request_id, delta))

    def _forget_left(self) -> None:
        while self._left:
            for request_id in self._left.popleft():
                if self._engine is not None:
                    self._engine.abort(request_id)
                self._outputs.discard(request_id)
                self._mail.pop(request_id, None)
                self._events.pop(request_id, None)
