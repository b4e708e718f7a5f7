"""Pause, resume, other weights, an empty prefix cache: orders to a running core. No jax.

One thing at a time, but a pause under way gives way to a resume or another pause. A pause closes
the engine's gate at once and is answered when it has taken effect; weights are read in a thread
while steps go on, and put in place when no request is between its first row and its end.
"""

import logging
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from octavo.serve.core_engine import CoreEngine, Gate
from octavo.serve.wire import Control, Controlled, EngineState

_OVER_A_PAUSE = ("pause", "resume")
"""Orders that a pause under way gives way to."""

log = logging.getLogger("octavo.core")


@dataclass
class _Job:
    """What is under way, and who waits for it. `staged`: weights being read."""

    identity: bytes
    message: Control
    staged: Future[Any] | None = None
    closed: bool = False


class Controls:
    """The state of one core, whose engine has `weights`.

    `answer` sends a reply, `tell` the new state to everybody, `abort_all` ends every request,
    `excuse` tells that the core will be silent.
    """

    def __init__(
        self,
        engine: CoreEngine,
        weights: EngineState,
        *,
        answer: Callable[[bytes, Controlled], None],
        tell: Callable[[EngineState], None],
        abort_all: Callable[[], None],
        excuse: Callable[[], None],
    ) -> None:
        self._engine = engine
        self._answer, self._tell = answer, tell
        self._abort_all, self._excuse = abort_all, excuse
        self._paused_gate: Gate | None = None
        self._model = weights.model
        engine.weights_epoch = weights.weights_epoch
        self._job: _Job | None = None
        self._reader = ThreadPoolExecutor(1, thread_name_prefix="weights")

    @property
    def busy(self) -> bool:
        """Whether something is under way."""
        return self._job is not None

    @property
    def state(self) -> EngineState:
        """What everybody is told."""
        paused = self._paused_gate is not None
        return EngineState(paused, self._engine.weights_epoch, self._model)

    def take(self, identity: bytes, message: Control) -> None:
        """Begin what `message` asks for, or refuse it."""
        self._give_way(message)
        if self._job is not None:
            text = f"{self._job.message.action} is under way"
            self._answer(identity, Controlled(message.serial, "busy", text))
            return
        frozen = self._engine.gate == "shut" and self._engine.begun
        if message.action == "reload" and frozen:
            text = "requests are frozen: resume, or pause with another mode, before a reload"
            self._answer(identity, Controlled(message.serial, "busy", text))
            return
        self._job = _Job(identity, message)
        log.info("%s %s", message.action, message.mode or message.model)
        match message.action:
            case "pause":
                self._pause(message.mode)
            case "resume":
                self._paused_gate, self._engine.gate = None, "open"
                self._end()
            case "forget":
                self._engine.forget_prefixes()
                self._end()
            case "reload":
                self._job.staged = self._reader.submit(self._engine.stage, message.model)

    def _give_way(self, message: Control) -> None:
        """A pause that still waits for what runs is over when it is ended or another is asked for.

        What runs may never end by itself.
        """
        job = self._job
        if job is not None and job.message.action == "pause" and message.action in _OVER_A_PAUSE:
            text = f"a {message.action} came before the pause had taken effect"
            self._job = None
            self._answer(job.identity, Controlled(job.message.serial, "busy", text))

    def advance(self) -> None:
        """Go on with what is under way, as far as it can without waiting."""
        job = self._job
        if job is None:
            return
        if job.staged is not None:
            self._advance_reload(job, job.staged)
        elif not self._engine.has_work():
            if job.message.clear_cache:
                self._engine.forget_prefixes()
            self._end()

    def _pause(self, mode: str) -> None:
        self._paused_gate = self._engine.gate = "shut" if mode == "keep" else "closing"
        self._tell(self.state)
        if mode == "abort":
            self._abort_all()

    def _advance_reload(self, job: _Job, staged: Future[Any]) -> None:
        if not staged.done():
            return
        error = staged.exception()
        if error is not None:
            kind = "invalid" if isinstance(error, ValueError | OSError) else "error"
            log.error("the weights were not replaced: %s", error)
            self._end(kind, str(error) or type(error).__name__)
            return
        if not job.closed:
            job.closed, self._engine.gate = True, "closing"
            if job.message.mode == "abort":
                self._abort_all()
        if self._engine.begun:
            return
        self._excuse()
        self._engine.swap(staged.result())
        self._model = job.message.model or self._model
        self._engine.gate = self._paused_gate or "open"
        self._end()

    def _end(self, kind: str = "", text: str = "") -> None:
        job, self._job = self._job, None
        assert job is not None
        self._tell(self.state)
        reply = Controlled(job.message.serial, kind, text, self._engine.weights_epoch)
        self._answer(job.identity, reply)
