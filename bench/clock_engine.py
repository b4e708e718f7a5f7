"""An engine that computes nothing and whose tokens say when they were made.

A token's id is the monotonic clock in units of UNIT_SECONDS, modulo STAMPS, behind the bytes of the
vocabulary that `plain_tokenizer` makes. The clock is one for all processes of a machine, so whoever
reads a token's word knows how old it is.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

from octavo.bench.plain_tokenizer import word
from octavo.serve.types import (
    FINISH_ABORT,
    FINISH_ERROR,
    FINISH_LENGTH,
    EngineStats,
    Request,
    TokenEvent,
)

UNIT_SECONDS = 2e-4
STAMPS = 1 << 15
"""The clock's words; ages are known modulo STAMPS * UNIT_SECONDS, 6.5 s."""

FIRST = 256
VOCAB = FIRST + STAMPS


@dataclass(frozen=True)
class ClockConfig:
    """Settings of a ClockEngine, and of the server around it.

    Attributes:
        tokenizer: folder of the tokenizer that `write_tokenizer` made with VOCAB entries.
        period: seconds between steps; 0 steps at once.
    """

    tokenizer: str
    period: float = 0.0
    model: str = "clock"
    max_model_len: int = 8192


@dataclass(slots=True)
class _Row:
    request_id: str
    left: int
    begun: bool = False


def make(config: ClockConfig) -> "ClockEngine":
    """The engine, for the core process."""
    return ClockEngine(config)


class ClockEngine:
    """Gives every request one token a step until max_tokens, whatever else it asks for."""

    eos_ids: tuple[int, ...] = ()

    def __init__(self, config: ClockConfig) -> None:
        self._period = config.period
        self._due = 0.0
        self._rows: dict[str, _Row] = {}
        self._stats = EngineStats(pages_total=1)
        self.max_model_len = config.max_model_len
        self.model_config = SimpleNamespace(vocab_size=VOCAB)
        self.generation: dict[str, Any] = {}
        self.weights_epoch = 0

    def add(self, request: Request) -> None:
        """Take a request of at least one token; ValueError else."""
        if not request.params.max_tokens:
            raise ValueError("max_tokens must be at least 1")
        if not self._rows:
            self._due = time.monotonic()
        self._rows[request.request_id] = _Row(request.request_id, request.params.max_tokens)

    def abort(self, request_id: str) -> None:
        """Stop a request."""
        if self._rows.pop(request_id, None) is not None:
            self._count(FINISH_ABORT)

    def step(self) -> list[TokenEvent]:
        """One token a row, when the step is due; a late step is not followed by a longer wait."""
        if self._period:
            time.sleep(max(0.0, self._due - time.monotonic()))
            self._due += self._period
        self._stats.steps += 1
        self._stats.generated_tokens += len(self._rows)
        ids = (FIRST + stamp(time.monotonic()),)
        return [self._advance(row, ids) for row in list(self._rows.values())]

    def _advance(self, row: _Row, ids: tuple[int, ...]) -> TokenEvent:
        row.left -= 1
        event = TokenEvent(row.request_id, ids)
        if not row.begun:
            row.begun, event.waited = True, (0.0, 0.0)
        if not row.left:
            event.finish_reason = FINISH_LENGTH
            del self._rows[row.request_id]
            self._count(FINISH_LENGTH)
        return event

    def _count(self, reason: str) -> None:
        self._stats.finished[reason] = self._stats.finished.get(reason, 0) + 1

    def has_work(self) -> bool:
        """Whether a request runs."""
        return bool(self._rows)

    def recover(self, reason: str) -> list[TokenEvent]:
        """Fail what runs."""
        ids = list(self._rows)
        self._rows.clear()
        return [TokenEvent(i, finish_reason=FINISH_ERROR, error=reason) for i in ids]

    def score(self, token_ids: Sequence[int]) -> None:
        """Nothing that could fail."""

    def stats(self) -> EngineStats:
        """Counters since start."""
        self._stats.running = len(self._rows)
        return self._stats

    def slack(self) -> float:
        """None: it does not wait for a device."""
        return 0.0

    def on_compile(self, callback: Callable[[], None]) -> None:
        """There is nothing to compile."""


def stamp(seconds: float) -> int:
    """The clock at `seconds` as one of STAMPS."""
    return int(seconds / UNIT_SECONDS) % STAMPS


def ages_of(words: Sequence[bytes], now: float) -> list[float]:
    """Seconds since each of `words` was made, to UNIT_SECONDS; KeyError for any other word."""
    at = now / UNIT_SECONDS
    return [(at - _STAMP_OF[one]) % STAMPS * UNIT_SECONDS for one in words]


_STAMP_OF = {word(i).encode(): i for i in range(STAMPS)}
