"""Gemma 3 270M (GGUF Q4_K_M) on the serving graph in float32; `make test-gemma` fetches it."""

import pytest
from real_models import RealModel, gemma_path

from octavo.serve.tokenizer_files import load_tokenizer

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def model():
    return RealModel(gemma_path(), "gemma-3-270m-q4_k_m")


def test_gemma_tokenisation(model):
    tokenizer = load_tokenizer(gemma_path())
    for case in model.reference["tokenisation"]:
        assert tokenizer.encode(case["text"], add_special_tokens=False) == case["ids"]
        assert tokenizer.decode(case["ids"], skip_special_tokens=False) == case["decoded"]
    assert tokenizer.encode("") == [tokenizer.bos_id]


def test_gemma_greedy_text(model):
    model.assert_greedy()


def test_gemma_perplexity(model):
    model.assert_perplexity()
