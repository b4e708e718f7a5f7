"""A dispatched batch whose answer is still on its way, and its translation into row results."""

import atexit
import contextlib
from collections import deque
from dataclasses import dataclass

import jax
import numpy as np

from octavo.sampling.flags import SamplingFlags
from octavo.serve.batch import pools
from octavo.serve.types import RowResult, ScheduledBatch, ScheduledRow, TokenLogprob

NOT_FINITE = "the model produced NaN or infinite logits for this request"
ALL_BANNED = "every token is banned for this request"
TOKEN, FINITE = 0, 1
LOGPROB, RANK, TOP = 0, 1, 2

_COPIES: deque[jax.Array] = deque(maxlen=8)
"""The latest copies to the host: more than can be on their way at once."""


def fetch(array: jax.Array) -> None:
    """Start an array's way to the host, where it will be read."""
    array.copy_to_host_async()
    _COPIES.append(array)


@atexit.register
def _land() -> None:
    """Wait for copies that nobody did: one that ends after the interpreter aborts the process."""
    for array in _COPIES:
        with contextlib.suppress(Exception):
            jax.device_get(array)


@dataclass(frozen=True)
class Forwarded:
    """A one-step batch whose logits are on their way and whose sampling is not dispatched yet.

    Attributes:
        batch: what was dispatched.
        flags: how it will sample.
        logits: f32[S, V] of each row's last token.
        packed: the sampling program's input, still in host memory; None if no row samples.
        prompt_report, prompt_top_n, pooled: as in InFlight.
    """

    batch: ScheduledBatch
    flags: SamplingFlags
    logits: jax.Array
    packed: np.ndarray | None
    prompt_report: jax.Array | None
    prompt_top_n: int
    pooled: jax.Array | None

    @property
    def rows(self) -> int:
        """Rows of the bucket."""
        return self.logits.shape[0]


@dataclass(frozen=True)
class InFlight:
    """Device arrays of a batch in progress.

    Attributes:
        batch: what was dispatched.
        flags: how it sampled.
        report: i32[S, W] or, multi-step, i32[k, S, W]; see `step.draw`. None if no row samples.
        prompt_report: i32[T, W] log-probability columns of prompt tokens, or None.
        prompt_top_n: likeliest tokens reported there.
        pooled: f32[rows, E] sums of hidden states for embeddings, or None.
    """

    batch: ScheduledBatch
    flags: SamplingFlags
    report: jax.Array | None
    prompt_report: jax.Array | None = None
    prompt_top_n: int = 0
    pooled: jax.Array | None = None

    @property
    def done(self) -> bool:
        """Whether the device has certainly finished it; never waits."""
        # jax's stub of Array leaves this method out.
        return self.report is not None and self.report.is_ready()  # pyright: ignore[reportAttributeAccessIssue]

    def read(self) -> list[RowResult]:
        """Wait for the device and give each row of the batch its result, in order."""
        report = None if self.report is None else np.asarray(self.report)
        if report is not None and report.ndim == 2:
            report = report[None]
        prompt = None if self.prompt_report is None else np.asarray(self.prompt_report)
        pooled = None if self.pooled is None else np.asarray(self.pooled)
        heads = None if report is None else report[:, :, : FINITE + 1].transpose(1, 2, 0).tolist()
        results, start = [], 0
        for index, row in enumerate(self.batch.rows):
            prompt_logprobs = ()
            if prompt is not None:
                prompt_logprobs = self._prompt_logprobs(row, prompt[start : start + row.query_len])
            start += row.query_len
            if report is None or heads is None or not row.samples:
                result = RowResult(prompt_logprobs=prompt_logprobs)
            else:
                tokens, finite = heads[index]
                columns = report[:, index]
                result = self._row_result(row, tokens, finite, columns, prompt_logprobs)
            if pooled is not None and pools(row):
                result = _with_pooled(result, pooled[index])
            results.append(result)
        return results

    def _row_result(
        self,
        row: ScheduledRow,
        tokens: list[int],
        finite: list[int],
        columns: np.ndarray,
        prompt_logprobs: tuple[TokenLogprob, ...],
    ) -> RowResult:
        """What a row has drawn: its report i32[k, W], and of each step the token and FINITE.

        Plain numbers: NumPy calls on each row's few of them are dear between two single steps.
        """
        if -1 in finite:  # steps after a stop are all -1
            tokens = tokens[: finite.index(-1)]
        if 0 in finite:
            return RowResult(error=NOT_FINITE)
        if tokens and min(tokens) < 0:
            return RowResult(error=ALL_BANNED, invalid=True)
        asked = row.request.params.logprobs
        logprobs = ()
        if asked is not None:
            logprobs = tuple(
                _logprob(token, step[2:], self.flags.logprobs, asked)
                for token, step in zip(tokens, columns)
            )
        return RowResult((*row.forced, *tokens), logprobs, prompt_logprobs)

    def _prompt_logprobs(self, row: ScheduledRow, columns: np.ndarray) -> tuple[TokenLogprob, ...]:
        asked = row.request.params.prompt_logprobs
        if asked is None:
            return ()
        targets = row.request.prompt[row.start + 1 : row.start + row.query_len + 1]
        return tuple(
            _logprob(token, words, self.prompt_top_n, asked)
            for token, words in zip(targets, columns, strict=False)
        )


def _with_pooled(result: RowResult, pooled: np.ndarray) -> RowResult:
    """The result of a row whose hidden states count for an embedding."""
    if not np.isfinite(pooled).all():
        return RowResult(error=NOT_FINITE)
    result.pooled = pooled
    return result


def _logprob(token: int, words: np.ndarray, top_n: int, asked: int) -> TokenLogprob:
    """One token's entry from its int32 columns; keeps the `asked` likeliest of `top_n`."""
    ids = words[TOP : TOP + asked]
    values = words[TOP + top_n : TOP + top_n + asked].view(np.float32)
    top = tuple(zip(ids.tolist(), values.tolist(), strict=True))
    return TokenLogprob(
        token, float(words[LOGPROB : LOGPROB + 1].view(np.float32)[0]), int(words[RANK]), top
    )
