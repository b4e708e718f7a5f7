"""Counts by bucket, in a form that crosses between processes. No Prometheus, no jax.

Plain lists: prometheus_client's own histograms take a lock and a linear search for each
observation, which a token rate of 12,000/s can feel.
"""

from bisect import bisect_left
from dataclasses import dataclass, field


@dataclass(slots=True)
class Histogram:
    """Observations counted by upper bound. Observing costs one binary search.

    Attributes:
        bounds: inclusive upper bounds, ascending; what is above the last has a bucket of its own.
        counts: observations in each bucket, one more than there are bounds.
        total: sum of what was observed.
    """

    bounds: tuple[float, ...]
    counts: list[int] = field(default_factory=list)
    total: float = 0.0

    def __post_init__(self) -> None:
        if not self.counts:
            self.counts = [0] * (len(self.bounds) + 1)

    def observe(self, value: float, times: int = 1) -> None:
        """Add an observation, or `times` equal ones."""
        self.counts[bisect_left(self.bounds, value)] += times
        self.total += value * times

    def merge(self, other: "Histogram") -> None:
        """Add another's observations, taken with the same bounds."""
        self.counts = [mine + its for mine, its in zip(self.counts, other.counts)]
        self.total += other.total

    def cumulative(self) -> list[tuple[str, float]]:
        """(upper bound as Prometheus writes it, observations up to it) for each bucket."""
        seen, out = 0, []
        for bound, count in zip((*self.bounds, float("inf")), self.counts):
            seen += count
            out.append(("+Inf" if bound == float("inf") else str(float(bound)), float(seen)))
        return out
