"""The host's vocabulary: what is asked, what is scheduled, what comes back. No jax here.

Types of which one is made per row and step are not frozen (a frozen dataclass of twelve fields
takes 2.7 us to make, a plain one 0.4), but nobody may change them.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Self

import numpy as np
from numpy.typing import NDArray

from octavo.sampling.params import SamplingParams
from octavo.serve.histogram import Histogram
from octavo.serve.thinking import Reasoning, Thinking

FINISH_STOP = "stop"
FINISH_LENGTH = "length"
FINISH_ABORT = "abort"
FINISH_ERROR = "error"


GrammarKind = Literal["json_schema", "json_object", "regex", "choice", "lark"]

MAX_GRAMMAR_BYTES = 64 * 1024


@dataclass(frozen=True, slots=True)
class Grammar:
    """What a sample's text must be, to the last byte; the engine compiles it.

    Attributes:
        kind: how `text` is read.
        text: the JSON schema, nothing for json_object, the regular expression, the JSON list of
            the choices, or the grammar in llguidance's Lark dialect; at most MAX_GRAMMAR_BYTES
            (ValueError).
    """

    kind: GrammarKind
    text: str = ""

    def __post_init__(self) -> None:
        if len(self.text.encode()) > MAX_GRAMMAR_BYTES:
            raise ValueError(f"a grammar may have at most {MAX_GRAMMAR_BYTES} bytes")

    @classmethod
    def json_schema(cls, schema: Mapping[str, Any] | bool | str) -> Self:
        """JSON that `schema` (as data, or as JSON text) describes."""
        return cls("json_schema", schema if isinstance(schema, str) else _json(schema))

    @classmethod
    def json_object(cls) -> Self:
        """Any JSON object."""
        return cls("json_object")

    @classmethod
    def regex(cls, pattern: str) -> Self:
        """Text that matches `pattern` from start to end."""
        return cls("regex", pattern)

    @classmethod
    def choice(cls, choices: Sequence[str]) -> Self:
        """One of `choices`."""
        return cls("choice", _json(list(choices)))

    @classmethod
    def lark(cls, grammar: str) -> Self:
        """Text of a grammar's start rule."""
        return cls("lark", grammar)


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


@dataclass(frozen=True, slots=True)
class Request:
    """One sample of one prompt. A call with n > 1 becomes n requests that differ in sample_index.

    Attributes:
        request_id: unique among live requests.
        prompt: token ids, at least one.
        params: validated; max_tokens is resolved (never None) and the seed is drawn at admission.
        eos_ids: ids that end the sample unless params.ignore_eos.
        sample_index: 0 .. n-1; part of the key of every random draw.
        priority: lower runs first.
        cache_salt: part of the prefix-cache key; equal salts share pages.
        grammar: what the text must be; None is anything.
        thinking: a bound for its reasoning, which a text with a grammar has none of.
        client: who asks, as far as is known: clients take turns where one may hold up others.
        pooling: one of config.POOLINGS for an embedding of the prompt (max_tokens is 0), or "".
        readmitted: it was let in by an engine that has ended since, so no queue is too full for it.
    """

    request_id: str
    prompt: tuple[int, ...]
    params: SamplingParams
    eos_ids: tuple[int, ...] = ()
    sample_index: int = 0
    priority: int = 0
    cache_salt: str = ""
    grammar: Grammar | None = None
    thinking: Thinking | None = None
    client: str = ""
    pooling: str = ""
    readmitted: bool = False

    @property
    def stop_ids(self) -> tuple[int, ...]:
        """Every id that ends the sample."""
        eos = () if self.params.ignore_eos else self.eos_ids
        return (*eos, *self.params.stop_token_ids)


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """Raw-logit log-probability of a token, its rank (1 = likeliest), and the likeliest tokens."""

    token_id: int
    logprob: float
    rank: int
    top: tuple[tuple[int, float], ...] = ()


@dataclass(slots=True)
class TokenEvent:
    """News of one request: tokens it gained, and how it ended if it did.

    Attributes:
        token_ids: new tokens, in order; a stop id that ended the sample is included.
        logprobs: one entry a new token when asked for, else empty.
        prompt_logprobs: whole list, on the event of the first token (entry 0 is None), when asked.
        finish_reason: "stop", "length", "abort", "error" or None while it runs.
        stop_token: id that ended it, when finish_reason is "stop".
        error: message when finish_reason is "error".
        invalid: the error lies in what was asked (a grammar that does not compile).
        cached_tokens: prompt tokens served from the prefix cache when first admitted.
        preemptions: times the request was preempted so far.
        waited: seconds in the queue and in prefill, on the first event alone.
        embedding: little-endian f32[E], pooled hidden states, on a pooling request's last event.
    """

    request_id: str
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprob, ...] = ()
    prompt_logprobs: tuple[TokenLogprob | None, ...] | None = None
    finish_reason: str | None = None
    stop_token: int | None = None
    error: str | None = None
    invalid: bool = False
    cached_tokens: int = 0
    preemptions: int = 0
    waited: tuple[float, float] | None = None
    embedding: bytes | None = None


@dataclass(slots=True, eq=False)
class ScheduledRow:
    """One row of a step.

    Attributes:
        request_id: whose row.
        slot: stable row slot on the device, 0 .. max_num_seqs-1, held from admission to the end
            or preemption.
        start: position of the first token computed (= keys already in the cache).
        tokens: ids known on the host, start onward. A decode row whose input token is still on
            the device (sampled by the step in flight) has tokens == () and from_previous True.
        from_previous: the one input token is the row's last sampled token, on the device.
        num_steps: decode steps reserved for this row in this dispatch (1 unless multi-step);
            its pages cover start + len + num_steps - 1 tokens.
        samples: whether the last position's logits are sampled (False for a prefill chunk that
            is not the last).
        block_table: i32 pages of the row in order, read-only: those that this dispatch reads or
            writes, sometimes more on a decode row.
        reset: the row's device state (penalty counts, ...) must be built anew from
            the prompt and `emitted`: True on the first chunk after admission or preemption.
        emitted: tokens sampled before a preemption, on a reset row; else empty.
        forced: the last of `tokens`, which the row's grammar leaves no choice for: drawn by this
            dispatch without being sampled, before the token that is.
        reasoning: set where the drawn token may have to be the one that ends the reasoning; it
            knows which once every batch before this one is committed.
        prompt_len: tokens of the prompt proper (emitted tokens being recomputed not counted).
        generated: tokens of the sample before the one this dispatch samples, in flight or not.
    """

    request_id: str
    slot: int
    start: int
    tokens: tuple[int, ...]
    from_previous: bool
    num_steps: int
    samples: bool
    block_table: NDArray[np.int32]
    reset: bool
    prompt_len: int
    generated: int
    request: Request
    emitted: tuple[int, ...] = ()
    forced: tuple[int, ...] = ()
    reasoning: Reasoning | None = None

    @property
    def draws(self) -> int:
        """Tokens that the dispatch adds to a sample that does not end in it."""
        return self.num_steps + len(self.forced)

    @property
    def query_len(self) -> int:
        """Tokens this row computes in the (first) step."""
        return 1 if self.from_previous else len(self.tokens)


@dataclass(frozen=True, slots=True, eq=False)
class ScheduledBatch:
    """One dispatch: rows in order, decode rows first.

    num_steps > 1 only when every row is a decode row.

    Attributes:
        num_tokens: query tokens of the (first) step.
        is_decode: whether every row computes one token.
    """

    step_id: int
    rows: tuple[ScheduledRow, ...]
    num_steps: int = 1
    num_tokens: int = field(init=False)
    is_decode: bool = field(init=False)

    def __post_init__(self) -> None:
        lens = [row.query_len for row in self.rows]  # once: a step asks for them a dozen times
        object.__setattr__(self, "num_tokens", sum(lens))
        object.__setattr__(self, "is_decode", all(length == 1 for length in lens))


@dataclass(slots=True)
class RowResult:
    """What the device returned for one row of a batch.

    token_ids holds row.draws tokens, the forced ones first, fewer only when the last is a stop id
    or `complete`; it is empty for a row that did not sample. prompt_logprobs, when asked for, holds
    the entries of the prompt tokens at start + 1 .. min(start + query_len, prompt_len - 1), which
    this chunk's logits predict. `error` fails the request alone (NaN logits); `invalid` says that
    the request asked for it. `complete` ends the sample with its tokens: its grammar allows nothing
    more. `pooled` f32[E] is the sum of the chunk's hidden states that count for a pooling request,
    None where none does.
    """

    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprob, ...] = ()
    prompt_logprobs: tuple[TokenLogprob, ...] = ()
    error: str | None = None
    invalid: bool = False
    complete: bool = False
    pooled: NDArray[np.float32] | None = None


@dataclass(slots=True)
class EngineStats:
    """Counters and gauges since start, for metrics and `/stats`.

    Attributes:
        waiting, running, pages_total, pages_used: gauges; used pages are held by running rows.
        waiting_tokens, estimated_wait: prompt tokens that wait, and seconds until they are
            computed at the rate of late; gauges.
        refused: newcomers refused, by the bound of the queue that did it.
        prompt_tokens, cached_tokens: counted once a request, at its first admission.
        looked_up_tokens: of the prompt tokens, those looked up in the prefix index.
        page_size: tokens that a page holds.
        queue_seconds, prefill_seconds, decode_seconds: summed over requests: arrival to first
            admission, to first token, to the end.
        padding: token places computed, by bucket: those that held a token, and the padding.
        padding, compiles_after_warmup: filled by the runner, not the scheduler.
        step_seconds, step_tokens, idle_seconds, late_dispatches: see StepClock.
        finished: requests by finish reason.
    """

    steps: int = 0
    waiting: int = 0
    running: int = 0
    pages_total: int = 0
    pages_used: int = 0
    prompt_tokens: int = 0
    generated_tokens: int = 0
    cached_tokens: int = 0
    looked_up_tokens: int = 0
    page_size: int = 0
    preemptions: int = 0
    queue_seconds: float = 0.0
    prefill_seconds: float = 0.0
    decode_seconds: float = 0.0
    waiting_tokens: int = 0
    estimated_wait: float = 0.0
    refused: dict[str, int] = field(default_factory=dict)
    padding: dict[str, tuple[int, int]] = field(default_factory=dict)
    compiles_after_warmup: int = 0
    step_seconds: Histogram | None = None
    step_tokens: Histogram | None = None
    idle_seconds: float = 0.0
    late_dispatches: int = 0
    finished: dict[str, int] = field(default_factory=dict)
