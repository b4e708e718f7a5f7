"""The bounded waiting queue, ordered by rank. No jax."""

from bisect import bisect_left, insort
from collections.abc import Iterator

from octavo.serve.request_state import RequestState, rank_of


class QueueFull(RuntimeError):
    """The waiting queue is at its bound; the caller should try again later."""


class WaitingQueue:
    """Requests without a row, lowest rank first.

    The bound holds for newcomers; a preempted request always finds its place again.
    """

    def __init__(self, bound: int) -> None:
        self._bound = bound
        self._states: list[RequestState] = []

    def __len__(self) -> int:
        return len(self._states)

    def __iter__(self) -> Iterator[RequestState]:
        return iter(self._states)

    @property
    def first(self) -> RequestState:
        """The request to admit next."""
        return self._states[0]

    def refuse_if_full(self) -> None:
        """Raise QueueFull when a newcomer has no place."""
        if len(self._states) >= self._bound:
            raise QueueFull(f"{len(self._states)} requests are waiting, the bound is {self._bound}")

    def push(self, state: RequestState) -> None:
        """Put a request in its place."""
        insort(self._states, state, key=rank_of)

    def remove(self, state: RequestState) -> None:
        """Take a request out."""
        index = bisect_left(self._states, state.rank, key=rank_of)
        if index == len(self._states) or self._states[index] is not state:
            raise ValueError(f"request {state.request.request_id!r} is not waiting")
        del self._states[index]
