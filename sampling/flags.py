"""Which program a batch of sampling parameters needs. No jax here."""

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from typing import Self

from octavo.sampling.params import MAX_LOGPROBS, SamplingParams

LOGPROB_BUCKETS = (0, 5, MAX_LOGPROBS)


RANDOM, FILTERS, PENALTIES, BIAS, MIN_TOKENS, LOGPROBS = (1 << bit for bit in range(6))
"""What a request needs, a bit each. From LOGPROBS on there is one for each of LOGPROB_BUCKETS, set
where at least so many log-probabilities are wanted: the union of requests is the bitwise or."""


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

    @staticmethod
    def for_params(rows: Iterable[SamplingParams], *, grammar: bool = False) -> "SamplingFlags":
        """The leanest program that serves every row; `grammar` if some row has a mask."""
        needs = 0
        for params in rows:
            needs |= _needs(params)
        return _flags_for(needs, grammar)

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


def _needs(params: SamplingParams) -> int:
    """The bits of one request, kept on the instance: every step asks for those of all rows."""
    known = params.__dict__.get("_needs")
    if known is not None:
        return known
    needs = (
        RANDOM * (not params.is_greedy)
        | FILTERS * params.has_filters
        | PENALTIES * params.has_penalties
        | BIAS * params.has_bias
        | MIN_TOKENS * (params.min_tokens > 0)
    )
    if params.logprobs is not None:
        below = sum(size < params.logprobs for size in LOGPROB_BUCKETS)
        needs |= LOGPROBS * ((2 << below) - 1)
    params.__dict__["_needs"] = needs
    return needs


@cache
def _flags_for(needs: int, grammar: bool) -> SamplingFlags:
    buckets = (needs // LOGPROBS).bit_length()
    return SamplingFlags(
        greedy_only=not needs & RANDOM,
        filters=bool(needs & FILTERS),
        penalties=bool(needs & PENALTIES),
        bias=bool(needs & BIAS),
        min_tokens=bool(needs & MIN_TOKENS),
        grammar=grammar,
        logprobs=(-1, *LOGPROB_BUCKETS)[buckets],
    )
