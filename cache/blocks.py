"""Pages of the KV cache as the host sees them: who holds which, and which may be reused. No jax.

Page 0 absorbs the writes of padding and is never handed out. A page is in exactly one state:

    held   one or more requests refer to it;
    idle   nobody does, but the prefix index knows its content: it may be hit again, or evicted;
    free   nobody does, and its content means nothing.
"""

from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

PADDING_PAGE = 0


class OutOfPages(RuntimeError):
    """More pages were asked for than are free or idle."""


def pages_for(tokens: int, page_size: int) -> int:
    """Pages that hold `tokens` tokens."""
    return -(-tokens // page_size)


class BlockPool:
    """Reference-counted pages 1 .. num_pages - 1, with LRU reuse of idle ones.

    Attributes:
        num_pages: pages of the cache, the padding page included; at least 2.
        on_evict: called with each idle page whose content is about to be lost.
    """

    def __init__(self, num_pages: int) -> None:
        if num_pages < 2:
            raise ValueError(f"num_pages is {num_pages}, must be at least 2 (one is padding)")
        self.num_pages = num_pages
        self.on_evict: Callable[[int], None] = lambda page: None
        self._references = [0] * num_pages
        self._free = list(range(num_pages - 1, PADDING_PAGE, -1))
        self._cached: set[int] = set()
        self._idle: OrderedDict[int, None] = OrderedDict()  # least recently used first

    @property
    def available(self) -> int:
        """Pages that `allocate` could hand out now: free and idle ones."""
        return len(self._free) + len(self._idle)

    @property
    def used(self) -> int:
        """Pages that someone holds."""
        return self.num_pages - 1 - self.available

    @property
    def total(self) -> int:
        """Pages that can be held at all."""
        return self.num_pages - 1

    def allocate(self, count: int) -> list[int]:
        """Hold `count` fresh pages, evicting idle ones when no free one is left.

        Raises:
            OutOfPages: fewer are available; nothing was taken.
        """
        if count > self.available:
            raise OutOfPages(f"{count} pages asked, {self.available} of {self.total} available")
        pages = [self._free.pop() if self._free else self._evict() for _ in range(count)]
        for page in pages:
            self._references[page] = 1
        return pages

    def acquire(self, pages: Iterable[int]) -> None:
        """Hold pages whose content is known (held or idle ones) once more."""
        for page in pages:
            if self._references[page] == 0:
                del self._idle[page]
            self._references[page] += 1

    def release(self, pages: Sequence[int]) -> None:
        """Let go of pages of one sequence, given in order.

        The last page becomes idle first, so that of a chain the end is evicted before the
        beginning, without which the end can't be hit.
        """
        for page in reversed(pages):
            count = self._references[page] - 1
            if count < 0:
                raise ValueError(f"page {page} is released but nobody holds it")
            self._references[page] = count
            if count == 0:
                if page in self._cached:
                    self._idle[page] = None
                else:
                    self._free.append(page)

    def idle_among(self, pages: Iterable[int]) -> int:
        """How many of `pages` are idle: acquiring them makes that many fewer available."""
        return sum(self._references[page] == 0 for page in pages)

    def mark_cached(self, page: int) -> None:
        """The index knows the content of this held page: keep it when it is released."""
        if self._references[page] == 0:
            raise ValueError(f"page {page} is not held, so its content is not known")
        self._cached.add(page)

    def unmark_cached(self, page: int) -> None:
        """The index forgot this page; an idle one becomes free."""
        self._cached.discard(page)
        if page in self._idle:
            del self._idle[page]
            self._free.append(page)

    def cached_pages(self) -> set[int]:
        """Pages whose content the index knows."""
        return set(self._cached)

    def check(self, held: Iterable[Sequence[int]] | None = None) -> None:
        """Assert every invariant; `held` are the page lists of all holders, when known."""
        free, idle = set(self._free), set(self._idle)
        referenced = {page for page, count in enumerate(self._references) if count > 0}
        assert len(free) == len(self._free), "a page is free twice"
        assert not free & idle, "a page is both free and idle"
        assert not referenced & (free | idle), "a held page is free or idle"
        everything = set(range(1, self.num_pages))
        assert free | idle | referenced == everything, "a page is lost, or page 0 was handed out"
        assert idle <= self._cached <= idle | referenced, "cached marks do not match page states"
        if held is not None:
            counts = [0] * self.num_pages
            for pages in held:
                assert len(set(pages)) == len(pages), "one table holds a page twice"
                for page in pages:
                    counts[page] += 1
            assert counts == self._references, "reference counts differ from the tables' pages"

    def _evict(self) -> int:
        page, _ = self._idle.popitem(last=False)
        self._cached.discard(page)
        self.on_evict(page)
        return page


class BlockTable:
    """Pages of one sequence in order, with cheap read-only int32 views for the device's tables.

    It only grows, so a view handed out for a dispatch stays true while that is in flight.
    """

    __slots__ = ("_array", "_length", "_view")

    def __init__(self, capacity: int) -> None:
        self._array = np.zeros(capacity, np.int32)
        self._length = 0
        self._view = self.prefix(0)

    def __len__(self) -> int:
        return self._length

    @property
    def view(self) -> NDArray[np.int32]:
        """All pages, i32[len(self)]."""
        return self._view

    def extend(self, pages: Sequence[int]) -> None:
        """Append pages; more than the capacity is a ValueError."""
        end = self._length + len(pages)
        if end > len(self._array):
            raise ValueError(f"{end} pages in a table of capacity {len(self._array)}")
        self._array[self._length : end] = pages
        self._length = end
        self._view = self.prefix(end)

    def prefix(self, count: int) -> NDArray[np.int32]:
        """The first `count` pages, i32[count], read-only."""
        view = self._array[: min(count, self._length)]
        view.flags.writeable = False
        return view

    def pages(self) -> list[int]:
        """All pages as ints."""
        return self._view.tolist()
