"""Grammars from strangers: each is tried within a time and a size, whatever came before it."""

import os
import signal
import subprocess
import sys
from types import SimpleNamespace

import pytest
from mock_server import gone
from tiny import EOS, VOCAB, tiny_source, tiny_tokens

from octavo.serve import grammar_compile, launch
from octavo.serve.config import EngineConfig
from octavo.serve.grammar import Grammars
from octavo.serve.grammar_compile import GrammarError
from octavo.serve.grammar_trial import Trials
from octavo.serve.types import Grammar

GOOD = Grammar.json_schema({"type": "object", "properties": {"a": {"type": "integer"}}})
PATIENT, SHORT = 120.0, 1.0
"""Seconds: enough for a good grammar however busy the machine is, and to see a bad one."""


def endless(terms=100, salt=0):
    """A grammar whose compile doubles with each term, in time and in memory."""
    terms = [f"/(a|b)*{'ab'[i % 2]}(a|b){{{i + 8 + salt}}}/" for i in range(terms)]
    return Grammar.lark("start: A\nA: " + " & ".join(terms))


def trials_of(seconds):
    return Trials(tiny_source, seconds)


def pid(trials):
    return trials._local.process.popen.pid


@pytest.fixture(scope="module")
def patient():
    """Trials that take their time."""
    trials = trials_of(PATIENT)
    yield trials
    trials.close()


def test_good_grammars_pass_through_one_process(patient):
    for grammar in (GOOD, Grammar.regex("[a-c]{3}"), Grammar.choice(["yes", "no"]), GOOD):
        patient(grammar)
        assert not gone(pid(patient))
    first = pid(patient)
    patient(GOOD)
    assert pid(patient) == first


@pytest.mark.parametrize(
    ("grammar", "reason"),
    [
        (Grammar.regex("(a"), "unclosed"),
        (Grammar.json_schema("{"), "not JSON"),
        (Grammar.json_schema('{"properties":{"a":' * 3000 + "{}" + "}}" * 3000), "recursion"),
        (Grammar.lark("start: \u2028"), "start"),
    ],
)
def test_a_refusal_comes_in_the_same_words(patient, grammar, reason):
    with pytest.raises(GrammarError) as tried:
        patient(grammar)
    with pytest.raises(GrammarError) as compiled:
        Grammars(tiny_tokens, VOCAB, (EOS,)).compile(grammar)
    assert str(tried.value) == str(compiled.value)
    assert reason in str(tried.value)
    patient(GOOD)


def test_what_takes_too_long_is_killed_and_the_next_is_tried(patient):
    hasty = trials_of(SHORT)
    with pytest.raises(GrammarError, match="longer than 1 s"):
        hasty(endless())
    assert hasty._local.process is None
    patient(GOOD)


def test_a_process_that_dies_is_replaced(patient):
    patient(GOOD)
    first = pid(patient)
    os.kill(first, signal.SIGKILL)
    patient._local.process.popen.wait()
    patient(GOOD)
    assert pid(patient) != first


def test_a_process_that_dies_of_its_grammar_refuses_it(patient, monkeypatch):
    patient(GOOD)
    process = patient._local.process
    process.popen.kill()
    process.popen.wait()
    with monkeypatch.context() as patch:
        patch.setattr(patient, "_process", lambda: process)
        with pytest.raises(GrammarError, match="too much memory"):
            patient(GOOD)
    patient(GOOD)


LIMITED = """
import resource
from octavo.serve import grammar_trial
grammar_trial._limit_memory()
grammar_trial._limit_time(5.0)
assert resource.getrlimit(resource.RLIMIT_CPU)[0] in range(15, 60)
assert len(bytearray(1 << 20)) == 1 << 20
try:
    bytearray(3 << 30)
except MemoryError:
    print("refused")
"""


def test_memory_and_time_are_limited_from_within():
    """Also where nobody is left to end the process."""
    ran = subprocess.run([sys.executable, "-c", LIMITED], capture_output=True, text=True)
    assert (ran.stdout, ran.stderr) == ("refused\n", "")


def test_a_servers_engine_tries_grammars_first_and_ones_own_does_not():
    checkpoint = SimpleNamespace(path="x", eos_ids=(EOS,), config=SimpleNamespace(vocab_size=VOCAB))
    for serving in (True, False):
        made = launch._grammars(EngineConfig(model="x"), checkpoint, serving=serving)
        assert isinstance(made._compiler._trial, Trials) == serving


def test_grammars_without_end_hold_no_later_one(monkeypatch):
    """As many at once as there are threads, and then some; the good one behind them is compiled."""
    monkeypatch.setattr(grammar_compile, "COMPILE_SECONDS", PATIENT)
    trials = trials_of(PATIENT)
    hasty = trials_of(SHORT)
    tried = []

    def trial(grammar):
        tried.append(grammar)
        (trials if grammar == GOOD else hasty)(grammar)

    grammars = Grammars(tiny_tokens, VOCAB, (EOS,), trial)
    bad = [grammars._compiler.submit(endless(salt=salt)) for salt in range(3)]
    grammars.compile(GOOD)
    assert len(tried) == 4
    for job in bad:
        grammar_compile.settle(job)
        with pytest.raises(GrammarError, match="longer than 1 s"):
            job.matcher()
    trials.close()
    hasty.close()


def test_what_nobody_uses_any_more_ends():
    trials = trials_of(PATIENT)
    trials(GOOD)
    popen = trials._local.process.popen
    del trials
    assert popen.returncode is not None
