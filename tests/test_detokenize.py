"""Detokenising: the pieces joined are the whole, characters stay whole, stop strings are found."""

import functools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from octavo.serve.detokenize import (
    WINDOW_LIMIT,
    Detokenizer,
    StopMatcher,
    TokenTable,
    piece_bytes,
)

EMOJI_TEXT = st.text(alphabet=st.sampled_from("ab é日本🙂👍🏽\u2028\n0"), max_size=30)


class Wrapped:
    """A `tokenizers` tokenizer with the engine's interface."""

    def __init__(self, inner, special_ids=()):
        self.inner = inner
        self.special_ids = frozenset(special_ids)

    def encode(self, text, add_special_tokens=True):
        return self.inner.encode(text, add_special_tokens=add_special_tokens).ids

    def decode(self, ids, skip_special_tokens=True):
        return self.inner.decode(list(ids), skip_special_tokens=skip_special_tokens)

    def id_to_token(self, token_id):
        return self.inner.id_to_token(token_id)


class Counting(Wrapped):
    """Counts the ids that it decodes."""

    decoded = 0

    def decode(self, ids, skip_special_tokens=True):
        self.decoded += len(ids)
        return super().decode(ids, skip_special_tokens)


@functools.cache
def byte_level():
    """256 bytes, merges that cut emoji and words in odd places, one special token."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {c: i for i, c in enumerate(letters)}
    merges = [("Ġ", "a"), ("a", "b"), ("ð", "Ł"), ("ĻĤ"[0], "ĻĤ"[1]), ("Ã", "©"), ("æ", "Ĺ")]
    merges += [("ab", "ð"), ("©", "a")]
    for left, right in merges:
        vocab.setdefault(left + right, len(vocab))
    inner = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    inner.decoder = decoders.ByteLevel()
    inner.add_special_tokens(["<|end|>"])
    return Wrapped(inner, [inner.token_to_id("<|end|>")])


@functools.cache
def byte_fallback():
    """SentencePiece style: spaces as U+2581, unknown characters as <0xNN> pieces."""
    pieces = ["<unk>", "<s>", *(f"<0x{b:02X}>" for b in range(256)), "▁", "a", "b", "▁a", "é", "0"]
    inner = Tokenizer(
        models.BPE(
            vocab={p: i for i, p in enumerate(pieces)},
            merges=[("▁", "a")],
            byte_fallback=True,
            unk_token="<unk>",
        )
    )
    inner.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    inner.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    inner.add_special_tokens(["<s>"])
    return Wrapped(inner, [1])


def pieces_of(tokenizer, ids, **options):
    detokenizer = Detokenizer(TokenTable(tokenizer), **options)
    return [*(detokenizer.push(i) for i in ids), detokenizer.flush()]


@settings(max_examples=300, deadline=None)
@given(st.lists(st.integers(0, 263), max_size=40), st.booleans(), st.booleans())
def test_any_byte_level_ids_join_to_their_decoding(ids, skip, continues):
    tokenizer = byte_level()
    joined = "".join(pieces_of(tokenizer, ids, skip_special_tokens=skip, continues=continues))
    assert joined == tokenizer.decode(ids, skip_special_tokens=skip)


@settings(max_examples=300, deadline=None)
@given(EMOJI_TEXT, st.sampled_from([byte_level, byte_fallback]))
def test_no_character_is_ever_broken(text, make):
    tokenizer = make()
    pieces = pieces_of(tokenizer, tokenizer.encode(text), continues=False)
    assert "".join(pieces) == tokenizer.decode(tokenizer.encode(text))
    assert not any("\ufffd" in piece for piece in pieces)


@given(EMOJI_TEXT)
@settings(max_examples=100, deadline=None)
def test_a_continuation_keeps_its_leading_space(text):
    tokenizer = byte_fallback()
    ids = tokenizer.encode(" a" + text)
    b = tokenizer.inner.token_to_id("b")
    pieces = pieces_of(tokenizer, ids)
    assert "".join(pieces) == tokenizer.decode([b, *ids])[1:]
    assert "".join(pieces).startswith(" ")


def test_an_incomplete_end_is_flushed_as_one_replacement():
    tokenizer = byte_level()
    ids = tokenizer.encode("a🙂")[:-1]
    pieces = pieces_of(tokenizer, ids)
    assert "".join(pieces) == tokenizer.decode(ids)
    assert "".join(pieces[:-1]) == "a"
    assert pieces[-1] == "\ufffd"


def test_incomplete_byte_fallback_waits_and_completes():
    tokenizer = byte_fallback()
    ids = [2 + b for b in "🙂".encode() * 2]
    assert pieces_of(tokenizer, ids) == ["", "", "", "🙂", "", "", "", "🙂", ""]


def test_special_tokens_are_skipped_or_spelled():
    tokenizer = byte_level()
    end = tokenizer.inner.token_to_id("<|end|>")
    half, rest = tokenizer.encode("🙂")[:1], tokenizer.encode("🙂")[1:]
    assert "".join(pieces_of(tokenizer, [end, *half, end, *rest])) == "🙂"
    spelled = pieces_of(tokenizer, [*half, end], skip_special_tokens=False)
    assert "".join(spelled) == "\ufffd<|end|>"


def test_a_long_run_of_broken_bytes_costs_linear_time():
    counting = Counting(byte_level().inner)
    broken = counting.inner.token_to_id("ð")
    pieces = pieces_of(counting, [broken] * 5000)
    assert "".join(pieces) == "\ufffd" * 5000
    assert counting.decoded < 5000 * 2 * WINDOW_LIMIT


def test_piece_bytes():
    assert piece_bytes("<0x0A>") == b"\n"
    assert piece_bytes("Ġa") == b" a"
    assert piece_bytes("▁a") is None
    table = TokenTable(byte_level())
    assert table.raw_bytes(byte_level().inner.token_to_id("ðŁ")) == b"\xf0\x9f"
    assert table.label(byte_level().inner.token_to_id("ðŁ")) == "\ufffd"


def naive(text, stops):
    """The definition: first end; of those the longest."""
    for end in range(1, len(text) + 1):
        found = [stop for stop in stops if text[:end].endswith(stop)]
        if found:
            stop = max(found, key=len)
            return end - len(stop), end, stop
    return None


@settings(max_examples=400, deadline=None)
@given(
    st.text("ab", max_size=20),
    st.lists(st.text("ab", min_size=1, max_size=5), min_size=1, max_size=4),
    st.data(),
)
def test_stops_are_found_however_the_text_is_cut(text, stops, data):
    matcher = StopMatcher(stops)
    position, released, found = 0, 0, None
    while position < len(text) and found is None:
        step = data.draw(st.integers(1, 4))
        found = matcher.feed(text[position : position + step])
        position = min(position + step, len(text))
        if found is None:
            released = position - matcher.held
    assert found == naive(text, stops)
    if found:
        assert released <= found[0]
    else:
        held = text[released:]
        assert not held or any(stop.startswith(held) for stop in stops)


@pytest.mark.parametrize(
    ("text", "stops", "want"),
    [
        ("abcd", ["bcd", "b"], (1, 2, "b")),
        ("xaab", ["aab", "ab"], (1, 4, "aab")),
        ("aaab", ["aab"], (1, 4, "aab")),
        ("abab", ["abb"], None),
    ],
)
def test_which_stop_wins(text, stops, want):
    assert StopMatcher(stops).feed(text) == want
