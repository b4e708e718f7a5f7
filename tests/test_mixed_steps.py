"""How long steps are that requests decode in; simulated time where time matters."""

from fake_device import Loop
from hypothesis import given
from hypothesis import strategies as st
from scheduler_cases import config, loop_of, request, step

from octavo.serve.buckets import make_buckets
from octavo.serve.mixed_steps import FULL_ROWS, MixedSteps, least_tokens
from octavo.serve.scheduler import Scheduler

CLASSES = make_buckets(1024, 8192, 64, fine=True).mixed_tokens


def tokens(rows, *, least=640, serving=True, lead=1):
    """Tokens that a whole step with so many decode rows holds at most."""
    steps = MixedSteps(least, CLASSES, serving=serving)
    return min(steps.prefill_tokens(rows, lambda: lead) + rows, CLASSES[-1])


def test_the_more_wait_the_shorter_a_step_is():
    assert [tokens(rows) for rows in (0, 1, 20, 40, 64, 128, 200, 256, 400)] == [
        *(8192, 8192, 8192, 4096, 2048, 1280, 768, 640, 640)
    ]


def test_rows_that_decode_leave_room_for_prompts():
    assert [tokens(rows) for rows in (500, 640, 1000)] == [640, 896, 1280]


@given(rows=st.integers(1, 1024), least=st.integers(1, 8192))
def test_a_step_is_a_class_and_longer_only_for_fewer(rows, least):
    size = tokens(rows, least=least)
    needed = min(known for known in CLASSES if known >= rows * 1.25)
    assert size in CLASSES
    assert size >= needed
    if rows > 1 and size > needed:
        assert size <= tokens(rows - 1, least=least)
        assert size <= max(CLASSES[0], least * max(1, FULL_ROWS / rows))


def test_the_largest_class_is_the_limit_of_all():
    steps = MixedSteps(1, (32, 128), serving=True)
    assert [steps.prefill_tokens(rows, lambda: 1) for rows in (20, 100, 120)] == [12, 28, 8]


def test_offline_steps_are_short_only_beside_rows_that_have_longest_to_go():
    assert [tokens(256, serving=False, lead=lead) for lead in (-5, 0, 1)] == [8192, 8192, 640]


def test_a_step_lasts_as_long_for_every_model():
    assert [least_tokens(6_979_321_856, 1), least_tokens(10**9, 2)] == [687, 9600]
    assert least_tokens(70 * 10**9, 1) == 256  # no step of fewer is shorter


def test_lead_is_what_the_longest_row_has_to_go_more_than_any_that_does_not_decode():
    leads = []

    def allowed(rows, lead):
        leads.append(lead())
        return 6

    loop = loop_of(allowed, prefix_caching=False)
    loop.add(request("a", range(5), max_tokens=8))
    assert step(loop) == [("a", 0, 5, 1)]
    loop.add(request("b", range(20, 30), max_tokens=5))
    assert step(loop) == [("a", 5, 1, 1), ("b", 0, 6, 1)]
    assert step(loop) == [("a", 6, 1, 1), ("b", 6, 4, 1)]
    step(loop)
    assert leads == [-8, 6 - 5, 5 - 5, 4]


# In the loop ------------------------------------------------------------------------------------


class TimedLoop(Loop):
    """On a device whose steps cost 4 ms, or 20 us a token of their class if that is more."""

    def __init__(self, budget):
        settings = config(
            max_num_seqs=128,
            max_batch_tokens=2048,
            num_pages=16384,
            max_model_len=512,
            prefix_caching=False,
        )
        self.buckets = make_buckets(128, 2048, 64, fine=True)
        super().__init__(Scheduler(settings, budget))
        self.seconds = 0.0

    def step(self):
        before = len(self.batches)
        events = super().step()
        for batch in self.batches[before:]:
            size = batch.num_tokens
            if not batch.is_decode:
                size = self.buckets.mixed(size, len(batch.rows), 1).tokens
            self.seconds += max(0.004, 20e-6 * size)
        return events


def run(asked, *, budget):
    """Seconds until all of `asked`, (prompt, max_tokens) in this order, have ended."""
    loop = TimedLoop(budget)
    for index, (prompt, most) in enumerate(asked):
        loop.add(request(str(index), [index % 17] * prompt, max_tokens=most))
    while loop.scheduler.has_work():
        loop.step()
    return loop.seconds


def offline_steps():
    classes = make_buckets(128, 2048, 64, fine=True).mixed_tokens
    return MixedSteps(16, classes, serving=False).prefill_tokens


def test_short_prompts_fit_in_beside_long_answers():
    """Longest first, and steps short while these are what the end waits for."""
    asked = [(200, 200 if index % 16 == 15 else 5) for index in range(96)]
    longest_first = sorted(asked, key=lambda pair: -pair[1])
    seconds = run(longest_first, budget=offline_steps())
    assert seconds < 0.95 * run(asked, budget=None)
    assert seconds < 0.95 * run(longest_first, budget=None)


def test_answers_of_one_length_are_begun_as_soon_as_they_can():
    asked = [(100, 40)] * 96
    assert run(asked, budget=offline_steps()) == run(asked, budget=None)
