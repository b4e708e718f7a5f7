"""Programs compiled ahead of time: looked up by key, loaded from the artefact, or compiled once.

After warm-up the set is sealed: a further compile is an error under `strict` (tests) and a counted,
logged event otherwise, since it stalls every running request.
"""

import hashlib
import logging
import pickle
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, field
from threading import Lock
from typing import Any, Protocol

import jax
from jax.experimental import serialize_executable
from tqdm import tqdm

from octavo.sampling.flags import SamplingFlags
from octavo.serve.artefact import ArtefactStore
from octavo.serve.buckets import Bucket

log = logging.getLogger("octavo.compile")


@dataclass(frozen=True)
class ProgramKey:
    """Which program: its kind, and whatever static choices that kind has."""

    kind: str
    bucket: Bucket | None = None
    flags: SamplingFlags | None = None
    size: int = 0
    stateful: bool = False

    @property
    def name(self) -> str:
        """Short, stable file name."""
        digest = hashlib.sha256(repr(self).encode()).hexdigest()[:20]
        return f"{self.kind}-{digest}"

    def __str__(self) -> str:
        """For the log."""
        words = [f"{self.kind} {self.bucket.label if self.bucket else self.size}"]
        if self.bucket:
            words.append(f"{self.bucket.pages} pages a row")
        if self.flags:
            words += [name for name, value in vars(self.flags).items() if value is True]
            words += [f"logprobs {self.flags.logprobs}"] * (self.flags.logprobs >= 0)
        return ", ".join(words)


@dataclass(frozen=True)
class Lowerable:
    """A function, the abstract arguments to lower it for, and how jax.jit is to take it."""

    function: Callable[..., Any]
    args: tuple[Any, ...]
    options: Mapping[str, Any] = field(default_factory=dict)

    @property
    def jitted(self) -> Any:
        """The function as jax.jit makes it, with its options."""
        return jax.jit(self.function, **self.options)

    def lower(self) -> jax.stages.Lowered:
        """Lowered for its arguments."""
        return self.jitted.lower(*self.args)


Lower = Callable[[ProgramKey], tuple[jax.stages.Lowered, float]]
"""The lowered program of a key, and the seconds that it took; called in several threads."""


class Lowering(Protocol):
    """What lowers programs for `Programs.warm`; see lowering_pool.py."""

    @property
    def lowered_apart(self) -> int:
        """Programs that were lowered in other processes."""
        ...

    def lower(self, key: ProgramKey) -> tuple[jax.stages.Lowered, float]:
        """See Lower."""
        ...


@dataclass
class CompileStats:
    """How programs came to be, and when.

    Seconds are sums over programs, which are compiled, loaded and in a cold start lowered side by
    side; `lowered_apart` of those compiled were lowered in processes of their own.
    """

    compiled: int = 0
    lowered_apart: int = 0
    loaded: int = 0
    after_seal: int = 0
    lower_seconds: float = 0.0
    compile_seconds: float = 0.0
    load_seconds: float = 0.0


class Programs:
    """The engine's executables. `get` may run in several threads.

    Of the engines that share a store, one compiles a program and the others load it.

    Attributes:
        stats: how the programs came to be.
        on_compile: called before each compile, in the thread that compiles.
    """

    def __init__(
        self,
        build: Callable[[ProgramKey], Lowerable],
        store: ArtefactStore | None = None,
        *,
        devices: Sequence[Any],
        strict: bool = False,
    ) -> None:
        self._build = build
        self._devices = devices
        self.store = store
        self._strict = strict
        self._programs: dict[ProgramKey, Any] = {}
        self._lock, self._lowering = Lock(), Lock()
        self._lower: Lower = self._lower_here
        self._sealed = False
        self.stats = CompileStats()
        self.on_compile: Callable[[], None] = _nothing

    def get(self, key: ProgramKey) -> Any:
        """The executable of `key`; compiles or loads it if this is its first use."""
        program = self._programs.get(key)
        if program is None:
            program = self._load(key) or self._make(key)
            self._programs[key] = program
        return program

    def warm(
        self,
        keys: Iterable[ProgramKey],
        *,
        workers: int,
        progress: bool = False,
        lowering: Callable[[Lower, int], AbstractContextManager[Lowering]] | None = None,
    ) -> None:
        """Make every key ready, compiling in parallel threads.

        `lowering` lowers those that there are to compile; it is told how one is lowered here, and
        how many they are. Without it that is done one by one.
        """
        todo = [key for key in keys if key not in self._programs]
        new = [key for key in todo if not (self.store and self.store.has(key.name))]
        with ExitStack() as stack:
            if lowering and new:
                apart = stack.enter_context(lowering(self._lower_here, len(new)))
                self._lower = apart.lower
                stack.callback(self._end_lowering, apart)
            pool = stack.enter_context(ThreadPoolExecutor(max_workers=workers))
            done = pool.map(self.get, todo)
            for _ in tqdm(done, "compiling", len(todo), disable=not progress, unit="program"):
                pass

    def _end_lowering(self, apart: Lowering) -> None:
        self._lower = self._lower_here
        self.stats.lowered_apart += apart.lowered_apart

    def seal(self) -> None:
        """There is nothing left to compile: from now on a compile is late."""
        self._sealed = True

    def items(self) -> list[tuple[ProgramKey, Any]]:
        """Every program made ready so far, with its key."""
        return list(self._programs.items())

    def _load(self, key: ProgramKey) -> Any:
        payload = self.store.load(key.name) if self.store else None
        if payload is None or self.store is None:
            return None
        start = time.perf_counter()
        try:
            program = read_program(payload, self._devices)
        except Exception as error:  # any failure to load means: build it anew
            self.store.refuse(key.name, f"{type(error).__name__}: {error}")
            return None
        with self._lock:
            self.stats.loaded += 1
            self.stats.load_seconds += time.perf_counter() - start
        return program

    def _make(self, key: ProgramKey) -> Any:
        """Compile a program, or wait for another process that does so already."""
        if self._sealed:
            self._note_late(key)
        self.on_compile()
        if self.store is None:
            return self._compile(key)
        with self.store.building(key.name):
            known = None if key.name in self.store.refused else self._load(key)
            return known or self._compile(key)

    def _lower_here(self, key: ProgramKey) -> tuple[jax.stages.Lowered, float]:
        """A lowered program, and the seconds that it took, which hold Python's lock.

        Threads that all lower at once would all be done late: one after the other, the first
        program's compile begins after its own lowering.
        """
        with self._lowering:
            start = time.perf_counter()
            return self._build(key).lower(), time.perf_counter() - start

    def _compile(self, key: ProgramKey) -> Any:
        """Lower a program and compile it, which doesn't hold Python's lock."""
        log.info("compiling %s", key)
        lowered, lower_seconds = self._lower(key)
        start = time.perf_counter()
        program = lowered.compile()
        seconds = time.perf_counter() - start
        with self._lock:
            self.stats.compiled += 1
            self.stats.lower_seconds += lower_seconds
            self.stats.compile_seconds += seconds
        log.info("compiled %s in %.1f s, lowered in %.1f s", key, seconds, lower_seconds)
        self._save(key, program)
        return program

    def _save(self, key: ProgramKey, program: Any) -> None:
        """Keep an executable for later starts; one that can't be kept still serves this one."""
        if self.store is None:
            return
        try:
            payload = pickle.dumps(serialize_executable.serialize(program))
        except Exception as error:
            log.warning("program %s can't be stored: %s", key.name, error)
            return
        self.store.save(key.name, payload)

    def _note_late(self, key: ProgramKey) -> None:
        if self._strict:
            raise RuntimeError(f"compile after warm-up: {key}")
        self.stats.after_seal += 1
        log.warning("compiling after warm-up stalls running requests: %s", key)


def read_program(payload: bytes, devices: Sequence[Any]) -> Any:
    """The executable that `Programs` stored, on these devices; raises whatever is wrong with it.

    Executes code: only for the bytes of a store.
    """
    parts = pickle.loads(payload)
    return serialize_executable.deserialize_and_load(*parts, execution_devices=devices)


def _nothing() -> None:
    """Nobody wants to know."""
