"""SmolLM2-135M-Instruct, the packaged Q4_1 file, on the serving graph in float32."""

import pytest
from real_models import RealModel, smollm2_path

pytestmark = pytest.mark.smollm2


@pytest.fixture(scope="module")
def model():
    return RealModel(smollm2_path(), "smollm2-135m-instruct-q4_1")


def test_greedy_text(model):
    model.assert_greedy()


def test_perplexity(model):
    model.assert_perplexity()


def test_stops_where_its_chat_turns_end(model):
    tokens = {2: "<|im_end|>", 0: "<|endoftext|>"}
    assert set(model.checkpoint.eos_ids) == set(tokens)
