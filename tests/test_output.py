"""Events to deltas: stop strings never leak, token slices join to the text, aborts are named."""

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mock_engine import EOS, ByteTokenizer

from octavo.sampling.params import SamplingParams
from octavo.serve.detokenize import TokenTable
from octavo.serve.output import OutputProcessor, SampleOutput
from octavo.serve.types import Request, TokenEvent, TokenLogprob

TABLE = TokenTable(ByteTokenizer())


def run(ids, params, chunks=None, *, track=True, reason="length", eos=(EOS,)):
    """All deltas of a sample whose engine events carry `chunks` tokens each."""
    sample = SampleOutput(params, TABLE, track=track, eos_ids=eos)
    deltas, position = [], 0
    chunks = list(chunks or [1] * len(ids))
    while position < len(ids) and sample.finish_reason is None:
        size = chunks.pop(0) if chunks else 1
        part = tuple(ids[position : position + size])
        position += size
        over = position >= len(ids)
        stop = part[-1] if over and reason == "stop" else None
        logprobs = tuple(TokenLogprob(t, -1.0, 1) for t in part)
        event = TokenEvent(
            "r", part, logprobs, finish_reason=reason if over else None, stop_token=stop
        )
        deltas += sample.push(event)
    return sample, deltas


def text_of(deltas):
    return "".join(d.text for d in deltas)


@settings(max_examples=300, deadline=None)
@given(
    st.text("ab🙂", max_size=16),
    st.lists(st.text("ab🙂", min_size=1, max_size=4), max_size=3),
    st.lists(st.integers(1, 5), max_size=10),
    st.booleans(),
)
def test_text_is_cut_exactly_and_never_leaks(text, stops, chunks, include):
    params = SamplingParams(
        max_tokens=100, stop=tuple(stops), include_stop_str_in_output=include, logprobs=0
    )
    sample, deltas = run(list(text.encode()), params, chunks)
    ends = [(text.find(s) + len(s), -len(s), s) for s in stops if s in text]
    if ends:
        end, size, stop = min(ends)
        assert text_of(deltas) == text[: end if include else end + size]
        assert deltas[-1].finish_reason == "stop"
        assert deltas[-1].stop_reason == stop
        assert sample.completion_tokens == len(text[:end].encode())
    elif text:
        assert text_of(deltas) == text
        assert deltas[-1].finish_reason == "length"
    tokens = [t for d in deltas for t in d.tokens]
    assert len(tokens) == sample.completion_tokens
    assert "".join(t.text for t in tokens) == text_of(deltas)
    for before, after in itertools.pairwise(tokens):
        assert after.start == before.start + len(before.text)
    if not include:
        partial = ""
        for delta in deltas:
            partial += delta.text
            assert not any(stop in partial for stop in stops)


def test_tokens_past_a_stop_string_are_dropped_and_the_engine_is_told():
    outputs = OutputProcessor(ByteTokenizer())
    request = Request("r", (1,), SamplingParams(max_tokens=9, stop=("b",)), (EOS,))
    sample = outputs.add(request)
    deltas, aborts = outputs.process([TokenEvent("r", tuple(b"abcd"))])
    assert aborts == ["r"]
    assert [(i, d.text, d.finish_reason) for i, d in deltas] == [
        ("r", "a", None),
        ("r", "", "stop"),
    ]
    assert sample.completion_tokens == 2
    assert outputs.process([TokenEvent("r", (99,))]) == ([], [])


def test_a_stop_string_at_the_engines_own_end_needs_no_abort():
    sample, deltas = run(b"ab", SamplingParams(stop=("b",)))
    assert not sample.ended_early
    assert deltas[-1].finish_reason == "stop"


def test_end_of_sequence_has_no_text_but_is_billed():
    sample, deltas = run([*b"hi", EOS], SamplingParams(), reason="stop")
    assert text_of(deltas) == "hi"
    assert sample.completion_tokens == 3
    assert deltas[-1].stop_reason is None


def test_stop_id_text_is_left_out_unless_wanted():
    _, deltas = run(b"hi9", SamplingParams(stop_token_ids=(57,)), reason="stop")
    assert text_of(deltas) == "hi"
    assert deltas[-1].stop_reason == 57
    params = SamplingParams(stop_token_ids=(57,), include_stop_str_in_output=True)
    assert text_of(run(b"hi9", params, reason="stop")[1]) == "hi9"


def test_end_inside_a_character_is_flushed():
    _, deltas = run("a🙂".encode()[:3], SamplingParams())
    assert text_of(deltas) == "a\ufffd"


def test_held_back_text_comes_out_at_the_end():
    _, deltas = run(b"xab", SamplingParams(stop=("abc",)))
    assert [d.text for d in deltas] == ["x", "", "ab"]


def test_stop_strings_count_only_behind_min_tokens():
    params = SamplingParams(max_tokens=9, min_tokens=3, stop=("a",))
    assert text_of(run(b"aabba", params)[1]) == "aabb"


def test_an_error_ends_the_sample_with_its_message():
    sample = SampleOutput(SamplingParams(), TABLE)
    (delta,) = sample.push(TokenEvent("r", finish_reason="error", error="NaN"))
    assert (delta.finish_reason, delta.error) == ("error", "NaN")
    assert sample.push(TokenEvent("r", (1,))) == []


def test_without_a_tokenizer_ids_come_and_stop_strings_are_refused():
    outputs = OutputProcessor(None)
    sample = outputs.add(Request("r", (1,), SamplingParams()), track=True)
    ((_, delta),), _ = outputs.process([TokenEvent("r", (7,), finish_reason="length")])
    assert [t.token_id for t in delta.tokens] == [7]
    assert sample.finish_reason == "length"
    with pytest.raises(ValueError, match="stop"):
        outputs.add(Request("s", (1,), SamplingParams(stop=("x",))))
