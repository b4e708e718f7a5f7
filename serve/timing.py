"""Where a request's time goes, from its arrival to its last byte. All times in seconds.

The engine reports a sample's queue and prefill time with its first news; the rest is measured where
the client sees it, so no clock is compared between two processes.
"""

import time
from dataclasses import dataclass, field
from typing import Any

from octavo.serve.types import Request, TokenEvent


@dataclass(slots=True)
class SampleTimes:
    """One sample's way through the engine.

    Attributes:
        first, last: monotonic times of its first and its latest news; 0 before the first.
        queue, prefill: seconds it waited for admission, and then for its first token.
        preemptions: times it lost its row.
        prompt_tokens, cached_tokens: their numbers.
        completion_tokens: their number, known at the end.
        measured: tokens whose times are in the metrics, those made before it began anew included.
        max_tokens: tokens it may generate; 0 for one that generates none.
        n: samples that its prompt has, on the first of them; 0 on the others.
        finish_reason: how it ended; None while it runs.
    """

    prompt_tokens: int
    max_tokens: int = 0
    n: int = 0
    first: float = 0.0
    last: float = 0.0
    queue: float = 0.0
    prefill: float = 0.0
    preemptions: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    measured: int = 0
    finish_reason: str | None = None

    def note(self, event: TokenEvent, now: float) -> float:
        """Take news that came at `now`; the seconds since the news before (0 on the first)."""
        if event.waited is not None:
            self.queue, self.prefill = event.waited
        if not self.first:
            self.first = self.last = now
        self.preemptions = max(self.preemptions, event.preemptions)
        self.cached_tokens = max(self.cached_tokens, event.cached_tokens)
        since, self.last = now - self.last, now
        return since

    def start_over(self) -> None:
        """Forget its news: they are to come again."""
        self.first = self.last = 0.0
        self.cached_tokens = 0

    @property
    def decode(self) -> float:
        """Seconds from the first news to the latest."""
        return self.last - self.first


@dataclass(slots=True)
class Visit:
    """One HTTP request.

    Attributes:
        arrived: monotonic time of its arrival.
        request_id: its name in headers and traces; the client's own if it has one.
        key: name of the API key it came with; empty without one.
        client: the key's name, or without one the address it came from.
        samples: those that were submitted to the engine.
    """

    arrived: float = field(default_factory=time.monotonic)
    request_id: str = ""
    key: str = ""
    client: str = ""
    samples: list[SampleTimes] = field(default_factory=list)

    def sample(self, request: Request) -> SampleTimes:
        """One more sample."""
        params, first = request.params, request.sample_index == 0
        times = SampleTimes(len(request.prompt), params.max_tokens or 0, params.n * first)
        self.samples.append(times)
        return times

    def report(self, cached_tokens: int) -> dict[str, Any]:
        """`usage.timing`: milliseconds of the sample that ended last, preemptions of them all.

        host_ms is the rest of the time since arrival: parsing, templates, tokenizing, the hop to
        the engine and back, detokenising.
        """
        total = time.monotonic() - self.arrived
        slowest = max(self.samples, key=lambda sample: sample.last, default=SampleTimes(0))
        inside = (slowest.queue, slowest.prefill, slowest.decode)
        names = ("queue_ms", "prefill_ms", "decode_ms", "host_ms")
        values = (*inside, max(0.0, total - sum(inside)))
        return {
            **{name: round(value * 1e3, 3) for name, value in zip(names, values)},
            "cached_tokens": cached_tokens,
            "preemptions": sum(sample.preemptions for sample in self.samples),
        }
