"""Which requests can run at all, and how fast those that wait get their turn. No jax, no clock."""

from math import exp

from octavo.cache.blocks import pages_for
from octavo.serve.request_state import longest_sequence
from octavo.serve.scheduler_config import SchedulerConfig
from octavo.serve.types import Request

MEMORY_SECONDS = 10.0
"""Busy time after which a measurement of the prefill rate counts 1/e."""


def refuse_if_impossible(request: Request, config: SchedulerConfig, pages_total: int) -> None:
    """ValueError for a request that could never run: no prompt, or more than context or pool."""
    prompt, most = len(request.prompt), request.params.max_tokens
    if not prompt:
        raise ValueError("the prompt is empty; it needs at least one token")
    if most is None:
        raise ValueError("max_tokens is None; admission must resolve it")
    asked = f"prompt of {prompt} tokens + max_tokens {most}"
    if prompt + most > config.max_model_len:
        raise ValueError(
            f"{asked} = {prompt + most} exceed the context of {config.max_model_len} tokens"
        )
    pages = pages_for(longest_sequence(request), config.page_size)
    if pages > pages_total:
        room = f"{pages_total} of {config.page_size} tokens"
        raise ValueError(f"{asked} need {pages} pages; the cache has {room}")


class PrefillRate:
    """Prompt tokens computed a second, over the time in which prompts wait to be computed.

    Decode steps and full pools count against it, so tokens / rate is the time that a queue of so
    many tokens takes to drain as things went lately. Old measurements fade with busy time alone.
    """

    def __init__(self) -> None:
        self._tokens = 0.0
        self._seconds = 0.0
        self._since: float | None = None
        self._scheduled = 0

    def note(self, now: float, scheduled: int, *, waiting: bool) -> None:
        """A step is dispatched at `now` (s) with `scheduled` prompt tokens.

        `waiting`: more prompts wait. The time to the next call is then measured.
        """
        if self._since is not None:
            seconds = max(now - self._since, 0.0)
            kept = exp(-seconds / MEMORY_SECONDS)
            self._seconds = self._seconds * kept + seconds
            self._tokens = self._tokens * kept + self._scheduled
        self._since = now if scheduled or waiting else None
        self._scheduled = scheduled

    def seconds(self, tokens: int) -> float | None:
        """Time to compute `tokens` prompt tokens; None before anything was measured.

        Infinite when prompts have waited and none was computed.
        """
        if self._seconds <= 0.0:
            return None
        if self._tokens <= 0.0:
            return float("inf") if tokens else 0.0
        return tokens * self._seconds / self._tokens
