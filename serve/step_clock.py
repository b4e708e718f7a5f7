"""What the engine's steps cost, from what the host can see. No jax, no clock of its own."""

from collections import deque

from octavo.serve.histogram import Histogram
from octavo.serve.types import ScheduledBatch

STEP_BOUNDS = (0.001, 0.002, 0.004, 0.006, 0.01, 0.015, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 10)
TOKEN_BOUNDS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)


class StepClock:
    """Times between dispatches and answers, which come back in the order of dispatch.

    Attributes:
        seconds: time of one step: what its dispatch kept the device, over the dispatch's steps.
        tokens: tokens that a step computed, padding left out.
        idle_seconds: time with live requests and certainly nothing on the device: from an answer
            with no dispatch behind it until the next dispatch was made. A lower bound of the
            device's idle time: how long ago a dispatch had ended when its answer was read isn't
            known.
        late_dispatches: dispatches made after everything before them had already ended, so that
            the device had run dry.
    """

    def __init__(self) -> None:
        self.seconds = Histogram(STEP_BOUNDS)
        self.tokens = Histogram(TOKEN_BOUNDS)
        self.idle_seconds = 0.0
        self.late_dispatches = 0
        self._dispatched_at: deque[float] = deque()
        self._last_answer = float("-inf")
        self._idle_since: float | None = None

    @property
    def since(self) -> float | None:
        """When the device began, at the earliest, with the oldest unread dispatch."""
        return max(self._dispatched_at[0], self._last_answer) if self._dispatched_at else None

    def dispatched(self, batch: ScheduledBatch, now: float, *, late: bool) -> None:
        """A batch is on the device since `now`; `late` if it had finished what it had before."""
        if self._idle_since is not None:
            self.idle_seconds += now - self._idle_since
            self._idle_since = None
        self.late_dispatches += late
        self._dispatched_at.append(now)
        self.tokens.observe(batch.num_tokens, batch.num_steps)

    def answered(self, batch: ScheduledBatch, now: float) -> float:
        """The oldest batch's answer was read; the seconds that it kept the device."""
        seconds = now - (self.since or now)
        self._dispatched_at.popleft()
        self._last_answer = now
        self.seconds.observe(seconds / batch.num_steps, batch.num_steps)
        return seconds

    def rest(self, now: float, *, live: bool) -> None:
        """Nothing is on the device from `now` on; idle time counts while requests are `live`."""
        self._dispatched_at.clear()
        self._idle_since = now if live else None
