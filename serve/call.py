"""One call to the engine: its samples' events as they come, for one reader."""

import asyncio
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace

from octavo.serve import errors
from octavo.serve.types import Request, TokenEvent

MAX_UNREAD_TOKENS = 8192
"""Tokens of a sample that may wait for a client which doesn't read."""

TAKE_EVENTS = 512
"""Events that a reader gets at once: a few milliseconds of work, then it is the others' turn."""

type Taker = Callable[[list[TokenEvent]], list[TokenEvent] | None]
"""Takes events as they arrive. None: all taken, on with the next; else those that are left."""

type StartOver = Callable[[Collection[str]], None]
"""Told of samples that begin anew: what has come of them counts no more."""


class Call:
    """The samples of one HTTP request: their events in order, from one place.

    Attributes:
        requests: what was asked, or of it what is to be sent again after a restart.
        open: ids of the samples that have not ended.
        begun: the engine has sent news of it.
        epoch: of the weights that answer it; known once it has begun.
        retried: it was sent again once already.
    """

    __slots__ = (
        "_abort",
        "_error",
        "_events",
        "_kept",
        "_room",
        "_start_over",
        "_taker",
        "_waiter",
        "begun",
        "epoch",
        "open",
        "requests",
        "retried",
    )

    def __init__(
        self,
        abort: Callable[[list[str]], None],
        requests: Sequence[Request],
        start_over: StartOver | None = None,
    ) -> None:
        self._abort = abort
        self._start_over = start_over
        self._kept = False
        self._error: Exception | None = None
        self._events: list[TokenEvent] = []
        self._room = MAX_UNREAD_TOKENS * len(requests)
        self._taker: Taker | None = None
        self._waiter: asyncio.Future[None] | None = None
        self.requests = tuple(requests)
        self.open = {request.request_id for request in requests}
        self.begun = False
        self.epoch = 0
        self.retried = False

    async def next(self, taker: Taker | None = None) -> list[TokenEvent]:
        """The oldest events not taken yet, 1 .. TAKE_EVENTS; raises what `fail` was given.

        With a taker, events that arrive while this waits go to it, which saves waking a task for
        each token, until it leaves some or none. What it raises, this raises.
        """
        if len(self._events) > TAKE_EVENTS:  # a reader that was held up must not hold up others
            await asyncio.sleep(0)
        if not self._events and self._error is None:
            self._taker = taker
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            finally:
                self._taker = self._waiter = None
        if self._error is not None:
            raise self._error
        events, self._events = self._events[:TAKE_EVENTS], self._events[TAKE_EVENTS:]
        return events

    def begin(self, epoch: int) -> None:
        """The engine has the first news, by the weights of `epoch`."""
        self.begun = True
        if self._kept and epoch != self.epoch:
            self.fail(errors.internal("the weights were replaced between the samples"))
        self.epoch = epoch

    def start_over(self) -> bool:
        """Be as before the first news, for an engine that knows nothing of it, but once only.

        False if it can't: its client may have seen some of it. Samples that have ended stay, as
        long as the others come of the same weights.
        """
        if self.retried or (self.begun and self._start_over is None):
            return False
        again = [request for request in self.requests if request.request_id in self.open]
        self._kept = len(again) < len(self.requests)
        self.requests = tuple(replace(request, readmitted=True) for request in again)
        self._events = [event for event in self._events if event.request_id not in self.open]
        if self._start_over is not None:
            self._start_over(self.open)
        self.begun, self.retried = False, True
        return True

    def put(self, event: TokenEvent) -> None:
        """Append an event; the reader wakes the call once a message."""
        self._events.append(event)
        if event.finish_reason is not None:
            self.open.discard(event.request_id)
        elif len(self._events) > self._room:
            self.fail(errors.reads_too_slowly(self._room))

    def wake(self) -> None:
        """Hand the events to the taker, or let `next` return."""
        if self._waiter is None or self._waiter.done():
            return
        if self._taker is not None and self._events:
            events, self._events = self._events, []
            try:
                left = self._taker(events)
            except Exception as error:
                self.fail(error)
                return
            if left is None:
                return
            self._events = left
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
        self._abort([request_id])

    def close(self) -> None:
        """Abort whatever still runs."""
        if self.open:
            self._abort(list(self.open))
            self.open.clear()
