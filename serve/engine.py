"""The engine: scheduler and runner around one step loop.

`step` is schedule -> dispatch -> commit. With overlap the batch of this call is dispatched before
the previous one's tokens are read, so the device never waits for the host; without it the same
lines run in order, which is the loop that tests compare against.

A batch with grammars, or with reasoning at its bound, is dispatched in two parts: its forward pass
runs while the previous tokens are read and the masks made that follow from them, then the masks are
uploaded and it samples.
"""

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import jax
import numpy as np

from octavo.model.checkpoint.source import Checkpoint
from octavo.model.config import ModelConfig
from octavo.sampling.params import MAX_SEED, SamplingParams
from octavo.serve.config import POOLINGS
from octavo.serve.core_engine import Gate
from octavo.serve.grammar import Grammars
from octavo.serve.grammar_compile import GrammarError, no_tokens
from octavo.serve.inflight import Forwarded, InFlight
from octavo.serve.pace import DecodePace
from octavo.serve.runner import Runner
from octavo.serve.scheduler import Scheduler
from octavo.serve.slack import DispatchSlack
from octavo.serve.step_budget import StepBudget
from octavo.serve.step_clock import StepClock
from octavo.serve.thinking import close_due, may_close
from octavo.serve.timeline import Timeline
from octavo.serve.types import FINISH_ERROR, EngineStats, Request, ScheduledBatch, TokenEvent

COMPILE_POLL_SECONDS = 0.005
"""How long an engine that only waits for grammars to compile sleeps before it looks for news."""

log = logging.getLogger("octavo.engine")


class Engine:
    """Serves requests until none is left. One thread drives it: `add`, `abort` and `step`.

    Attributes:
        model_config: the model's description.
        eos_ids: end-of-sequence ids given to every request.
        generation: the model's default sampling fields.
        source: file or folder of the model.
        max_model_len: longest prompt + output in tokens.
        grammars: compiles and follows the requests' grammars.
        timeline: how long its start took; None for one put together by hand.
        weights_epoch: counts the times that the weights were replaced.
        gate: who may go on: see Gate.
        pace, budget: steps of a dispatch, and prompt tokens of a step; either may be replaced, or
            given another limit, between steps.

    `decode_wait` bounds, in seconds, what multi-step decode adds to a newcomer's wait (DecodePace).
    `budget` is the one that the scheduler asks for prefill tokens; the engine lets it learn.
    `stage` reads a model's weights again, into host memory.
    """

    def __init__(
        self,
        runner: Runner,
        scheduler: Scheduler,
        *,
        max_model_len: int,
        eos_ids: tuple[int, ...] = (),
        grammars: Grammars | None = None,
        generation: dict | None = None,
        source: Path = Path(),
        overlap: bool = True,
        decode_wait: float | None = None,
        budget: StepBudget | None = None,
        seed: int | None = None,
        stage: Callable[[str], Checkpoint] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.runner, self.scheduler = runner, scheduler
        self.model_config: ModelConfig = runner.graph.config
        self.max_model_len = max_model_len
        self.eos_ids = eos_ids
        self.grammars = grammars or Grammars(no_tokens, self.model_config.vocab_size)
        self.generation = generation or {}
        self.source = source
        self.timeline: Timeline | None = None
        self.weights_epoch = 0
        self._stage = stage
        self._gate: Gate = "open"
        self._overlap = overlap
        self._clock = clock
        self._seeds = np.random.default_rng(seed)
        self._in_flight: InFlight | None = None
        self._news: list[TokenEvent] = []
        self._steps = StepClock()
        self._slack = DispatchSlack()
        self.budget = budget
        gap = budget.limit if budget else None
        self.pace = DecodePace(decode_wait, scheduler.config.max_decode_steps, gap)

    def add(self, request: Request) -> None:
        """Queue a request, resolved if it was not.

        One with a grammar is not admitted before that is compiled. Raises ValueError as `resolved`
        does, and QueueFull when too many requests wait.
        """
        request = self.resolved(request)
        self.scheduler.add(request, self._clock(), held=request.grammar is not None)
        if request.grammar is not None:
            self._start_grammar(request)

    def resolved(self, request: Request) -> Request:
        """The request with its max_tokens, a seed and the end-of-sequence ids.

        Raises ValueError for a prompt that is empty, too long or holds ids outside the vocabulary
        and for ignore_eos or thinking with a grammar.
        """
        check_prompt(request.prompt, self.model_config.vocab_size, self.max_model_len)
        params = request.params
        check_token_ids(params, self.model_config.vocab_size)
        if request.pooling and (request.pooling not in POOLINGS or params.max_tokens != 0):
            raise ValueError(f"pooling must be {' or '.join(POOLINGS)}, with max_tokens 0")
        if params.max_tokens is None and len(request.prompt) == self.max_model_len:
            raise ValueError(
                f"prompt has {len(request.prompt)} tokens and fills the context of "
                f"{self.max_model_len}: nothing is left to generate"
            )
        most, seed = params.max_tokens, params.seed
        if most is None:
            most = self.max_model_len - len(request.prompt)
        if seed is None:
            seed = int(self._seeds.integers(MAX_SEED))
        request = replace(request, params=params.resolved(most, seed), eos_ids=self.eos_ids)
        if request.grammar is not None and params.ignore_eos:
            raise ValueError("ignore_eos can't be true with a grammar, which says where to end")
        check_thinking(request, self.model_config.vocab_size)
        return request

    def _start_grammar(self, request: Request) -> None:
        try:
            self.grammars.start(request)
        except BaseException:  # nothing would ever release it
            self.scheduler.abort(request.request_id, FINISH_ERROR)
            raise

    def abort(self, request_id: str) -> None:
        """Drop a request and free its pages; unknown ids are ignored (it may just have ended)."""
        self.scheduler.abort(request_id)
        self.grammars.discard(request_id)

    def has_work(self) -> bool:
        """Whether `step` has anything to do."""
        if self._gate == "open":
            return self._in_flight is not None or self.scheduler.has_work()
        return self._in_flight is not None or (self._gate == "closing" and self.scheduler.begun())

    @property
    def gate(self) -> Gate:
        """Who may go on."""
        return self._gate

    @gate.setter
    def gate(self, gate: Gate) -> None:
        self._gate = gate
        self.scheduler.close(gate != "open", self._clock())

    @property
    def begun(self) -> bool:
        """Whether a request has had its row and not its end, or a batch is in flight."""
        return self._in_flight is not None or self.scheduler.begun()

    def stage(self, model: str = "") -> Checkpoint:
        """Weights of `model`, or of the present one read again, checked, in host memory.

        Touches nothing of the engine, so that a thread may do it while steps run. ValueError for a
        model that is damaged or not of the present one's shapes, naming the differences.
        """
        if self._stage is None:
            raise ValueError("this engine does not know how to read weights")
        return self._stage(model)

    def forget_prefixes(self) -> None:
        """Share nothing that was computed until now."""
        self.scheduler.reset_prefixes()

    def swap(self, staged: Checkpoint) -> None:
        """Go on with staged weights, and a new weights epoch.

        RuntimeError if a request has begun under the old ones. Any failure after that leaves the
        engine without weights.
        """
        if self.begun:
            raise RuntimeError("requests run: end them before the weights are replaced")
        self.runner.replace_params(staged.params)
        self.weights_epoch += 1
        self.scheduler.reset_prefixes(self.weights_epoch)
        self.source = staged.path
        log.info("weights of %s, epoch %d", staged.path, self.weights_epoch)

    def slack(self) -> float:
        """Seconds by which the next step may be put off without the device running dry.

        Who is added meanwhile goes with its dispatch, instead of waiting for it to end.
        """
        since = self._steps.since
        if self._in_flight is None or since is None:
            return 0.0
        kind, prompts = self.runner.kind(self._in_flight.batch), self.scheduler.has_prompts()
        return self._slack.left(kind, since, self._clock(), prompts=prompts)

    def step(self) -> list[TokenEvent]:
        """Advance by one dispatch and return what is new.

        An implicit transfer to the device is an error: it would stall the step unseen.
        """
        with jax.transfer_guard_host_to_device("disallow"):
            self._step()
        return self._take_news()

    def _step(self) -> None:
        self._admit_compiled()
        batch, started = None, self._clock()
        if self._gate != "shut":
            steps, forced = self.pace.steps(), self.grammars.forced
            batch = self.scheduler.schedule(started, steps, forced)
        begun = self._begin(batch, started) if batch else None
        previous, self._in_flight = self._in_flight, None
        if previous:
            self._commit(previous, more=begun is not None)
        dispatched = self._finish(begun) if begun else None
        if self._overlap:
            self._in_flight = dispatched
        elif dispatched:
            self._commit(dispatched, more=False)
        if not (previous or dispatched):
            self.grammars.wait(COMPILE_POLL_SECONDS)

    def _take_news(self) -> list[TokenEvent]:
        """What has happened and nobody was told: a step that raises leaves it to `recover`."""
        news, self._news = self._news, []
        return news

    def _begin(self, batch: ScheduledBatch, started: float) -> InFlight | Forwarded:
        """Dispatch a batch; one that has to wait for masks up to its logits.

        `started` is when its scheduling began.
        """
        late = self._in_flight is not None and self._in_flight.done
        masked = self.grammars.constrain(batch) or may_close(batch)
        begun: InFlight | Forwarded
        if batch.is_decode and not masked:
            begun = self.runner.dispatch(batch)
        else:
            begun = self.runner.forward(batch, grammar=masked)
        now = self._clock()
        if self._in_flight is not None:
            # What prompts are made of begins while the rest of it is still on its way.
            late = self._in_flight.done if batch.is_decode else late
            self._slack.dispatched(now - started, prompts=not batch.is_decode, late=late)
        self._steps.dispatched(batch, now, late=late)
        if isinstance(begun, Forwarded) and not masked:
            return self.runner.sample(begun)
        return begun

    def _finish(self, begun: InFlight | Forwarded) -> InFlight:
        """Dispatch the rest of a batch that waits for masks: every token before it is known now."""
        if isinstance(begun, InFlight):
            return begun
        mask = self.grammars.masks(begun.batch, begun.rows)
        close_due(begun.batch, mask)
        return self.runner.sample(begun, mask)

    def _commit(self, ready: InFlight, *, more: bool) -> None:
        """Wait for a batch's tokens and account for them; `more` if another is on the device."""
        awaited = not ready.done
        results = ready.read()
        now = self._clock()
        seconds = self._steps.answered(ready.batch, now)
        self._slack.answered(self.runner.kind(ready.batch), seconds, awaited=awaited)
        if ready.batch.is_decode:
            self.pace.note(seconds, ready.batch.num_steps)
        elif self.budget:
            self.budget.note(ready.batch.num_tokens, seconds)
        self.grammars.advance(ready.batch, results)
        events = self.scheduler.commit(ready.batch, results, now)
        self._news += events
        for event in events:
            if event.finish_reason is not None:
                self.grammars.discard(event.request_id)
        if not more:
            self._steps.rest(now, live=self.scheduler.has_work())

    def _admit_compiled(self) -> None:
        """Let requests be admitted whose grammar is compiled, and end those it is refused to."""
        for request_id, error in self.grammars.settled():
            if error is None:
                self.scheduler.release(request_id)
                continue
            self.scheduler.abort(request_id, FINISH_ERROR)
            invalid = isinstance(error, GrammarError)
            self._news.append(
                TokenEvent(
                    request_id, finish_reason=FINISH_ERROR, error=str(error), invalid=invalid
                )
            )

    def recover(self, reason: str) -> list[TokenEvent]:
        """After an exception in `step`: fail what was running, keep what waits, clear the cache.

        Returns what the step had to tell before it failed, then the failures.
        """
        self._in_flight = None
        failed = self.scheduler.reset(reason)
        for event in failed:
            self.grammars.discard(event.request_id)
        self._steps.rest(self._clock(), live=self.scheduler.has_work())
        self.runner.reset_device_state()
        log.error("engine recovered; %d requests failed: %s", len(failed), reason)
        return self._take_news() + failed

    def on_compile(self, callback: Callable[[], None]) -> None:
        """Have `callback` called whenever a step is about to compile a program."""
        self.runner.programs.on_compile = callback

    def score(self, token_ids: Sequence[int]) -> np.ndarray:
        """Teacher-forced float32 logits [T, V] of `token_ids`, through the paged path.

        Uses pages that are free now and gives them back; ValueError if there are too few.
        """
        check_prompt(token_ids, self.model_config.vocab_size, self.max_model_len)
        with self.scheduler.borrow_pages(len(token_ids)) as pages:
            return self.runner.score(np.asarray(token_ids, np.int32), pages)

    def stats(self) -> EngineStats:
        """Counters and gauges since start."""
        stats = self.scheduler.stats()
        stats.padding = dict(self.runner.padding)
        stats.step_seconds = self._steps.seconds
        stats.step_tokens = self._steps.tokens
        stats.idle_seconds = self._steps.idle_seconds
        stats.late_dispatches = self._steps.late_dispatches
        stats.compiles_after_warmup = self.runner.programs.stats.after_seal
        return stats

    def check(self) -> None:
        """Verify every invariant of the host state; AssertionError names the broken one."""
        self.scheduler.check()


def check_prompt(prompt: Sequence[int], vocab_size: int, max_model_len: int) -> None:
    """Refuse a prompt that is empty, leaves no room, or holds ids outside the vocabulary."""
    if len(prompt) == 0:
        raise ValueError("prompt must hold at least one token")
    if len(prompt) > max_model_len:
        raise ValueError(f"prompt has {len(prompt)} tokens; the context holds {max_model_len}")
    low, high = min(prompt), max(prompt)
    if low < 0 or high >= vocab_size:
        bad = low if low < 0 else high
        raise ValueError(f"prompt token id {bad} is outside the vocabulary, 0 .. {vocab_size - 1}")


def check_thinking(request: Request, vocab_size: int) -> None:
    """Refuse a bound of reasoning beside a grammar, and tags outside the vocabulary."""
    if request.thinking is None:
        return
    if request.grammar is not None:
        raise ValueError("thinking and a grammar exclude each other: its text holds no reasoning")
    for token in (request.thinking.open, request.thinking.close):
        if not 0 <= token < vocab_size:
            limit = f"outside the vocabulary 0 .. {vocab_size - 1}"
            raise ValueError(f"thinking holds token id {token}, {limit}")


def check_token_ids(params: SamplingParams, vocab_size: int) -> None:
    """Refuse sampling fields that name ids outside the vocabulary."""
    fields = {
        "logit_bias": params.logit_bias,
        "stop_token_ids": params.stop_token_ids,
        "bad_token_ids": params.bad_token_ids,
        "allowed_token_ids": params.allowed_token_ids or (),
    }
    for name, ids in fields.items():
        for token in ids:
            if not 0 <= token < vocab_size:
                raise ValueError(
                    f"{name} holds token id {token}, outside the vocabulary 0 .. {vocab_size - 1}"
                )
