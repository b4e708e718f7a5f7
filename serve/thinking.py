"""A bound for reasoning: after so many tokens of it the tag that ends it is drawn. No jax.

Which token that is can be told before its batch is scheduled, up to how the sample begins: `free`
counts the tokens that may be drawn before. Until then and after the end a sample is as any other;
in between the host says, as for a grammar, which token may be drawn.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from octavo.sampling.params import MAX_INT32

if TYPE_CHECKING:
    from octavo.serve.types import ScheduledBatch

NEVER = MAX_INT32


@dataclass(frozen=True, slots=True)
class Thinking:
    """How long a sample may reason: in a block at its start, or one that the prompt has opened.

    Attributes:
        budget: tokens inside the block after which `close` is forced, 0 .. MAX_INT32 (ValueError).
        open, close: ids of the tags.
        opened: the prompt ends inside the block.
        blanks: ids that may stand before `open`.
    """

    budget: int
    open: int
    close: int
    opened: bool = False
    blanks: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if not 0 <= self.budget <= MAX_INT32:
            raise ValueError(f"budget must be in 0 .. {MAX_INT32}, got {self.budget}")


class Reasoning:
    """Where a sample stands in its block, by its committed tokens.

    Attributes:
        free: tokens of the sample that may be drawn before one may have to be `close`; NEVER once
            the block has ended or can't begin any more.
    """

    __slots__ = ("_begun", "_bound", "_count", "free")

    def __init__(self, bound: Thinking) -> None:
        self._bound = bound
        self._count = 0
        self._begun = bound.opened
        self.free = bound.budget if bound.opened else bound.budget + 1

    @property
    def due(self) -> int | None:
        """The token that has to be drawn next, None if any may."""
        return self._bound.close if self._begun and self._count >= self.free else None

    def take(self, tokens: Sequence[int]) -> None:
        """Follow committed tokens."""
        for token in tokens:
            if self.free == NEVER:
                return
            self._count += 1
            self._take(token)

    def _take(self, token: int) -> None:
        bound = self._bound
        if self._begun:
            if token == bound.close:
                self.free = NEVER
        elif token == bound.open:
            self._begun = True
            self.free = self._count + bound.budget
        elif token in bound.blanks:
            self.free = self._count + 1 + bound.budget
        else:
            self.free = NEVER


def may_close(batch: "ScheduledBatch") -> bool:
    """Whether some row's token may have to end its reasoning."""
    return any(row.reasoning is not None for row in batch.rows)


def close_due(batch: "ScheduledBatch", mask: np.ndarray) -> None:
    """Let rows whose reasoning is at its bound draw nothing else than its end.

    `mask` u32[rows, words], see SamplingBatch.mask; every batch before this one is committed.
    """
    for index, row in enumerate(batch.rows):
        token = row.reasoning.due if row.reasoning is not None else None
        if token is not None:
            mask[index] = 0
            mask[index, token // 32] = np.uint32(1 << token % 32)
