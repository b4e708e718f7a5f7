"""The bounded waiting queue, ordered by rank. No jax."""

from bisect import bisect_left, insort
from collections.abc import Callable, Iterator

from octavo.serve.admission import PrefillRate
from octavo.serve.request_state import RequestState, rank_of
from octavo.serve.scheduler_config import SchedulerConfig

BOUNDS = ("count", "tokens", "wait")
MIN_RETRY_SECONDS = 1.0
MAX_RETRY_SECONDS = 60.0


class QueueFull(RuntimeError):
    """The waiting queue is at a bound; the caller should try again later.

    Attributes:
        retry_after: seconds until there should be room.
    """

    def __init__(self, message: str, retry_after: float = MIN_RETRY_SECONDS) -> None:
        super().__init__(message)
        self.retry_after = retry_after


class WaitingQueue:
    """Requests without a row, lowest rank first, beside those that are held back for now.

    The bounds hold for newcomers, held ones included; a preempted request always finds its place
    again, so does one that an engine before this one has let in, and a request is never refused
    for its tokens or its wait when nobody else waits.

    Attributes:
        tokens: prompt tokens of those who wait.
        rate: how fast prompts are computed.
        refused: newcomers refused, by the bound that did it: "count", "tokens" or "wait".
    """

    def __init__(self, config: SchedulerConfig) -> None:
        self._config = config
        self._states: list[RequestState] = []
        self._held: dict[str, RequestState] = {}
        self.tokens = 0
        self.rate = PrefillRate()
        self.refused: dict[str, int] = dict.fromkeys(BOUNDS, 0)

    def __len__(self) -> int:
        return len(self._states) + len(self._held)

    def __bool__(self) -> bool:
        """Whether there is a request to admit."""
        return bool(self._states)

    def __iter__(self) -> Iterator[RequestState]:
        yield from self._states
        yield from self._held.values()

    def next(self, *, begun: bool = False) -> RequestState | None:
        """The request to admit next, if there is one; of those that had a row before if `begun`."""
        states = (state for state in self._states if state.admissions or not begun)
        return next(states, None)

    @property
    def first(self) -> RequestState:
        """The request to admit next."""
        return self._states[0]

    def refuse_if_full(self, newcomer: RequestState, uncomputed: Callable[[], int]) -> None:
        """Raise QueueFull when a newcomer has no place.

        `uncomputed` counts the prompt tokens that running rows have yet to compute.
        """
        config, count = self._config, len(self)
        if count >= config.max_waiting:
            text = f"{count} requests are waiting, the bound is {config.max_waiting}"
            raise self._full("count", text, next(iter(self)).prompt_len)
        if not count:
            return
        excess = self.tokens + newcomer.prompt_len - config.max_waiting_tokens
        if config.max_waiting_tokens and excess > 0:
            text = (
                f"{self.tokens} prompt tokens are waiting and this prompt has "
                f"{newcomer.prompt_len}, the bound is {config.max_waiting_tokens}"
            )
            raise self._full("tokens", text, excess)
        if config.max_estimated_wait:
            self._refuse_long_wait(newcomer, uncomputed())

    def estimated_wait(self, uncomputed: int) -> float:
        """Seconds until all that wait now are computed; 0 when nobody waits or nothing is known."""
        return (self.rate.seconds(uncomputed + self.tokens) or 0.0) if self._states else 0.0

    def _refuse_long_wait(self, newcomer: RequestState, uncomputed: int) -> None:
        most = self._config.max_estimated_wait
        wait = self.rate.seconds(uncomputed + self.tokens)
        if wait is None or wait <= most:
            return
        before = self._states[: bisect_left(self._states, newcomer.rank, key=rank_of)]
        ahead = uncomputed + sum(state.prompt_len for state in before)
        wait = self.rate.seconds(ahead)
        if before and wait is not None and wait > most:
            text = f"the wait would be about {wait:.3g} s, the bound is {most:g} s"
            raise self._full("wait", text, max(1, int(ahead * (1 - most / wait))))

    def _full(self, bound: str, text: str, excess: int) -> QueueFull:
        """The refusal; it lasts for about as long as `excess` tokens take to compute."""
        self.refused[bound] += 1
        seconds = self.rate.seconds(excess) or 0.0
        return QueueFull(text, min(max(seconds, MIN_RETRY_SECONDS), MAX_RETRY_SECONDS))

    def push(self, state: RequestState) -> None:
        """Put a request in its place."""
        insort(self._states, state, key=rank_of)
        self.tokens += state.prompt_len

    def hold(self, state: RequestState) -> None:
        """Keep a request from being admitted until `release`."""
        self._held[state.request_id] = state
        self.tokens += state.prompt_len

    def release(self, request_id: str) -> None:
        """Put a held request in its place."""
        state = self._held.pop(request_id)
        self.tokens -= state.prompt_len
        self.push(state)

    def remove(self, state: RequestState) -> None:
        """Take a request out, held or not."""
        if self._held.pop(state.request_id, None) is not None:
            self.tokens -= state.prompt_len
            return
        index = bisect_left(self._states, state.rank, key=rank_of)
        if index == len(self._states) or self._states[index] is not state:
            raise ValueError(f"request {state.request.request_id!r} is not waiting")
        del self._states[index]
        self.tokens -= state.prompt_len
