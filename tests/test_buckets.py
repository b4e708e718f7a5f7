"""Buckets hold the batches they are chosen for; packed inputs come apart as they went in."""

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo.sampling.params import SamplingParams
from octavo.serve import batch as packing
from octavo.serve.buckets import Bucket, make_buckets
from octavo.serve.packing import KINDS, Field, PackLayout
from octavo.serve.step import unpack
from octavo.serve.types import Request, ScheduledBatch, ScheduledRow

PAGE = 16


@st.composite
def sizes(draw):
    rows = draw(st.integers(1, 512))
    tokens = draw(st.integers(rows, 9000))
    fine, short = draw(st.booleans()), draw(st.none() | st.integers(1, 300))
    return make_buckets(rows, tokens, draw(st.integers(1, 5000)), fine=fine, short=short), tokens


@given(sizes(), st.data())
def test_the_chosen_bucket_holds_the_batch_and_is_warmed_up(made, data):
    buckets, max_tokens = made
    rows = data.draw(st.integers(1, buckets.max_num_seqs))
    pages = data.draw(st.integers(1, buckets.pages[-1]))
    tokens = data.draw(st.integers(rows, max_tokens))
    decode, mixed = buckets.decode(rows, pages), buckets.mixed(tokens, rows, pages)
    assert decode.is_decode
    assert (decode.tokens, decode.rows >= rows, decode.pages >= pages) == (decode.rows, True, True)
    assert mixed.tokens >= tokens
    assert rows <= mixed.rows <= buckets.max_num_seqs
    assert mixed.pages >= pages
    assert {decode, mixed} <= set(buckets.all())


@given(sizes())
def test_classes_ascend_to_the_limits_without_repeats(made):
    buckets, max_tokens = made
    for classes, last in [
        (buckets.decode_rows, buckets.max_num_seqs),
        (buckets.mixed_tokens, max_tokens),
        (buckets.pages, buckets.pages[-1]),
        (buckets.decode_pages, buckets.pages[-1]),
    ]:
        assert classes[-1] == last
        assert list(classes) == sorted(set(classes))
    assert len(set(buckets.all())) == len(buckets.all()) < 250


@given(sizes(), st.data())
def test_what_is_worthwhile_is_all_or_fills_a_class(made, data):
    buckets, max_tokens = made
    tokens = data.draw(st.integers(1, max_tokens))
    least = data.draw(st.integers(1, tokens))
    kept = buckets.worthwhile(tokens, least, data.draw(st.integers(0, buckets.max_num_seqs)))
    assert least <= kept <= tokens
    assert kept == tokens or kept in buckets.mixed_tokens


@pytest.mark.parametrize(
    ("tokens", "rows", "kept"),
    [(2052, 4, 2048), (2128, 80, 2048), (2048, 4, 2048), (582, 250, 582), (1030, 4, 1030)],
)
def test_a_few_tokens_more_than_a_class_go_with_the_next_step(tokens, rows, kept):
    buckets = make_buckets(256, 8192, 130, fine=True)
    assert buckets.worthwhile(tokens, rows + 1, rows) == kept


def test_fine_classes_waste_at_most_half_of_a_step():
    buckets = make_buckets(256, 8192, 128, fine=True)
    for rows in range(1, 257):
        assert buckets.decode(rows, 1).rows < max(2 * rows, 9)
    for tokens in range(257, 8193):
        most = 1.25 if 512 < tokens <= 2048 else 1.5
        assert buckets.mixed(tokens, 1, 1).tokens <= most * tokens


@pytest.mark.parametrize(
    ("longest", "classes"),
    [
        (5, (5,)),
        (128, (128,)),
        (130, (130,)),
        (170, (170,)),
        (171, (128, 171)),
        (1300, (128, 1300)),
        (2048, (128, 1024, 2048)),
    ],
)
def test_a_class_of_pages_saves_at_least_a_quarter_of_the_next(longest, classes):
    assert make_buckets(4, 32, longest, fine=True).pages == classes


def test_short_contexts_have_a_class_of_their_own_in_decode_steps_only():
    buckets = make_buckets(64, 512, 130, fine=True, short=24)
    assert [buckets.decode(8, pages).pages for pages in (1, 24, 25, 130)] == [24, 24, 130, 130]
    assert buckets.mixed(100, 8, 1).pages == 130
    assert {bucket.pages for bucket in buckets.all() if bucket.is_decode} == {24, 130}
    assert make_buckets(64, 512, 24, fine=True, short=24).decode_pages == (24,)


def test_more_than_the_engine_takes_is_an_error():
    with pytest.raises(ValueError, match="5 exceeds the largest class 4"):
        make_buckets(4, 32, 8, fine=False).decode(5, 1)


@settings(deadline=None)
@given(st.lists(st.tuples(st.lists(st.integers(0, 5), max_size=3), st.sampled_from(list(KINDS)))))
def test_packed_arrays_come_apart_bit_for_bit(shapes):
    rng = np.random.default_rng(0)
    layout = PackLayout(
        tuple(Field(f"f{i}", tuple(shape), kind) for i, (shape, kind) in enumerate(shapes))
    )
    arrays = {
        field.name: rng.integers(-(2**31), 2**31, field.shape, np.int64)
        .astype(np.int32)
        .view(KINDS[field.kind])
        for field in layout.fields
    }
    buffer = layout.pack(arrays)
    assert (buffer.shape, buffer.dtype) == ((layout.size,), np.int32)
    for field, start in zip(layout.fields, layout.starts):
        assert start * 4 % 256 == 0, "a kernel may get a slice of the buffer, which must be aligned"
        words = buffer[start : start + field.size].view(KINDS[field.kind])
        np.testing.assert_array_equal(
            words.view(np.int32), arrays[field.name].reshape(-1).view(np.int32)
        )


def test_the_device_unpacks_what_the_host_packed():
    layout = PackLayout(
        (Field("a", (2, 3), "f32"), Field("b", ()), Field("c", (3,), "u32"), Field("d", (0,)))
    )
    arrays = {
        "a": np.array([[0.1, -np.inf, 3e38], [np.nan, -0.0, 1e-45]], np.float32),
        "b": np.array(-7, np.int32),
        "c": np.array([0, 2**31, 2**32 - 1], np.uint32),
        "d": np.zeros(0, np.int32),
    }
    out = jax.jit(lambda x: unpack(layout, x))(layout.pack(arrays))
    for name, array in arrays.items():
        found = np.asarray(out[name])
        assert found.dtype == array.dtype
        assert found.tobytes() == array.tobytes()


@pytest.mark.parametrize(
    "array", [np.zeros(3, np.int32), np.zeros((2, 1), np.int32), np.zeros(2, np.float32)]
)
def test_an_array_of_another_shape_or_kind_is_refused(array):
    with pytest.raises(ValueError, match="was given"):
        PackLayout((Field("a", (2,)),)).pack({"a": array})


def scheduled(index, start, tokens, *, previous=False):
    pages = -(-(start + max(len(tokens), 1)) // PAGE)
    request = Request(f"r{index}", (5,) * 300, SamplingParams(seed=index, max_tokens=4))
    return ScheduledRow(
        request_id=request.request_id,
        slot=index,
        start=start,
        tokens=tuple(tokens),
        from_previous=previous,
        num_steps=1,
        samples=True,
        block_table=np.arange(1, pages + 1, dtype=np.int32) + 20 * index,
        reset=False,
        prompt_len=300,
        generated=0,
        request=request,
    )


@settings(deadline=None)
@given(
    st.lists(
        st.tuples(st.integers(0, 200), st.integers(0, 20)),
        min_size=1,
        max_size=6,
    )
)
def test_a_packed_step_says_where_each_token_is_and_goes(pairs):
    """A row of no host tokens takes its one token from the device."""
    rows = [
        scheduled(i, start, range(100, 100 + count), previous=count == 0)
        for i, (start, count) in enumerate(pairs)
    ]
    batch = ScheduledBatch(1, tuple(rows))
    bucket = Bucket(128, 8, 20, 128)
    layout = packing.forward_layout(bucket)
    buffer = packing.pack_forward(batch, bucket, PAGE)
    found = {
        field.name: buffer[start : start + field.size].reshape(field.shape)
        for field, start in zip(layout.fields, layout.starts)
    }
    assert found["num_rows"] == len(rows)
    token = 0
    for index, row in enumerate(rows):
        assert found["query_starts"][index] == token
        assert found["kv_lens"][index] == row.start + row.query_len
        for offset in range(row.query_len):
            position = row.start + offset
            page = row.block_table[position // PAGE]
            expected = -1 - row.slot if row.from_previous else row.tokens[offset]
            assert found["tokens"][token] == expected
            assert found["positions"][token] == position
            assert found["slots"][token] == page * PAGE + position % PAGE
            token += 1
        assert found["last"][index] == token - 1
    assert (found["query_starts"][len(rows) :] == token).all()
    assert (found["kv_lens"][len(rows) :] == 0).all()
    assert (found["slots"][token:] < PAGE).all(), "padding writes to the padding page"


def test_prompt_targets_are_the_tokens_that_follow():
    long = scheduled(0, 2, range(3))
    request = Request("a", tuple(range(10, 16)), SamplingParams(max_tokens=1, seed=0))
    first = ScheduledRow(
        **{n: getattr(long, n) for n in ScheduledRow.__slots__} | {"request": request}
    )
    last = ScheduledRow(
        **{n: getattr(first, n) for n in ScheduledRow.__slots__} | {"start": 4, "tokens": (1, 2)}
    )
    targets = packing.prompt_targets(ScheduledBatch(1, (first, last)), Bucket(8, 2, 1, 8))
    assert targets.tolist() == [13, 14, 15, 15, 0, 0, 0, 0]
