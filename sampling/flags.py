"""Which program a batch of sampling parameters needs. No jax here."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Self

from octavo.sampling.params import MAX_LOGPROBS, SamplingParams

LOGPROB_BUCKETS = (0, 5, MAX_LOGPROBS)


@dataclass(frozen=True)
class SamplingFlags:
    """Static selection of a sampling program; work that no row asked for is not compiled.

    A row's token is the same under every set of flags that covers its parameters.

    Attributes:
        greedy_only: no row draws at random.
        filters: some row may have top_k, top_p or min_p.
        penalties: some row may have presence, frequency or repetition penalties.
        bias: some row may have logit_bias, bad or allowed tokens.
        min_tokens: some row may ban its stop ids.
        grammar: some row comes with a mask of the tokens that its grammar allows.
        logprobs: -1 none; otherwise likeliest tokens reported, one of LOGPROB_BUCKETS.
    """

    greedy_only: bool = False
    filters: bool = False
    penalties: bool = False
    bias: bool = False
    min_tokens: bool = False
    grammar: bool = False
    logprobs: int = -1

    def __post_init__(self) -> None:
        if self.logprobs not in (-1, *LOGPROB_BUCKETS):
            raise ValueError(f"logprobs must be -1 or in {LOGPROB_BUCKETS}, got {self.logprobs}")
        if self.greedy_only and self.filters:
            raise ValueError("filters have no meaning when greedy_only is set")

    @property
    def needs_state(self) -> bool:
        """Whether the program reads a RowState (and, with penalties, must record its tokens)."""
        return self.penalties or self.bias

    @classmethod
    def for_params(cls, rows: Iterable[SamplingParams], *, grammar: bool = False) -> Self:
        """The leanest program that serves every row; `grammar` if some row has a mask."""
        rows = tuple(rows)
        asked = max((-1 if p.logprobs is None else p.logprobs for p in rows), default=-1)
        return cls(
            greedy_only=all(p.is_greedy for p in rows),
            filters=any(p.has_filters for p in rows),
            penalties=any(p.has_penalties for p in rows),
            bias=any(p.has_bias for p in rows),
            min_tokens=any(p.min_tokens > 0 for p in rows),
            grammar=grammar,
            logprobs=-1 if asked < 0 else min(n for n in LOGPROB_BUCKETS if n >= asked),
        )

    def union(self, other: Self) -> Self:
        """The program that serves the rows of both."""
        return type(self)(
            greedy_only=self.greedy_only and other.greedy_only,
            filters=self.filters or other.filters,
            penalties=self.penalties or other.penalties,
            bias=self.bias or other.bias,
            min_tokens=self.min_tokens or other.min_tokens,
            grammar=self.grammar or other.grammar,
            logprobs=max(self.logprobs, other.logprobs),
        )
