"""How many decode steps a dispatch may hold while requests may arrive. No jax, no clock."""

SERVING_DECODE_WAIT = 0.004
"""Seconds that multi-step decode may add to a newcomer's wait in a server."""


class DecodePace:
    """Chooses the steps of a multi-step dispatch from the measured time of a decode step.

    A request that arrives finds up to two dispatches on the device (one running, one queued under
    overlap) instead of two single steps, so k steps each make it wait 2 * (k - 1) steps longer.
    The choice keeps that within `limit` seconds; None is no limit. A dispatch's tokens come
    together, so its steps also stay within `gap` seconds, the longest gap between tokens.
    """

    WEIGHT = 0.2
    """Share of the newest measurement in the running mean of a step's seconds."""

    def __init__(self, limit: float | None, max_steps: int, gap: float | None = None) -> None:
        self._limit, self._max_steps, self._gap = limit, max_steps, gap
        self._step_seconds: float | None = None

    def steps(self) -> int:
        """Steps the next dispatch may hold; 1 until a step has been measured."""
        if self._limit is None and self._gap is None:
            return self._max_steps
        if self._step_seconds is None:
            return 1
        most = self._max_steps
        if self._limit is not None:
            most = min(most, 1 + int(self._limit / 2 / self._step_seconds))
        if self._gap is not None:
            most = min(most, max(1, int(self._gap / self._step_seconds)))
        return most

    def note(self, seconds: float, steps: int) -> None:
        """Take the time that a dispatch of `steps` decode steps kept the device."""
        measured = max(seconds, 1e-6) / steps
        if self._step_seconds is None:
            self._step_seconds = measured
        self._step_seconds += self.WEIGHT * (measured - self._step_seconds)
