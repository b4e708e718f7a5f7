"""`octavo.LLM` interrupted, abandoned, shared by threads, closed, and called with wrong things."""

import copy
import gc
import os
import pickle
import random
import signal
import sys
import threading
import time
import warnings
import weakref
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from test_llm import MODEL, SIZES, assert_empty, continuations, greedy, prompts

import octavo

WATCHED = {
    *("octavo/llm.py", "octavo/driver.py", "octavo/interrupts.py"),
    *(f"serve/{name}.py" for name in ("engine", "scheduler", "rows", "queue", "output")),
}


@pytest.fixture(scope="module")
def shared():
    return octavo.LLM(MODEL, **SIZES)


@pytest.fixture
def llm(shared):
    yield shared
    gc.collect()
    assert_empty(shared)


@pytest.fixture
def default_sigint():
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


class Interruption:
    """Ctrl-C at the `at`th line that is executed in WATCHED; counts them."""

    def __init__(self, at=None):
        self.at, self.lines = at, 0

    def __enter__(self):
        sys.settrace(self.called)

    def __exit__(self, *error):
        sys.settrace(None)

    def called(self, frame, event, value):
        path = Path(frame.f_code.co_filename)
        return self.line if f"{path.parent.name}/{path.name}" in WATCHED else None

    def line(self, frame, event, value):
        if event == "line":
            self.lines += 1
            if self.lines == self.at:
                signal.raise_signal(signal.SIGINT)
        return self.line


def stream(llm, number):
    return [d.token_ids for d in llm.stream(prompts()[number], greedy(4, n=2))]


CALLS = {
    "generate": lambda llm: [o.outputs[0].token_ids for o in llm.generate(prompts(), greedy(3))],
    "stream": lambda llm: stream(llm, 1),
    "embed": lambda llm: llm.embed(prompts()[:2]),
    "score": lambda llm: llm.score(prompts()[0]),
}


def interrupted(call, llm, at):
    with Interruption(at):
        call(llm)
        signal.raise_signal(signal.SIGINT)  # it took fewer lines this time


@pytest.mark.usefixtures("default_sigint")
@pytest.mark.parametrize("name", CALLS)
def test_ctrl_c_at_any_line_leaves_nothing_behind(llm, name):
    """Random lines of a call, a third of them before its first step."""
    call = CALLS[name]
    expected = call(llm)
    counting = Interruption()
    with counting:
        call(llm)
    draw = random.Random(5)
    for _ in range(25):
        at = draw.randrange(1, counting.lines // draw.choice((1, 1, 3)))
        with pytest.raises(KeyboardInterrupt):
            interrupted(call, llm, at)
        gc.collect()
        assert_empty(llm)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    if name in ("generate", "stream"):
        assert call(llm) == expected


@pytest.mark.usefixtures("default_sigint")
def test_a_stream_goes_on_after_ctrl_c_in_its_consumer(llm):
    tokens, interrupted = [], 0
    reader = llm.stream(prompts()[1], greedy())
    while True:
        try:
            signal.raise_signal(signal.SIGINT)
        except KeyboardInterrupt:
            interrupted += 1
        if (delta := next(reader, None)) is None:
            break
        tokens += delta.token_ids
    assert tuple(tokens) == continuations()[1]
    assert interrupted > 1


def test_a_consumer_that_fails_costs_its_own_stream_only(llm):
    other = llm.stream(prompts()[2], greedy())
    tokens = list(next(other).token_ids)

    def consume():
        for _ in llm.stream(prompts()[1], greedy(100)):
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        consume()
    gc.collect()
    assert llm.engine.stats().running == 1
    for delta in other:
        tokens += delta.token_ids
    assert tuple(tokens) == continuations()[2]


def test_a_stream_collected_in_mid_step_is_dropped_after_it(llm, monkeypatch):
    """The garbage collector may find an abandoned iterator at any line of the scheduler."""
    ring = [llm.stream(prompts()[1], greedy(100))]
    next(ring[0])
    ring.append(ring)
    abandoned = weakref.ref(ring[0])
    schedule = llm.engine.scheduler.schedule

    def collecting(*args):
        batch = schedule(*args)
        gc.collect()
        assert abandoned() is None
        assert llm.engine.scheduler.request_ids(), "it was dropped in the middle of a step"
        return batch

    with monkeypatch.context() as patch:
        patch.setattr(llm.engine.scheduler, "schedule", collecting)
        del ring
        (output,) = llm.generate([prompts()[2]], greedy(2))
    assert output.outputs[0].token_ids == continuations()[2][:2]


def test_threads_share_it(llm):
    work = [(number % 3, 4 + number) for number in range(12)]

    def complete(number, count):
        if count % 2:
            deltas = llm.stream(prompts()[number], greedy(count))
            return tuple(token for delta in deltas for token in delta.token_ids)
        return llm.generate([prompts()[number]], greedy(count))[0].outputs[0].token_ids

    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda pair: complete(*pair), work))
        vectors = pool.map(lambda _: llm.embed(prompts()), range(4))
        first, *rest = vectors
    assert found == [continuations()[number][:count] for number, count in work]
    assert all(np.allclose(first, other, atol=1e-5) for other in rest)


def test_a_newcomer_thread_is_not_kept_out(llm):
    """A thread that steps all the time lets others queue and read: for minutes, if it must."""
    first, enough = threading.Event(), threading.Event()

    def busy():
        for _ in range(2000):
            for _ in llm.stream(prompts()[1], greedy(100)):
                first.set()
            if enough.is_set():
                return True
        return False

    with ThreadPoolExecutor(1) as pool:
        long = pool.submit(busy)
        assert first.wait(60)
        (output,) = llm.generate([prompts()[2]], greedy(3))
        enough.set()
        assert long.result()
    assert output.outputs[0].token_ids == continuations()[2][:3]


def test_requests_of_a_call_are_queued_without_a_step_between(llm, monkeypatch):
    """Another thread that steps would begin with the first ones, and make each wait for a step."""
    first, enough = threading.Event(), threading.Event()
    happened, add, step = [], llm.engine.add, llm.engine.step

    def added(asked):
        happened.append("add")
        time.sleep(0.005)
        add(asked)

    def busy():
        while not enough.is_set():
            for _ in llm.stream(prompts()[1], greedy(100)):
                first.set()

    with ThreadPoolExecutor(1) as pool:
        long = pool.submit(busy)
        assert first.wait(60)
        with llm._driver.alone():
            monkeypatch.setattr(llm.engine, "add", added)
            monkeypatch.setattr(llm.engine, "step", lambda: (happened.append("step"), step())[1])
        llm.generate(prompts()[:3] * 2, greedy(2, n=2))
        enough.set()
        long.result()
    added_at = [at for at, what in enumerate(happened) if what == "add"]
    assert any(b - a == 11 for a, b in zip(added_at, added_at[11:])), happened


def test_nothing_is_queued_before_all_is_known_to_be_good(llm, monkeypatch):
    monkeypatch.setattr(llm.engine, "add", lambda asked: pytest.fail("queued"))
    bad = greedy(stop_token_ids=(10**6,))
    with pytest.raises(ValueError, match="stop_token_ids"):
        llm.generate(prompts()[:3], [greedy(), bad, greedy()])


def test_closed_and_forgotten_it_frees_everything():
    with octavo.LLM(MODEL, **SIZES) as llm:
        reader = llm.stream(prompts()[1], greedy(100))
        next(reader)
        engine, runner = weakref.ref(llm.engine), weakref.ref(llm.engine.runner)
    gc.collect()
    assert engine() is runner() is None
    for call in (lambda: next(reader), *(lambda call=call: call(llm) for call in CALLS.values())):
        with pytest.raises(RuntimeError, match="this LLM is closed"):
            call()
    llm.close()
    llm = octavo.LLM(MODEL, **SIZES)
    llm.generate(prompts(), greedy(2))
    engine = weakref.ref(llm.engine)
    del llm
    gc.collect()
    assert engine() is None


def test_it_can_not_be_copied(llm):
    for copying in (pickle.dumps, copy.copy, copy.deepcopy):
        with pytest.raises(TypeError, match="can't be copied or pickled"):
            copying(llm)
    output = llm.generate([prompts()[1]], greedy(2))
    assert pickle.loads(pickle.dumps((output, greedy(2)))) == (output, greedy(2))


def test_a_fork_is_told_so_and_does_not_hang(llm):
    """As multiprocessing makes them: neither the device's threads nor the locks are sound there."""
    reader = llm.stream(prompts()[1], greedy(100))
    next(reader)
    with llm._driver.alone(), warnings.catch_warnings():  # a lock that the child never gets back
        warnings.simplefilter("ignore")  # JAX's own
        child = os.fork()
        if not child:
            os._exit(refusals(llm, reader))
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == len(CALLS) + 1
    reader.close()


def refusals(llm, reader):
    """How many calls say that they work in no fork; the process ends soon whatever happens."""
    signal.alarm(60)
    refused = 0
    for call in (lambda llm: next(reader), *CALLS.values()):
        try:
            call(llm)
        except RuntimeError as error:
            refused += "in a fork" in str(error)
    return refused


WRONG = [
    (lambda llm: llm.generate(None), "prompts must be"),
    (lambda llm: llm.generate(5), "prompts must be"),
    (lambda llm: llm.generate(b"abc"), "prompts must be"),
    (lambda llm: llm.generate({5: 6}), "prompts must be"),
    (lambda llm: llm.generate([None]), "a list of token ids"),
    (lambda llm: llm.generate([5], {"max_tokens": 3}), "params must be SamplingParams"),
    (lambda llm: llm.generate([5], [None]), "params must be SamplingParams"),
    (lambda llm: llm.generate([5], greedy, grammar="a+"), "params must be SamplingParams"),
    (lambda llm: llm.generate([5], greedy(), grammar="a"), "grammar must be a Grammar"),
    (lambda llm: llm.generate([5], greedy(), grammar={"regex": "a"}), "grammar must be a Grammar"),
    (lambda llm: next(llm.stream([5], 3)), "params must be SamplingParams"),
    (lambda llm: next(llm.stream([5], greedy(), grammar="a+")), "grammar must be a Grammar"),
    (lambda llm: next(llm.stream(None)), "a list of token ids"),
    (lambda llm: llm.embed(None), "prompts must be"),
    (lambda llm: llm.embed([5], pooling=None), "pooling must be"),
    (lambda llm: llm.score([1.5]), "a list of token ids"),
    (lambda llm: llm.score("text"), "a list of token ids"),
    (lambda llm: llm.score(None), "a list of token ids"),
    (lambda llm: llm.score([]), "at least one token"),
    (lambda llm: llm.chat(None), "messages must be a list"),
    (lambda llm: llm.chat(5), "messages must be a list"),
    (lambda llm: llm.reload(5), "no model at '5'"),
    (lambda llm: octavo.LLM(MODEL, config=5), "config must be an EngineConfig or a path"),
]


@pytest.mark.parametrize(("call", "message"), WRONG, ids=range(len(WRONG)))
def test_wrong_types_are_refused_by_name(llm, call, message):
    with pytest.raises(ValueError, match=message):
        call(llm)
