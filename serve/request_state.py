"""What the scheduler knows of one live request. No jax."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from octavo.cache.blocks import BlockTable, pages_for
from octavo.cache.prefix import PageChain
from octavo.serve.thinking import NEVER, Reasoning
from octavo.serve.types import (
    FINISH_ERROR,
    FINISH_LENGTH,
    FINISH_STOP,
    Request,
    RowResult,
    ScheduledBatch,
    ScheduledRow,
    TokenEvent,
    TokenLogprob,
)

NO_SLOT = -1


class RequestState:
    """One live request, waiting (no slot) or running (a slot and pages).

    Attributes:
        request: as asked.
        rank: (arrival + ageing_seconds * priority, serial); lower runs first, and never changes.
        tokens: the prompt and every committed token.
        limit: tokens to generate at most.
        stop_ids: ids that end the sample.
        final_pages: pages at its longest; the last token's keys are never needed.
        slot: row slot, or NO_SLOT while waiting.
        table: its pages.
        room: tokens that the table holds.
        computed: tokens whose keys are written once every dispatched batch has run.
        drawn: tokens sampled, those in flight included.
        pending: of these, the ones in flight.
        plain: its sampling may run several steps in one dispatch.
        reasoning: follows a bound of its reasoning; None without one.
        jumps: tokens that its grammar forces need not be sampled: nothing else looks at them.
        decoding: every known token is computed or in flight, so that one token a step follows.
        fresh: the next row is the first since admission.
        chain: digests of its full pages; None when its pages must not be shared.
        registered: leading pages that the index has been told of.
        next_full: tokens at which one more page can be registered.
        finished: it has ended, and what is still in flight for it is dropped.
        prompt_logprobs: entries so far (entry 0 is None); None when not asked for, or delivered.
        pooled: f32[E], sum of the hidden states that count so far; None before the first.
        cached_tokens: prompt tokens found in the prefix index when first admitted.
        preemptions: times it lost its row.
        admissions: times it was given a row.
        arrived, admitted, first_token: seconds on the caller's clock: its arrival, its first
            admission (its arrival until then), its first news (None until then).
    """

    __slots__ = (
        "admissions",
        "admitted",
        "arrived",
        "cached_tokens",
        "chain",
        "computed",
        "decoding",
        "drawn",
        "final_pages",
        "finished",
        "first_token",
        "fresh",
        "jumps",
        "limit",
        "next_full",
        "pending",
        "plain",
        "pooled",
        "preemptions",
        "prompt_len",
        "prompt_logprobs",
        "rank",
        "reasoning",
        "registered",
        "request",
        "request_id",
        "room",
        "slot",
        "stop_ids",
        "table",
        "tokens",
    )

    def __init__(
        self, request: Request, rank: tuple[float, int], page_size: int, arrived: float
    ) -> None:
        params = request.params
        assert params.max_tokens is not None, "admission resolves max_tokens"
        self.request = request
        self.request_id = request.request_id
        self.rank = rank
        self.tokens = list(request.prompt)
        self.prompt_len = len(request.prompt)
        self.limit = params.max_tokens
        self.stop_ids = frozenset(request.stop_ids)
        self.final_pages = pages_for(longest_sequence(request), page_size)
        self.drawn = 0
        self.pending = 0
        self.plain = params.is_plain and request.grammar is None
        self.jumps = params.is_plain and request.grammar is not None and request.thinking is None
        self.reasoning = Reasoning(request.thinking) if request.thinking else None
        self.finished = False
        self.chain: PageChain | None = None
        wants_prompt = params.prompt_logprobs is not None
        self.prompt_logprobs: list[TokenLogprob | None] | None = [None] if wants_prompt else None
        self.pooled: NDArray[np.float32] | None = None
        self.cached_tokens = 0
        self.preemptions = 0
        self.arrived = arrived
        self.admitted = arrived
        self.admissions = 0
        self.first_token: float | None = None
        self.leave_row()

    @property
    def emitted(self) -> int:
        """Committed generated tokens."""
        return len(self.tokens) - self.prompt_len

    @property
    def lean_steps(self) -> int:
        """Decode steps that it may run in one dispatch as far as its sampling goes, at least 1."""
        if not (self.decoding and self.plain):
            return 1
        return NEVER if self.reasoning is None else max(1, self.reasoning.free - self.drawn)

    @property
    def closing(self) -> Reasoning | None:
        """Its reasoning, if the next token drawn may have to end it."""
        reasoning = self.reasoning
        return reasoning if reasoning is not None and self.drawn >= reasoning.free else None

    def decode_row(self, steps: int, follow: tuple[int, ...]) -> ScheduledRow:
        """Its next row; of `follow`, known to come behind the committed tokens, it draws what is
        not pending, and then samples."""
        inputs = (self.tokens[-1], *follow)[self.pending :]
        ahead = follow[self.pending :]
        row = ScheduledRow(
            self.request_id,
            self.slot,
            self.computed,
            inputs,
            not inputs,
            steps,
            True,
            self.table.view,
            False,
            self.prompt_len,
            self.drawn + len(ahead),
            self.request,
            (),
            ahead,
            self.closing,
        )
        self.computed += row.draws
        self.drawn += row.draws
        self.pending += row.draws
        return row

    @property
    def may_hit(self) -> bool:
        """Whether prefix pages may stand for computing.

        Not while prompt logprobs are missing, and not where every hidden state counts.
        """
        return self.request.pooling != "mean" and not self._misses_prompt_logprobs

    @property
    def _misses_prompt_logprobs(self) -> bool:
        return self.prompt_logprobs is not None and len(self.prompt_logprobs) < self.prompt_len

    def leave_row(self) -> None:
        """Forget slot, pages and progress in the cache; the tokens stand."""
        self.slot = NO_SLOT
        self.table = BlockTable(0)
        self.room = 0
        self.computed = 0
        self.decoding = False
        self.fresh = True
        self.registered = 0
        self.next_full = 0

    def accept(self, row: ScheduledRow, result: RowResult) -> TokenEvent | None:
        """Take what the device returned for one of its rows; None if that is no news.

        Tokens past a stop id are dropped. The caller releases what an ended request holds.
        """
        if result.error is not None:
            return self.event(
                finish_reason=FINISH_ERROR, error=result.error, invalid=result.invalid
            )
        if self.prompt_logprobs is not None:
            # A chunk computed anew after preemption repeats entries; the first ones stand.
            self.prompt_logprobs.extend(
                result.prompt_logprobs[len(self.prompt_logprobs) - (row.start + 1) :]
            )
            if row.start + row.query_len >= self.prompt_len and self._misses_prompt_logprobs:
                return self.event(finish_reason=FINISH_ERROR, error="prompt logprobs are missing")
        if result.pooled is not None:
            # A prompt computed anew after preemption starts from its first token.
            before = self.pooled if row.start > 0 else None
            self.pooled = result.pooled if before is None else before + result.pooled
        if not row.samples:
            scored = self.limit == 0 and row.start + row.query_len == self.prompt_len
            return self.event(finish_reason=FINISH_LENGTH) if scored else None
        self.pending -= row.draws
        return self._accept_tokens(row, result)

    def _accept_tokens(self, row: ScheduledRow, result: RowResult) -> TokenEvent:
        tokens = result.token_ids
        if not self.stop_ids.isdisjoint(tokens):
            count = next(i for i, token in enumerate(tokens, 1) if token in self.stop_ids)
            tokens = tokens[:count]
            self.tokens.extend(tokens)
            return self.event(tokens, result.logprobs[:count], FINISH_STOP, tokens[-1])
        if len(tokens) != row.draws and not result.complete:
            error = f"{len(tokens)} tokens came back for {row.draws} draws"
            return self.event(finish_reason=FINISH_ERROR, error=error)
        self.tokens.extend(tokens)
        if self.reasoning is not None:
            self.reasoning.take(tokens)
        if result.complete:
            return self.event(tokens, result.logprobs, FINISH_STOP)
        ended = len(self.tokens) - self.prompt_len >= self.limit
        return self.event(tokens, result.logprobs, FINISH_LENGTH if ended else None)

    def event(
        self,
        token_ids: tuple[int, ...] = (),
        logprobs: tuple[TokenLogprob, ...] = (),
        finish_reason: str | None = None,
        stop_token: int | None = None,
        error: str | None = None,
        invalid: bool = False,
    ) -> TokenEvent:
        """News of this request; complete prompt logprobs go out once, with the first."""
        prompt_logprobs = None
        if self.prompt_logprobs is not None and not self._misses_prompt_logprobs:
            prompt_logprobs, self.prompt_logprobs = tuple(self.prompt_logprobs), None
        return TokenEvent(
            self.request_id,
            token_ids,
            logprobs,
            prompt_logprobs,
            finish_reason,
            stop_token,
            error,
            invalid,
            self.cached_tokens,
            self.preemptions,
            embedding=self._embedding() if finish_reason == FINISH_LENGTH else None,
        )

    def _embedding(self) -> bytes | None:
        if self.pooled is None:
            return None
        count = self.prompt_len if self.request.pooling == "mean" else 1
        return (self.pooled / count).astype("<f4").tobytes()

    def check(self, pending: int, page_size: int) -> None:
        """Assert what holds between calls; `pending` are its sampled tokens in flight."""
        assert self.pending == pending, "tokens in flight are miscounted"
        assert self.drawn == self.emitted + self.pending, "drawn tokens are miscounted"
        assert self.emitted < max(self.limit, 1), "it should have ended"
        assert self.drawn <= self.limit, "more is in flight than may be drawn"
        assert not self.finished
        if self.slot == NO_SLOT:
            assert len(self.table) == self.room == self.computed == self.registered == 0
            return
        assert self.room == len(self.table) * page_size
        assert len(self.table) <= self.final_pages, "the table outgrew its request"
        assert self.registered * page_size <= self.computed <= self.room
        known = len(self.tokens)
        if self.decoding:
            ahead = self.pending - 1 if self.limit else 0
            assert self.computed == known + ahead, "a decode row's progress is wrong"
        else:
            assert self.pending == 0, "a row that prefills has tokens in flight"
            assert self.computed < known, "a prefill's progress is wrong"


@dataclass(frozen=True, slots=True)
class Flight:
    """A batch that has been handed out, and the requests of its rows."""

    batch: ScheduledBatch
    states: tuple[RequestState, ...]


def rank_of(state: RequestState) -> tuple[float, int]:
    """Sort key of the queue and of the running rows."""
    return state.rank


def longest_sequence(request: Request) -> int:
    """Tokens whose keys the cache must hold at most: a sample's last token needs none."""
    max_tokens = request.params.max_tokens or 0
    return len(request.prompt) + max(max_tokens - 1, 0)
