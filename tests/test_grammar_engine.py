"""Requests with a grammar in the engine: they obey, and nothing else changes for anybody."""

import json
import pydoc
import re
import threading
import traceback
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import jsonschema
import numpy as np
import pytest
from test_engine import LOOPS, PLAIN, check_pages_free, prompts
from tiny import EOS, VOCAB, drain, run, tiny_engine, tiny_tokenizer, tiny_tokens

from octavo.sampling.params import SamplingParams
from octavo.serve import grammar_jobs
from octavo.serve.grammar import Grammars
from octavo.serve.inflight import InFlight
from octavo.serve.types import FINISH_ERROR, FINISH_LENGTH, FINISH_STOP, Grammar, Request

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 5},
        "ok": {"type": "boolean"},
        "n": {"type": "array", "items": {"type": "integer", "maximum": 99}, "maxItems": 2},
    },
    "required": ["name", "ok", "n"],
    "additionalProperties": False,
}
GRAMMARS = [
    Grammar.json_schema(SCHEMA),
    Grammar.regex(r"[a-c]{3,6}"),
    Grammar.choice(["yes", "no", "nothing"]),
    None,
    Grammar.lark('start: "<" BODY ">"\nBODY: /[ab]{2,4}/'),
]


@pytest.fixture(autouse=True)
def no_deadline(monkeypatch):
    """A slow machine's compiles are not refused."""
    monkeypatch.setattr(grammar_jobs, "COMPILE_SECONDS", 600)


def text_of(tokens):
    return tiny_tokenizer().decode(tokens, skip_special_tokens=True)


def sampled(seed, **fields):
    return SamplingParams(**{"temperature": 1.0, "seed": seed, "max_tokens": 60, **fields})


def requests(**fields):
    """One of each grammar, greedy and random in turns, the one without between them."""
    pairs = enumerate(zip(prompts(len(GRAMMARS), seed=3), GRAMMARS, strict=True))
    return [
        Request(f"g{i}", p, sampled(i, temperature=float(i % 2), **fields), grammar=grammar)
        for i, (p, grammar) in pairs
    ]


def obeys(grammar, text):
    match grammar.kind:
        case "json_schema":
            jsonschema.validate(json.loads(text), json.loads(grammar.text))
            return True
        case "regex":
            return re.fullmatch(grammar.text, text)
        case "choice":
            return text in json.loads(grammar.text)
        case "lark":
            return re.fullmatch("<[ab]{2,4}>", text)


@pytest.fixture(scope="module")
def alone():
    """Each request's tokens by itself, through the plain loop."""
    engine = tiny_engine(eos_ids=(EOS,), **PLAIN)
    return {r.request_id: run(engine, [r])[0][r.request_id] for r in requests()}


def test_every_output_obeys(alone):
    engine = tiny_engine(eos_ids=(EOS,))
    batch = [
        Request(f"{seed}-{i}", prompt, sampled(seed), grammar=grammar)
        for seed in range(6)
        for i, (prompt, grammar) in enumerate(zip(prompts(5, seed), GRAMMARS, strict=True))
        if grammar is not None
    ]
    tokens, last = run(engine, batch)
    for request in batch:
        if last[request.request_id].finish_reason == FINISH_STOP:
            assert obeys(request.grammar, text_of(tokens[request.request_id])), request.grammar
    ended = [e for e in last.values() if e.finish_reason == FINISH_STOP]
    assert len(ended) >= len(batch) - 2
    check_pages_free(engine)


@pytest.mark.parametrize("loop", LOOPS)
def test_same_tokens_in_a_crowd(alone, loop):
    engine = tiny_engine(eos_ids=(EOS,), **loop)
    tokens, _ = run(engine, requests(), every_step=lambda e: e.check())
    assert tokens == alone
    check_pages_free(engine)


def test_the_neighbour_without_a_grammar_is_the_same_without_its_neighbours(alone):
    free = [r for r in requests() if r.grammar is None]
    tokens, _ = run(tiny_engine(eos_ids=(EOS,)), free)
    assert tokens["g3"] == alone["g3"]


@pytest.mark.parametrize("loop", LOOPS)
def test_same_tokens_under_preemption(loop):
    """Four rows that grow to three pages each, in a pool of six."""
    grammar = Grammar.regex(r"[a-z ]{80}")
    batch = [
        Request(f"p{i}", prompt[:10], sampled(i, max_tokens=36), grammar=grammar)
        for i, prompt in enumerate(prompts(4, seed=8))
    ]
    engine = tiny_engine(eos_ids=(EOS,), **PLAIN)
    expected = {r.request_id: run(engine, [r])[0][r.request_id] for r in batch}
    engine = tiny_engine(eos_ids=(EOS,), num_pages=7, max_model_len=80, **loop)
    tokens, _ = run(engine, batch, every_step=lambda e: e.check())
    assert tokens == expected
    assert engine.stats().preemptions > 0
    check_pages_free(engine)


def test_the_device_computes_while_masks_are_made(monkeypatch):
    """Overlap lost would change no token: the forward pass goes first, then whatever waits."""
    engine, done = tiny_engine(eos_ids=(EOS,)), []

    def watch(owner, name):
        real = getattr(owner, name)

        def watched(*args, **fields):
            done.append(name)
            return real(*args, **fields)

        monkeypatch.setattr(owner, name, watched)

    for owner, name in (
        (engine.runner, "forward"),
        (InFlight, "read"),
        (engine.grammars, "masks"),
        (engine.runner, "sample"),
    ):
        watch(owner, name)
    grammar = Grammar.regex("[a-z]{12}")
    run(engine, [Request(f"r{i}", (5, 6), sampled(i), grammar=grammar) for i in range(2)])
    first = ["forward", "masks", "sample"]  # nothing was in flight
    assert done[:3] == first
    steps, rest = divmod(len(done) - 3 - 1, 4)
    assert (done[3:], rest) == (["forward", "read", "masks", "sample"] * steps + ["read"], 0)
    assert steps >= 11


def test_small_chunks_and_logprobs_change_no_token(alone):
    engine = tiny_engine(eos_ids=(EOS,), max_batch_tokens=5)
    tokens, _ = run(engine, requests())
    assert tokens == alone
    engine = tiny_engine(eos_ids=(EOS,))
    tokens, _ = run(engine, requests(logprobs=3))
    assert tokens == alone


def test_reported_logprobs_are_of_the_raw_logits():
    """A forced token is not certain to the model, and what the grammar bans may be likelier."""
    engine = tiny_engine(eos_ids=(EOS,))
    request = Request("r", (5, 6, 7), sampled(1, logprobs=5), grammar=Grammar.choice(["yes"]))
    events = []
    engine.add(request)
    while engine.has_work():
        events += engine.step()
    entries = [entry for event in events for entry in event.logprobs]
    assert entries[0].logprob < -1
    assert entries[0].top[0][1] > entries[0].logprob


def test_complete_text_ends_with_stop_even_at_the_limit():
    engine = tiny_engine(eos_ids=(EOS,))
    grammar = Grammar.choice(["yes"])
    engine.add(Request("r", (5, 6), sampled(1), grammar=grammar))
    tokens, last = drain(engine)
    assert text_of(tokens["r"]) == "yes"
    assert EOS not in tokens["r"]
    assert last["r"].finish_reason == FINISH_STOP
    limit = len(tokens["r"])
    engine.add(Request("s", (5, 6), sampled(1, max_tokens=limit), grammar=grammar))
    engine.add(Request("t", (5, 6), sampled(1, max_tokens=limit - 1 or 1), grammar=grammar))
    _, last = drain(engine)
    assert last["s"].finish_reason == FINISH_STOP
    assert last["t"].finish_reason == (FINISH_LENGTH if limit > 1 else FINISH_STOP)


def test_a_schema_may_rule_out_whitespace():
    own = {"x-guidance": {"whitespace_flexible": False}}
    grammar = Grammar.json_schema({**SCHEMA, **own})
    batch = [Request(f"{seed}", (5, 6), sampled(seed), grammar=grammar) for seed in range(6)]
    tokens, last = run(tiny_engine(eos_ids=(EOS,)), batch)
    ended = [text_of(tokens[id_]) for id_ in tokens if last[id_].finish_reason == FINISH_STOP]
    assert len(ended) > 2
    for text in ended:
        assert not re.search(r"\s", re.sub(r'"name":"([^"\\]|\\.)*"', "", text)), text


def test_text_that_may_go_on_ends_by_drawing_the_end():
    engine = tiny_engine(eos_ids=(EOS,))
    bias = {EOS: 100.0}
    engine.add(
        Request("r", (5, 6), sampled(1, logit_bias=bias), grammar=Grammar.regex("[ab]{2,40}"))
    )
    tokens, last = drain(engine)
    assert re.fullmatch("[ab]{2,3}", text_of(tokens["r"]))
    assert (tokens["r"][-1], last["r"].stop_token) == (EOS, EOS)


def test_min_tokens_holds_where_the_grammar_allows_it():
    engine = tiny_engine(eos_ids=(EOS,))
    params = sampled(1, logit_bias={EOS: 100.0}, min_tokens=10)
    engine.add(Request("r", (5, 6), params, grammar=Grammar.regex("a*")))
    engine.add(Request("s", (5, 6), params, grammar=Grammar.choice(["yes"])))
    tokens, _ = drain(engine)
    assert len(tokens["r"]) == 11
    assert text_of(tokens["s"]) == "yes"


def test_samples_of_one_prompt_share_a_compile_and_differ(monkeypatch):
    compiled = []
    compile_ = grammar_jobs.compile_grammar
    monkeypatch.setattr(
        grammar_jobs, "compile_grammar", lambda *a: compiled.append(1) or compile_(*a)
    )
    engine = tiny_engine(eos_ids=(EOS,))
    grammar = Grammar.regex("[a-z]{12}")
    batch = [
        Request(f"n{i}", (9, 8, 7), sampled(4), sample_index=i, grammar=grammar) for i in range(4)
    ]
    tokens, _ = run(engine, batch)
    assert len({tuple(t) for t in tokens.values()}) == 4
    assert len(compiled) == 1


@pytest.mark.parametrize(
    ("grammar", "reason"),
    [
        (Grammar.json_schema({"type": "no-such-type"}), "no-such-type"),
        (Grammar.json_schema({"not": {}}), "not"),
        (Grammar.json_schema({"$ref": "#/nope"}), "nope"),
        (Grammar.json_schema({"$ref": "#"}), "no text fits"),
        (Grammar.json_schema({"$ref": "http://a.example/b"}), "a.example"),
        (Grammar.json_schema('{"properties":{"a":' * 3000 + "{}" + "}}" * 3000), "recursion"),
        (Grammar.json_schema("{"), "not JSON"),
        (Grammar.json_schema("7"), "object or true"),
        (Grammar.json_schema({"x-guidance": 5}), "x-guidance must be an object"),
        (Grammar.json_schema({"x-guidance": {"no_such_option": 5}}), "no_such_option"),
        (Grammar.json_schema({"x-guidance": {"whitespace_flexible": "no"}}), "a boolean"),
        (Grammar.regex("(a"), "unclosed"),
        (Grammar.regex("(" * 20000 + ")" * 20000), "nest"),
        (Grammar.regex("(x?){5000}x{5000}"), "too many"),
        (Grammar.regex(r"(a)\1"), "backreferences"),
        (Grammar.choice([]), "at least one"),
        (Grammar.lark(""), "start"),
        (Grammar.lark("start: " + "(" * 20000), "nested"),
        (
            Grammar.lark(
                "start: T0\n"
                + "\n".join(f"T{i}: T{i + 1} T{i + 1}" for i in range(40))
                + '\nT40: "a"'
            ),
            "too big",
        ),
    ],
)
def test_a_refused_grammar_ends_its_request_alone(alone, grammar, reason):
    engine = tiny_engine(eos_ids=(EOS,))
    engine.add(Request("bad", (5, 6), sampled(1), grammar=grammar))
    tokens, last = run(engine, requests()[1:2])
    assert last["bad"].finish_reason == FINISH_ERROR
    assert last["bad"].invalid
    assert reason in last["bad"].error
    assert len(last["bad"].error) < 700
    assert tokens["g1"] == alone["g1"]
    check_pages_free(engine)


def test_refusing_a_known_grammar_again_keeps_nothing():
    """The error stays with the grammar; what it was raised through must not."""
    engine = tiny_engine(eos_ids=(EOS,))
    bad = Grammar.regex("(a")
    depths = []
    for i in range(4):
        _, last = run(engine, [Request(f"bad{i}", (5, 6), sampled(1), grammar=bad)])
        assert "unclosed" in last[f"bad{i}"].error
        error = engine.grammars._compiler._jobs[bad].future.exception()
        depths.append(len(list(traceback.walk_tb(error.__traceback__))))
    assert len(set(depths)) == 1, depths


def test_a_grammar_that_grows_too_complex_ends_its_request_alone(alone):
    engine = tiny_engine(eos_ids=(EOS,))
    lark = 'start: ("a"{0,1000}){0,1000}'
    params = sampled(1, max_tokens=100, min_tokens=100)
    engine.add(Request("bad", (5, 6), params, grammar=Grammar.lark(lark)))
    tokens, last = run(engine, requests())
    assert last["bad"].finish_reason == FINISH_ERROR
    assert last["bad"].invalid
    assert {k: v for k, v in tokens.items() if k != "bad"} == alone


def test_contradicting_bans_end_the_request_alone():
    engine = tiny_engine(eos_ids=(EOS,))
    engine.add(Request("bad", (5,), sampled(1, allowed_token_ids=(9,)), grammar=GRAMMARS[2]))
    _, last = drain(engine)
    assert (last["bad"].finish_reason, last["bad"].invalid) == (FINISH_ERROR, True)


class Gate:
    """Compiles that wait for permission."""

    def __init__(self):
        self.open = threading.Event()

    def __call__(self):
        assert self.open.wait(60)
        return tiny_tokens()


def gated_engine(**fields):
    engine = tiny_engine(eos_ids=(EOS,), **fields)
    gate = Gate()
    engine.grammars = Grammars(gate, VOCAB, (EOS,))
    return engine, gate


def test_others_run_while_a_grammar_jobss(alone):
    engine, gate = gated_engine()
    waiting, _, _, free, _ = requests()
    engine.add(waiting)
    engine.add(free)
    tokens = []
    while not tokens or last.finish_reason is None:
        for last in engine.step():
            assert last.request_id == "g3"
            tokens += last.token_ids
    assert tokens == alone["g3"]
    assert engine.stats().waiting == 1
    engine.scheduler.check()
    gate.open.set()
    assert drain(engine)[0] == {"g0": alone["g0"]}


def test_an_abort_while_compiling_leaves_nothing(alone):
    engine, gate = gated_engine()
    engine.add(requests()[0])
    engine.step()
    engine.abort("g0")
    assert not engine.has_work()
    gate.open.set()
    assert engine.step() == []
    assert run(engine, [requests()[0]])[0] == {"g0": alone["g0"]}
    check_pages_free(engine)


def test_a_compile_that_takes_too_long_is_refused(monkeypatch):
    monkeypatch.setattr(grammar_jobs, "COMPILE_SECONDS", 0.05)
    engine, gate = gated_engine()
    engine.add(requests()[0])
    _, last = drain(engine)
    assert "longer than" in last["g0"].error
    gate.open.set()


def test_an_abort_while_running_and_a_recovery_leave_nothing(alone):
    engine = tiny_engine(eos_ids=(EOS,))
    for request in requests():
        engine.add(request)
    for _ in range(6):
        engine.step()
    engine.abort("g0")
    engine.step()
    engine.recover("a test")
    drain(engine)
    check_pages_free(engine)
    assert run(engine, requests())[0] == alone


class PanicException(BaseException):
    """As pyo3 raises it."""


def raising(error):
    """A function that does nothing but fail."""

    def fail(*args, **kwargs):
        raise error

    return fail


STAGES = {
    "forward": "octavo.serve.runner.Runner.forward",
    "mask": "octavo.serve.grammar.Grammars.masks",
    "mask panic": "llguidance.numpy.fill_next_token_bitmask_par",
    "sample": "octavo.serve.runner.Runner.sample",
    "follow": "octavo.serve.grammar.Grammars.advance",
}


@pytest.mark.parametrize("stage", STAGES)
def test_a_failed_stage_fails_what_was_running_and_keeps_what_waits(alone, monkeypatch, stage):
    engine = tiny_engine(eos_ids=(EOS,), max_num_seqs=2)
    for request in requests():
        engine.add(request)
    early = {}  # one may end before another's grammar is made
    while engine.stats().running < 2:
        for event in engine.step():
            early.setdefault(event.request_id, []).extend(event.token_ids)
    raised = PanicException("a bug") if "panic" in stage else ZeroDivisionError("a bug")
    with monkeypatch.context() as patch:
        patch.setattr(STAGES[stage], raising(raised))
        with pytest.raises((ZeroDivisionError, RuntimeError), match="a bug"):
            engine.step()
    failed = {event.request_id for event in engine.recover("the step failed")}
    assert len(failed) == 2
    rest, _ = drain(engine)
    kept = alone.keys() - failed
    assert {id_: early.get(id_, []) + rest.get(id_, []) for id_ in kept} == {
        id_: alone[id_] for id_ in kept
    }
    assert not engine.grammars._matchers
    check_pages_free(engine)
    assert run(engine, requests())[0] == alone


@pytest.mark.parametrize(
    ("name", "stage", "grammar"),
    [
        ("short", "octavo.serve.grammar.Grammars.masks", None),
        ("refused", "octavo.serve.scheduler.Scheduler.schedule", Grammar.regex("(")),
    ],
)
def test_an_end_in_the_step_that_fails_is_told_by_the_recovery(monkeypatch, name, stage, grammar):
    engine = tiny_engine(eos_ids=(EOS,))
    engine.grammars.compile(GRAMMARS[0])  # so that both begin in one step
    engine.add(requests()[0])
    engine.add(Request(name, (5, 6, 7), sampled(1, max_tokens=3), grammar=grammar))
    intact = pydoc.locate(stage)

    def fail_once_it_has_ended(*args, **kwargs):
        if name not in engine.scheduler.request_ids():
            raise ZeroDivisionError("a bug")
        return intact(*args, **kwargs)

    events = []

    def step_on():
        while True:
            events.extend(engine.step())

    with monkeypatch.context() as patch:
        patch.setattr(stage, fail_once_it_has_ended)
        with pytest.raises(ZeroDivisionError):
            step_on()
    assert name not in {e.request_id for e in events if e.finish_reason is not None}
    events += engine.recover("the step failed")
    events += drain(engine)[1].values()
    ends = {e.request_id: e.finish_reason for e in events if e.finish_reason is not None}
    assert ends[name] == (FINISH_ERROR if grammar else FINISH_LENGTH)
    assert ends.keys() == {name, "g0"}
    check_pages_free(engine)


def test_a_compile_that_cant_be_started_refuses_its_request_alone(alone, monkeypatch):
    engine = tiny_engine(eos_ids=(EOS,))
    with monkeypatch.context() as patch:
        patch.setattr(ThreadPoolExecutor, "submit", raising(RuntimeError("can't start new thread")))
        with pytest.raises(RuntimeError, match="new thread"):
            engine.add(requests()[0])
    assert not engine.has_work()
    assert run(engine, requests())[0] == alone


@pytest.mark.parametrize("error", [RuntimeError("a bug"), PanicException("a bug")])
def test_a_bug_in_a_compile_ends_its_request_alone(alone, monkeypatch, error):
    engine = tiny_engine(eos_ids=(EOS,))
    with monkeypatch.context() as patch:
        patch.setattr(grammar_jobs, "compile_grammar", raising(error))
        engine.add(Request("bad", (5, 6), sampled(1), grammar=Grammar.choice(["no"])))
        _, last = run(engine, [r for r in requests() if r.grammar is None])
    assert last["bad"].finish_reason == FINISH_ERROR
    assert last["bad"].error == f"{type(error).__name__}: a bug"
    assert run(engine, requests())[0] == alone
    check_pages_free(engine)


def test_ignore_eos_and_a_grammar_exclude_each_other():
    engine = tiny_engine(eos_ids=(EOS,))
    request = replace(requests()[0], params=sampled(1, ignore_eos=True))
    with pytest.raises(ValueError, match="ignore_eos"):
        engine.add(request)
    assert not engine.has_work()
    with pytest.raises(ValueError, match="65536 bytes"):
        Grammar.regex("a" * 70000)


def test_every_end_of_sequence_id_is_allowed_at_the_end_and_nowhere_else():
    grammars = Grammars(tiny_tokens, VOCAB, (EOS, 10, 159))
    masks = np.zeros((3, VOCAB // 32), np.uint32)
    masks[1, 0] = 1 << EOS
    masks[2, 0] = 1 << 10
    grammars._let_all_eos(masks, [0, 1, 2])
    assert masks[0].tolist() == [0] * 5
    assert masks[1].tolist() == [1 << EOS | 1 << 10, 0, 0, 0, 1 << 31]
    assert masks[2].tolist() == [0] * 5
