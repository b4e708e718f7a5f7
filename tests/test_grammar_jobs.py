"""Grammars of many clients: whose is compiled next, and what becomes of those nobody waits for."""

import json
import threading

import pytest
from mock_server import PATIENCE, running
from tiny import EOS, VOCAB, tiny_engine, tiny_tokens

from octavo.sampling.params import SamplingParams
from octavo.serve.grammar import Grammars
from octavo.serve.grammar_compile import GrammarError, TooLong
from octavo.serve.grammar_jobs import COMPILE_SECONDS, FIRST_SECONDS, Job, Turns
from octavo.serve.types import Grammar, Request


def job(client, wanted=1):
    made = Job(client, compile_=lambda: None, trial=lambda seconds: None)
    made.wanted = wanted
    return made


def test_clients_take_turns_and_each_has_its_own_order():
    turns = Turns()
    many, few, late = [job("many") for _ in range(4)], [job("few")], [job("late"), job("late")]
    for one in (*many, *few, *late):
        turns.put(one)
    taken = [turns.next() for _ in range(7)]
    assert taken == [many[0], few[0], late[0], many[1], late[1], many[2], many[3]]
    assert turns.next() is None


def test_what_nobody_wants_takes_no_turn():
    turns = Turns()
    for one in (job("a", wanted=0), wanted := job("a"), job("b", wanted=0)):
        turns.put(one)
    assert turns.next() is wanted
    assert turns.next() is None


class Tried:
    """A trial in which grammars called "endless" never end, and others wait for `open`.

    A try ends for want of time when the test says so: no clock decides.
    """

    def __init__(self):
        self.open = threading.Event()
        self._may_end = {s: threading.Semaphore(0) for s in (FIRST_SECONDS, COMPILE_SECONDS)}
        self.calls, self._changed = [], threading.Condition()

    def __call__(self, grammar, seconds):
        with self._changed:
            self.calls.append((grammar.text, seconds))
            self._changed.notify_all()
        if grammar.text.startswith("endless"):
            assert self._may_end[seconds].acquire(timeout=PATIENCE)
            raise TooLong(seconds)
        assert self.open.wait(PATIENCE)

    def end(self, short=0, long=0):
        """So many tries end."""
        for seconds, count in ((FIRST_SECONDS, short), (COMPILE_SECONDS, long)):
            for _ in range(count):
                self._may_end[seconds].release()

    def wait_for(self, count):
        with self._changed:
            assert self._changed.wait_for(lambda: len(self.calls) >= count, PATIENCE)


@pytest.fixture
def tried():
    made = Tried()
    made.open.set()
    yield made
    made.open.set()
    made.end(short=100, long=100)


def compiler_of(tried):
    return Grammars(tiny_tokens, VOCAB, (EOS,), tried)._compiler


def ended(job):
    job.future.exception(PATIENCE)
    return job.matcher()


def test_what_does_not_end_soon_goes_behind_what_is_new(tried):
    compiler = compiler_of(tried)
    bad = [compiler.submit(Grammar.regex(f"endless{i}"), "stranger") for i in range(5)]
    tried.wait_for(2)  # both lanes try one
    good = compiler.submit(Grammar.regex("a*"), "user")
    tried.end(short=3)  # theirs, and that of one before it in turn
    ended(good)
    assert ("a*", FIRST_SECONDS) in tried.calls
    assert not any(one.future.done() for one in bad)
    tried.end(short=2, long=5)
    for one in bad:
        with pytest.raises(GrammarError, match=f"longer than {COMPILE_SECONDS:g} s"):
            ended(one)


def test_one_lane_gives_no_long_tries(tried):
    """However many long ones wait, and though one is under way, the new one is compiled."""
    compiler = compiler_of(tried)
    bad = [compiler.submit(Grammar.regex(f"endless{i}")) for i in range(3)]
    tried.end(short=3)
    tried.wait_for(4)  # three short tries, and a long one that goes on
    assert [seconds for _, seconds in tried.calls].count(COMPILE_SECONDS) == 1
    ended(compiler.submit(Grammar.regex("a*")))
    assert not any(one.future.done() for one in bad)


def test_what_is_withdrawn_is_not_begun(tried):
    """A client that asks and leaves at once, again and again, is no burden."""
    tried.open.clear()
    grammars = Grammars(tiny_tokens, VOCAB, (EOS,), tried)
    asked = [request(f"r{i}", f"a{{{i + 1}}}") for i in range(20)]
    for one in asked:
        grammars.start(one)
    tried.wait_for(2)
    for one in asked:
        grammars.discard(one.request_id)
    grammars.start(request("last", "b"))
    tried.open.set()
    settled = []
    while not settled:
        grammars.wait(PATIENCE)
        settled = grammars.settled()
    assert settled == [("last", None)]
    assert len(tried.calls) == 3


def request(name, pattern):
    params = SamplingParams(max_tokens=8)
    return Request(name, (5, 6), params, grammar=Grammar.regex(pattern))


def test_an_equal_grammar_after_a_withdrawal_is_compiled(tried):
    tried.open.clear()
    compiler = compiler_of(tried)
    grammars = [Grammar.regex(text) for text in ("a", "b", "c")]
    first = [compiler.submit(grammar) for grammar in grammars]
    tried.wait_for(2)
    shared = compiler.submit(grammars[2])
    assert shared is first[2]
    compiler.withdraw(grammars[2], shared)
    assert compiler.submit(grammars[2]) is shared  # one still waits
    for one in (shared, shared):
        compiler.withdraw(grammars[2], one)
    anew = compiler.submit(grammars[2])
    assert anew is not shared
    tried.open.set()
    ended(anew)


def test_want_of_time_is_not_remembered(tried):
    """The machine may have stood still; a grammar that is wrong stays so."""
    compiler = compiler_of(tried)
    slow, wrong = Grammar.regex("endless"), Grammar.regex("(a")
    tried.end(short=2, long=2)
    for grammar, again in ((slow, False), (wrong, True)):
        jobs = []
        for _ in range(2):
            jobs.append(compiler.submit(grammar))
            with pytest.raises(GrammarError):
                ended(jobs[-1])
        assert (jobs[0] is jobs[1]) == again


@pytest.mark.parametrize(
    ("failure", "invalid", "tries"),
    [
        (GrammarError("no such feature"), True, 1),
        (OSError("no memory"), False, 2),
        (RuntimeError("no process"), False, 2),
        (EOFError(), False, 2),
    ],
)
def test_what_cannot_be_tried_is_the_servers_fault_and_not_remembered(failure, invalid, tries):
    """It was a 400, also for whoever sent the grammar later. A refusal is one, for all of them."""
    tried = []

    def trial(grammar, seconds):
        tried.append(grammar)
        raise failure

    engine = tiny_engine(eos_ids=(EOS,))
    engine.grammars = Grammars(tiny_tokens, VOCAB, (EOS,), trial)
    for name in "ab":
        engine.add(request(name, "a"))
        events = []
        while engine.has_work():
            events += engine.step()
        (event,) = events
        assert (event.finish_reason, event.invalid) == ("error", invalid)
        assert (str(failure) or "EOFError") in event.error
    assert len(tried) == tries


def test_clients_are_told_apart_by_key_or_else_by_address(tmp_path):
    keys, record = tmp_path / "keys", tmp_path / "record"
    keys.write_text("alice:sk-alice\nbob:sk-bob\n")
    asked = {"prompt": "a", "max_tokens": 1, "guided_regex": "a"}
    with running(api_key_file=str(keys), engine={"record": str(record)}) as server:
        for key in ("sk-alice", "sk-bob"):
            server.good(server.post("/v1/completions", asked, authorization=f"Bearer {key}"))
    with running(engine={"record": str(record)}) as server:
        server.good(server.post("/v1/completions", asked))
    came = [json.loads(line)["client"] for line in record.read_text().splitlines()]
    assert came == ["alice", "bob", "127.0.0.1"]
