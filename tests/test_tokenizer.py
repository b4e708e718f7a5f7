"""Tokenizers from GGUF metadata and Hugging Face folders, against the oracle."""

import json
import time
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from gguf_files import BYTE_PIECES, write_gguf
from hypothesis import given, settings
from hypothesis import strategies as st
from real_models import smollm2_path
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors

from octavo.model.checkpoint.gguf_file import CheckpointError, GgufFile
from octavo.serve.tokenizer_files import TokenizerError, load_tokenizer
from octavo.serve.tokenizer_gguf import GgufTokenizerError, build_tokenizer

DATA = Path(__file__).parent / "data"
TINY = DATA / "gguf" / "tiny-llama-q4_0.gguf"
SMOLLM2 = json.loads(
    (DATA / "real" / "smollm2-135m-instruct-q4_1.json").read_text(encoding="utf-8")
)


@pytest.fixture(scope="module")
def tiny():
    return load_tokenizer(TINY)


@pytest.fixture(scope="module")
def smollm2():
    return load_tokenizer(smollm2_path())


def test_tiny_gguf_ids(tiny):
    for case in json.loads((DATA / "gguf" / "tokens.json").read_text(encoding="utf-8")):
        assert tiny.encode(case["text"], add_special_tokens=False) == case["ids"]
        assert tiny.decode(case["ids"], skip_special_tokens=False) == case["text"]


@pytest.mark.parametrize("case", SMOLLM2["tokenisation"], ids=range(20))
def test_smollm2_ids_and_text(smollm2, case):
    assert smollm2.encode(case["text"], add_special_tokens=False) == case["ids"]
    assert smollm2.decode(case["ids"], skip_special_tokens=False) == case["decoded"]


@pytest.mark.parametrize("case", SMOLLM2["chats"], ids=range(8))
def test_smollm2_chats(smollm2, case):
    options = {"add_generation_prompt": case["add_generation_prompt"]}
    assert smollm2.render_chat(case["messages"], **options) == case["text"]
    assert smollm2.encode_chat(case["messages"], **options) == case["ids"]


def test_special_tokens_of_smollm2(smollm2):
    assert smollm2.chat_template == SMOLLM2["chat_template"]
    assert (smollm2.bos_id, smollm2.vocab_size) == (1, 49152)
    assert smollm2.eos_ids == (0, 2)
    assert smollm2.special_ids == frozenset(range(17))
    assert smollm2.decode([1, 19556, 2]) == "Hello"
    assert smollm2.id_to_token(2) == "<|im_end|>"
    assert smollm2.id_to_token(1 << 20) is None
    assert smollm2.encode("Hello") == [19556]


def test_a_long_text_lets_other_threads_run(smollm2):
    """Digits are a token each: half a second or more, in which a server has streams to serve."""
    with ThreadPoolExecutor(1) as pool:
        long = pool.submit(smollm2.encode, "1" * 400_000)
        turns = 0
        while not long.done():
            time.sleep(0.001)
            turns += 1
        ids = long.result()
        assert turns > 10
        long = pool.submit(smollm2.decode, ids * 4)
        turns = 0
        while not long.done():
            time.sleep(0.001)
            turns += 1
    assert long.result() == "1" * 1_600_000
    assert turns > 5


def test_ids_and_text_outside_the_vocabulary(tiny):
    assert tiny.decode([42, 100_000]) == tiny.decode([42])
    with pytest.raises(ValueError, match="token ids"):
        tiny.decode([-1])
    with pytest.raises(ValueError, match="Unicode"):
        tiny.encode("\ud800")


# --- GGUF kinds that the oracle's small files do not hold


def _sentencepiece_metadata(**changes):
    """A vocabulary of letters and of words whose merges overlap, scored as SentencePiece does."""
    words = ["▁h", "he", "ll", "lo", "▁he", "llo", "▁hello", "el", "ell", "▁w", "or", "ld", "▁wor"]
    pieces = ["<unk>", "<s>", "</s>", *BYTE_PIECES, *words, *"▁helowrd"]
    types = [2, 3, 3] + [6] * 256 + [1] * (len(words) + 8)
    scores = [0.0] * 259 + [-float(i) for i in range(len(words))] + [-1e3 - i for i in range(8)]
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": pieces,
        "tokenizer.ggml.token_type": types,
        "tokenizer.ggml.scores": scores,
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
    } | {f"tokenizer.ggml.{key}": value for key, value in changes.items()}


def _merge_by_score(text, metadata):
    """SentencePiece BPE as specified: join the best-scored neighbours, leftmost first."""
    pieces = metadata["tokenizer.ggml.tokens"]
    ids = {piece: index for index, piece in enumerate(pieces)}
    scores = metadata["tokenizer.ggml.scores"]
    parts = list("▁" + text.replace(" ", "▁"))
    while True:
        joined = [
            (-scores[ids[a + b]], i) for i, (a, b) in enumerate(pairwise(parts)) if a + b in ids
        ]
        if not joined:
            break
        at = min(joined)[1]
        parts[at : at + 2] = [parts[at] + parts[at + 1]]
    out = []
    for part in parts:
        out += [ids[part]] if part in ids else [ids[f"<0x{b:02X}>"] for b in part.encode()]
    return out


@settings(deadline=None, max_examples=200)
@given(st.text(alphabet="helowrd é", max_size=30).filter(bool))
def test_sentencepiece_merges_follow_scores(text):
    metadata = _sentencepiece_metadata()
    backend = _SENTENCEPIECE
    ids = backend.encode(text, add_special_tokens=False).ids
    assert ids == _merge_by_score(text, metadata)
    assert backend.decode(ids) == text


_SENTENCEPIECE = build_tokenizer(_sentencepiece_metadata())


def test_sentencepiece_without_space_prefix():
    backend = build_tokenizer(_sentencepiece_metadata(add_space_prefix=False))
    ids = backend.encode("hello he", add_special_tokens=False)
    assert ids.tokens[0] == "he"
    assert backend.decode(ids.ids) == "hello he"


def test_sentencepiece_adds_bos_unless_told_otherwise(tmp_path):
    for add, prefix in ((None, (1,)), (False, ()), (True, (1,))):
        changes = {} if add is None else {"add_bos_token": add, "add_eos_token": True}
        metadata = _sentencepiece_metadata(**changes)
        tokenizer = load_tokenizer(write_gguf(tmp_path / f"{add}.gguf", extra=metadata))
        assert tokenizer.prefix == prefix
        assert tokenizer.suffix == (() if add is None else (2,))
        assert tokenizer.encode("he")[: len(prefix)] == list(prefix)
        assert tokenizer.eos_ids == (2,)


def test_ids_that_the_vocabulary_does_not_have_name_nothing(tmp_path):
    """2**32 - 1 is a file's way to say none; as BOS it made every text an invalid prompt."""
    none = dict.fromkeys(("bos_token_id", "eos_token_id", "padding_token_id"), 2**32 - 1)
    metadata = _sentencepiece_metadata(**none, add_bos_token=True)
    tokenizer = load_tokenizer(write_gguf(tmp_path / "a.gguf", extra=metadata))
    assert (tokenizer.prefix, tokenizer.eos_ids, tokenizer.bos_id) == ((), (2,), None)
    assert tokenizer.special_tokens == {"unk_token": "<unk>"}


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("ggml.bos_token_id", "x"),
        ("ggml.eot_token_id", [1]),
        ("ggml.padding_token_id", 1.5),
        ("ggml.tokens", 7),
        ("ggml.token_type", 7),
        ("chat_template", 7),
        ("chat_template.tool_use", ["x"]),
    ],
)
def test_metadata_of_a_wrong_type_is_named(tmp_path, key, value):
    extra = _sentencepiece_metadata() | {f"tokenizer.{key}": value}
    with pytest.raises(TokenizerError, match=r"a\.gguf: "):
        load_tokenizer(write_gguf(tmp_path / "a.gguf", extra=extra))


def _byte_level_metadata(pre):
    backend = json.loads(build_tokenizer(GgufFile(TINY).metadata).to_str())
    pieces = sorted(backend["model"]["vocab"], key=backend["model"]["vocab"].get)
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": pieces,
        "tokenizer.ggml.token_type": [3] * 3 + [1] * (len(pieces) - 3),
        "tokenizer.ggml.merges": GgufFile(TINY).metadata["tokenizer.ggml.merges"],
        "tokenizer.ggml.bos_token_id": 1,
    }


@pytest.mark.parametrize(
    ("pre", "words"),
    [
        ("gpt-2", ["It", "'s", " 12345", "Ġ!!"]),
        ("smollm", ["It", "'s", " ", "1", "2", "3", "4", "5", " !!"]),
        ("llama-bpe", ["It", "'s", " ", "123", "45", " !!"]),
        ("qwen2", ["It", "'s", " ", "1", "2", "3", "4", "5", " !!"]),
        ("tekken", ["It", "'s", " ", "1", "2", "3", "4", "5", " !!"]),
        ("smaug-bpe", ["It", "'s", " ", "123", "45", " !!"]),
        ("falcon3", ["It", "'s", " ", "123", "45", " !!"]),
        ("deepseek-coder", ["It", "'", "s", " ", "1", "2", "3", "4", "5", " !!"]),
        ("default", ["It", "'", "s", " ", "123", "45", " ", "!!"]),
    ],
)
def test_pre_tokenizers_split_as_named(pre, words):
    backend = build_tokenizer(_byte_level_metadata(pre))
    split = [word for word, _ in backend.pre_tokenizer.pre_tokenize_str("It's 12345 !!")]
    assert [word.replace("Ġ", " ") for word in split] == [word.replace("Ġ", " ") for word in words]


def test_unknown_kinds_are_named(tmp_path):
    with pytest.raises(GgufTokenizerError, match="pre-tokenizer 'poro-chat' is not supported"):
        build_tokenizer(_byte_level_metadata("poro-chat"))
    with pytest.raises(GgufTokenizerError, match="'rwkv' is not supported"):
        build_tokenizer({"tokenizer.ggml.model": "rwkv"})
    with pytest.raises(GgufTokenizerError, match=r"no tokenizer\.ggml\.tokens"):
        build_tokenizer({"tokenizer.ggml.model": "llama"})
    path = write_gguf(tmp_path / "a.gguf", extra={"tokenizer.ggml.model": "t5"})
    with pytest.raises(TokenizerError, match=r"a\.gguf: GGUF tokenizer 't5'"):
        load_tokenizer(path)


def test_a_gguf_without_tokenizer_has_none(tmp_path):
    assert load_tokenizer(write_gguf(tmp_path / "a.gguf")) is None
    (tmp_path / "b.gguf").write_bytes(b"GGUF")
    with pytest.raises(CheckpointError):
        load_tokenizer(tmp_path / "b.gguf")


# --- Hugging Face folders


def _backend():
    """Bytes alone, and three special tokens; BOS in front by its post-processor."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(models.BPE({c: i for i, c in enumerate(alphabet)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(t, special=True) for t in ("<s>", "</s>", "<pad>")])
    return backend


BOS, EOS, PAD = 256, 257, 258


def _with_bos(backend):
    backend.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", BOS)]
    )
    return backend


def _folder(path, backend=None, **files):
    (backend or _backend()).save(str(path / "tokenizer.json"))
    for name, content in files.items():
        (path / f"{name}.json").write_text(json.dumps(content))
    return path


def test_folder_roundtrip(tmp_path):
    config = {"bos_token": "<s>", "eos_token": {"content": "</s>"}, "pad_token": None}
    tokenizer = load_tokenizer(_folder(tmp_path, tokenizer_config=config))
    assert (tokenizer.bos_id, tokenizer.eos_ids, tokenizer.vocab_size) == (BOS, (EOS,), 259)
    assert tokenizer.special_tokens == {"bos_token": "<s>", "eos_token": "</s>"}
    ids = tokenizer.encode("naïve 🙂</s>")
    assert ids[-1] == EOS
    assert tokenizer.decode(ids) == "naïve 🙂"
    assert tokenizer.decode(ids, skip_special_tokens=False) == "naïve 🙂</s>"


@pytest.mark.parametrize(
    ("processed", "flags", "prefix", "suffix"),
    [
        (True, {}, (BOS,), ()),
        (True, {"add_bos_token": False}, (), ()),
        (True, {"add_bos_token": True}, (BOS,), ()),
        (False, {}, (), ()),
        (False, {"add_bos_token": True, "add_eos_token": True}, (BOS,), (EOS,)),
    ],
)
def test_bos_and_eos_of_a_folder(tmp_path, processed, flags, prefix, suffix):
    backend = _with_bos(_backend()) if processed else _backend()
    config = {"bos_token": "<s>", "eos_token": "</s>"} | flags
    tokenizer = load_tokenizer(_folder(tmp_path, backend, tokenizer_config=config))
    plain = tokenizer.encode("hi", add_special_tokens=False)
    assert tokenizer.encode("hi") == [*prefix, *plain, *suffix]


def test_truncation_and_padding_settings_do_not_apply(tmp_path):
    backend = _backend()
    backend.enable_truncation(4)
    backend.enable_padding(length=16)
    tokenizer = load_tokenizer(_folder(tmp_path, backend))
    assert len(tokenizer.encode("a" * 9)) == 9


def test_tokens_that_only_the_config_lists(tmp_path):
    added = {"259": {"content": "<tool>", "special": True}, "260": {"content": "<t>"}}
    config = {"added_tokens_decoder": added}
    tokenizer = load_tokenizer(_folder(tmp_path, tokenizer_config=config))
    assert tokenizer.encode("<tool><t>") == [259, 260]
    assert tokenizer.special_ids == {BOS, EOS, PAD, 259}
    wrong = _folder(tmp_path, added_tokens={"<x>": 300}, tokenizer_config={})
    with pytest.raises(TokenizerError, match="'<x>' has id 300"):
        load_tokenizer(wrong)


def test_flags_of_added_tokens(tmp_path):
    """tokenizer.json's stand, but for what tokenizer_config.json lists: as in transformers."""
    backend = _backend()
    backend.add_tokens([AddedToken("<e>", rstrip=True, normalized=False), AddedToken("<t>")])
    config = {"eos_token": "<e>"}
    tokenizer = load_tokenizer(_folder(tmp_path, backend, tokenizer_config=config))
    assert tokenizer.encode("<e>  <t>") == [259, 260]
    assert tokenizer.special_ids == {BOS, EOS, PAD, 259}
    config["added_tokens_decoder"] = {
        "259": {"content": "<e>", "normalized": False},
        "260": {"content": "<t>", "lstrip": True, "special": True},
        str(PAD): {"content": "<pad>", "special": False},
    }
    tokenizer = load_tokenizer(_folder(tmp_path, backend, tokenizer_config=config))
    assert tokenizer.encode("<e>a  <t>") == [259, tokenizer.encode("a")[0], 260]
    assert tokenizer.encode("<e> a")[1:] == tokenizer.encode(" a")
    assert tokenizer.special_ids == {BOS, EOS, PAD, 259, 260}
    assert tokenizer.decode([259, 260, PAD]) == ""  # a special token stays one


def test_special_tokens_map_fills_in(tmp_path):
    names = {"eos_token": "</s>", "bos_token": "<pad>"}
    config = {"bos_token": "<s>"}
    folder = _folder(tmp_path, special_tokens_map=names, tokenizer_config=config)
    tokenizer = load_tokenizer(folder)
    assert (tokenizer.bos_id, tokenizer.eos_ids) == (BOS, (EOS,))


def test_templates_of_a_folder(tmp_path):
    listed = [{"name": "default", "template": "D"}, {"name": "tool_use", "template": "T"}]
    folder = _folder(tmp_path, tokenizer_config={"chat_template": listed})
    chat = [{"role": "user", "content": "x"}]
    tools = [{"type": "function", "function": {"name": "f"}}]
    tokenizer = load_tokenizer(folder)
    assert tokenizer.render_chat(chat) == "D"
    assert tokenizer.render_chat(chat, tools=tools) == "T"
    assert tokenizer.render_chat(chat, template="tool_use") == "T"
    assert tokenizer.render_chat(chat, template="own {{ messages[0].content }}") == "own x"
    (folder / "chat_template.jinja").write_text("J")
    (folder / "additional_chat_templates").mkdir()
    (folder / "additional_chat_templates" / "rag.jinja").write_text("R")
    tokenizer = load_tokenizer(folder)
    assert tokenizer.render_chat(chat) == "J"
    assert tokenizer.render_chat(chat, template="rag") == "R"
    (folder / "chat_template.jinja").write_bytes(b"\xff")
    with pytest.raises(TokenizerError, match=r"chat_template\.jinja is not UTF-8"):
        load_tokenizer(folder)


@pytest.mark.parametrize("entry", [1, {"name": "default"}, {"name": "default", "template": 5}])
def test_bad_templates_and_added_tokens_are_refused(tmp_path, entry):
    folder = _folder(tmp_path, tokenizer_config={"chat_template": [entry]})
    with pytest.raises(TokenizerError, match=f"{tmp_path}.*chat_template has"):
        load_tokenizer(folder)
    folder = _folder(tmp_path, added_tokens={"<x>": None}, tokenizer_config={})
    with pytest.raises(TokenizerError, match=r"added_tokens\.json: '<x>' has id None"):
        load_tokenizer(folder)


def test_folders_without_tokenizer(tmp_path):
    assert load_tokenizer(tmp_path) is None
    (tmp_path / "tokenizer.model").write_bytes(b"\x0a")
    with pytest.raises(TokenizerError, match=r"tokenizer\.model: only tokenizer\.json is read"):
        load_tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(TokenizerError, match=r"tokenizer\.json"):
        load_tokenizer(tmp_path)
    _folder(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text("[]")
    with pytest.raises(TokenizerError, match=r"tokenizer_config\.json"):
        load_tokenizer(tmp_path)


def test_save_gives_the_same_tokenizer(tmp_path, tiny):
    metadata = _sentencepiece_metadata(add_eos_token=True) | {"tokenizer.chat_template": "C"}
    (tmp_path / "spm").mkdir()
    (tmp_path / "tiny").mkdir()
    spm = load_tokenizer(write_gguf(tmp_path / "a.gguf", extra=metadata))
    for tokenizer, name in ((spm, "spm"), (tiny, "tiny")):
        tokenizer.save(tmp_path / name)
        again = load_tokenizer(tmp_path / name)
        for text in ("hello world", "é <s> he", ""):
            assert again.encode(text) == tokenizer.encode(text)
            ids = tokenizer.encode(text)
            assert again.decode(ids) == tokenizer.decode(ids)
        assert again.templates == tokenizer.templates
        assert again.bos_id == tokenizer.bos_id
        assert np.isin(again.eos_ids, tokenizer.eos_ids).all()


class PanicException(BaseException):
    """As pyo3 raises it."""


def test_a_panic_of_the_library_is_an_ordinary_error(monkeypatch):
    tokenizer = load_tokenizer(TINY)

    def panic(*args, **kwargs):
        raise PanicException("index out of bounds")

    backend = SimpleNamespace(encode_batch_fast=panic, decode_batch=panic)
    monkeypatch.setattr(tokenizer, "backend", backend)
    for call in (lambda: tokenizer.encode("a"), lambda: tokenizer.decode([5])):
        with pytest.raises(RuntimeError, match="tokenizer failed: index out of bounds"):
            call()
