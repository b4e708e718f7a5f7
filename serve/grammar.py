"""Which tokens the grammars of live requests allow next. No jax.

A matcher follows one sample: it takes each committed token and fills the row's bitmask for the next
one. It knows committed tokens only, so preemption, chunking and aborts leave nothing to undo.
"""

from collections.abc import Callable, Sequence
from concurrent.futures import wait
from typing import TYPE_CHECKING

import numpy as np

from octavo.sampling.pack import mask_words
from octavo.serve.grammar_compile import GrammarError, NoTrial, reason
from octavo.serve.grammar_jobs import GrammarCompiler, Job, Trial
from octavo.serve.grammar_spelling import Spelling
from octavo.serve.panics import panics_are_errors
from octavo.serve.types import Grammar, Request, RowResult, ScheduledBatch

if TYPE_CHECKING:
    from llguidance import LLExecutor, LLMatcher, LLTokenizer

ALL_ONES = 0xFFFFFFFF


class Grammars:
    """Compiles grammars in the background and follows the samples that have one.

    `load` gives the model's tokens, a second's work that the first grammar starts in a thread;
    `eos_ids` end a sample wherever its grammar may end; `trial` as in GrammarCompiler.
    """

    def __init__(
        self,
        load: Callable[[], "LLTokenizer"],
        vocab_size: int,
        eos_ids: Sequence[int] = (),
        trial: Trial | None = None,
    ) -> None:
        self._compiler = GrammarCompiler(load, trial)
        self._vocab_size = vocab_size
        self._eos_ids = tuple(eos_ids)
        self._jobs: dict[str, tuple[Grammar, Job]] = {}
        self._matchers: dict[str, LLMatcher] = {}
        self._failures: dict[str, str] = {}
        self._forced: dict[str, Sequence[int]] = {}
        self._executor: LLExecutor | None = None
        self._spelling = Spelling(self._compiler.tokenizer)

    def start(self, request: Request) -> None:
        """Compile a request's grammar in the background; `settled` tells when it is done."""
        grammar = request.grammar
        assert grammar is not None
        self._jobs[request.request_id] = grammar, self._compiler.submit(grammar, request.client)

    def compile(self, grammar: Grammar) -> None:
        """Compile and wait for it, so that a request need not; raises as Job.matcher."""
        job = self._compiler.submit(grammar)
        while not job.settled:
            wait([job.future], 0.1)
        job.matcher()

    def settled(self) -> list[tuple[str, GrammarError | NoTrial | None]]:
        """Requests whose grammar has been compiled or refused since the last call, with why."""
        ended: list[tuple[str, GrammarError | NoTrial | None]] = []
        if not self._jobs or not self._compiler.news():
            return ended
        for request_id, (_, job) in list(self._jobs.items()):
            if not job.settled:
                continue
            del self._jobs[request_id]
            error = None
            try:
                self._matchers[request_id] = job.matcher()
            except (GrammarError, NoTrial) as failure:
                error = failure
            ended.append((request_id, error))
        return ended

    def wait(self, seconds: float) -> None:
        """Until some compile has ended, at most so long; at once when nothing compiles."""
        if self._jobs:
            self._compiler.ended.wait(seconds)

    def discard(self, request_id: str) -> None:
        """Forget a request, compiled or not."""
        if asked := self._jobs.pop(request_id, None):
            self._compiler.withdraw(*asked)
        self._matchers.pop(request_id, None)
        self._failures.pop(request_id, None)
        self._forced.pop(request_id, None)

    def forced(self, request_id: str) -> Sequence[int]:
        """The tokens that must follow the committed ones, one by one the only ones allowed."""
        found = self._forced.get(request_id)
        if found is None:
            with panics_are_errors("the grammar library"):
                found = self._spelling.forced(self._matchers[request_id])
            self._forced[request_id] = found
        return found

    def constrain(self, batch: ScheduledBatch) -> bool:
        """Whether some row of the batch samples under a grammar."""
        if not self._matchers:
            return False
        return any(row.samples and row.request_id in self._matchers for row in batch.rows)

    def masks(self, batch: ScheduledBatch, rows: int) -> np.ndarray:
        """What the rows of a batch may draw, u32[rows, words]: see SamplingBatch.mask.

        llguidance fills the rows in its own threads; rows without a grammar, rows whose sample has
        ended meanwhile or ends with its forced tokens, and padding allow everything.
        """
        mask = np.full((rows, mask_words(self._vocab_size)), ALL_ONES, np.uint32)
        todo = [
            (self._matchers[row.request_id], index)
            for index, row in enumerate(batch.rows)
            if row.samples and row.request_id in self._matchers
        ]
        ahead = [(m, list(batch.rows[i].forced)) for m, i in todo if batch.rows[i].forced]
        with panics_are_errors("the grammar library"):
            for matcher, forced in ahead:
                matcher.consume_tokens(forced)
        if goes_on := [(matcher, index) for matcher, index in todo if not matcher.is_stopped()]:
            self._fill(goes_on, mask)
            self._note_choices(batch, goes_on, mask)
        for matcher, index in todo:
            if matcher.is_error():
                self._failures[batch.rows[index].request_id] = reason(matcher)
        with panics_are_errors("the grammar library"):
            for matcher, forced in ahead:
                if not matcher.is_error():
                    matcher.rollback(len(forced))
        return mask

    def _fill(self, todo: list[tuple["LLMatcher", int]], mask: np.ndarray) -> None:
        from llguidance import LLExecutor
        from llguidance.numpy import fill_next_token_bitmask_par

        self._executor = self._executor or LLExecutor()
        with panics_are_errors("the grammar library"):
            fill_next_token_bitmask_par(self._executor, todo, mask.view(np.int32))
        self._let_all_eos(mask, [index for _, index in todo])

    def _note_choices(
        self, batch: ScheduledBatch, rows: list[tuple["LLMatcher", int]], mask: np.ndarray
    ) -> None:
        """Where two tokens are allowed none is forced, so that the library need not be asked.

        Where one is, it may be none that the grammar takes: see Spelling.
        """
        allowed = np.bitwise_count(mask).sum(axis=1, dtype=np.int32).tolist()
        for matcher, index in rows:
            row = batch.rows[index]
            if allowed[index] == 1:
                with panics_are_errors("the grammar library"):
                    self._spelling.correct(matcher, mask[index])
            elif not row.forced:
                self._forced[row.request_id] = ()

    def _let_all_eos(self, mask: np.ndarray, rows: list[int]) -> None:
        """Any end-of-sequence id is allowed where the first one is, and nowhere else."""
        if len(self._eos_ids) < 2:
            return
        first, *others = self._eos_ids
        may_end = (mask[rows, first // 32] >> np.uint32(first % 32)) & np.uint32(1)
        for token in others:
            shift = np.uint32(token % 32)
            without = mask[rows, token // 32] & ~(np.uint32(1) << shift)
            mask[rows, token // 32] = without | (may_end << shift)

    def advance(self, batch: ScheduledBatch, results: Sequence[RowResult]) -> None:
        """Take the batch's drawn tokens; results whose grammar is complete or failed say so."""
        if not self._matchers:
            return
        with panics_are_errors("the grammar library"):
            for row, result in zip(batch.rows, results):
                matcher = self._matchers.get(row.request_id)
                if matcher is not None and result.token_ids:
                    self._take(row.request, matcher, result)

    def _take(self, request: Request, matcher: "LLMatcher", result: RowResult) -> None:
        """Follow the drawn tokens; of those behind the grammar's end none counts."""
        failure = self._failures.get(request.request_id)
        for count, token in enumerate(result.token_ids, 1):
            if failure is None and token in request.stop_ids:
                return
            if failure is None and not matcher.consume_token(token):
                failure = reason(matcher)
            if failure is not None:
                result.error, result.invalid = f"grammar: {failure}", True
                return
            if matcher.is_stopped():
                result.token_ids, result.complete = result.token_ids[:count], True
                return
        self._forced.pop(request.request_id, None)
