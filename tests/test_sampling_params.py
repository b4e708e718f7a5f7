"""SamplingParams' validation, program selection and packing, all without a device."""

import itertools
import subprocess
import sys
import timeit
from dataclasses import replace

import numpy as np
import pytest

from octavo.sampling.flags import SamplingFlags
from octavo.sampling.pack import (
    MAX_EOS_IDS,
    PADDING_SLOT,
    STOP_WIDTH,
    WIDTH,
    allowed_mask,
    bias_arrays,
    pack_matrix,
    pack_rows,
    param_record,
)
from octavo.sampling.params import MAX_LOGIT_BIAS, MAX_LOGPROBS, MAX_SEED, SamplingParams
from octavo.sampling.shown import shown

REFUSED = [
    ("max_tokens", -1),
    ("max_tokens", 1.0),
    ("max_tokens", True),
    ("min_tokens", -1),
    ("min_tokens", None),
    ("temperature", -0.1),
    ("temperature", 100.5),
    ("temperature", float("nan")),
    ("temperature", float("inf")),
    ("temperature", "1"),
    ("temperature", True),
    ("temperature", 10**400),
    ("temperature", -(10**400)),
    ("temperature", 10**5000),
    ("temperature", np.float32("nan")),
    ("temperature", 1j),
    ("temperature", np.ones(1)),
    ("top_k", -1),
    ("top_k", 2.5),
    ("top_k", False),
    ("top_k", 10**5000),
    ("top_k", np.bool_(True)),
    ("top_k", np.float64(5)),
    ("top_p", 0.0),
    ("top_p", 1.01),
    ("top_p", float("nan")),
    ("min_p", -0.1),
    ("min_p", 1.1),
    ("presence_penalty", 2.1),
    ("frequency_penalty", -2.1),
    ("repetition_penalty", 0.0),
    ("repetition_penalty", 10.1),
    ("logit_bias", [1]),
    ("logit_bias", {-1: 0.0}),
    ("logit_bias", {"5": 0.0}),
    ("logit_bias", {5: 101.0}),
    ("logit_bias", {5: float("nan")}),
    ("logit_bias", {5: 10**400}),
    ("logit_bias", {10**5000: 1}),
    ("logit_bias", {True: 1}),
    ("logit_bias", dict.fromkeys(range(MAX_LOGIT_BIAS + 1), 0.0)),
    ("bad_token_ids", "abc"),
    ("bad_token_ids", [-1]),
    ("bad_token_ids", 3),
    ("allowed_token_ids", []),
    ("allowed_token_ids", [True]),
    ("seed", -1),
    ("seed", MAX_SEED + 1),
    ("seed", 1.5),
    ("n", 0),
    ("n", 129),
    ("stop", [""]),
    ("stop", ["a"] * 17),
    ("stop", [1]),
    ("stop", None),
    ("stop_token_ids", [2**31]),
    ("stop_token_ids", list(range(17))),
    ("include_stop_str_in_output", 1),
    ("ignore_eos", None),
    ("skip_special_tokens", "yes"),
    ("logprobs", 21),
    ("logprobs", -1),
    ("logprobs", True),
    ("prompt_logprobs", 21),
]


@pytest.mark.parametrize(("name", "value"), REFUSED, ids=range(len(REFUSED)))
def test_refuses_and_names_the_field(name, value):
    with pytest.raises(ValueError, match=name) as refusal:
        SamplingParams(**{name: value})
    assert len(str(refusal.value)) < 200


def test_values_are_shown_by_their_beginning():
    assert shown({"a": [1, "b", None]}) == "{'a': [1, 'b', None]}"
    assert shown(-(10**5000)) == "an integer of 16610 bits"
    nested = value = []
    for _ in range(100_000):
        value.append(value := [])
    for large in ("x" * 10**7, list(range(10**6)), dict.fromkeys(range(10**6)), nested):
        assert len(shown(large)) <= 80
        assert shown(large).startswith(("'xxx", "[0, 1", "{0: None, 1", "[[[["))


def test_refuses_contradictions():
    with pytest.raises(ValueError, match=r"min_tokens must be in 0 .. max_tokens \(3\), got 4"):
        SamplingParams(max_tokens=3, min_tokens=4)
    with pytest.raises(ValueError, match="bans every token"):
        SamplingParams(allowed_token_ids=[1, 2], bad_token_ids=[2, 1, 7])
    SamplingParams(max_tokens=None, min_tokens=4)


def test_normalises_types():
    params = SamplingParams(
        temperature=np.float32(0.5),
        top_k=np.int64(5),
        stop="end",
        stop_token_ids=[1, np.int32(2)],
        allowed_token_ids=[4, 5],
        logit_bias={np.int64(3): 1},
    )
    assert type(params.temperature) is float
    assert type(params.top_k) is int
    assert params.stop == ("end",)
    assert params.stop_token_ids == (1, 2)
    assert params.allowed_token_ids == (4, 5)
    assert params.logit_bias == {3: 1.0}
    assert replace(params) == params


def test_derived_properties():
    assert SamplingParams(temperature=0).is_greedy
    assert SamplingParams(temperature=1e-6).is_greedy
    assert not SamplingParams(temperature=0, top_p=0.5).has_filters
    assert SamplingParams(min_p=0.1).has_filters
    assert SamplingParams(frequency_penalty=0.1).has_penalties
    assert SamplingParams(bad_token_ids=[1]).has_bias
    assert not SamplingParams(top_k=4, min_tokens=1).needs_state


def test_flags_choose_the_leanest_program():
    greedy, plain = SamplingParams(temperature=0), SamplingParams()
    assert SamplingFlags.for_params([greedy]) == SamplingFlags(greedy_only=True)
    assert SamplingFlags.for_params([greedy, plain]) == SamplingFlags()
    assert SamplingFlags.for_params([plain, SamplingParams(top_p=0.9)]).filters
    assert SamplingFlags.for_params([SamplingParams(repetition_penalty=1.1)]).penalties
    assert SamplingFlags.for_params([SamplingParams(allowed_token_ids=[1])]).bias
    assert SamplingFlags.for_params([SamplingParams(min_tokens=1)]).min_tokens
    buckets = {None: -1, 0: 0, 1: 5, 5: 5, 6: 20, 20: 20}
    for asked, bucket in buckets.items():
        assert SamplingFlags.for_params([SamplingParams(logprobs=asked)]).logprobs == bucket
    union = SamplingFlags(greedy_only=True).union(SamplingFlags(filters=True, logprobs=5))
    assert union == SamplingFlags(filters=True, logprobs=5)
    with pytest.raises(ValueError, match="logprobs"):
        SamplingFlags(logprobs=3)
    with pytest.raises(ValueError, match="greedy_only"):
        SamplingFlags(greedy_only=True, filters=True)


def test_pack_rows_fills_every_field():
    params = SamplingParams(
        temperature=0.7,
        top_k=9,
        top_p=0.8,
        min_p=0.1,
        presence_penalty=0.5,
        frequency_penalty=-0.5,
        repetition_penalty=1.2,
        min_tokens=3,
        stop_token_ids=[11, 12],
    )
    silent = SamplingParams(temperature=1e-7, ignore_eos=True)
    seed = (5 << 32) | 7
    rows = [(params, seed, 2, 100, 4, 6, (1, 2)), (silent, 3, 0, 9, 1, 0, (1, 2))]
    fields = pack_rows(rows, 4)
    assert fields["temperature"].dtype == np.float32
    np.testing.assert_allclose(fields["temperature"], [0.7, 0, 0, 0], rtol=1e-6)
    np.testing.assert_allclose(fields["top_p"], [0.8, 1, 1, 1], rtol=1e-6)
    np.testing.assert_allclose(fields["min_p"], [0.1, 0, 0, 0], rtol=1e-6)
    np.testing.assert_allclose(fields["presence"], [0.5, 0, 0, 0])
    np.testing.assert_allclose(fields["frequency"], [-0.5, 0, 0, 0])
    np.testing.assert_allclose(fields["repetition"], [1.2, 1, 1, 1], rtol=1e-6)
    assert fields["top_k"].tolist() == [9, 0, 0, 0]
    assert fields["min_tokens"].tolist() == [3, 0, 0, 0]
    assert fields["stateful"].tolist() == [1, 0, 0, 0]
    assert fields["seed"].dtype == np.uint32
    assert fields["seed"].tolist() == [[5, 7], [0, 3], [0, 0], [0, 0]]
    assert fields["sample_index"].tolist() == [2, 0, 0, 0]
    assert fields["position"].tolist() == [100, 9, 0, 0]
    assert fields["slot"].tolist() == [4, 1, PADDING_SLOT, PADDING_SLOT]
    assert fields["generated"].tolist() == [6, 0, 0, 0]
    assert fields["stop_ids"].shape == (4, STOP_WIDTH)
    assert [ids[ids >= 0].tolist() for ids in fields["stop_ids"]] == [[11, 12, 1, 2], [], [], []]


def test_pack_refuses_what_does_not_fit():
    row = (SamplingParams(), 0, 0, 0, 0, 0, ())
    with pytest.raises(ValueError, match="3 rows do not fit a batch of 2"):
        pack_matrix([row] * 3, 2)
    with pytest.raises(ValueError, match="end-of-sequence"):
        pack_matrix([(*row[:6], tuple(range(MAX_EOS_IDS + 1)))], 1)
    assert pack_matrix([], 2).shape == (2, WIDTH)


def test_what_rows_need_together_is_the_union_of_what_each_needs():
    each = [
        SamplingParams(temperature=0),
        SamplingParams(),
        SamplingParams(top_p=0.5, logprobs=0),
        SamplingParams(frequency_penalty=0.1),
        SamplingParams(bad_token_ids=[1], logprobs=3),
        SamplingParams(min_tokens=1, logprobs=MAX_LOGPROBS),
    ]
    for first, second in itertools.product(each, repeat=2):
        alone = [SamplingFlags.for_params([params]) for params in (first, second)]
        assert SamplingFlags.for_params([first, second]) == alone[0].union(alone[1])
    assert SamplingFlags.for_params([each[1]], grammar=True) == SamplingFlags(grammar=True)


def test_resolved_parameters_are_those_of_a_checked_copy():
    params = SamplingParams(temperature=0.5, top_k=3, stop_token_ids=[7], min_tokens=4)
    packed = param_record(params, (2,))
    resolved = params.resolved(9, 11)
    assert resolved == replace(params, max_tokens=9, seed=11)
    assert (params.max_tokens, params.seed) == (16, None), "the original stays as it is"
    assert param_record(resolved, (2,)) == packed == param_record(replace(resolved), (2,))
    with pytest.raises(ValueError, match="min_tokens must be in"):
        params.resolved(3, 11)


def test_packed_records_follow_the_eos_ids():
    params = SamplingParams()
    for eos in ((1,), (2, 3), (1,)):
        ids = pack_rows([(params, 0, 0, 0, 0, 0, eos)], 1)["stop_ids"][0]
        assert tuple(ids[: len(eos)]) == eos
    assert params == SamplingParams()


def test_packing_256_rows_is_cheap():
    rows = [(SamplingParams(top_k=50), MAX_SEED, i, 11, i, 0, (2,)) for i in range(256)]
    best = min(timeit.repeat(lambda: pack_rows(rows, 256), number=5, repeat=20)) / 5
    assert best < 1e-3  # 0.14 ms on an idle core


def test_masks_and_bias():
    mask = allowed_mask(SamplingParams(allowed_token_ids=[0, 33, 39], bad_token_ids=[33]), 40)
    assert mask.dtype == np.uint32
    assert mask.tolist() == [1, 1 << 7]
    everything = allowed_mask(SamplingParams(bad_token_ids=[1]), 34)
    assert everything.tolist() == [0xFFFFFFFD, 0b11]
    ids, values = bias_arrays(SamplingParams(logit_bias={7: -1.5, 3: 2.0}), 4)
    assert ids.tolist() == [7, 3, -1, -1]
    assert values.tolist() == [-1.5, 2.0, 0.0, 0.0]


def test_host_side_needs_no_jax():
    code = (
        "import sys, octavo.sampling.params, octavo.sampling.flags, octavo.sampling.pack;"
        "assert 'jax' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
