"""Grammars compiled on trial, in a process that may be killed. No jax.

llguidance bounds what a compile may cost by its own count, which a few dozen intersected regular
expressions escape: their compile doubles in time and memory with each. A thread can't be ended, so
an engine that takes grammars from strangers compiles only what another process has compiled before,
within a time and a size. That process holds the tokens and forks a child for each grammar, which
takes a millisecond or two: what is killed has nothing that the next one would miss.
"""

import ctypes
import json
import os
import resource
import select
import signal
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import IO, NoReturn

from octavo.serve.command import command_of
from octavo.serve.grammar_compile import (
    GrammarError,
    TokenSource,
    TooLong,
    compile_grammar,
    refusal_of,
)
from octavo.serve.types import Grammar

READY_SECONDS = 60.0
"""A process may take so long to load the tokens, on a machine that has other things to do."""
SLACK_SECONDS = 10.0
"""Beyond a trial's time, for the process to say so."""
MEMORY_BYTES = 2 << 30
"""What a compile may take; grammars people write take a few megabytes."""
CPU_SLACK_SECONDS = 10
"""A child whose parent was killed before it could say that this should be its end as well ends by
itself, so long after its compile should have."""
PR_SET_PDEATHSIG = 1
"""Of Linux's <sys/prctl.h>: the signal to get when the parent ends."""

COMPILED, REFUSED, LATE, DIED = "compiled", "refused", "late", "died"
type Verdict = tuple[str, str]
"""One of these words, and the reason for a refusal."""


@dataclass(frozen=True, eq=False)
class _Process:
    """One process, its tokens loaded."""

    popen: subprocess.Popen[bytes]

    def ask(self, message: object, seconds: float) -> Verdict:
        """Its answer; TimeoutError, or EOFError when it has died."""
        assert self.popen.stdin is not None
        assert self.popen.stdout is not None
        deadline = time.monotonic() + seconds
        rest = memoryview(json.dumps(message).encode() + b"\n")
        try:
            while rest:  # as much as the pipe takes: a process that is stopped reads nothing
                _wait_for([], [self.popen.stdin], deadline)
                rest = rest[os.write(self.popen.stdin.fileno(), rest[: select.PIPE_BUF]) :]
        except BrokenPipeError:
            raise EOFError from None
        _wait_for([self.popen.stdout], [], deadline)
        line = self.popen.stdout.readline()
        if not line:
            raise EOFError
        word, reason = json.loads(line)
        return word, reason

    def end(self) -> None:
        """Kill it, and with it the child that it may have."""
        self.popen.kill()
        self.popen.wait()
        for pipe in (self.popen.stdin, self.popen.stdout):
            assert pipe is not None
            pipe.close()


class Trials:
    """Tries grammars for one tokenizer; each thread that asks has a process of its own.

    Attributes:
        close: ends the processes; what nobody uses any more closes itself.
    """

    def __init__(self, source: Callable[[], TokenSource]) -> None:
        self._source = source
        self._local = threading.local()
        self._processes: set[_Process] = set()
        self.close = weakref.finalize(self, _end_all, self._processes)

    def __call__(self, grammar: Grammar, seconds: float) -> None:
        """Compile it there; GrammarError if it is refused or takes too much memory, TooLong.

        OSError or RuntimeError where there is no process.
        """
        try:
            word, reason = self._verdict(grammar, seconds)
        except EOFError:  # whoever killed the process, it was not the grammar
            try:
                word, reason = self._verdict(grammar, seconds)
            except EOFError:
                raise RuntimeError("processes to compile grammars in are killed") from None
        if word == LATE:
            raise TooLong(seconds)
        if word == DIED:
            raise GrammarError("the grammar takes too much memory to compile")
        if word == REFUSED:
            raise GrammarError(reason)

    def _verdict(self, grammar: Grammar, seconds: float) -> Verdict:
        process = self._process()
        try:
            asked = [grammar.kind, grammar.text, seconds]
            return process.ask(asked, seconds + SLACK_SECONDS)
        except TimeoutError:
            self._end(process)
            return LATE, ""
        except EOFError:
            self._end(process)
            raise

    def _process(self) -> _Process:
        process: _Process | None = getattr(self._local, "process", None)
        if process is not None and process.popen.poll() is None:
            return process
        if process is not None:
            self._end(process)
        source = self._source()
        process = _Process(
            subprocess.Popen(
                command_of("octavo.serve.grammar_trial"),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                bufsize=0,
            )
        )
        self._processes.add(process)
        fields = [source.text, source.vocab_size, source.eos_id]
        try:
            word, reason = process.ask(fields, READY_SECONDS)
        except EOFError:
            self._end(process)
            raise
        except TimeoutError:
            self._end(process)
            raise RuntimeError("no process to compile grammars in") from None
        if word == REFUSED:
            self._end(process)
            raise GrammarError(reason)
        self._local.process = process
        return process

    def _end(self, process: _Process) -> None:
        process.end()
        self._processes.discard(process)
        self._local.process = None


def _wait_for(reading: list[IO[bytes]], writing: list[IO[bytes]], deadline: float) -> None:
    ready = select.poll()  # select knows no descriptor beyond 1023
    for file in reading:
        ready.register(file, select.POLLIN)
    for file in writing:
        ready.register(file, select.POLLOUT)
    if not ready.poll(1000 * max(0.0, deadline - time.monotonic())):
        raise TimeoutError


def _end_all(processes: set[_Process]) -> None:
    for process in processes:
        process.end()


def main() -> None:
    """Read the tokens, then grammars, a JSON line each; answer each with a verdict.

    Refused tokens end it.
    """
    lines = iter(sys.stdin.buffer.readline, b"")
    text, vocab_size, eos_id = json.loads(next(lines))
    try:
        tokenizer = TokenSource(text, vocab_size, eos_id).tokenizer()
    except GrammarError as error:
        _write(sys.stdout.fileno(), (REFUSED, str(error)))
        return
    _write(sys.stdout.fileno(), (COMPILED, ""))
    for line in lines:
        kind, text, seconds = json.loads(line)

        def verdict(grammar: tuple = (kind, text)) -> Verdict:
            try:
                compile_grammar(tokenizer, Grammar(*grammar))
            except BaseException as error:  # a panic is no Exception
                return REFUSED, refusal_of(error)
            return COMPILED, ""

        _write(sys.stdout.fileno(), in_child(verdict, seconds))


def in_child(work: Callable[[], Verdict], seconds: float) -> Verdict:
    """What `work` returns in a child that has so much time; SystemExit if the engine has ended."""
    answer, write = os.pipe()
    child = os.fork()
    if not child:
        _be_child(work, write, seconds)
    os.close(write)
    try:
        ready, _, _ = select.select([answer, sys.stdin], [], [], seconds)
        if not ready:
            return LATE, ""
        if answer not in ready:  # nothing is written meanwhile: it is the end
            sys.exit()
        with os.fdopen(os.dup(answer), "rb") as lines:
            word, reason = json.loads(lines.readline() or json.dumps((DIED, "")))
            return word, reason
    finally:
        os.close(answer)
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


def _be_child(work: Callable[[], Verdict], write: int, seconds: float) -> NoReturn:
    """Do the work within its limits, write its verdict, end."""
    try:
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)  # also if it is stopped
        _limit_memory()
        _limit_time(seconds)
        _write(write, work())
    finally:
        os._exit(0)


def _write(descriptor: int, verdict: Verdict) -> None:
    os.write(descriptor, json.dumps(verdict).encode() + b"\n")


def _limit_memory() -> None:
    with open("/proc/self/statm") as statm:
        present = int(statm.read().split()[0]) * resource.getpagesize()
    limit = present + MEMORY_BYTES
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # to run into it is expected


def _limit_time(seconds: float) -> None:
    """Of a child's, whose account begins with it."""
    limit = int(seconds) + CPU_SLACK_SECONDS
    resource.setrlimit(resource.RLIMIT_CPU, (limit, limit))


if __name__ == "__main__":
    main()
