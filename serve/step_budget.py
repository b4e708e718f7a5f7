"""How many prompt tokens a step may hold beside running requests. No jax, no clock."""

from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Sequence


class StepBudget:
    """Learns what mixed steps cost and keeps them within `limit` seconds.

    A step costs what its token class costs (it is padded to it), so times are kept by class. One
    that was never measured is taken to cost as much as the next larger that was, or as the next
    smaller in proportion, which is too much where a part of the cost is fixed. With nothing
    measured only the smallest is allowed.

    Args:
        limit: seconds that a step may take.
        classes: token counts that steps are padded to, ascending.
    """

    WINDOW = 8
    """Measurements kept of a class. The second largest counts: one hiccup does not."""

    FORGET = 500
    """Mixed steps after which a class that was too slow may be tried again."""

    def __init__(self, limit: float, classes: Sequence[int]) -> None:
        self.limit = limit
        self._classes = tuple(classes)
        self._times: dict[int, deque[float]] = {}
        self._measured_at: dict[int, int] = {}
        self._steps = 0

    def prefill_tokens(self, decode_rows: int, lead: Callable[[], int]) -> int:
        """Prompt tokens for a step with so many decode rows; 0 if even the smallest is too many.

        Without decode rows nobody waits for a token, and the largest class may be filled. With
        them the limit holds whatever their `lead`.
        """
        if decode_rows == 0:
            return self._classes[-1]
        allowed = 0
        for size in self._classes:
            if self._estimate(size) > self.limit:
                break
            allowed = size
        return max(allowed - decode_rows, 0)

    def note(self, tokens: int, seconds: float) -> None:
        """Take the time that a mixed step of so many tokens kept the device."""
        size = self._classes[min(bisect_left(self._classes, tokens), len(self._classes) - 1)]
        self._times.setdefault(size, deque(maxlen=self.WINDOW)).append(seconds)
        self._measured_at[size] = self._steps = self._steps + 1
        for old, when in list(self._measured_at.items()):
            if self._steps - when >= self.FORGET and self._known(old) > self.limit:
                del self._times[old], self._measured_at[old]

    def _known(self, size: int) -> float:
        times = sorted(self._times[size])
        return times[-2] if len(times) > 1 else times[0]

    def _estimate(self, size: int) -> float:
        """Seconds of a step of this class."""
        smaller = max((known for known in self._times if known <= size), default=None)
        larger = min((known for known in self._times if known >= size), default=None)
        if smaller is None and larger is None:
            return 0.0 if size == self._classes[0] else float("inf")
        bounds = [] if larger is None else [self._known(larger)]
        bounds += [] if smaller is None else [self._known(smaller) * size / smaller]
        return min(bounds)
