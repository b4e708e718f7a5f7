"""Draws: distributions, exact cuts under ties, greedy rows, bad rows, state, independence."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from sampling_reference import (
    ALL_FLAGS,
    build_state,
    draw,
    draws,
    probabilities,
    transformed,
)

from octavo.sampling.batch import SamplingBatch
from octavo.sampling.blocks import block_peaks, exact_sum, to_blocks
from octavo.sampling.flags import SamplingFlags
from octavo.sampling.pack import PADDING_SLOT, WIDTH, pack_matrix, pack_rows
from octavo.sampling.params import SamplingParams
from octavo.sampling.sampler import NO_TOKEN, finite_rows, sample
from octavo.sampling.state import init_row_state, record
from octavo.sampling.threshold import top_k_floor
from octavo.sampling.transforms import transform

V = 300
ROWS, SMALL = 256, 8
FILTERS = SamplingFlags(filters=True)

DISTRIBUTIONS = {
    "plain": SamplingParams(temperature=0.8),
    "top_k": SamplingParams(top_k=7),
    "top_k beyond the candidates": SamplingParams(top_k=80),
    "top_p": SamplingParams(top_p=0.7),
    "top_p small": SamplingParams(top_p=1e-9),
    "min_p": SamplingParams(min_p=0.2),
    "top_k then top_p": SamplingParams(top_k=20, top_p=0.6),
    "large top_k then top_p": SamplingParams(top_k=80, top_p=0.9),
    "all": SamplingParams(temperature=1.3, top_k=30, top_p=0.8, min_p=0.1),
    "top_p and min_p": SamplingParams(temperature=1.3, top_p=0.95, min_p=0.05),
}


def rows_of(params, count, seed=1, position=5, eos=()):
    return [(params, seed, i, position, i, 0, eos) for i in range(count)]


def chi_square(tokens, p):
    """Sum over cells with an expectation of at least 5 (the rest lumped), and the cells."""
    expected = p * len(tokens)
    counts = np.bincount(tokens, minlength=len(p)).astype(float)
    big = expected >= 5
    cells = np.append(expected[big], expected[~big].sum())
    seen = np.append(counts[big], counts[~big].sum())
    used = cells > 1e-9
    return ((seen - cells)[used] ** 2 / cells[used]).sum(), used.sum()


@pytest.mark.parametrize("name", DISTRIBUTIONS)
def test_distribution(name):
    params = DISTRIBUTIONS[name]
    logits = np.random.default_rng(3).normal(size=V).astype(np.float32) * 2
    p = probabilities(logits.astype(np.float64), params)
    tokens = np.concatenate(
        [
            draws(np.tile(logits, (ROWS, 1)), rows_of(params, ROWS, 9, position), None, FILTERS)
            for position in range(24)
        ]
    )
    assert set(tokens) <= set(np.flatnonzero(p))
    value, cells = chi_square(tokens, p)
    assert value < cells + 5 * np.sqrt(2 * cells) + 5
    assert len(set(tokens)) > 0.5 * (p * len(tokens) > 1).sum()


def test_draws_of_different_positions_samples_and_seeds_are_independent():
    logits = np.zeros((ROWS, V), np.float32)
    base = draws(logits, rows_of(SamplingParams(), ROWS), None, FILTERS)
    for other in (
        rows_of(SamplingParams(), ROWS, position=6),
        rows_of(SamplingParams(), ROWS, seed=1 + 2**32),
        [(p, s, i + ROWS, *rest) for p, s, i, *rest in rows_of(SamplingParams(), ROWS)],
    ):
        equal = (draws(logits, other, None, FILTERS) == base).sum()
        assert equal < 8  # 256 / 300 expected
    assert len(set(base)) > 140  # 300 * (1 - (1 - 1/300)**256) = 172 expected


def kth_largest(x, k):
    return np.sort(x)[::-1][k - 1] if 0 < k < len(x) else -np.inf


def adversarial_rows(size, rng):
    normal = rng.normal(size=size)
    banned = np.where(np.arange(size) % 400 == 3, normal, -np.inf)
    return {
        "normal": normal,
        "coarse": np.round(normal * 4) / 4,
        "all equal": np.zeros(size),
        "two values": (np.arange(size) % 3 == 0) * 1.0,
        "signed zeros": np.where(rng.random(size) < 0.5, 0.0, -0.0),
        "few allowed": banned,
        "one allowed": np.where(np.arange(size) == size - 1, 1.0, -np.inf),
        "sorted": np.arange(size) * 1e-3,
        "reversed": -np.arange(size) * 1e3,
        "one block": np.where(np.arange(size) // 128 == 9, 5.0 + normal, normal),
        "extremes": np.where(np.arange(size) % 2, 3e38, -3e38) * rng.random(size),
        "tiny": normal * 1e-30,
    }


@pytest.mark.parametrize("size", [20_011, 77])
def test_top_k_floor_is_exact_on_adversarial_rows(size):
    cases = adversarial_rows(size, np.random.default_rng(0))
    logits = np.stack(list(cases.values())).astype(np.float32)
    rows = len(logits)

    @jax.jit
    def floors(x, k):
        blocks, one = to_blocks(x), jnp.ones(rows)
        return top_k_floor(blocks, block_peaks(blocks), k, one, one)

    for k in (0, 1, 2, 50, 63, 64, 65, 76, 500, 20_010, 20_011, 2**31 - 1):
        floor, settled = floors(logits, np.full(rows, k, np.int32))
        for name, row, got in zip(cases, logits, np.asarray(floor), strict=True):
            # k = vocabulary may give the smallest logit or -inf: both keep everything.
            assert ((row >= got) == (row >= kth_largest(row, k))).all(), (name, k)
            assert got in row or got == -np.inf, (name, k)
        assert settled.all()


def test_exact_sum_does_not_depend_on_order():
    values = np.random.default_rng(0).random((4, 1000)).astype(np.float32) * 128
    values[0] *= 1e-7
    total = np.asarray(exact_sum(jnp.asarray(values), 128))
    np.testing.assert_allclose(total, values.sum(1, dtype=np.float64), rtol=1e-6, atol=3e-8)
    shuffled = exact_sum(jnp.asarray(np.random.default_rng(1).permuted(values, axis=1)), 128)
    np.testing.assert_array_equal(total, np.asarray(shuffled))


def mixed_rows(count):
    kinds = [
        SamplingParams(),
        SamplingParams(temperature=0),
        SamplingParams(top_k=5, top_p=0.9),
        SamplingParams(top_p=0.5),
        SamplingParams(top_k=90, min_p=0.01),
        SamplingParams(frequency_penalty=0.5, repetition_penalty=1.3),
        SamplingParams(logit_bias={3: 2.0}, bad_token_ids=[4]),
        SamplingParams(temperature=2.0, min_tokens=4),
    ]
    return [(kinds[i % len(kinds)], 77 + i, i % 3, 10 + i, i, i, (1, 2)) for i in range(count)]


def test_draws_do_not_depend_on_company():
    rows, rng = mixed_rows(SMALL), np.random.default_rng(5)
    logits = rng.normal(size=(SMALL, V)).astype(np.float32) * 2
    history = [(row[0], [1, 2, 3], rng.integers(0, V, 5).tolist()) for row in rows]
    state = build_state(history, V, SMALL)
    together = draws(logits, rows, state, ALL_FLAGS)
    for _ in range(3):
        order = rng.permutation(SMALL)
        shuffled = draws(logits[order], [rows[i] for i in order], state, ALL_FLAGS)
        np.testing.assert_array_equal(shuffled, together[order])
    for i, row in enumerate(rows):
        assert draws(logits[i : i + 1], [row], state, ALL_FLAGS)[0] == together[i]
    padded = np.where(np.arange(SMALL)[:, None] < 3, logits, 0)
    np.testing.assert_array_equal(draws(padded, rows[:3], state, ALL_FLAGS)[:3], together[:3])


def test_draws_do_not_depend_on_the_program():
    logits = np.random.default_rng(6).normal(size=(SMALL, V)).astype(np.float32) * 2
    for params in (SamplingParams(), SamplingParams(temperature=0), SamplingParams(top_p=0.5)):
        rows, flags = rows_of(params, SMALL), SamplingFlags.for_params([params])
        lean = draws(logits, rows, None, flags)
        state = build_state([(params, [], [])] * SMALL, V, SMALL)
        np.testing.assert_array_equal(draws(logits, rows, state, ALL_FLAGS), lean)
    alone = draws(logits[:1], rows_of(SamplingParams(), 1), None, SamplingFlags())
    assert alone[0] == draws(logits, rows_of(SamplingParams(), SMALL), None, SamplingFlags())[0]


def test_greedy_takes_the_lowest_id_of_ties():
    logits = np.zeros((SMALL, V), np.float32)
    logits[1, [140, 260]] = 1
    logits[2, 299] = 1
    logits[3] = -np.inf
    logits[3, 200:] = -5
    greedy = SamplingParams(temperature=0, top_k=3, top_p=0.1)
    for flags in (SamplingFlags(greedy_only=True), FILTERS):
        tokens = draws(logits, rows_of(greedy, SMALL), None, flags)
        assert tokens[:4].tolist() == [0, 140, 299, 200]


def test_bad_rows_fail_alone():
    logits = np.random.default_rng(0).normal(size=(SMALL, V)).astype(np.float32)
    clean = logits.copy()
    logits[1, 137] = np.nan
    logits[2, 0] = np.inf
    logits[3] = -np.inf
    bad = np.isin(np.arange(SMALL), [1, 2, 3])
    for flags in (SamplingFlags(greedy_only=True), FILTERS):
        np.testing.assert_array_equal(finite_rows(jnp.asarray(logits), flags), ~bad)
    for params in (SamplingParams(temperature=0), SamplingParams(), SamplingParams(top_p=0.5)):
        rows, flags = rows_of(params, SMALL), SamplingFlags.for_params([params])
        tokens = draws(logits, rows, None, flags)
        assert (tokens[bad] == NO_TOKEN).all()
        np.testing.assert_array_equal(tokens[~bad], draws(clean, rows, None, flags)[~bad])


def test_a_row_with_every_token_banned_has_no_token():
    params = SamplingParams(allowed_token_ids=[2], min_tokens=1)
    state = build_state([(params, [], [])] * SMALL, V, SMALL)
    rows = [(params, 0, 0, 0, i, i, (2,)) for i in range(SMALL)]
    tokens = draws(np.zeros((SMALL, V), np.float32), rows, state, ALL_FLAGS)
    assert tokens.tolist() == [NO_TOKEN] + [2] * (SMALL - 1)


def test_min_tokens_bans_stop_ids_until_then():
    logits = np.zeros((SMALL, V), np.float32)
    logits[:, 7], logits[:, 8], logits[:, V - 1] = 3, 2, 1
    params = SamplingParams(temperature=0, min_tokens=2, stop_token_ids=[8])
    rows = [(params, 0, 0, 0, i, i, (7,)) for i in range(SMALL)]
    flags = SamplingFlags(greedy_only=True, min_tokens=True)
    assert draws(logits, rows, None, flags)[:3].tolist() == [V - 1, V - 1, 7]


def test_transforms_match_the_reference_and_leave_other_rows_alone():
    rng = np.random.default_rng(2)
    logits = rng.normal(size=(4, V)).astype(np.float32) * 5
    all_of_them = SamplingParams(
        presence_penalty=0.7,
        frequency_penalty=-0.3,
        repetition_penalty=1.7,
        logit_bias={5: 3.0, 299: -2.0},
        allowed_token_ids=list(range(0, V, 2)),
        bad_token_ids=[10],
        max_tokens=None,
        min_tokens=20,
    )
    kinds = [
        all_of_them,
        SamplingParams(),
        SamplingParams(repetition_penalty=0.5),
        SamplingParams(logit_bias={0: 1.0}),
    ]
    history = [(p, [3, 4, 299], [6, 6, 6, 250]) for p in kinds]
    rows = [(p, 0, 0, 0, slot, 4, (8,)) for slot, p in enumerate(kinds)]
    batch = SamplingBatch.from_matrix(jnp.asarray(pack_matrix(rows, 4)))
    state = build_state(history, V, 8)
    got = np.asarray(transform(jnp.asarray(logits), batch, state, ALL_FLAGS))
    for i, (params, prompt, generated) in enumerate(history):
        want = transformed(logits[i], params, prompt, generated, stop_ids=(8,))
        np.testing.assert_allclose(got[i], want, rtol=1e-6, atol=1e-6)
    np.testing.assert_array_equal(got[1], logits[1])


def test_a_slot_s_former_owner_does_not_reach_an_unreset_row():
    former = SamplingParams(allowed_token_ids=[1], logit_bias={2: 100.0}, presence_penalty=2.0)
    state = build_state([(former, [1], [2])] * SMALL, V, SMALL)
    logits = np.random.default_rng(0).normal(size=(1, V)).astype(np.float32)
    row = [(SamplingParams(temperature=0), 0, 0, 0, 0, 0, ())]
    assert draws(logits, row, state, ALL_FLAGS)[0] == logits[0].argmax()


def test_record_counts_live_rows_only_and_reset_forgets():
    state = init_row_state(3, V)
    slots = jnp.array([0, 1, 1, PADDING_SLOT, 2], jnp.int32)
    tokens = jnp.array([5, 6, 6, 7, NO_TOKEN], jnp.int32)
    live = jnp.array([True, True, True, True, True])
    state = record(state, slots, tokens, live)
    state = record(state, slots, tokens, live & (jnp.arange(5) == 0))
    counts = np.asarray(state.counts)
    assert counts.sum() == 4
    assert (counts[0, 5], counts[1, 6]) == (2, 2)
    rebuilt = build_state([(SamplingParams(), [1], [5, 5]), (SamplingParams(), [], [])], V, 8)
    assert np.asarray(rebuilt.counts)[0, 5] == 2
    assert np.asarray(rebuilt.counts).sum() == 2
    assert np.asarray(rebuilt.prompt_seen)[:, 0].tolist() == [2, 0]


def test_penalties_see_recorded_tokens():
    params = SamplingParams(temperature=0, frequency_penalty=2.0)
    state = build_state([(params, [], [])] * SMALL, V, SMALL)
    logits = np.zeros((1, V), np.float32)
    logits[0, :3] = [2.5, 2.0, 1.0]
    tokens = []
    for i in range(4):
        drawn = draws(logits, [(params, 0, 0, i, 0, i, ())], state, ALL_FLAGS)
        state = record(state, jnp.zeros(1, jnp.int32), jnp.asarray(drawn), jnp.ones(1, bool))
        tokens.append(int(drawn[0]))
    assert tokens == [0, 1, 2, 0]


def test_state_updates_are_in_place():
    slots, vocab, rows = 64, 32_000, 16
    state = jax.eval_shape(lambda: init_row_state(slots, vocab))
    size = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(state))
    ints = jax.ShapeDtypeStruct((rows,), jnp.int32)
    live = jax.ShapeDtypeStruct((rows,), jnp.bool_)
    step = jax.jit(record, donate_argnums=0).lower(state, ints, ints, live).compile()
    memory = step.memory_analysis()
    assert memory.alias_size_in_bytes == size
    assert memory.temp_size_in_bytes < size // 100


def test_the_vocabulary_is_never_sorted():
    logits = jax.ShapeDtypeStruct((2, 32_000), jnp.float32)
    matrix = jax.ShapeDtypeStruct((2, WIDTH), jnp.int32)
    program = draw.lower(logits, matrix, None, FILTERS).as_text()
    sorting = [line for line in program.splitlines() if re.search(r"sort|top_k", line)]
    assert sorting
    for line in sorting:
        shapes = re.findall(r"tensor<([\dx]+)x[fi]32>", line)
        assert max((int(n) for shape in shapes for n in shape.split("x")), default=0) <= 1024, line


def test_flags_that_need_a_state_refuse_without_one():
    batch = SamplingBatch(**pack_rows(rows_of(SamplingParams(), 1), 1))
    with pytest.raises(ValueError, match="needs a RowState"):
        sample(jnp.zeros((1, V)), batch, None, SamplingFlags(penalties=True))


def test_packed_dictionary_and_matrix_agree():
    rows = mixed_rows(5)
    from_matrix = SamplingBatch.from_matrix(jnp.asarray(pack_matrix(rows, 8)))
    from_fields = SamplingBatch(**pack_rows(rows, 8))
    for a, b in zip(jax.tree.leaves(from_matrix), jax.tree.leaves(from_fields), strict=True):
        assert a.dtype == b.dtype
        np.testing.assert_array_equal(a, b)
