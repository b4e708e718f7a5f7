"""Random parameters, logits and histories against the float64 reference."""

import numpy as np
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from sampling_reference import ALL_FLAGS, build_state, draws, probabilities, transformed

from octavo.sampling.params import SamplingParams

V, ROWS = 300, 8
EOS = (1, 2)
SLACK = 1e-5

token = st.integers(0, V - 1)
params = st.builds(
    SamplingParams,
    max_tokens=st.none(),
    min_tokens=st.sampled_from([0, 3]),
    temperature=st.sampled_from([0.0, 1e-4, 0.3, 1.0, 5.0, 100.0]),
    top_k=st.sampled_from([0, 1, 2, 10, 64, 65, 299, 300, 10**6]),
    top_p=st.sampled_from([1.0, 0.999, 0.9, 0.5, 1e-6]),
    min_p=st.sampled_from([0.0, 0.01, 0.3, 1.0]),
    presence_penalty=st.sampled_from([0.0, -1.0, 2.0]),
    frequency_penalty=st.sampled_from([0.0, 0.5]),
    repetition_penalty=st.sampled_from([1.0, 1.5, 0.5]),
    logit_bias=st.dictionaries(token, st.sampled_from([-100.0, 1.0, 100.0]), max_size=3),
    bad_token_ids=st.lists(st.integers(3, V // 2 - 1), max_size=3),
    allowed_token_ids=st.none() | st.lists(st.integers(V // 2, V - 1), min_size=1, max_size=8),
)
history = st.tuples(
    params, st.lists(token, max_size=6), st.lists(token, max_size=6), st.integers(0, 2**63 - 1)
)
spread = st.sampled_from([0.0, 0.01, 1.0, 30.0])


@settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.lists(history, min_size=ROWS, max_size=ROWS), st.integers(0, 2**32 - 1), spread, spread)
def test_every_draw_lies_in_the_reference_s_set(rows, seed, scale, grid):
    rng = np.random.default_rng(seed)
    logits = rng.normal(size=(ROWS, V)) * scale
    if grid:
        logits = np.round(logits / grid) * grid  # ties
    logits = logits.astype(np.float32)
    state = build_state([row[:3] for row in rows], V, 8)
    packed = [
        (p, seed, 0, 7, slot, len(generated), EOS)
        for slot, (p, _, generated, seed) in enumerate(rows)
    ]
    tokens = draws(logits, packed, state, ALL_FLAGS)
    for i, (p, prompt, generated, _) in enumerate(rows):
        x = transformed(logits[i], p, prompt, generated, EOS)
        if p.is_greedy:
            assert x[tokens[i]] >= x.max() - SLACK * max(1.0, abs(x.max()))
        else:
            loose = probabilities(x, p, slack=SLACK * max(1.0, abs(x.max())))
            assert loose[tokens[i]] > 0
