"""Which rows run in the next step, and what their results mean. No jax, no clock.

Order. A request's rank is arrival + ageing_seconds * priority (then its serial number): it is as if
a waiting request gained one priority level per `ageing_seconds`, continuously, and since all age
alike the order of two requests never changes. Lower ranks are admitted first, strictly, and the
highest rank is preempted first, never for the sake of a higher one.

No starvation. Call m the live request of lowest rank. While m waits nothing else is admitted, and
each dispatch takes the lowest running request at least one token further: it is never preempted,
and max_batch_tokens >= max_num_seqs leaves it a token. So the rows drain within max_num_seqs *
max_model_len dispatches at the latest, m is admitted then (it fits the pool alone), and ends within
max_model_len further ones. A request of priority p that arrives at t is preceded only by those
that live at t and by those of priority q that arrive before t + (p - q) * ageing_seconds: if they
are `a`, it ends within (a + 1) * (max_num_seqs + 1) * max_model_len dispatches, whatever arrives
after.

Overlap. A batch may be scheduled while the one before is in flight. Its rows' last tokens are then
on the device, but their number is known: a row that does not stop yields exactly its `draws`. If it
did stop, the later row was for nothing and its result is dropped. The device runs dispatches in
order, so pages and slots are free for the next dispatch the moment a request leaves.
"""

from collections import deque
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial

import numpy as np
from numpy.typing import NDArray

from octavo.cache.blocks import pages_for
from octavo.serve.admission import refuse_if_impossible
from octavo.serve.jump import Forced, jumps, nothing_forced
from octavo.serve.queue import WaitingQueue
from octavo.serve.request_state import NO_SLOT, Flight, RequestState
from octavo.serve.rows import Rows
from octavo.serve.scheduler_config import SchedulerConfig
from octavo.serve.types import (
    FINISH_ABORT,
    FINISH_ERROR,
    EngineStats,
    Request,
    RowResult,
    ScheduledBatch,
    ScheduledRow,
    TokenEvent,
)

PrefillBudget = Callable[[int, Callable[[], int]], int]
"""(decode rows, lead) -> prefill tokens that keep the step short enough; lead is `Rows.lead`."""

Worthwhile = Callable[[int, int, int], int]
"""(tokens of a step, the least of them, rows) -> those to compute now; see `Buckets.worthwhile`."""


class Scheduler:
    """Continuous batching with chunked prefill, prefix sharing and preemption by recompute.

    Decisions are a function of the calls alone (arguments and order). `prefill_budget` may lower
    a step's prefill tokens, to bound its time; at least a page's worth is always allowed.
    `worthwhile` may leave the end of the last prompt to the next step; one token at least is taken.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        prefill_budget: PrefillBudget | None = None,
        worthwhile: Worthwhile | None = None,
    ) -> None:
        self.config = config
        self._rows, self._waiting = Rows(config), WaitingQueue(config)
        self._flights: deque[Flight] = deque()
        self._states: dict[str, RequestState] = {}
        self._prefill_budget, self._worthwhile = prefill_budget, worthwhile
        self._counters = EngineStats(pages_total=self._rows.pool.total, page_size=config.page_size)
        self._serial = 0
        self._closed = False

    def has_work(self) -> bool:
        """Whether a request is live or a batch is in flight."""
        return bool(self._states or self._flights)

    def has_prompts(self) -> bool:
        """Whether a request waits for a row, or a row has some of its prompt to compute."""
        return bool(self._waiting) or not all(state.decoding for state in self._rows.running)

    def stats(self) -> EngineStats:
        """Counters since start, and gauges of this moment."""
        return replace(
            self._counters,
            waiting=len(self._waiting),
            waiting_tokens=self._waiting.tokens,
            estimated_wait=self._waiting.estimated_wait(self._rows.uncomputed()),
            refused=dict(self._waiting.refused),
            running=len(self._rows.running),
            pages_used=self._rows.pool.used,
            finished=dict(self._counters.finished),
        )

    def add(self, request: Request, now: float, *, held: bool = False) -> None:
        """Queue a request that arrives at `now` (seconds on a clock that doesn't jump).

        A held one keeps its rank and is not admitted before `release`.

        Raises:
            ValueError: its id is live, its prompt is empty, its max_tokens is not resolved, or it
                can never fit the context or the pool.
            QueueFull: too many wait, too many tokens, or for too long.
        """
        if request.request_id in self._states:
            raise ValueError(f"request_id {request.request_id!r} is live already")
        refuse_if_impossible(request, self.config, self._rows.pool.total)
        rank = (now + self.config.ageing_seconds * request.priority, self._serial)
        state = RequestState(request, rank, self.config.page_size, now)
        if not request.readmitted:
            self._waiting.refuse_if_full(state, self._rows.uncomputed)
        self._serial += 1
        self._states[request.request_id] = state
        if held:
            self._waiting.hold(state)
        else:
            self._waiting.push(state)

    def release(self, request_id: str) -> None:
        """Let a held request be admitted."""
        self._waiting.release(request_id)

    def abort(self, request_id: str, reason: str = FINISH_ABORT) -> TokenEvent | None:
        """End a request at once, in flight or not; None if it isn't live.

        `reason` is what the event and the counters say: "stop" when the host saw a stop string.
        """
        state = self._states.get(request_id)
        if state is None:
            return None
        self._finish(state, reason)
        return state.event(finish_reason=reason)

    def close(self, closed: bool, now: float) -> None:
        """Admit only who had a row before, or everybody again; the wait meanwhile is not rated."""
        self._closed = closed
        self._waiting.rate.note(now, 0, waiting=False)

    def begun(self) -> bool:
        """Whether a live request has had a row, or a batch is in flight."""
        return bool(self._flights or self._rows.running or self._waiting.next(begun=True))

    def reset_prefixes(self, epoch: int | None = None) -> None:
        """Forget shared prefixes; with an `epoch`, because the weights are now those of it."""
        self._rows.reset_prefixes(epoch)

    def request_ids(self) -> tuple[str, ...]:
        """Ids of the live requests, by arrival."""
        return tuple(self._states)

    def reset(self, reason: str) -> list[TokenEvent]:
        """The device's state is lost: fail what has a row or is in flight; what waits stays."""
        self._flights.clear()
        lost = [s for s in self._states.values() if s.slot != NO_SLOT or s.pending]
        for state in lost:
            self._finish(state, FINISH_ERROR)
        self._rows.reset_prefixes(None)
        return [state.event(finish_reason=FINISH_ERROR, error=reason) for state in lost]

    def borrow_pages(self, tokens: int) -> AbstractContextManager[NDArray[np.int32]]:
        """Pages for `tokens` tokens outside any request, i32; ValueError if too few are left."""
        return self._rows.borrow_pages(tokens)

    def schedule(
        self, now: float, most_steps: int | None = None, forced: Forced = nothing_forced
    ) -> ScheduledBatch | None:
        """The next batch to dispatch, decode rows first; None if nothing can run before a commit.

        `most_steps` lowers the config's max_decode_steps for this batch; `forced` tells the tokens
        that must follow a request's committed ones.

        Raises:
            RuntimeError: as many batches are in flight as may be (1, or 2 under overlap).
        """
        if len(self._flights) >= self.config.max_in_flight:
            raise RuntimeError(f"{len(self._flights)} batches are in flight; commit one first")
        rows: list[ScheduledRow] = []
        states: list[RequestState] = []
        steps = self._choose_steps(most_steps)
        self._schedule_decodes(steps, rows, states, forced)
        prefilled = self._schedule_prefills(rows, states, now)
        self._waiting.rate.note(now, prefilled, waiting=bool(self._waiting) and not self._closed)
        if not rows:
            return None
        if steps > 1:
            steps = max(row.num_steps for row in rows)
        batch = ScheduledBatch(self._counters.steps, tuple(rows), steps)
        self._counters.steps += 1
        self._flights.append(Flight(batch, tuple(states)))
        return batch

    def commit(
        self, batch: ScheduledBatch, results: Sequence[RowResult], now: float
    ) -> list[TokenEvent]:
        """Take the results of the oldest batch in flight, one a row; news in row order.

        Results of requests that have ended meanwhile are dropped; those of preempted ones count.

        Raises:
            ValueError: another batch is the oldest, or the number of results is wrong.
        """
        if not self._flights or self._flights[0].batch is not batch:
            raise ValueError(f"batch {batch.step_id} is not the oldest in flight")
        if len(results) != len(batch.rows):
            raise ValueError(f"{len(results)} results for the {len(batch.rows)} rows of a batch")
        flight = self._flights.popleft()
        events: list[TokenEvent] = []
        for row, state, result in zip(batch.rows, flight.states, results):
            event = None if state.finished else state.accept(row, result)
            if event is None:
                continue
            events.append(event)
            self._counters.generated_tokens += len(event.token_ids)
            # The last token's keys may never be written: after a stop nothing is computed.
            if len(state.tokens) - 1 >= state.next_full and state.slot != NO_SLOT:
                self._rows.register(state, len(state.tokens) - 1)
            if event.finish_reason is not None or state.first_token is None:
                self._settle(state, event, now)
        return events

    def check(self) -> None:
        """Assert every invariant of the scheduler, its rows, pages and prefixes."""
        self._rows.check()
        held = {id(state) for state in (*self._waiting, *self._rows.running)}
        assert held == {id(state) for state in self._states.values()}, "a request is lost"
        assert len(held) == len(self._waiting) + len(self._rows.running), "one is in both"
        assert len(self._flights) <= self.config.max_in_flight
        pending: dict[int, int] = {}
        for flight in self._flights:
            tokens = sum(row.query_len for row in flight.batch.rows)
            assert tokens <= self.config.max_batch_tokens, "a batch exceeds the token budget"
            for row, state in zip(flight.batch.rows, flight.states):
                pending[id(state)] = pending.get(id(state), 0) + row.draws * row.samples
        for state in self._states.values():
            state.check(pending.get(id(state), 0), self.config.page_size)

    def _choose_steps(self, most: int | None) -> int:
        """Decode steps: 1 if it prefills, admits, lacks pages, or a row samples not plainly."""
        steps = min(most or self.config.max_decode_steps, self.config.max_decode_steps)
        if steps > 1:
            steps = min([steps, *(state.lean_steps for state in self._rows.running)])
        if steps == 1:
            return 1
        if self._waiting and (not self.config.multi_step_when_waiting or self._can_admit()):
            return 1
        return steps if self._rows.can_all_grow(steps) else 1

    def _can_admit(self) -> bool:
        first = self._waiting.first
        return not first.pending and self._rows.fits(first, self._rows.hits(first))

    def _schedule_decodes(
        self, most: int, rows: list[ScheduledRow], states: list[RequestState], forced: Forced
    ) -> None:
        """Add every decode row, lowest rank first; the highest ranks lose their rows for pages."""
        running = self._rows.running
        follows = jumps(running, forced, self.config.max_batch_tokens - len(running))
        index = 0
        while index < len(running):
            state = running[index]
            index += 1
            steps = min(most, state.limit - state.drawn)
            if steps <= 0 or not state.decoding:
                continue
            follow = follows.get(state.request_id, ())
            end = state.computed + steps + len(follow[state.pending :])
            if end > state.room and not self._make_room(state, end):
                continue
            rows.append(state.decode_row(steps, follow))
            states.append(state)

    def _make_room(self, state: RequestState, tokens: int) -> bool:
        """Grow a row's table, preempting from the highest rank; False if it lost its own row.

        Rows of lower rank are in the batch already; those after it are not, so any may go.
        """
        missing = self._rows.missing_pages(state, tokens)
        while self._rows.pool.available < missing:
            victim = self._rows.running[-1]
            self._preempt(victim)
            if victim is state:
                return False
        self._rows.grow(state, missing)
        return True

    def _preempt(self, state: RequestState) -> None:
        self._rows.release(state)
        self._waiting.push(state)
        state.preemptions += 1
        self._counters.preemptions += 1

    def _schedule_prefills(
        self, rows: list[ScheduledRow], states: list[RequestState], now: float
    ) -> int:
        """Add chunks of rows that prefill, then admit while there is room; the chunks' tokens."""
        budget = most = self._tokens_for_prefill(rows)
        for state in self._rows.running:
            if not state.decoding and budget > 0:
                budget -= self._schedule_chunk(state, budget, rows, states)
        while budget > 0 and (state := self._waiting.next(begun=self._closed)):
            if not self._admit(state, now):
                break
            budget -= self._schedule_chunk(state, budget, rows, states)
        return most - budget

    def _tokens_for_prefill(self, rows: list[ScheduledRow]) -> int:
        forced = sum(len(row.forced) for row in rows)
        budget = self.config.max_batch_tokens - len(rows) - forced
        if self._prefill_budget is not None:
            first = self._waiting.next(begun=self._closed)
            allowed = self._prefill_budget(len(rows), partial(self._rows.lead, first)) - forced
            budget = min(budget, max(allowed, self.config.page_size))
        return budget

    def _admit(self, state: RequestState, now: float) -> bool:
        """Move the first waiting request to a row, if it fits and nothing of it is in flight."""
        if state.pending:
            return False
        hits = self._rows.hits(state)
        if not self._rows.fits(state, hits):
            return False
        self._waiting.remove(state)
        self._rows.admit(state, hits)
        if state.admissions == 0:
            state.admitted = now
            state.cached_tokens = state.computed
            self._counters.prompt_tokens += state.prompt_len
            self._counters.looked_up_tokens += state.prompt_len * self._rows.looks_up(state)
            self._counters.cached_tokens += state.cached_tokens
            self._counters.queue_seconds += now - state.arrived
        state.admissions += 1
        return True

    def _schedule_chunk(
        self, state: RequestState, budget: int, rows: list[ScheduledRow], states: list[RequestState]
    ) -> int:
        """Add the next chunk of a row that prefills; its tokens."""
        start = state.computed
        cap = self.config.max_chunk_tokens
        end = min(len(state.tokens), start + (budget if cap is None else min(budget, cap)))
        if self._worthwhile and not self._waiting and state is self._rows.running[-1]:
            others = sum(row.query_len for row in rows)
            end = start - others + self._worthwhile(others + end - start, others + 1, len(rows))
        state.decoding = end == len(state.tokens)
        samples = state.decoding and state.limit > 0
        rows.append(
            ScheduledRow(
                request_id=state.request_id,
                slot=state.slot,
                start=start,
                tokens=tuple(state.tokens[start:end]),
                from_previous=False,
                num_steps=1,
                samples=samples,
                block_table=state.table.prefix(pages_for(end, self.config.page_size)),
                reset=state.fresh,
                prompt_len=state.prompt_len,
                generated=state.drawn,
                request=state.request,
                emitted=tuple(state.tokens[state.prompt_len :]) if state.fresh else (),
                reasoning=state.closing if samples else None,
            )
        )
        states.append(state)
        state.fresh = False
        state.computed = end
        state.drawn += samples
        state.pending += samples
        self._rows.register(state, end)
        return end - start

    def _finish(self, state: RequestState, reason: str) -> None:
        """Drop a request from wherever it is; its results in flight no longer count."""
        state.finished = True
        del self._states[state.request_id]
        if state.slot == NO_SLOT:
            self._waiting.remove(state)
        else:
            self._rows.release(state)
        finished = self._counters.finished
        finished[reason] = finished.get(reason, 0) + 1

    def _settle(self, state: RequestState, event: TokenEvent, now: float) -> None:
        """Account for a request's first news and for its end."""
        counters = self._counters
        if state.first_token is None:
            state.first_token = now
            event.waited = (state.admitted - state.arrived, now - state.admitted)
            counters.prefill_seconds += now - state.admitted
        if event.error is not None:
            self._rows.forget(state)
        if event.finish_reason is not None:
            counters.decode_seconds += now - state.first_token
            self._finish(state, event.finish_reason)
