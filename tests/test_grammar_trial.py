"""Grammars from strangers: each is tried within a time and a size, whatever came before it."""

import array
import contextlib
import fcntl
import os
import re
import signal
import subprocess
import sys
import termios
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from mock_server import PATIENCE, gone
from tiny import EOS, VOCAB, tiny_source, tiny_tokens

from octavo.serve import grammar_trial, launch
from octavo.serve.config import EngineConfig
from octavo.serve.grammar import Grammars
from octavo.serve.grammar_compile import GrammarError, TooLong
from octavo.serve.grammar_trial import Trials
from octavo.serve.types import Grammar

GOOD = Grammar.json_schema({"type": "object", "properties": {"a": {"type": "integer"}}})
SHORT = 0.2
"""Seconds that a bad grammar is seen for; PATIENCE is enough for a good one on a busy machine."""


def endless(terms=100, salt=0):
    """A grammar whose compile doubles with each term, in time and in memory."""
    terms = [f"/(a|b)*{'ab'[i % 2]}(a|b){{{i + 8 + salt}}}/" for i in range(terms)]
    return Grammar.lark("start: A\nA: " + " & ".join(terms))


def pid(trials):
    return trials._local.process.popen.pid


def children(pid):
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


@pytest.fixture(scope="module")
def trials():
    made = Trials(tiny_source)
    yield made
    made.close()


def test_good_grammars_pass_through_one_process(trials):
    for grammar in (GOOD, Grammar.regex("[a-c]{3}"), Grammar.choice(["yes", "no"]), GOOD):
        trials(grammar, PATIENCE)
        assert not gone(pid(trials))
    first = pid(trials)
    trials(GOOD, PATIENCE)
    assert pid(trials) == first
    assert children(first) == []


@pytest.mark.parametrize(
    ("grammar", "reason"),
    [
        (Grammar.regex("(a"), "unclosed"),
        (Grammar.json_schema("{"), "not JSON"),
        (Grammar.json_schema('{"properties":{"a":' * 3000 + "{}" + "}}" * 3000), "recursion"),
        (Grammar.lark("start: \u2028"), "start"),
    ],
)
def test_a_refusal_comes_in_the_same_words(trials, grammar, reason):
    with pytest.raises(GrammarError) as tried:
        trials(grammar, PATIENCE)
    with pytest.raises(GrammarError) as compiled:
        Grammars(tiny_tokens, VOCAB, (EOS,)).compile(grammar)
    assert str(tried.value) == str(compiled.value)
    assert reason in str(tried.value)
    trials(GOOD, PATIENCE)


def test_what_takes_too_long_is_killed_and_the_tokens_are_not_lost(trials):
    trials(GOOD, PATIENCE)
    first = pid(trials)
    with pytest.raises(TooLong, match=r"longer than 0\.2 s"):
        trials(endless(), SHORT)
    trials(GOOD, PATIENCE)
    assert pid(trials) == first
    assert children(first) == []


def test_a_process_that_dies_is_replaced(trials):
    trials(GOOD, PATIENCE)
    first = pid(trials)
    os.kill(first, signal.SIGKILL)
    trials._local.process.popen.wait()
    trials(GOOD, PATIENCE)
    assert pid(trials) != first


def test_a_process_that_is_killed_under_way_is_not_the_grammars_fault(trials):
    trials(GOOD, PATIENCE)
    killed = trials._local.process.popen
    os.kill(killed.pid, signal.SIGSTOP)  # so that it has the grammar and no answer
    with ThreadPoolExecutor(1) as pool:
        killing = pool.submit(kill_with_a_grammar_unread, killed)
        trials(GOOD, PATIENCE)
        killing.result()
    assert pid(trials) != killed.pid


def kill_with_a_grammar_unread(popen):
    """Once a grammar lies in its pipe."""
    while not bytes_waiting(popen.stdin.fileno()):
        time.sleep(0.01)
    popen.kill()


def bytes_waiting(pipe):
    waiting = array.array("i", [0])
    fcntl.ioctl(pipe, termios.FIONREAD, waiting)
    return waiting[0]


@pytest.mark.parametrize("deaths", [1, 2])
def test_a_process_that_is_killed_while_it_loads_has_a_successor(monkeypatch, deaths):
    began = []

    def popen(*args, **options):
        began.append(start(*args, **options))
        if len(began) <= deaths:
            began[-1].kill()
        return began[-1]

    start = subprocess.Popen
    monkeypatch.setattr(subprocess, "Popen", popen)
    trials = Trials(tiny_source)
    with contextlib.nullcontext() if deaths == 1 else pytest.raises(RuntimeError, match="killed"):
        trials(GOOD, PATIENCE)
    assert len(began) == 2
    trials.close()


@pytest.mark.parametrize("grammar", [GOOD, Grammar.regex("[a-c]{3}" * 8000)], ids=["", "long"])
def test_a_process_that_is_stopped_holds_up_nobody_for_ever(trials, monkeypatch, grammar):
    monkeypatch.setattr(grammar_trial, "SLACK_SECONDS", SHORT)
    trials(GOOD, PATIENCE)
    stopped = pid(trials)
    os.kill(stopped, signal.SIGSTOP)
    with pytest.raises(TooLong):
        trials(grammar, SHORT)
    assert gone(stopped)
    trials(GOOD, PATIENCE)


LIMITED = """
import resource
from octavo.serve import grammar_trial
grammar_trial._limit_memory()
grammar_trial._limit_time(5.0)
assert resource.getrlimit(resource.RLIMIT_CPU)[0] == 15
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


def test_a_child_goes_with_its_parent_even_if_it_is_stopped(trials):
    """It holds the pipe at whose end the engine sees that the process has died."""
    trials(GOOD, PATIENCE)
    process = trials._local.process
    with ThreadPoolExecutor(1) as pool:
        bad = endless()
        asking = pool.submit(process.ask, [bad.kind, bad.text, PATIENCE], PATIENCE)
        wait_until(lambda: limited(process.popen.pid))
        (child,) = children(process.popen.pid)
        os.kill(child, signal.SIGSTOP)
        process.popen.kill()
        assert isinstance(asking.exception(), EOFError)
    wait_until(lambda: gone(child))
    trials(GOOD, PATIENCE)
    assert pid(trials) != process.popen.pid


def limited(parent):
    """Whether the process has a child that has set its limits."""
    limits = [Path(f"/proc/{child}/limits").read_text() for child in children(parent)]
    return any(re.search(r"Max cpu time +\d", text) for text in limits)


def wait_until(condition):
    end = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


IN_CHILD = """
import os, signal, time
from octavo.serve.grammar_trial import in_child
print(in_child(lambda: ("compiled", "x"), 60))
print(in_child(lambda: os.kill(os.getpid(), signal.SIGKILL), 60))
print(in_child(lambda: time.sleep(60), 0.1), flush=True)
in_child(lambda: time.sleep(600), 600)
"""


def test_what_becomes_of_a_child():
    """It answers, dies of its work, takes too long, or the engine ends."""
    reads, writes = os.pipe()
    command = [sys.executable, "-c", IN_CHILD]
    with (
        os.fdopen(reads) as stdin,
        subprocess.Popen(
            command, stdin=stdin, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        ) as ran,
    ):
        said = [ran.stdout.readline() for _ in range(3)]
        os.close(writes)
        assert ran.communicate(timeout=PATIENCE) == ("", "")
    assert said == ["('compiled', 'x')\n", "('died', '')\n", "('late', '')\n"]
    assert ran.returncode == 0


def test_tokens_that_are_refused_there_are_refused_in_the_same_words():
    source = replace(tiny_source(), vocab_size=3)
    with pytest.raises(GrammarError) as here:
        source.tokenizer()
    trials = Trials(lambda: source)
    with pytest.raises(GrammarError) as there:
        trials(GOOD, PATIENCE)
    assert str(there.value) == str(here.value)
    assert not trials._processes
    trials.close()


def test_a_servers_engine_tries_grammars_first_and_ones_own_does_not():
    checkpoint = SimpleNamespace(path="x", eos_ids=(EOS,), config=SimpleNamespace(vocab_size=VOCAB))
    for serving in (True, False):
        made = launch._grammars(EngineConfig(model="x"), checkpoint, serving=serving)
        assert isinstance(made._compiler._trial, Trials) == serving


def test_what_nobody_uses_any_more_ends():
    trials = Trials(tiny_source)
    trials(GOOD, PATIENCE)
    popen = trials._local.process.popen
    del trials
    assert popen.returncode is not None
