"""Reasoning ends at its bound, whatever the loop and the company; nobody else notices."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from test_engine import LOOPS, PLAIN, check_pages_free, greedy, prompts
from tiny import VOCAB, run, tiny_engine

from octavo.sampling.params import SamplingParams
from octavo.serve.thinking import NEVER, Reasoning, Thinking
from octavo.serve.types import Grammar, Request

OPEN, CLOSE = 5, 7
PROMPT = (*prompts(1, seed=9)[0], *range(40, 60))[:12]


def request(name, thinking=None, params=None, prompt=PROMPT):
    return Request(name, prompt, params or greedy(24), thinking=thinking)


def opened(budget, close=CLOSE):
    return Thinking(budget, OPEN, close, opened=True)


@pytest.fixture(scope="module")
def free():
    """What the sample is without a bound."""
    tokens = run(tiny_engine(**PLAIN), [request("r")])[0]["r"]
    assert CLOSE not in tokens
    assert OPEN not in tokens
    return tokens


def bounded(free, budget):
    """What it is with one: by hand, from the prompt with the forced token in it."""
    start = [*free[:budget], CLOSE]
    rest = request("rest", params=greedy(24 - len(start)), prompt=(*PROMPT, *start))
    return start + run(tiny_engine(**PLAIN), [rest])[0]["rest"]


COMPANY = [
    request("c0", params=SamplingParams(temperature=1.0, seed=1, max_tokens=20)),
    request("c1", opened(3), SamplingParams(temperature=1.0, seed=2, max_tokens=20)),
    request("c2", params=greedy(9), prompt=prompts(1, seed=3)[0]),
]


@pytest.mark.parametrize("loop", [PLAIN, *LOOPS])
@pytest.mark.parametrize("budget", [0, 1, 8, 13])
def test_reasoning_ends_at_its_bound(free, loop, budget):
    engine = tiny_engine(**loop)
    tokens, last = run(engine, [request("r", opened(budget))])
    assert tokens["r"] == bounded(free, budget)
    assert last["r"].finish_reason == "length"
    check_pages_free(engine)


@pytest.mark.parametrize("loop", [PLAIN, *LOOPS])
def test_company_changes_nothing(free, loop):
    alone = {r.request_id: run(tiny_engine(**PLAIN), [r])[0][r.request_id] for r in COMPANY}
    assert alone["c1"][3] == CLOSE
    engine = tiny_engine(**loop)
    tokens, _ = run(engine, [*COMPANY, request("r", opened(10))], every_step=lambda e: e.check())
    assert tokens == {**alone, "r": bounded(free, 10)}
    check_pages_free(engine)


@pytest.mark.parametrize("loop", LOOPS)
def test_preemption_changes_nothing(free, loop):
    """Four rows that grow to three pages each and share none, in a pool of six."""
    many = [request(f"r{i}", opened(10)) for i in range(4)]
    engine = tiny_engine(num_pages=7, max_model_len=80, prefix_caching=False, **loop)
    tokens, _ = run(engine, many, every_step=lambda e: e.check())
    assert all(tokens[r.request_id] == bounded(free, 10) for r in many)
    assert engine.stats().preemptions > 0
    check_pages_free(engine)


@pytest.mark.parametrize("loop", [PLAIN, *LOOPS])
def test_a_block_that_ends_by_itself_is_left_alone(free, loop):
    """So is a sample that never opens one, and one that ends before."""
    early = next(t for t in free[2:] if free.index(t) < 8)
    cases = [
        request("ended", opened(8, close=early)),
        request("never", Thinking(2, OPEN, CLOSE)),
        request("short", opened(24)),
    ]
    tokens, _ = run(tiny_engine(**loop), cases)
    assert tokens == {"ended": free, "never": free, "short": free}


@pytest.mark.parametrize("loop", [PLAIN, *LOOPS])
def test_a_block_that_the_model_opens_counts_from_there(free, loop):
    first, second = free[:2]
    cases = [
        request("first", Thinking(6, first, CLOSE)),
        request("second", Thinking(5, second, CLOSE, blanks=(first,))),
    ]
    tokens, _ = run(tiny_engine(**loop), cases)
    assert tokens == {"first": bounded(free, 7), "second": bounded(free, 7)}


def test_several_steps_a_dispatch_run_before_and_after(free):
    engine = tiny_engine(overlap=False, max_decode_steps=8)
    engine.add(request("r", opened(10)))
    gained = []
    while engine.has_work():
        gained += [len(event.token_ids) for event in engine.step() if event.token_ids]
    # The prompt's step draws one, then 8 + 1 are free, one is forced, and 13 follow.
    assert gained == [1, 8, 1, 1, 8, 5]


def test_what_is_refused():
    engine = tiny_engine()
    with pytest.raises(ValueError, match="budget"):
        opened(-1)
    with pytest.raises(ValueError, match="vocabulary"):
        engine.add(request("r", Thinking(1, OPEN, VOCAB)))
    with pytest.raises(ValueError, match="exclude"):
        engine.add(Request("r", PROMPT, greedy(), grammar=Grammar.regex("a"), thinking=opened(1)))


@given(
    tokens=st.lists(st.sampled_from([OPEN, CLOSE, 1, 2]), max_size=12),
    budget=st.integers(0, 5),
    begun=st.booleans(),
)
def test_nothing_is_forced_before_it_was_foreseen(tokens, budget, begun):
    """`free` never falls but to NEVER, and a token is due exactly `budget` after the opening."""
    reasoning = Reasoning(Thinking(budget, OPEN, CLOSE, opened=begun, blanks=(1,)))
    inside, count = begun, 0
    for drawn, token in enumerate(tokens):
        foreseen = reasoning.free
        assert (reasoning.due == CLOSE) == (inside and count >= budget)
        assert reasoning.due is None or drawn >= foreseen
        reasoning.take([token])
        if inside and reasoning.free != NEVER:
            count += 1
        inside = reasoning.free != NEVER and (inside or token == OPEN)
        assert reasoning.free >= foreseen
