"""How often a failing engine may be started again. Pure but for the clock."""

import time
from collections import deque
from collections.abc import Callable

LONGEST_PAUSE = 30.0


class RestartBudget:
    """At most `limit` restarts in any `window` seconds, each after a longer pause than the last.

    The first restart comes at once, then after 1, 2, 4, ... LONGEST_PAUSE seconds. Once the budget
    is spent the breaker is open until the oldest restart leaves the window.
    """

    def __init__(
        self, limit: int, window: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._limit = limit
        self._window = window
        self._clock = clock
        self._recent: deque[float] = deque()

    def spent(self) -> bool:
        """Whether the breaker is open."""
        self._forget()
        return len(self._recent) >= self._limit

    def delay(self) -> float:
        """Seconds until the engine may be started again; infinite when it never may."""
        if self._limit == 0:
            return float("inf")
        self._forget()
        done = len(self._recent)
        pause = min(2.0 ** (done - 1), LONGEST_PAUSE) if done else 0.0
        if done < self._limit:
            return pause
        return max(pause, self._recent[-self._limit] + self._window - self._clock())

    def note(self) -> None:
        """A restart happens now."""
        self._recent.append(self._clock())

    def _forget(self) -> None:
        while self._recent and self._clock() - self._recent[0] >= self._window:
            self._recent.popleft()
