"""Turns rows' sampling parameters into NumPy arrays for the device. No jax here.

Every field is 32 bits wide, so a batch is one int32 matrix [S, WIDTH] (one transfer); floats and
unsigned numbers travel as their bit patterns. `SamplingBatch.from_matrix` takes it apart.
"""

import struct
from collections.abc import Sequence
from functools import lru_cache

import numpy as np

from octavo.sampling.params import MAX_INT32, MAX_STOP_TOKENS, SamplingParams

PADDING_SLOT = MAX_INT32
"""Row slot of padding rows: beyond every RowState, so that their updates are dropped."""

MAX_EOS_IDS = 8
STOP_WIDTH = MAX_STOP_TOKENS + MAX_EOS_IDS

FLOAT_FIELDS = ("temperature", "top_p", "min_p", "presence", "frequency", "repetition")
PARAM_FIELDS = (*FLOAT_FIELDS, "top_k", "min_tokens", "stateful")
CALL_FIELDS = ("seed_0", "seed_1", "sample_index", "position", "slot", "generated")
COLUMN = {name: i for i, name in enumerate((*PARAM_FIELDS, *CALL_FIELDS, "stop_ids"))}
WIDTH = COLUMN["stop_ids"] + STOP_WIDTH

_HEAD = struct.Struct(f"<{len(FLOAT_FIELDS)}f3i")

Row = tuple[SamplingParams, int, int, int, int, int, tuple[int, ...]]
"""(params, seed, sample_index, position, slot, generated, eos_ids) of one row."""


def param_record(params: SamplingParams, eos_ids: tuple[int, ...]) -> bytes:
    """The bytes of a row's matrix line, zero where they change from step to step.

    Refuses more than MAX_EOS_IDS end-of-sequence ids (ValueError). The result is kept on the
    instance, since packing a row of a step must cost well under a microsecond.
    """
    cache = params.__dict__.setdefault("_records", {})
    record = cache.get(eos_ids)
    if record is None:
        record = cache[eos_ids] = _build_record(params, eos_ids)
    return record


def _build_record(params: SamplingParams, eos_ids: tuple[int, ...]) -> bytes:
    if len(eos_ids) > MAX_EOS_IDS:
        raise ValueError(f"{len(eos_ids)} end-of-sequence ids, at most {MAX_EOS_IDS}")
    head = _HEAD.pack(
        0.0 if params.is_greedy else params.temperature,
        params.top_p,
        params.min_p,
        params.presence_penalty,
        params.frequency_penalty,
        params.repetition_penalty,
        params.top_k,
        params.min_tokens,
        params.needs_state,
    )
    stops = np.full(STOP_WIDTH, -1, np.int32)
    ids = (*params.stop_token_ids, *(() if params.ignore_eos else eos_ids))
    stops[: len(ids)] = ids
    return head + bytes(4 * len(CALL_FIELDS)) + stops.tobytes()


@lru_cache(maxsize=1)
def _padding_record() -> bytes:
    return param_record(SamplingParams(temperature=0.0), ())


def pack_matrix(rows: Sequence[Row], size: int) -> np.ndarray:
    """int32 [size, WIDTH] of the rows, then padding rows (greedy, PADDING_SLOT).

    Refuses more rows than `size` (ValueError).
    """
    if len(rows) > size:
        raise ValueError(f"{len(rows)} rows do not fit a batch of {size}")
    padding = size - len(rows)
    records = [param_record(row[0], row[6]) for row in rows] + [_padding_record()] * padding
    matrix = np.frombuffer(bytearray().join(records), np.int32).reshape(size, WIDTH)
    matrix[len(rows) :, COLUMN["slot"]] = PADDING_SLOT
    if rows:
        _fill_calls(matrix[: len(rows)], rows)
    return matrix


def _fill_calls(matrix: np.ndarray, rows: Sequence[Row]) -> None:
    # By columns: an array of 256 tuples costs five times as much.
    _, seeds, indices, positions, slots, generated, _ = zip(*rows)
    seed = np.array(seeds, np.uint64)
    unsigned = matrix.view(np.uint32)
    unsigned[:, COLUMN["seed_0"]] = seed >> np.uint64(32)
    unsigned[:, COLUMN["seed_1"]] = seed & np.uint64(0xFFFFFFFF)
    matrix[:, COLUMN["sample_index"]] = indices
    matrix[:, COLUMN["position"]] = positions
    matrix[:, COLUMN["slot"]] = slots
    matrix[:, COLUMN["generated"]] = generated


def pack_rows(rows: Sequence[Row], size: int) -> dict[str, np.ndarray]:
    """SamplingBatch's fields as arrays [size] (views of one `pack_matrix`).

    top_k .. generated int32 [size], floats float32 [size], seed uint32 [size, 2], stop_ids int32
    [size, STOP_WIDTH] padded with -1. Refuses more rows than `size` (ValueError).
    """
    return split_matrix(pack_matrix(rows, size))


def split_matrix(matrix: np.ndarray) -> dict[str, np.ndarray]:
    """The fields of a packed matrix by name, without copying."""
    fields = {
        name: matrix[:, COLUMN[name]]
        for name in (*PARAM_FIELDS, "sample_index", "position", "slot", "generated")
    }
    for name in FLOAT_FIELDS:
        fields[name] = fields[name].view(np.float32)
    seed = matrix[:, COLUMN["seed_0"] : COLUMN["seed_1"] + 1]
    return fields | {
        "seed": seed.view(np.uint32),
        "stop_ids": matrix[:, COLUMN["stop_ids"] :],
    }


def mask_words(vocab_size: int) -> int:
    """32-bit words of a bitmask over the vocabulary."""
    return -(-vocab_size // 32)


def allowed_mask(params: SamplingParams, vocab_size: int) -> np.ndarray:
    """uint32 [mask_words(vocab_size)]: bit t % 32 of word t // 32 says whether t may be drawn."""
    allowed = np.zeros(mask_words(vocab_size) * 32, bool)
    if params.allowed_token_ids is None:
        allowed[:vocab_size] = True
    else:
        allowed[list(params.allowed_token_ids)] = True
    allowed[list(params.bad_token_ids)] = False
    return np.packbits(allowed, bitorder="little").view("<u4").astype(np.uint32)


def bias_arrays(params: SamplingParams, size: int) -> tuple[np.ndarray, np.ndarray]:
    """logit_bias as (ids int32 [size] padded with -1, values float32 [size])."""
    ids, values = np.full(size, -1, np.int32), np.zeros(size, np.float32)
    ids[: len(params.logit_bias)] = list(params.logit_bias)
    values[: len(params.logit_bias)] = list(params.logit_bias.values())
    return ids, values
