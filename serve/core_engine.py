"""What the core process needs of an engine. No jax."""

from collections.abc import Callable, Sequence
from typing import Any, Literal, Protocol

from octavo.serve.types import EngineStats, Request, TokenEvent

Gate = Literal["open", "closing", "shut"]
"""Whether every request may go on, those alone that have begun, or none at all."""


class CoreEngine(Protocol):
    """What the core needs of an engine."""

    max_model_len: int
    eos_ids: tuple[int, ...]
    generation: dict[str, Any]
    gate: Gate
    weights_epoch: int

    @property
    def model_config(self) -> Any:
        """At least `vocab_size`."""
        ...

    def add(self, request: Request) -> None:
        """Queue a request; ValueError if it can never run, QueueFull if not now."""
        ...

    def abort(self, request_id: str) -> None:
        """Stop a request."""
        ...

    def slack(self) -> float:
        """Seconds that the next step may wait for who arrives."""
        ...

    def step(self) -> list[TokenEvent]:
        """Advance and report."""
        ...

    def recover(self, reason: str) -> list[TokenEvent]:
        """After a step that raised: fail what was running, keep what waits, be ready again."""
        ...

    def score(self, token_ids: Sequence[int]) -> Any:
        """Logits of a text; run as a probe of the device."""
        ...

    def stats(self) -> EngineStats:
        """Counters since start."""
        ...

    def on_compile(self, callback: Callable[[], None]) -> None:
        """Have `callback` called whenever a step is about to compile a program."""
        ...

    @property
    def begun(self) -> bool:
        """Whether a request is between its first row and its end."""
        ...

    def has_work(self) -> bool:
        """Whether a step would do anything."""
        ...

    def stage(self, model: str) -> Any:
        """Weights in host memory, checked; ValueError if they don't fit. Thread-safe."""
        ...

    def swap(self, staged: Any) -> None:
        """Go on with staged weights."""
        ...

    def forget_prefixes(self) -> None:
        """Share nothing that was computed until now."""
        ...
