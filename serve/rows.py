"""Who sits in which row slot and on which pages. No jax, no policy beyond "does it fit"."""

import heapq
from bisect import bisect_left, insort
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
from numpy.typing import NDArray

from octavo.cache.blocks import BlockPool, BlockTable, pages_for
from octavo.cache.prefix import PrefixIndex
from octavo.serve.request_state import NO_SLOT, RequestState, rank_of
from octavo.serve.scheduler_config import SchedulerConfig


class Rows:
    """The running requests with what they hold: slots, pages, shared prefixes.

    Attributes:
        pool: pages of the cache.
        index: shared prefixes; None without prefix caching.
        running: requests with a row, ascending rank.
    """

    def __init__(self, config: SchedulerConfig) -> None:
        self.pool = BlockPool(config.num_pages)
        self.index: PrefixIndex | None = None
        if config.prefix_caching:
            self.index = PrefixIndex(
                self.pool, config.page_size, config.cache_dtype, config.weights_epoch
            )
        self.running: list[RequestState] = []
        self._num_slots = config.max_num_seqs
        self._page_size = config.page_size
        self._free_slots = list(range(config.max_num_seqs))

    def hits(self, state: RequestState) -> list[int]:
        """Pages that the index offers a waiting request, not yet held."""
        if self.index is None:
            return []
        if state.chain is None or state.chain.epoch != self.index.epoch:
            state.chain = self.index.chain(state.request.cache_salt)
        return self.index.lookup(state.chain, state.tokens) if state.may_hit else []

    def looks_up(self, state: RequestState) -> bool:
        """Whether the index is asked for pages of a request at all."""
        return self.index is not None and state.may_hit

    def lead(self, waiting: RequestState | None) -> int:
        """Tokens that the longest row which decodes has to go more than any that does not yet.

        `waiting` is the next to get a row, if anybody waits: it stands for all behind it.
        """
        left = {True: 0, False: waiting.limit - waiting.drawn if waiting else 0}
        for state in self.running:
            left[state.decoding] = max(left[state.decoding], state.limit - state.drawn)
        return left[True] - left[False]

    def uncomputed(self) -> int:
        """Prompt tokens that running rows have yet to compute."""
        return sum(len(s.tokens) - s.computed for s in self.running if not s.decoding)

    def fits(self, state: RequestState, hits: list[int]) -> bool:
        """Whether a slot and pages for all known tokens are there, with headroom.

        The headroom is a page for each row that will still grow, itself included: an admission
        that forces a preemption at the next page boundary would waste its prefill. With no
        running row there is none, so that whatever fits the pool is admitted in the end.
        """
        if not self._free_slots:
            return False
        known = pages_for(len(state.tokens), self._page_size)
        needed = known - len(hits) + self.pool.idle_among(hits)
        if self.running:
            needed += sum(len(other.table) < other.final_pages for other in self.running)
            needed += known < state.final_pages
        return needed <= self.pool.available

    def admit(self, state: RequestState, hits: list[int]) -> None:
        """Give a request that fits its slot and pages for all known tokens."""
        known = pages_for(len(state.tokens), self._page_size)
        self.pool.acquire(hits)
        state.table = BlockTable(state.final_pages)
        state.table.extend(hits)
        state.table.extend(self.pool.allocate(known - len(hits)))
        state.room = known * self._page_size
        state.registered = len(hits)
        state.next_full = (len(hits) + 1) * self._page_size
        state.computed = len(hits) * self._page_size
        state.slot = heapq.heappop(self._free_slots)
        insort(self.running, state, key=rank_of)

    def missing_pages(self, state: RequestState, tokens: int) -> int:
        """Pages to add before the table holds `tokens` tokens."""
        return max(0, pages_for(tokens, self._page_size) - len(state.table))

    def can_all_grow(self, steps: int) -> bool:
        """Whether there are pages for so many decode steps of every row, or what is left of it."""
        missing = 0
        for state in self.running:
            end = state.computed + min(steps, state.limit - state.drawn)
            if end > state.room:
                missing += self.missing_pages(state, end)
        return missing <= self.pool.available

    def grow(self, state: RequestState, pages: int) -> None:
        """Add pages that are available."""
        state.table.extend(self.pool.allocate(pages))
        state.room += pages * self._page_size

    def release(self, state: RequestState) -> None:
        """Take slot and pages back; pages that the index knows stay warm."""
        index = bisect_left(self.running, state.rank, key=rank_of)
        del self.running[index]
        heapq.heappush(self._free_slots, state.slot)
        self.pool.release(state.table.pages())
        state.leave_row()

    def register(self, state: RequestState, tokens: int) -> None:
        """Offer the full pages among the first `tokens` tokens to others."""
        full = tokens // self._page_size
        if self.index is None or state.chain is None or full <= state.registered:
            return
        digests = state.chain.extend(state.tokens, full)
        pages = state.table.view
        for index in range(state.registered, full):
            self.index.insert(digests[index], int(pages[index]))
        state.registered = full
        state.next_full = (full + 1) * self._page_size

    def forget(self, state: RequestState) -> None:
        """Offer none of this request's pages any more: their content is suspect."""
        if self.index is not None and state.chain is not None:
            self.index.drop(state.chain.digests)
            state.chain = None

    def reset_prefixes(self, epoch: int | None) -> None:
        """Forget all shared prefixes (None keeps the epoch); running rows keep their pages."""
        if self.index is not None:
            self.index.reset(self.index.epoch if epoch is None else epoch)
            for state in self.running:
                state.chain = None

    @contextmanager
    def borrow_pages(self, tokens: int) -> Iterator[NDArray[np.int32]]:
        """Pages for `tokens` tokens outside any row, i32; ValueError if too few are available."""
        count = pages_for(tokens, self._page_size)
        available = self.pool.available
        if count > available:
            raise ValueError(f"{tokens} tokens need {count} pages; {available} are available now")
        pages = self.pool.allocate(count)
        try:
            yield np.array(pages, np.int32)
        finally:
            self.pool.release(pages)

    def check(self) -> None:
        """Assert that slots and pages are each held once and accounted for."""
        slots = [state.slot for state in self.running]
        assert sorted(slots + self._free_slots) == list(range(self._num_slots)), "slots are lost"
        ranks = [state.rank for state in self.running]
        assert ranks == sorted(set(ranks)), "running rows are out of order"
        self.pool.check(state.table.pages() for state in self.running)
        if self.index is not None:
            self.index.check()
        for state in self.running:
            assert state.slot != NO_SLOT
