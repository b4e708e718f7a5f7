"""Which programs the engine has, and how each is lowered: static choices and abstract arguments."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property, partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from octavo.cache.layout import CacheLayout, init_cache
from octavo.model.decoder import Attended
from octavo.model.params import is_spec, shape_dtypes
from octavo.model.pooling import sum_by_row
from octavo.model.sharding import TENSOR, cache_sharding, sharding_tree
from octavo.sampling.flags import LOGPROB_BUCKETS, SamplingFlags
from octavo.sampling.pack import mask_words
from octavo.sampling.params import MAX_LOGPROBS
from octavo.sampling.state import init_row_state
from octavo.serve import batch as packing
from octavo.serve import step
from octavo.serve.buckets import Bucket, Buckets
from octavo.serve.compile import Lowerable, ProgramKey

Arrays = tuple[Any, ...]

SMALLEST_RESET = 256

WITHOUT_GRAPHS = {"xla_gpu_graph_min_graph_size": 1 << 30}
"""XLA options of a program that runs once a dispatch.

As a CUDA graph it would be updated with the addresses of its new outputs before anything starts:
3 ms of every prefill on an H200. Launched singly, its first kernels run while the host launches on.
"""
LIBRARY_PRODUCTS = {"xla_gpu_enable_triton_gemm": False}
"""XLA option for products of many rows: cuBLAS's are as fast, and need no search among kernels that
have to be compiled first, which took a third of a prefill program's compile time."""

LIBRARY_PRODUCTS_FROM, LIBRARY_DECODE_FROM = 128, 256
"""Tokens of a mixed step and rows of a decode step. Of 256 rows they are 4 % faster on an H200, of
128 and fewer slower by as much and more: there the search finds better ones."""

COMMON_FLAGS = (SamplingFlags(greedy_only=True), SamplingFlags(filters=True))
"""What plain greedy and plain random requests need; compiled at warm-up, multi-step included."""


SAMPLING_FLAGS = (
    *(SamplingFlags(greedy_only=True, logprobs=top_n) for top_n in (-1, *LOGPROB_BUCKETS)),
    *(
        SamplingFlags(filters=True, penalties=full, bias=full, min_tokens=full, logprobs=top_n)
        for full in (False, True)
        for top_n in (-1, *LOGPROB_BUCKETS)
    ),
    *(
        replace(flags, grammar=True, logprobs=top_n)
        for flags in (
            SamplingFlags(greedy_only=True),
            SamplingFlags(filters=True),
            SamplingFlags(filters=True, penalties=True, bias=True, min_tokens=True),
        )
        for top_n in (-1, MAX_LOGPROBS)
    ),
)
"""Everything that `covering` returns."""


@cache
def covering(flags: SamplingFlags) -> SamplingFlags:
    """The program that serves `flags`: one of few, so that rare mixes share a compile.

    A row's token is the same under every set of flags that covers its parameters.
    """
    full = flags.needs_state or flags.min_tokens
    logprobs = MAX_LOGPROBS if flags.grammar and flags.logprobs >= 0 else flags.logprobs
    if flags.greedy_only and not full:
        return replace(flags, logprobs=logprobs)
    return replace(
        flags,
        greedy_only=False,
        filters=True,
        penalties=full,
        bias=full,
        min_tokens=full,
        logprobs=logprobs,
    )


def forward_options(bucket: Bucket) -> dict[str, Any]:
    """XLA options of the forward program of `bucket`; a CPU's compiler passes them over."""
    many = bucket.tokens >= LIBRARY_PRODUCTS_FROM and not bucket.is_decode
    return WITHOUT_GRAPHS | (LIBRARY_PRODUCTS if many else {})


def decode_options(bucket: Bucket) -> dict[str, Any]:
    """XLA options of a decode program of `bucket`."""
    return LIBRARY_PRODUCTS if bucket.rows >= LIBRARY_DECODE_FROM else {}


@dataclass(frozen=True)
class ProgramSettings:
    """Sizes of the programs."""

    buckets: Buckets
    max_num_seqs: int
    max_model_len: int
    max_decode_steps: int

    def reset_sizes(self) -> list[int]:
        """Token counts that a row-state reset is padded to: powers of 4 of the smallest."""
        sizes = [SMALLEST_RESET]
        while sizes[-1] < self.max_model_len:
            sizes.append(sizes[-1] * 4)
        return sizes


class ProgramBuilder:
    """Lowers the engine's programs for one graph, cache layout and set of sizes."""

    def __init__(self, graph: step.Graph, layout: CacheLayout, settings: ProgramSettings) -> None:
        self.graph, self.layout, self.settings = graph, layout, settings
        self.specs = graph.family.abstract_params(graph.config)

    def build(self, key: ProgramKey) -> Lowerable:
        """The function of `key`, its abstract arguments, and how it is compiled."""
        return getattr(self, f"_{key.kind}")(key)

    def reset_size(self, tokens: int) -> int:
        """Smallest reset size for so many tokens."""
        return next(size for size in self.settings.reset_sizes() if size >= tokens)

    def temporaries(self) -> int:
        """Temporary bytes of the largest forward program; compiles it."""
        largest = max(self.settings.buckets.all())
        analysis = self.build(ProgramKey("forward", largest)).lower().compile().memory_analysis()
        assert analysis is not None
        return analysis.temp_size_in_bytes + analysis.output_size_in_bytes

    def state_bytes(self) -> int:
        """Bytes of the per-slot sampling state, allocated when a request first needs it."""
        return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(self._state_abs))

    def warmup_keys(self) -> list[ProgramKey]:
        """Every program that a request can need, the models' own first (they take longest)."""
        buckets = self.settings.buckets.all()
        decode = [bucket for bucket in buckets if bucket.is_decode]
        keys = [ProgramKey("forward", bucket) for bucket in buckets]
        if self.settings.max_decode_steps > 1:
            keys += [self.decode_key(bucket, flags) for flags in COMMON_FLAGS for bucket in decode]
        rows = sorted({bucket.rows for bucket in buckets})
        keys += [self.sample_key(size, flags) for flags in SAMPLING_FLAGS for size in rows]
        tokens = sorted({bucket.tokens for bucket in buckets})
        for top_n in LOGPROB_BUCKETS:
            flags = SamplingFlags(logprobs=top_n)
            keys += [ProgramKey("prompt_logprobs", flags=flags, size=size) for size in tokens]
        keys += [ProgramKey("pool", size=size) for size in tokens]
        mixed = sorted({bucket.tokens for bucket in buckets if not bucket.is_decode})
        keys += [ProgramKey("states", size=size) for size in mixed]
        keys += [ProgramKey("reset", size=size) for size in self.settings.reset_sizes()]
        return keys

    def plain_keys(self, flags: Sequence[SamplingFlags] = COMMON_FLAGS) -> list[ProgramKey]:
        """What requests of `flags` need, without log-probabilities of prompts, in any company.

        In the order of their compiles: those that take longest first, and those that differ from
        them in sampling alone last, for XLA has by then chosen kernels for products like theirs.
        """
        buckets = self.settings.buckets.all()
        singly = self.settings.max_decode_steps == 1
        stepped = [bucket for bucket in buckets if singly or not bucket.is_decode]
        decode = [] if singly else [bucket for bucket in buckets if bucket.is_decode]
        keys = [self.decode_key(bucket, one) for one in flags[:1] for bucket in decode]
        keys += [ProgramKey("forward", bucket) for bucket in stepped]
        keys += [self.decode_key(bucket, one) for one in flags[1:] for bucket in decode]
        rows = sorted({bucket.rows for bucket in stepped})
        return keys + [self.sample_key(size, one) for one in flags for size in rows]

    def common_keys(self) -> list[ProgramKey]:
        """What plain requests need that come one after the other, with prompts of usual length."""
        buckets, flags = self.settings.buckets, COMMON_FLAGS
        prompts = [buckets.mixed(tokens, 1, 1) for tokens in buckets.mixed_tokens[:2]]
        decode = buckets.decode(1, 1)
        rows = [bucket.rows for bucket in prompts]
        if self.settings.max_decode_steps > 1:
            keys = [self.decode_key(decode, one) for one in flags]
        else:
            keys = [ProgramKey("forward", decode)]
            rows.append(decode.rows)
        keys += [ProgramKey("forward", bucket) for bucket in prompts]
        return keys + [self.sample_key(size, one) for size in sorted(set(rows)) for one in flags]

    def sample_key(self, rows: int, flags: SamplingFlags) -> ProgramKey:
        """Key of the sampling program for `rows` rows."""
        return ProgramKey(
            "sample",
            flags=flags,
            size=rows,
            stateful=flags.needs_state,
        )

    def decode_key(self, bucket: Bucket, flags: SamplingFlags) -> ProgramKey:
        """Key of the multi-step decode program of `bucket`."""
        return replace(
            self.sample_key(self.settings.max_decode_steps, flags),
            kind="decode",
            bucket=bucket,
        )

    def _forward(self, key: ProgramKey) -> Lowerable:
        assert key.bucket
        layout = packing.forward_layout(key.bucket)
        return Lowerable(
            self._stepping(partial(step.forward_step, self.graph, key.bucket, layout)),
            (self._params_abs, self._cache_abs, self._last_abs, self._words(layout.size)),
            {
                "donate_argnums": (1,),
                "out_shardings": (
                    *(self.cache_shardings(), self.whole),
                    self._states_shardings(key.bucket),
                ),
                "compiler_options": forward_options(key.bucket),
            },
        )

    def _sample(self, key: ProgramKey) -> Lowerable:
        assert key.flags
        layout = packing.sample_layout(key.size)
        state = self._state_abs if key.stateful else None
        logits = self._abstract((key.size, self.graph.config.vocab_size), jnp.float32)
        args = (logits, self._last_abs, state, self._words(layout.size))
        if key.flags.grammar:
            words = mask_words(self.graph.config.vocab_size)
            args = (*args, self._abstract((key.size, words), jnp.uint32))
        options = {"donate_argnums": (1, 2), "out_shardings": self.whole}
        return Lowerable(partial(step.sample_step, key.flags, layout), args, options)

    def _decode(self, key: ProgramKey) -> Lowerable:
        assert key.bucket
        assert key.flags
        layout = packing.decode_layout(key.bucket)
        loop = partial(step.decode_loop, self.graph, key.bucket, key.size, key.flags, layout)
        return Lowerable(
            self._stepping(loop),
            (self._params_abs, self._cache_abs, self._last_abs, self._words(layout.size)),
            {
                "donate_argnums": (1, 2),
                "out_shardings": (self.cache_shardings(), self.whole, self.whole),
                "compiler_options": decode_options(key.bucket),
            },
        )

    def _states(self, key: ProgramKey) -> Lowerable:
        config, shardings = self.graph.config, self._attended_shardings
        heads = (config.num_kv_heads, config.group_size, config.head_dim)
        shapes = ((key.size, config.hidden_size), (key.size, *heads))
        attended = Attended._make(
            jax.ShapeDtypeStruct(shape, jnp.dtype(config.dtype), sharding=sharding)
            for shape, sharding in zip(shapes, shardings)
        )
        function = self._weighted(partial(step.states_step, self.graph))
        return Lowerable(function, (self._params_abs, attended), {"out_shardings": self.whole})

    def _reset(self, key: ProgramKey) -> Lowerable:
        layout = packing.reset_layout(key.size, self.graph.config.vocab_size)
        return Lowerable(
            partial(step.reset_step, layout),
            (self._state_abs, self._words(layout.size)),
            {"donate_argnums": (0,), "out_shardings": self.whole},
        )

    def _prompt_logprobs(self, key: ProgramKey) -> Lowerable:
        assert key.flags
        function = self._weighted(
            partial(step.prompt_logprobs_step, self.graph, key.flags.logprobs)
        )
        hidden, targets = self._hidden_abs(key.size), self._words(key.size)
        return Lowerable(function, (self._params_abs, hidden, targets))

    def _pool(self, key: ProgramKey) -> Lowerable:
        function = partial(sum_by_row, rows=self.settings.max_num_seqs)
        return Lowerable(function, (self._hidden_abs(key.size), self._words(key.size)))

    def _logits(self, key: ProgramKey) -> Lowerable:
        function = self._weighted(partial(step.logits_step, self.graph))
        return Lowerable(function, (self._params_abs, self._hidden_abs(key.size)))

    @property
    def whole(self) -> NamedSharding | None:
        """Sharding of replicated arrays; None without a mesh."""
        mesh = self.graph.mesh
        return NamedSharding(mesh, PartitionSpec()) if mesh else None

    def cache_shardings(self) -> Arrays | None:
        """Shardings of the cache's arrays; None without a mesh."""
        mesh = self.graph.mesh
        return tuple(jax.tree.leaves(cache_sharding(self.layout, mesh))) if mesh else None

    def _weighted(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """`function(params, ...)` as one of the weights in a row.

        jax takes trees apart and puts them together anew in every dispatch: of 32 layers' weights
        and cache that takes a fifth of what the whole dispatch costs the host.
        """

        def of_arrays(weights: Arrays, *args: Any) -> Any:
            return function(self.params_tree.unflatten(weights), *args)

        return of_arrays

    def _stepping(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """`function(params, cache, ...) -> (cache, ...)` as one of arrays in a row."""
        tree = jax.tree.structure(jax.eval_shape(partial(init_cache, self.layout)))

        def of_arrays(weights: Arrays, cache: Arrays, *args: Any) -> Any:
            params = self.params_tree.unflatten(weights)
            after, *rest = function(params, tree.unflatten(cache), *args)
            return (tuple(jax.tree.leaves(after)), *rest)

        return of_arrays

    @property
    def _attended_shardings(self) -> Attended:
        """Of what a mixed step's forward program leaves: each device has its heads' part."""
        mesh = self.graph.mesh
        heads = NamedSharding(mesh, PartitionSpec(None, TENSOR)) if mesh else None
        return Attended._make((self.whole, heads))

    def _states_shardings(self, bucket: Bucket) -> Any:
        return self.whole if bucket.is_decode else self._attended_shardings

    def _abstract(self, shape: tuple[int, ...], dtype: Any) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, dtype, sharding=self.whole)

    def _words(self, size: int) -> jax.ShapeDtypeStruct:
        return self._abstract((size,), jnp.int32)

    def _hidden_abs(self, tokens: int) -> jax.ShapeDtypeStruct:
        config = self.graph.config
        return self._abstract((tokens, config.hidden_size), jnp.dtype(config.dtype))

    @cached_property
    def params_tree(self) -> Any:
        """How the weights, which programs take in a row, are a model's parameters."""
        return jax.tree.structure(self.specs, is_leaf=is_spec)

    @cached_property
    def _params_abs(self) -> Arrays:
        mesh = self.graph.mesh
        shapes = shape_dtypes(self.specs, sharding_tree(self.specs, mesh) if mesh else None)
        return tuple(jax.tree.leaves(shapes))

    @cached_property
    def _cache_abs(self) -> Arrays:
        shapes = jax.tree.leaves(jax.eval_shape(partial(init_cache, self.layout)))
        shardings = self.cache_shardings() or (None,) * len(shapes)
        return tuple(
            jax.ShapeDtypeStruct(shape.shape, shape.dtype, sharding=sharding)
            for shape, sharding in zip(shapes, shardings)
        )

    @property
    def _last_abs(self) -> jax.ShapeDtypeStruct:
        return self._words(self.settings.max_num_seqs)

    @cached_property
    def _state_abs(self) -> Any:
        make = partial(init_row_state, self.settings.max_num_seqs, self.graph.config.vocab_size)
        shapes = jax.eval_shape(make)
        return jax.tree.map(lambda x: self._abstract(x.shape, x.dtype), shapes)
