"""Grammar masks on the device: what they allow is drawn from, and nothing else changes."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from octavo.sampling.batch import SamplingBatch
from octavo.sampling.flags import SamplingFlags
from octavo.sampling.pack import mask_words, pack_rows
from octavo.sampling.params import MAX_LOGPROBS, SamplingParams
from octavo.sampling.sampler import NO_TOKEN, sample
from octavo.sampling.transforms import keep_allowed, transform
from octavo.serve.programs import SAMPLING_FLAGS, covering

V, ROWS = 300, 8
WORDS = mask_words(V)
MASKED = SamplingFlags(filters=True, grammar=True)


def packed_mask(allowed):
    """u32[S, words] of boolean rows."""
    padded = np.zeros((len(allowed), WORDS * 32), bool)
    padded[:, :V] = allowed
    return np.packbits(padded, axis=1, bitorder="little").view("<u4")


def batch_of(params, mask=None):
    rows = [(p, 11, i, 7 + i, i, 0, ()) for i, p in enumerate(params)]
    batch = SamplingBatch(**pack_rows(rows, len(rows)))
    return replace(batch, mask=None if mask is None else jnp.asarray(mask))


def draw(logits, params, flags, mask=None):
    function = jax.jit(lambda x, b: sample(x, b, None, flags))
    return np.asarray(function(jnp.asarray(logits), batch_of(params, mask)))


@pytest.fixture
def logits():
    return np.random.default_rng(4).normal(size=(ROWS, V)).astype(np.float32) * 2


@pytest.fixture
def allowed():
    rng = np.random.default_rng(5)
    return rng.random((ROWS, V)) < rng.uniform(0.01, 0.9, (ROWS, 1))


PARAMS = [SamplingParams(temperature=i % 3 / 2, top_p=(1.0, 0.6)[i % 2]) for i in range(ROWS)]


def test_bits_are_tokens_and_allowed_logits_are_untouched(logits, allowed):
    got = np.asarray(keep_allowed(jnp.asarray(logits), jnp.asarray(packed_mask(allowed))))
    np.testing.assert_array_equal(got, np.where(allowed, logits, -np.inf))


def test_draws_are_those_of_logits_where_the_rest_is_impossible(logits, allowed):
    got = draw(logits, PARAMS, MASKED, packed_mask(allowed))
    want = draw(np.where(allowed, logits, -np.inf), PARAMS, SamplingFlags(filters=True))
    np.testing.assert_array_equal(got, want)
    assert allowed[np.arange(ROWS), got].all()
    greedy = np.array([p.is_greedy for p in PARAMS])
    np.testing.assert_array_equal(got[greedy], np.where(allowed, logits, -9).argmax(1)[greedy])


def test_rows_of_ones_are_drawn_as_without_a_mask(logits, allowed):
    free = np.arange(ROWS) % 2 == 0
    mask = packed_mask(allowed | free[:, None])
    mask[free] = 0xFFFFFFFF
    got = draw(logits, PARAMS, MASKED, mask)
    np.testing.assert_array_equal(
        got[free], draw(logits, PARAMS, SamplingFlags(filters=True))[free]
    )


def test_a_row_that_allows_nothing_has_no_token(logits):
    allowed = np.ones((ROWS, V), bool)
    allowed[3] = False
    got = draw(logits, PARAMS, MASKED, packed_mask(allowed))
    assert (got == NO_TOKEN).tolist() == (np.arange(ROWS) == 3).tolist()


def test_masks_hold_behind_a_bias_that_speaks_against_them(logits, allowed):
    flags = SamplingFlags(grammar=True, min_tokens=True)
    params = [SamplingParams(min_tokens=3, stop_token_ids=(i,), max_tokens=9) for i in range(ROWS)]
    batch = batch_of(params, packed_mask(allowed))
    got = np.asarray(transform(jnp.asarray(logits), batch, None, flags))
    allowed[np.arange(ROWS), np.arange(ROWS)] = False
    np.testing.assert_array_equal(got, np.where(allowed, logits, -np.inf))


def test_flags_that_need_a_mask_refuse_without_one(logits):
    with pytest.raises(ValueError, match="needs a mask"):
        transform(jnp.asarray(logits), batch_of(PARAMS), None, MASKED)


def test_every_masked_batch_has_one_of_the_warmed_programs():
    for flags in SAMPLING_FLAGS:
        covered = covering(replace(flags, grammar=True))
        assert covered in SAMPLING_FLAGS
        assert covered.grammar
        assert covered.logprobs in (-1, MAX_LOGPROBS)
        assert covered.union(flags) == covered
