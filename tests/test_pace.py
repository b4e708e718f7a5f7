"""The choice of steps a dispatch: within the limit, whatever times are measured."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from octavo.serve.pace import DecodePace


def test_no_limit_takes_every_step():
    assert DecodePace(None, 8).steps() == 8


def test_one_step_until_measured():
    pace = DecodePace(0.004, 8)
    assert pace.steps() == 1
    pace.note(0.0005, 1)
    assert pace.steps() == 5


@pytest.mark.parametrize(("seconds", "steps"), [(0.08, 1), (0.0021, 1), (0.001, 3), (0.0001, 8)])
def test_long_steps_run_alone(seconds, steps):
    pace = DecodePace(0.004, 8)
    pace.note(seconds, 1)
    assert pace.steps() == steps


@given(st.lists(st.tuples(st.floats(1e-5, 1.0), st.integers(1, 8)), min_size=1))
def test_added_wait_stays_within_the_limit(measurements):
    pace = DecodePace(0.004, 8)
    for seconds, steps in measurements:
        pace.note(seconds, steps)
    times = [seconds / steps for seconds, steps in measurements]
    steps = pace.steps()
    assert 1 <= steps <= 8
    assert 2 * (steps - 1) * min(times) <= 0.004 + 1e-9
