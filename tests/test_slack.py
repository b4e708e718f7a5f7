"""How long a dispatch may be put off: never past the end of what the device has to do."""

from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tiny import tiny_engine

from octavo.sampling.params import SamplingParams
from octavo.serve.inflight import InFlight
from octavo.serve.slack import DispatchSlack, Window
from octavo.serve.types import Request

STEADY = 30


def learnt(device, host=0.001, late=False, times=STEADY):
    slack = DispatchSlack()
    for _ in range(times):
        answer(slack, device)
        dispatch(slack, host, late=late)
    return slack


def answer(slack, seconds, kind="decode", awaited=True):
    slack.answered(kind, seconds, awaited=awaited)


def dispatch(slack, seconds, prompts=False, late=False):
    slack.dispatched(seconds, prompts=prompts, late=late)


def left(slack, since=0.0, now=0.0, kind="decode", prompts=False):
    return slack.left(kind, since, now, prompts=prompts)


def test_nothing_is_put_off_before_anything_is_known():
    slack = DispatchSlack()
    assert left(slack) == 0.0
    for _ in range(Window.FEWEST):
        assert left(slack) == 0.0
        answer(slack, 0.01)
    assert left(slack) == 0.0  # how long a dispatch takes is not known
    for _ in range(Window.FEWEST):
        dispatch(slack, 0.001)
    assert left(slack, kind="mixed") == 0.0
    assert left(slack) > 0.0


def test_a_steady_device_is_used_to_its_end_less_the_time_of_a_dispatch():
    slack = learnt(0.010)
    assert left(slack, 5.0, 5.0) == pytest.approx(0.010 - 0.001 - 0.0003, abs=1e-5)
    assert left(slack, 5.0, 5.004) == pytest.approx(0.0047, abs=1e-5)
    assert left(slack, 5.0, 5.0095) == 0.0


def test_a_device_that_ran_dry_because_of_it_is_given_more_time():
    slack = learnt(0.010)
    dispatch(slack, 0.001, late=True)  # of no consequence: nothing was put off
    before = left(slack)
    assert before == pytest.approx(left(learnt(0.010)), abs=1e-5)
    dispatch(slack, 0.001, late=True)
    assert 0.0 < left(slack) < before


def test_a_hiccup_takes_nothing_from_those_who_come_after_it():
    slack = learnt(0.010)
    before = left(slack)
    answer(slack, 0.002)  # read late, and so the next one early
    answer(slack, 0.018)
    dispatch(slack, 0.009)
    assert left(slack) == pytest.approx(before, abs=1e-5)


def test_a_change_that_stays_is_learnt():
    slack = learnt(0.010)
    for _ in range(Window.LENGTH):
        answer(slack, 0.006)
        dispatch(slack, 0.002)
    assert left(slack) == pytest.approx(0.006 - 0.002 - 0.0003, abs=1e-5)


def test_prompts_are_put_off_by_less_than_what_is_made_sooner():
    slack = learnt(0.010)
    assert left(slack, prompts=True) == 0.0
    for _ in range(STEADY):
        dispatch(slack, 0.004, prompts=True)
    assert left(slack, prompts=True) == pytest.approx(0.010 - 0.004 - 0.0003, abs=1e-5)
    assert left(slack) == pytest.approx(0.010 - 0.001 - 0.0003, abs=1e-5)


@pytest.mark.parametrize("prompts", [False, True])
def test_a_dispatch_that_takes_longer_all_at_once_does_not_slow_the_steps_more_and_more(prompts):
    """What is read late seems to have taken longer, which must not put off the next one more."""
    slack, now, ends, took = DispatchSlack(), 0.0, 0.0, []
    for step in range(600):
        since = ends
        ends = max(now, ends) + 0.010
        now += left(slack, since, now, prompts=prompts)
        now += 0.001 if step < 200 else 0.006
        late = now >= ends
        dispatch(slack, 0.001 if step < 200 else 0.006, prompts=prompts, late=late)
        now = max(now, ends)
        answer(slack, now - since, awaited=not late)
        took.append(now - since)
    assert max(took[100:200]) < 0.0101
    assert max(took[200:]) < 0.0155, "later by what it takes longer"
    assert max(took[300:]) < 0.0101, "and in time again soon"


def test_what_varies_is_put_off_for_most_of_its_time_and_hardly_ever_late():
    """A step of the 8B model, and what making a dispatch takes, with the spread of both."""
    slack, random, late, put_off = DispatchSlack(), Random(0), 0, []
    for _ in range(2000):
        device, host = random.gauss(0.0047, 0.0001), random.gauss(0.0013, 0.0001)
        put_off.append(left(slack))
        dry = put_off[-1] + host > device
        late += dry
        dispatch(slack, host, late=dry)
        answer(slack, device, awaited=not dry)
    assert late < 20
    assert sum(put_off) / len(put_off) > 0.0026


@given(
    st.lists(st.floats(1e-4, 0.2), min_size=1, max_size=40),
    st.lists(st.floats(1e-5, 0.02), min_size=1, max_size=40),
    st.floats(0, 0.3),
)
def test_never_beyond_the_longest_less_the_shortest_dispatch(device, host, passed):
    slack = DispatchSlack()
    for seconds in device:
        answer(slack, seconds)
    for seconds in host:
        dispatch(slack, seconds)
    assert 0.0 <= left(slack, 1.0, 1.0 + passed) <= max(0.0, max(device) - passed - min(host))


class Clock:
    """Moved by hand; every reading of it takes `step`."""

    def __init__(self, step):
        self.now, self.step = 0.0, step

    def __call__(self):
        self.now += self.step
        return self.now


@pytest.mark.parametrize(("overlap", "done"), [(True, False), (True, True), (False, False)])
def test_an_engine_puts_off_what_follows_a_dispatch_in_flight(overlap, done, monkeypatch):
    monkeypatch.setattr(InFlight, "done", done)
    clock = Clock(1e-6)
    engine = tiny_engine(overlap=overlap, max_decode_steps=1, clock=clock)
    assert engine.slack() == 0.0
    params = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)
    engine.add(Request("r", (5, 6, 7), params))
    found = []
    for _ in range(30):
        engine.step()
        found.append(engine.slack())
        clock.now += 0.02  # the device is taken to have computed so long
    # A device that is always done when it is looked at may be much faster than that.
    assert (max(found) > 0.01) is (overlap and not done)
    while engine.has_work():
        engine.step()
    assert engine.slack() == 0.0
