"""Who enters, in what order, with what shared; one behaviour a test."""

from dataclasses import replace

import pytest
from fake_device import alone
from scheduler_cases import PROMPT, config, in_fives, loop_of, request, shape, step

from octavo.serve.queue import QueueFull
from octavo.serve.scheduler import Scheduler
from octavo.serve.types import Grammar, RowResult

# What may enter


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (request("a", (), 1), "the prompt is empty"),
        (request("a", PROMPT, None), "max_tokens is None"),
        (request("a", PROMPT, 120), "9 tokens .* 120 = 129 exceed the context of 128"),
        (request("a", PROMPT, 25), "25 need 9 pages; the cache has 8 of 4 tokens"),
        (request("live"), "'live' is live"),
    ],
)
def test_what_can_never_run_is_refused_with_numbers(bad, message):
    loop = loop_of(num_pages=9)
    loop.add(request("live"))
    with pytest.raises(ValueError, match=message):
        loop.scheduler.add(bad, 0.0)
    loop.scheduler.check()


def test_the_largest_request_that_fits_runs():
    loop = loop_of(num_pages=9)
    loop.add(request("a", PROMPT, 24))  # the last token's keys are not needed: 32 tokens
    assert len(loop.drain()["a"].tokens) == 24


def test_the_queue_is_bounded_for_newcomers():
    loop = loop_of(max_waiting=2)
    loop.add(request("a"))
    loop.add(request("b"))
    with pytest.raises(QueueFull, match="2 requests are waiting, the bound is 2"):
        loop.scheduler.add(request("c"), 0.0)
    loop.step()
    loop.add(request("c"))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"max_num_seqs": 0}, "max_num_seqs is 0"),
        ({"max_batch_tokens": 3}, "max_batch_tokens is 3, must be at least max_num_seqs = 4"),
        ({"max_chunk_tokens": 0}, "max_chunk_tokens is 0"),
        ({"ageing_seconds": 0.0}, "ageing_seconds is 0.0"),
        ({"ageing_seconds": float("inf")}, "ageing_seconds is inf"),
        ({"num_pages": 1}, "num_pages is 1"),
    ],
)
def test_a_config_without_sense_is_refused(fields, message):
    with pytest.raises(ValueError, match=message):
        Scheduler(config(**fields))


# Budgets


def test_decode_rows_come_first_then_chunks_within_the_token_budget():
    loop = loop_of(max_batch_tokens=12, prefix_caching=False)
    loop.add(request("a"))
    assert step(loop) == [("a", 0, 9, 1)]
    loop.add(request("b", range(20)))
    loop.add(request("c"))
    assert step(loop) == [("a", 9, 1, 1), ("b", 0, 11, 1)]
    assert step(loop) == [("a", 10, 1, 1), ("b", 11, 9, 1), ("c", 0, 2, 1)]
    assert step(loop) == [("a", 11, 1, 1), ("b", 20, 1, 1), ("c", 2, 7, 1)]


def test_a_chunk_cap_leaves_budget_to_others():
    loop = loop_of(max_chunk_tokens=5, prefix_caching=False)
    loop.add(request("a"))
    loop.add(request("b"))
    assert step(loop) == [("a", 0, 5, 1), ("b", 0, 5, 1)]
    assert [row.samples for row in loop.batches[-1].rows] == [False, False]
    assert step(loop) == [("a", 5, 4, 1), ("b", 5, 4, 1)]


def test_a_prefill_budget_shortens_chunks_but_never_below_a_page():
    asked = []

    def allowed(rows: int, lead) -> int:
        asked.append(rows)
        return 6 if rows == 0 else 0

    loop = loop_of(allowed)
    loop.add(request("a"))
    assert [step(loop), step(loop)] == [[("a", 0, 6, 1)], [("a", 6, 3, 1)]]
    loop.add(request("b", range(50, 60)))
    assert step(loop) == [("a", 9, 1, 1), ("b", 0, 4, 1)]
    assert asked == [0, 0, 1]


def test_tokens_that_a_grammar_forces_count_in_a_steps_prefill_budget():
    scheduler = Scheduler(config(), lambda rows, lead: 16 - rows)
    scheduler.add(replace(request("a", temperature=0), grammar=Grammar.choice(["x"])), 0.0)
    prompt = scheduler.schedule(0.0)
    scheduler.commit(prompt, [RowResult((7,))], 0.0)
    scheduler.add(request("b", range(40)), 0.0)
    batch = scheduler.schedule(0.0, forced=lambda id_: (1, 2, 3, 4))
    assert shape(batch) == [("a", 9, 5, 1), ("b", 0, 11, 1)]


def test_the_end_of_the_last_prompt_may_be_left_to_the_next_step():
    loop = loop_of(worthwhile=in_fives, prefix_caching=False)
    loop.add(request("a"))
    assert [step(loop), step(loop)] == [[("a", 0, 5, 1)], [("a", 5, 4, 1)]]
    loop.add(request("b", range(50, 60)))
    loop.add(request("c", range(70, 73)))
    assert step(loop) == [("a", 9, 1, 1), ("b", 0, 10, 1), ("c", 0, 1, 1)]  # one token at least
    assert step(loop) == [("a", 10, 1, 1), ("b", 10, 1, 1), ("c", 1, 2, 1)]


def test_row_slots_bound_the_batch_and_are_used_again():
    loop = loop_of(max_num_seqs=2)
    for id_ in "abc":
        loop.add(request(id_, max_tokens=2))
    for _ in range(3):
        loop.step()
    assert [
        [(row.request_id, row.slot, row.reset) for row in batch.rows] for batch in loop.batches
    ] == [
        [("a", 0, True), ("b", 1, True)],
        [("a", 0, False), ("b", 1, False)],
        [("c", 0, True)],
    ]


def test_admission_keeps_a_page_for_each_row_that_will_grow():
    loop = loop_of(num_pages=8, prefix_caching=False)  # 7 pages
    loop.add(request("a", range(8), 9))  # 2 pages now, 4 in the end
    loop.add(request("b", range(12), 4))  # 3 pages now, 4 in the end
    loop.add(request("c", range(4), 1))  # 1 page would fit, but "b" comes first
    assert [row[0] for row in step(loop)] == ["a", "b"]
    loop = loop_of(num_pages=7, prefix_caching=False)
    loop.add(request("a", range(8), 9))
    loop.add(request("b", range(12), 4))
    loop.add(request("c", range(4), 1))
    assert [row[0] for row in step(loop)] == ["a"]


# Order


def test_priority_then_arrival():
    loop = loop_of(max_num_seqs=1)
    for id_, priority in (("low", 1), ("a", 0), ("b", 0), ("high", -1)):
        loop.add(request(id_, max_tokens=1, priority=priority))
    loop.drain()
    assert loop.order == ["high", "a", "b", "low"]


def test_a_waiting_request_gains_a_level_each_ageing_period():
    loop = loop_of(max_num_seqs=1, ageing_seconds=10.0)
    loop.add(request("old", max_tokens=1, priority=2))
    loop.now = 19.9
    loop.add(request("before", max_tokens=1, priority=0))
    loop.now = 20.1
    loop.add(request("after", max_tokens=1, priority=0))
    loop.drain()
    assert loop.order == ["before", "old", "after"]


@pytest.mark.parametrize("overlap", [False, True])
def test_nobody_starves_under_endless_high_priority_traffic(overlap):
    """One second a dispatch, a priority-0 request each dispatch, one row: far beyond capacity.

    The bound for the low one: those of priority 0 that arrive within 2 * 5 seconds of it precede
    it, no later one does; each takes at most its 4 dispatches (and 1 to read the result).
    """
    loop = loop_of(max_num_seqs=2, num_pages=9, ageing_seconds=5.0, overlap=overlap)
    loop.add(request("low", max_tokens=4, priority=2))
    arrivals = {}
    for dispatch in range(200):
        arrivals[f"r{dispatch}"] = loop.now
        loop.add(request(f"r{dispatch}", (dispatch % 7,) * 9, max_tokens=4))
        loop.step()
        loop.now += 1.0
        if "low" in loop.order:
            break
    ahead = [id_ for id_ in loop.order if id_ != "low"]
    assert all(arrivals[id_] <= 10.0 for id_ in ahead)
    assert dispatch <= (len(ahead) + 1) * 5


def test_a_large_request_at_the_head_is_not_overtaken():
    loop = loop_of(num_pages=9)
    loop.add(request("a", range(8), 12))
    loop.step()
    loop.add(request("large", range(24), 8))
    loop.add(request("small", (1,), 1))
    loop.drain()
    admitted = [row.request_id for batch in loop.batches for row in batch.rows if row.reset]
    assert admitted == ["a", "large", "small"]


# Prefix sharing


def test_a_later_request_shares_full_pages():
    loop = loop_of()
    loop.add(request("a"))
    loop.drain()
    loop.add(request("b"))
    assert step(loop) == [("b", 8, 1, 1)]
    loop.drain()
    assert loop.last["b"].cached_tokens == 8
    assert loop.last["a"].cached_tokens == 0
    assert loop.answers["a"] == loop.answers["b"]
    assert loop.scheduler.stats().cached_tokens == 8


def test_requests_of_one_step_share_what_it_computes():
    loop = loop_of()
    for id_ in "abc":
        loop.add(request(id_))
    assert step(loop) == [("a", 0, 9, 1), ("b", 8, 1, 1), ("c", 8, 1, 1)]
    tables = [row.block_table.tolist() for row in loop.batches[-1].rows]
    assert tables[0][:2] == tables[1][:2] == tables[2][:2]
    assert len({table[2] for table in tables}) == 3
    assert set(map(str, loop.drain().values())) == {str(alone(loop.requests["a"]))}


def test_salt_divides_the_cache():
    loop = loop_of()
    loop.add(request("a"))
    loop.add(request("b", salt="x"))
    loop.add(request("c", salt="x"))
    assert step(loop) == [("a", 0, 9, 1), ("b", 0, 9, 1), ("c", 8, 1, 1)]


def test_generated_pages_are_shared_with_the_next_turn():
    loop = loop_of()
    loop.add(request("a", max_tokens=8))
    answer = loop.drain()["a"].tokens  # 17 tokens, of which 16 have keys
    loop.add(request("b", (*PROMPT, *answer, 1, 2)))
    assert step(loop) == [("b", 16, 3, 1)]
    assert loop.drain()["b"] == alone(loop.requests["b"])


@pytest.mark.parametrize("mode", [{}, {"overlap": True, "max_decode_steps": 4}])
def test_nothing_past_a_stop_is_shared(mode):
    free = alone(request("a", max_tokens=20)).tokens
    stop = next(token for n, token in enumerate(free) if n >= 6 and token not in free[:n])
    length = 9 + free.index(stop) + 1
    loop = loop_of(**mode)
    loop.add(request("a", max_tokens=20, stop_token_ids=(stop,)))
    assert loop.drain()["a"].tokens[-1] == stop
    loop.add(request("b", (*PROMPT, *free)))
    loop.drain()
    assert loop.last["b"].cached_tokens == (length - 1) // 4 * 4


def test_prompt_logprobs_are_computed_not_looked_up_but_the_pages_are_shared():
    loop = loop_of(max_chunk_tokens=4)
    loop.add(request("a"))
    loop.drain()
    loop.add(request("b", prompt_logprobs=0))
    assert loop.drain()["b"] == alone(loop.requests["b"])
    assert loop.last["b"].cached_tokens == 0
    loop = loop_of()
    loop.add(request("b", prompt_logprobs=0))
    loop.add(request("c"))
    assert step(loop) == [("b", 0, 9, 1), ("c", 8, 1, 1)]


def test_without_prefix_caching_nothing_is_shared():
    loop = loop_of(prefix_caching=False)
    loop.add(request("a"))
    loop.add(request("b"))
    assert step(loop) == [("a", 0, 9, 1), ("b", 0, 9, 1)]


def test_prefixes_may_be_forgotten_at_any_time():
    """Also while batches are in flight, of rows that share pages."""
    loop = loop_of(overlap=True, max_decode_steps=4, num_pages=12)
    for i in range(12):
        loop.add(request(f"r{i}", (*PROMPT, i), 12))
        loop.step()
        loop.scheduler.reset_prefixes()
        loop.scheduler.check()
    assert loop.drain() == {name: alone(one) for name, one in loop.requests.items()}
    loop.scheduler.check()


@pytest.mark.parametrize("epoch", [1, 0])
def test_new_weights_share_nothing_with_old_ones(epoch):
    loop = loop_of()
    loop.add(request("a", max_tokens=12))
    step(loop)
    loop.scheduler.reset_prefixes(epoch)
    loop.add(request("b"))
    assert step(loop) == [("a", 9, 1, 1), ("b", 0, 9, 1)]
    loop.drain()
    loop.scheduler.check()
    loop.add(request("c", (*PROMPT, *loop.answers["a"].tokens)))
    loop.drain()
    assert loop.last["c"].cached_tokens == 16  # of b's pages, not of a's 20
