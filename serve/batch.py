"""The one place where scheduled rows become arrays.

Each program has a layout (names, shapes, kinds of its packed input) and a function that fills it.
A token that only the device knows travels as -1 - slot: the step reads it from `last_tokens[slot]`.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np

from octavo.sampling.pack import WIDTH, allowed_mask, bias_arrays, pack_matrix
from octavo.sampling.pack import Row as SamplingRow
from octavo.sampling.params import MAX_LOGIT_BIAS
from octavo.serve.buckets import Bucket
from octavo.serve.packing import Field, PackLayout
from octavo.serve.types import ScheduledBatch, ScheduledRow


@dataclass(frozen=True)
class LoneRow:
    """A chunk of a sequence that no scheduler knows: what `score` runs."""

    tokens: tuple[int, ...]
    start: int
    block_table: np.ndarray
    from_previous: bool = False
    slot: int = 0

    @property
    def query_len(self) -> int:
        """Tokens of the chunk."""
        return len(self.tokens)


Row = ScheduledRow | LoneRow


@cache
def forward_layout(bucket: Bucket) -> PackLayout:
    """Input of the forward program of `bucket`."""
    t, s, p = bucket.tokens, bucket.rows, bucket.pages
    return PackLayout(
        (
            Field("tokens", (t,)),
            Field("positions", (t,)),
            Field("slots", (t,)),
            Field("block_tables", (s, p)),
            Field("kv_lens", (s,)),
            Field("query_starts", (s + 1,)),
            Field("last", (s,)),
            Field("num_rows", ()),
        )
    )


@cache
def sample_layout(rows: int) -> PackLayout:
    """Input of the sampling program for `rows` rows."""
    return PackLayout((Field("sampling", (rows, WIDTH)), Field("live", (rows,))))


@cache
def decode_layout(bucket: Bucket) -> PackLayout:
    """Input of the multi-step decode program of `bucket`."""
    s, p = bucket.rows, bucket.pages
    return PackLayout(
        (
            Field("tokens", (s,)),
            Field("starts", (s,)),
            Field("num_steps", (s,)),
            Field("block_tables", (s, p)),
            Field("num_rows", ()),
            Field("sampling", (s, WIDTH)),
        )
    )


def pack_forward(batch: ScheduledBatch, bucket: Bucket, page_size: int) -> np.ndarray:
    """Fill `forward_layout(bucket)` for the first step of a batch."""
    return _pack_rows(batch.rows, bucket, page_size)


def _pack_rows(rows: Sequence[Row], bucket: Bucket, page_size: int) -> np.ndarray:
    buffer, x = forward_layout(bucket).blank()
    count = len(rows)
    lens = np.array([row.query_len for row in rows], np.int32)
    starts = np.array([row.start for row in rows], np.int32)
    ends = np.cumsum(lens, dtype=np.int32)
    total = int(ends[-1])
    tables = x["block_tables"]
    _fill_tables(tables, rows)
    _fill_tokens(x["tokens"], rows)

    row_of = np.repeat(np.arange(count), lens)
    live = np.arange(total, dtype=np.int32) + (starts - (ends - lens))[row_of]
    x["positions"][:total] = live
    x["slots"][:total] = tables[row_of, live // page_size] * page_size + live % page_size
    x["slots"][total:] = np.arange(total, bucket.tokens) % page_size

    x["query_starts"][1 : count + 1] = ends
    x["query_starts"][count + 1 :] = total
    x["kv_lens"][:count] = starts + lens
    x["last"][:count] = ends - 1
    x["num_rows"][...] = count
    return buffer


def pack_chunk(
    tokens: np.ndarray, start: int, pages: np.ndarray, bucket: Bucket, page_size: int
) -> np.ndarray:
    """Fill `forward_layout(bucket)` for one chunk of a lone sequence, positions from `start`."""
    row = LoneRow(tuple(tokens.tolist()), start, pages)
    return _pack_rows((row,), bucket, page_size)


def pack_sample(rows: Sequence[ScheduledRow], size: int) -> np.ndarray:
    """Fill `sample_layout(size)` for rows that may sample."""
    buffer, x = sample_layout(size).blank()
    _fill_sampling(x["sampling"], rows)
    x["live"][: len(rows)] = [row.samples for row in rows]
    return buffer


def pack_decode(batch: ScheduledBatch, bucket: Bucket) -> np.ndarray:
    """Fill `decode_layout(bucket)` for a batch of rows of one token each.

    All are drawn from: of one that does not sample (of a prompt, not its last) nobody looks at it.
    """
    buffer, x = decode_layout(bucket).blank()
    rows = batch.rows
    _fill_tokens(x["tokens"], rows)
    x["starts"][: len(rows)] = [row.start for row in rows]
    x["num_steps"][: len(rows)] = [row.num_steps for row in rows]
    _fill_tables(x["block_tables"], rows)
    x["num_rows"][...] = len(rows)
    _fill_sampling(x["sampling"], rows)
    return buffer


def prompt_targets(batch: ScheduledBatch, bucket: Bucket) -> np.ndarray:
    """For each token of a step the prompt token that follows it, i32[T]; 0 where none does."""
    targets = np.zeros(bucket.tokens, np.int32)
    start = 0
    for row in batch.rows:
        after = row.request.prompt[row.start + 1 : row.start + row.query_len + 1]
        targets[start : start + len(after)] = after
        start += row.query_len
    return targets


def pooled_rows(batch: ScheduledBatch, bucket: Bucket, size: int) -> np.ndarray:
    """For each token of a step the row whose embedding it counts for, i32[T]; `size` for none."""
    rows = np.full(bucket.tokens, size, np.int32)
    start = 0
    for index, row in enumerate(batch.rows):
        end = start + row.query_len
        if row.request.pooling == "mean":
            rows[start:end] = index
        elif pools(row):
            rows[end - 1] = index
        start = end
    return rows


def wants_states(row: ScheduledRow) -> bool:
    """Whether hidden states of the row's tokens are wanted, besides what its last one draws."""
    return row.start < row.prompt_len and (predicts(row) or pools(row))


def predicts(row: ScheduledRow) -> bool:
    """Whether log-probabilities of the row's prompt are wanted and its tokens have some."""
    return row.start + 1 < row.prompt_len and row.request.params.prompt_logprobs is not None


def pools(row: ScheduledRow) -> bool:
    """Whether one of the row's tokens counts for an embedding."""
    pooling = row.request.pooling
    ends = row.start + row.query_len == row.prompt_len
    return pooling == "mean" or (pooling == "last" and ends)


def reset_layout(size: int, vocab_size: int) -> PackLayout:
    """Input of the program that builds a row's sampling state; `size` tokens of each kind."""
    return PackLayout(
        (
            Field("slot", ()),
            Field("prompt", (size,)),
            Field("generated", (size,)),
            Field("allowed", (-(-vocab_size // 32),), "u32"),
            Field("bias_ids", (MAX_LOGIT_BIAS,)),
            Field("bias_values", (MAX_LOGIT_BIAS,), "f32"),
        )
    )


def pack_reset(row: ScheduledRow, size: int, vocab_size: int) -> np.ndarray:
    """Fill `reset_layout` from a row's history."""
    params = row.request.params
    bias_ids, bias_values = bias_arrays(params, MAX_LOGIT_BIAS)
    arrays = {
        "slot": np.array(row.slot, np.int32),
        "prompt": _padded(row.request.prompt, size, -1),
        "generated": _padded(row.emitted, size, -1),
        "allowed": allowed_mask(params, vocab_size),
        "bias_ids": bias_ids,
        "bias_values": bias_values,
    }
    return reset_layout(size, vocab_size).pack(arrays)


def _fill_sampling(matrix: np.ndarray, rows: Sequence[ScheduledRow]) -> None:
    matrix[...] = pack_matrix([_sampling_row(row) for row in rows], len(matrix))


def _sampling_row(row: ScheduledRow) -> SamplingRow:
    request = row.request
    seed = request.params.seed
    assert seed is not None, "admission draws the seed"
    position = row.start + row.query_len
    return (
        request.params,
        seed,
        request.sample_index,
        position,
        row.slot,
        row.generated,
        request.eos_ids,
    )


def _fill_tokens(tokens: np.ndarray, rows: Sequence[Row]) -> None:
    start = 0
    for row in rows:
        if row.from_previous:
            tokens[start] = -1 - row.slot
            start += 1
        else:
            tokens[start : start + len(row.tokens)] = row.tokens
            start += len(row.tokens)


def _fill_tables(tables: np.ndarray, rows: Sequence[Row]) -> None:
    for index, row in enumerate(rows):
        tables[index, : len(row.block_table)] = row.block_table


def _padded(values: Sequence[int] | np.ndarray, size: int, fill: int = 0) -> np.ndarray:
    out = np.full(size, fill, np.int32)
    out[: len(values)] = values
    return out
