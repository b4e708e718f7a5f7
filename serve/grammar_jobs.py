"""Whose grammar is compiled next, and for how long. No jax.

A stranger may send any number of grammars whose compile does not end. So every grammar has a short
first try, and what has not ended by then goes behind all that wait for a long one, in a lane of its
own (a multilevel feedback queue of two levels). In each lane the clients take turns, one grammar
each. Equal grammars share a compile, so n samples of a prompt cost one.
"""

import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING

from octavo.serve.grammar_compile import (
    GrammarError,
    NoTrial,
    TooLong,
    compile_grammar,
    refusal_of,
)
from octavo.serve.types import Grammar

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

FIRST_SECONDS = 0.1
"""Of a first try; grammars people write take a few milliseconds, the process's fork included."""
COMPILE_SECONDS = 5.0
CACHED_GRAMMARS = 64
FIRST, LONG = range(2)

type Trial = Callable[[Grammar, float], None]
"""Tries a grammar for so many seconds: GrammarError for what must not be compiled here, TooLong for
what has not ended, anything else where it can't be tried."""


class Job:
    """One grammar's compile: queued, on trial, running or done.

    Attributes:
        client: who asked for it first.
        wanted: requests that wait for it; one that nobody wants any more is not begun.
        future: its end.
    """

    def __init__(
        self, client: str, compile_: Callable[[], "LLMatcher"], trial: Callable[[float], None]
    ) -> None:
        self.client = client
        self.wanted = 0
        self.future: Future[LLMatcher] = Future()
        self._compile = compile_
        self._trial = trial
        self._started: float | None = None

    def attempt(self, seconds: float) -> bool:
        """Compile it if its trial ends in time; whether that is settled, for better or worse."""
        try:
            self._try(seconds)
            self._started = time.monotonic()
            self.future.set_result(self._compile())
        except TooLong as error:
            if seconds < COMPILE_SECONDS:
                return False
            self.future.set_exception(error)
        except BaseException as error:  # a panic is no Exception
            self.future.set_exception(error)
        return True

    def _try(self, seconds: float) -> None:
        try:
            self._trial(seconds)
        except GrammarError:
            raise
        except Exception as error:
            why = str(error) or type(error).__name__
            raise NoTrial(f"the grammar could not be compiled: {why}") from error

    @property
    def late(self) -> bool:
        """Whether it runs for too long."""
        begun = self._started is not None and not self.future.done()
        return begun and time.monotonic() - (self._started or 0.0) > COMPILE_SECONDS

    @property
    def settled(self) -> bool:
        """Whether it has ended or run for too long."""
        return self.future.done() or self.late

    @property
    def overtaken(self) -> bool:
        """Whether it has ended for want of time, or of a trial, which the next one may have."""
        return self.future.done() and isinstance(self.future.exception(), TooLong | NoTrial)

    def matcher(self) -> "LLMatcher":
        """A fresh matcher, once it is settled.

        GrammarError if the grammar is refused, NoTrial if it could not be tried.
        """
        if not self.future.done():
            raise TooLong(COMPILE_SECONDS)
        error = self.future.exception()
        if error is None:
            return self.future.result().deep_copy()
        if isinstance(error, NoTrial):
            raise NoTrial(str(error)) from error
        # Not `error` itself: it is kept with the grammar, and each raise would hang the frames of
        # its callers to it, with the batch that they hold.
        raise GrammarError(refusal_of(error)) from error


class Turns:
    """Jobs that wait: each client's in their order, the clients in turn."""

    def __init__(self) -> None:
        self._waiting: OrderedDict[str, deque[Job]] = OrderedDict()

    def put(self, job: Job) -> None:
        """Behind the others of its client; a client without any comes behind all clients."""
        self._waiting.setdefault(job.client, deque()).append(job)

    def next(self) -> Job | None:
        """Take the job whose turn it is; None if no wanted one waits."""
        while self._waiting:
            client, jobs = self._waiting.popitem(last=False)
            job = jobs.popleft()
            if jobs:
                self._waiting[client] = jobs
            if job.wanted:
                return job
        return None


class Lanes:
    """Two threads: one gives first tries alone, the other long ones, and first ones in between.

    Attributes:
        ended: set whenever a job ends.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._turns = (Turns(), Turns())
        self._pools = tuple(
            ThreadPoolExecutor(1, thread_name_prefix=f"grammar-{name}")
            for name in ("first", "long")
        )
        self._running: list[Job | None] = [None, None]
        self.ended = threading.Event()

    def put(self, job: Job) -> None:
        """Have it tried; RuntimeError if there is no thread for it."""
        with self._lock:
            self._turns[FIRST].put(job)
        for lane in (FIRST, LONG):  # whichever comes to it
            self._pools[lane].submit(self._turn, lane)

    @property
    def late(self) -> bool:
        """Whether something runs for too long."""
        return any(job is not None and job.late for job in self._running)

    def _turn(self, lane: int) -> None:
        with self._lock:
            job = self._turns[LONG].next() if lane == LONG else None
            seconds = FIRST_SECONDS if job is None else COMPILE_SECONDS
            self._running[lane] = job = job or self._turns[FIRST].next()
        if job is None:
            return
        settled = job.attempt(seconds)
        self._running[lane] = None
        if settled:
            self.ended.set()
            return
        with self._lock:
            self._turns[LONG].put(job)
        self._pools[LONG].submit(self._turn, LONG)


class GrammarCompiler:
    """Compiles grammars for one tokenizer, which `load` makes when the first one comes.

    A deadline makes its thread no sooner free: what may never end is tried elsewhere first, by
    `trial`, see `grammar_trial.py`. One thread submits and withdraws.

    Attributes:
        ended: set whenever something may have settled.
    """

    def __init__(self, load: Callable[[], "LLTokenizer"], trial: Trial | None = None) -> None:
        self._load = load
        self._trial = trial
        self._tokenizer: LLTokenizer | None = None
        self._loading = threading.Lock()
        self._lanes = Lanes()
        self._jobs: OrderedDict[Grammar, Job] = OrderedDict()
        self.ended = self._lanes.ended

    def submit(self, grammar: Grammar, client: str = "") -> Job:
        """The compile of `grammar`, running, queued or done."""
        job = self._jobs.get(grammar)
        if job is None or job.overtaken:
            job = Job(client, lambda: self._compile(grammar), lambda s: self._try(grammar, s))
            job.wanted = 1
            try:
                self._lanes.put(job)
            except BaseException:
                job.wanted = 0
                raise
            self._jobs[grammar] = job
            if len(self._jobs) > CACHED_GRAMMARS:
                self._jobs.popitem(last=False)
        else:
            job.wanted += 1
        self._jobs.move_to_end(grammar)
        if job.settled:
            self.ended.set()
        return job

    def withdraw(self, grammar: Grammar, job: Job) -> None:
        """One request less waits for an unsettled job."""
        job.wanted -= 1
        if not job.wanted and self._jobs.get(grammar) is job and not job.future.done():
            del self._jobs[grammar]  # it may never be done

    def news(self) -> bool:
        """Whether something may have settled since the last call."""
        if self.ended.is_set():
            self.ended.clear()
            return True
        return self._lanes.late

    def _try(self, grammar: Grammar, seconds: float) -> None:
        if self._trial is not None:
            self._trial(grammar, seconds)

    def tokenizer(self) -> "LLTokenizer":
        """The model's tokens, made by the first who asks."""
        with self._loading:
            self._tokenizer = self._tokenizer or self._load()
            return self._tokenizer

    def _compile(self, grammar: Grammar) -> "LLMatcher":
        return compile_grammar(self.tokenizer(), grammar)
