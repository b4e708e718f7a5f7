"""Owns what lives on the devices (parameters, cache, per-slot state) and runs scheduled batches.

`dispatch` returns as soon as the device has its work; `InFlight.read` waits for the answer. The
device executes dispatches in order, so the next batch may be dispatched before this one is read.
"""

import atexit
import contextlib
import weakref
from functools import partial
from typing import Any

import jax
import numpy as np

from octavo.cache.layout import CacheLayout, init_cache
from octavo.model.decoder import Attended
from octavo.model.params import param_bytes
from octavo.sampling.flags import LOGPROB_BUCKETS, SamplingFlags
from octavo.sampling.state import RowState, init_row_state
from octavo.serve import batch as packing
from octavo.serve import devices, step
from octavo.serve.artefact import ArtefactStore
from octavo.serve.buckets import Bucket
from octavo.serve.compile import ProgramKey, Programs
from octavo.serve.inflight import Forwarded, InFlight, fetch
from octavo.serve.programs import COMMON_FLAGS, ProgramBuilder, ProgramSettings, covering
from octavo.serve.types import ScheduledBatch, ScheduledRow

SCORE_ROWS = 512
"""Hidden states whose logits exist at once while a text is scored."""


class Runner:
    """Runs batches. One per engine; not thread-safe.

    Attributes:
        padding: token places computed, by bucket: those that held a token, and the padding.
    """

    def __init__(
        self,
        graph: step.Graph,
        params: step.Params,
        layout: CacheLayout,
        settings: ProgramSettings,
        store: ArtefactStore | None = None,
        *,
        strict: bool = False,
    ) -> None:
        self.graph, self.layout, self.settings = graph, layout, settings
        self.builder = ProgramBuilder(graph, layout, settings)
        self.params = params
        self.programs = Programs(
            self.builder.build, store, devices=devices.of(graph.mesh), strict=strict
        )
        self.padding: dict[str, tuple[int, int]] = {}
        self.cache: tuple[jax.Array, ...] | None = None
        self.last_tokens: jax.Array | None = None
        self.row_state: RowState | None = None
        self.reset_device_state()
        atexit.register(_wait_at_exit, weakref.ref(self))

    def reset_device_state(self) -> None:
        """A fresh cache and per-slot state: at start, and after a failed dispatch.

        The old ones go first: there is no room for two caches.
        """
        for array in jax.tree.leaves((self.cache, self.last_tokens, self.row_state)):
            if not array.is_deleted():
                array.delete()
        self.cache = self.last_tokens = self.row_state = None
        shardings = self.builder.cache_shardings()
        make = lambda: tuple(jax.tree.leaves(init_cache(self.layout)))  # noqa: E731
        self.cache = jax.jit(make, out_shardings=shardings)()
        none = np.zeros(self.settings.max_num_seqs, np.int32)
        self.last_tokens = jax.device_put(none, self.builder.whole)

    def replace_params(self, params: step.Params) -> None:
        """Take other weights of the same shapes, wherever they lie; the programs stay.

        Leaf by leaf, so that the device holds one leaf twice at most. When this raises there are no
        weights any more.
        """
        leaves: list[Any] = list(self._weights)
        self._weights = ()
        for index, new in enumerate(jax.tree.leaves(params)):
            place = leaves[index].sharding
            leaves[index] = None  # the device must not hold the whole model twice
            leaves[index] = jax.device_put(new, place).block_until_ready()
        self._weights = tuple(leaves)

    @property
    def params(self) -> step.Params:
        """The parameters as a model's tree, as which they are set too."""
        return self.builder.params_tree.unflatten(self._weights)

    @params.setter
    def params(self, params: step.Params) -> None:
        self._weights: tuple[jax.Array, ...] = tuple(jax.tree.leaves(params))

    @property
    def weight_bytes(self) -> int:
        """Bytes of the parameters, over all devices."""
        return param_bytes(self.builder.specs)

    # Running ------------------------------------------------------------------------------------

    @property
    def weight_bytes_streamed(self) -> int:
        """Bytes of the parameters a decode step reads: all but an untied embedding table."""
        specs = self.builder.specs
        return self.weight_bytes - (param_bytes(specs["embed"]) if "head" in specs else 0)

    def dispatch(self, batch: ScheduledBatch) -> InFlight:
        """Queue one batch on the device and return without waiting for it."""
        flags = self._flags(batch)
        if self._loops(batch, flags):
            return self._dispatch_decode(batch, flags)
        return self.sample(self._forward(batch, flags))

    def keys(self, batch: ScheduledBatch) -> list[ProgramKey]:
        """The programs that `dispatch` would run, but for what rare requests need besides."""
        flags, bucket = self._flags(batch), self._bucket(batch)
        if self._loops(batch, flags):
            return [self.builder.decode_key(bucket, flags)]
        return [ProgramKey("forward", bucket), self.builder.sample_key(bucket.rows, flags)]

    def _loops(self, batch: ScheduledBatch, flags: SamplingFlags) -> bool:
        """Whether the decode loop runs it, a single step too: in one dispatch instead of two.

        A lone token of a prompt is no other work than one that was drawn, unless its hidden state
        is wanted, which the loop does not give.
        """
        return batch.num_steps > 1 or (
            self.settings.max_decode_steps > 1
            and batch.is_decode
            and flags in COMMON_FLAGS
            and not any(map(packing.wants_states, batch.rows))
        )

    def _flags(self, batch: ScheduledBatch, *, grammar: bool = False) -> SamplingFlags:
        params = (row.request.params for row in batch.rows)
        return covering(SamplingFlags.for_params(params, grammar=grammar))

    def _bucket(self, batch: ScheduledBatch) -> Bucket:
        pages = max(len(row.block_table) for row in batch.rows)
        if batch.is_decode:
            return self.settings.buckets.decode(len(batch.rows), pages)
        return self.settings.buckets.mixed(batch.num_tokens, len(batch.rows), pages)

    def kind(self, batch: ScheduledBatch) -> tuple[Bucket, int]:
        """What decides how long a batch keeps the device, but for the lengths of its rows."""
        return self._bucket(batch), batch.num_steps

    def forward(self, batch: ScheduledBatch, *, grammar: bool = False) -> Forwarded:
        """Queue a one-step batch up to its logits; `grammar` if `sample` will bring a mask."""
        return self._forward(batch, self._flags(batch, grammar=grammar))

    def _forward(self, batch: ScheduledBatch, flags: SamplingFlags) -> Forwarded:
        if flags.needs_state:
            self._reset_rows(batch)
        bucket = self._bucket(batch)
        self._count(bucket, batch.num_tokens, 1)
        packed = packing.pack_forward(batch, bucket, self.layout.page_size)
        self.cache, logits, states = self._call(
            ProgramKey("forward", bucket), self._weights, self.cache, self.last_tokens, packed
        )
        prompt, pooled, packed = (None, 0), None, None
        if any(map(packing.wants_states, batch.rows)):
            hidden = self._hidden(bucket, states)
            prompt = self._prompt_logprobs(batch, bucket, hidden)
            pooled = self._pool(batch, bucket, hidden)
        if any(row.samples for row in batch.rows):
            packed = packing.pack_sample(batch.rows, bucket.rows)
        return Forwarded(batch, flags, logits, packed, *prompt, pooled)

    def sample(self, step: Forwarded, mask: np.ndarray | None = None) -> InFlight:
        """Queue the sampling of a forwarded batch.

        `mask` u32[rows of the bucket, words] holds what grammars allow, see SamplingBatch.mask.
        """
        report = None if step.packed is None else self._sample(step, step.packed, mask)
        prompt = (step.prompt_report, step.prompt_top_n)
        return InFlight(step.batch, step.flags, report, *prompt, pooled=step.pooled)

    def _sample(self, step: Forwarded, packed: np.ndarray, mask: np.ndarray | None) -> jax.Array:
        flags = step.flags
        key = self.builder.sample_key(step.rows, flags)
        state = self.row_state if flags.needs_state else None
        masks = () if mask is None else (mask,)
        self.last_tokens, state, report = self._call(
            key, step.logits, self.last_tokens, state, packed, *masks
        )
        self.row_state = state if flags.needs_state else self.row_state
        fetch(report)
        return report

    def _dispatch_decode(self, batch: ScheduledBatch, flags: SamplingFlags) -> InFlight:
        bucket = self._bucket(batch)
        self._count(bucket, len(batch.rows), batch.num_steps)
        key = self.builder.decode_key(bucket, flags)
        packed = packing.pack_decode(batch, bucket)
        self.cache, self.last_tokens, report = self._call(
            key, self._weights, self.cache, self.last_tokens, packed
        )
        fetch(report)
        return InFlight(batch, flags, report)

    def _prompt_logprobs(
        self, batch: ScheduledBatch, bucket: Bucket, hidden: jax.Array
    ) -> tuple[jax.Array | None, int]:
        """Log-probability columns of the prompts' tokens, i32[T, W], and how many likeliest."""
        rows = filter(packing.predicts, batch.rows)
        wanted = [row.request.params.prompt_logprobs for row in rows]
        if not wanted:
            return None, 0
        most = max(n or 0 for n in wanted)
        flags = SamplingFlags(logprobs=min(b for b in LOGPROB_BUCKETS if b >= most))
        key = ProgramKey("prompt_logprobs", flags=flags, size=bucket.tokens)
        targets = packing.prompt_targets(batch, bucket)
        report = self._call(key, self._weights, hidden, targets)
        fetch(report)
        return report, flags.logprobs

    def _hidden(self, bucket: Bucket, states: step.States) -> jax.Array:
        """Hidden states of all tokens of a forward program, [T, E]."""
        if not isinstance(states, Attended):
            return states
        return self._call(ProgramKey("states", size=bucket.tokens), self._weights, states)

    def _pool(self, batch: ScheduledBatch, bucket: Bucket, hidden: jax.Array) -> jax.Array | None:
        """Sums of the hidden states that embeddings are made of, f32[max_num_seqs, E]."""
        if not any(map(packing.pools, batch.rows)):
            return None
        rows = packing.pooled_rows(batch, bucket, self.settings.max_num_seqs)
        sums = self._call(ProgramKey("pool", size=bucket.tokens), hidden, rows)
        fetch(sums)
        return sums

    def _reset_rows(self, batch: ScheduledBatch) -> None:
        if self.row_state is None:
            make = partial(init_row_state, self.settings.max_num_seqs, self.graph.config.vocab_size)
            self.row_state = jax.jit(make, out_shardings=self.builder.whole)()
        for row in batch.rows:
            if row.reset and row.request.params.needs_state:
                self._reset_row(row)

    def _reset_row(self, row: ScheduledRow) -> None:
        size = self.builder.reset_size(max(len(row.request.prompt), len(row.emitted)))
        packed = packing.pack_reset(row, size, self.graph.config.vocab_size)
        self.row_state = self._call(ProgramKey("reset", size=size), self.row_state, packed)

    def score(self, tokens: np.ndarray, pages: np.ndarray) -> np.ndarray:
        """Teacher-forced logits f32[T, V] of `tokens`, with their keys in free `pages`."""
        chunks = []
        size = self.settings.buckets.mixed_tokens[-1]
        for start in range(0, len(tokens), size):
            chunk = tokens[start : start + size]
            bucket = self.settings.buckets.mixed(len(chunk), 1, len(pages))
            packed = packing.pack_chunk(chunk, start, pages, bucket, self.layout.page_size)
            self.cache, _, states = self._call(
                ProgramKey("forward", bucket), self._weights, self.cache, self.last_tokens, packed
            )
            chunks += self._logits(self._hidden(bucket, states), len(chunk))
        return np.concatenate(chunks)

    def _logits(self, hidden: jax.Array, count: int) -> list[np.ndarray]:
        """Logits of the first `count` hidden states, SCORE_ROWS of them at once on the device."""
        size = min(SCORE_ROWS, len(hidden))
        key = ProgramKey("logits", size=size)
        found = []
        for start in range(0, count, size):
            part = hidden[min(start, len(hidden) - size) :][:size]
            kept = slice(start - min(start, len(hidden) - size), None)
            found.append(
                jax.device_get(self._call(key, self._weights, part))[kept][: count - start]
            )
        return found

    def _count(self, bucket: Bucket, tokens: int, steps: int) -> None:
        real, padded = self.padding.get(bucket.label, (0, 0))
        padded += (bucket.tokens - tokens) * steps
        self.padding[bucket.label] = (real + tokens * steps, padded)

    def _call(self, key: ProgramKey, *args: Any) -> Any:
        """Queue a program on the device.

        NumPy arrays among `args` travel with the dispatch, so here a transfer is meant. Handed to
        device_put, each would cost some 25 us of Python more, and five times that between steps,
        where nothing of it is in the processor's caches any more.
        """
        program = self.programs.get(key)
        with jax.transfer_guard_host_to_device("allow"):
            return program(*args)


def _wait_at_exit(reference: "weakref.ref[Runner]") -> None:
    """Let the last dispatch end: XLA's CPU client aborts a process that exits under it.

    Overlap leaves one behind when the last request stops early.
    """
    runner = reference()
    if runner is not None:
        with contextlib.suppress(RuntimeError):
            jax.block_until_ready((runner.cache, runner.last_tokens))
