"""How long a dispatch may be put off: never past the end of what the device has to do."""

from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tiny import tiny_engine

from octavo.sampling.params import SamplingParams
from octavo.serve.slack import DispatchSlack, Window
from octavo.serve.types import Request

STEADY = 30


def learnt(device, host=0.001, late=False, times=STEADY):
    slack = DispatchSlack()
    for _ in range(times):
        slack.answered("decode", device)
        slack.dispatched(host, late=late)
    return slack


def test_nothing_is_put_off_before_anything_is_known():
    slack = DispatchSlack()
    assert slack.left("decode", 0.0, 0.0) == 0.0
    for _ in range(Window.FEWEST):
        assert slack.left("decode", 0.0, 0.0) == 0.0
        slack.answered("decode", 0.01)
    assert slack.left("decode", 0.0, 0.0) == 0.0  # how long a dispatch takes is not known
    for _ in range(Window.FEWEST):
        slack.dispatched(0.001, late=False)
    assert slack.left("mixed", 0.0, 0.0) == 0.0
    assert slack.left("decode", 0.0, 0.0) > 0.0


def test_a_steady_device_is_used_to_its_end_less_the_time_of_a_dispatch():
    slack = learnt(0.010)
    assert slack.left("decode", 5.0, 5.0) == pytest.approx(0.010 - 0.001 - 0.0003, abs=1e-5)
    assert slack.left("decode", 5.0, 5.004) == pytest.approx(0.0047, abs=1e-5)
    assert slack.left("decode", 5.0, 5.0095) == 0.0


def test_a_device_that_ran_dry_because_of_it_is_given_more_time():
    slack = learnt(0.010)
    slack.dispatched(0.001, late=True)  # of no consequence: nothing was put off
    before = slack.left("decode", 0.0, 0.0)
    assert before == pytest.approx(learnt(0.010).left("decode", 0.0, 0.0), abs=1e-5)
    slack.dispatched(0.001, late=True)
    assert 0.0 < slack.left("decode", 0.0, 0.0) < before


def test_a_hiccup_takes_nothing_from_those_who_come_after_it():
    slack = learnt(0.010)
    before = slack.left("decode", 0.0, 0.0)
    slack.answered("decode", 0.002)  # read late, and so the next one early
    slack.answered("decode", 0.018)
    slack.dispatched(0.009, late=False)
    assert slack.left("decode", 0.0, 0.0) == pytest.approx(before, abs=1e-5)


def test_a_change_that_stays_is_learnt():
    slack = learnt(0.010)
    for _ in range(Window.LENGTH):
        slack.answered("decode", 0.006)
        slack.dispatched(0.002, late=False)
    assert slack.left("decode", 0.0, 0.0) == pytest.approx(0.006 - 0.002 - 0.0003, abs=1e-5)


def test_what_varies_is_put_off_for_most_of_its_time_and_hardly_ever_late():
    """A step of the 8B model, and what making a dispatch takes, with the spread of both."""
    slack, random, late, put_off = DispatchSlack(), Random(0), 0, []
    for _ in range(2000):
        device, host = random.gauss(0.0047, 0.0001), random.gauss(0.0013, 0.0001)
        left = slack.left("decode", 0.0, 0.0)
        dry = left + host > device
        late += dry
        put_off.append(left)
        slack.dispatched(host, late=dry)
        slack.answered("decode", max(device, left + host) if dry else device)
    assert late < 40
    assert sum(put_off) / len(put_off) > 0.0026


@given(
    st.lists(st.floats(1e-4, 0.2), min_size=1, max_size=40),
    st.lists(st.floats(1e-5, 0.02), min_size=1, max_size=40),
    st.floats(0, 0.3),
)
def test_never_beyond_the_longest_less_the_shortest_dispatch(device, host, passed):
    slack = DispatchSlack()
    for seconds in device:
        slack.answered("decode", seconds)
    for seconds in host:
        slack.dispatched(seconds, late=False)
    left = slack.left("decode", 1.0, 1.0 + passed)
    assert 0.0 <= left <= max(0.0, max(device) - passed - min(host))


class Clock:
    """Moved by hand; every reading of it takes `step`."""

    def __init__(self, step):
        self.now, self.step = 0.0, step

    def __call__(self):
        self.now += self.step
        return self.now


@pytest.mark.parametrize("overlap", [True, False])
def test_an_engine_puts_off_what_follows_a_dispatch_in_flight(overlap):
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
    # However often the device ran dry meanwhile: 0.02 less the largest margin is left.
    assert (max(found) > 0.01) is overlap
    while engine.has_work():
        engine.step()
    assert engine.slack() == 0.0
