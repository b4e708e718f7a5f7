"""What ends a text and which sampling values are a model's own, from each kind of checkpoint."""

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
from family_data import FOLDER, config_of
from gguf_files import LLAMA, llama_tensors, write_gguf
from tokenizers import Tokenizer as Backend
from tokenizers import models

from octavo.model.checkpoint.generation import stop_and_defaults
from octavo.model.checkpoint.gguf import open_gguf
from octavo.model.checkpoint.load import load_checkpoint
from octavo.model.checkpoint.source import CheckpointError
from octavo.sampling.params import SamplingParams
from octavo.serve.tokenizer_files import load_tokenizer

CONFIG = replace(config_of("llama_tied"), eos_ids=(5,))


def folder(path, **files):
    for name, content in files.items():
        (path / f"{name}.json").write_text(json.dumps(content))
    return path


def test_end_ids_are_the_union_of_all_sources(tmp_path):
    files = {
        "generation_config": {"eos_token_id": [7, 5]},
        "tokenizer_config": {
            "eos_token": {"content": "<end>"},
            "added_tokens_decoder": {"9": {"content": "<end>"}},
        },
    }
    assert stop_and_defaults(folder(tmp_path, **files), CONFIG) == ((5, 7, 9), {})


def test_an_id_beyond_the_vocabulary_is_left_out(tmp_path):
    files = {"generation_config": {"eos_token_id": CONFIG.vocab_size}}
    assert stop_and_defaults(folder(tmp_path, **files), CONFIG)[0] == (5,)


@pytest.mark.parametrize("where", ["added_tokens", "vocab"])
def test_the_tokenizers_end_token_is_found_in_tokenizer_json(tmp_path, where):
    backend = {"model": {"vocab": {}}, "added_tokens": []}
    if where == "vocab":
        backend["model"]["vocab"]["</s>"] = 3
    else:
        backend["added_tokens"].append({"content": "</s>", "id": 3})
    files = {"special_tokens_map": {"eos_token": "</s>"}, "tokenizer": backend}
    assert stop_and_defaults(folder(tmp_path, **files), CONFIG)[0] == (3, 5)


def test_a_folder_without_any_of_the_files(tmp_path):
    assert stop_and_defaults(tmp_path, CONFIG) == ((5,), {})


@pytest.mark.parametrize(
    ("generation", "expected"),
    [
        (
            {"do_sample": True, "temperature": 0.6, "top_p": 0.9, "top_k": 64, "min_p": 0.1},
            {"temperature": 0.6, "top_p": 0.9, "top_k": 64, "min_p": 0.1},
        ),
        ({"temperature": 0.7, "repetition_penalty": 1.05}, None),
        (
            {"do_sample": False, "temperature": 0.7, "top_k": 5, "repetition_penalty": 1.1},
            {"temperature": 0.0, "repetition_penalty": 1.1},
        ),
        ({"max_new_tokens": 512}, {"max_tokens": 512}),
        ({"temperature": None, "bos_token_id": 1, "_from_model_config": True}, {}),
    ],
)
def test_sampling_defaults(tmp_path, generation, expected):
    files = {"generation_config": generation}
    found = stop_and_defaults(folder(tmp_path, **files), CONFIG)[1]
    assert found == (generation if expected is None else expected)
    SamplingParams(**found)


@pytest.mark.parametrize(
    ("generation", "message"),
    [
        ({"top_p": 1.5}, r"top_p is 1\.5, not in \[1e-06, 1\]"),
        ({"temperature": "hot"}, "temperature is 'hot', not a number"),
        ({"eos_token_id": "</s>"}, "eos_token_id is '</s>'"),
    ],
)
def test_bad_values_name_the_file(tmp_path, generation, message):
    with pytest.raises(CheckpointError, match=r"generation_config\.json.*" + message):
        stop_and_defaults(folder(tmp_path, generation_config=generation), CONFIG)


@pytest.mark.parametrize(
    "described",
    [
        {"eos_token": True},
        {"eos_token": [1]},
        {"eos_token": "</s>", "added_tokens_decoder": True},
        {"eos_token": "</s>", "added_tokens_decoder": {"1": None}},
        {"eos_token": "</s>", "added_tokens_decoder": {"x": {"content": "</s>"}}},
        {"eos_token": "</s>", "added_tokens_decoder": {"1": {"content": "a", "lstrip": "x"}}},
    ],
)
def test_bad_tokens_are_refused_by_loader_and_tokenizer(tmp_path, described):
    where = folder(tmp_path, tokenizer_config=described)
    with pytest.raises(CheckpointError, match=re.escape(str(tmp_path))):
        stop_and_defaults(where, CONFIG)
    Backend(models.BPE({"a": 0}, [])).save(str(where / "tokenizer.json"))
    with pytest.raises(CheckpointError, match=re.escape(str(tmp_path))):
        load_tokenizer(where)


@pytest.mark.parametrize("text", ["{", "[" * 100_000, '{"a": ' + "1" * 5000 + "}"])
def test_bad_json_names_the_file(tmp_path, text):
    (tmp_path / "generation_config.json").write_text(text)
    with pytest.raises(CheckpointError, match=r"generation_config\.json is not readable JSON"):
        stop_and_defaults(tmp_path, CONFIG)


def test_gguf_names_some_end_ids_and_control_tokens_the_others(tmp_path):
    tokens = ["<pad>", "</s>", "<|im_end|>", "<|eot_id|>", "x"]
    extra = {
        "tokenizer.ggml.eos_token_id": 4,
        "tokenizer.ggml.eot_token_id": 2,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [3, 3, 3, 1, 1],
    }
    path = write_gguf(tmp_path / "a.gguf", keys=LLAMA, tensors=llama_tensors(), extra=extra)
    for where in (path, open_gguf(path)):
        assert stop_and_defaults(where, CONFIG) == ((1, 2, 4, 5), {})
    assert load_checkpoint(path).eos_ids == (1, 2, 4)


@pytest.mark.parametrize(
    ("key", "value"),
    [("eos_token_id", "x"), ("eot_token_id", [1]), ("token_type", 7), ("tokens", 7)],
)
def test_gguf_metadata_of_a_wrong_type_names_file_and_key(tmp_path, key, value):
    extra = {"tokenizer.ggml.tokens": ["x"], f"tokenizer.ggml.{key}": value}
    path = write_gguf(tmp_path / "a.gguf", keys=LLAMA, tensors=llama_tensors(), extra=extra)
    with pytest.raises(CheckpointError, match=rf"a\.gguf: tokenizer\.ggml\.{key} is"):
        stop_and_defaults(path, CONFIG)


def test_the_loader_reports_them(tmp_path):
    for name in ("config.json", "model.safetensors"):
        (tmp_path / name).symlink_to(Path(FOLDER / "llama_tied" / name).resolve())
    folder(tmp_path, generation_config={"eos_token_id": [3, 4], "do_sample": True, "top_k": 9})
    checkpoint = load_checkpoint(tmp_path)
    assert {3, 4} <= set(checkpoint.eos_ids)
    assert checkpoint.generation == {"top_k": 9}
