"""max_step_ms: gaps between running requests' tokens while long prompts arrive; simulated time."""

import random

import pytest
from fake_device import Loop, alone
from hypothesis import given, settings
from hypothesis import strategies as st
from scheduler_cases import config, request

from octavo.serve.buckets import make_buckets
from octavo.serve.pace import DecodePace
from octavo.serve.scheduler import Scheduler
from octavo.serve.step_budget import StepBudget

CLASSES = (32, 64, 128, 256)


def even():
    """A lead of no tokens: the limit holds whatever it is."""
    return 0


def budget_of(limit=0.010):
    return StepBudget(limit, CLASSES)


# The model --------------------------------------------------------------------------------------


def test_only_the_smallest_class_before_anything_is_measured():
    assert budget_of().prefill_tokens(2, even) == 30


def test_nobody_waits_for_a_token_without_decode_rows():
    assert budget_of().prefill_tokens(0, even) == 256


def test_larger_classes_are_allowed_as_far_as_measurements_say():
    budget = budget_of()
    budget.note(20, 0.004)
    assert budget.prefill_tokens(2, even) == 62, "twice 4 ms fits, four times doesn't"
    budget.note(60, 0.0045)
    assert budget.prefill_tokens(2, even) == 126
    budget.note(120, 0.011)
    assert budget.prefill_tokens(2, even) == 62


def test_a_class_costs_no_more_than_a_larger_one():
    budget = budget_of()
    budget.note(128, 0.009)
    assert budget.prefill_tokens(2, even) == 126


def test_a_limit_that_nothing_meets_leaves_nothing():
    budget = budget_of()
    budget.note(20, 0.02)
    assert budget.prefill_tokens(2, even) == 0


def test_one_hiccup_does_not_count():
    budget = budget_of()
    for seconds in (0.004, 1.0, 0.004):
        budget.note(30, seconds)
    assert budget.prefill_tokens(2, even) == 62


def test_a_class_that_was_too_slow_is_tried_again_in_the_end():
    budget = budget_of()
    budget.note(60, 1.0)
    for _ in range(StepBudget.FORGET - 1):
        budget.note(30, 0.004)
        assert budget.prefill_tokens(2, even) == 30
    budget.note(30, 0.004)
    assert budget.prefill_tokens(2, even) == 62


def test_decode_steps_share_the_gap():
    pace = DecodePace(None, 8, gap=0.010)
    assert pace.steps() == 1
    for seconds, steps in ((0.003, 3), (0.0001, 8), (0.02, 1)):
        pace = DecodePace(None, 8, gap=0.010)
        pace.note(seconds, 1)
        assert pace.steps() == steps


# In the loop ------------------------------------------------------------------------------------


class TimedLoop(Loop):
    """The engine's loop with overlap on a device that takes time; notes every token's gap."""

    def __init__(self, limit, cost, **fields):
        settings = config(overlap=True, max_decode_steps=8, **fields)
        most = settings.max_batch_tokens
        self.buckets = make_buckets(settings.max_num_seqs, most, 1, fine=True)
        self.budget = StepBudget(limit, self.buckets.mixed_tokens) if limit else None
        super().__init__(Scheduler(settings, self.budget and self.budget.prefill_tokens))
        self.pace = DecodePace(None if limit else 0.004, 8, limit)
        self.cost, self.free_at = cost, 0.0
        self.last_token: dict[str, float] = {}
        self.gaps: list[tuple[float, float]] = []

    def step(self):
        batch = self.scheduler.schedule(self.now, self.pace.steps())
        if batch is not None:
            self.batches.append(batch)
            begin = max(self.now, self.free_at)
            self.free_at = begin + self.cost(batch, self.buckets)
            self._in_flight.append((batch, self.device.run(batch), begin, self.free_at))
        if not self._in_flight or (batch is not None and len(self._in_flight) < 2):
            return []
        done, results, begin, self.now = self._in_flight.popleft()
        if done.is_decode:
            self.pace.note(self.now - begin, done.num_steps)
        elif self.budget:
            self.budget.note(done.num_tokens, self.now - begin)
        events = self.scheduler.commit(done, results, self.now)
        for event in events:
            self._take(event)
            if event.token_ids:
                before = self.last_token.get(event.request_id)
                self.last_token[event.request_id] = self.now
                if before is not None:
                    self.gaps.append((self.now, self.now - before))
        return events


def cost_model(seed):
    """Weights 4 ms, arithmetic 20 us a padded token, attention by context, 3 % of noise."""
    noise = random.Random(seed)

    def seconds(batch, buckets):
        if batch.is_decode:
            ideal = 0.004 * batch.num_steps
        else:
            padded = buckets.mixed(batch.num_tokens, len(batch.rows), 1).tokens
            attention = sum(row.query_len * row.start for row in batch.rows)
            ideal = 0.004 + 20e-6 * padded + 1e-9 * attention
        return ideal * noise.uniform(0.97, 1.03)

    return seconds


def long_prompts(limit):
    """Four running requests, then three prompts of 8k; the loop and the gaps meanwhile."""
    loop = TimedLoop(
        limit,
        cost_model(3),
        max_num_seqs=8,
        max_batch_tokens=2048,
        max_model_len=8400,
        num_pages=2200,
        page_size=16,
    )
    for index in range(4):
        loop.add(request(f"running-{index}", range(index, index + 20), max_tokens=400))
    while len(loop.last_token) < 4:
        loop.step()
    names = [f"long-{index}" for index in range(3)]
    began = loop.now
    for index, name in enumerate(names):
        loop.add(request(name, [(index * 7 + i) % 13 for i in range(8192)], max_tokens=2))
    while not all(name in loop.last_token for name in names):
        loop.step()
    gaps = sorted(gap for when, gap in loop.gaps if when > began)
    return loop, gaps[int(0.99 * (len(gaps) - 1))], loop.now - began


@pytest.mark.parametrize("limit", [0.010, 0.020])
def test_gaps_stay_within_the_limit_while_long_prompts_arrive(limit):
    loop, p99, _ = long_prompts(limit)
    assert p99 <= 1.1 * limit
    for id_, answer in loop.drain().items():
        assert answer.tokens == alone(loop.requests[id_]).tokens, id_


def test_without_a_limit_gaps_are_long_and_prompts_are_fast():
    _, p99, seconds = long_prompts(None)
    assert p99 > 0.040
    assert seconds < long_prompts(0.010)[2]


def test_a_limit_that_cannot_be_met_starves_no_prompt():
    loop = TimedLoop(1e-6, cost_model(1))
    loop.add(request("running", max_tokens=60))
    while not loop.last_token:
        loop.step()
    loop.add(request("long", [i % 13 for i in range(100)], max_tokens=2))
    while "long" not in loop.last_token:
        loop.step()
    assert loop.answers["running"].reason is None, "it went on beside the prompt"
    chunks = [r.query_len for b in loop.batches for r in b.rows if r.request_id == "long"]
    assert chunks[:25] == [4] * 25, "a page a step"


@settings(max_examples=30, deadline=None)
@given(
    st.lists(st.tuples(st.integers(1, 60), st.integers(1, 12)), min_size=1, max_size=6),
    st.sampled_from([None, 1e-6, 0.005, 0.006, 0.02]),
    st.integers(0, 9),
)
def test_tokens_are_the_same_under_any_limit(sizes, limit, seed):
    loop = TimedLoop(limit, cost_model(seed))
    for index, (prompt, tokens) in enumerate(sizes):
        loop.add(request(str(index), [(index + i) % 11 for i in range(prompt)], max_tokens=tokens))
        loop.step()
        loop.scheduler.check()
    for id_, answer in loop.drain().items():
        assert answer.tokens == alone(loop.requests[id_]).tokens
