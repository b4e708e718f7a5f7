"""The tiny reference checkpoints under tests/data/families and what transformers says of them."""

import json
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np

from octavo.model.checkpoint.assemble import assemble
from octavo.model.checkpoint.hf import HFSource
from octavo.model.families import config_from_hf

FOLDER = Path(__file__).parent / "data" / "families"
NAMES = ("llama_untied", "llama_tied", "llama_yarn", "mistral", "qwen2", "qwen3", "gemma3_text")
TOLERANCE = 1e-4
"""Largest error of a logit, in standard deviations of the logits. The references allow 2e-3."""


def config_of(name, file="config.json"):
    return config_from_hf(json.loads((FOLDER / name / file).read_text()))


@cache
def params_of(name):
    return assemble(HFSource(FOLDER / name), config_of(name), None, progress=False)


@dataclass(frozen=True)
class Prompt:
    """Token ids, logits at each, the greedy continuation and the logits that chose it."""

    ids: list[int]
    logits: np.ndarray
    greedy: list[int]
    greedy_logits: np.ndarray

    @property
    def all_logits(self):
        """Logits of every position of prompt + continuation but its last token."""
        return np.concatenate([self.logits, self.greedy_logits[1:]])


@cache
def reference_of(name):
    """The three prompts (1, 17 and 70 tokens), and the standard deviation of their logits."""
    with np.load(FOLDER / name / "reference.npz") as data:
        prompts = tuple(
            Prompt(
                data[f"prompt{i}_ids"].tolist(),
                data[f"prompt{i}_logits"],
                data[f"prompt{i}_greedy"].tolist(),
                data[f"prompt{i}_greedy_logits"],
            )
            for i in range(3)
        )
        return prompts, float(data["logit_std"])
