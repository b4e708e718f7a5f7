import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo.cache.blocks import BlockPool, BlockTable, OutOfPages, pages_for


def test_pages_for_rounds_up():
    assert [pages_for(tokens, 4) for tokens in (0, 1, 4, 5)] == [0, 1, 1, 2]


def test_a_pool_hands_out_every_page_but_the_padding_page():
    pool = BlockPool(5)
    pages = pool.allocate(4)
    assert sorted(pages) == [1, 2, 3, 4]
    assert (pool.available, pool.used, pool.total) == (0, 4, 4)
    pool.check([pages])


def test_too_many_pages_are_refused_and_nothing_is_taken():
    pool = BlockPool(4)
    pool.allocate(2)
    with pytest.raises(OutOfPages, match="2 pages asked, 1 of 3 available"):
        pool.allocate(2)
    assert pool.available == 1


def test_a_pool_of_padding_alone_is_refused():
    with pytest.raises(ValueError, match="num_pages is 1"):
        BlockPool(1)


def test_a_page_is_free_when_its_last_holder_lets_go():
    pool = BlockPool(3)
    pages = pool.allocate(1)
    pool.acquire(pages)
    pool.release(pages)
    assert pool.used == 1
    pool.release(pages)
    assert pool.used == 0
    with pytest.raises(ValueError, match="nobody holds it"):
        pool.release(pages)


def test_known_pages_are_evicted_last_and_in_order_of_last_use():
    pool = BlockPool(6)
    evicted: list[int] = []
    pool.on_evict = evicted.append
    old, new = pool.allocate(2), pool.allocate(2)
    for page in (*old, *new):
        pool.mark_cached(page)
    pool.release(old)
    pool.release(new)
    pool.acquire(old[:1])  # used again, so now the most recent
    pool.release(old[:1])
    assert pool.available == 5
    pool.allocate(1)
    assert evicted == []
    pool.allocate(4)
    assert evicted == [old[1], new[1], new[0], old[0]]


def test_the_end_of_a_chain_is_evicted_before_its_beginning():
    pool = BlockPool(4)
    evicted: list[int] = []
    pool.on_evict = evicted.append
    chain = pool.allocate(3)
    for page in chain:
        pool.mark_cached(page)
    pool.release(chain)
    pool.allocate(2)
    assert evicted == [chain[2], chain[1]]


def test_a_forgotten_idle_page_is_free():
    pool = BlockPool(2)
    pages = pool.allocate(1)
    pool.mark_cached(pages[0])
    pool.release(pages)
    assert pool.idle_among(pages) == 1
    pool.unmark_cached(pages[0])
    pool.check([])
    assert pool.available == 1
    assert pool.cached_pages() == set()


def test_only_a_held_page_can_be_marked():
    with pytest.raises(ValueError, match="page 1 is not held"):
        BlockPool(2).mark_cached(1)


def test_check_sees_a_page_that_no_table_holds():
    pool = BlockPool(3)
    pool.allocate(1)
    with pytest.raises(AssertionError, match="reference counts"):
        pool.check([])


@settings(max_examples=100, deadline=None, derandomize=True)
@given(st.lists(st.tuples(st.sampled_from("asrmu"), st.integers(0, 5)), max_size=60))
def test_random_operations_keep_every_invariant(operations):
    pool, holders = BlockPool(9), []
    known: set[int] = set()
    pool.on_evict = known.discard
    for kind, number in operations:
        holder = holders[number % len(holders)] if holders else None
        if kind == "a" and number <= pool.available:
            holders.append(pool.allocate(number))
        elif kind == "s" and holder is not None:
            pool.acquire(holder)
            holders.append(list(holder))
        elif kind == "r" and holder is not None:
            holders.remove(holder)
            pool.release(holder)
        elif kind == "m" and holder:
            pool.mark_cached(holder[0])
            known.add(holder[0])
        elif kind == "u" and known:
            page = min(known)
            known.discard(page)
            pool.unmark_cached(page)
        pool.check(holders)
        assert pool.cached_pages() == known


def test_a_table_grows_and_its_views_stay_true():
    table = BlockTable(4)
    table.extend([7, 3])
    before = table.view
    table.extend([5])
    assert before.tolist() == [7, 3]
    assert table.view.tolist() == table.pages() == [7, 3, 5]
    assert table.prefix(1).tolist() == [7]
    assert len(table) == 3
    assert table.view.dtype == np.int32


def test_a_view_is_read_only_and_shared():
    table = BlockTable(2)
    table.extend([1])
    assert table.view is table.view
    with pytest.raises(ValueError, match="read-only"):
        table.view[0] = 2


def test_a_table_refuses_more_than_its_capacity():
    table = BlockTable(1)
    with pytest.raises(ValueError, match="2 pages in a table of capacity 1"):
        table.extend([1, 2])
