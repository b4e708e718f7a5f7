"""Grammars compiled on trial, in a process that may be killed. No jax.

llguidance bounds what a compile may cost by its own count, which a few dozen intersected regular
expressions escape: their compile doubles in time and memory with each. A thread can't be ended, so
an engine that takes grammars from strangers compiles only what a process of its own has compiled
before, within a time and a size.
"""

import json
import os
import resource
import select
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable
from dataclasses import dataclass

from octavo.serve.grammar_compile import (
    GrammarError,
    TokenSource,
    compile_grammar,
    refusal_of,
    too_long,
)
from octavo.serve.types import Grammar

READY_SECONDS = 60.0
"""A process may take so long to load the tokens, on a machine that has other things to do."""
MEMORY_BYTES = 2 << 30
"""What a compile may take; grammars people write take a few megabytes."""
CPU_SLACK_SECONDS = 10
"""A process whose engine has died ends by itself, so long after its compile should have."""


@dataclass(frozen=True, eq=False)
class _Process:
    """One process, its tokens loaded."""

    popen: subprocess.Popen[bytes]

    def ask(self, message: object, seconds: float) -> str | None:
        """Its answer; TimeoutError, or EOFError when it has died."""
        assert self.popen.stdin is not None
        assert self.popen.stdout is not None
        try:
            self.popen.stdin.write(json.dumps(message).encode() + b"\n")
        except OSError:
            raise EOFError from None
        if not select.select([self.popen.stdout], [], [], seconds)[0]:
            raise TimeoutError
        line = self.popen.stdout.readline()
        if not line:
            raise EOFError
        return json.loads(line)

    def end(self) -> None:
        """Kill it."""
        self.popen.kill()
        self.popen.communicate()


class Trials:
    """Tries grammars for one tokenizer; each thread that asks has a process of its own.

    Attributes:
        close: ends the processes; what nobody uses any more closes itself.
    """

    def __init__(self, source: Callable[[], TokenSource], compile_seconds: float) -> None:
        self._source = source
        self._seconds = compile_seconds
        self._local = threading.local()
        self._processes: set[_Process] = set()
        self.close = weakref.finalize(self, _end_all, self._processes)

    def __call__(self, grammar: Grammar) -> None:
        """Compile it there; GrammarError if it is refused, takes too long or too much memory."""
        process = self._process()
        try:
            refusal = process.ask([grammar.kind, grammar.text], self._seconds)
        except TimeoutError:
            self._end(process)
            raise GrammarError(too_long(self._seconds)) from None
        except EOFError:
            self._end(process)
            raise GrammarError("the grammar takes too much memory to compile") from None
        if refusal is not None:
            raise GrammarError(refusal)

    def _process(self) -> _Process:
        process: _Process | None = getattr(self._local, "process", None)
        if process is not None and process.popen.poll() is None:
            return process
        if process is not None:
            self._end(process)
        source = self._source()
        process = _Process(
            subprocess.Popen(
                [sys.executable, "-m", "octavo.serve.grammar_trial"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                bufsize=0,
            )
        )
        self._processes.add(process)
        fields = [source.text, source.vocab_size, source.eos_id, self._seconds]
        try:
            process.ask(fields, READY_SECONDS)
        except (TimeoutError, EOFError):
            self._end(process)
            raise RuntimeError("no process to compile grammars in") from None
        self._local.process = process
        return process

    def _end(self, process: _Process) -> None:
        process.end()
        self._processes.discard(process)
        self._local.process = None


def _end_all(processes: set[_Process]) -> None:
    for process in processes:
        process.end()


def main() -> None:
    """Read the tokens, then grammars, a JSON line each; answer each with null or its refusal."""
    lines = iter(sys.stdin.buffer.readline, b"")
    text, vocab_size, eos_id, seconds = json.loads(next(lines))
    tokenizer = TokenSource(text, vocab_size, eos_id).tokenizer()
    _limit_memory()
    _answer(None)
    for line in lines:
        _limit_time(seconds)
        try:
            compile_grammar(tokenizer, Grammar(*json.loads(line)))
        except BaseException as error:  # a panic is no Exception
            _answer(refusal_of(error))
        else:
            _answer(None)


def _answer(reply: str | None) -> None:
    os.write(sys.stdout.fileno(), json.dumps(reply).encode() + b"\n")


def _limit_memory() -> None:
    with open("/proc/self/statm") as statm:
        present = int(statm.read().split()[0]) * resource.getpagesize()
    limit = present + MEMORY_BYTES
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # to run into it is expected


def _limit_time(seconds: float) -> None:
    used = resource.getrusage(resource.RUSAGE_SELF)
    limit = int(used.ru_utime + used.ru_stime + seconds) + CPU_SLACK_SECONDS
    resource.setrlimit(resource.RLIMIT_CPU, (limit, resource.getrlimit(resource.RLIMIT_CPU)[1]))


if __name__ == "__main__":
    main()
