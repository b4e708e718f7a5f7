"""Tokens that a grammar forces are not sampled: the same tokens in fewer steps."""

from dataclasses import replace

import numpy as np
import pytest
from test_engine import LOOPS, PLAIN, check_pages_free, prompts
from tiny import VOCAB, drain, run, tiny_engine, tiny_tokens

from octavo.sampling.params import SamplingParams
from octavo.serve.grammar_compile import compile_grammar
from octavo.serve.types import FINISH_LENGTH, FINISH_STOP, Grammar, Request

SCHEMA = {
    "type": "object",
    "properties": {
        "number_of_orders": {"type": "integer", "maximum": 99, "minimum": 0},
        "has_accepted_terms": {"type": "boolean"},
    },
    "required": ["number_of_orders", "has_accepted_terms"],
    "additionalProperties": False,
}
GRAMMARS = [
    Grammar.json_schema(SCHEMA),
    Grammar.choice(["a_certain_beginning_and_an_end", "a_certain_beginning_or_two"]),
    Grammar.lark('start: "fixed_text,all_of_it"'),
    Grammar.regex(r"[a-c]{2,5}_and_so_on_[a-c]"),
]


def requests(**fields):
    params = [
        SamplingParams(**{"temperature": float(i % 2), "seed": i, "max_tokens": 80, **fields})
        for i in range(len(GRAMMARS))
    ]
    return [
        Request(f"r{i}", prompt, p, grammar=grammar)
        for i, (prompt, p, grammar) in enumerate(
            zip(prompts(len(GRAMMARS), seed=4, longest=12), params, GRAMMARS, strict=True)
        )
    ]


def outcome(engine, batch):
    tokens, last = run(engine, batch, every_step=lambda e: e.check())
    return tokens, {name: (event.finish_reason, event.error) for name, event in last.items()}


def plodding(**loop):
    """An engine that samples every token."""
    engine = tiny_engine(**loop)
    engine.grammars.forced = lambda request_id: ()
    return engine


@pytest.mark.parametrize("loop", [PLAIN, *LOOPS])
@pytest.mark.parametrize("limit", [80, 30, 7, 2, 1])
def test_the_same_tokens_in_fewer_steps(loop, limit):
    engine, slow = tiny_engine(**loop), plodding(**loop)
    batch = requests(max_tokens=limit)
    want = outcome(slow, batch)
    assert outcome(engine, batch) == want
    assert set(want[1].values()) <= {(FINISH_STOP, None), (FINISH_LENGTH, None)}
    if limit == 80:
        assert engine.stats().steps < slow.stats().steps / 2
    check_pages_free(engine)


@pytest.mark.parametrize("loop", LOOPS)
def test_preemption_and_small_budgets(loop):
    small = {**loop, "num_pages": 9, "max_model_len": 100, "max_batch_tokens": 6}
    same = {"grammar": GRAMMARS[0]}
    batch = [replace(request, prompt=request.prompt[:4], **same) for request in requests()]
    want = outcome(plodding(**PLAIN), batch)
    engine = tiny_engine(**small)
    assert outcome(engine, batch) == want
    assert engine.stats().preemptions > 0
    check_pages_free(engine)


@pytest.mark.parametrize("loop", [PLAIN, *LOOPS])
@pytest.mark.parametrize(
    "fields",
    [
        {"stop_token_ids": tuple(range(40, 160, 9))},  # some of them are forced
        {"logprobs": 2},
        {"frequency_penalty": 1.0},
        {"min_tokens": 3},
        {"bad_token_ids": (20,)},
    ],
    ids=lambda fields: next(iter(fields)),
)
def test_what_looks_at_every_token_sees_every_token(loop, fields):
    assert outcome(tiny_engine(**loop), requests(**fields)) == outcome(
        plodding(**PLAIN), requests(**fields)
    )


def test_what_is_forced_is_all_that_is_allowed():
    """So that sampling it would draw the same: llguidance's mask has the one bit."""
    found = 0
    for grammar in GRAMMARS:
        matcher = compile_grammar(tiny_tokens(), grammar).deep_copy()
        rng = np.random.default_rng(0)
        while not matcher.is_stopped():
            forced = matcher.compute_ff_tokens()
            for token in forced:
                assert allowed(matcher) == [token]
                assert matcher.consume_token(token)
                found += 1
            if not forced:
                assert matcher.consume_token(int(rng.choice(allowed(matcher))))
    assert found > 40


def allowed(matcher):
    bits = np.frombuffer(matcher.compute_bitmask(), np.uint8)
    return np.flatnonzero(np.unpackbits(bits, bitorder="little")[:VOCAB]).tolist()


@pytest.mark.parametrize("grammar", [GRAMMARS[0], GRAMMARS[3]])
def test_the_library_is_asked_what_is_forced_only_where_one_token_is_allowed(grammar):
    """Its answer would be "nothing" elsewhere: asking for every row of a step takes host time."""
    engine, asked, answered = tiny_engine(overlap=True), [], 0
    request = replace(requests()[0], grammar=grammar)
    engine.add(request)

    class Asked:
        """A matcher that may only be asked what is forced."""

        def compute_ff_tokens(self):
            asked.append(request.request_id)
            return real.compute_ff_tokens()

        def validate_tokens(self, tokens):
            return real.validate_tokens(tokens)

    while engine.has_work():
        engine.step()
        real = engine.grammars._matchers.get(request.request_id)
        if real is None or engine._in_flight is None or engine._in_flight.batch.rows[0].forced:
            continue
        engine.grammars._matchers[request.request_id] = Asked()
        forced, before = engine.grammars.forced(request.request_id), len(asked)
        assert list(forced) == real.compute_ff_tokens()
        engine.grammars._matchers[request.request_id] = real
        assert (before > 0) == (len(allowed(real)) == 1), allowed(real)
        asked.clear()
        answered += not before
    assert answered


def test_pages_of_forced_tokens_are_shared():
    engine = tiny_engine(overlap=True)
    first = requests()[2]
    tokens, _ = run(engine, [first])
    params = SamplingParams(temperature=0.0, max_tokens=6)
    longer = Request("longer", (*first.prompt, *tokens[first.request_id], 7), params)
    again, _ = run(engine, [longer])
    assert engine.stats().cached_tokens >= 16
    assert again == run(tiny_engine(**PLAIN), [longer])[0]
    check_pages_free(engine)


def test_an_abort_in_the_middle_leaves_nothing():
    engine = tiny_engine(overlap=True)
    for request in requests():
        engine.add(request)
    while not engine.stats().generated_tokens:
        engine.step()
    for request in requests():
        engine.abort(request.request_id)
    drain(engine)
    check_pages_free(engine)


def test_a_failed_look_ahead_fails_what_was_running_and_nothing_after(monkeypatch):
    def fail(request_id):
        raise RuntimeError("a bug")

    engine = tiny_engine(overlap=True)
    first = requests()[0]
    engine.add(first)
    while not engine.stats().generated_tokens:
        engine.step()
    with monkeypatch.context() as patch:
        patch.setattr(engine.grammars, "forced", fail)
        with pytest.raises(RuntimeError, match="a bug"):
            engine.step()
    assert first.request_id in {event.request_id for event in engine.recover("the step failed")}
    check_pages_free(engine)
    assert outcome(engine, [first]) == outcome(plodding(**PLAIN), [first])
