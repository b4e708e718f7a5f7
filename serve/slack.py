"""How long the next dispatch may be put off while the device has enough to do. No jax, no clock.

A dispatch made as soon as the one before it starts would fix who is in it a whole step too early:
whoever arrives meanwhile waits for both. Made just before the device runs dry it takes them along.
"""

from collections import deque
from collections.abc import Hashable


class Window:
    """The latest measurements of something, and what nine in ten of them are not below or above.

    A mean with its deviation would widen for tens of steps after every hiccup (a collection, a
    neighbour's interrupt), and each step put off by less lets fewer newcomers in.
    """

    LENGTH, RARE, FEWEST = 32, 10, 4
    """Kept; one in RARE may lie outside on either side; fewer than FEWEST say nothing."""

    def __init__(self) -> None:
        self._latest: deque[float] = deque(maxlen=self.LENGTH)
        self._sorted: list[float] = []

    def note(self, value: float) -> None:
        """Take a measurement."""
        self._latest.append(value)
        self._sorted = sorted(self._latest)

    def bounds(self) -> tuple[float, float] | None:
        """The least and the most that is usual; None while too little is known."""
        count = len(self._sorted)
        if count < self.FEWEST:
            return None
        rare = count // self.RARE
        return self._sorted[rare], self._sorted[-1 - rare]


class DispatchSlack:
    """Learns how long dispatches keep the device, and how long one takes to make.

    The latter by whether it holds prompts, whose many launches take longer. Of both what is usual
    counts, to the safe side. A device that has run dry because a dispatch was put off makes a
    further margin grow, which shrinks with each that was in time.
    """

    LEAST_MARGIN, MOST_MARGIN = 0.0003, 0.003
    GROW, SHRINK = 1.5, 0.98

    def __init__(self) -> None:
        self._device: dict[Hashable, Window] = {}
        self._host = {False: Window(), True: Window()}
        self._margin = self.LEAST_MARGIN
        self._put_off = False

    def dispatched(self, host_seconds: float, *, prompts: bool, late: bool) -> None:
        """A dispatch, with `prompts` or not, took so long to make behind another one.

        `late` if the device had nothing left by then.
        """
        self._host[prompts].note(host_seconds)
        if self._put_off:
            self._margin *= self.GROW if late else self.SHRINK
            self._margin = min(max(self._margin, self.LEAST_MARGIN), self.MOST_MARGIN)
        self._put_off = False

    def answered(self, kind: Hashable, seconds: float, *, awaited: bool) -> None:
        """A dispatch of this kind kept the device so long, or less if it wasn't `awaited`.

        What had ended before anybody looked says nothing of how long the next one may be put off:
        each would be put off, and looked at, later than the one before.
        """
        window = self._device.setdefault(kind, Window())
        usual = window.bounds()
        if awaited or (usual is not None and seconds < usual[0]):
            window.note(seconds)

    def left(self, kind: Hashable, since: float, now: float, *, prompts: bool) -> float:
        """Seconds from `now` that a dispatch after one of this kind may be put off.

        `since` is when the device began with the latter, `prompts` what the former will hold. 0
        where nothing is known.
        """
        device, host = self._device.get(kind), self._host[prompts].bounds()
        usual = device.bounds() if device else None
        if usual is None or host is None:
            return 0.0
        left = max(0.0, since + usual[0] - host[1] - self._margin - now)
        self._put_off |= left > 0
        return left
