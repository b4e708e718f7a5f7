"""Drives a family's graph over a paged cache by hand: rows of tokens in, logits out, no engine."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from octavo.attention.contract import AttentionMeta
from octavo.cache.layout import init_cache
from octavo.model.families import family_of
from octavo.model.sharding import cache_sharding


@partial(jax.jit, static_argnames=("config", "impl", "mesh", "block"), donate_argnames="cache")
def _run(params, tokens, positions, cache, meta, *, config, impl, mesh, block):
    family = family_of(config)
    hidden, cache = family.forward(
        params, config, tokens, positions, cache, meta, impl, mesh, block
    )
    return family.unembed(params, config, hidden), cache


class PagedModel:
    """A model and a cache for `rows` rows of up to `max_len` tokens, pages interleaved.

    `step` runs one program of `width` tokens (padded); width == rows with one token a row is a
    decode step.
    """

    def __init__(
        self, config, params, *, rows, max_len, page_size, impl="auto", mesh=None, block="xla"
    ):
        self.config, self.params, self.impl, self.mesh = config, params, impl, mesh
        self.block = block
        self.rows, self.page_size = rows, page_size
        pages = -(-max_len // page_size)
        self.tables = 1 + np.arange(rows * pages, dtype=np.int32).reshape(pages, rows).T
        layout = config.cache_layout(rows * pages + 1, page_size)
        cache = init_cache(layout)
        self.cache = cache if mesh is None else jax.device_put(cache, cache_sharding(layout, mesh))
        self.lens = [0] * rows

    def step(self, chunks: list[list[int]], width: int) -> list[np.ndarray]:
        """Feeds each row its chunk (may be empty); logits [len(chunk), V] of each."""
        live = [row for row, chunk in enumerate(chunks) if chunk]
        tokens, positions, slots = (np.zeros(width, np.int32) for _ in range(3))
        starts, kv_lens = np.zeros(self.rows + 1, np.int32), np.zeros(self.rows, np.int32)
        tables = np.zeros_like(self.tables)
        at = 0
        for index, row in enumerate(live):
            position = self.lens[row] + np.arange(len(chunks[row]))
            where = slice(at, at + len(position))
            tokens[where], positions[where] = chunks[row], position
            page = self.tables[row][position // self.page_size]
            slots[where] = page * self.page_size + position % self.page_size
            self.lens[row] += len(position)
            tables[index], kv_lens[index] = self.tables[row], self.lens[row]
            starts[index] = at
            at += len(position)
        starts[len(live) :] = at
        decode = width == self.rows and all(len(chunk) <= 1 for chunk in chunks)
        meta = AttentionMeta(
            *(jnp.asarray(array) for array in (tables, kv_lens, starts, slots)),
            num_rows=jnp.asarray(len(live), jnp.int32),
            max_query_len=1 if decode else width,
        )
        logits, self.cache = _run(
            self.params,
            jnp.asarray(tokens),
            jnp.asarray(positions),
            self.cache,
            meta,
            config=self.config,
            impl=self.impl,
            mesh=self.mesh,
            block=self.block,
        )
        logits = np.asarray(logits)
        place = {row: slice(starts[index], starts[index + 1]) for index, row in enumerate(live)}
        return [logits[place.get(row, slice(0, 0))] for row in range(self.rows)]
