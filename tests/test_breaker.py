"""The restart budget, on a clock turned by hand."""

import pytest

from octavo.serve.breaker import LONGEST_PAUSE, RestartBudget


class Clock:
    def __init__(self):
        self.now = 1000.0

    def __call__(self):
        return self.now


def delays(budget, clock, count, gap=0.0):
    """Delays before each of `count` restarts that happen as soon as they may, `gap` apart."""
    out = []
    for _ in range(count):
        out.append(budget.delay())
        clock.now += out[-1]
        budget.note()
        clock.now += gap
    return out


def test_pauses_grow_until_the_budget_is_spent_and_then_the_window_decides():
    clock = Clock()
    budget = RestartBudget(3, 600.0, clock)
    assert delays(budget, clock, 3) == [0.0, 1.0, 2.0]
    assert budget.spent()
    assert budget.delay() == 600.0 - 3.0  # until the first is out of the window
    clock.now += 597.0
    assert not budget.spent()
    assert budget.delay() == 2.0
    budget.note()
    assert budget.spent()
    assert budget.delay() == pytest.approx(4.0, abs=3.1)


@pytest.mark.parametrize("limit", [1, 3, 10])
def test_no_window_ever_holds_more_restarts_than_allowed(limit):
    clock = Clock()
    budget = RestartBudget(limit, 60.0, clock)
    times = []
    for _ in range(40):
        clock.now += budget.delay()
        budget.note()
        times.append(clock.now)
    assert all(later - earlier >= 60.0 for earlier, later in zip(times, times[limit:]))


def test_restarts_far_apart_come_at_once():
    clock = Clock()
    assert delays(RestartBudget(3, 600.0, clock), clock, 5, gap=601.0) == [0.0] * 5


def test_pauses_are_bounded():
    clock = Clock()
    assert max(delays(RestartBudget(50, 1e6, clock), clock, 20)) == LONGEST_PAUSE


def test_no_budget_means_never():
    assert RestartBudget(0, 600.0).delay() == float("inf")
