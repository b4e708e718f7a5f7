"""How long the next dispatch may be put off while the device has enough to do. No jax, no clock.

A dispatch made as soon as the one before it starts would fix who is in it a whole step too early:
whoever arrives meanwhile waits for both. Made just before the device runs dry it takes them along.
"""

from collections.abc import Hashable


class Running:
    """A running mean, and how far measurements lie from it (as of Jacobson's round-trip times)."""

    WEIGHT = 0.2

    def __init__(self) -> None:
        self.mean: float | None = None
        self.deviation = 0.0

    def note(self, value: float) -> None:
        """Take a measurement; the first counts for certain by half."""
        if self.mean is None:
            self.mean, self.deviation = value, value / 2
            return
        error = value - self.mean
        self.mean += self.WEIGHT * error
        self.deviation += self.WEIGHT * (abs(error) - self.deviation)


class DispatchSlack:
    """Learns how long dispatches keep the device and how long one takes to make.

    Both are taken with four times their mean deviation to the safe side. A device that has run dry
    because a dispatch was put off makes a further margin grow, which shrinks with each that was in
    time.
    """

    DEVIATIONS = 4
    LEAST_MARGIN, MOST_MARGIN = 0.0003, 0.003
    GROW, SHRINK = 1.5, 0.98

    def __init__(self) -> None:
        self._device: dict[Hashable, Running] = {}
        self._host = Running()
        self._margin = self.LEAST_MARGIN
        self._put_off = False

    def dispatched(self, host_seconds: float, *, late: bool) -> None:
        """A dispatch took so long to make; `late` if the device had nothing left by then."""
        self._host.note(host_seconds)
        if self._put_off:
            self._margin *= self.GROW if late else self.SHRINK
            self._margin = min(max(self._margin, self.LEAST_MARGIN), self.MOST_MARGIN)
        self._put_off = False

    def answered(self, kind: Hashable, seconds: float) -> None:
        """A dispatch of this kind kept the device so long."""
        self._device.setdefault(kind, Running()).note(seconds)

    def left(self, kind: Hashable, since: float, now: float) -> float:
        """Seconds from `now` that the dispatch after one of this kind may be put off.

        `since` is when the device began with the latter. 0 where nothing is known.
        """
        device, host = self._device.get(kind), self._host
        if device is None or device.mean is None or host.mean is None:
            return 0.0
        most = device.mean - self.DEVIATIONS * device.deviation
        lead = host.mean + self.DEVIATIONS * host.deviation + self._margin
        left = max(0.0, since + most - lead - now)
        self._put_off |= left > 0
        return left
