import pytest

from octavo.cache.blocks import BlockPool
from octavo.cache.prefix import PrefixIndex

TOKENS = tuple(range(100, 116))


def filled(tokens=TOKENS, page_size=4, pages=10, **key):
    """An index in which every full page of `tokens` is known and held."""
    pool = BlockPool(pages)
    index = PrefixIndex(pool, page_size)
    chain = index.chain(**key)
    held = pool.allocate(len(tokens) // page_size)
    for digest, page in zip(chain.extend(tokens, len(held)), held):
        assert index.insert(digest, page)
    return pool, index, held


@pytest.mark.parametrize(("length", "hits"), [(1, 0), (4, 0), (5, 1), (8, 1), (9, 2), (16, 3)])
def test_the_last_token_is_never_a_hit(length, hits):
    _, index, held = filled()
    assert index.lookup(index.chain(), TOKENS[:length]) == held[:hits]


def test_longer_sequences_hit_all_full_pages():
    _, index, held = filled()
    assert index.lookup(index.chain(), (*TOKENS, 1)) == held


def test_a_hit_needs_the_same_whole_prefix():
    _, index, held = filled()
    changed = (*TOKENS[:5], 0, *TOKENS[6:])
    assert index.lookup(index.chain(), changed) == held[:1]
    assert index.lookup(index.chain(), TOKENS[4:]) == []


@pytest.mark.parametrize("key", [{"salt": "a"}, {"lora": "a"}])
def test_salt_and_lora_are_part_of_the_key(key):
    _, index, held = filled(**key)
    assert index.lookup(index.chain(), TOKENS) == []
    assert index.lookup(index.chain(**key), TOKENS) == held[:3]
    assert index.lookup(index.chain(salt="a", lora="a"), TOKENS) == []


def test_parts_of_the_key_do_not_run_into_each_other():
    index = PrefixIndex(BlockPool(2), 4)
    digests = {
        PrefixIndex(BlockPool(2), size, dtype, epoch).chain(*names).extend(TOKENS, 1)[0]
        for size, dtype, epoch in ((4, "", 0), (4, "float16", 0), (4, "", 1))
        for names in (("ab", "c"), ("a", "bc"), ("abc", ""), ("", "abc"))
    }
    assert len(digests) == 12
    assert index.chain("\ud800").extend(TOKENS, 1)  # a lone surrogate from JSON is a salt too


def test_digests_do_not_depend_on_how_they_were_reached():
    index = PrefixIndex(BlockPool(2), 4)
    step_by_step, at_once = index.chain(), index.chain()
    for count in range(5):
        step_by_step.extend(list(TOKENS), count)
    assert list(step_by_step.extend(TOKENS, 4)) == list(at_once.extend(TOKENS, 4))
    assert len(set(at_once.digests)) == 4


def test_a_chain_refuses_pages_that_are_not_full():
    with pytest.raises(ValueError, match="2 full pages of 4 asked of 7 tokens"):
        PrefixIndex(BlockPool(2), 4).chain().extend(TOKENS[:7], 2)


def test_an_equal_prefix_keeps_its_first_page():
    pool, index, held = filled()
    (twin,) = pool.allocate(1)
    assert not index.insert(index.chain().extend(TOKENS, 1)[0], twin)
    assert index.lookup(index.chain(), TOKENS)[0] == held[0]
    pool.release([twin])
    assert pool.idle_among(held) == 0
    index.check()


def test_a_page_has_one_prefix():
    _, index, held = filled()
    with pytest.raises(ValueError, match="indexed under another prefix"):
        index.insert(index.chain("other").extend(TOKENS, 1)[0], held[0])


def test_idle_pages_are_hit_until_they_are_evicted():
    pool, index, held = filled(pages=6)
    pool.release(held)
    assert index.lookup(index.chain(), TOKENS) == held[:3]
    pool.allocate(3)  # one free page, then the two last of the chain
    assert index.lookup(index.chain(), TOKENS) == held[:2]
    assert len(index) == 2
    index.check()
    pool.check()


def test_dropped_prefixes_are_not_hit_and_their_idle_pages_are_free():
    pool, index, held = filled()
    pool.release(held[2:])
    index.drop(index.chain().extend(TOKENS, 4))
    assert index.lookup(index.chain(), TOKENS) == []
    assert pool.used == 2
    assert pool.cached_pages() == set()
    index.check()
    pool.check()


def test_reset_forgets_everything_and_old_chains_hit_nothing_new():
    pool, index, held = filled()
    old = index.chain()
    index.reset(epoch=1)
    assert len(index) == 0
    pool.release(held)
    assert pool.available == pool.total
    (page,) = pool.allocate(1)
    assert index.insert(index.chain().extend(TOKENS, 1)[0], page)
    assert index.lookup(old, TOKENS) == []
    assert index.lookup(index.chain(), TOKENS) == [page]
    assert (old.epoch, index.chain().epoch) == (0, 1)
