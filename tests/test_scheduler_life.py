"""How a request lives after admission: preemption, overlap, ends; one behaviour a test."""

import pytest
from fake_device import Loop, alone
from scheduler_cases import PROMPT, config, loop_of, request, step

from octavo.sampling.params import SamplingParams
from octavo.serve.scheduler import Scheduler
from octavo.serve.types import Request, RowResult

# Preemption


def preempting(num_pages: int = 9, **fields) -> Loop:
    """Two rows that grow until the pages are short."""
    loop = loop_of(num_pages=num_pages, prefix_caching=False, **fields)
    loop.add(request("a", range(8), 16))
    loop.add(request("b", range(20, 28), 16))
    return loop


@pytest.mark.parametrize("overlap", [False, True])
def test_the_youngest_loses_its_row_and_its_tokens_stand(overlap):
    loop = preempting(overlap=overlap)
    answers = loop.drain()
    assert loop.last["a"].preemptions == 0
    assert loop.last["b"].preemptions == 1
    assert loop.scheduler.stats().preemptions == 1
    resumed = [row for batch in loop.batches for row in batch.rows if row.reset][-1]
    kept = len(resumed.emitted)
    assert resumed.request_id == "b"
    assert kept == resumed.generated > 0
    assert resumed.tokens == (*range(20, 28), *answers["b"].tokens[:kept])
    assert all(answers[id_] == alone(loop.requests[id_]) for id_ in "ab")


def test_the_lower_priority_loses_its_row_even_if_it_came_first():
    loop = loop_of(num_pages=9, prefix_caching=False)
    loop.add(request("a", range(8), 16, priority=1))
    loop.add(request("b", range(20, 28), 16))
    loop.drain()
    assert (loop.last["a"].preemptions, loop.last["b"].preemptions) == (1, 0)


def test_multi_step_falls_to_one_before_anyone_is_preempted():
    loop = preempting(num_pages=11, max_decode_steps=8)
    while loop.scheduler.stats().preemptions == 0:
        loop.step()
    assert [batch.num_steps for batch in loop.batches] == [1, 8, 1, 1, 1, 1, 1]


def test_a_preempted_request_that_ends_in_flight_ends_from_the_queue():
    loop = preempting(overlap=True)
    loop.device.poisoned = {"b"}
    in_flight = loop.scheduler.schedule(0.0)
    state = loop.scheduler._states["b"]
    loop.scheduler._preempt(state)
    loop.scheduler.check()
    events = loop.scheduler.commit(in_flight, loop.device.run(in_flight), 0.0)
    assert [(event.request_id, event.finish_reason) for event in events] == [
        ("a", None),
        ("b", "error"),
    ]
    loop.scheduler.check()


def test_a_row_resumes_from_shared_pages():
    loop = loop_of(num_pages=9)
    loop.add(request("a", range(8), 16))
    loop.add(request("b", range(20, 28), 16))
    answers = loop.drain()
    resumed = [row for batch in loop.batches for row in batch.rows if row.reset][-1]
    assert resumed.start > 0
    assert loop.last["b"].cached_tokens == 0  # recomputation is not billed as a hit
    assert answers["b"] == alone(loop.requests["b"])


# Overlap and multi-step


def test_under_overlap_the_last_token_stays_on_the_device():
    loop = loop_of(overlap=True)
    loop.add(request("a", max_tokens=3))
    first = loop.scheduler.schedule(0.0)
    second = loop.scheduler.schedule(0.0)
    (row,) = second.rows
    assert (row.from_previous, row.tokens, row.start, row.generated) == (True, (), 9, 1)
    with pytest.raises(RuntimeError, match="2 batches are in flight"):
        loop.scheduler.schedule(0.0)
    with pytest.raises(ValueError, match="batch 1 is not the oldest"):
        loop.scheduler.commit(second, [RowResult((1,))], 0.0)
    with pytest.raises(ValueError, match="0 results for the 1 rows"):
        loop.scheduler.commit(first, [], 0.0)
    loop.scheduler.commit(first, [RowResult((1,))], 0.0)
    third = loop.scheduler.schedule(0.0)
    assert third.rows[0].generated == 2
    loop.scheduler.commit(second, [RowResult((1,))], 0.0)
    assert loop.scheduler.schedule(0.0) is None  # its third token is in flight
    (event,) = loop.scheduler.commit(third, [RowResult((1,))], 0.0)
    assert event.finish_reason == "length"


def test_without_overlap_a_batch_is_committed_before_the_next():
    loop = loop_of()
    loop.add(request("a"))
    loop.scheduler.schedule(0.0)
    with pytest.raises(RuntimeError, match="1 batches are in flight"):
        loop.scheduler.schedule(0.0)


def test_several_steps_a_dispatch_end_with_each_row():
    loop = loop_of(max_decode_steps=8)
    loop.add(request("a", max_tokens=3))
    loop.add(request("b", max_tokens=7))
    step(loop)
    assert step(loop) == [("a", 9, 1, 2), ("b", 9, 1, 6)]
    assert loop.batches[-1].num_steps == 6
    assert loop.drain() == {id_: alone(loop.requests[id_]) for id_ in "ab"}


@pytest.mark.parametrize(("when_waiting", "steps"), [(False, 1), (True, 4)])
def test_several_steps_while_someone_waits_are_a_choice(when_waiting, steps):
    loop = loop_of(max_num_seqs=1, max_decode_steps=4, multi_step_when_waiting=when_waiting)
    loop.add(request("a"))
    loop.add(request("b"))
    step(loop)
    assert step(loop) == [("a", 9, 1, steps)]


def test_one_step_while_someone_can_be_admitted():
    loop = loop_of(max_decode_steps=4, multi_step_when_waiting=True)
    loop.add(request("a"))
    step(loop)
    loop.add(request("b"))
    assert step(loop) == [("a", 9, 1, 1), ("b", 8, 1, 1)]


def test_tokens_past_a_stop_are_dropped():
    loop = loop_of(max_decode_steps=4)
    loop.add(request("a", stop_token_ids=(5,)))
    first, results = loop.scheduler.schedule(0.0), [RowResult((1,))]
    loop.scheduler.commit(first, results, 0.0)
    second = loop.scheduler.schedule(0.0)
    (event,) = loop.scheduler.commit(second, [RowResult((2, 5, 3, 3))], 0.0)
    assert event.token_ids == (2, 5)
    assert (event.finish_reason, event.stop_token) == ("stop", 5)
    assert loop.scheduler.stats().generated_tokens == 3


@pytest.mark.parametrize(("ignore", "reason"), [(False, "stop"), (True, "length")])
def test_end_of_sequence_ends_unless_ignored(ignore, reason):
    scheduler = Scheduler(config())
    params = SamplingParams(max_tokens=1, ignore_eos=ignore)
    scheduler.add(Request("a", PROMPT, params, eos_ids=(9,)), 0.0)
    batch = scheduler.schedule(0.0)
    (event,) = scheduler.commit(batch, [RowResult((9,))], 0.0)
    assert event.finish_reason == reason
    assert event.token_ids == (9,)


# Ends of other kinds


@pytest.mark.parametrize("overlap", [False, True])
def test_abort_frees_everything_at_once_wherever_the_request_is(overlap):
    loop = loop_of(max_num_seqs=1, overlap=overlap)
    loop.add(request("running"))
    loop.add(request("waiting"))
    batch = loop.scheduler.schedule(0.0)
    event = loop.scheduler.abort("running")
    assert (event.request_id, event.finish_reason, event.token_ids) == ("running", "abort", ())
    assert loop.scheduler.stats().pages_used == 0
    loop.scheduler.check()
    loop.scheduler.abort("waiting")
    assert loop.scheduler.abort("unknown") is None
    assert loop.scheduler.has_work()  # the batch in flight
    assert loop.scheduler.commit(batch, [RowResult((1,))], 0.0) == []
    assert not loop.scheduler.has_work()


def test_an_id_used_again_does_not_inherit_what_is_in_flight():
    loop = loop_of(overlap=True)
    loop.add(request("a"))
    old = loop.scheduler.schedule(0.0)
    loop.scheduler.abort("a")
    loop.scheduler.add(request("a", (9, 9, 9)), 0.0)
    new = loop.scheduler.schedule(0.0)
    assert (new.rows[0].slot, new.rows[0].reset) == (old.rows[0].slot, True)
    assert loop.scheduler.commit(old, [RowResult((1,))], 0.0) == []
    (event,) = loop.scheduler.commit(new, [RowResult((2,))], 0.0)
    assert event.token_ids == (2,)


def test_a_stop_string_is_told_to_the_counters():
    loop = loop_of()
    loop.add(request("a"))
    assert loop.scheduler.abort("a", "stop").finish_reason == "stop"
    assert loop.scheduler.stats().finished == {"stop": 1}


def test_an_error_fails_its_request_alone_and_its_pages_are_not_shared():
    loop = loop_of(max_batch_tokens=64)
    loop.device.poisoned = {"bad"}
    loop.add(request("bad"))
    loop.add(request("good", range(12)))
    loop.step()
    assert loop.last["bad"].error == "NaN logits"
    loop.scheduler.check()
    loop.add(request("again"))
    assert step(loop) == [("good", 12, 1, 1), ("again", 0, 9, 1)]
    assert loop.drain()["good"] == alone(loop.requests["good"])


def test_a_device_that_breaks_its_word_fails_the_request():
    loop = loop_of()
    loop.add(request("a"))
    batch = loop.scheduler.schedule(0.0)
    (event,) = loop.scheduler.commit(batch, [RowResult(())], 0.0)
    assert event.error == "0 tokens came back for 1 draws"
    loop.add(request("b", prompt_logprobs=0))
    batch = loop.scheduler.schedule(0.0)
    (event,) = loop.scheduler.commit(batch, [RowResult((1,))], 0.0)
    assert event.error == "prompt logprobs are missing"


@pytest.mark.parametrize("chunk", [None, 4, 1])
def test_a_prompt_is_scored_without_sampling(chunk):
    loop = loop_of(max_chunk_tokens=chunk)
    loop.add(request("a", max_tokens=0, prompt_logprobs=0))
    answer = loop.drain()["a"]
    assert answer == alone(loop.requests["a"])
    assert (answer.tokens, answer.reason, len(answer.prompt_logprobs)) == ([], "length", 9)
    assert not any(row.samples for batch in loop.batches for row in batch.rows)


# The rest of the surface


def test_a_reset_fails_what_was_running_and_keeps_what_waits():
    loop = loop_of(overlap=True, max_num_seqs=1)
    loop.add(request("runs"))
    loop.add(request("waits"))
    loop.scheduler.schedule(0.0)
    failed = loop.scheduler.reset("the device is gone")
    assert [(e.request_id, e.finish_reason, e.error) for e in failed] == [
        ("runs", "error", "the device is gone")
    ]
    loop.scheduler.check()
    (row,) = loop.scheduler.schedule(0.0).rows
    assert (row.request_id, row.start, row.reset) == ("waits", 0, True)


def test_a_reset_keeps_a_preempted_request():
    loop = preempting()
    while loop.scheduler.stats().preemptions == 0:
        loop.step()
    failed = loop.scheduler.reset("gone")
    assert [event.request_id for event in failed] == ["a"]
    loop._in_flight.clear()
    loop.device.cells.clear()
    assert loop.drain()["b"] == alone(loop.requests["b"])


def test_a_reset_fails_a_preempted_request_whose_token_was_in_flight():
    loop = preempting(overlap=True)
    for _ in range(3):
        loop.step()
    assert loop.scheduler._states["b"].pending
    loop.scheduler._preempt(loop.scheduler._states["b"])
    assert {event.request_id for event in loop.scheduler.reset("gone")} == {"a", "b"}
    loop.scheduler.check()
    assert not loop.scheduler.has_work()


def test_pages_can_be_borrowed():
    scheduler = Scheduler(config(num_pages=9))
    with scheduler.borrow_pages(17) as pages:
        assert len(set(pages.tolist())) == 5
        assert scheduler.stats().pages_used == 5
    scheduler.check()
    with pytest.raises(ValueError, match="33 tokens need 9 pages; 8 are available"):
        scheduler.borrow_pages(33).__enter__()


def test_counters_and_times():
    loop = loop_of(max_num_seqs=1)
    loop.add(request("a", max_tokens=2))
    loop.add(request("b", max_tokens=2))
    while loop.scheduler.has_work():
        loop.step()
        loop.now += 1.0
    stats = loop.scheduler.stats()
    assert (stats.steps, stats.prompt_tokens, stats.generated_tokens) == (4, 18, 4)
    assert stats.finished == {"length": 2}
    assert (stats.queue_seconds, stats.prefill_seconds, stats.decode_seconds) == (2.0, 0.0, 2.0)
    assert (stats.waiting, stats.running, stats.pages_used, stats.pages_total) == (0, 0, 0, 64)


def test_a_preempted_request_waits_for_its_tokens_in_flight():
    loop = loop_of(overlap=True)
    loop.add(request("a"))
    in_flight = loop.scheduler.schedule(0.0)
    loop.scheduler._preempt(loop.scheduler._states["a"])
    assert loop.scheduler.schedule(0.0) is None
    loop.scheduler.commit(in_flight, [RowResult((5,))], 0.0)
    (row,) = loop.scheduler.schedule(0.0).rows
    assert (row.tokens, row.emitted, row.start) == ((5, 5), (5,), 8)
