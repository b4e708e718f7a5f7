"""The one place where scheduled rows become arrays.

Each program has a layout (names, shapes, kinds of its packed input) and a function that fills it.
A token that only the device knows travels as -1 - slot: the step reads it from `last_tokens[slot]`.
"""

from collections.abc import Sequence

import numpy as np

from octavo.sampling.pack import pack_rows, sampling_fields
from octavo.serve.buckets import Bucket
from octavo.serve.packing import Field, PackLayout
from octavo.serve.types import ScheduledBatch, ScheduledRow


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


def sample_layout(rows: int, stop_width: int) -> PackLayout:
    """Input of the sampling program for `rows` rows."""
    fields = tuple(Field(*field) for field in sampling_fields(rows, stop_width))
    return PackLayout((*fields, Field("live", (rows,))))


def decode_layout(bucket: Bucket, stop_width: int) -> PackLayout:
    """Input of the multi-step decode program of `bucket`."""
    s, p = bucket.rows, bucket.pages
    return PackLayout(
        (
            Field("tokens", (s,)),
            Field("starts", (s,)),
            Field("num_steps", (s,)),
            Field("block_tables", (s, p)),
            Field("num_rows", ()),
            *sample_layout(s, stop_width).fields,
        )
    )


def pack_forward(batch: ScheduledBatch, bucket: Bucket, page_size: int) -> np.ndarray:
    """Fill `forward_layout(bucket)` for the first step of a batch."""
    rows = batch.rows
    lens = np.array([row.query_len for row in rows], np.int32)
    starts = np.array([row.start for row in rows], np.int32)
    ends = np.cumsum(lens, dtype=np.int32)
    total = int(ends[-1])
    tables = _block_tables(rows, bucket)

    row_of = np.repeat(np.arange(len(rows)), lens)
    positions = np.zeros(bucket.tokens, np.int32)
    positions[:total] = np.arange(total, dtype=np.int32) + (starts - (ends - lens))[row_of]
    slots = np.arange(bucket.tokens, dtype=np.int32) % page_size
    live = positions[:total]
    slots[:total] = tables[row_of, live // page_size] * page_size + live % page_size

    query_starts = np.full(bucket.rows + 1, total, np.int32)
    query_starts[0] = 0
    query_starts[1 : len(rows) + 1] = ends
    arrays = {
        "tokens": _tokens(rows, bucket.tokens),
        "positions": positions,
        "slots": slots,
        "block_tables": tables,
        "kv_lens": _padded(starts + lens, bucket.rows),
        "query_starts": query_starts,
        "last": _padded(ends - 1, bucket.rows),
        "num_rows": np.array(len(rows), np.int32),
    }
    return forward_layout(bucket).pack(arrays)


def pack_sample(rows: Sequence[ScheduledRow], size: int, stop_width: int, slots: int) -> np.ndarray:
    """Fill `sample_layout` for rows that may sample; `slots` is the padding slot."""
    return sample_layout(size, stop_width).pack(_sample_arrays(rows, size, stop_width, slots))


def pack_decode(
    batch: ScheduledBatch, bucket: Bucket, stop_width: int, padding_slot: int
) -> np.ndarray:
    """Fill `decode_layout(bucket)` for a batch of decode rows."""
    rows = batch.rows
    arrays = {
        "tokens": _tokens(rows, bucket.rows),
        "starts": _padded(np.array([row.start for row in rows], np.int32), bucket.rows),
        "num_steps": _padded(np.array([row.num_steps for row in rows], np.int32), bucket.rows),
        "block_tables": _block_tables(rows, bucket),
        "num_rows": np.array(len(rows), np.int32),
        **_sample_arrays(rows, bucket.rows, stop_width, padding_slot),
    }
    return decode_layout(bucket, stop_width).pack(arrays)


def prompt_targets(batch: ScheduledBatch, bucket: Bucket) -> np.ndarray:
    """For each token of a step the prompt token that follows it, i32[T]; 0 where none does."""
    targets = np.zeros(bucket.tokens, np.int32)
    start = 0
    for row in batch.rows:
        after = row.request.prompt[row.start + 1 : row.start + row.query_len + 1]
        targets[start : start + len(after)] = after
        start += row.query_len
    return targets


def reset_layout(size: int) -> PackLayout:
    """Input of the program that builds a row's penalty state; `size` tokens at most of each kind."""
    bias = (MAX_LOGIT_BIAS,)
    return PackLayout(
        (
            Field("slot", ()),
            Field("prompt", (size,)),
            Field("generated", (size,)),
            Field("bias_ids", bias),
            Field("bias_values", bias, "f32"),
            Field("allowed_ids", (size,)),
            Field("bad_ids", (size,)),
            Field("all_allowed", ()),
        )
    )


def _sample_arrays(
    rows: Sequence[ScheduledRow], size: int, stop_width: int, padding_slot: int
) -> dict[str, np.ndarray]:
    arrays = pack_rows(rows, size, stop_width, padding_slot)
    live = np.zeros(size, np.int32)
    live[: len(rows)] = [row.samples for row in rows]
    return {**arrays, "live": live}


def _tokens(rows: Sequence[ScheduledRow], size: int) -> np.ndarray:
    tokens = np.zeros(size, np.int32)
    start = 0
    for row in rows:
        if row.from_previous:
            tokens[start] = -1 - row.slot
            start += 1
        else:
            tokens[start : start + len(row.tokens)] = row.tokens
            start += len(row.tokens)
    return tokens


def _block_tables(rows: Sequence[ScheduledRow], bucket: Bucket) -> np.ndarray:
    tables = np.zeros((bucket.rows, bucket.pages), np.int32)
    for index, row in enumerate(rows):
        tables[index, : len(row.block_table)] = row.block_table
    return tables


def _padded(values: np.ndarray, size: int) -> np.ndarray:
    out = np.zeros(size, np.int32)
    out[: len(values)] = values
    return out
