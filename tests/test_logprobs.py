"""Log-probabilities of raw logits against float64 NumPy."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from octavo.sampling.logprobs import logprobs_of

compiled = jax.jit(logprobs_of, static_argnums=2)


def reference(logits, tokens, n):
    x = logits.astype(np.float64)
    lp = x - x.max(1, keepdims=True)
    lp -= np.log(np.exp(lp).sum(1, keepdims=True))
    chosen = x[np.arange(len(x)), tokens]
    ids = np.argsort(-x, axis=1, kind="stable")[:, :n]
    rank = 1 + (x > chosen[:, None]).sum(1)
    return lp[np.arange(len(x)), tokens], rank, ids, np.take_along_axis(lp, ids, 1)


def check(logits, tokens, n):
    got = compiled(jnp.asarray(logits), jnp.asarray(tokens, jnp.int32), n)
    logprob, rank, ids, top = reference(logits, tokens, n)
    np.testing.assert_allclose(got.logprob, logprob, rtol=2e-6, atol=1e-5)
    np.testing.assert_array_equal(got.rank, rank)
    np.testing.assert_array_equal(got.top_ids, ids)
    np.testing.assert_allclose(got.top_logprobs, top, rtol=2e-6, atol=1e-5)
    return got


@pytest.mark.parametrize(("vocab", "n"), [(5003, 0), (5003, 5), (5003, 20), (40, 20), (128, 5)])
def test_matches_float64(vocab, n):
    rng = np.random.default_rng(vocab + n)
    logits = rng.normal(size=(6, vocab)).astype(np.float32) * 4
    logits[1] = np.round(logits[1])  # ties everywhere: lowest id first
    logits[2] = 3.25
    logits[3, vocab // 2 :] = logits[3, : vocab - vocab // 2]
    logits[4] += 1e4
    logits[5] = np.where(np.arange(vocab) % 7 == 0, logits[5] * 20, -np.inf)
    tokens = rng.integers(0, vocab, 6)
    tokens[5] = 7
    check(logits, tokens, n)


def test_the_chosen_token_reads_the_same_in_every_place():
    logits = np.random.default_rng(0).normal(size=(3, 1000)).astype(np.float32)
    best = logits.argmax(1)
    got = check(logits, best, 5)
    np.testing.assert_array_equal(got.rank, 1)
    np.testing.assert_array_equal(got.top_ids[:, 0], best)
    np.testing.assert_allclose(got.top_logprobs[:, 0], got.logprob, atol=1e-6)


def test_prompt_positions_read_the_same_in_chunks():
    logits = np.random.default_rng(1).normal(size=(12, 777)).astype(np.float32) * 3
    tokens = np.random.default_rng(2).integers(0, 777, 12)
    whole = check(logits, tokens, 5)
    for start in (0, 4, 8):
        part = check(logits[start : start + 4], tokens[start : start + 4], 5)
        np.testing.assert_array_equal(part.logprob, whole.logprob[start : start + 4])


def test_a_bad_row_spoils_only_itself():
    logits = np.random.default_rng(3).normal(size=(2, 500)).astype(np.float32)
    clean = compiled(jnp.asarray(logits), jnp.array([3, -1], jnp.int32), 5)
    logits[1, 9] = np.nan
    got = compiled(jnp.asarray(logits), jnp.array([3, -1], jnp.int32), 5)
    np.testing.assert_array_equal(got.top_logprobs[0], clean.top_logprobs[0])
    assert got.logprob[0] == clean.logprob[0]


def test_refuses_more_tokens_than_the_vocabulary():
    with pytest.raises(ValueError, match=r"top_n must be in 0 .. 4"):
        logprobs_of(jnp.zeros((1, 4)), jnp.zeros(1, jnp.int32), 5)
