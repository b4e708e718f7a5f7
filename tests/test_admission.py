"""Bounds of the waiting queue by tokens and by estimated wait, and the step clock's arithmetic."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from scheduler_cases import loop_of, request

from octavo.serve.admission import PrefillRate
from octavo.serve.histogram import Histogram
from octavo.serve.queue import MAX_RETRY_SECONDS, QueueFull
from octavo.serve.step_clock import StepClock
from octavo.serve.types import ScheduledBatch


def refusal(loop, asked):
    """The QueueFull that a newcomer meets; nothing else may have changed."""
    before = len(loop.scheduler.request_ids())
    with pytest.raises(QueueFull) as caught:
        loop.scheduler.add(asked, loop.now)
    assert len(loop.scheduler.request_ids()) == before
    loop.scheduler.check()
    return caught.value


def test_waiting_prompt_tokens_are_bounded_but_a_lone_request_always_enters():
    loop = loop_of(max_waiting_tokens=20)
    loop.add(request("long", range(1, 31)))
    error = refusal(loop, request("b"))
    assert "30 prompt tokens are waiting and this prompt has 9, the bound is 20" in str(error)
    loop.step()
    loop.add(request("b"))
    loop.add(request("c"))
    refusal(loop, request("d"))
    stats = loop.scheduler.stats()
    assert (stats.waiting_tokens, stats.refused) == (18, {"count": 0, "tokens": 2, "wait": 0})
    loop.scheduler.abort("b")
    assert loop.scheduler.stats().waiting_tokens == 9


def test_who_was_let_in_by_an_engine_that_has_died_is_let_in_again():
    loop = loop_of(max_waiting=1, max_waiting_tokens=1)
    loop.add(request("a"))
    assert "the bound is 1" in str(refusal(loop, request("b")))
    loop.add(replace(request("c"), readmitted=True))
    loop.scheduler.check()


def busy(**fields):
    """A loop with one row that has prefilled 8 tokens in each of two steps of a second."""
    loop = loop_of(max_num_seqs=1, max_batch_tokens=8, **fields)
    loop.add(request("runs", range(1, 25)))
    for _ in range(3):
        loop.step()
        loop.now += 1.0
    return loop


def test_the_estimated_wait_follows_the_measured_rate():
    loop = busy(max_estimated_wait=2.0)
    for name in "abc":  # 0, 9 and 18 tokens ahead at 8 a second: 0, 1.1 and 2.3 seconds
        if name != "c":
            loop.add(request(name))
    error = refusal(loop, request("c"))
    assert "the wait would be about 2.25 s, the bound is 2 s" in str(error)
    assert error.retry_after == pytest.approx(1.0)
    assert loop.scheduler.stats().estimated_wait == pytest.approx(18 / 8, rel=0.01)
    assert loop.scheduler.stats().refused["wait"] == 1
    loop.add(request("urgent", priority=-1000))  # nobody is before it


def test_a_queue_that_does_not_move_refuses_until_it_is_empty():
    loop = busy(max_estimated_wait=2.0)
    loop.add(request("a"))
    for _ in range(5):  # the one row decodes, and steps take long
        loop.now += 30.0
        loop.step()
    error = refusal(loop, request("b"))
    assert error.retry_after > 30
    loop.abort("a")
    loop.add(request("b"))


def test_without_a_measurement_nobody_is_refused_for_the_wait():
    loop = loop_of(max_estimated_wait=0.001)
    for i in range(50):
        loop.add(request(str(i)))
    assert loop.scheduler.stats().estimated_wait == 0.0


def test_idle_time_does_not_count_against_the_rate():
    rate = PrefillRate()
    assert rate.seconds(10) is None
    rate.note(0.0, 100, waiting=False)
    rate.note(1.0, 0, waiting=False)
    assert rate.seconds(50) == pytest.approx(0.5)
    rate.note(1000.0, 100, waiting=False)
    rate.note(1001.0, 0, waiting=False)
    assert rate.seconds(50) == pytest.approx(0.5)


@given(st.lists(st.tuples(st.floats(0, 100), st.integers(0, 1000), st.booleans()), max_size=30))
def test_the_rate_is_never_negative_and_never_raises(steps):
    rate, now = PrefillRate(), 0.0
    for seconds, tokens, waiting in steps:
        now += seconds
        rate.note(now, tokens, waiting=waiting)
        assert (rate.seconds(7) or 0.0) >= 0.0
        assert rate.seconds(0) in (None, 0.0)


def test_retry_after_is_bounded():
    loop = busy(max_waiting=1)
    loop.now += 1e6
    loop.add(request("a"))
    loop.step()
    loop.now += 1e6
    loop.step()
    assert refusal(loop, request("b")).retry_after == MAX_RETRY_SECONDS


def test_the_first_event_says_where_the_time_went():
    loop = loop_of(max_num_seqs=1)
    loop.add(request("a", max_tokens=2))
    loop.add(request("b", max_tokens=2))
    first = {}
    while loop.scheduler.has_work():
        loop.now += 1.0
        for event in loop.step():
            first.setdefault(event.request_id, []).append(event.waited)
    assert first == {"a": [(1.0, 0.0), None], "b": [(3.0, 0.0), None]}


def test_histograms_count_by_inclusive_upper_bound():
    histogram = Histogram((1.0, 2.0))
    histogram.observe(1.0)
    histogram.observe(1.5, times=3)
    histogram.observe(9.0)
    assert histogram.cumulative() == [("1.0", 1), ("2.0", 4), ("+Inf", 5)]
    assert histogram.total == 14.5


def test_step_times_under_overlap_and_known_idle_time():
    clock, step, four = StepClock(), ScheduledBatch(0, ()), ScheduledBatch(1, (), 4)
    clock.dispatched(step, 10.0, late=False)
    clock.dispatched(four, 11.0, late=False)
    assert clock.answered(step, 12.0) == 2.0  # from its dispatch
    assert clock.answered(four, 16.0) == 4.0  # from the answer before: the device was busy
    clock.rest(16.0, live=True)
    clock.dispatched(step, 16.5, late=True)
    assert clock.answered(step, 17.0) == 0.5
    clock.rest(17.0, live=False)
    clock.dispatched(step, 99.0, late=False)
    assert (clock.idle_seconds, clock.late_dispatches) == (0.5, 1)
    assert (sum(clock.seconds.counts), clock.seconds.total) == (6, 6.5)
